"""`LookupJoin`, which adds columns of remote tables, and checks of a table's functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from dagster_adjunct.orchestration.operators import joins
from dagster_adjunct.orchestration.operators.batch import Batch, Frame
from dagster_adjunct.orchestration.operators.lookups import (
    How,
    LookupColumn,
    Pairs,
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
from dagster_adjunct.orchestration.operators.stream_facts import (
    ColumnFacts,
    Columns,
    DeclaredApplication,
    LineageNode,
)
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.paths import Path, column_of, find_path, flat_name
from dagster_adjunct.resources.table_backends.columns import Kind, parse_column, to_spark_type
from dagster_adjunct.resources.tables.table import AnyTable

_KEY_TYPES = ("string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "binary")


def function_column_types(function: Any) -> dict[str, str] | None:
    """Return {column: type} as a table's read or write function declares it, or None."""
    column_types: Callable[[], dict[str, str] | None] = getattr(
        function, "column_types", lambda: None
    )
    return column_types()


def declared_column_types(table: AnyTable) -> dict[str, str] | None:
    """Return {column: type} as the table's read function declares it, or None."""
    return function_column_types(table.read_function)


Problems: TypeAlias = Iterator[tuple[str, str]]
"""Pairs (what a table can't do, the next step), for errors. The first text follows the name of the
table: " has no read function." Of several problems only the first is asked for
(`raise_first_problem`): code after a `yield` relies on it that there was no problem.
"""


def raise_first_problem(
    operator: str, table: AnyTable, problems: Problems, *, column: str | None = None
) -> None:
    """Raise PlanningError for the first problem, if there is one."""
    for what, step in problems:
        problem = f"{operator}: table {table.name}{what}"
        raise PlanningError(problem, step, column=column, operator=operator)


