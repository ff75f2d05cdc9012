"""What an operator has at hand while it is compiled to DataFrames for one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from dagster_adjunct.resources.backends.columns import parse_column, to_spark_type
from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row

    from dagster_adjunct.assets.unbounded.local_table import StateSpec
    from dagster_adjunct.orchestration.operators.arguments import DataFrameFunction, OnNullKey
    from dagster_adjunct.orchestration.operators.columns import Types
    from dagster_adjunct.orchestration.operators.operator import Declarations, KeyedTable
    from dagster_adjunct.orchestration.operators.stream_facts import JoinVersions
    from dagster_adjunct.orchestration.operators.table_updates import Update
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.streams.system import AppendResult, StreamSystem
    from dagster_adjunct.resources.tables.operation import UpdateContract


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Up to where an operator has heard of all that it takes; None before there is any.

    `before` is committed when the batch begins, `after` has the batch in it, and is committed with it.
    """

    before: datetime | None
    after: datetime | None


@dataclass(frozen=True, slots=True)
class TimedRows:
    """The rows of a dataset over time, with their columns (`schema`) and those of `kept_history.py`.

    Of each key the intervals do not overlap; a deletion is a row, too, and `__first` the one before which nothing is
    known of the key. `known_from`: of times before it a key without such a row may have been anything; None: of none.
    """

    frame: DataFrame
    schema: Schema
    known_from: datetime | None


class StateHandle(Protocol):
    """A table of state in one batch."""

    def frame(self) -> DataFrame:
        """Return the rows that the batch was begun with, without the expired ones; in their buckets: no exchange."""
        ...

    def write(self, rows: DataFrame, *, partitioned: bool = False) -> None:
        """Keep these rows of the table's columns, and `__tombstone` where some delete; committed with the batch.

        `partitioned` says that they are in the table's partitions already. A bounded replay writes nothing.
        """
        ...

    def with_written(self) -> DataFrame:
        """Return what `frame` does with the rows that the batch has written, as the boolean `__new` says of each; no
        exchange either. For tables that are only appended to."""
        ...


