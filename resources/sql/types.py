"""The types of expressions, where they are certain: a type that is returned here is the one that
Spark returns.

Types have Spark's simple names ("bigint", "decimal(10,2)"). The type is None where no rule applies.
A nested type or an interval may be known in part only: "array<…>", "map<…>", "struct<…>",
"interval…".
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeAlias, TypeVar

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import LazyModule, exp
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import (
    Array,
    Digits,
    Map,
    Member,
    Simple,
    Struct,
    Type,
    known_type,
    write_name,
)
from dagster_adjunct.resources.sql.parsed import (
    ColumnName,
    Expression,
    constant_result_type,
    written_call,
)
from dagster_adjunct.resources.sql.result_types import (
    INTEGERS,
    NUMBERS,
    arithmetic_type,
    array_type,
    digits_as_decimal,
    element_type,
    field_type,
    key_type,
    map_type,
    rounded_type,
    struct_type,
    sum_type,
    widest_decimal,
)

Rule: TypeAlias = Callable[["KnownTypes", "exp.Expr"], str | None]
"""Returns the type of a node of one kind, None where it is uncertain."""
Known = TypeVar("Known", bound="KnownTypes")
_sqlglot_errors = LazyModule("sqlglot.errors")
_NAMED_BY_PARSER = re.compile(r"col\d+")
_CAST_TO = {
    **{name.upper(): name for name in (*NUMBERS, "boolean", "date", "binary", "timestamp")},
    "TEXT": "string",
    "TIMESTAMPTZ": "timestamp",
    "TIMESTAMPLTZ": "timestamp",
    "TIMESTAMPNTZ": "timestamp_ntz",
}
# The types of functions that always return the same type, by the names of the parser's nodes.
_RESULT_TYPES = {
    "boolean": (
        """EQ NEQ LT LTE GT GTE NullSafeEQ NullSafeNEQ And Or Not Is Between In Like ILike
        RegexpLike Escape Boolean StartsWith EndsWith Contains ArrayContains IsNan EqualNull
        Exists MapContainsKey LogicalAnd LogicalOr"""
    ),
    "string": (
        """Upper Lower Trim Initcap RegexpReplace RegexpExtract Replace Translate ConcatWs
        TimeToStr Hex MD5 SHA SHA2 JSONExtractScalar JSONFormat Soundex Chr SubstringIndex
        CurrentUser RawString Uuid UnixToStr Typeof Space RegexpSubstr SplitPart Format ToBase64
        ParseUrl ArrayToString Dayname Monthname ToChar"""
    ),
    "int": (
        """Length Ascii StrPosition Levenshtein Year Month Day DayOfMonth DayOfWeek DayOfYear Hour
        Minute Second Quarter WeekOfYear Week ArraySize BitLength RegexpCount RegexpInstr UnixDate
        BitwiseCount RowNumber Rank DenseRank Ntile"""
    ),
    "bigint": (
        """StrToUnix UnixSeconds UnixMillis UnixMicros ArrayPosition Count CountIf ApproxDistinct
        TimestampDiff Factorial"""
    ),
    "double": (
        """Sqrt Exp Ln Pow Sin Cos Tan Asin Acos Atan Atan2 Cbrt Degrees Radians MonthsBetween Log
        Pi Sign Rint Rand Stddev Variance"""
    ),
    "date": (
        "TsOrDsToDate TsOrDsAdd LastDay AddMonths CurrentDate NextDay DateTrunc DateFromUnixDate"
    ),
    "timestamp": "CurrentTimestamp TimestampTrunc AtTimeZone FromTimeZone",
    "binary": "HexString Unhex FromBase64 Encode",
    "void": "Null",
    "array<string>": "RegexpSplit RegexpExtractAll JSONKeys",
    "array<…>": "ArraysZip GenerateSeries",
    "map<string,string>": "StrToMap",
    "interval…": "Interval MakeInterval",
}


def _column(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of a column or a field of one."""
    if not isinstance(node, exp.Column) or isinstance(node.this, exp.Star):
        return None
    return known.column(ColumnName(tuple(part.name for part in node.parts)))


