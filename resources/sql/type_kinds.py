"""The kind of a type, number or text or date, which is known more often than the type.

`a + b` of an int and a float is a float or a double, by the session's settings, and of wide decimals some decimal.

Kinds are told apart as far as what functions take differs: "int" is any integer that fits into one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.expression_types import KnownTypes

if TYPE_CHECKING:
    from sqlglot import exp

    KindRule = Callable[["Kinds", exp.Expr], str | None]

_KINDS = {
    "int": "tinyint smallint int",
    "bigint": "bigint",
    "float": "float double",
    "decimal": "decimal",
    "string": "string char varchar",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamp timestamp_ntz",
    "binary": "binary",
    "interval": "interval",
    "array": "array",
    "map": "map",
    "struct": "struct",
    "null": "void",
}
_KIND_OF = {word: kind for kind, words in _KINDS.items() for word in words.split()}
KINDS = tuple(_KINDS)
NUMBERS = ("int", "bigint", "decimal", "float")
"""The narrowest first: what several numbers become is the last of theirs."""
READ_AS_NUMBERS = (*NUMBERS, "string")
READ_AS_TEXTS = (*READ_AS_NUMBERS, "boolean", "date", "timestamp", "binary", "interval")
"""A text stands for what is read off it, and anything for its text: Spark casts by itself what is neither."""
WHOLE = ("int", "bigint")
_WORD = re.compile("[a-z_]+")
_CAST_TO = {
    "DECIMAL": "decimal", "VARCHAR": "string", "CHAR": "string", "ARRAY": "array", "MAP": "map", "STRUCT": "struct",
    "INTERVAL": "interval",
}  # fmt: skip


def kind_of_type(type_: str | None) -> str | None:
    """Return the kind that a type is of; None for one that is not known here."""
    word = None if type_ is None else _WORD.match(type_)
    return None if word is None else _KIND_OF.get(word[0])


class Kinds:
    """What is known of the operands of an expression over columns of these types, and variables of lambdas."""

    def __init__(self, types: Mapping[str, str | None], variables: Mapping[str, str | None] | None = None) -> None:
        self.types = types
        self.variables = variables or {}
        self.known = KnownTypes(types, self.variables)

    def type(self, node: exp.Expr | None) -> str | None:
        """Return the type of a node, where it is certain."""
        return self.known.type(node)

    def of(self, node: exp.Expr | None) -> str | None:
        """Return the kind of a node, where it is certain."""
        if node is None:
            return None
        kind = kind_of_type(self.known.type(node))
        if kind is not None:
            return kind
        rule = _RULES.get(type(node).__name__)
        return None if rule is None else rule(self, node)

    def alike(self, nodes: Iterable[exp.Expr | None]) -> str | None:
        """Return the kind that values become which are made one type: their own, or of numbers the widest."""
        kinds = {self.of(node) for node in nodes if node is not None}
        if None in kinds:
            return None
        return widest(kinds - {"null"}) if kinds != {"null"} else "null"


def widest(kinds: set[str | None]) -> str | None:
    """Return what values of these kinds become together; None where that differs from mode to mode."""
    if len(kinds) == 1:
        return next(iter(kinds))
    if kinds and kinds <= set(NUMBERS):
        return max((kind for kind in kinds if kind), key=NUMBERS.index)
    return "timestamp" if kinds == {"date", "timestamp"} else None


def _inner(kinds: Kinds, node: exp.Expr) -> str | None:
    return kinds.of(node.this)


def _number(kinds: Kinds, node: exp.Expr) -> str | None:
    kind = kinds.of(node.this)
    return kind if kind in NUMBERS else None


def _whole(kinds: Kinds, node: exp.Expr) -> str | None:
    kind = _number(kinds, node)
    if node.args.get("decimals") is not None:
        return "decimal" if kind is not None else None
    return "decimal" if kind == "decimal" else "bigint" if kind is not None else None


def _sides(node: exp.Expr) -> tuple[exp.Expr | None, exp.Expr | None]:
    return node.this, node.args.get("expression")


def _calculated(kinds: Kinds, node: exp.Expr) -> str | None:
    both = {kinds.of(side) for side in _sides(node)}
    return widest(both) if both <= set(NUMBERS) else None


def _divided(kinds: Kinds, node: exp.Expr) -> str | None:
    kind = _calculated(kinds, node)
    return kind if kind in ("decimal", None) else "float"


def _alike(kinds: Kinds, node: exp.Expr) -> str | None:
    return kinds.alike([node.this, *node.expressions])


def _case(kinds: Kinds, node: exp.Expr) -> str | None:
    return kinds.alike([item.args.get("true") for item in node.args.get("ifs") or ()] + [node.args.get("default")])


def _if(kinds: Kinds, node: exp.Expr) -> str | None:
    return kinds.alike([node.args.get("true"), node.args.get("false")])


def _cast(kinds: Kinds, node: exp.Expr) -> str | None:
    to = node.args["to"]
    return _CAST_TO.get(to.this.name if hasattr(to.this, "name") else "")


_RULES: dict[str, KindRule] = {
    "Paren": _inner, "Nullif": _inner, "Neg": _number, "Abs": _number, "Round": _number, "Floor": _whole,
    "Ceil": _whole,
    "Add": _calculated, "Sub": _calculated, "Mul": _calculated, "Mod": _calculated, "Div": _divided,
    "Coalesce": _alike, "Greatest": _alike, "Least": _alike, "Case": _case, "If": _if, "Cast": _cast, "TryCast": _cast,
}  # fmt: skip
