"""How records are looked up in a remote table, as a plain value, and what a table says of the columns that it has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.column_values import column_of
from dagster_adjunct.resources.backends.spark_types import spark_type
from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.declared_sinks import KeyedTable

_KEYS = ("string", "tinyint", "smallint", "int", "bigint", "date", "timestamp", "binary")


@dataclass(frozen=True, slots=True)
class Answer:
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
    answers: tuple[Answer, ...]
    args: tuple[object, ...] = ()


def read_function(table: KeyedTable) -> Any:
    return getattr(table, "read_function", None)


def column_types(table: KeyedTable) -> dict[str, str] | None:
    """Return the columns that a table's read function declares, with their types; None where it declares none."""
    tell = getattr(read_function(table), "column_types", None)
    declared: dict[str, str] | None = None if tell is None else tell()
    return declared


def check_lookup(operator: str, table: KeyedTable, args: tuple[object, ...]) -> None:
    """Raise PlanningError for the first thing that the table can't do, whatever the records hold."""
    for problem, step in _refusals(table, args):
        raise PlanningError(f"{operator}: table {table.name} {problem}", step, operator=operator)


def _refusals(table: KeyedTable, args: tuple[object, ...]) -> Iterator[tuple[str, str]]:
    function = read_function(table)
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


def check_key_types(operator: str, table: KeyedTable, on: tuple[tuple[str, str], ...], types: Types) -> None:
    """Raise PlanningError where a column of the stream can't be compared with that of the table's key."""
    declared = column_types(table) or {}
    for stream, entry in on:
        kind = (types or {}).get(stream)
        if kind is None:
            continue
        if kind not in _KEYS and not kind.startswith("decimal("):
            raise PlanningError(
                f"{operator}: the stream's {stream!r} is {kind}, which can't be a key: expected a string, an integer, "
                "a date, a timestamp, a decimal or binary.",
                f'Cast it first: .map("*", "cast({stream} as string) as {stream}_key").',
                column=stream,
                operator=operator,
            )
        if entry in declared and column_of(stream, kind).kind is not column_of(entry, declared[entry]).kind:
            raise PlanningError(
                f"{operator}: the stream's {stream!r} is {kind} and {entry!r} of table {table.name} is "
                f"{declared[entry]}, so no record would be found.",
                f'Cast it first: .map("*", "cast({stream} as {spark_type(declared[entry]) or declared[entry]}) as '
                f'{stream}_key").',
                column=stream,
                operator=operator,
            )


def check_stored(operator: str, table: KeyedTable, lookup: TableLookup, stored: dict[str, str] | None) -> None:
    """Raise PlanningError where the store's own columns, where they are known, are not what the lookup takes."""
    for answer in lookup.answers if stored is not None else ():
        if answer.column not in (stored or {}):
            raise _no_column(operator, table, answer.column, stored or {})
        stored_type = spark_type((stored or {})[answer.column])
        if stored_type is not None and column_of("a", stored_type).kind is not column_of("b", answer.type).kind:
            raise PlanningError(
                f"{operator}: table {table.name} has {answer.column!r} as {stored_type}, and it is looked up as "
                f"{answer.type}.",
                "Correct the table's declared columns, or the type that select= gives.",
                column=answer.column,
                operator=operator,
            )


def answer_types(operator: str, table: KeyedTable, columns: tuple[str, ...], given: dict[str, str]) -> dict[str, str]:
    """Return the Spark types of these columns of the table's records: as `given`, else as its function has them."""
    declared = column_types(table)
    return {column: _type(operator, table, column, given.get(column), declared) for column in columns}


def _type(operator: str, table: KeyedTable, column: str, given: str | None, declared: dict[str, str] | None) -> str:
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
    there = spark_type(declared[column])
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
