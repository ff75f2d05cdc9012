"""Assigns records to windows, and updates the windows' stored rows with them.

A user's function is called in a task with all records of a window, which are stored until it
closes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, NamedTuple, cast

from dagster_adjunct.orchestration.operators.columns import (
    AT,
    BEHIND,
    EVENT_TIME,
    EXPIRES,
    RECORD,
    STATE_COLUMNS,
    STORED_BEHIND,
)
from dagster_adjunct.orchestration.operators.event_times import MAX_MICROS, MIN_MICROS
from dagster_adjunct.orchestration.operators.functions import pickle_function, to_typed_array
from dagster_adjunct.orchestration.operators.made_records import (
    EXCLUSION,
    LATE,
    NULL_KEY,
    NULL_TIME,
    exclusion_column,
)
from dagster_adjunct.orchestration.operators.operator import Watermarks
from dagster_adjunct.orchestration.operators.windows.aggregates import (
    Aggregate,
    Aggregation,
    Partial,
    count_partial,
)
from dagster_adjunct.orchestration.operators.windows.kinds import (
    Kind,
    Session,
    Tumbling,
    max_duration_after,
    to_micros,
    window_end,
    window_start,
)
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F, pa
from dagster_adjunct.resources.schemas.schema import Schema, named_column, quote_name
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark.tasks import apply_in_arrow, encode_task_errors
from dagster_adjunct.resources.times import to_microseconds
from dagster_adjunct.resources.user_code import function_failed_error

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


START = "window_start"
END = "window_end"
RECORDS = "records$"
"""Column of a stored row: the number of records in the window."""
TOUCHED = "__touched"
CLOSING = "__closing"
ABSORBED = "__absorbed"
"""Hidden columns of a window's row: whether the batch has records of it, whether the batch closes
it, and the stored sessions that were merged into it."""
TIME = "__micros"
"""The event time of a record, in microseconds."""


@dataclass(frozen=True, slots=True)
class Windows:
    """A `Window` operator's windows of a kind by the columns `by`; `types` are those of the
    records' columns.

    Where `by` and `aggregates` name a value inside a column by its path, the records have it in a
    column called by that path. `paths` has, by path, the name that the value gets in results and
    for users' functions.
    """

    kind: Kind
    by: tuple[str, ...]
    aggregates: tuple[tuple[str, Aggregation], ...]
    lateness: timedelta
    types: Mapping[str, str]
    paths: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> list[str]:
        """The names of the columns that records have, without those for paths."""
        return [name for name in self.types if name not in self.paths]

    @property
    def keys(self) -> list[Column]:
        """The columns `by`, for DataFrames of records or rows."""
        return [named_column(name) for name in self.by]

    @property
    def partials(self) -> tuple[Partial, ...]:
        """The partial values in a window's row: the number of records and those of all
        aggregates.
        """
        values = [count_partial(RECORDS, None)]
        for name, aggregate in self.aggregates:
            values += aggregate.partials(name, self.type_of(aggregate))
        return tuple(values)

    @property
    def functions(self) -> tuple[tuple[str, Aggregate], ...]:
        """The users' functions among the aggregates."""
        functions = []
        for name, aggregate in self.aggregates:
            if isinstance(aggregate, Aggregate):
                functions.append((name, aggregate))
        return tuple(functions)

    @property
    def schema(self) -> Schema:
        """The columns of the windows' stored rows."""
        columns = {name: self.types[name] for name in self.by}
        columns |= {START: "timestamp", END: "timestamp"}
        columns |= {partial.name: partial.type for partial in self.partials}
        return Schema.of(columns | {EXPIRES: "timestamp"})

    @property
    def units(self) -> str:
        """The units of those stored values whose unit depends on the type of the column: ";
        spent in units of 1E-2".
        """
        units = ""
        for name, aggregate in self.aggregates:
            unit = aggregate.unit(self.type_of(aggregate))
            if unit:
                units += f"; {name} {unit}"
        return units

    def type_of(self, aggregate: Aggregation) -> str:
        """Return the type of the (first) column that an aggregate is computed from; "" if it
        names no column.
        """
        if not aggregate.columns:
            return ""
        first, *_ = aggregate.columns
        return self.types[first]


