"""Functions of users over all the records of a window: the records that are kept for them, and the calls in tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from dagster_adjunct.orchestration.operators.functions import pickle_function
from dagster_adjunct.orchestration.operators.windows.aggregates import Aggregate, Session, to_micros
from dagster_adjunct.orchestration.operators.windows.bounds import window_end
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
    join_old_and_new,
)
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.schemas.column_sql import F, named_column, quote_name
from dagster_adjunct.resources.schemas.schema import Field, Schema, to_exact_array
from dagster_adjunct.resources.schemas.values import first_unreadable
from dagster_adjunct.resources.spark.errors import encode_task_errors
from dagster_adjunct.resources.spark.map_arrow import apply_in_arrow
from dagster_adjunct.resources.user_code import function_failed_error

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KEPT_TIME, LIMIT = "time$", "behind$"
"""Of a kept record: its event time, and the watermark of its partition when it came, where it was behind that."""


def kept_record_schema(windows: Windows) -> Schema:
    """Return the columns of the records that are kept for functions."""
    names = dict.fromkeys(name for _, made in windows.functions for name in made.of or windows.types)
    taken = [Field(name, windows.types[name]) for name in dict.fromkeys([*windows.by, *names])]
    own = {POSITION: "string", KEPT_TIME: "timestamp", LIMIT: "timestamp", EXPIRES: "timestamp"}
    return Schema((*taken, *(Field(name, kind) for name, kind in own.items())))


def prepare_records(records: DataFrame, windows: Windows) -> DataFrame:
    """Return records that count as they are kept; EXPIRES is that of the last window that they are in.

    Of sessions it is of the record's own, and moves with the session (`session_records`).
    """
    schema = kept_record_schema(windows)
    if isinstance(windows.kind, Session):
        last = F.col(TIME) + to_micros(windows.kind.gap + windows.lateness)
    else:
        last = window_end(F.col("__last_start"), windows.kind) + to_micros(windows.lateness)
    own = {KEPT_TIME: F.timestamp_micros(TIME), LIMIT: F.timestamp_micros("__limit"), EXPIRES: F.timestamp_micros(last)}
    return records.withColumns(own).select(*map(named_column, schema.names))


def merge_records(kept: DataFrame, new: DataFrame, windows: Windows) -> DataFrame:
    """Return the records of before and of the batch, as they are kept."""
    key = (*windows.by, POSITION)
    both, keys = join_old_and_new(kept, new, key)
    others = [name for name in kept_record_schema(windows).names if name not in key]
    there = F.col(f"new.{quote_name(POSITION)}").isNotNull()
    values = [
        F.when(there, F.col(f"new.{quote_name(name)}")).otherwise(F.col(f"old.{quote_name(name)}")).alias(name)
        for name in others
    ]
    return both.select(*keys, *values)


def assign_sessions(records: DataFrame, rows: DataFrame, windows: Windows) -> DataFrame:
    """Return the records of the sessions `rows`, with BEGIN of theirs, and its EXPIRES in place of their own."""
    sessions = rows.select(*map(named_column, (*windows.by, START, END, EXPIRES)), TOUCHED, CLOSING).alias("session")
    pairs = F.col(f"record.{quote_name(KEPT_TIME)}") >= F.col(f"session.{START}")
    pairs = pairs & (F.col(f"record.{quote_name(KEPT_TIME)}") < F.col(f"session.{END}"))
    for name in windows.by:
        pairs = pairs & (F.col(f"record.{quote_name(name)}") == F.col(f"session.{quote_name(name)}"))
    theirs = [F.col(f"record.{quote_name(name)}") for name in kept_record_schema(windows).names if name != EXPIRES]
    marks = [F.col(f"session.{quote_name(name)}") for name in (EXPIRES, TOUCHED, CLOSING)]
    begin = F.col(f"session.{START}").alias(BEGIN)
    return records.alias("record").join(sessions.hint("merge"), pairs).select(*theirs, begin, *marks)


def select_window_records(records: DataFrame, rows: DataFrame, windows: Windows) -> DataFrame:
    """Return a record for each of the windows `rows` of one size that it is in, with the window's BEGIN."""
    times = {TIME: F.unix_micros(named_column(KEPT_TIME)), "__limit": F.unix_micros(named_column(LIMIT))}
    placed = assign_windows(add_window_starts(records.withColumns(times), windows), windows)
    asked = rows.select(*map(named_column, (*windows.by, START))).alias("asked")
    condition = F.col(f"record.{BEGIN}") == F.col(f"asked.{START}")
    for name in windows.by:
        condition = condition & (F.col(f"record.{quote_name(name)}") == F.col(f"asked.{quote_name(name)}"))
    return placed.alias("record").join(asked.hint("merge"), condition, "left_semi")


@dataclass(frozen=True, slots=True)
class WindowFunctionCall:
    """What a task does with the records of one window."""

    operator: str
    aggregates: tuple[tuple[str, Aggregate], ...]
    key: tuple[str, ...]
    given: tuple[str, ...]
    made: Schema
    sensitive: frozenset[str]

    def __call__(self, records: pa.Table) -> pa.Table:
        key = records.select(list(self.key)).slice(0, 1)
        shown = records.sort_by(POSITION).select(list(self.given))
        if (found := first_unreadable(shown)) is not None:
            place = f"a record for {self.aggregates[0][1].words()}"
            raise found.error(self.operator, place, hidden=bool(self.sensitive), operator=self.operator)
        arrays = [self._value(name, made, shown) for name, made in self.aggregates]
        return pa.table([*key.columns, *arrays], names=self.made.names)

    def _value(self, name: str, made: Aggregate, records: pa.Table) -> pa.Array:
        try:
            value = made.value_of(records)
        except Exception as error:  # noqa: BLE001 - it is a user's function
            failed = function_failed_error(self.operator, made.words(), made.function, error, sensitive=self.sensitive)
            raise failed from (None if self.sensitive else error)
        kind = self.made.to_arrow().field(name).type
        try:
            value = value.as_py() if isinstance(value, pa.Scalar) else value
            return to_exact_array([value], kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise SchemaMismatchError(
                f"{self.operator}: {made.words()} returned {type(value).__name__} for {name!r}, which "
                f"{'does not fit into' if isinstance(value, int | float) else 'is no'} {made.returns}"
                f"{'' if self.sensitive else f': {str(error).splitlines()[0]}'}.",
                "Return one value of that type, or None; or correct returns=.",
                column=name,
                operator=self.operator,
            ) from (None if self.sensitive else error)


def call_window_functions(operator: str, records: DataFrame, windows: Windows, sensitive: frozenset[str]) -> DataFrame:
    """Return what the functions make of the records of each window: its key and START, and their values."""
    from pyspark.sql.types import StructType

    names = windows.functions
    keys = [Field(name, windows.types[name]) for name in windows.by]
    made = Schema((*keys, Field(START, "timestamp"), *(Field(name, function.returns) for name, function in names)))
    key, given = (
        (*windows.by, BEGIN),
        tuple(kept_record_schema(windows).names[: -len((POSITION, KEPT_TIME, LIMIT, EXPIRES))]),
    )
    call = WindowFunctionCall(operator, names, key, given, made, sensitive)
    schema = cast("StructType", StructType.fromDDL(made.ddl()))
    return apply_in_arrow(records, key, _task(operator, call), schema)


def _task(operator: str, call: Callable[[pa.Table], pa.Table]) -> Callable[[Any], Any]:
    shipped = pickle_function(operator, call)

    def task(records: pa.Table) -> pa.Table:
        return next(encode_task_errors(map(shipped.here(), [records])))

    return task
