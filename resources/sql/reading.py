"""Expressions read by a parser of Spark's SQL. What it can't read, or what is not understood here, is left to Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

from sqlglot import exp
from sqlglot.dialects.spark import Spark
from sqlglot.errors import ErrorLevel, SqlglotError

from dagster_adjunct.resources.sql.expression import ColumnName, Expression

if TYPE_CHECKING:
    pass

# Beside functions and operators: nodes in which a column is a column. In any other, names may be something else.
_UNDERSTOOD = (
    exp.Func, exp.Binary, exp.Unary, exp.Condition, exp.Alias, exp.Aliases, exp.Lambda, exp.Tuple, exp.Star,
    exp.PropertyEQ, exp.Window, exp.WindowSpec, exp.Order, exp.Ordered, exp.Distinct, exp.Filter, exp.Where,
    exp.WithinGroup, exp.IgnoreNulls, exp.RespectNulls, exp.Interval, exp.IntervalSpan, exp.DataType, exp.DataTypeParam,
    exp.Identifier, exp.Var, exp.Kwarg, exp.RawString, exp.ColumnDef, exp.JSONPath, exp.JSONPathPart,
)  # fmt: skip
_ALIAS = re.compile(r".*[\s)]as\s+(?:`(?P<quoted>(?:[^`]|``)+)`|(?P<plain>[A-Za-z_]\w*))\s*", re.IGNORECASE | re.DOTALL)
_UNIT = re.compile(
    r"(?:year|quarter|month|week|day|hour|minute|second|millisecond|microsecond)s?|dayofyear", re.IGNORECASE
)
_TAKES_UNIT = re.compile(r"(?:timestamp_?add|timestamp_?diff|date_?add|date_?diff)\s*\(", re.IGNORECASE)


def read(text: str) -> Expression:
    """Return what is read off an expression that is more than a name."""
    try:
        dialect = _dialect()
        (tree,) = Spark.Parser(error_level=ErrorLevel.IMMEDIATE, dialect=dialect).parse_into(
            exp.Expr, dialect.tokenize(text), text
        )
    except (SqlglotError, RecursionError, ValueError, AttributeError, TypeError, KeyError, IndexError) as error:
        return _unread(text, f"it can't be read without Spark ({type(error).__name__})")
    if tree is None:
        return _unread(text, "it can't be read without Spark")
    return _expression(text, tree)


def fields_of(text: str, tree: exp.Expr) -> Iterator[tuple[str, Expression]]:
    """Yield names and values of the struct that a tree makes."""
    if isinstance(tree, exp.Struct):
        for item in tree.expressions:
            if isinstance(item, exp.PropertyEQ) and isinstance(item.this, exp.Identifier):
                yield item.this.name, _expression(text, item.expression)


def _unread(text: str, why: str) -> Expression:
    """Return an expression of which no more is known than the name that it ends in."""
    found = None if "--" in text or "/*" in text else _ALIAS.fullmatch(text)
    name = None if found is None else found["quoted"] or found["plain"]
    alias = None if name is None else name.replace("``", "`")
    return Expression(text, alias, alias, unread=why)


@cache
def _dialect() -> Spark:
    return Spark()


def _expression(text: str, tree: exp.Expr) -> Expression:
    if tree.find(exp.Query) is not None:
        return _unread(text, "a subquery is not understood without Spark")
    strange = next((node for node in tree.walk() if not isinstance(node, _UNDERSTOOD)), None)
    if strange is not None:
        return _unread(text, f"{strange.key} is not understood without Spark")
    alias = None
    if isinstance(tree, exp.Alias):
        alias, tree = tree.alias, tree.this
    if isinstance(tree, exp.Star):
        return Expression(text, alias, star=True, excepted=_excepted(tree), tree=tree)
    column, name = None, alias
    if isinstance(tree, exp.Column) and not isinstance(tree.this, exp.Star):
        name = alias or tree.name
        column = tree.name if len(tree.parts) == 1 else None
    return Expression(text, alias, name, column, tuple(_columns(text, tree)), tree=tree)


def _excepted(star: exp.Star) -> tuple[str, ...]:
    return tuple(item.name for item in star.args.get("except_") or ())


def _columns(text: str, tree: exp.Expr) -> Iterator[ColumnName]:
    takes_unit = _TAKES_UNIT.search(text) is not None
    for node in tree.find_all(exp.Column, bfs=False):
        parts = tuple(part.name for part in node.parts if not isinstance(part, exp.Star))
        if not parts or parts[0].lower() in _variables(node) or (takes_unit and _UNIT.fullmatch(parts[0])):
            continue
        yield ColumnName(parts, int(node.parts[0].meta.get("start", 0)))


def _variables(node: exp.Expr) -> set[str]:
    """Return the variables of the lambdas that a node stands in."""
    names: set[str] = set()
    parent = node.parent
    while parent is not None:
        if isinstance(parent, exp.Lambda):
            names |= {item.name.lower() for item in parent.expressions}
        parent = parent.parent
    return names
