"""`LookupJoin`, which adds columns of remote tables, and checks of a table's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeAlias

from dagster_adjunct.orchestration.operators import joins
from dagster_adjunct.orchestration.operators.batch import Batch, Frame
from dagster_adjunct.orchestration.operators.columns import Types, check_added_names
from dagster_adjunct.orchestration.operators.declared import DeclaredApplication
from dagster_adjunct.orchestration.operators.lookups import (
    How,
    LookupColumn,
    SelectedColumn,
    TableLookup,
)
from dagster_adjunct.orchestration.operators.operator import (
    ComparedColumn,
    Match,
    PassThroughSpec,
    PlanContext,
    PlannedCall,
)
from dagster_adjunct.orchestration.operators.stream_facts import ColumnFacts, Columns, LineageNode
from dagster_adjunct.resources.backends.columns import parse_column, to_spark_type
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.tables.table import AnyTable

_KEY_TYPES = ("string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "binary")


def function_column_types(function: Any) -> dict[str, str] | None:
    """Return {column: type} as a table's read or write function declares it, or None."""
    column_types: Callable[[], dict[str, str] | None] | None = getattr(
        function, "column_types", None
    )
    return None if column_types is None else column_types()


def declared_column_types(table: AnyTable) -> dict[str, str] | None:
    """Return {column: type} as the table's read function declares it, or None."""
    return function_column_types(table.read_function)


Problems: TypeAlias = Iterator[tuple[str, str]]
"""Pairs (what a table can't do, the next step), for errors."""


def raise_first_problem(operator: str, table: AnyTable, problems: Problems) -> None:
    """Raise PlanningError for the first problem, if there is one."""
    for problem, step in problems:
        raise PlanningError(f"{operator}: table {table.name}{problem}", step, operator=operator)


def function_problems(table: AnyTable, function: Any, args: tuple[object, ...]) -> Problems:
    """Yield why a table can't use its read or write function: it does not take `args`."""
    name = type(function).__name__
    can = getattr(function, "capabilities", None)
    if args and can is not None and not can.takes_args:
        yield (
            f" gets {len(args)} extra argument(s), and {name} takes none.",
            "Leave args= out, or give the table a function of your own that takes them.",
        )


def _lookup_problems(table: AnyTable, args: tuple[object, ...]) -> Problems:
    """Yield why the table does not support lookups, or not with these `args`."""
    if table.read_function is None:
        yield (
            " has no read function, and records are looked up in it.",
            "Declare it with read_function=….",
        )
    else:
        yield from function_problems(table, table.read_function, args)


def check_lookup_key_types(
    operator: str, table: AnyTable, on: tuple[tuple[str, str], ...], types: Types
) -> None:
    """Raise PlanningError if a column of the stream can't be a key, or has another type than the
    table's column.
    """
    declared = declared_column_types(table) or {}
    for stream, entry in on:
        kind = (types or {}).get(stream)
        if kind is None:
            continue
        if kind not in _KEY_TYPES and not kind.startswith("decimal("):
            problem = (
                f"{operator}: the stream's {stream!r} is {kind}, which can't be a key: expected a"
                " string, an integer, a date, a timestamp, a decimal or binary."
            )
            step = f'Cast it first: .map("*", "cast({stream} as string) as {stream}_key").'
            raise PlanningError(problem, step, column=stream, operator=operator)
        if (
            entry in declared
            and parse_column(stream, kind).kind is not parse_column(entry, declared[entry]).kind
        ):
            raise PlanningError(
                f"{operator}: the stream's {stream!r} is {kind} and {entry!r} of table"
                f" {table.name} is {declared[entry]}, so no record would be found.",
                f'Cast it first: .map("*", "cast({stream} as'
                f' {to_spark_type(declared[entry]) or declared[entry]}) as {stream}_key").',
                column=stream,
                operator=operator,
            )


def check_stored_columns(
    operator: str, table: AnyTable, lookup: TableLookup, stored: dict[str, str] | None
) -> None:
    """Raise PlanningError if a column to look up is missing in the store or has another type there.

    `stored` is {column: type} as the store reports it, or None: nothing is checked.
    """
    if stored is None:
        return
    for answer in lookup.answers:
        if answer.column not in stored:
            raise _no_column(operator, table, answer.column, stored)
        stored_type = to_spark_type(stored[answer.column])
        if (
            stored_type is not None
            and parse_column("a", stored_type).kind is not parse_column("b", answer.type).kind
        ):
            problem = (
                f"{operator}: table {table.name} has {answer.column!r} as {stored_type}, and it is"
                f" looked up as {answer.type}."
            )
            step = "Correct the table's declared columns, or the type in select=."
            raise PlanningError(problem, step, column=answer.column, operator=operator)