def epoch_micros(moment: datetime | None) -> int | None:
    """Return a time, in UTC if it has no zone, as microseconds since 1970; None for None."""
    if moment is None:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return to_microseconds(moment)


def aggregate_rows(
    frame: DataFrame,
    by: Sequence[str],
    windows: Windows,
    order: Sequence[str],
    *more: Column,
    partial: bool = False,
) -> DataFrame:
    """Return a row for each group of records with equal columns `by`: its partial values, and the
    aggregates `more`.

    With `partial`, `frame` has rows with partial values instead of records. Within a group, records
    or rows are added in the order of the columns `order`, if the order makes a difference.
    """
    names = list(map(named_column, by))
    values = []
    for value in windows.partials:
        text = value.merged if partial else value.made
        values.append(F.expr(text).cast(value.type).alias(value.name))
    if any(value.ordered for value in windows.partials):
        # A task adds rows in the order in which it gets them.
        frame = frame.sortWithinPartitions(*names, *map(named_column, order))
    return frame.groupBy(*names).agg(*more, *values)


def column_of(frame: str, name: str) -> Column:
    """Return a column of an aliased frame."""
    return F.col(f"{frame}.{quote_name(name)}")


def equal_columns(left: str, right: str, names: Iterable[str]) -> Column:
    """Return the condition that these columns of two aliased frames are equal."""
    pairs = [column_of(left, name) == column_of(right, name) for name in names]
    return reduce(and_, pairs)


class OldAndNew(NamedTuple):
    """The full outer join of two frames, aliased as "old" and "new", and its key columns, which
    have the value of either frame.
    """

    joined: DataFrame
    keys: list[Column]


def join_old_and_new(old: DataFrame, new: DataFrame, on: Sequence[str]) -> OldAndNew:
    """Return the full outer join of two frames on these columns.

    Unlike after a union, Spark still knows the partitioning of the frames.
    """
    condition = equal_columns("old", "new", on)
    joined = old.alias("old").join(new.hint("merge").alias("new"), condition, "full")
    keys = []
    for name in on:
        key = F.coalesce(column_of("old", name), column_of("new", name))
        keys.append(key.alias(name))
    return OldAndNew(joined, keys)


def select_changed_windows(rows: DataFrame, windows: Windows, after: datetime | None) -> DataFrame:
    """Return the windows' rows that a batch has changed or closes, with EXPIRES and CLOSING.

    `after` is the watermark at the end of the batch. EXPIRES of `rows` is the stored one, null for
    a new window. It never becomes earlier, even if the allowed lateness was reduced: otherwise a
    window could be closed twice.
    """
    kept_until = F.greatest(
        named_column(EXPIRES), F.timestamp_micros(F.unix_micros(END) + to_micros(windows.lateness))
    )
    reached = epoch_micros(after)
    closing: Column = F.lit(False)
    if reached is not None:
        closing = F.unix_micros(named_column(EXPIRES)) <= F.lit(reached)
    marked = rows.withColumn(EXPIRES, kept_until).withColumn(CLOSING, closing)
    return marked.filter(F.col(TOUCHED) | F.col(CLOSING))


PARTLY_LATE = "__partly"
"""Hidden column of records: whether the record counts, but is too late for some of its sliding
windows.
"""
LEFT_OUT = (LATE, NULL_TIME, NULL_KEY)
"""Values of EXCLUSION for records that `late_records()` returns; other excluded records are only
counted.
"""
BEGIN = "__begin"
"""Hidden column of a record: the start of the window that it is assigned to."""
_LIMIT = "__limit"
_FIRST = "__first_start"
_LAST = "__last_start"
_START = "__start"
"""Hidden columns of records, in microseconds: the watermark that they are behind, and the starts of
their first and last window, and of one of them."""


