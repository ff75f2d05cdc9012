"""The type of an expression, where it is certain: what is called a type here is called so by Spark.

Types are in Spark's simple spelling ("bigint", "decimal(10,2)"). Whatever is not told by a rule here is None: unproven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.expression import ColumnName, Expression

if TYPE_CHECKING:
    from sqlglot import exp

    Rule = Callable[["Known", exp.Expr], str | None]

_INTEGERS = ("tinyint", "smallint", "int", "bigint")
_NUMBERS = (*_INTEGERS, "float", "double")
_CAST_TO = {
    **{name.upper(): name for name in (*_NUMBERS, "boolean", "date", "binary", "timestamp")},
    "TEXT": "string",
    "TIMESTAMPTZ": "timestamp",
    "TIMESTAMPLTZ": "timestamp",
    "TIMESTAMPNTZ": "timestamp_ntz",
}


def type_of(expression: Expression, types: Mapping[str, str | None]) -> str | None:
    """Return the type of an expression over columns of these types; None where it is not certain."""
    known = Known(types)
    if expression.column is not None:
        return known.column(ColumnName((expression.column,)))
    if expression.tree is None or expression.unread or expression.star:
        return None
    return known.type(expression.tree)


class Known:
    """Types of columns by name, whatever its case."""

    def __init__(self, types: Mapping[str, str | None]) -> None:
        self._types = {name.lower(): kind for name, kind in types.items()}

    def column(self, name: ColumnName) -> str | None:
        """Return the type of a column, or of a field that is known by its whole name."""
        return self._types.get(str(name).lower())

    def type(self, node: exp.Expr | None) -> str | None:
        """Return the type of a node of a parsed expression."""
        rule = None if node is None else RULES.get(type(node).__name__)
        return None if rule is None or node is None else rule(self, node)

    def same(self, *nodes: exp.Expr | None) -> str | None:
        """Return the type that all of these have, None where one differs or is not known."""
        kinds = {self.type(node) for node in nodes}
        return kinds.pop() if len(kinds) == 1 else None


def _column(known: Known, node: exp.Expr) -> str | None:
    from sqlglot import exp

    if not isinstance(node, exp.Column) or isinstance(node.this, exp.Star):
        return None
    return known.column(ColumnName(tuple(part.name for part in node.parts)))


def _literal(known: Known, node: exp.Expr) -> str | None:
    if node.is_string:
        return "string"
    if not node.name.isdigit():
        return None
    return "int" if int(node.name) < 2**31 else "bigint" if int(node.name) < 2**63 else None


def _cast(known: Known, node: exp.Expr) -> str | None:
    to = node.args["to"]
    name = to.this.name if hasattr(to.this, "name") else ""
    if name == "DECIMAL":
        digits = [item.name for item in to.expressions]
        return f"decimal({digits[0]},{digits[1]})" if len(digits) == 2 and all(map(str.isdigit, digits)) else None
    return None if to.expressions else _CAST_TO.get(name)


def _boolean(known: Known, node: exp.Expr) -> str | None:
    return "boolean"


def _inner(known: Known, node: exp.Expr) -> str | None:
    return known.type(node.this)


RULES: dict[str, Rule] = {
    "Column": _column,
    "Literal": _literal,
    "Cast": _cast,
    "TryCast": _cast,
    "Boolean": _boolean,
    "Paren": _inner,
    **dict.fromkeys(
        ("EQ", "NEQ", "LT", "LTE", "GT", "GTE", "NullSafeEQ", "NullSafeNEQ", "And", "Or", "Not", "Is", "Between", "In"),
        _boolean,
    ),
}
