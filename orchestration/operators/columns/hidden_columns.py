"""The columns that carry a record's position through every operator, beside the application's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.streams.interface.stream_system import POSITION, RECORD_META

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TASK = "__task"
"""The number of the task that a broadcast input's copy of the record is for."""
BRANCH = "__branch"
"""Which input of an operator with several the record came from: "1", or "1/0" where that had several, too."""
ORDINAL = "__ordinal"
"""Which of the records that were made of one it is: "0000000002", or "0000000002/0000000000" of those of that one."""
ORIGIN = "__origin"
"""The stream that the record's position is in, where an operator has brought records of several together."""
EVENT_TIME = "__event_time"
"""When what the record tells of happened, as its input stream is declared; null where the record does not say."""
BEHIND = "__behind"
"""The watermark of the record's source partition when it arrived, where its time is below that; null elsewhere."""
AGAIN = "__again"
"""Whether the application has read the record before: a startpoint went back. What keeps state leaves it out."""
UNSENT = (ORIGIN, EVENT_TIME, BEHIND, AGAIN)
"""What is known of a record in its batch only."""
_DIGITS = 10
_MORE = (*POSITION, TASK, BRANCH, ORDINAL, ORIGIN, EVENT_TIME, BEHIND, AGAIN)


def carried(frame: DataFrame) -> list[str]:
    """Return the hidden columns that records have and that an operator has to hand on."""
    return [*RECORD_META, *(name for name in _MORE if name in frame.columns)]


def tie_breakers(frame: DataFrame) -> tuple[str, ...]:
    """Return the columns that order records of one partition and offset, so that a repeated batch sends the same."""
    return tuple(name for name in (TASK, BRANCH, ORDINAL) if name in frame.columns)


def ordinal(frame: DataFrame, number: Column) -> Column:
    """Return the ordinals of records that are made of those of `frame`; `number` counts them within one, from 0.

    They sort as text in the order of the numbers, those of the record that they are made of first.
    """
    from pyspark.sql import functions as F

    digits = F.lpad(number.cast("string"), _DIGITS, "0")
    return F.concat_ws("/", F.col(ORDINAL), digits) if ORDINAL in frame.columns else digits


def ordinal_text(before: str | None, number: int) -> str:
    """Return what `ordinal` gives for one record, of the ordinal of the one that it is made of."""
    digits = f"{number:0{_DIGITS}d}"
    return digits if before is None else f"{before}/{digits}"