def classify_window_records(
    frame: DataFrame, windows: Windows, before: datetime | None
) -> DataFrame:
    """Return the records with TIME (null if it could not be stored), EXCLUSION and PARTLY_LATE, and
    with the hidden columns by which windows are assigned. `before` is the watermark at the start of
    the batch.

    Whether a record is late depends only on the earlier records of its own partition, and so not on
    how batches are cut. The exception is a partition that was idle: the watermark, which did not
    wait for it, may be later than its records.
    """
    lateness = to_micros(windows.lateness)
    # A later time could not be stored: its window must end and expire before the year 10000.
    latest = MAX_MICROS - to_micros(max_duration_after(windows.kind)) - lateness
    time = F.unix_micros(EVENT_TIME)
    # `greatest` ignores nulls.
    limit = F.greatest(F.unix_micros(BEHIND), F.lit(epoch_micros(before)).cast("bigint"))
    frame = frame.withColumns({TIME: F.when(time <= latest, time), _LIMIT: limit})
    partly: Column = F.lit(False)
    if isinstance(windows.kind, Session):
        late = F.col(TIME) < F.col(_LIMIT) - lateness
    else:
        frame = add_window_starts(frame, windows)
        # The start of an earlier window could not be stored.
        frame = frame.withColumn(TIME, F.when(F.col(_FIRST) >= MIN_MICROS, F.col(TIME)))
        late = window_end(F.col(_LAST), windows.kind) + lateness <= F.col(_LIMIT)
        partly = ~late & (window_end(F.col(_FIRST), windows.kind) + lateness <= F.col(_LIMIT))
    exclusion = exclusion_column(frame, windows.by, F.col(TIME).isNull(), late)
    is_counted = exclusion.isNull()
    is_partly_late = is_counted & F.coalesce(partly, F.lit(False))
    return frame.withColumns({EXCLUSION: exclusion, PARTLY_LATE: is_partly_late})


def assign_windows(records: DataFrame, windows: Windows) -> DataFrame:
    """Return each record once for every tumbling or sliding window that it is in time for, with
    the window's BEGIN.
    """
    assert not isinstance(windows.kind, Session)
    if isinstance(windows.kind, Tumbling):
        return records.withColumn(BEGIN, F.timestamp_micros(_LAST))
    every = to_micros(windows.kind.every)
    # A window is closed if it starts no later than this; without a watermark none is.
    last_closed = F.col(_LIMIT) - to_micros(windows.kind.size) - to_micros(windows.lateness)
    last_closed = F.coalesce(last_closed, F.col(_FIRST) - 1)
    starts = F.sequence(_FIRST, _LAST, F.lit(every))
    open_starts = F.filter(starts, lambda start: start > last_closed)
    assigned = records.withColumn(_START, F.explode(open_starts))
    return assigned.withColumn(BEGIN, F.timestamp_micros(_START))


def add_window_starts(frame: DataFrame, windows: Windows) -> DataFrame:
    """Return the records with the starts of the first and the last window that they are in, in
    microseconds.
    """
    assert not isinstance(windows.kind, Session)
    if isinstance(windows.kind, Tumbling):
        begin = window_start(F.col(TIME), windows.kind)
        return frame.withColumns({_FIRST: begin, _LAST: begin})
    size = to_micros(windows.kind.size)
    every = to_micros(windows.kind.every)
    last = F.col(TIME) - F.pmod(F.col(TIME), F.lit(every))
    before = F.col(TIME) - size  # the first window begins after it, since ends are exclusive
    first = before - F.pmod(before, F.lit(every)) + every
    return frame.withColumns({_FIRST: first, _LAST: last})


def update_fixed_windows(
    stored: DataFrame, records: DataFrame, windows: Windows, watermarks: Watermarks
) -> DataFrame:
    """Return the rows of the tumbling or sliding windows that a batch changes or closes.

    `stored` has the stored rows, `records` the batch's records without excluded ones. If both are
    partitioned by the same columns of the key, Spark adds no exchange.
    """
    assert not isinstance(windows.kind, Session)
    key = (*windows.by, START)
    assigned = assign_windows(records, windows)
    new = aggregate_rows(assigned, (*windows.by, BEGIN), windows, (RECORD,))
    both = join_old_and_new(stored, new.withColumnRenamed(BEGIN, START), key)
    added = []
    for partial in windows.partials:
        name = quote_name(partial.name)
        value = F.expr(partial.added.format(f"old.{name}", f"new.{name}"))
        added.append(value.cast(partial.type).alias(partial.name))
    touched = column_of("new", RECORDS).isNotNull().alias(TOUCHED)
    expires = column_of("old", EXPIRES).alias(EXPIRES)
    rows = both.joined.select(*both.keys, *added, touched, expires)
    end = F.timestamp_micros(window_end(F.unix_micros(START), windows.kind))
    return select_changed_windows(rows.withColumn(END, end), windows, watermarks.after)


