"""Expressions evaluated by Arrow, without Spark, where the result is certain to be Spark's (ANSI mode, UTC).

An expression is taken only if all of its functions and types are in the tables below. Where a result depends on the
values (an overflow, letters that are not ASCII), `evaluate` raises NeedsSpark: Spark computes the value or the error.
Spark may skip operands that raise, which are all evaluated here, so that at worst it is asked needlessly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, TypeAlias

from dagster_adjunct.resources.lazy_modules import exp, pa, pc
from dagster_adjunct.resources.schemas.schema import arrow_type, is_storable, is_widening
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.sql.types import (
    INTEGERS,
    NUMBERS,
    Digits,
    arithmetic_type,
    digits_as_decimal,
    widest_decimal,
)  # fmt: skip

Compute: TypeAlias = Callable[["pa.Table"], Any]
"""Returns an Arrow array, or a scalar that stands for all rows."""
_FLOATS = ("float", "double")
_BITS = {"tinyint": 7, "smallint": 15, "int": 31, "bigint": 63}


class NeedsSpark(Exception):
    """These values can only be computed by Spark, which may also find an error in them."""


class _Untaken(Exception):
    """The reason why an expression is left to Spark, as a noun phrase."""


@dataclass(frozen=True, slots=True)
class ArrowExpression:
    """A compiled expression: the Spark type of its result and the columns that it reads."""

    type: str
    columns: tuple[str, ...]
    _compute: Compute = field(repr=False)

    def evaluate(self, table: pa.Table) -> pa.Array:
        """Return one value for each row, of the Arrow type of `type`. Raises NeedsSpark."""
        try:
            result = self._compute(table)
            if isinstance(result, pa.Scalar):
                result = pa.repeat(result, table.num_rows)
        except pa.ArrowException:  # its text may contain values of sensitive columns
            raise NeedsSpark("an overflow, or a value that can't be cast") from None
        if not isinstance(result, pa.Array) or result.type != arrow_type(self.type):
            raise NeedsSpark(f"a result that is {result.type}")
        return result


@dataclass(frozen=True, slots=True)
class _Value:
    """A compiled part. An untyped null is "void". `literal` is the value of a literal."""

    type: str
    compute: Compute
    literal: Any = None


def compile_expression(text: str, types: Mapping[str, str]) -> ArrowExpression | str:
    """Return the expression over columns of these types, or the reason why it needs Spark, as a noun phrase."""
    expression = parse_expression(text)
    if expression.star:
        return "*"
    if expression.unread:
        return "a subquery" if "subquery" in expression.unread else _UNSURE
    compiler = _Compiler(types)
    try:
        _check_text(text, expression.tree, expression.alias)
        value = compiler.column(str(expression.column)) if expression.tree is None else compiler.value(expression.tree)
    except _Untaken as reason:
        return str(reason)
    except RecursionError:
        return "an expression nested this deeply"
    if value.type == "void":
        return "an untyped null"
    return ArrowExpression(value.type, tuple(compiler.columns), value.compute)


# Texts that the parser may read otherwise than Spark. Quoted parts are shortened to their first quote.

_UNSURE = "an expression that only Spark can parse"
_QUOTED = re.compile(r"(['\"`])(?:(?!\1).)*\1", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w`.])\.?\d[\w.]*", re.ASCII)
_UNUSUAL = {
    "a comment": re.compile(r"--|/\*"),
    "an escape in a text": re.compile(r"\\|\$\{"),
    "a typed or repeated text": re.compile(
        r"(['\"]|\b(?!(?:and|or|not|when|then|else|case|like|between|date|timestamp)\b)[a-z_]\w*)\s*['\"]", re.I | re.A
    ),
    _UNSURE: re.compile(r"[^\w\s.,()=<>!+*/%|'\"`-]|!(?!=)|,\s*[,)]|\(\s*,|\btry_cast\b", re.I | re.A),
}
_CAST_TYPES = frozenset({"string", "boolean", "date", "timestamp", "decimal", *NUMBERS})
_CAST = re.compile(r"\bas\s+(\w+)\s*(?:\([^)]*\))?\s*\)", re.IGNORECASE | re.ASCII)
_GROUP = re.compile(r"(^|[^\w\s]|\b\w+)\s*(?=\()", re.ASCII)
_BEFORE_GROUP = frozenset({"and", "or", "not", "when", "then", "else", "case", "between"})
_SIGNS = {"+": {"Add"}, "-": {"Neg", "Sub"}, "*": {"Mul"}, "/": {"Div"}, "%": {"Mod"}, "||": {"DPipe"}}
_LOOSE = {"And", "Or", "Not", "Is", "In", "Between", "Like", "EQ", "NEQ", "NullSafeEQ", "LT", "LTE", "GT", "GTE"}
_TIGHT = {*_LOOSE, "Add", "Sub", "Mul", "Div", "IntDiv", "Mod", "Neg", "DPipe"} - {"And", "Or", "Not"}


def _check_text(text: str, tree: exp.Expr | None, alias: str | None) -> None:
    """Raise _Untaken unless the tree is certainly as Spark reads the text."""
    plain = _QUOTED.sub(lambda match: match[1], text)
    if "\\" in text or "${" in text:
        raise _Untaken("an escape in a text")
    for what, pattern in _UNUSUAL.items():
        if pattern.search(plain):
            raise _Untaken(what)
    for number in _NUMBER.findall(plain):
        if not re.fullmatch(r"\d+L?|\d+\.\d+", number):
            raise _Untaken(f"the number {number}")
    for kind in _CAST.findall(plain):
        if kind.lower() not in _CAST_TYPES:
            raise _Untaken(f"a cast to {kind.lower()}")
    if tree is None:
        return
    names = [type(node).__name__ for node in tree.walk()]
    groups = [match[1].lower() for match in _GROUP.finditer(plain)]
    written = sum(not re.match(r"\w", word) or word in _BEFORE_GROUP for word in groups)
    same = written == names.count("Paren")  # the parser adds some
    same &= all(plain.count(sign) == sum(map(names.count, nodes)) for sign, nodes in _SIGNS.items())
    same &= alias is None or re.search(r"\bas\s+(`|\w+)\s*$", plain, re.IGNORECASE | re.ASCII) is not None
    if not same or any(_has_unsure_operand(node) for node in tree.walk()):
        raise _Untaken(_UNSURE)


def _has_unsure_operand(node: exp.Expr) -> bool:
    """Whether an operand, without parentheses, is one for which Spark has another precedence: `a = b < c`."""
    operands = [type(operand).__name__ for operand in node.iter_expressions()]
    name = type(node).__name__
    if name == "DPipe":
        return any(operand in _TIGHT - {"DPipe"} for operand in operands)
    return name in _TIGHT and any(operand in _LOOSE or operand == "DPipe" for operand in operands)


# Values and functions.


class _Compiler:
    """Compiles the nodes of a syntax tree, and collects the columns that they read."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types
        self.columns: dict[str, None] = {}

    def column(self, name: str) -> _Value:
        found = [column for column in self._types if column.lower() == name.lower()]
        if len(found) != 1 or (found[0] != name and not name.isascii()):
            raise _Untaken(f"the {'ambiguous' if found else 'unknown'} column {name}")
        kind = self._types[found[0]]
        if not is_storable(kind):
            raise _Untaken(f"a column of type {kind}")
        self.columns[found[0]] = None

        def read(table: pa.Table) -> Any:
            column = table.column(found[0])
            return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()

        return _Value(kind, read)

    def value(self, node: exp.Expr) -> _Value:
        """Return the compiled node. Raises _Untaken."""
        name = type(node).__name__
        rule, *arguments = _RULES.get(name, (None,))
        given = {key for key, argument in node.args.items() if argument not in (None, [], False)}
        if rule is None or not given <= {"this", "expression", "expressions", *arguments}:
            raise _Untaken(_describe(node))
        return rule(self, node)

    def values(self, *nodes: exp.Expr) -> list[_Value]:
        return [self.value(node) for node in nodes]

    def condition(self, node: exp.Expr) -> _Value:
        value = self.value(node)
        if value.type not in ("boolean", "void"):
            raise _Untaken(f"a condition of type {value.type}")
        return _cast(value, "boolean")

    def text(self, node: exp.Expr) -> _Value:
        value = self.value(node)
        if value.type != "string":
            raise _Untaken(f"a function of text with {_a(value.type)}")
        return value


