"""The rows that windows are kept as, and the algebra that all kinds of windows share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.batch_context import BatchContext, Watermarks
from dagster_adjunct.orchestration.operators.columns import BEHIND, EVENT_TIME, REPLAYED
from dagster_adjunct.orchestration.operators.event_time import MAX_MICROS, MIN_MICROS, stored_position_key
from dagster_adjunct.orchestration.operators.windows.aggregates import (
    Aggregate,
    Aggregation,
    Kind,
    Mean,
    Session,
    Sum,
    Tumbling,
    max_duration_after,
    to_micros,
)
from dagster_adjunct.orchestration.operators.windows.bounds import window_end, window_start
from dagster_adjunct.orchestration.operators.windows.exact_sums import ExactSum, Partial
from dagster_adjunct.resources.schemas.column_sql import F, named_column, quote_name
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.streams.system import TOMBSTONE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


START, END = "window_start", "window_end"
EXPIRES = "expires$"
"""When a row is not needed any more: the end of its window and the lateness that is allowed."""
RECORDS = "records$"
"""How many records are in the window."""
TOUCHED, CLOSING, ABSORBED = "__touched", "__closing", "__absorbed"
"""Whether this batch has brought records of the window; whether it closes it; what a session has taken in."""
TIME = "__micros"
"""The event time of a record, in microseconds."""
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a kind by the columns `by`, whose types in `types` are known, as those of the records' columns."""

    kind: Kind
    by: tuple[str, ...]
    aggregates: tuple[tuple[str, Aggregation], ...]
    lateness: timedelta
    types: Mapping[str, str]

    @property
    def partials(self) -> tuple[Partial, ...]:
        """The columns of a window's row that are made of its records."""
        counted = Partial(
            RECORDS, "bigint", "count(1)", f"sum({quote_name(RECORDS)})", "coalesce({0}, 0L) + coalesce({1}, 0L)"
        )
        return (
            counted,
            *(partial for name, made in self.aggregates for partial in made.partials(name, self.kind_of(made))),
        )

    @property
    def functions(self) -> tuple[tuple[str, Aggregate], ...]:
        """The functions of users among the aggregates."""
        return tuple((name, made) for name, made in self.aggregates if isinstance(made, Aggregate))

    @property
    def schema(self) -> Schema:
        """The columns of the rows that are kept."""
        keys = [Field(name, self.types[name]) for name in self.by]
        times = [Field(name, "timestamp") for name in (START, END)]
        return Schema(
            (
                *keys,
                *times,
                *(Field(partial.name, partial.type) for partial in self.partials),
                Field(EXPIRES, "timestamp"),
            )
        )

    @property
    def ordered(self) -> bool:
        """Whether some value depends on the order in which records are added."""
        return any(partial.ordered for partial in self.partials)

    @property
    def units(self) -> str:
        """Return in words the units that sums of decimals are kept in; nothing for sums of integers."""
        scales = {
            name: ExactSum(name, self.kind_of(made)).scale
            for name, made in self.aggregates
            if isinstance(made, Sum | Mean)
        }
        return "".join(f"; {name} in units of 1E-{scale}" for name, scale in scales.items() if scale)

    def kind_of(self, made: Aggregation) -> str:
        """Return the type of the column that a value is made of; "" for records, or all of their columns."""
        return self.types[made.columns[0]] if made.columns else ""


def epoch_micros(moment: datetime | None) -> int | None:
    """Return a moment as microseconds since 1970."""
    if moment is None:
        return None
    return to_micros((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)) - _BEGINNING)


def aggregate_records(
    frame: DataFrame, by: Sequence[str], partials: Sequence[Partial], order: Sequence[str], *more: Column
) -> DataFrame:
    """Return a row of partial values, and of `more` aggregates, for each of the groups `by` of records.

    They are added in the order of `order` where that makes a difference.
    """
    made = [F.expr(partial.made).cast(partial.type).alias(partial.name) for partial in partials]
    return _aggregated(frame, by, partials, order, [*more, *made])


def merge_partials(
    frame: DataFrame, by: Sequence[str], partials: Sequence[Partial], order: Sequence[str], *more: Column
) -> DataFrame:
    """Return the same for each of the groups `by` of rows that have partial values."""
    merged = [F.expr(partial.merged).cast(partial.type).alias(partial.name) for partial in partials]
    return _aggregated(frame, by, partials, order, [*more, *merged])


