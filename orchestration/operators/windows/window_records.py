"""Which of the records that arrive count in windows, and why others do not."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.columns.hidden_columns import AGAIN, BEHIND, EVENT_TIME
from dagster_adjunct.orchestration.operators.event_times.event_time import FIRST, LAST
from dagster_adjunct.orchestration.operators.event_times.made_records import place_in
from dagster_adjunct.orchestration.operators.windows.window_bounds import end_of, start_of
from dagster_adjunct.orchestration.operators.windows.window_kinds import Session, Tumbling, longest, micros
from dagster_adjunct.orchestration.operators.windows.window_rows import TIME, Windows, micros_of
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.streams.interface.stream_system import TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from dagster_adjunct.orchestration.operators.spec.compiling import BatchContext

WHY = "__why"
"""Why a record counts in no window: one of the words below; null where it does."""
LATE, NULL_TIME, NULL_KEY, READ_AGAIN, DELETED = "late", "null time", "null key", "again", "tombstone"
PARTLY = "__partly"
"""Whether a record that counts is too late for some of its sliding windows."""
ASIDE = (LATE, NULL_TIME, NULL_KEY)
"""Of which the stream of late records tells."""
PLACE = "place$"
"""A text that is different for each record, and sorts them by their positions."""
BEGIN = "__begin"
"""The begin of a window that a record is in; records of another window have one of their own."""
_LIMIT, _FIRST, _LAST, _START = "__limit", "__first_start", "__last_start", "__start"


def judged(frame: DataFrame, windows: Windows, before: datetime | None) -> DataFrame:
    """Return the records with TIME, WHY and PARTLY; `before` is the watermark that the batch was begun with.

    A record's own partition decides whether it is late, up to the record alone: however batches were cut, it is the
    same. `before` is above that only where idle partitions were not waited for.
    """
    from pyspark.sql import functions as F

    time = _countable(F.unix_micros(EVENT_TIME), windows)
    limit = F.greatest(F.unix_micros(BEHIND), F.lit(micros_of(before)).cast("bigint"))
    frame = frame.withColumns({TIME: time, _LIMIT: limit})
    lateness = micros(windows.lateness)
    partly: Column = F.lit(False)
    if isinstance(windows.kind, Session):
        late = F.col(TIME) < F.col(_LIMIT) - lateness
    else:
        frame = with_starts(frame, windows)
        frame = frame.withColumn(TIME, F.when(F.col(_FIRST) >= FIRST, F.col(TIME)))
        late = end_of(F.col(_LAST), windows.kind) + lateness <= F.col(_LIMIT)
        partly = ~late & (end_of(F.col(_FIRST), windows.kind) + lateness <= F.col(_LIMIT))
    reasons = [(F.col(AGAIN), READ_AGAIN)] if AGAIN in frame.columns else []
    null_key = F.lit(False)
    for name in windows.by:
        null_key = null_key | column(name).isNull()
    reasons += [(F.col(TOMBSTONE), DELETED), (F.col(TIME).isNull(), NULL_TIME), (null_key, NULL_KEY), (late, LATE)]
    why = F.coalesce(*[F.when(condition, F.lit(reason)) for condition, reason in reasons])
    return frame.withColumns({WHY: why, PARTLY: why.isNull() & F.coalesce(partly, F.lit(False))})


def _countable(time: Column, windows: Windows) -> Column:
    """Return the times whose windows end, and expire, before the year 10000: nothing can hold a later time."""
    from pyspark.sql import functions as F

    return F.when(time <= LAST - micros(longest(windows.kind)) - micros(windows.lateness), time)


def counted(frame: DataFrame, batch: BatchContext) -> DataFrame:
    """Return the records that count in windows, with PLACE and without what was only needed to judge them."""
    from pyspark.sql import functions as F

    return frame.filter(F.col(WHY).isNull()).withColumn(PLACE, place_in(frame, batch))


def in_windows(records: DataFrame, windows: Windows) -> DataFrame:
    """Return a record for each fixed window of one size that it is not too late for, with the window's BEGIN."""
    from pyspark.sql import functions as F

    assert not isinstance(windows.kind, Session)
    if isinstance(windows.kind, Tumbling):
        return records.withColumn(BEGIN, F.timestamp_micros(_LAST))
    every = micros(windows.kind.every)
    limit = F.coalesce(F.col(_LIMIT) - micros(windows.kind.size) - micros(windows.lateness), F.col(_FIRST) - 1)
    starts = F.filter(F.sequence(_FIRST, _LAST, F.lit(every)), lambda start: start > limit)
    by_window = records.withColumn(_START, F.explode(starts))
    return by_window.withColumn(BEGIN, F.timestamp_micros(_START))


def with_starts(frame: DataFrame, windows: Windows) -> DataFrame:
    """Return the records with the begins of the first and the last window that they are in."""
    from pyspark.sql import functions as F

    assert not isinstance(windows.kind, Session)
    if isinstance(windows.kind, Tumbling):
        begin = start_of(F.col(TIME), windows.kind)
        return frame.withColumns({_FIRST: begin, _LAST: begin})
    size, every = micros(windows.kind.size), micros(windows.kind.every)
    last = F.col(TIME) - F.pmod(F.col(TIME), F.lit(every))
    before = F.col(TIME) - size
    first = before - F.pmod(before, F.lit(every)) + every
    return frame.withColumns({_FIRST: first, _LAST: last})