def is_of_other_rules(windows: Windows) -> Column:
    """Return the condition that a stored row's window starts or ends at another time by the
    present rules of its zone.
    """
    assert isinstance(windows.kind, Tumbling)
    start = F.unix_micros(START)
    other_end = window_end(start, windows.kind) != F.unix_micros(END)
    return (window_start(start, windows.kind) != start) | other_end


# Hidden columns of records and rows while sessions are made: the number of the session within its
# key, whether a session begins there, its stored sessions, whether the row is stored, the start of
# the session, and whether a key has a session to close.
_NUMBER = "__number"
_BEGINS = "__begins"
_ITEMS = "__items"
_STORED = "__stored"
_FIRST_OF_SESSION = "__first"
_CLOSES = "__closes"


def build_session_runs(records: DataFrame, windows: Windows) -> DataFrame:
    """Return the sessions that a batch's records form on their own, without the stored ones;
    EXPIRES is null.
    """
    from pyspark.sql import Window

    assert isinstance(windows.kind, Session)
    gap = to_micros(windows.kind.gap)
    order = (TIME, RECORD)
    in_order = Window.partitionBy(*windows.keys).orderBy(*map(named_column, order))
    before = F.lag(TIME).over(in_order)
    begins = before.isNull() | (F.col(TIME) - before >= gap)
    numbered = _number_sessions(records, begins, windows, order)
    times = (
        F.timestamp_micros(F.min(TIME)).alias(START),
        F.timestamp_micros(F.max(TIME) + gap).alias(END),
    )
    runs = aggregate_rows(numbered, (*windows.by, _NUMBER), windows, order, *times)
    return runs.withColumn(EXPIRES, F.lit(None).cast("timestamp"))


def union_sessions(
    stored: DataFrame, runs: DataFrame, windows: Windows, watermarks: Watermarks
) -> DataFrame:
    """Return the batch's sessions (`runs`) and all stored sessions of a key that has one in the
    batch, or that has a session to close.

    Each session is a row of its own, which Spark can spill to disk: one key may have most of them.
    Spark does not know how the result is partitioned.
    """
    from pyspark.sql import Window

    # Keys are never null, so the left join below leaves a null only where the batch lacks the key.
    is_in_batch = column_of("new", windows.by[0]).isNotNull()
    is_needed = is_in_batch
    # A key with a session to close is needed as a whole.
    watermark = epoch_micros(watermarks.after)
    if watermark is not None:
        of_key = Window.partitionBy(*windows.keys)
        first_expiry = F.min(named_column(EXPIRES)).over(of_key)
        stored = stored.withColumn(_CLOSES, F.unix_micros(first_expiry) <= watermark)
        is_needed = is_in_batch | column_of("old", _CLOSES)
    batch_keys = runs.select(*windows.keys).distinct().hint("merge").alias("new")
    same_key = equal_columns("old", "new", windows.by)
    needed = stored.alias("old").join(batch_keys, same_key, "left").filter(is_needed)
    names = windows.schema.names
    stored_columns = [column_of("old", name) for name in names]
    before = needed.select(*stored_columns, F.lit(True).alias(_STORED))
    new = runs.select(*map(named_column, names), F.lit(False).alias(_STORED))
    return before.union(new)


def merge_sessions(rows: DataFrame, windows: Windows, watermarks: Watermarks) -> DataFrame:
    """Merge the rows of `union_sessions` that overlap; return the sessions that the batch changes
    or closes.

    ABSORBED has START and EXPIRES of the stored sessions that are now part of a session with
    another start.
    """
    from pyspark.sql import Window

    order = (START, _STORED)
    in_order = Window.partitionBy(*windows.keys).orderBy(*order)
    last_end = F.max(END).over(in_order.rowsBetween(Window.unboundedPreceding, -1))
    begins = last_end.isNull() | (F.col(START) >= last_end)
    numbered = _number_sessions(rows, begins, windows, order)
    stored = F.when(F.col(_STORED), F.struct(F.col(START), named_column(EXPIRES)))
    touched = F.bool_or(~F.col(_STORED)).alias(TOUCHED)
    times = (
        F.min(START).alias(_FIRST_OF_SESSION),
        F.max(END).alias(END),
        F.max(named_column(EXPIRES)).alias(EXPIRES),
    )
    more = (*times, touched, F.collect_list(stored).alias(_ITEMS))
    sessions = aggregate_rows(numbered, (*windows.by, _NUMBER), windows, order, *more, partial=True)
    absorbed = F.filter(_ITEMS, lambda item: item[START] != F.col(_FIRST_OF_SESSION))
    merged = (
        sessions.withColumn(ABSORBED, absorbed)
        .drop(_ITEMS, _NUMBER)
        .withColumnRenamed(_FIRST_OF_SESSION, START)
    )
    return select_changed_windows(merged, windows, watermarks.after)