def _aggregated(
    frame: DataFrame, by: Sequence[str], partials: Sequence[Partial], order: Sequence[str], made: Sequence[Column]
) -> DataFrame:
    names = [named_column(name) for name in by]
    if any(partial.ordered for partial in partials):  # a task adds up rows as they come
        frame = frame.sortWithinPartitions(*names, *map(named_column, order))
    return frame.groupBy(*names).agg(*made)


def join_old_and_new(left: DataFrame, right: DataFrame, on: Sequence[str]) -> tuple[DataFrame, list[Column]]:
    """Return all rows of both sides, a pair in one, and the columns `on` of either; the sides are "old" and "new".

    They lie as both lay: Spark knows nothing any more of where rows of a union lie.
    """
    pairs = [F.col(f"old.{quote_name(name)}") == F.col(f"new.{quote_name(name)}") for name in on]
    condition = pairs[0]
    for pair in pairs[1:]:
        condition = condition & pair
    both = left.alias("old").join(right.hint("merge").alias("new"), condition, "full")
    return both, [F.coalesce(f"old.{quote_name(name)}", f"new.{quote_name(name)}").alias(name) for name in on]


def mark_windows(rows: DataFrame, windows: Windows, after: datetime | None) -> DataFrame:
    """Return the rows that a batch has changed or closes, with EXPIRES and CLOSING; `after` is its watermark.

    EXPIRES of `rows` is as it was kept, null for a new window. It never gets earlier, also where less lateness is
    allowed since: or a window would be closed in one batch, and again in another by what was kept of it before.
    """
    kept_until = F.greatest(named_column(EXPIRES), F.timestamp_micros(F.unix_micros(END) + to_micros(windows.lateness)))
    reached = epoch_micros(after)
    closing = F.lit(False) if reached is None else F.unix_micros(named_column(EXPIRES)) <= F.lit(reached)
    marked = rows.withColumn(EXPIRES, kept_until).withColumn(CLOSING, closing)
    return marked.filter(F.col(TOUCHED) | F.col(CLOSING))


EXCLUSION = "__why"
"""Why a record counts in no window: one of the words below; null where it does."""
LATE, NULL_TIME, NULL_KEY, REPLAYED_REASON, DELETED = "late", "null time", "null key", "again", "tombstone"
PARTLY_LATE = "__partly"
"""Whether a record that counts is too late for some of its sliding windows."""
LEFT_OUT = (LATE, NULL_TIME, NULL_KEY)
"""Of which the stream of late records tells."""
POSITION = "place$"
"""A text that is different for each record, and sorts them by their positions."""
BEGIN = "__begin"
"""The begin of a window that a record is in; records of another window have one of their own."""
_LIMIT, _FIRST, _LAST, _START = "__limit", "__first_start", "__last_start", "__start"


def classify_window_records(frame: DataFrame, windows: Windows, before: datetime | None) -> DataFrame:
    """Return the records with TIME, WHY and PARTLY; `before` is the watermark that the batch was begun with.

    A record's own partition decides whether it is late, up to the record alone: however batches were cut, it is the
    same. `before` is above that only where idle partitions were not waited for.
    """
    time = _representable(F.unix_micros(EVENT_TIME), windows)
    limit = F.greatest(F.unix_micros(BEHIND), F.lit(epoch_micros(before)).cast("bigint"))
    frame = frame.withColumns({TIME: time, _LIMIT: limit})
    lateness = to_micros(windows.lateness)
    partly: Column = F.lit(False)
    if isinstance(windows.kind, Session):
        late = F.col(TIME) < F.col(_LIMIT) - lateness
    else:
        frame = add_window_starts(frame, windows)
        frame = frame.withColumn(TIME, F.when(F.col(_FIRST) >= MIN_MICROS, F.col(TIME)))
        late = window_end(F.col(_LAST), windows.kind) + lateness <= F.col(_LIMIT)
        partly = ~late & (window_end(F.col(_FIRST), windows.kind) + lateness <= F.col(_LIMIT))
    reasons = [(F.col(REPLAYED), REPLAYED_REASON)] if REPLAYED in frame.columns else []
    null_key = F.lit(False)
    for name in windows.by:
        null_key = null_key | named_column(name).isNull()
    reasons += [(F.col(TOMBSTONE), DELETED), (F.col(TIME).isNull(), NULL_TIME), (null_key, NULL_KEY), (late, LATE)]
    why = F.coalesce(*[F.when(condition, F.lit(reason)) for condition, reason in reasons])
    return frame.withColumns({EXCLUSION: why, PARTLY_LATE: why.isNull() & F.coalesce(partly, F.lit(False))})


