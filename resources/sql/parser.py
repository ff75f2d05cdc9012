"""Parses expressions, each text once. Plain column names are read without sqlglot, which is slow to import."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster_adjunct.resources.common import LazyModule
from dagster_adjunct.resources.sql.expression import ColumnName, Expression, WindowClause, find_syntax_error

if TYPE_CHECKING:
    from dagster_adjunct.resources.sql import spark_grammar as grammar
    from dagster_adjunct.resources.sql.spark_grammar import SelectParts
else:
    grammar = LazyModule("dagster_adjunct.resources.sql.spark_grammar")

_NAME = r"`(?:[^`]|``)+`|[A-Za-z_]\w*"
_PLAIN = re.compile(rf"\s*(?P<column>{_NAME})(?:\s+as\s+(?P<alias>{_NAME}))?\s*", re.IGNORECASE | re.ASCII)
_VALUES = frozenset({"true", "false", "null"})


@lru_cache(maxsize=65_536)
def parse_expression(text: str) -> Expression:
    """Return the parsed expression. It never fails: see `Expression.unread` and `Expression.mistake`."""
    plain = _PLAIN.fullmatch(text)
    if plain is not None and plain["column"].lower() not in _VALUES:
        name, alias = _unquote(plain["column"]), _unquote(plain["alias"])
        columns = (ColumnName((name or "",), plain.start("column")),)
        return Expression(text, alias, alias or name, name, columns)
    if text.strip() == "*":
        return Expression(text, star=True)
    mistake = find_syntax_error(text)
    if mistake:
        return Expression(text, unread=mistake, mistake=mistake)
    return grammar.read_expression(text)


@lru_cache(maxsize=4_096)
def parse_select(text: str, table: str) -> SelectParts | None:
    """Return the parts of a SELECT from `table`, None where it reads anything else or can't be parsed."""
    return grammar.read_select(text, table)


def _unquote(name: str | None) -> str | None:
    if name is None:
        return None
    return name[1:-1].replace("``", "`") if name.startswith("`") else name


def struct_fields(expression: Expression) -> tuple[tuple[str, Expression], ...]:
    """Return the fields of a struct that the expression builds (`named_struct('a', x)`), or ()."""
    tree = expression.tree
    return () if tree is None else tuple(grammar.struct_fields_of_tree(expression.text, tree))


@lru_cache(maxsize=65_536)
def unknown_functions(text: str) -> tuple[str, ...]:
    """Return the called functions that are not built into Spark: mistyped, or registered by the user."""
    return grammar.find_unknown_functions(text) if "(" in text else ()


@lru_cache(maxsize=65_536)
def called_functions(text: str) -> tuple[str, ...]:
    """Return the functions that are called with parentheses, in lower case."""
    return grammar.find_called_functions(text) if "(" in text else ()


@lru_cache(maxsize=65_536)
def multi_record_functions(text: str) -> tuple[tuple[str, bool], ...]:
    """Return the called aggregates and generators, each with whether `over (…)` follows it.

    The result is empty where the expression can't be parsed, because a subquery reads records of its own.
    """
    if "(" not in text or parse_expression(text).unread:
        return ()
    return grammar.find_multi_record_functions(text)


@lru_cache(maxsize=65_536)
def window_clauses(text: str) -> tuple[WindowClause, ...]:
    """Return the clauses of window functions, `over (…)`; none where the expression can't be parsed."""
    if "over" not in text.lower():
        return ()
    tree = parse_expression(text).tree
    return () if tree is None else tuple(grammar.find_window_clauses(tree))


@lru_cache(maxsize=65_536)
def other_records_construct(text: str) -> str:
    """Return the construct that reads other records (a function, "over", "a subquery"), or "".

    It works on tokens, and so also where the expression can't be parsed.
    """
    return grammar.find_other_records_construct(text) if "(" in text else ""


def implies_true(text: str, column: str) -> bool:
    """Whether a condition certainly holds only for records whose boolean `column` is true."""
    expression = parse_expression(text)
    if expression.column is not None:
        return expression.column.lower() == column.lower()
    return expression.tree is not None and grammar.tree_implies_true(expression.tree, column)


def has_star_argument(expression: Expression) -> bool:
    """Whether a function takes all columns as "*", as in `struct(*)`, but not `count(*)`."""
    if expression.tree is None or expression.star or "*" not in expression.text:
        return False
    return grammar.tree_has_star_argument(expression.tree)