def _number_sessions(
    frame: DataFrame, begins: Column, windows: Windows, order: Sequence[str]
) -> DataFrame:
    """Return the rows with the number of their session within the key; each row with `begins`
    starts a session.
    """
    from pyspark.sql import Window

    so_far = Window.partitionBy(*windows.keys).orderBy(*map(named_column, order))
    so_far = so_far.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    marked = frame.withColumn(_BEGINS, begins.cast("int"))
    return marked.withColumn(_NUMBER, F.sum(_BEGINS).over(so_far)).drop(_BEGINS)


def stored_record_schema(windows: Windows) -> Schema:
    """Return the columns of the records that are stored for users' functions."""
    names = list(windows.by)
    for _, function in windows.functions:
        names += function.columns or windows.own
    columns = {name: windows.types[name] for name in names}
    return Schema.of(columns | STATE_COLUMNS)


def prepare_records(records: DataFrame, windows: Windows) -> DataFrame:
    """Return the records, without excluded ones, in the form in which they are stored.

    EXPIRES is that of the last window that the record is in. For sessions, it is that of a session
    with only this record, and becomes later as the session grows (`assign_sessions`).
    """
    if isinstance(windows.kind, Session):
        expires = F.col(TIME) + to_micros(windows.kind.gap + windows.lateness)
    else:
        expires = window_end(F.col(_LAST), windows.kind) + to_micros(windows.lateness)
    times = {
        AT: F.timestamp_micros(TIME),
        STORED_BEHIND: F.timestamp_micros(_LIMIT),
        EXPIRES: F.timestamp_micros(expires),
    }
    names = stored_record_schema(windows).names
    return records.withColumns(times).select(*map(named_column, names))


def merge_records(stored: DataFrame, new: DataFrame, windows: Windows) -> DataFrame:
    """Return the stored records and the `new` ones of the batch, which replace stored ones of
    the same RECORD.
    """
    key = (*windows.by, RECORD)
    both = join_old_and_new(stored, new, key)
    is_new = column_of("new", RECORD).isNotNull()
    values = []
    for name in stored_record_schema(windows).names:
        if name not in key:
            value = F.when(is_new, column_of("new", name)).otherwise(column_of("old", name))
            values.append(value.alias(name))
    return both.joined.select(*both.keys, *values)


def assign_sessions(records: DataFrame, rows: DataFrame, windows: Windows) -> DataFrame:
    """Return those records that are in the sessions `rows`, with BEGIN, EXPIRES, TOUCHED and
    CLOSING of the session.
    """
    added = (EXPIRES, TOUCHED, CLOSING)
    sessions = rows.select(*windows.keys, START, END, *map(named_column, added)).alias("session")
    time = column_of("record", AT)
    begin = column_of("session", START)
    within = (time >= begin) & (time < column_of("session", END))
    names = stored_record_schema(windows).names
    own = [column_of("record", name) for name in names if name != EXPIRES]
    of_session = [column_of("session", name) for name in added]
    condition = within & equal_columns("record", "session", windows.by)
    joined = records.alias("record").join(sessions.hint("merge"), condition)
    return joined.select(*own, begin.alias(BEGIN), *of_session)


