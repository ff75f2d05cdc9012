"""Reads expressions, each text once; the parser is loaded for the first that is more than a name."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.expression import ColumnName, Expression, WindowClause
from dagster_adjunct.resources.sql.syntax_checks import certain_mistake

if TYPE_CHECKING:
    from dagster_adjunct.resources.sql.spark_grammar import SelectParts

_NAME = r"`(?:[^`]|``)+`|[A-Za-z_]\w*"
_PLAIN = re.compile(rf"\s*(?P<column>{_NAME})(?:\s+as\s+(?P<alias>{_NAME}))?\s*", re.IGNORECASE | re.ASCII)
_VALUES = frozenset({"true", "false", "null"})


@lru_cache(maxsize=65_536)
def parsed(text: str) -> Expression:
    """Return what is read off an expression; it never fails, see `Expression.unread` and `mistake`."""
    plain = _PLAIN.fullmatch(text)
    if plain is not None and plain["column"].lower() not in _VALUES:
        name, alias = _bare(plain["column"]), _bare(plain["alias"])
        return Expression(
            text, alias, alias or name, name, (ColumnName((name or "",), plain.start("column")),), tree=None
        )
    if text.strip() == "*":
        return Expression(text, star=True)
    mistake = certain_mistake(text)
    if mistake:
        return Expression(text, unread=mistake, mistake=mistake)
    from dagster_adjunct.resources.sql.spark_grammar import read

    return read(text)


@lru_cache(maxsize=4_096)
def selected(text: str, table: str) -> SelectParts | None:
    """Return what is read off a SELECT of the rows of a table; None where it reads anything else, or can't be read."""
    from dagster_adjunct.resources.sql.spark_grammar import read_select

    return read_select(text, table)


def _bare(name: str | None) -> str | None:
    if name is None:
        return None
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def struct_fields(expression: Expression) -> tuple[tuple[str, Expression], ...]:
    """Return the fields of a struct that is made (`named_struct('a', x)`), () of anything else."""
    if expression.tree is None:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import fields_of

    return tuple(fields_of(expression.text, expression.tree))


@lru_cache(maxsize=65_536)
def functions_of_others(text: str) -> tuple[str, ...]:
    """Return the functions that an expression calls and that are none of Spark's own: mistyped, or somebody's."""
    if "(" not in text:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import unknown_functions

    return unknown_functions(text)


@lru_cache(maxsize=65_536)
def functions_called(text: str) -> tuple[str, ...]:
    """Return the functions that an expression calls with parentheses, in lower case."""
    if "(" not in text:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import called_functions

    return called_functions(text)


@lru_cache(maxsize=65_536)
def beyond_a_record(text: str) -> tuple[tuple[str, bool], ...]:
    """Return the functions that take several records or make several of one, and whether `over (…)` follows each.

    () as well where an expression can't be read: a subquery takes records of its own.
    """
    if "(" not in text or parsed(text).unread:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import calls_beyond_a_record

    return calls_beyond_a_record(text)


@lru_cache(maxsize=65_536)
def windows_of(text: str) -> tuple[WindowClause, ...]:
    """Return what the functions over records, `over (…)`, in an expression go by; () as well where it can't be read."""
    if "over" not in text.lower():
        return ()
    tree = parsed(text).tree
    if tree is None:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import windows_in

    return tuple(windows_in(tree))


@lru_cache(maxsize=65_536)
def other_records(text: str) -> str:
    """Return what in an expression takes other records than its own, also where it can't be read; "" for nothing."""
    if "(" not in text:
        return ""
    from dagster_adjunct.resources.sql.spark_grammar import looks_at_other_records

    return looks_at_other_records(text)


def true_only_with(text: str, column: str) -> bool:
    """Whether a condition certainly holds for no record but those whose boolean `column` is true."""
    expression = parsed(text)
    if expression.column is not None:
        return expression.column.lower() == column.lower()
    if expression.tree is None:
        return False
    from dagster_adjunct.resources.sql.spark_grammar import is_true_only_with

    return is_true_only_with(expression.tree, column)


def holds_all_columns(expression: Expression) -> bool:
    """Whether a function takes "*" as all columns, as `struct(*)` does; `count(*)` takes none."""
    if expression.tree is None or expression.star or "*" not in expression.text:
        return False
    from dagster_adjunct.resources.sql.spark_grammar import takes_all_columns

    return takes_all_columns(expression.tree)