def function_problems(function: Any, args: tuple[object, ...]) -> Problems:
    """Yield why a table can't use its read or write function: it does not take `args`."""
    can = getattr(function, "capabilities", None)
    if args and can is not None and not can.takes_args:
        yield (
            f" gets {len(args)} extra argument(s), and {type(function).__name__} takes none.",
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
        yield from function_problems(table.read_function, args)


def check_lookup_key_types(operator: str, table: AnyTable, on: Pairs, arriving: Columns) -> None:
    """Raise PlanningError if a column of the stream can't be a key, or has another type than the
    table's column.
    """
    declared = declared_column_types(table) or {}
    for stream, entry in on:
        kind = arriving.type_of(stream)
        if kind is None:
            continue
        if kind not in _KEY_TYPES and not kind.startswith("decimal("):
            problem = (
                f"{operator}: the stream's {stream!r} is {kind}, which can't be a key: expected a"
                " string, an integer, a date, a timestamp, a decimal or binary."
            )
            step = _cast_advice(stream, "string")
            raise PlanningError(problem, step, column=stream, operator=operator)
        declared_type = declared.get(entry, kind)
        if not _is_alike(kind, declared_type):
            problem = (
                f"{operator}: the stream's {stream!r} is {kind} and {entry!r} of table"
                f" {table.name} is {declared_type}, so no record would be found."
            )
            step = _cast_advice(stream, to_spark_type(declared_type) or declared_type)
            raise PlanningError(problem, step, column=stream, operator=operator)


def _cast_advice(name: str, kind: str) -> str:
    """Return the next step: cast the key column `name` of the stream to this type."""
    return f'Cast it first: .map("*", "cast({name} as {kind}) as {flat_name(name)}_key").'


def _is_alike(one: str, other: str) -> bool:
    """Whether columns of these types are of the same kind, such as integers; nested ones must be of
    the same type.
    """
    first = parse_column("one", one)
    second = parse_column("other", other)
    if first.kind is Kind.NESTED:
        return first.nested == second.nested
    return first.kind is second.kind


def check_stored_columns(
    operator: str, table: AnyTable, lookup: TableLookup, stored: dict[str, str] | None
) -> None:
    """Raise PlanningError if a column to look up is missing in the store or has another type there.

    `stored` is {column: type} as the store reports it, or None: nothing is checked.
    """
    if stored is None:
        return
    for answer in lookup.answers:
        problems = _storage_problems(answer, stored)
        raise_first_problem(operator, table, problems, column=answer.value.column)


def _storage_problems(answer: LookupColumn, stored: dict[str, str]) -> Problems:
    """Yield why a column can't be looked up in a store with these columns, {column: type}."""
    column = answer.value.column
    yield from _missing_problems(column, stored)
    kind = to_spark_type(stored[column])
    if kind is not None and not _is_alike(kind, answer.column_type):
        yield (
            f" has {column!r} as {kind}, and it is looked up as {answer.column_type}.",
            "Correct the table's declared columns, or the type in select=.",
        )


def lookup_columns(
    operator: str, table: AnyTable, chosen: Sequence[SelectedColumn]
) -> tuple[LookupColumn, ...]:
    """Return the `chosen` columns with their Spark types: as the user gave them, else as the read
    function declares.

    Raises PlanningError for a column that the table does not have, or whose type is unknown.
    """
    declared = declared_column_types(table)
    types = {}
    if declared is not None:
        types = {name: to_spark_type(kind) for name, kind in declared.items()}
    columns = []
    for item in chosen:
        value = find_path(item.column, types)
        if value is None:  # a whole column, or nothing that the table declares
            _require_part(operator, table, item, types)
            problems = _selection_problems(item, declared)
            raise_first_problem(operator, table, problems, column=item.column)
            value = Path((item.column,), str(item.type or types[item.column]))
        raise_first_problem(operator, table, _type_problems(item, value), column=item.column)
        column_type = types.get(value.column) or value.type
        columns.append(LookupColumn(value, item.name, column_type))
    return tuple(columns)


def _require_part(
    operator: str, table: AnyTable, item: SelectedColumn, types: Mapping[str, str | None]
) -> None:
    """Raise PlanningError for the path of a value that a declared column does not have; do nothing
    for columns, and for paths in others.
    """
    is_column = item.column in types
    is_inside_column = column_of(item.column, ()) in types
    if is_inside_column and not is_column:
        columns = Columns({name: ColumnFacts(kind) for name, kind in types.items()})
        columns.require(operator, (item.column,), "Correct select=.", side=f"table {table.name}")


def _selection_problems(item: SelectedColumn, declared: dict[str, str] | None) -> Problems:
    """Yield why a column can't be looked up; `declared` are the columns of the table, None if it
    does not declare them.
    """
    column = item.column
    if declared is None:
        if item.type is None:
            whole = column_of(column, ())
            if whole != column:
                given = f'select={{"{whole}": "struct<…>"}}, of the whole column'
            else:
                given = f'select={{"{column}": "string"}}'
            yield (
                f" declares no columns, so the type of {column!r} is not known.",
                f"Give the type: {given}; or declare the columns of its function.",
            )
        return
    yield from _missing_problems(column, declared)
    kind = to_spark_type(declared[column])
    if item.type is None:
        if kind is None:
            yield (
                f" has {column!r} as {declared[column]}, which has no Spark type.",
                f'Leave it out of select=, or give a type, for example select={{"{column}":'
                ' "decimal(38,9)"}.',
            )
    elif kind not in (None, item.type):
        yield from _type_problems(item, Path((column,), str(kind)))


def _type_problems(item: SelectedColumn, value: Path) -> Problems:
    """Yield why a value can't be looked up with the type that the user gave."""
    if item.type not in (None, value.type):
        yield (
            f" has {item.column!r} as {value.type}, and select= gives it the type {item.type}.",
            "Leave the type out, and cast with map() after the join.",
        )


def _missing_problems(column: str, columns: dict[str, str]) -> Problems:
    """Yield that a table, which has these `columns`, lacks a column, if it does."""
    if column not in columns:
        yield (
            f" has no column {column!r}; it has {', '.join(columns)}.",
            "Correct select=, or add the column to the table.",
        )


@dataclass(frozen=True, slots=True)
class LookupJoin(PassThroughSpec):
    """Records joined with the columns of the record for their key in a remote table. They stay in
    their partitions.

    `on` has pairs (stream column, table column) in the order of the table's key. `select` None
    means all declared columns of the table except its key, with `prefix` before their names.
    """

    kind: ClassVar[str] = "join"
    source: ClassVar[joins.Source] = "table"
    works_without_spark: ClassVar[bool] = True
    table: str
    on: Pairs
    how: How
    select: tuple[SelectedColumn, ...] | None
    prefix: str = ""
    min_match_rate: float | None = None
    args: tuple[object, ...] = ()

    @property
    def keeps_each(self) -> bool:
        return self.how == "left"

    @property
    def match(self) -> Match:
        return Match(None, self.min_match_rate, self.table)

    def summary(self) -> str:
        return f"{self.how} lookup in table {self.table} on {joins.describe_on(self.on)}"

    def call(self, operator: str, app: DeclaredApplication) -> PlannedCall:
        often = "each key once a batch"
        if app.tables[self.table].cache is not None:
            often += ", unless the table's cache has it"
        guarantee = f"{often}; a repeated batch has the same answers"
        return PlannedCall(operator, "lookup", self.table, guarantee, recorded=True)

    def lookup(self, operator: str, table: AnyTable) -> TableLookup:
        """Return the lookup in this table, with the types of the columns that it adds.

        Raises PlanningError for a column that the table does not have, or whose type is unknown.
        """
        declared = declared_column_types(table)
        if self.select is None and declared is None:
            problem = (
                f"{operator}: table {table.name} declares no columns, and the join names none."
            )
            step = (
                'Name those to add, with their types: select={"seats": "int"}; or declare the'
                " columns of the table's function."
            )
            raise PlanningError(problem, step, operator=operator)
        chosen = joins.select_columns(self.select, self.on, self.prefix, declared or ())
        answers = lookup_columns(operator, table, chosen)
        return TableLookup(self.table, tuple(dict(self.on)), answers, self.args)

    def derive_columns(self, context: PlanContext, arriving: Sequence[Columns]) -> Columns:
        (stream,) = arriving
        table = context.app.tables[self.table]
        raise_first_problem(context.operator, table, _lookup_problems(table, self.args))
        what = f"table {self.table}"
        declared = declared_column_types(table) or {}
        for own, entry in self.on:
            if entry in declared:
                pair = ComparedColumn(own, stream.type_of(own), what, declared[entry])
                context.declared.append(pair)
        answers = self.lookup(context.operator, table).answers
        joins.require_keys(context.operator, self.on, stream, what, table.key)
        node = LineageNode("table", self.table)
        added = {}
        for answer in answers:
            value = answer.value
            added[answer.name] = ColumnFacts(value.type, ((node, value.column),))
        stream.check_added(context.operator, added, what, self.table)
        check_lookup_key_types(context.operator, table, self.on, stream)
        return stream.add(added)

    def compile(self, operator: str, frames: Sequence[Frame], batch: Batch[Frame]) -> Frame:
        (frame,) = frames
        app = batch.planned.app
        self.check_columns(operator, [batch.records.columns(frame)], app)
        lookup = self.lookup(operator, app.tables[self.table])
        joined = batch.tables.look_up(operator, frame, lookup)
        return batch.records.keep_matches(operator, joined, self.how)