def select_window_records(records: DataFrame, rows: DataFrame, windows: Windows) -> DataFrame:
    """Return each record once for every window among `rows` that it is in, with the window's
    BEGIN.
    """
    times = {
        TIME: F.unix_micros(named_column(AT)),
        _LIMIT: F.unix_micros(named_column(STORED_BEHIND)),
    }
    assigned = assign_windows(add_window_starts(records.withColumns(times), windows), windows)
    asked = rows.select(*windows.keys, F.col(START).alias(BEGIN)).alias("asked")
    condition = equal_columns("record", "asked", (*windows.by, BEGIN))
    return assigned.alias("record").join(asked.hint("merge"), condition, "left_semi")


@dataclass(frozen=True, slots=True)
class WindowFunctionCall:
    """Calls users' functions, in a task, with the records of one window; returns a row with the key
    and their values.

    `key` names the key columns, `given` the columns that functions get, `schema` the columns of the
    result; `paths` are those of the windows. Raises an error for a value of the records that Python
    can't represent, before it calls a function.
    """

    operator: str
    aggregates: tuple[tuple[str, Aggregate], ...]
    key: tuple[str, ...]
    given: tuple[str, ...]
    schema: Schema
    sensitive: frozenset[str]
    paths: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, records: pa.Table) -> pa.Table:
        key = records.select(list(self.key)).slice(0, 1)
        given = records.sort_by(RECORD).select(list(self.given))
        found = first_unreadable(given)
        if found is not None:
            (_, first), *_ = self.aggregates
            place = f"a record for {first.describe()}"
            hidden = bool(self.sensitive)
            raise found.error(self.operator, place, hidden=hidden, operator=self.operator)
        arrays = [self._value(name, aggregate, given) for name, aggregate in self.aggregates]
        return pa.table([*key.columns, *arrays], names=self.schema.names)

    def _select(self, aggregate: Aggregate, records: pa.Table) -> pa.Table:
        """Return what a function gets of the records: the columns `of`, or all but those for
        paths.
        """
        names = aggregate.columns or [name for name in self.given if name not in self.paths]
        selected = records.select(list(names))
        return selected.rename_columns([self.paths.get(name, name) for name in names])

    def _value(self, name: str, aggregate: Aggregate, records: pa.Table) -> pa.Array:
        """Return what the function of the result column `name` returns for a window's records.

        Raises SchemaMismatchError for a value of another type than declared, and the error for a
        function that fails.
        """
        called = aggregate.describe()
        try:
            value = aggregate.compute(self._select(aggregate, records))
        except Exception as error:  # noqa: BLE001 - it is a user's function
            failed = function_failed_error(
                self.operator, called, aggregate.function, error, sensitive=self.sensitive
            )
            raise failed from (None if self.sensitive else error)
        try:
            if isinstance(value, pa.Scalar):
                value = value.as_py()
            return to_typed_array([value], aggregate.returns)
        except (OverflowError, ValueError) as error:
            misfit = "does not fit into" if isinstance(value, int | float) else "is no"
            reason = ""
            if not self.sensitive:
                first_line, *_ = str(error).splitlines()
                reason = f": {first_line}"
            problem = (
                f"{self.operator}: {called} returned {type(value).__name__} for {name!r}, which"
                f" {misfit} {aggregate.returns}{reason}."
            )
            step = "Return one value of that type, or None; or correct returns=."
            failure = SchemaMismatchError(problem, step, column=name, operator=self.operator)
            raise failure from (None if self.sensitive else error)


def call_window_functions(
    operator: str, records: DataFrame, windows: Windows, sensitive: frozenset[str]
) -> DataFrame:
    """Return a row for each window, with its key, START and the values of users' functions.

    `records` are those of all windows, with BEGIN.
    """
    from pyspark.sql.types import StructType

    key = (*windows.by, BEGIN)
    functions = windows.functions
    columns = {name: windows.types[name] for name in windows.by} | {START: "timestamp"}
    schema = Schema.of(columns | {name: function.returns for name, function in functions})
    given = tuple(name for name in stored_record_schema(windows).names if name not in STATE_COLUMNS)
    call = WindowFunctionCall(operator, functions, key, given, schema, sensitive, windows.paths)
    (_, first), *_ = functions
    shipped = pickle_function(operator, first.function, call)

    def task(records: pa.Table) -> pa.Table:
        return next(encode_task_errors(map(shipped.unpickle(), [records])))

    return apply_in_arrow(records, key, task, cast("StructType", StructType.fromDDL(schema.ddl())))
