"""What operators certainly take, in all modes of Spark: `a + b`, `a in (b, c)`, `case when a then b end`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.nested_types import element_type, key_type
from dagster_adjunct.resources.sql.type_kinds import (
    NUMBERS,
    READ_AS_NUMBERS,
    READ_AS_TEXTS,
    WHOLE,
    Kinds,
    kind_of_type,
    widest,
)

if TYPE_CHECKING:
    from sqlglot import exp

    Operands = Sequence[exp.Expr]
    Takes = Callable[[Kinds, Operands], bool]
    Asks = Callable[[exp.Expr], Iterable[tuple[Operands, Takes]]]

_NESTED = frozenset({"array", "map", "struct"})
_MADE_ONE = frozenset({*READ_AS_NUMBERS, "date", "timestamp"})
"""What becomes one type with a text."""
_COMPARED = frozenset({*_MADE_ONE, "boolean", "binary"})
"""What is compared with a text."""


@dataclass(frozen=True, slots=True)
class SqlOperator:
    """How an operator is written, and what it asks of its operands together."""

    symbol: str
    asks: Asks


def _go_together(kinds: Kinds, operands: Operands, with_text: frozenset[str]) -> bool:
    of_all = {kinds.of(operand) for operand in operands}
    together = of_all - {"null"}
    if None in of_all or len(operands) < 2 or not together:
        return None not in of_all or len(operands) < 2
    if together & {*_NESTED, "interval"}:
        types = {kinds.type(operand) for operand in operands} - {"void"}
        return len(types) == 1 and "…" not in str(types)
    if "string" in together and len(together) == 2:
        return together <= with_text
    return widest(together) is not None


def alike(kinds: Kinds, operands: Operands) -> bool:
    """Whether values become one type in all modes."""
    return _go_together(kinds, operands, _MADE_ONE)


def comparable(kinds: Kinds, operands: Operands) -> bool:
    """Whether values are compared with each other in all modes."""
    return _go_together(kinds, operands, _COMPARED) and not _holds_map(kinds, operands)


def _among_others(kinds: Kinds, operands: Operands) -> bool:
    return alike(kinds, operands) and not _holds_map(kinds, operands)


def _of_one_kind(kinds: Kinds, operands: Operands) -> bool:
    return _go_together(kinds, operands, frozenset()) and not _holds_map(kinds, operands)


def _holds_map(kinds: Kinds, operands: Operands) -> bool:
    return any("map<" in (kinds.type(operand) or "") for operand in operands)


def _only(*accepted: str) -> Takes:
    taken = {*accepted, "null"}
    return lambda kinds, operands: all(kinds.of(operand) in taken for operand in operands)


def _pairs(*accepted: str) -> Takes:
    """Return what takes these pairs of kinds, "date int", in this order; "number" are all of them."""
    kinds_of: dict[str, Iterable[str]] = {"number": NUMBERS, "calculated": READ_AS_NUMBERS}
    pairs = {
        (one, other)
        for pair in accepted
        for first, second in [pair.split()]
        for one in kinds_of.get(first, (first,))
        for other in kinds_of.get(second, (second,))
    }
    pairs -= {("string", "string")}
    return lambda kinds, operands: tuple(kinds.of(operand) for operand in operands) in pairs


def _sides(takes: Takes) -> Asks:
    return lambda node: [([node.this, node.args["expression"]], takes)]


def _one(takes: Takes) -> Asks:
    return lambda node: [([node.this], takes)]


def _among(node: exp.Expr) -> Iterable[tuple[Operands, Takes]]:
    others = [node.args[name] for name in ("low", "high") if node.args.get(name) is not None]
    yield [node.this, *others, *node.expressions], comparable if others else _among_others


def _is(node: exp.Expr) -> Iterable[tuple[Operands, Takes]]:
    if type(node.args.get("expression")).__name__ == "Boolean":
        yield [node.this], _only("boolean", "string")


def _if(node: exp.Expr) -> Iterable[tuple[Operands, Takes]]:
    if type(node.parent).__name__ == "Case":
        return
    yield [node.this], _only("boolean")
    yield [part for name in ("true", "false") if (part := node.args.get(name)) is not None], alike


def _conditions(kinds: Kinds, operands: Operands) -> bool:
    return all(kinds.of(operand) == "boolean" for operand in operands)


def _case(node: exp.Expr) -> Iterable[tuple[Operands, Takes]]:
    whens = node.args.get("ifs") or []
    if node.this is None:
        yield [when.this for when in whens], _conditions
    else:
        yield [node.this, *(when.this for when in whens)], comparable
    default = node.args.get("default")
    yield [*(when.args["true"] for when in whens), *([] if default is None else [default])], alike


_CASTS = {
    "string": (*READ_AS_TEXTS, *_NESTED),
    "int": (*READ_AS_NUMBERS, "boolean", "interval"),
    "bigint": (*READ_AS_NUMBERS, "boolean", "interval"),
    "decimal": (*READ_AS_NUMBERS, "boolean", "interval"),
    "float": (*READ_AS_NUMBERS, "boolean"),
    "boolean": (*READ_AS_NUMBERS, "boolean"),
    "date": ("string", "date", "timestamp"),
    "timestamp": (*READ_AS_NUMBERS, "date", "timestamp"),
    "timestamp_ntz": ("string", "date", "timestamp"),
    "binary": ("string", "binary"),
}
_SPELLED = {"text": "string", "timestamptz": "timestamp", "timestampltz": "timestamp", "timestampntz": "timestamp_ntz"}


def _cast(node: exp.Expr) -> Iterable[tuple[Operands, Takes]]:
    to = node.args["to"]
    name = str(to.this.value).lower() if hasattr(to.this, "value") else ""
    spelled = _SPELLED.get(name, name)
    kind = spelled if spelled in _CASTS else kind_of_type(spelled)
    yield [node.this], _only(*_CASTS.get(kind or "", ()))


def _element(kinds: Kinds, operands: Operands) -> bool:
    held, key = operands
    if kinds.of(held) == "array":
        return kinds.of(key) in WHOLE
    key_of_map = key_type(kinds.type(held))
    return key_of_map is not None and key_of_map == kinds.type(key)


def _bracket(node: exp.Expr) -> Iterable[tuple[Operands, Takes]]:
    yield [node.this, *node.expressions], _element


def _element_at(kinds: Kinds, operands: Operands) -> bool:
    held, key = operands
    return kinds.of(key) == "int" if kinds.of(held) == "array" else _element(kinds, operands)


def _wholes(kinds: Kinds, operands: Operands) -> bool:
    return all(kinds.of(operand) in WHOLE for operand in operands)


def _holds(kinds: Kinds, operands: Operands) -> bool:
    """Whether an array holds elements of the type of something."""
    held, value = operands
    element, type_ = element_type(kinds.type(held)), kinds.type(value)
    if kinds.of(held) != "array" or element is None or type_ is None or "map<" in element:
        return False
    return element == type_ or {kind_of_type(element), kind_of_type(type_)} <= {"int", "bigint", "float"}


_ADDED = ("calculated calculated", "date int", "date interval", "timestamp interval")
_LESS = ("date date", "timestamp timestamp", "date timestamp", "timestamp date")
_TIMES = ("calculated calculated", "interval number")
OPERATORS: dict[str, SqlOperator] = {
    **{
        name: SqlOperator(symbol, _sides(comparable))
        for name, symbol in {
            "EQ": "=", "NEQ": "<>", "LT": "<", "LTE": "<=", "GT": ">", "GTE": ">=", "NullSafeEQ": "<=>",
            "NullSafeNEQ": "is distinct from",
        }.items()
    },
    "In": SqlOperator("in", _among), "Between": SqlOperator("between", _among), "Is": SqlOperator("is", _is),
    "And": SqlOperator("and", _sides(_only("boolean"))), "Or": SqlOperator("or", _sides(_only("boolean"))),
    "Not": SqlOperator("not", _one(_only("boolean"))),
    "Add": SqlOperator("+", _sides(_pairs(*_ADDED, "int date", "interval date", "interval timestamp"))),
    "Sub": SqlOperator("-", _sides(_pairs(*_ADDED, *_LESS))),
    "Mul": SqlOperator("*", _sides(_pairs(*_TIMES, "number interval"))),
    "Div": SqlOperator("/", _sides(_pairs(*_TIMES))),
    "Mod": SqlOperator("%", _sides(_pairs("calculated calculated"))),
    "IntDiv": SqlOperator("div", _sides(_only("int", "bigint", "decimal"))),
    "Neg": SqlOperator("-", _one(_only(*READ_AS_NUMBERS, "interval"))),
    "BitwiseAnd": SqlOperator("&", _sides(_only(*WHOLE))), "BitwiseOr": SqlOperator("|", _sides(_only(*WHOLE))),
    "BitwiseXor": SqlOperator("^", _sides(_only(*WHOLE))), "BitwiseNot": SqlOperator("~", _one(_only(*WHOLE))),
    "DPipe": SqlOperator("||", _sides(_only(*READ_AS_TEXTS))),
    "Like": SqlOperator("like", _sides(_only(*READ_AS_TEXTS))),
    "ILike": SqlOperator("ilike", _sides(_only(*READ_AS_TEXTS))),
    "RegexpLike": SqlOperator("rlike", _sides(_only(*READ_AS_TEXTS))),
    "If": SqlOperator("if", _if), "Case": SqlOperator("case", _case), "Cast": SqlOperator("cast", _cast),
    "TryCast": SqlOperator("cast", _cast), "Bracket": SqlOperator("[]", _bracket),
    "Extract": SqlOperator("extract", lambda node: [([node.args["expression"]], _only("date", "timestamp", "string"))]),
}  # fmt: skip
_ALL = slice(None)
TOGETHER: dict[str, tuple[tuple[slice, Takes], ...]] = {
    **dict.fromkeys(("coalesce", "nvl", "ifnull", "array"), ((_ALL, alike),)),
    **dict.fromkeys(("nullif", "equal_null"), ((_ALL, comparable),)),
    **dict.fromkeys(("greatest", "least"), ((_ALL, _of_one_kind),)),
    "nvl2": ((slice(1, None), alike),),
    "sequence": ((_ALL, _wholes),),
    "map": ((slice(0, None, 2), _among_others), (slice(1, None, 2), alike)),
    **dict.fromkeys(("element_at", "try_element_at", "get"), ((_ALL, _element_at),)),
    **dict.fromkeys(
        ("array_contains", "array_position", "array_remove", "array_append", "array_prepend"), ((_ALL, _holds),)
    ),
    **dict.fromkeys(("array_except", "array_intersect", "array_union", "arrays_overlap"), ((_ALL, _of_one_kind),)),
}
"""Functions that ask no more than that these of their arguments go together."""
_STRUCTURE = """Paren Alias Aliases Literal Boolean Null Star Identifier Var Tuple Window WindowSpec Order Ordered
    Distinct Filter Where IgnoreNulls RespectNulls PropertyEQ RawString HexString DataType DataTypeParam Interval
    IntervalSpan CurrentDate CurrentTimestamp CurrentUser Struct"""
STRUCTURE = frozenset(_STRUCTURE.split())
"""Nodes that ask nothing of the types of what stands in them."""
