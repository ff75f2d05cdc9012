"""The type of an expression, where it is certain: what is called a type here is called so by Spark.

Types are in Spark's simple spelling ("bigint", "decimal(10,2)"). Whatever is not told by a rule here is None: unproven.
Of one that is certainly nested, or an interval, not all may be known: "array<…>", "map<…>", "struct<…>", "interval…".
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
_NO_TRUTHS = frozenset({*_NUMBERS, "date", "timestamp", "timestamp_ntz", "binary"})
_CAST_TO = {
    **{name.upper(): name for name in (*_NUMBERS, "boolean", "date", "binary", "timestamp")},
    "TEXT": "string",
    "TIMESTAMPTZ": "timestamp",
    "TIMESTAMPLTZ": "timestamp",
    "TIMESTAMPNTZ": "timestamp_ntz",
}
# What functions give whatever they are given, as far as Spark accepts it, by the names of the parser's nodes.
_GIVE = {
    "boolean": """EQ NEQ LT LTE GT GTE NullSafeEQ NullSafeNEQ And Or Not Is Between In Like ILike RegexpLike Escape
        Boolean StartsWith EndsWith Contains ArrayContains IsNan""",
    "string": """Upper Lower Trim Initcap RegexpReplace RegexpExtract Replace Translate ConcatWs TimeToStr Hex MD5 SHA
        SHA2 JSONExtractScalar JSONFormat Soundex Chr SubstringIndex CurrentUser RawString Uuid UnixToStr Typeof""",
    "int": """Length Ascii StrPosition Levenshtein Year Month Day DayOfMonth DayOfWeek DayOfYear Hour Minute Second
        Quarter WeekOfYear Week ArraySize BitLength""",
    "bigint": "StrToUnix",
    "double": "Sqrt Exp Ln Pow Sin Cos Tan Asin Acos Atan Atan2 Cbrt Degrees Radians MonthsBetween Log Pi",
    "date": "TsOrDsToDate TsOrDsAdd LastDay AddMonths CurrentDate NextDay",
    "timestamp": "CurrentTimestamp",
    "binary": "HexString Unhex",
    "void": "Null",
    "array<string>": "RegexpSplit",
    "array<…>": """ArrayDistinct ArrayExcept ArrayIntersect ArrayRemove ArrayAppend ArrayCompact ArrayInsert ArraySort
        ArrayFilter ArraySlice ArraysZip Transform GenerateSeries Flatten MapKeys""",
    "map<…>": "VarMap Map MapFromEntries StrToMap",
    "struct<…>": "Struct",
    "interval…": "Interval MakeInterval",
}
_GIVE_BY_NAME = {
    "boolean": "isnull isnotnull",
    "int": "hash char_length character_length",
    "bigint": "xxhash64 unix_date unix_seconds unix_millis unix_micros",
    "string": "current_catalog uuid base64 sha1 crc split_part btrim lcase ucase space format_string printf to_json",
    "array<…>": "array_repeat array_union map_entries map_values zip_with sentences",
    "map<…>": "map_concat map_filter map_zip_with transform_keys transform_values",
    **{name: name for name in (*_NUMBERS, "boolean", "date", "binary", "timestamp")},
}


def type_of(expression: Expression, types: Mapping[str, str | None]) -> str | None:
    """Return the type of an expression over columns of these types; None where it is not certain."""
    known = Known(types)
    if expression.column is not None:
        return known.column(ColumnName((expression.column,)))
    if expression.tree is None or expression.unread or expression.star:
        return None
    return known.type(expression.tree)


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

    known = Known(types)
    for node in expression.tree.find_all(exp.And, exp.Or, exp.Not):
        for operand in (node.this, node.args.get("expression")):
            kind = known.type(operand)
            # Spark takes a text for what it says; in a lambda, a name may be a variable's.
            certain = kind is not None and (kind in _NO_TRUTHS or kind.startswith("decimal("))
            if operand is not None and certain and node.find_ancestor(exp.Lambda) is None:
                return operand.sql("spark"), str(kind)
    return None


class Known:
    """Types of columns by name, whatever its case; no two names differ in case alone."""

    def __init__(self, types: Mapping[str, str | None]) -> None:
        self._types = types
        self._by_lower: dict[str, str | None] | None = None  # made for the first name that is in no such case there

    def column(self, name: ColumnName) -> str | None:
        """Return the type of a column, or of a field that is known by its whole name."""
        whole = str(name)
        if whole in self._types:
            return self._types[whole]
        if self._by_lower is None:
            self._by_lower = {column.lower(): kind for column, kind in self._types.items()}
        return self._by_lower.get(whole.lower())

    def type(self, node: exp.Expr | None) -> str | None:
        """Return the type of a node of a parsed expression."""
        rule = None if node is None else RULES.get(type(node).__name__)
        return None if rule is None or node is None else rule(self, node)

    def alike(self, nodes: list[exp.Expr | None]) -> str | None:
        """Return the type that all become that are not null: their own, or of numbers the widest."""
        kinds = {self.type(node) for node in nodes if node is not None} - {"void"}
        if len(kinds) == 1:
            return kinds.pop()
        if kinds and kinds <= set(_INTEGERS):
            return max((kind for kind in kinds if kind), key=_INTEGERS.index)
        return "double" if "double" in kinds and kinds <= set(_NUMBERS) else None

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
    whole, point, part = node.name.partition(".")
    if not f"{whole}{part}".isdigit():
        return "double" if "e" in node.name.lower() else None
    if point:
        digits = len(whole.lstrip("0")) + len(part)
        return f"decimal({max(digits, 1)},{len(part)})" if digits <= 38 else None
    return "int" if int(whole) < 2**31 else "bigint" if int(whole) < 2**63 else None


def _cast(known: Known, node: exp.Expr) -> str | None:
    to = node.args["to"]
    name = to.this.name if hasattr(to.this, "name") else ""
    if name == "DECIMAL":
        digits = [item.name for item in to.expressions]
        return f"decimal({digits[0]},{digits[1]})" if len(digits) == 2 and all(map(str.isdigit, digits)) else None
    return None if to.expressions else _CAST_TO.get(name)


def _array(known: Known, node: exp.Expr) -> str | None:
    element = known.alike(list(node.expressions))
    return "array<…>" if element is None or "…" in element else f"array<{element}>"


def _inner(known: Known, node: exp.Expr) -> str | None:
    return known.type(node.this)


def _number(known: Known, node: exp.Expr) -> str | None:
    kind = known.type(node.this)
    return kind if kind in _NUMBERS and len([item for item in node.args.values() if item is not None]) == 1 else None


def _rounded(known: Known, node: exp.Expr) -> str | None:
    kind = known.type(node.this)
    return kind if kind in _NUMBERS else None


def _whole(known: Known, node: exp.Expr) -> str | None:
    alone = all(not item for name, item in node.args.items() if name != "this")
    return "bigint" if alone and known.type(node.this) in _NUMBERS else None


def _arithmetic(known: Known, node: exp.Expr) -> str | None:
    left, right = known.type(node.this), known.type(node.args.get("expression"))
    if left in _INTEGERS and right in _INTEGERS:
        return max(left, right, key=_INTEGERS.index)
    if {left, right} <= {*_INTEGERS, "double"} or {left, right} == {"float", "double"}:
        return "double"
    if left == right == "float":
        return "float"
    if type(node).__name__ in ("Add", "Sub"):
        if left == "timestamp" and type(node.args.get("expression")).__name__ == "Interval":
            return "timestamp"
        if left == "date" and right == "int":
            return "date"
    return None


def _divided(known: Known, node: exp.Expr) -> str | None:
    kinds = {known.type(node.this), known.type(node.args.get("expression"))}
    return "double" if kinds <= set(_NUMBERS) else None


def _divided_whole(known: Known, node: exp.Expr) -> str | None:
    kinds = {known.type(node.this), known.type(node.args.get("expression"))}
    return "bigint" if kinds <= set(_INTEGERS) else None


def _bits(known: Known, node: exp.Expr) -> str | None:
    kind = known.same(node.this, node.args.get("expression"))
    return kind if kind in _INTEGERS else None


def _joined(known: Known, node: exp.Expr) -> str | None:
    parts = node.expressions or [node.this, node.args.get("expression")]
    return "string" if parts and all(known.type(part) == "string" for part in parts) else None


def _text(known: Known, node: exp.Expr) -> str | None:
    return "string" if known.type(node.this) == "string" else None


def _alike(known: Known, node: exp.Expr) -> str | None:
    return known.alike([node.this, *node.expressions])


def _case(known: Known, node: exp.Expr) -> str | None:
    return known.alike([item.args.get("true") for item in node.args.get("ifs") or ()] + [node.args.get("default")])


def _if(known: Known, node: exp.Expr) -> str | None:
    return known.alike([node.args.get("true"), node.args.get("false")])


def _by_name(known: Known, node: exp.Expr) -> str | None:
    return _NAMED.get(str(node.this).lower())


def _always(kind: str) -> Rule:
    return lambda known, node: kind


_NAMED = {name: kind for kind, names in _GIVE_BY_NAME.items() for name in names.split()}
RULES: dict[str, Rule] = {
    "Column": _column, "Literal": _literal, "Cast": _cast, "TryCast": _cast, "Paren": _inner, "Neg": _number,
    "Abs": _number, "BitwiseNot": _number, "Round": _rounded, "Floor": _whole, "Ceil": _whole, "Add": _arithmetic,
    "Sub": _arithmetic, "Mul": _arithmetic, "Mod": _arithmetic, "Div": _divided, "IntDiv": _divided_whole,
    "BitwiseAnd": _bits, "BitwiseOr": _bits, "BitwiseXor": _bits, "DPipe": _joined, "Concat": _joined,
    "Substring": _text, "Left": _text, "Right": _text, "Pad": _text, "Repeat": _text, "Reverse": _text,
    "Coalesce": _alike, "Greatest": _alike, "Least": _alike, "Nullif": _inner, "Case": _case, "If": _if,
    "Anonymous": _by_name, "Array": _array,
    **{name: _always(kind) for kind, names in _GIVE.items() for name in names.split()},
}  # fmt: skip