def _representable(time: Column, windows: Windows) -> Column:
    """Return the times whose windows end, and expire, before the year 10000: nothing can hold a later time."""
    return F.when(time <= MAX_MICROS - to_micros(max_duration_after(windows.kind)) - to_micros(windows.lateness), time)


def select_counted(frame: DataFrame, batch: BatchContext) -> DataFrame:
    """Return the records that count in windows, with PLACE and without what was only needed to judge them."""
    return frame.filter(F.col(EXCLUSION).isNull()).withColumn(POSITION, stored_position_key(frame, batch))


def assign_windows(records: DataFrame, windows: Windows) -> DataFrame:
    """Return a record for each fixed window of one size that it is not too late for, with the window's BEGIN."""
    assert not isinstance(windows.kind, Session)
    if isinstance(windows.kind, Tumbling):
        return records.withColumn(BEGIN, F.timestamp_micros(_LAST))
    every = to_micros(windows.kind.every)
    limit = F.coalesce(F.col(_LIMIT) - to_micros(windows.kind.size) - to_micros(windows.lateness), F.col(_FIRST) - 1)
    starts = F.filter(F.sequence(_FIRST, _LAST, F.lit(every)), lambda start: start > limit)
    by_window = records.withColumn(_START, F.explode(starts))
    return by_window.withColumn(BEGIN, F.timestamp_micros(_START))


def add_window_starts(frame: DataFrame, windows: Windows) -> DataFrame:
    """Return the records with the begins of the first and the last window that they are in."""
    assert not isinstance(windows.kind, Session)
    if isinstance(windows.kind, Tumbling):
        begin = window_start(F.col(TIME), windows.kind)
        return frame.withColumns({_FIRST: begin, _LAST: begin})
    size, every = to_micros(windows.kind.size), to_micros(windows.kind.every)
    last = F.col(TIME) - F.pmod(F.col(TIME), F.lit(every))
    before = F.col(TIME) - size
    first = before - F.pmod(before, F.lit(every)) + every
    return frame.withColumns({_FIRST: first, _LAST: last})


def update_fixed_windows(kept: DataFrame, records: DataFrame, windows: Windows, marks: Watermarks) -> DataFrame:
    """Return the rows of the windows that the batch has changed or closes.

    `kept` are the rows of before it, `records` those that count. Where both lie in the partitions of the same columns
    of the key, nothing moves.
    """
    assert not isinstance(windows.kind, Session)
    key = (*windows.by, START)
    new = aggregate_records(assign_windows(records, windows), (*windows.by, BEGIN), windows.partials, (POSITION,))
    both, keys = join_old_and_new(kept, new.withColumnRenamed(BEGIN, START), key)
    added = [
        F.expr(partial.added.format(f"old.{quote_name(partial.name)}", f"new.{quote_name(partial.name)}"))
        .cast(partial.type)
        .alias(partial.name)
        for partial in windows.partials
    ]
    touched = F.col(f"new.{quote_name(RECORDS)}").isNotNull().alias(TOUCHED)
    rows = both.select(*keys, *added, touched, F.col(f"old.{quote_name(EXPIRES)}").alias(EXPIRES))
    end = F.timestamp_micros(window_end(F.unix_micros(START), windows.kind))
    return mark_windows(rows.withColumn(END, end), windows, marks.after)


_NUMBER, _BEGINS, _ITEMS, _KEPT, _FIRST_OF_SESSION = "__number", "__begins", "__items", "__kept", "__first"
_CLOSES = "__closes"


