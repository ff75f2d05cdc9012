"""Users' functions over all records of a window: the records that are stored for them, and the calls in tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from dagster_adjunct.orchestration.operators.functions import pickle_function
from dagster_adjunct.orchestration.operators.windows.aggregates import Aggregate
from dagster_adjunct.orchestration.operators.windows.kinds import Session, to_micros, window_end
from dagster_adjunct.orchestration.operators.windows.rows import (
    BEGIN,
    CLOSING,
    END,
    EXPIRES,
    POSITION,
    START,
    TIME,
    TOUCHED,
    Windows,
    add_window_starts,
    assign_windows,
    equal_columns,
    join_old_and_new,
)
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.column_sql import F, named_column, quote_name
from dagster_adjunct.resources.schemas.schema import Schema, arrow_type, to_exact_array
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark.errors import encode_task_errors
from dagster_adjunct.resources.spark.map_arrow import apply_in_arrow
from dagster_adjunct.resources.user_code import function_failed_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

RECORD_TIME, LIMIT = "time$", "behind$"
"""Of a stored record: its event time, and the watermark of its partition on arrival, if its time was below that."""


_OWN = (POSITION, RECORD_TIME, LIMIT, EXPIRES)


def stored_record_schema(windows: Windows) -> Schema:
    """Return the columns of the records that are stored for functions."""
    taken = (name for _, made in windows.functions for name in made.of or windows.types)
    columns = {name: windows.types[name] for name in (*windows.by, *taken)}
    times = dict.fromkeys((RECORD_TIME, LIMIT, EXPIRES), "timestamp")
    return Schema.of(columns | {POSITION: "string"} | times)


def prepare_records(records: DataFrame, windows: Windows) -> DataFrame:
    """Return counted records as they are stored; EXPIRES is that of the last window that they are in.

    For sessions it is the record's own, and moves with the session (`assign_sessions`).
    """
    if isinstance(windows.kind, Session):
        last = F.col(TIME) + to_micros(windows.kind.gap + windows.lateness)
    else:
        last = window_end(F.col("__last_start"), windows.kind) + to_micros(windows.lateness)
    own = {
        RECORD_TIME: F.timestamp_micros(TIME),
        LIMIT: F.timestamp_micros("__limit"),
        EXPIRES: F.timestamp_micros(last),
    }
    return records.withColumns(own).select(*map(named_column, stored_record_schema(windows).names))


def merge_records(stored: DataFrame, new: DataFrame, windows: Windows) -> DataFrame:
    """Return the stored records and those of the batch, which replace stored ones."""
    key = (*windows.by, POSITION)
    both, keys = join_old_and_new(stored, new, key)
    is_new = F.col(f"new.{quote_name(POSITION)}").isNotNull()
    values = [
        F.when(is_new, F.col(f"new.{quote_name(name)}")).otherwise(F.col(f"old.{quote_name(name)}")).alias(name)
        for name in stored_record_schema(windows).names
        if name not in key
    ]
    return both.select(*keys, *values)


def assign_sessions(records: DataFrame, rows: DataFrame, windows: Windows) -> DataFrame:
    """Return the records of the sessions `rows`, with the session's BEGIN, and its EXPIRES instead of their own."""
    sessions = rows.select(*windows.keys, START, END, named_column(EXPIRES), TOUCHED, CLOSING).alias("session")
    time = F.col(f"record.{quote_name(RECORD_TIME)}")
    within = (time >= F.col(f"session.{START}")) & (time < F.col(f"session.{END}"))
    own = [F.col(f"record.{quote_name(name)}") for name in stored_record_schema(windows).names if name != EXPIRES]
    marks = [F.col(f"session.{quote_name(name)}") for name in (EXPIRES, TOUCHED, CLOSING)]
    condition = within & equal_columns("record", "session", windows.by)
    joined = records.alias("record").join(sessions.hint("merge"), condition)
    return joined.select(*own, F.col(f"session.{START}").alias(BEGIN), *marks)


def select_window_records(records: DataFrame, rows: DataFrame, windows: Windows) -> DataFrame:
    """Return each record once per window of `rows` that it is in, with the window's BEGIN."""
    times = {TIME: F.unix_micros(named_column(RECORD_TIME)), "__limit": F.unix_micros(named_column(LIMIT))}
    assigned = assign_windows(add_window_starts(records.withColumns(times), windows), windows)
    asked = rows.select(*windows.keys, F.col(START).alias(BEGIN)).alias("asked")
    condition = equal_columns("record", "asked", (*windows.by, BEGIN))
    return assigned.alias("record").join(asked.hint("merge"), condition, "left_semi")


@dataclass(frozen=True, slots=True)
class WindowFunctionCall:
    """The call of the functions for the records of one window, in a task."""

    operator: str
    aggregates: tuple[tuple[str, Aggregate], ...]
    key: tuple[str, ...]
    given: tuple[str, ...]
    schema: Schema
    sensitive: frozenset[str]

    def __call__(self, records: pa.Table) -> pa.Table:
        key = records.select(list(self.key)).slice(0, 1)
        given = records.sort_by(POSITION).select(list(self.given))
        if (found := first_unreadable(given)) is not None:
            place = f"a record for {self.aggregates[0][1].describe()}"
            raise found.error(self.operator, place, hidden=bool(self.sensitive), operator=self.operator)
        arrays = [self._value(name, made, given) for name, made in self.aggregates]
        return pa.table([*key.columns, *arrays], names=self.schema.names)

    def _value(self, name: str, made: Aggregate, records: pa.Table) -> pa.Array:
        called = made.describe()
        try:
            value = made.compute(records)
        except Exception as error:  # noqa: BLE001 - it is a user's function
            failed = function_failed_error(self.operator, called, made.function, error, sensitive=self.sensitive)
            raise failed from (None if self.sensitive else error)
        try:
            value = value.as_py() if isinstance(value, pa.Scalar) else value
            return to_exact_array([value], arrow_type(made.returns))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            misfit = "does not fit into" if isinstance(value, int | float) else "is no"
            reason = "" if self.sensitive else f": {str(error).splitlines()[0]}"
            problem = f"{self.operator}: {called} returned {type(value).__name__} for {name!r}, which {misfit}"
            step = "Return one value of that type, or None; or correct returns=."
            failure = SchemaMismatchError(
                f"{problem} {made.returns}{reason}.", step, column=name, operator=self.operator
            )
            raise failure from (None if self.sensitive else error)


def call_window_functions(operator: str, records: DataFrame, windows: Windows, sensitive: frozenset[str]) -> DataFrame:
    """Return the key, START and the functions' values of each window, given its records."""
    from pyspark.sql.types import StructType

    key, functions = (*windows.by, BEGIN), windows.functions
    columns = {name: windows.types[name] for name in windows.by} | {START: "timestamp"}
    schema = Schema.of(columns | {name: function.returns for name, function in functions})
    given = tuple(name for name in stored_record_schema(windows).names if name not in _OWN)
    call = WindowFunctionCall(operator, functions, key, given, schema, sensitive)
    return apply_in_arrow(records, key, _task(operator, call), cast("StructType", StructType.fromDDL(schema.ddl())))


def _task(operator: str, call: Callable[[pa.Table], pa.Table]) -> Callable[[Any], Any]:
    shipped = pickle_function(operator, call)

    def task(records: pa.Table) -> pa.Table:
        return next(encode_task_errors(map(shipped.here(), [records])))

    return task
