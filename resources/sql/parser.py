"""Reads expressions, each text once; the parser is loaded for the first that is more than a name."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.expression import ColumnName, Expression, WindowClause
from dagster_adjunct.resources.sql.syntax_checks import find_syntax_error

if TYPE_CHECKING:
    from dagster_adjunct.resources.sql.spark_grammar import SelectParts

_NAME = r"`(?:[^`]|``)+`|[A-Za-z_]\w*"
_PLAIN = re.compile(rf"\s*(?P<column>{_NAME})(?:\s+as\s+(?P<alias>{_NAME}))?\s*", re.IGNORECASE | re.ASCII)
_VALUES = frozenset({"true", "false", "null"})


@lru_cache(maxsize=65_536)
def parse_expression(text: str) -> Expression:
    """Return what is read off an expression; it never fails, see `Expression.unread` and `mistake`."""
    plain = _PLAIN.fullmatch(text)
    if plain is not None and plain["column"].lower() not in _VALUES:
        name, alias = _unquote(plain["column"]), _unquote(plain["alias"])
        return Expression(
            text, alias, alias or name, name, (ColumnName((name or "",), plain.start("column")),), tree=None
        )
    if text.strip() == "*":
        return Expression(text, star=True)
    mistake = find_syntax_error(text)
    if mistake:
        return Expression(text, unread=mistake, mistake=mistake)
    from dagster_adjunct.resources.sql.spark_grammar import read_expression

    return read_expression(text)


@lru_cache(maxsize=4_096)
def parse_select(text: str, table: str) -> SelectParts | None:
    """Return what is read off a SELECT of the rows of a table; None where it reads anything else, or can't be read."""
    from dagster_adjunct.resources.sql.spark_grammar import read_select

    return read_select(text, table)


def _unquote(name: str | None) -> str | None:
    if name is None:
        return None
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def struct_fields(expression: Expression) -> tuple[tuple[str, Expression], ...]:
    """Return the fields of a struct that is made (`named_struct('a', x)`), () of anything else."""
    if expression.tree is None:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import struct_fields_of_tree

    return tuple(struct_fields_of_tree(expression.text, expression.tree))


@lru_cache(maxsize=65_536)
def unknown_functions(text: str) -> tuple[str, ...]:
    """Return the functions that an expression calls and that are none of Spark's own: mistyped, or somebody's."""
    if "(" not in text:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import find_unknown_functions

    return find_unknown_functions(text)


@lru_cache(maxsize=65_536)
def called_functions(text: str) -> tuple[str, ...]:
    """Return the functions that an expression calls with parentheses, in lower case."""
    if "(" not in text:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import find_called_functions

    return find_called_functions(text)


@lru_cache(maxsize=65_536)
def multi_record_functions(text: str) -> tuple[tuple[str, bool], ...]:
    """Return the functions that take several records or make several of one, and whether `over (…)` follows each.

    () as well where an expression can't be read: a subquery takes records of its own.
    """
    if "(" not in text or parse_expression(text).unread:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import find_multi_record_functions

    return find_multi_record_functions(text)


@lru_cache(maxsize=65_536)
def window_clauses(text: str) -> tuple[WindowClause, ...]:
    """Return what the functions over records, `over (…)`, in an expression go by; () as well where it can't be read."""
    if "over" not in text.lower():
        return ()
    tree = parse_expression(text).tree
    if tree is None:
        return ()
    from dagster_adjunct.resources.sql.spark_grammar import find_window_clauses

    return tuple(find_window_clauses(tree))


@lru_cache(maxsize=65_536)
def other_records_construct(text: str) -> str:
    """Return what in an expression takes other records than its own, also where it can't be read; "" for nothing."""
    if "(" not in text:
        return ""
    from dagster_adjunct.resources.sql.spark_grammar import find_other_records_construct

    return find_other_records_construct(text)


def implies_true(text: str, column: str) -> bool:
    """Whether a condition certainly holds for no record but those whose boolean `column` is true."""
    expression = parse_expression(text)
    if expression.column is not None:
        return expression.column.lower() == column.lower()
    if expression.tree is None:
        return False
    from dagster_adjunct.resources.sql.spark_grammar import tree_implies_true

    return tree_implies_true(expression.tree, column)


def has_star_argument(expression: Expression) -> bool:
    """Whether a function takes "*" as all columns, as `struct(*)` does; `count(*)` takes none."""
    if expression.tree is None or expression.star or "*" not in expression.text:
        return False
    from dagster_adjunct.resources.sql.spark_grammar import tree_has_star_argument

    return tree_has_star_argument(expression.tree)