def _describe(node: exp.Expr) -> str:
    if isinstance(node, exp.Window):
        return "a window function"
    if isinstance(node, exp.Anonymous):
        return f"function {node.name.lower()}"
    if isinstance(node, exp.Func):
        return f"function {node.sql_name().lower()}"
    return f"the syntax of {node.key}"


def _a(kind: str) -> str:
    return f"an {kind}" if kind == "int" else "null" if kind == "void" else f"a {kind}"


def _call(function: Callable[..., Any], kind: str, *values: _Value) -> _Value:
    return _Value(kind, lambda table: function(*[value.compute(table) for value in values]))


def _constant(value: Any, kind: str) -> _Value:
    try:
        scalar = pa.scalar(value, arrow_type(kind))
    except pa.ArrowInvalid:
        raise _Untaken(f"a literal that is no {kind}") from None
    return _Value(kind, lambda table: scalar, value)


def _common_type(values: Sequence[_Value], what: str) -> str:
    """Return the type to which Spark casts values that are compared or returned together."""
    kinds = list(dict.fromkeys(value.type for value in values if value.type != "void"))
    if len(kinds) == 1:
        return kinds[0]
    times = [kind for kind in kinds if kind in ("date", "timestamp")]
    if len(times) == 1 and all(isinstance(v.literal, str) for v in values if v.type not in (*times, "void")):
        return times[0]
    if kinds and set(kinds) <= set(INTEGERS):
        return max(kinds, key=INTEGERS.index)
    numbers = [value for value in values if value.type in NUMBERS or isinstance(value.literal, Decimal)]
    if any(kind in _FLOATS for kind in kinds) and len(numbers) == len(values):
        return "double"
    decimal = widest_decimal(kinds)
    if decimal is None:
        raise _Untaken(f"{what} of {' and '.join(kinds) or 'nulls'}")
    return decimal