def build_session_runs(records: DataFrame, windows: Windows) -> DataFrame:
    """Return the sessions that the batch's records, those that count, make by themselves; they have no EXPIRES yet."""
    from pyspark.sql import Window

    assert isinstance(windows.kind, Session)
    gap = to_micros(windows.kind.gap)
    order = (TIME, POSITION)
    before = F.lag(TIME).over(Window.partitionBy(*map(named_column, windows.by)).orderBy(*map(named_column, order)))
    numbered = _number_sessions(records, before.isNull() | (F.col(TIME) - before >= gap), windows, order)
    times = (
        F.timestamp_micros(F.min(TIME)).alias(START),
        F.timestamp_micros(F.max(TIME) + gap).alias(END),
    )
    runs = aggregate_records(numbered, (*windows.by, _NUMBER), windows.partials, order, *times)
    return runs.withColumn(EXPIRES, F.lit(None).cast("timestamp"))


def union_sessions(kept: DataFrame, runs: DataFrame, windows: Windows, marks: Watermarks) -> DataFrame:
    """Return the open sessions of before with `runs`, those that the batch's records make by themselves.

    Of `kept`, those of before, only the sessions of keys that have records, or of which one closes. Each is a row of
    its own, of which Spark puts on disk what memory has no room for: one key may have most of them. Only where both
    are put together is not known any more where rows lie.
    """
    from pyspark.sql import Window

    asked = F.col(f"new.{quote_name(windows.by[0])}").isNotNull()
    reached = epoch_micros(marks.after)
    if reached is not None:
        first = F.min(named_column(EXPIRES)).over(Window.partitionBy(*map(named_column, windows.by)))
        kept = kept.withColumn(_CLOSES, F.unix_micros(first) <= reached)
        asked = asked | F.col(f"old.{_CLOSES}")
    pairs = [F.col(f"old.{quote_name(name)}") == F.col(f"new.{quote_name(name)}") for name in windows.by]
    keys = runs.select(*map(named_column, windows.by)).distinct()
    known = kept.alias("old").join(keys.hint("merge").alias("new"), reduce(and_, pairs), "left").filter(asked)
    names = (*windows.by, START, END, EXPIRES, *(partial.name for partial in windows.partials))
    before = known.select(*[F.col(f"old.{quote_name(name)}") for name in names], F.lit(True).alias(_KEPT))
    return before.union(runs.select(*map(named_column, names), F.lit(False).alias(_KEPT)))


def merge_sessions(rows: DataFrame, windows: Windows, marks: Watermarks) -> DataFrame:
    """Return the sessions that the batch has changed or closes, of `sessions_side_by_side`.

    ABSORBED has START and EXPIRES of the sessions of before that are part of one with another begin now.
    """
    from pyspark.sql import Window

    order = (START, _KEPT)
    before = (
        Window.partitionBy(*map(named_column, windows.by)).orderBy(*order).rowsBetween(Window.unboundedPreceding, -1)
    )
    reach = F.max(END).over(before)
    numbered = _number_sessions(rows, reach.isNull() | (F.col(START) >= reach), windows, order)
    was = F.when(F.col(_KEPT), F.struct(F.col(START), named_column(EXPIRES)))
    touched = F.bool_or(~F.col(_KEPT)).alias(TOUCHED)
    times = (F.min(START).alias(_FIRST_OF_SESSION), F.max(END).alias(END), F.max(named_column(EXPIRES)).alias(EXPIRES))
    sessions = merge_partials(
        numbered, (*windows.by, _NUMBER), windows.partials, order, *times, touched, F.collect_list(was).alias(_ITEMS)
    )
    others = F.filter(_ITEMS, lambda item: item[START] != F.col(_FIRST_OF_SESSION))
    made = sessions.withColumn(ABSORBED, others).drop(_ITEMS, _NUMBER).withColumnRenamed(_FIRST_OF_SESSION, START)
    return mark_windows(made, windows, marks.after)


def _number_sessions(frame: DataFrame, begins: Column, windows: Windows, order: Sequence[str]) -> DataFrame:
    """Return the rows of each key with the number of the session that they are in."""
    from pyspark.sql import Window

    so_far = Window.partitionBy(*map(named_column, windows.by)).orderBy(*map(named_column, order))
    so_far = so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    marked = frame.withColumn(_BEGINS, begins.cast("int"))
    return marked.withColumn(_NUMBER, F.sum(_BEGINS).over(so_far)).drop(_BEGINS)