def _literal(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of a literal string or number; None for a number that is too large, or has a
    suffix.
    """
    if node.is_string:
        return "string"
    whole, point, part = node.name.partition(".")
    if not f"{whole}{part}".isdigit():
        if "e" in node.name.lower():
            return "double"
        return None
    if point:
        digits = len(whole.lstrip("0")) + len(part)
        if digits <= 38:
            return f"decimal({max(digits, 1)},{len(part)})"
        return None
    return _integer_type(int(whole))


def _integer_type(number: int) -> str | None:
    """Return the type of a literal whole number, None if it is too large."""
    if -(2**31) <= number < 2**31:
        return "int"
    if -(2**63) <= number < 2**63:
        return "bigint"
    return None


def _negation(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `-value`."""
    # The sign is a part of the literal: -2147483648 is an int, and 2147483648 is not.
    if _is_whole(node.this):
        return _integer_type(-int(node.this.name))
    return _signed(known.type(node.this))


def _as_text(kind: str | None) -> str | None:
    """Return the type of a part of a value of this type that is cast to a string, unless it is
    binary.
    """
    if kind is None or not isinstance(known_type(kind), Simple) or kind in ("binary", "void"):
        return None
    return "string"


def _signed(kind: str | None) -> str | None:
    """Return the type of a value of this type with a sign, or without: strings are cast."""
    if kind in NUMBERS or (kind or "").startswith("decimal("):
        return kind
    if kind is not None and kind.startswith("interval"):
        return "interval…"
    return "double" if kind == "string" else None


def _cast(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type that a cast names."""
    to = node.args["to"]
    nested = _nested_type(to)
    if nested is not None:
        return str(nested)
    return _simple_type(to)


def _simple_type(to: exp.Expr) -> str | None:
    """Return the simple type that a cast names, None if it is unknown."""
    name = ""
    if hasattr(to.this, "name"):
        name = to.this.name
    if name == "DECIMAL":
        given = [item.name for item in to.expressions]
        digits = [*given, *("10", "0")[len(given) :]]
        if len(digits) == 2 and all(map(str.isdigit, digits)):
            return f"decimal({','.join(digits)})"
        return None
    if to.expressions:
        return None
    return _CAST_TO.get(name)


def _nested_type(to: exp.Expr) -> Type | None:
    """Return the array, map or struct that a cast names, None for other types."""
    name = getattr(to.this, "name", "")
    if name == "ARRAY" and len(to.expressions) == 1:
        element = _named_type(to.expressions[0])
        if element is not None:
            return Array(element)
    if name == "MAP" and len(to.expressions) == 2:
        key, value = map(_named_type, to.expressions)
        if key == Simple("string") and value is not None:
            return Map(value)
    if name == "STRUCT":
        return _named_struct_type(to)
    return None


def _named_struct_type(to: exp.Expr) -> Struct | None:
    """Return the struct that a cast names, None if a part of it is unknown."""
    members = []
    for field in to.expressions:
        kind = field.args.get("kind")
        if type(field).__name__ != "ColumnDef" or kind is None:
            return None
        named = _named_type(kind)
        if named is None:
            return None
        members.append(Member(field.name, named))
    if not members:
        return None
    return Struct(tuple(members))


def _named_type(to: exp.Expr) -> Type | None:
    """Return the type that is named within a cast, None if it is unknown."""
    if type(to).__name__ != "DataType":
        return None
    return _nested_type(to) or known_type(_simple_type(to))


def _array(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `array(element, …)`."""
    return array_type(known.common_type(list(node.expressions)))


def _inner(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of the first argument, which is that of the result."""
    return known.type(node.this)


def _number(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of the argument, which is that of the result, if it is a number."""
    kind = known.type(node.this)
    if kind in NUMBERS or (kind or "").startswith("decimal("):
        return kind
    return None


def _rounded(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `round(number, places)`."""
    kind = known.type(node.this)
    places = node.args.get("decimals")
    digits = digits_as_decimal(kind)
    if kind in NUMBERS:
        return kind
    if kind == "string":
        return "double"
    if digits is None or (places is not None and not _is_whole(places)):
        return None
    return rounded_type(digits, 0 if places is None else int(places.name))


def _is_whole(node: exp.Expr) -> bool:
    """Whether a node is a literal whole number."""
    return (
        type(node).__name__ == "Literal" and node.name.isdigit() and not node.args.get("is_string")
    )


def _whole(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `floor(number)` and `ceil(number)`; None with a number of places."""
    if any(item for name, item in node.args.items() if name != "this"):
        return None
    kind = known.type(node.this)
    if kind in NUMBERS or kind == "string":
        return "bigint"
    digits = digits_as_decimal(kind)
    if digits is None:
        return None
    if digits.scale:
        return rounded_type(digits, 0)
    return kind


def _digits(known: KnownTypes, node: exp.Expr | None) -> Digits | None:
    """Return the digits of an operand of decimal arithmetic, None for one of another type. An
    integer literal has as many as its value.
    """
    while type(node).__name__ == "Paren" and node is not None:
        node = node.this
    if node is None:
        return None
    if type(node).__name__ == "Neg":
        plain = node.this
    else:
        plain = node
    if _is_whole(plain):
        return Digits(len(str(int(plain.name))), 0)
    return digits_as_decimal(known.type(node))


def _arithmetic(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `one + other` and other operators."""
    left = known.type(node.this)
    right = known.type(node.args.get("expression"))
    kinds = {left, right}
    if any((kind or "").startswith("decimal(") for kind in kinds):
        return _decimal_arithmetic(known, node, kinds)
    if left in INTEGERS and right in INTEGERS:
        return max(left, right, key=INTEGERS.index)
    if kinds <= {*INTEGERS, "double"} or kinds == {"float", "double"}:
        return "double"
    if kinds == {"float"}:
        return "float"
    if type(node).__name__ in ("Add", "Sub"):
        if left == "timestamp" and type(node.args.get("expression")).__name__ == "Interval":
            return "timestamp"
        if left == "date" and right == "int":
            return "date"
    return None


def _decimal_arithmetic(
    known: KnownTypes, node: exp.Expr, kinds: Collection[str | None]
) -> str | None:
    """Return the type of an operator with a decimal; `kinds` are the types of both operands."""
    one = _digits(known, node.this)
    other = _digits(known, node.args.get("expression"))
    if one is not None and other is not None:
        return arithmetic_type(type(node).__name__, one, other)
    if "float" in kinds or "double" in kinds:
        return "double"
    return None


def _operand_types(known: KnownTypes, node: exp.Expr) -> set[str | None]:
    """Return the types of both operands."""
    return {known.type(node.this), known.type(node.args.get("expression"))}


def _divided(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `one / other`."""
    kinds = _operand_types(known, node)
    if kinds <= set(NUMBERS):
        return "double"
    if widest_decimal(kinds):
        return _arithmetic(known, node)
    return None


def _divided_whole(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `one DIV other`."""
    if _operand_types(known, node) <= set(INTEGERS):
        return "bigint"
    return None


def _bits(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of a bitwise operator, if both operands have one type."""
    kinds = _operand_types(known, node)
    if len(kinds) == 1 and kinds <= set(INTEGERS):
        return kinds.pop()
    return None


def _shifted(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `value << bits` and `value >> bits`."""
    kind = known.type(node.this)
    if kind is None or kind == "bigint":
        return kind
    return "int"


def _joined(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `concat(one, …)` and `one || other`."""
    parts = node.expressions or [node.this, node.args.get("expression")]
    kinds = {known.type(part) for part in parts}
    if len(kinds) == 1:
        kind = kinds.pop()
        if kind == "string" or isinstance(known_type(kind), Array):
            return kind
    return None


def _case(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of CASE: the common one of its results."""
    results = [item.args.get("true") for item in node.args.get("ifs") or ()]
    return known.common_type([*results, node.args.get("default")])


def _if(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `if(condition, one, other)`: the common one of both results."""
    return known.common_type([node.args.get("true"), node.args.get("false")])


def _summed(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `sum(number)`."""
    kind = _number(known, node)
    if kind is None:
        return None
    return sum_type(kind)


def _same_array(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of the first argument, which is that of the result: of an array, also if
    nothing more is known.
    """
    return known.type(node.this) or "array<…>"


def _reversed(kind: str | None) -> str | None:
    """Return the type of `reverse(value)` for a value of this type."""
    if kind == "string" or isinstance(known_type(kind), Array):
        return kind
    return None


def _flattened(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `flatten(arrays)`."""
    return array_type(element_type(element_type(known.type(node.this))))


def _collected(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of the array that an aggregate collects."""
    return array_type(known.type(node.this))


def _of_like_arrays(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of arrays that are combined, if all have the same: otherwise Spark casts
    them, and the type of the elements is uncertain.
    """
    sides = node.expressions or [node.this, node.args.get("expression")]
    return _one_type(known, sides) or "array<…>"


def _of_like_maps(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of maps that are combined, if all have the same: otherwise Spark casts them,
    and the type of the values is uncertain.
    """
    return _one_type(known, node.expressions) or "map<…>"


def _one_type(known: KnownTypes, nodes: Iterable[exp.Expr | None]) -> str | None:
    """Return the type of these nodes, None if they have several."""
    kinds = {known.type(node) for node in nodes}
    if len(kinds) == 1:
        return kinds.pop()
    return None


def _with_element(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of an array to which an element is added, or from which one is removed; the
    type of its elements is uncertain if that element has another one.
    """
    kind = known.type(node.this)
    if element_type(kind) is None:
        return "array<…>"
    if element_type(kind) != known.type(node.args.get("expression")):
        return "array<…>"
    return kind


def _keys(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `map_keys(map)`."""
    return array_type(key_type(known.type(node.this)))


def _values(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `map_values(map)`."""
    kind = _first_type(known, node)
    if not isinstance(known_type(kind), Map):
        return "array<…>"
    return array_type(element_type(kind))


def _entries(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `map_entries(map)`."""
    kind = _first_type(known, node)
    if not isinstance(known_type(kind), Map):
        return "array<…>"
    return array_type(struct_type([("key", "string"), ("value", element_type(kind))]))


def _first_type(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of the first argument of a function that the parser has no class for."""
    if not node.expressions:
        return None
    return known.type(node.expressions[0])


def _map(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of a map made of an array of keys and an array of values."""
    keys = node.args.get("keys")
    values = node.args.get("values")
    return map_type(element_type(known.type(keys)), element_type(known.type(values)))


def _map_from_entries(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `map_from_entries(array)`."""
    entry = known_type(element_type(known.type(node.this)))
    if not isinstance(entry, Struct) or len(entry.members) != 2:
        return "map<…>"
    key, value = entry.members
    return map_type(str(key.type), str(value.type))


def _repeated(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `array_repeat(element, count)`."""
    return array_type(_first_type(known, node))


def _item(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `get(array, index)`."""
    return element_type(_first_type(known, node))


def _first_map(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of the first argument, which is that of the result: of a map, also if nothing
    more is known.
    """
    return _first_type(known, node) or "map<…>"


def _lambda_type(known: KnownTypes, function: exp.Expr | None) -> str | None:
    """Return the type of a lambda's result."""
    if function is None or type(function).__name__ != "Lambda":
        return None
    return known.within(function).type(function.this)


def _last_of(node: exp.Expr, arguments: int) -> exp.Expr | None:
    """Return the last of this number of arguments, None if there are more or fewer."""
    if len(node.expressions) != arguments:
        return None
    last: exp.Expr = node.expressions[-1]
    return last


def _transformed(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `transform(array, lambda)`."""
    return array_type(_lambda_type(known, node.args.get("expression")))


def _zipped(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `zip_with(array, array, lambda)`."""
    return array_type(_lambda_type(known, _last_of(node, 3)))


def _transformed_values(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `transform_values(map, lambda)`."""
    key = key_type(_first_type(known, node))
    return map_type(key, _lambda_type(known, _last_of(node, 2)))


def _transformed_keys(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `transform_keys(map, lambda)`."""
    value = element_type(_first_type(known, node))
    return map_type(_lambda_type(known, _last_of(node, 2)), value)


def _zipped_maps(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `map_zip_with(map, map, lambda)`."""
    keys = {key_type(known.type(part)) for part in node.expressions[:2]}
    if keys != {"string"}:
        return "map<…>"
    return map_type("string", _lambda_type(known, _last_of(node, 3)))


def _reduced(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `aggregate(array, initial, merge, finish)`."""
    kind = known.type(node.args.get("initial"))
    if kind == "void":
        return None
    finish = node.args.get("finish")
    if finish is None:
        return kind
    return _lambda_type(known, finish)


def _bracket(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `value[index]`, of an array or map, or `value['field']`, of a struct or
    map.
    """
    kind = known.type(node.this)
    if len(node.expressions) != 1:  # `value[1, 2]` is no SQL of Spark's
        return None
    index = node.expressions[0]
    if isinstance(index, exp.Literal) and index.is_string:
        return field_type(kind, index.name)
    return element_type(kind)


def _field(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `value.field`."""
    field = node.args.get("expression")
    if type(field).__name__ == "Identifier" and field:
        return field_type(known.type(node.this), field.name)
    return None


def _struct(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `struct(…)` and `named_struct(…)`; "struct<…>" if a field has no name."""
    fields: list[tuple[str, str | None]] = []
    for item in node.expressions:
        value = item.args.get("expression")
        named = type(item).__name__ == "PropertyEQ" and type(item.this).__name__ == "Identifier"
        if not named or _NAMED_BY_PARSER.fullmatch(item.this.name):
            return "struct<…>"
        fields.append((item.this.name, known.type(value)))
    return struct_type(fields)


def _from_json(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `from_json(text, schema)`; None for an invalid or no literal schema."""
    schema = node.args.get("expression")
    if schema is None or not getattr(schema, "is_string", False):
        return None
    whole = known_type(schema.name)
    if whole is not None:
        return str(whole)
    try:  # columns, "a INT, b ARRAY<STRING>"
        return struct_type(
            (field.name, field.type) for field in Schema.from_ddl(schema.name).fields
        )
    except SchemaMismatchError:
        return None


def _extracted(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of `extract(unit from time)`; None for an interval, and for what may be
    one.
    """
    if (known.type(node.args.get("expression")) or "interval").startswith("interval"):
        return None
    if node.name.lower() in ("second", "seconds", "s", "sec", "secs"):
        return "decimal(8,6)"
    return "int"


def _always(kind: str) -> Rule:
    """Return the rule for results of this type."""
    return lambda known, node: kind


_NAMED: dict[str, Rule] = {
    "array_repeat": _repeated,
    "array_union": _of_like_arrays,
    "get": _item,
    "map_concat": _of_like_maps,
    "map_entries": _entries,
    "map_filter": _first_map,
    "map_values": _values,
    "map_zip_with": _zipped_maps,
    "positive": lambda known, node: _signed(_first_type(known, node)),
    "transform_keys": _transformed_keys,
    "transform_values": _transformed_values,
    "zip_with": _zipped,
}


def _by_name(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of a call of a function that the parser has no class for."""
    rule = _NAMED.get(str(node.this).lower())
    if rule is None:
        return None
    return rule(known, node)


def _by_call(known: KnownTypes, node: exp.Expr) -> str | None:
    """Return the type of a call of a function that always returns the same one."""
    call = written_call(node)
    if call is None:
        return None
    return constant_result_type(call.name, len(call.arguments))


TYPE_RULES: dict[str, Rule] = {
    "Column": _column,
    "Literal": _literal,
    "Cast": _cast,
    "TryCast": _cast,
    "Paren": _inner,
    "Neg": _negation,
    "Abs": lambda known, node: _signed(known.type(node.this)),
    "BitwiseNot": _number,
    "Round": _rounded,
    "Floor": _whole,
    "Ceil": _whole,
    "Add": _arithmetic,
    "Sub": _arithmetic,
    "Mul": _arithmetic,
    "Mod": _arithmetic,
    "Div": _divided,
    "IntDiv": _divided_whole,
    "BitwiseAnd": _bits,
    "BitwiseOr": _bits,
    "BitwiseXor": _bits,
    "BitwiseLeftShift": _shifted,
    "BitwiseRightShift": _shifted,
    "DPipe": _joined,
    "Concat": _joined,
    "Nullif": _inner,
    "Case": _case,
    "If": _if,
    "Array": _array,
    "Window": _inner,
    "IgnoreNulls": _inner,
    "RespectNulls": _inner,
    "Filter": _inner,
    "Sum": _summed,
    "Min": _inner,
    "Max": _inner,
    "First": _inner,
    "Last": _inner,
    "FirstValue": _inner,
    "LastValue": _inner,
    "AnyValue": _inner,
    "Negative": lambda known, node: _signed(known.type(node.this)),
    **dict.fromkeys(("ArrayDistinct", "ArraySort", "ArrayFilter", "ArraySlice"), _same_array),
    **dict.fromkeys(("ArrayCompact", "Shuffle"), _same_array),
    **dict.fromkeys(("ArrayExcept", "ArrayIntersect"), _of_like_arrays),
    **dict.fromkeys(("ArrayRemove", "ArrayAppend", "ArrayPrepend", "ArrayInsert"), _with_element),
    **dict.fromkeys(("ArrayAgg", "ArrayUniqueAgg"), _collected),
    "Flatten": _flattened,
    "Reduce": _reduced,
    "Bracket": _bracket,
    "MapKeys": _keys,
    "Map": _map,
    "VarMap": _map,
    "MapFromEntries": _map_from_entries,
    "Transform": _transformed,
    "Dot": _field,
    "Struct": _struct,
    "FromJson": _from_json,
    "Extract": _extracted,
    "Nvl2": _if,
    "Reverse": lambda known, node: _reversed(known.type(node.this)),
    **{name: _always(kind) for kind, names in _RESULT_TYPES.items() for name in names.split()},
    **dict.fromkeys(  # of several records, it is an array
        ("ArgMax", "ArgMin"),
        lambda known, node: "array<…>" if node.args.get("count") else known.type(node.this),
    ),
    **dict.fromkeys(
        ("Substring", "Left", "Right", "Pad", "Repeat"),
        lambda known, node: _as_text(known.type(node.this)),
    ),
    **dict.fromkeys(
        ("Coalesce", "Greatest", "Least"),
        lambda known, node: known.common_type([node.this, *node.expressions]),
    ),
    **dict.fromkeys(
        ("ArrayMax", "ArrayMin"), lambda known, node: element_type(known.type(node.this))
    ),
    "Anonymous": _by_name,
    "Identifier": lambda known, node: known.variable(node.name).type,
    "Avg": lambda known, node: "double" if known.type(node.this) in NUMBERS else None,
    "DateDiff": lambda known, node: "int" if node.args.get("unit") is None else "bigint",
}


# How lambdas are called, by the parser's nodes and the names of functions that it has no class for.


def _elements_of(known: KnownTypes, node: exp.Expr | None) -> Variable:
    """Return the variable that stands for the elements of an array."""
    kind = known.type(node)
    if not isinstance(known_type(kind), Array):
        return Variable(None)
    return Variable(element_type(kind), _path_within(known.path(node), "[]"))


def _entries_of(known: KnownTypes, *nodes: exp.Expr) -> list[Variable]:
    """Return variables that stand for a key of these maps, and for a value of each."""
    kinds = list(map(known.type, nodes))
    variables = [Variable(key_type(kinds[0]))]
    for kind, node in zip(kinds, nodes, strict=True):
        if isinstance(known_type(kind), Map):
            path = _path_within(known.path(node), "[*]")
            variables.append(Variable(element_type(kind), path))
        else:
            variables.append(Variable(None))
    return variables


def _path_within(path: str, step: str) -> str:
    """Return the path of a part of a value; "" if the value has none."""
    return path and path + step


def _of_elements(known: KnownTypes, node: exp.Expr, function: exp.Expr) -> list[Variable]:
    """Return the variable of a lambda that gets an element."""
    return [_elements_of(known, node.this)]


def _of_elements_by_index(known: KnownTypes, node: exp.Expr, function: exp.Expr) -> list[Variable]:
    """Return the variables of a lambda that gets an element and its index."""
    return [_elements_of(known, node.this), Variable("int")]


def _of_two_elements(known: KnownTypes, node: exp.Expr, function: exp.Expr) -> list[Variable]:
    """Return the variables of a lambda that gets two elements."""
    return [_elements_of(known, node.this)] * 2


def _of_reduce(known: KnownTypes, node: exp.Expr, function: exp.Expr) -> list[Variable]:
    """Return the variables of a lambda of `aggregate`: the result so far, and an element unless it
    is the last lambda.
    """
    kind = known.type(node.args.get("initial"))
    result = Variable(None if kind == "void" else kind)
    if function is node.args.get("finish"):
        return [result]
    return [result, _elements_of(known, node.this)]


def _of_entries(known: KnownTypes, node: exp.Expr, function: exp.Expr) -> list[Variable]:
    """Return the variables of a lambda that gets a key and its value."""
    return _entries_of(known, node.expressions[0])


_LAMBDAS: dict[str, Callable[[KnownTypes, exp.Expr, exp.Expr], list[Variable]]] = {
    "ArrayFilter": _of_elements_by_index,
    "ArraySort": _of_two_elements,
    "Exists": _of_elements,
    "Reduce": _of_reduce,
    "Transform": _of_elements_by_index,
    "forall": lambda known, node, function: [_elements_of(known, node.expressions[0])],
    "map_filter": _of_entries,
    "map_zip_with": lambda known, node, function: _entries_of(known, *node.expressions[:2]),
    "transform_keys": _of_entries,
    "transform_values": _of_entries,
    "zip_with": lambda known, node, function: [
        _elements_of(known, array) for array in node.expressions[:2]
    ],
}


def function_of_lambda(function: exp.Expr) -> str:
    """Return the node or function that calls a lambda, as in _LAMBDAS; "" if it is not known."""
    caller = function.parent
    name = type(caller).__name__
    if caller is not None and name == "Anonymous":
        name = str(caller.this).lower()
    return name if name in _LAMBDAS else ""


def lambda_arguments(known: KnownTypes, function: exp.Expr) -> list[Variable] | None:
    """Return the variables that a lambda may take, or fewer; None if they are not known."""
    name = function_of_lambda(function)
    if not name or function.parent is None:
        return None
    return _LAMBDAS[name](known, function.parent, function)


def walk_with_types(known: Known, tree: exp.Expr) -> Iterator[tuple[Known, exp.Expr]]:
    """Yield the nodes of a tree, those outside first, each with the types that are known there."""
    nodes = deque([(known, tree)])
    while nodes:
        here, node = nodes.popleft()
        yield here, node
        inside = here.within(node) if type(node).__name__ == "Lambda" else here
        nodes.extend((inside, part) for part in node.iter_expressions())


_NON_BOOLEAN = re.compile(
    r"(?:tinyint|smallint|int|bigint|float|double|decimal|date|timestamp|timestamp_ntz|binary"
    r"|interval|array|map|struct)\b"
)


def expression_type(expression: Expression, types: Mapping[str, str | None]) -> str | None:
    """Return the type of an expression over columns of these types; None where it is uncertain."""
    known = KnownTypes(types)
    if expression.column is not None:
        return known.column(ColumnName((expression.column,)))
    if expression.tree is None or expression.unread or expression.star:
        return None
    return known.type(expression.tree)


def referenced_types(
    expression: Expression, types: Mapping[str, str | None]
) -> tuple[tuple[str, str | None], ...]:
    """Return (name, type) of each column and field that an expression references, on which its own
    type depends. Fields of unknown type are left out, columns are not.
    """
    known = KnownTypes(types)
    named: dict[str, str | None] = {}
    for column in expression.columns:
        named[column.name] = known.column(ColumnName((column.name,)))
        if len(column.parts) > 1 and (kind := known.column(column)) is not None:
            named[str(column)] = kind
    return tuple(named.items())


def _field_within(kind: str | None, fields: Iterable[str]) -> str | None:
    """Return the type of a field at these steps within a value of this type, None if it
    is unknown.
    """
    for field in fields:
        kind = field_type(kind, field)
    return kind


def types_differ(one: str, other: str) -> bool:
    """Whether two types certainly differ, as far as both are known."""
    if "…" not in one and "…" not in other:
        return one != other
    begin_of_one = one.partition("…")[0]
    begin_of_other = other.partition("…")[0]
    may_be_equal = begin_of_one.startswith(begin_of_other) or begin_of_other.startswith(
        begin_of_one
    )
    return not may_be_equal


def sql_of(node: exp.Expr) -> str:
    """Return a node as Spark SQL for messages."""
    # By default, sqlglot logs what it leaves out, such as an argument that it does not know.
    return node.sql("spark", unsupported_level=_sqlglot_errors.ErrorLevel.IGNORE)


class TypedOperand(NamedTuple):
    """An operand as SQL, and its type."""

    text: str
    type: str


def find_non_boolean_operand(
    expression: Expression, types: Mapping[str, str | None]
) -> TypedOperand | None:
    """Return the first operand of "and", "or" or "not" that is certainly not boolean, or None."""
    if expression.tree is None or expression.unread:
        return None
    for known, node in walk_with_types(KnownTypes(types), expression.tree):
        if type(node).__name__ not in ("And", "Or", "Not"):
            continue
        sides = list(filter(None, [node.this, node.args.get("expression")]))
        kinds = [known.type(operand) or "" for operand in sides]
        for operand, kind in zip(sides, kinds, strict=True):
            # Spark casts a string, unless the other operand is one, too.
            if _NON_BOOLEAN.match(kind) or kinds == ["string", "string"]:
                return TypedOperand(sql_of(operand), kind)
    return None


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a lambda: its type, and the path of what it stands for ("items[]"), "" for a
    key, an index or an intermediate result.
    """

    type: str | None
    path: str = ""


class KnownTypes:
    """The types of columns by name, ignoring case, and the variables of lambdas by their names in
    lower case.
    """

    def __init__(
        self, types: Mapping[str, str | None], variables: Mapping[str, Variable] | None = None
    ) -> None:
        self._types = types
        self._variables: Mapping[str, Variable] = variables or {}
        # Built for the first name that has no exact match.
        self._by_lower: dict[str, str | None] | None = None

    def within(self, function: exp.Expr) -> Self:
        """Return these types together with those of a lambda's variables, for the nodes within
        it.
        """
        names = [variable.name.lower() for variable in function.expressions]
        given = lambda_arguments(self, function) or ()
        variables = dict.fromkeys(names, Variable(None)) | dict(zip(names, given, strict=False))
        return type(self)(self._types, {**self._variables, **variables})

    def column(self, name: ColumnName) -> str | None:
        """Return the type of a column or a variable or, for a name with several parts, of a field;
        None if unknown.
        """
        if name.name.lower() in self._variables:
            return _field_within(self.variable(name.name).type, name.parts[1:])
        whole = str(name)
        if whole in self._types:
            return self._types[whole]
        if self._by_lower is None:
            self._by_lower = {column.lower(): kind for column, kind in self._types.items()}
        kind = self._by_lower.get(whole.lower())
        if kind is not None or len(name.parts) == 1:
            return kind
        return _field_within(self._by_lower.get(name.name.lower()), name.parts[1:])

    def variable(self, name: str) -> Variable:
        """Return the variable of this name, one of which nothing is known if there is none."""
        return self._variables.get(name.lower(), Variable(None))

    def path(self, node: exp.Expr | None) -> str:
        """Return the path of a column, or of a part of one, as users write it; "" for other
        nodes.
        """
        if node is None:
            return ""
        match type(node).__name__:
            case "Paren":
                return self.path(node.this)
            case "Identifier":
                return self.variable(node.name).path
            case "Column":
                first, *fields = [part.name for part in node.parts]  # type: ignore[attr-defined]
                if first.lower() in self._variables:
                    path = self.variable(first).path
                else:
                    path = write_name(first)
                return _path_within(path, "".join(f".{write_name(field)}" for field in fields))
            case "Dot":
                return _path_within(self.path(node.this), f".{write_name(node.expression.name)}")
            case "Bracket":
                return _path_within(self.path(node.this), "[]")
        return ""

    def type(self, node: exp.Expr | None) -> str | None:
        """Return the type of a syntax node; None where it is uncertain."""
        if node is None:
            return None
        rule = TYPE_RULES.get(type(node).__name__)
        kind = None if rule is None else rule(self, node)
        return kind or _by_call(self, node)

    def common_type(self, nodes: list[exp.Expr | None]) -> str | None:
        """Return the type to which Spark casts all of these nodes, ignoring nulls; None where it is
        uncertain.

        It is their own type, if they have the same, or the widest of their numeric types.
        """
        kinds = {self.type(node) for node in nodes if node is not None} - {"void"}
        if len(kinds) == 1:
            return kinds.pop()
        if kinds and kinds <= set(INTEGERS):
            return max((kind for kind in kinds if kind), key=INTEGERS.index)
        if "double" in kinds and kinds <= set(NUMBERS):
            return "double"
        return widest_decimal(kinds)