def _cast(value: _Value, kind: str) -> _Value:
    """Return the value as a type to which Spark casts it. Raises _Untaken."""
    if value.type == kind:
        return value
    if value.type == "void":
        return _constant(None, kind)
    if kind in ("date", "timestamp") and isinstance(value.literal, str):
        return _constant(_moment(value.literal, kind), kind)
    if type(value.literal) in (int, Decimal) and kind == "double":
        return _constant(float(value.literal), kind)
    if type(value.literal) in (int, Decimal) and kind.startswith("decimal("):
        return _constant(Decimal(value.literal), kind)
    convert = next((convert for pairs, convert in _CASTS if (value.type, kind) in pairs), None)
    if convert is None:
        is_whole = value.type in INTEGERS and kind.startswith("decimal(")
        if not is_whole and not is_widening(value.type, kind):
            raise _Untaken(f"a cast of {value.type} to {kind}")
        convert = _to_decimal if is_whole else pc.cast
    arrow, converted = arrow_type(kind), convert
    return _call(lambda array: converted(array, arrow), kind, value)


def _moment(text: str, kind: str) -> date | datetime:
    try:
        if kind == "date" and re.fullmatch(r"\d{4}-\d\d-\d\d", text, re.ASCII):
            return date.fromisoformat(text)
        if kind == "timestamp" and re.fullmatch(r"\d{4}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d{6})?)?", text, re.ASCII):
            return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        pass
    raise _Untaken(f"the {kind} {text!r}")


def _every(flags: Any) -> bool:
    """Whether all of these are true, nulls aside."""
    return flags.as_py() is not False if isinstance(flags, pa.Scalar) else pc.all(flags, min_count=0).as_py()


