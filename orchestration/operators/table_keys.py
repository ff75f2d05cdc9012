"""The key of a remote table in the records that are sent to it: in columns of its names, or as on=
says, in other columns and at paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from dagster_adjunct.orchestration.operators.columns import find_taken, plain_column, plain_path
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.orchestration.operators.updates import Pairs, TableSend
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.schemas.paths import (
    path_expression,
    read_named_path,
    split_path,
    steps_among,
    write_path,
)
from dagster_adjunct.resources.schemas.schema import quote_name

KeySources: TypeAlias = Mapping[str, str]
"""{column of a table's key: where the records have its value, a column or a path}."""


def check_key_unchanged(
    call: str, argument: str, pairs: Pairs, key: KeySources, *, key_argument: str
) -> None:
    """Raise ConfigurationError for an expression that gives a key column another value than the
    record has.

    A user gave the pairs (column, expression) as `argument` of `call` ("update of planes after
    join-2"), and may say where the records have the key in its `key_argument`.
    """
    for name, expression in pairs:
        if name in key and not _names_value(expression, key[name]):
            problem = (
                f"{call}: {argument}= gives {name!r}, which is in the table's key"
                f" ({', '.join(key)}), the expression {expression!r}: a record has the key by which"
                " it is looked up."
            )
            step = (
                f"Leave {name!r} out: the key is always part of the record. For another key, name"
                f" its value in {key_argument}=."
            )
            raise ConfigurationError(problem, step, argument=argument, column=name)


def _names_value(expression: str, source: str) -> bool:
    """Whether an expression is only the column or path `source`."""
    column = plain_column(expression)
    if column is not None:
        steps: tuple[str, ...] = (column,)
    else:
        steps = plain_path(expression)
    # Among the columns of the records, a source with dots may be a path or the name of a column.
    return _fold_case(steps) in (_fold_case((source,)), _fold_case(split_path(source)))


def _fold_case(steps: Sequence[str]) -> tuple[str, ...]:
    """Return the steps of a path in lower case."""
    return tuple(map(str.lower, steps))


def require_key(operator: str, send: TableSend, key: Sequence[str], columns: Columns) -> None:
    """Raise PlanningError if records of these `columns` don't have the values of the table's `key`,
    if one is not simple, or if a whole record has two values for a column of the key.
    """
    table = send.table
    step = (
        f"The key of table {table} is {', '.join(key)}; if the records have it elsewhere, write"
        f" on={{column or path: {key[0]!r}}}."
    )
    if send.on:
        columns.require(operator, send.key_sources(key), step)
    else:
        _check_no_path(operator, table, key, columns)
        columns.require_columns(operator, key, step)
    use = f"for the key of table {table}, which on= may take from inside a column"
    columns.require_simple(operator, send.key_sources(key), use)
    if send.update is None:
        check_key_free(operator, send, tuple(columns.known))


def _check_no_path(operator: str, table: str, key: Sequence[str], columns: Columns) -> None:
    """Raise PlanningError if a table's key is declared by the path of its value in the records;
    not if the records may have columns that are not known.
    """
    if not columns.complete:
        return
    for name in key:
        path = read_named_path(name)
        if path.renames and name not in columns.known:
            raise PlanningError(
                f"{operator}: table {table} is declared with the key {name!r}: expected a column of"
                " the table.",
                f"Declare it with key={path.name!r}, and say where the records have it:"
                f" on={{{write_path(path.steps)!r}: {path.name!r}}}.",
                operator=operator,
                column=name,
            )


def check_key_free(operator: str, send: TableSend, names: Sequence[str]) -> None:
    """Raise PlanningError if whole records, with columns of these names, have a column with the
    name of a key column that on= takes from elsewhere: a table stores only one of the two.
    """
    sources = {source for source, _ in send.on}
    others = [name for name in names if name not in sources]
    for source, key in send.on:
        if find_taken((key,), others) is not None:
            raise PlanningError(
                f"{operator}: on= takes {key!r}, in the key of table {send.table}, from {source!r},"
                f" and the records have another column {key!r}, which would be lost.",
                f'Rename it before, .map("* except ({key})", "{key} as record_{key}"), or leave it'
                f' out, .map("* except ({key})").',
                operator=operator,
                column=key,
            )


def key_expressions(send: TableSend, names: Sequence[str]) -> list[str]:
    """Return the Spark SQL expressions of the columns of the key, over records with columns of
    these names; [] without on=, as the records then have the columns of the key.
    """
    expressions = []
    for source, key in send.on:
        expression = path_expression(steps_among(source, names))
        expressions.append(f"{expression} as {quote_name(key)}")
    return expressions
