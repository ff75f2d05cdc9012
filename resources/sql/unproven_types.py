"""What of the types in an expression is neither certainly right nor certainly wrong, and is left to Spark.

What only follows from something that is told is not told itself: in `upper(nope(a))` that is what nope() gives, and of
a column whose type is not known its first use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.accepted_types import accepted
from dagster_adjunct.resources.sql.expression import ColumnName, Expression
from dagster_adjunct.resources.sql.expression_types import KnownTypes, types_named
from dagster_adjunct.resources.sql.nested_types import type_of_json
from dagster_adjunct.resources.sql.operands import bound_otherwise
from dagster_adjunct.resources.sql.operator_kinds import OPERATORS, STRUCTURE, TOGETHER
from dagster_adjunct.resources.sql.parsing import parsed
from dagster_adjunct.resources.sql.spark_functions import KNOWN
from dagster_adjunct.resources.sql.type_kinds import Kinds

if TYPE_CHECKING:
    from sqlglot import exp

_ORDERED = frozenset({"RowNumber", "Rank", "DenseRank", "PercentRank", "CumeDist", "Ntile", "Lag", "Lead", "NthValue"})
_OF_ELEMENTS = frozenset({"transform", "filter", "exists", "forall"})
"""Functions of an array and a lambda, whose variables are an element and its place."""


@dataclass(frozen=True, slots=True)
class Unproven:
    """What is unproven of an expression, in words, and the `columns` that are named there for their unknown types."""

    words: tuple[str, ...] = ()
    columns: frozenset[str] = frozenset()


_NOTHING = Unproven()
_TRUE_OR_FALSE = "whether it is true or false"


def unproven_types(
    text: str, types: Mapping[str, str | None], told: frozenset[str] = frozenset(), *, condition: bool = False
) -> Unproven:
    """Return what is unproven of an expression over columns of these types: "argument 1 of upper() ('city')".

    Nothing where Spark is certain to take it, and where it is asked for all of it anyway (`Expression.unread`). `told`
    are columns, in lower case, that have been named before. A `condition` has to be true or false.
    """
    expression = parsed(text)
    if expression.unread:
        return _NOTHING
    if expression.tree is not None:
        return unproven_of(expression, types, told, condition=condition)
    column = (expression.column or "").lower()
    if not condition or not column or column in told or KnownTypes(types).column(ColumnName((column,))) is not None:
        return _NOTHING
    return Unproven((f"{_TRUE_OR_FALSE} ({expression.column!r})",), frozenset({column}))


def unproven_of(
    expression: Expression, types: Mapping[str, str | None], told: frozenset[str], *, condition: bool = False
) -> Unproven:
    """Return what is unproven of an expression that is read; see `unproven_types`."""
    named = types_named(expression, types)
    return _judged(expression, named, told & {name.lower() for name, _ in named}, condition)


@lru_cache(maxsize=65_536)
def _judged(
    expression: Expression, types: tuple[tuple[str, str | None], ...], told: frozenset[str], condition: bool
) -> Unproven:
    if expression.tree is None:
        return _NOTHING
    columns = set(told)
    walk = _ExpressionWalk(expression.text, columns)
    kinds = Kinds(dict(types))
    told_of_it = walk.visit(expression.tree, kinds)
    if condition and not told_of_it and kinds.of(expression.tree) not in ("boolean", "null"):
        walk.unproven.append(_TRUE_OR_FALSE)
    return Unproven(tuple(dict.fromkeys(walk.unproven)), frozenset(columns - told))


class _ExpressionWalk:
    """Goes through one expression, and keeps what is unproven of it."""

    def __init__(self, text: str, told: set[str]) -> None:
        from dagster_adjunct.resources.sql.spark_sql_parser import (
            call_of,  # where an expression has a tree, it is loaded
        )

        self._call_of, self._text = call_of, text
        self._told_columns = told
        self._told_nodes: set[int] = set()
        self.unproven: list[str] = []

    def visit(self, node: exp.Expr, kinds: Kinds) -> bool:
        """Return whether it is told why the type of a node may be unknown."""
        told = self._visit(node, kinds)
        if told:
            self._told_nodes.add(id(node))
        return told

    def _visit(self, node: exp.Expr, kinds: Kinds) -> bool:
        name = type(node).__name__
        call = self._call_of(self._text, node)
        if call is not None:
            return self._call(*call, kinds)
        if name == "Column":
            return self._column(node, kinds)
        if name == "Dot":
            return self._field(node, kinds)
        operator = OPERATORS.get(name)
        if operator is not None and bound_otherwise(node):
            return self._tell(f"an operand of {operator.symbol}")
        if name == "Window" and node.args.get("order") is None and type(node.this).__name__ in _ORDERED:
            return self._tell(f"the order that {node.this.key} takes")
        told = [self.visit(part, kinds) for part in node.iter_expressions()]
        if operator is None:
            return any(told) if name in STRUCTURE else self._tell(f"what {node.key} takes")
        for operands, takes in operator.asks(node):
            if not takes(kinds, operands) and not self._explained(operands, kinds):
                return self._tell(f"an operand of {operator.symbol}", operands, kinds)
        return any(told)

    def _call(self, name: str, arguments: Sequence[exp.Expr], kinds: Kinds) -> bool:
        if name in _OF_ELEMENTS and len(arguments) == 2:
            return self._of_elements(name, arguments, kinds)
        if any(type(argument).__name__ in ("Lambda", "Kwarg") for argument in arguments):
            return self._tell(f"what {name}() takes")
        told = [self.visit(argument, kinds) for argument in arguments]
        if name in TOGETHER:
            for part, take in TOGETHER[name]:
                if not take(kinds, arguments[part]) and not self._explained(arguments[part], kinds):
                    return self._tell(f"the arguments of {name}()", arguments[part], kinds)
            return any(told)
        if name == "from_json" and len(arguments) == 2 and type_of_json(arguments[1].name) is None:
            return self._tell("what from_json() makes")
        takes = accepted(name, len(arguments))
        if takes is None:
            return self._tell(f"what {name}() takes") if name in KNOWN else True
        for number, (argument, taken) in enumerate(zip(arguments, takes, strict=True), 1):
            if not taken.takes(argument, kinds) and not self._explained([argument], kinds):
                return self._tell(f"argument {number} of {name}()", [argument], kinds)
        return any(told)

    def _of_elements(self, name: str, arguments: Sequence[exp.Expr], kinds: Kinds) -> bool:
        array, function = arguments
        told = self.visit(array, kinds)
        kind = kinds.type(array) or ""
        variables = [variable.name.lower() for variable in function.expressions]
        if not kind.startswith("array<") or "…" in kind or len(variables) > 2 or type(function).__name__ != "Lambda":
            return told or self._tell(f"what {name}() takes")
        inner = Kinds(kinds.types, {**kinds.variables, **dict(zip(variables, (kind[6:-1], "int"), strict=False))})
        told_inside = self.visit(function.this, inner)
        if name != "transform" and inner.of(function.this) not in ("boolean", "null") and not told_inside:
            return self._tell(f"argument 2 of {name}()")
        return told or told_inside

    def _column(self, node: exp.Expr, kinds: Kinds) -> bool:
        first, *fields = [part.name for part in node.parts]  # type: ignore[attr-defined]
        told = first.lower() in self._told_columns
        if told or not fields or kinds.type(node) is not None:
            return told
        return self._tell(f"the field {'.'.join(fields)!r} of {first!r}")

    def _field(self, node: exp.Expr, kinds: Kinds) -> bool:
        told = self.visit(node.this, kinds)
        if told or kinds.type(node) is not None:
            return told
        field = node.args.get("expression")
        if type(field).__name__ == "Identifier":
            return self._tell(f"the field {node.name!r}")
        return self._tell(f"what {node.this.name}.{'' if field is None else field.name}() takes")

    def _explained(self, operands: Sequence[exp.Expr], kinds: Kinds) -> bool:
        """Whether it is told of all of these whose kinds are not known why."""
        unknown = [operand for operand in operands if kinds.of(operand) is None]
        return bool(unknown) and all(id(operand) in self._told_nodes for operand in unknown)

    def _tell(self, what: str, operands: Sequence[exp.Expr] = (), kinds: Kinds | None = None) -> bool:
        """Keep what is unproven, with the columns among its operands whose types are not known."""
        names = [
            operand.name
            for operand in operands
            if kinds is not None and type(operand).__name__ == "Column" and kinds.of(operand) is None
        ]
        self._told_columns |= {name.lower() for name in names}
        self.unproven.append(f"{what} ({', '.join(map(repr, dict.fromkeys(names)))})" if names else what)
        return True