def _only_if(test: Callable[[Any], Any], what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that raises NeedsSpark unless its first argument passes the test in all rows."""

    def checked(value: Any, *others: Any) -> Any:
        if not _every(test(value)):
            raise NeedsSpark(what)
        return function(value, *others)

    return checked


def _matching(pattern: str) -> Callable[[Any], Any]:
    return lambda array: pc.match_substring_regex(array, pattern)


def _usual_dates(array: Any) -> Any:
    return pc.and_(pc.greater_equal(array, pa.scalar(date.min)), pc.less_equal(array, pa.scalar(date.max)))


def _nearest(array: Any, kind: pa.DataType) -> Any:
    return pc.cast(array, kind, safe=False)


def _to_decimal(array: Any, kind: pa.DataType) -> Any:
    return pc.cast(pc.cast(array, pa.decimal256(76, kind.scale)), kind)


_CASTS: list[tuple[set[tuple[str, str]], Callable[..., Any]]] = [
    ({(one, other) for one in (*INTEGERS, "boolean") for other in (*INTEGERS, "string")}, pc.cast),
    ({(one, "double") for one in (*INTEGERS, "float")}, _nearest),
    ({("date", "string")}, _only_if(_usual_dates, "a year beyond 9999", pc.cast)),
    ({("string", "int"), ("string", "bigint")}, _only_if(_matching(r"\A-?[0-9]{1,9}\z"), "an unusual number", pc.cast)),
    ({("string", "date")}, _only_if(_matching(r"\A[0-9]{4}-[0-9]{2}-[0-9]{2}\z"), "an unusual date", pc.cast)),
]


def _literal(compiler: _Compiler, node: exp.Expr, sign: str = "") -> _Value:
    text: str = node.this
    if node.is_string:
        return _constant(text, "string")
    if "." in text:
        number = Decimal(sign + text)
        _, digits, exponent = number.as_tuple()
        scale = -int(exponent)
        precision = max(len(str(int("".join(map(str, digits))))), scale)
        if precision <= 38:
            return _constant(number, f"decimal({precision},{scale})")
    for kind in ("int", "bigint"):
        if "." not in text and -(2 ** _BITS[kind]) <= int(sign + text) < 2 ** _BITS[kind]:
            return _constant(int(sign + text), kind)
    raise _Untaken(f"the number {sign}{text}")


def _negated(compiler: _Compiler, node: exp.Expr) -> _Value:
    if type(node.this).__name__ == "Literal" and not node.this.is_string:
        return _literal(compiler, node.this, "-")
    value = compiler.value(node.this)
    if value.type not in NUMBERS and not digits_as_decimal(value.type):
        raise _Untaken(f"minus before {_a(value.type)}")
    return _call(pc.negate_checked, value.type, value)


def _cast_node(compiler: _Compiler, node: exp.Expr) -> _Value:
    to = node.args["to"]
    name = {"TEXT": "string", "TIMESTAMPTZ": "timestamp"}.get(to.this.name, to.this.name.lower())
    digits = [item.name for item in to.expressions]
    if name == "decimal":
        digits = digits or ["10", "0"]
        name = f"decimal({digits[0]},{digits[1] if len(digits) > 1 else 0})"
    if not is_storable(name):
        raise _Untaken(f"a cast to {name}")
    value = _cast(compiler.value(node.this), name)
    return _Value(value.type, value.compute)


def _comparison(function: str) -> Callable[[_Compiler, exp.Expr], _Value]:
    return lambda compiler, node: _compared(function, *compiler.values(node.this, node.expression))


def _compared(function: str, one: _Value, other: _Value) -> _Value:
    kind = _common_type([one, other], "a comparison")
    compare = getattr(pc, function)
    if kind in _FLOATS:  # Spark has NaN = NaN

        def checked(left: Any, right: Any) -> Any:
            if not (_every(pc.invert(pc.is_nan(left))) and _every(pc.invert(pc.is_nan(right)))):
                raise NeedsSpark("a comparison with NaN")
            return getattr(pc, function)(left, right)

        compare = checked
    return _call(compare, "boolean", _cast(one, kind), _cast(other, kind))


def _null_safe(compiler: _Compiler, node: exp.Expr) -> _Value:
    return _same(*compiler.values(node.this, node.expression))


def _same(one: _Value, other: _Value) -> _Value:
    def same(equal: Any, left: Any, right: Any) -> Any:
        return pc.or_(pc.and_(pc.is_null(left), pc.is_null(right)), pc.fill_null(equal, False))

    return _call(same, "boolean", _compared("equal", one, other), one, other)


def _logical(function: str) -> Callable[[_Compiler, exp.Expr], _Value]:
    return lambda compiler, node: _call(
        getattr(pc, function), "boolean", compiler.condition(node.this), compiler.condition(node.expression)
    )


def _not(compiler: _Compiler, node: exp.Expr) -> _Value:
    return _call(pc.invert, "boolean", compiler.condition(node.this))


def _is(compiler: _Compiler, node: exp.Expr) -> _Value:
    if type(node.expression).__name__ == "Null":
        return _call(pc.is_null, "boolean", compiler.value(node.this))
    if type(node.expression).__name__ != "Boolean":
        raise _Untaken(_describe(node))
    return _same(compiler.condition(node.this), compiler.value(node.expression))


def _in(compiler: _Compiler, node: exp.Expr) -> _Value:
    value, *choices = compiler.values(node.this, *node.expressions)
    if not choices or not all(choice.type == "void" or choice.literal is not None for choice in choices):
        raise _Untaken("IN with other values than literals")
    kind = _common_type([value, *choices], "a comparison")
    if kind in _FLOATS or value.type == "void":
        raise _Untaken(f"IN of {_a(kind)}")
    scalars = [_cast(choice, kind).compute(None) for choice in choices if choice.type != "void"]
    chosen = pa.array([scalar.as_py() for scalar in scalars], arrow_type(kind))
    otherwise = pa.scalar(False if len(scalars) == len(choices) else None, pa.bool_())

    def among(array: Any) -> Any:
        found = pc.if_else(pc.is_in(array, value_set=chosen), True, otherwise)
        return pc.if_else(pc.is_valid(array), found, pa.scalar(None, pa.bool_()))

    return _call(among, "boolean", _cast(value, kind))


def _between(compiler: _Compiler, node: exp.Expr) -> _Value:
    value, low, high = compiler.values(node.this, node.args["low"], node.args["high"])
    above, below = _compared("greater_equal", value, low), _compared("less_equal", value, high)
    return _call(pc.and_kleene, "boolean", above, below)


def _chosen(branches: Sequence[tuple[_Value, _Value]], otherwise: _Value) -> _Value:
    """Return the result of the first branch whose condition is true."""
    results = [result for _, result in branches]
    kind = _common_type([*results, otherwise], "a result")

    def choose(condition: Any, result: Any, other: Any) -> Any:
        return pc.if_else(pc.fill_null(condition, False), result, other)

    value = _cast(otherwise, kind)
    for condition, result in reversed(branches):
        value = _call(choose, kind, condition, _cast(result, kind), value)
    return value


def _case(compiler: _Compiler, node: exp.Expr) -> _Value:
    branches = []
    for branch in node.args["ifs"]:
        if node.this is None:
            condition = compiler.condition(branch.this)
        else:
            condition = _compared("equal", *compiler.values(node.this, branch.this))
        branches.append((condition, compiler.value(branch.args["true"])))
    default = node.args.get("default")
    return _chosen(branches, _NULL if default is None else compiler.value(default))


def _if(compiler: _Compiler, node: exp.Expr) -> _Value:
    if node.args.get("false") is None:
        raise _Untaken("function if with two arguments")
    result, otherwise = compiler.values(node.args["true"], node.args["false"])
    return _chosen([(compiler.condition(node.this), result)], otherwise)


def _coalesced(compiler: _Compiler, node: exp.Expr) -> _Value:
    values = compiler.values(node.this, *node.expressions)
    kind = _common_type(values, "a result")
    return _call(pc.coalesce, kind, *[_cast(value, kind) for value in values])


def _nullif(compiler: _Compiler, node: exp.Expr) -> _Value:
    value, other = compiler.values(node.this, node.expression)
    if value.type == "void":
        raise _Untaken("an untyped null")
    return _chosen([(_compared("equal", value, other), _cast(_NULL, value.type))], value)


def _arithmetic(function: str) -> Callable[[_Compiler, exp.Expr], _Value]:
    def compiled(compiler: _Compiler, node: exp.Expr) -> _Value:
        name = type(node).__name__
        sides = compiler.values(node.this, node.expression)
        one, other = sides
        kinds = {one.type, other.type}
        decimals = [side for side in sides if side.type.startswith("decimal(")]
        if decimals and not kinds & set(_FLOATS):
            if any(type(side).__name__ in ("Cast", "TryCast") for side in node.iter_expressions()):
                raise _Untaken("decimal arithmetic with a cast")
            digits = [_digits(side) for side in sides]
            kind = None if None in digits or name not in ("Add", "Sub", "Mul") else arithmetic_type(name, *digits)  # type: ignore[arg-type]
            if kind is None:
                raise _Untaken(f"arithmetic of {one.type} and {other.type}")
            as_decimals = [_cast(side, "decimal({},{})".format(*(_digits(side) or ()))) for side in sides]
            return _call(getattr(pc, function), kind, *as_decimals)
        kind = _common_type(sides, "arithmetic")
        if kind not in NUMBERS:
            raise _Untaken(f"arithmetic of {one.type} and {other.type}")
        kind = {"Div": "double", "IntDiv": "bigint"}.get(name, kind)
        if name in ("Mod", "IntDiv") and kind in _FLOATS:
            raise _Untaken(f"a remainder of {_a(kind)}")
        return _call(_ARITHMETIC.get(name) or getattr(pc, function), kind, *[_cast(side, kind) for side in sides])

    return compiled


def _digits(value: _Value) -> Digits | None:
    if value.type in INTEGERS and isinstance(value.literal, int):
        return len(str(abs(value.literal))), 0
    return digits_as_decimal(value.type)


def _divided(one: Any, other: Any) -> Any:
    if not _every(pc.not_equal(other, pa.scalar(0, other.type))):
        raise NeedsSpark("a division by zero")
    return pc.divide(one, other)


def _remainder(one: Any, other: Any) -> Any:
    return pc.subtract_checked(one, pc.multiply_checked(pc.divide_checked(one, other), other))


_ARITHMETIC = {"Div": _divided, "Mod": _remainder}


def _concatenated(compiler: _Compiler, node: exp.Expr) -> _Value:
    parts = [compiler.text(part) for part in (node.expressions or [node.this, node.expression])]
    return _call(lambda *texts: pc.binary_join_element_wise(*texts, ""), "string", *parts)


def _of_text(function: Callable[[Any], Any], kind: str = "string") -> Callable[[_Compiler, exp.Expr], _Value]:
    return lambda compiler, node: _call(function, kind, compiler.text(node.this))


def _trimmed(compiler: _Compiler, node: exp.Expr) -> _Value:
    if node.args.get("expression") is not None:
        raise _Untaken("function trim with other characters")
    side = {"": "utf8_trim", "LEADING": "utf8_ltrim", "TRAILING": "utf8_rtrim"}[node.args.get("position") or ""]
    return _call(lambda array: getattr(pc, side)(array, characters=" "), "string", compiler.text(node.this))


def _substring(compiler: _Compiler, node: exp.Expr) -> _Value:
    first, length = node.args.get("start"), node.args.get("length") or node.args.get("expression")
    start = 1 if first is None else compiler.value(first).literal
    count = 2**31 - 1 if length is None else compiler.value(length).literal
    if not all(type(number) is int and 0 <= number < 2**31 for number in (start, count)):
        raise _Untaken("function substring without literal positions")
    start = max(start, 1) - 1
    stop = start + count
    return _call(lambda array: pc.utf8_slice_codeunits(array, start, stop), "string", compiler.text(node.this))


def _searched(function: str) -> Callable[[_Compiler, exp.Expr], _Value]:
    def compiled(compiler: _Compiler, node: exp.Expr) -> _Value:
        text, pattern = compiler.text(node.this), compiler.text(node.expression).literal
        if pattern is None:
            raise _Untaken("a search for a value that is not a literal")
        return _call(lambda array: getattr(pc, function)(array, pattern), "boolean", text)

    return compiled


def _like(compiler: _Compiler, node: exp.Expr) -> _Value:
    text, pattern = compiler.text(node.this), compiler.text(node.expression).literal
    if pattern is None or "_" in pattern or "%" in pattern.strip("%"):
        raise _Untaken("LIKE with a pattern that is not a prefix, a suffix or a part")
    part, first, last = pattern.strip("%"), pattern.startswith("%"), pattern.endswith("%")
    function = pc.match_substring if first and last else pc.ends_with if first else pc.starts_with if last else pc.equal
    matches = _call(lambda array: function(array, part), "boolean", text)
    return _call(pc.invert, "boolean", matches) if node.args.get("negate") else matches


def _anonymous(compiler: _Compiler, node: exp.Expr) -> _Value:
    functions = {"isnull": pc.is_null, "isnotnull": pc.is_valid}
    function = functions.get(node.name.lower())
    if function is None or len(node.expressions) != 1:
        raise _Untaken(_describe(node))
    return _call(function, "boolean", compiler.value(node.expressions[0]))


def _column(compiler: _Compiler, node: exp.Expr) -> _Value:
    if type(node.this).__name__ != "Identifier":
        raise _Untaken(_describe(node))
    return compiler.column(node.name)


_NULL = _Value("void", lambda table: pa.scalar(None))
_ASCII = "letters that are not ASCII"
_RULES: dict[str, tuple[Any, ...]] = {
    "Column": (_column,), "Literal": (_literal, "is_string"), "Boolean": (lambda _, node: _constant(node.this, "boolean"),),
    "Null": (lambda *_: _NULL,), "Paren": (lambda compiler, node: compiler.value(node.this),),
    "Alias": (lambda compiler, node: compiler.value(node.this), "alias"), "Neg": (_negated,),
    "Cast": (_cast_node, "to"), "TryCast": (_cast_node, "to"), "EQ": (_comparison("equal"),),
    "NEQ": (_comparison("not_equal"),), "LT": (_comparison("less"),), "LTE": (_comparison("less_equal"),),
    "GT": (_comparison("greater"),), "GTE": (_comparison("greater_equal"),), "NullSafeEQ": (_null_safe,),
    "EqualNull": (_null_safe,), "And": (_logical("and_kleene"),), "Or": (_logical("or_kleene"),), "Not": (_not,),
    "Is": (_is,), "In": (_in,), "Between": (_between, "low", "high"), "If": (_if, "true", "false"),
    "Case": (_case, "ifs", "default"), "Coalesce": (_coalesced,), "Nullif": (_nullif,),
    "Add": (_arithmetic("add_checked"),), "Sub": (_arithmetic("subtract_checked"),),
    "Mul": (_arithmetic("multiply_checked"),), "Div": (_arithmetic("divide"), "typed", "safe"),
    "IntDiv": (_arithmetic("divide_checked"),), "Mod": (_arithmetic("divide_checked"),),
    "Concat": (_concatenated, "safe", "coalesce"), "DPipe": (_concatenated, "safe"),
    "Upper": (_of_text(_only_if(lambda array: pc.string_is_ascii(array), _ASCII, lambda array: pc.ascii_upper(array))),),
    "Lower": (_of_text(_only_if(lambda array: pc.string_is_ascii(array), _ASCII, lambda array: pc.ascii_lower(array))),),
    "Length": (_of_text(lambda array: pc.utf8_length(array), "int"),), "Trim": (_trimmed, "position"),
    "Substring": (_substring, "start", "length"), "Left": (_substring,), "StartsWith": (_searched("starts_with"),),
    "EndsWith": (_searched("ends_with"),), "Contains": (_searched("match_substring"),), "Like": (_like, "negate"),
    "Anonymous": (_anonymous,),
}  # fmt: skip
