"""The type of an expression, where it is certain: what is called a type here is called so by Spark.

Types are in Spark's simple spelling ("bigint", "decimal(10,2)"). Whatever is not told by a rule here is None: unproven.
Of one that is certainly nested, or an interval, not all may be known: "array<…>", "map<…>", "struct<…>", "interval…".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.decimal_types import widest_decimal
from dagster_adjunct.resources.sql.expression import ColumnName, Expression
from dagster_adjunct.resources.sql.nested_types import field_type
from dagster_adjunct.resources.sql.type_rules import INTEGERS, NUMBERS, RULES

if TYPE_CHECKING:
    from sqlglot import exp

_NO_TRUTHS = frozenset({*NUMBERS, "date", "timestamp", "timestamp_ntz", "binary"})


def type_of(expression: Expression, types: Mapping[str, str | None]) -> str | None:
    """Return the type of an expression over columns of these types; None where it is not certain."""
    known = KnownTypes(types)
    if expression.column is not None:
        return known.column(ColumnName((expression.column,)))
    if expression.tree is None or expression.unread or expression.star:
        return None
    return known.type(expression.tree)


def types_named(expression: Expression, types: Mapping[str, str | None]) -> tuple[tuple[str, str | None], ...]:
    """Return the types of the columns, and of the fields, that an expression names: all that its own depends on."""
    known = KnownTypes(types)
    named: dict[str, str | None] = {}
    for column in expression.columns:
        named[column.name] = known.column(ColumnName((column.name,)))
        if len(column.parts) > 1 and (kind := known.column(column)) is not None:
            named[str(column)] = kind
    return tuple(named.items())


def differ(one: str, other: str) -> bool:
    """Whether two types are certainly not the same: of one that is not wholly known, what is known may differ."""
    (first, *more), (second, *others) = one.split("…"), other.split("…")
    if not more and not others:
        return one != other
    return not (first.startswith(second) or second.startswith(first))


def no_boolean(expression: Expression, types: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Return what "and", "or" or "not" take that is certainly no boolean, and its type; None where all may be."""
    if expression.tree is None or expression.unread:
        return None
    from sqlglot import exp

    known = KnownTypes(types)
    for node in expression.tree.find_all(exp.And, exp.Or, exp.Not):
        for operand in (node.this, node.args.get("expression")):
            kind = known.type(operand)
            # Spark takes a text for what it says; in a lambda, a name may be a variable's.
            certain = kind is not None and (kind in _NO_TRUTHS or kind.startswith("decimal("))
            if operand is not None and certain and node.find_ancestor(exp.Lambda) is None:
                return operand.sql("spark"), str(kind)
    return None


class KnownTypes:
    """Types of columns by name, whatever its case; no two names differ in case alone.

    Beside them, those of the variables of lambdas, in lower case.
    """

    def __init__(self, types: Mapping[str, str | None], variables: Mapping[str, str | None] | None = None) -> None:
        self._types = types
        self.variables = variables or {}
        self._by_lower: dict[str, str | None] | None = None  # made for the first name that is in no such case there

    def within(self, variables: Mapping[str, str | None]) -> KnownTypes:
        """Return the same in a lambda with these variables."""
        return KnownTypes(self._types, {**self.variables, **variables})

    def column(self, name: ColumnName) -> str | None:
        """Return the type of a column, or of a field that is known by its whole name."""
        whole = str(name)
        if whole in self._types:
            return self._types[whole]
        if self._by_lower is None:
            self._by_lower = {column.lower(): kind for column, kind in self._types.items()}
        kind = self._by_lower.get(whole.lower())
        if kind is not None or len(name.parts) == 1:
            return kind
        kind = self._by_lower.get(name.name.lower())
        for field in name.parts[1:]:
            kind = field_type(kind, field)
        return kind

    def type(self, node: exp.Expr | None) -> str | None:
        """Return the type of a node of a parsed expression."""
        rule = None if node is None else RULES.get(type(node).__name__)
        return None if rule is None or node is None else rule(self, node)

    def alike(self, nodes: list[exp.Expr | None]) -> str | None:
        """Return the type that all become that are not null: their own, or of numbers the widest."""
        kinds = {self.type(node) for node in nodes if node is not None} - {"void"}
        if len(kinds) == 1:
            return kinds.pop()
        if kinds and kinds <= set(INTEGERS):
            return max((kind for kind in kinds if kind), key=INTEGERS.index)
        if "double" in kinds and kinds <= set(NUMBERS):
            return "double"
        return widest_decimal(kinds)

    def same(self, *nodes: exp.Expr | None) -> str | None:
        """Return the type that all of these have, None where one differs or is not known."""
        kinds = {self.type(node) for node in nodes}
        return kinds.pop() if len(kinds) == 1 else None