def lookup_columns(
    operator: str, table: AnyTable, chosen: Sequence[SelectedColumn]
) -> tuple[LookupColumn, ...]:
    """Return the `chosen` columns with their Spark types: as the user gave them, else as the read
    function declares.

    Raises PlanningError for a column that the table does not have, or whose type is unknown.
    """
    declared = declared_column_types(table)
    columns = []
    for item in chosen:
        column = item.column
        type_given = item.type
        if declared is not None and column not in declared:
            raise _no_column(operator, table, column, declared)
        type_declared = None if declared is None else to_spark_type(declared[column])
        problem = step = ""
        if None not in (type_given, type_declared) and type_given != type_declared:
            problem = (
                f"has {column!r} as {type_declared}, and select= gives it the type {type_given}"
            )
            step = "Leave the type out, and cast with map() after the join."
        elif type_given is None and declared is None:
            problem = f"declares no columns, so the type of {column!r} is not known"
            step = (
                f'Give the type: select={{"{column}": "string"}}; or declare the columns of its'
                " function."
            )
        elif type_given is None and type_declared is None:
            problem = f"has {column!r} as {(declared or {})[column]}, which has no Spark type"
            step = (
                f'Leave it out of select=, or give a type, for example select={{"{column}":'
                ' "decimal(38,9)"}.'
            )
        if problem:
            problem = f"{operator}: table {table.name} {problem}."
            raise PlanningError(problem, step, column=column, operator=operator)
        columns.append(LookupColumn(column, item.name, type_given or str(type_declared)))
    return tuple(columns)


def _no_column(operator: str, table: AnyTable, column: str, there: dict[str, str]) -> PlanningError:
    problem = f"{operator}: table {table.name} has no column {column!r}; it has {', '.join(there)}."
    return PlanningError(
        problem,
        "Correct select=, or add the column to the table.",
        column=column,
        operator=operator,
    )


@dataclass(frozen=True, slots=True)
class LookupJoin(PassThroughSpec):
    """Records joined with the columns of the record for their key in a remote table. They stay in
    their partitions.

    `on` has pairs (stream column, table column) in the order of the table's key. `select` None
    means all declared columns of the table except its key, with `prefix` before their names.
    """

    kind: ClassVar[str] = "join"
    table: str
    on: tuple[tuple[str, str], ...]
    how: How
    select: tuple[SelectedColumn, ...] | None
    prefix: str = ""
    args: tuple[object, ...] = ()
    min_match_rate: float | None = None

    @property
    def match(self) -> Match:
        return Match(None, self.min_match_rate, self.table)

    def summary(self) -> str:
        return f"{self.how} lookup in table {self.table} on {joins.describe_on(self.on)}"

    def call(self, operator: str, app: DeclaredApplication) -> PlannedCall:
        cached = "" if app.tables[self.table].cache is None else ", unless the table's cache has it"
        guarantee = f"each key once a batch{cached}; a repeated batch has the same answers"
        return PlannedCall(operator, "lookup", self.table, guarantee, recorded=True)

    def lookup(self, operator: str, table: AnyTable) -> TableLookup:
        """Return the lookup in this table, with the types of the columns that it adds.

        Raises PlanningError for a column that the table does not have, or whose type is unknown.
        """
        declared = declared_column_types(table)
        if self.select is None and declared is None:
            raise PlanningError(
                f"{operator}: table {table.name} declares no columns, and the join names none.",
                'Name those to add, with their types: select={"seats": "int"}; or declare the'
                " columns of the table's function.",
                operator=operator,
            )
        chosen = joins.select_columns(self.select, self.on, self.prefix, declared or ())
        answers = lookup_columns(operator, table, chosen)
        return TableLookup(self.table, tuple(stream for stream, _ in self.on), answers, self.args)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (stream,) = arriving
        table = context.app.tables[self.table]
        raise_first_problem(context.operator, table, _lookup_problems(table, self.args))
        declared = declared_column_types(table) or {}
        known = stream.types or {}
        context.declared.extend(
            ComparedColumn(own, known.get(own), f"table {self.table}", declared[entry])
            for own, entry in self.on
            if entry in declared
        )
        answers = self.lookup(context.operator, table).answers
        joins.require_keys(context.operator, self.on, stream, f"table {self.table}", table.key)
        added = [answer.name for answer in answers]
        check_added_names(context.operator, stream.names, added, f"table {self.table}", self.table)
        check_lookup_key_types(context.operator, table, self.on, stream.types)
        node = LineageNode("table", self.table)
        return stream.add({it.name: ColumnFacts(it.type, ((node, it.column),)) for it in answers})

    def spark_need(self, context: PlanContext, arriving: Sequence[Columns]) -> str:
        return ""

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        app = batch.planned.app
        self.check_columns(operator, [batch.records.columns(frame)], app)
        lookup = self.lookup(operator, app.tables[self.table])
        joined = batch.tables.look_up(operator, frame, lookup)
        return batch.records.keep_matches(operator, joined, self.how)


def build_lookup_join(
    operator: str,
    table: str,
    key: Sequence[str],
    on: joins.On,
    how: How,
    select: Sequence[str] | Mapping[str, str] | None,
    prefix: str,
    args: Sequence[object],
    min_match_rate: float | None,
) -> LookupJoin:
    """Return the join for a user's arguments; `operator` is its id."""
    joins.check_match_rate(operator, min_match_rate)
    pairs = joins.pair_key_columns(operator, "table", table, key, on)
    chosen = joins.parse_selection(
        operator, list(select) if isinstance(select, Mapping) else select, prefix
    )
    if isinstance(select, Mapping):
        kinds = zip(chosen or (), select.values(), strict=True)
        chosen = tuple(replace(item, type=Field(item.column, kind).type) for item, kind in kinds)
    return LookupJoin(table, pairs, how, chosen, prefix, tuple(args), min_match_rate)