class BatchContext(Protocol):
    """One batch of records, or a rehearsal of it: no records, whatever is written is only checked."""

    @property
    def app(self) -> Declarations: ...

    @property
    def tasks(self) -> int:
        """How many tasks read what is broadcast."""
        ...

    def read(self, stream: str) -> DataFrame:
        """Return what the batch reads of an input stream."""
        ...

    def system_of(self, stream: str) -> StreamSystem:
        """Return the system that a stream ("system.stream") is in."""
        ...

    def partitions_at(self, operator: str) -> int:
        """Return the planned count of the records that leave an operator."""
        ...

    def required_partitioning(self, operator: str) -> Sequence[str]:
        """Return the columns by which records that leave an operator have to lie; () where nobody relies on it."""
        ...

    def sensitive(self, operator: str) -> frozenset[str]:
        """Return the columns of the records that arrive at an operator whose values no error tells."""
        ...

    def stream_of(self, operator: str) -> str | None:
        """Return the stream that the positions of an operator's records are in; None for several, or unknown."""
        ...

    def has_consumers(self, operator: str) -> bool:
        """Whether another operator takes the records of this one."""
        ...

    @property
    def reading(self) -> JoinVersions:
        """Which entries its joins meet: a join by time meets the current ones where that is "current"."""
        ...

    @property
    def number(self) -> int:
        """The batch's number among those of the application."""
        ...

    def count_records(self, operator: str, frame: DataFrame, conditions: Mapping[str, Column]) -> DataFrame:
        """Return the records, counted as they pass: how many meet each condition is told of the operator."""
        ...

    def divert_late_records(self, operator: str, records: DataFrame) -> None:
        """Hand over what an operator has left out (`late_records.as_late`), for who asks for it."""
        ...

    def diverted_late_records(self, operator: str) -> DataFrame:
        """Return what the operator before this one has left out."""
        ...

    def has_late_consumer(self, operator: str) -> bool:
        """Whether somebody asks for what this operator leaves out."""
        ...

    @property
    def clock(self) -> datetime:
        """When the batch was begun, by the lake's clock: the same however often it is run."""
        ...

    def watermarks(self, name: str) -> Watermarks:
        """Return the watermarks of the stateful operator of this name, before and with this batch."""
        ...

    def state(self, name: str, spec: StateSpec, *, of: str | None = None) -> StateHandle:
        """Return the table of state of this name, one of the operator's `states`.

        The watermark of the stateful operator `of` says what has expired; it has the table's name where left out.
        """
        ...

    def call(self, operator: str, function: DataFrameFunction, frame: DataFrame) -> DataFrame:
        """Return what a function of the application makes of records; it has to keep their hidden columns."""
        ...

    def entries(self, dataset: str) -> tuple[DataFrame, Schema]:
        """Return the entries of the dataset's version of this batch, and their columns."""
        ...

    def over_time(self, dataset: str) -> TimedRows:
        """Return the rows over time of a dataset, of the version or versions that the batch was begun with."""
        ...

    def count_matches(self, operator: str, dataset: str, frame: DataFrame) -> DataFrame:
        """Return joined records, counted as they pass; `__matched` is null where one met no entry of the dataset."""
        ...

    def first(self, frame: DataFrame) -> Row | None:
        """Return the first of these records, which is looked for now; None where there is none, and in a rehearsal."""
        ...

    def look_up(self, operator: str, frame: DataFrame, lookup: TableLookup) -> DataFrame:
        """Return records with what a remote table answers, counted as they pass; `__matched` as of `matched`."""
        ...

    def gather_small(self, frame: DataFrame) -> DataFrame:
        """Return the records before they are moved: few are brought into one task, which does the work of all."""
        ...

    def materialize(self, operator: str, frame: DataFrame) -> DataFrame:
        """Return the same records, kept while the batch runs, so that two who read them read the same."""
        ...

    def send(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> AppendResult | None:
        """Append records to a stream, which is created with `key` and `partitions`; None in a rehearsal."""
        ...

    def write(self, operator: str, frame: DataFrame, send: TableSend) -> None:
        """Write records to a declared remote table."""
        ...

    def write_local(
        self, operator: str, frame: DataFrame, table: str, *, deleted: str | None, on_null_key: OnNullKey
    ) -> None:
        """Keep the last record of each key in a local table; tombstones, and what meets `deleted`, delete theirs."""
        ...

    def call_sink(self, operator: str, frame: DataFrame, function: SinkFunction) -> None:
        """Hand records to a function of the application, in tasks."""
        ...

    def call_sink_for_results(
        self, operator: str, frame: DataFrame, function: SinkFunction, returns: Schema
    ) -> DataFrame:
        """Return what a function of the application returns for records, the same however often the batch is run."""
        ...

    def refused_records(self, operator: str) -> DataFrame:
        """Return what a table has refused of the records of an operator that writes to it (`send_dead_letters.py`)."""
        ...

    def send_dead_letters(
        self, operator: str, frame: DataFrame, stream: str, *, key: Sequence[str], partitions: int
    ) -> None:
        """Append refused records to a stream, once for the batch, whatever else a repeated batch finds refused."""
        ...


@dataclass(frozen=True, slots=True)
class SinkContext:
    """Where the records of one call come from: the application's batch, and their partition in it.

    `call` counts the calls of a partition, from 0, and `attempt` those of its task. A batch that is run again by the
    same application makes the same calls, so that (application, batch, partition, call) tells one that was made before.
    """

    application: str
    batch: int
    partition: int
    call: int
    attempt: int


SinkFunction: TypeAlias = "Callable[[Any, SinkContext], Any]"


_KEY_TYPES = ("string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "binary")


@dataclass(frozen=True, slots=True)
class LookupColumn:
    """A `column` of a table's records, the `name` that it has in the joined record, and its Spark type."""

    column: str
    name: str
    type: str


@dataclass(frozen=True, slots=True)
class TableLookup:
    """The declared `table`, the stream's columns that are its key, in its order, and what is taken of its records.

    `args` are handed through to the table's function.
    """

    table: str
    keys: tuple[str, ...]
    answers: tuple[LookupColumn, ...]
    args: tuple[object, ...] = ()


def get_read_function(table: KeyedTable) -> Any:
    return getattr(table, "read_function", None)


def declared_column_types(table: KeyedTable) -> dict[str, str] | None:
    """Return the columns that a table's read function declares, with their types; None where it declares none."""
    tell = getattr(get_read_function(table), "column_types", None)
    declared: dict[str, str] | None = None if tell is None else tell()
    return declared


def check_lookup(operator: str, table: KeyedTable, args: tuple[object, ...]) -> None:
    """Raise PlanningError for the first thing that the table can't do, whatever the records hold."""
    for problem, step in _lookup_problems(table, args):
        raise PlanningError(f"{operator}: table {table.name} {problem}", step, operator=operator)


def _lookup_problems(table: KeyedTable, args: tuple[object, ...]) -> Iterator[tuple[str, str]]:
    function = get_read_function(table)
    if function is None:
        yield "has no read function, and records are looked up in it.", "Declare it with read_function=…."
        return
    name, key = type(function).__name__, getattr(function, "key", None)
    stored = () if key is None else (key,) if isinstance(key, str) else tuple(key)
    if stored and sorted(stored) != sorted(table.key):
        yield (
            f"has the key ({', '.join(table.key)}), and its {name} ({', '.join(stored)}).",
            "Declare both with the same columns.",
        )
    can = getattr(function, "capabilities", None)
    if args and can is not None and not can.takes_args:
        yield (
            f"gets {len(args)} extra argument(s), and {name} has no use for any.",
            "Leave args= out, or give the table a function of your own that takes them.",
        )


def check_lookup_key_types(operator: str, table: KeyedTable, on: tuple[tuple[str, str], ...], types: Types) -> None:
    """Raise PlanningError where a column of the stream can't be compared with that of the table's key."""
    declared = declared_column_types(table) or {}
    for stream, entry in on:
        kind = (types or {}).get(stream)
        if kind is None:
            continue
        if kind not in _KEY_TYPES and not kind.startswith("decimal("):
            raise PlanningError(
                f"{operator}: the stream's {stream!r} is {kind}, which can't be a key: expected a string, an integer, "
                "a date, a timestamp, a decimal or binary.",
                f'Cast it first: .map("*", "cast({stream} as string) as {stream}_key").',
                column=stream,
                operator=operator,
            )
        if entry in declared and parse_column(stream, kind).kind is not parse_column(entry, declared[entry]).kind:
            raise PlanningError(
                f"{operator}: the stream's {stream!r} is {kind} and {entry!r} of table {table.name} is "
                f"{declared[entry]}, so no record would be found.",
                f'Cast it first: .map("*", "cast({stream} as {to_spark_type(declared[entry]) or declared[entry]}) as '
                f'{stream}_key").',
                column=stream,
                operator=operator,
            )


def check_stored_columns(operator: str, table: KeyedTable, lookup: TableLookup, stored: dict[str, str] | None) -> None:
    """Raise PlanningError where the store's own columns, where they are known, are not what the lookup takes."""
    for answer in lookup.answers if stored is not None else ():
        if answer.column not in (stored or {}):
            raise _no_column(operator, table, answer.column, stored or {})
        stored_type = to_spark_type((stored or {})[answer.column])
        if stored_type is not None and parse_column("a", stored_type).kind is not parse_column("b", answer.type).kind:
            raise PlanningError(
                f"{operator}: table {table.name} has {answer.column!r} as {stored_type}, and it is looked up as "
                f"{answer.type}.",
                "Correct the table's declared columns, or the type that select= gives.",
                column=answer.column,
                operator=operator,
            )


def lookup_column_types(
    operator: str, table: KeyedTable, columns: tuple[str, ...], given: dict[str, str]
) -> dict[str, str]:
    """Return the Spark types of these columns of the table's records: as `given`, else as its function has them."""
    declared = declared_column_types(table)
    return {column: _lookup_column_type(operator, table, column, given.get(column), declared) for column in columns}


def _lookup_column_type(
    operator: str, table: KeyedTable, column: str, given: str | None, declared: dict[str, str] | None
) -> str:
    if declared is None:
        if given is None:
            raise PlanningError(
                f"{operator}: table {table.name} declares no columns, so the type of {column!r} is not known.",
                f'Give it with the name: select={{"{column}": "string"}}; or declare the columns of its function.',
                column=column,
                operator=operator,
            )
        return given
    if column not in declared:
        raise _no_column(operator, table, column, declared)
    there = to_spark_type(declared[column])
    if given is not None:
        if there is not None and there != given:
            raise PlanningError(
                f"{operator}: select= gives {column!r} the type {given}, and table {table.name} has it as {there}.",
                "Leave the type out, and cast with map() after the join.",
                column=column,
                operator=operator,
            )
        return given
    if there is None:
        raise PlanningError(
            f"{operator}: table {table.name} has {column!r} as {declared[column]}, for which Spark has no type of its "
            "own.",
            f'Leave it out of select=, or give its type: select={{"{column}": "decimal(38,9)"}}, say.',
            column=column,
            operator=operator,
        )
    return there


def _no_column(operator: str, table: KeyedTable, column: str, there: dict[str, str]) -> PlanningError:
    return PlanningError(
        f"{operator}: table {table.name} has no column {column!r}; it has {', '.join(there)}.",
        "Correct select=, or add the column to the table.",
        column=column,
        operator=operator,
    )


@dataclass(frozen=True, slots=True)
class TableSend:
    """Records to the declared table `table`: without a contract whole ones, with one updates.

    With `update` each record is an update by these expressions; without, updates have their form already. With
    `dead_letters`, so many records of a batch may be refused for good, and are kept for an operator that follows.
    `args` are handed through to the table's function. `marks_as` names the send among those of the application to the
    table, in the marks that the table keeps.
    """

    table: str
    contract: UpdateContract | None = None
    on_null_key: OnNullKey = "fail"
    update: Update | None = None
    args: tuple[object, ...] = ()
    dead_letters: int | None = None
    marks_as: str | None = None


class ChangedColumns(NamedTuple):
    """The columns that updates change: to what they bring (`set`), by adding what is known to be a number (`summed`),
    by appending to lists (`appended`), and by adding members to JSON, or what may be either (`merged`). `begun` are
    those that a record has besides where there was none.

    Only sums come to the same in any order: a list has it, and of two members of one name the last stays.
    """

    set: frozenset[str]
    summed: frozenset[str]
    appended: frozenset[str]
    merged: frozenset[str]
    begun: frozenset[str]

    @property
    def only_sums(self) -> bool:
        return not self._ordered

    @property
    def adds(self) -> bool:
        """Whether an update that is applied twice is not the same as one."""
        return bool(self.summed or self.appended or self.merged)

    @property
    def _ordered(self) -> frozenset[str]:
        return self.set | self.appended | self.merged

    def depends_on_order_with(self, other: ChangedColumns) -> bool:
        """Whether it matters which of two updates comes last: both change a column, and one not by summing."""
        return bool(self._ordered & (other._ordered | other.summed)) or bool(other._ordered & self.summed)
