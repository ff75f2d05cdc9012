"""The columns that carry a record's position through every operator, beside the application's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.streams.interface.stream_system import POSITION, RECORD_META

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TASK = "__task"
"""The number of the task that a broadcast input's copy of the record is for."""
BRANCH = "__branch"
"""Which input of an operator with several the record came from: "1", or "1/0" where that had several, too."""


ORIGIN = "__origin"
"""The stream that the record's position is in, where an operator has brought records of several together."""


def carried(frame: DataFrame) -> list[str]:
    """Return the hidden columns that records have and that an operator has to hand on."""
    return [*RECORD_META, *(name for name in (*POSITION, TASK, BRANCH, ORIGIN) if name in frame.columns)]


def tie_breakers(frame: DataFrame) -> tuple[str, ...]:
    """Return the columns that order records of one partition and offset, so that a repeated batch sends the same."""
    return tuple(name for name in (TASK, BRANCH) if name in frame.columns)
