"""Expressions evaluated by Arrow, without Spark, where the result is certain to be Spark's (ANSI
mode, UTC).

An expression is compiled only if all of its functions and types are in the tables below. Where a
result depends on the values (an overflow, letters that are not ASCII), `evaluate` raises
NeedsSpark: Spark computes the value or the error. All operands are evaluated, also those that Spark
may skip; at worst, that asks Spark needlessly. But the branches of CASE and the like are evaluated
for all rows only if that fails for none, or else for the rows that choose them, as in Spark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, TypeAlias

from dagster_adjunct.resources.lazy_modules import exp, pa
from dagster_adjunct.resources.schemas.types import (
    Array,
    Digits,
    Map,
    Struct,
    arrow_type,
    is_nested,
    is_storable,
    known_type,
)
from dagster_adjunct.resources.sql import arrow_kernels
from dagster_adjunct.resources.sql.arrow_kernels import (
    Function,
    NeedsSpark,
    cast_function,
    choose,
    choose_by_row,
    comparison,
    concatenate,
    divide,
    equal_or_both_null,
    kernel,
    membership,
    of_ascii,
    remainder,
)
from dagster_adjunct.resources.sql.expression import (
    QUOTED,
    UNSURE,
    doubt_about_syntax,
    parse_expression,
    unknown_functions,
)
from dagster_adjunct.resources.sql.parsed import SUBQUERY
from dagster_adjunct.resources.sql.result_types import (
    INTEGERS,
    NUMBERS,
    arithmetic_type,
    describe_missing_field,
    digits_as_decimal,
    struct_type,
    type_of_field,
    widest_decimal,
)

_MOST_NEGATED = 34
"""The most digits of a decimal that Spark negates without rounding it."""
_BITS = {"tinyint": 7, "smallint": 15, "int": 31, "bigint": 63}
Compute: TypeAlias = Callable[["_Batch"], Any]
"""Returns an array, or a scalar that stands for all rows."""
Rule: TypeAlias = Callable[["_Compiler", "exp.Expr"], "_Value"]
"""Compiles the nodes of one kind. Raises _NotCompiled."""


@dataclass(frozen=True, slots=True)
class ArrowExpression:
    """A compiled expression: the Spark type of its result, and the columns that it reads."""

    type: str
    columns: tuple[str, ...]
    _compute: Compute = field(repr=False)

    def evaluate(self, table: pa.Table) -> pa.Array:
        """Return one value for each row, of the Arrow type of `type`. Raises NeedsSpark."""
        try:
            result = self._compute(_Batch(table))
            if isinstance(result, pa.Scalar):
                result = pa.repeat(result, table.num_rows)
        except RecursionError:
            raise NeedsSpark("an expression nested this deeply") from None
        except pa.ArrowException:  # its text may contain values of sensitive columns
            raise NeedsSpark("an overflow, or a value that can't be cast") from None
        if not isinstance(result, pa.Array) or result.type != arrow_type(self.type):
            raise NeedsSpark(f"a result that is {result.type}")
        return result


def compile_expression(text: str, types: Mapping[str, str]) -> ArrowExpression | str:
    """Return the compiled expression over columns of these types, or a noun phrase that says why
    it needs Spark.
    """
    return _compile(text, tuple(types.items()))


@lru_cache(maxsize=1024)  # a run compiles the same expressions for each batch
def _compile(text: str, types: tuple[tuple[str, str], ...]) -> ArrowExpression | str:
    """Return the compiled expression, or why it needs Spark; `types` are (name, type) of the
    columns, as a key of the cache.
    """
    expression = parse_expression(text)
    if expression.star:
        return "all columns (*)"
    if expression.unread:
        return SUBQUERY if SUBQUERY in expression.unread else UNSURE
    if unknown := unknown_functions(text):  # the parser also knows functions of other engines
        return f"function {unknown[0]}"
    compiler = _Compiler(dict(types))
    tree = expression.tree
    try:
        value = compiler.column(str(expression.column)) if tree is None else compiler.value(tree)
    except _NotCompiled as reason:
        return str(reason)
    except RecursionError:
        return "an expression nested this deeply"
    doubt = doubt_about_syntax(text, tree, expression.alias)
    if doubt or value.type == "void":
        return doubt or "an untyped null"
    if value.type == "boolean" and tree is not None and _fails_in_filter(tree):
        return "arithmetic on a column that is also compared for equality"
    return ArrowExpression(value.type, tuple(compiler.columns), value.compute)


_PARTS_OF_NODES = ("Identifier", "DataType", "DataTypeParam")
# Literals that Spark's parser checks, and words that sqlglot takes for names or leaves out.
_LEFT_TO_PARSER = re.compile(
    r"\b(?:date|timestamp)\s*['\"]|(?<![\w`.])(?:\d{10,}|\d+L)|\b(?:from|for)\b|\bnot\s+is\b",
    re.IGNORECASE | re.ASCII,
)
# By keyword, the nodes of which each needs it once.
_WORDS: dict[str, tuple[str, ...]] = {
    "is": ("Is",),
    "not": ("Not",),
    "in": ("In",),
    "like": ("Like",),
    "between": ("Between",),
    "case": ("Case",),
    "end": ("Case",),
    "as": ("Cast", "TryCast"),
    "and": ("And", "Between"),
    "or": ("Or",),
    "else": (),
}


def is_valid_for_spark(text: str) -> bool:
    """Whether Spark's parser certainly accepts an expression: a name, or syntax that this module
    has rules for.

    False says nothing: dates and large numbers, whose values the parser checks, are left to it,
    too.
    """
    expression = parse_expression(text)
    if expression.unread:
        return False
    if expression.star or expression.tree is None:  # "*", or a name
        return True
    if unknown_functions(text) or _LEFT_TO_PARSER.search(text):
        return False
    decimals = re.findall(r"decimal\s*\([^()]*\)", text, re.IGNORECASE)
    if not all(is_storable(re.sub(r"\s", "", kind).lower()) for kind in decimals):
        return False
    nodes = list(expression.tree.walk())
    if not all(map(_has_rule, nodes)) or not _has_words_of(text, nodes, expression.alias):
        return False
    return not doubt_about_syntax(text, expression.tree, expression.alias)


def _has_rule(node: exp.Expr) -> bool:
    """Whether this module has a rule for a node with its arguments."""
    name = type(node).__name__
    if name in _PARTS_OF_NODES:
        is_keyword = name == "Identifier" and node.name.lower() in _WORDS
        return not is_keyword or bool(node.args.get("quoted"))
    if name not in _RULES or not _reads_all_arguments(node):
        return False
    # What the rules of these nodes reject themselves.
    if name == "Bracket":
        return len(node.expressions) == 1
    if isinstance(node, exp.Column):
        return not _has_number_as_name(node)
    given = _given_arguments(node)
    if name == "Is":
        return "this" in given and type(node.expression).__name__ in ("Null", "Boolean")
    has_no_list = name == "In" and "expressions" not in given
    return not has_no_list


def _given_arguments(node: exp.Expr) -> set[str]:
    """Return the names of the arguments that a node has."""
    given = set()
    for name, argument in node.args.items():
        if argument not in (None, [], False):
            given.add(name)
    return given


def _reads_all_arguments(node: exp.Expr) -> bool:
    """Whether the rule of a node reads all arguments that the node has."""
    further = _OF_SOME_NODES.get(type(node).__name__, ())
    return _given_arguments(node) <= {*_OF_EACH_NODE, *further}


def _has_number_as_name(column: exp.Column) -> bool:
    """Whether a part of a name begins with a digit: the parser reads `x2.5` as a field of x2."""
    return any(part.name[:1].isdigit() and not part.args.get("quoted") for part in column.parts)


def _has_words_of(text: str, nodes: Sequence[exp.Expr], alias: str | None) -> bool:
    """Whether a text has each keyword as often as its nodes need it, so that no keyword is read as
    a name.
    """
    words = [word.lower() for word in re.findall(r"[A-Za-z_]\w*", QUOTED.sub("''", text))]
    names = [type(node).__name__ for node in nodes]
    expected = {word: sum(map(names.count, kinds)) for word, kinds in _WORDS.items()}
    expected |= {"when": 0, "then": 0}
    if alias is not None:
        expected["as"] += 1
    for node in nodes:
        if isinstance(node, exp.Case):
            expected["when"] += len(node.args["ifs"])
            expected["then"] += len(node.args["ifs"])
            if node.args.get("default") is not None:
                expected["else"] += 1
    return all(words.count(word) == count for word, count in expected.items())


@dataclass(frozen=True, slots=True)
class _Batch:
    """A table, with the results of compiled nodes for it: a node that is used twice is computed
    once.
    """

    table: pa.Table
    results: dict[Compute, Any] = field(default_factory=dict)


class _NotCompiled(Exception):
    """The reason why an expression is not compiled, but left to Spark."""


@dataclass(frozen=True, slots=True)
class _Value:
    """A compiled node: the Spark type ("void" for an untyped null), the computation, and the
    value of a literal.
    """

    type: str
    compute: Compute
    literal: Any = None

    @property
    def is_text_literal(self) -> bool:
        """Whether it is a literal string."""
        return isinstance(self.literal, str)


def _fails_in_filter(tree: exp.Expr) -> bool:
    """Whether Spark may raise an error for a condition even if it would for no record.

    In `s = 'x' and cast(s as int) > 1`, its optimizer puts 'x' into the cast.
    """
    equalities = tree.find_all(
        exp.EQ, exp.NEQ, exp.NullSafeEQ, exp.EqualNull, exp.In, exp.Case, exp.Nullif
    )
    compared = {_uncast(side) for node in equalities for side in node.iter_expressions()}
    names = set()
    for side in compared:
        if isinstance(side, exp.Column):
            names.add(side.name.lower())
    failing = tree.find_all(
        exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.Cast
    )
    for node in failing:
        for column in node.find_all(exp.Column):
            if column.name.lower() in names:
                return True
    return False


def _uncast(node: exp.Expr) -> exp.Expr:
    """Return what is within parentheses and casts."""
    while isinstance(node, exp.Paren | exp.Cast):
        node = node.this
    return node


class _Compiler:
    """Compiles the nodes of a syntax tree, and collects the columns that they read."""

    def __init__(self, types: Mapping[str, str]) -> None:
        self._types = types
        self.columns: dict[str, None] = {}

    def column(self, name: str) -> _Value:
        """Return the compiled column of this name, ignoring case. Raises _NotCompiled."""
        found = [column for column in self._types if column.lower() == name.lower()]
        if not found:
            raise _NotCompiled(f"the unknown column {name}")
        column = found[0]
        is_unsure = column != name and not name.isascii()  # how Spark compares such names
        if len(found) > 1 or is_unsure:
            raise _NotCompiled(f"the ambiguous column {name}")
        kind = self._types[column]
        if not is_nested(kind):
            kind = kind.replace(" ", "")
        if not is_storable(kind):
            raise _NotCompiled(f"a column of type {kind}")
        self.columns[column] = None

        def read(table: pa.Table) -> Any:
            chunks = table.column(column)
            array = chunks.chunk(0) if chunks.num_chunks == 1 else chunks.combine_chunks()
            if array.type != arrow_type(kind):
                raise NeedsSpark(f"a column of {kind} that is {array.type}")
            return array

        return _Value(kind, lambda batch: read(batch.table))

    def value(self, node: exp.Expr) -> _Value:
        """Return the compiled node. Raises _NotCompiled."""
        rule = _RULES.get(type(node).__name__)
        if rule is None or not _reads_all_arguments(node):
            raise _NotCompiled(_describe(node))
        return rule(self, node)

    def values(self, node: exp.Expr, *names: str) -> list[_Value]:
        """Return the compiled arguments of a node that have these names."""
        parts: list[Any] = [node.args.get(name) for name in names]
        if None in parts:
            raise _NotCompiled(f"{_describe(node)} with fewer arguments")
        return list(map(self.value, parts))

    def sides(self, node: exp.Expr) -> list[_Value]:
        """Return the compiled operands of a binary operator."""
        return self.values(node, "this", "expression")

    def condition(self, node: exp.Expr) -> _Value:
        """Return a compiled node, which is boolean or null. Raises _NotCompiled."""
        value = self.value(node)
        if type(node.parent).__name__ in ("If", "Case"):
            allowed = ["boolean"]
        else:
            allowed = ["boolean", "void"]
        if value.type not in allowed:
            raise _NotCompiled(f"a condition of type {value.type}")
        return _cast(value, "boolean")


def _describe(node: exp.Expr) -> str:
    """Return a noun phrase for a node that is not compiled."""
    if isinstance(node, exp.Window):
        return "a window function"
    if isinstance(node, exp.Anonymous):
        return f"function {node.name.lower()}"
    if isinstance(node, exp.Func) and not isinstance(node, exp.Cast | exp.Case):
        return f"function {node.sql_name().lower()}"
    return f"the syntax of {node.key}"


def _call(function: Function, kind: str, *values: _Value) -> _Value:
    """Return the value of a function of these values, which is computed once for each batch."""

    def compute(batch: _Batch) -> Any:
        if compute not in batch.results:
            batch.results[compute] = function(*[value.compute(batch) for value in values])
        return batch.results[compute]

    return _Value(kind, compute)


_NULL = _Value("void", lambda batch: pa.scalar(None))


def _constant(value: Any, kind: str) -> _Value:
    """Return a literal of this type, or a null. Raises _NotCompiled if it does not fit."""
    try:
        scalar = pa.scalar(value, arrow_type(kind))
    except (pa.ArrowInvalid, OverflowError):
        raise _NotCompiled(f"a literal that does not fit {kind}") from None
    return _Value(kind, lambda batch: scalar, value)


def _literal(compiler: _Compiler, node: exp.Expr, sign: str = "") -> _Value:
    """Compile a literal string or number; `sign` is "-" for a negated number."""
    text = sign + str(node.this)
    if node.args.get("is_string"):
        return _constant(text, "string")
    whole, _, places = text.lstrip("-").partition(".")
    digits = max(len(whole.lstrip("0")) + len(places), 1)
    if not re.fullmatch(r"-?\d+(\.\d+)?", text, re.ASCII) or digits > 38:
        raise _NotCompiled(f"the number {text}")
    if places:
        return _constant(Decimal(text), f"decimal({digits},{len(places)})")
    return _constant(int(text), "int" if -(2**31) <= int(text) < 2**31 else "bigint")


def _moment(text: str, kind: str) -> date | datetime:
    """Return the date or timestamp in a literal. Raises _NotCompiled for any but the
    usual forms.
    """
    if kind == "date":
        pattern = r"\d{4}-\d\d-\d\d"
    else:
        pattern = r"\d{4}-\d\d-\d\d( \d\d:\d\d:\d\d(\.\d{6})?)?"
    try:
        if re.fullmatch(pattern, text, re.ASCII):
            if kind == "date":
                return date.fromisoformat(text)
            return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:  # no such day or time
        pass
    raise _NotCompiled(f"the {kind} {text!r}")


# Casts


def _is_number(value: _Value) -> bool:
    """Whether a value is an integer, a float or double, a decimal literal, or null."""
    return value.type in (*NUMBERS, "void") or isinstance(value.literal, Decimal)


def _common_type(values: Sequence[_Value], what: str) -> str:
    """Return the type to which Spark casts values that are compared, computed with, or alternative
    results: their own if they have one, else the only type of time among texts, the widest
    integer, double, or the widest decimal. Nulls have any type.

    `what` names the operation in the reason of a _NotCompiled.
    """
    kinds = list(dict.fromkeys(value.type for value in values if value.type != "void"))
    if len(kinds) == 1:
        return kinds[0]
    times = {"date", "timestamp"}.intersection(kinds)
    if len(times) == 1:
        time = times.pop()
        if all(value.type in (time, "void") or value.is_text_literal for value in values):
            return time
    if kinds and set(kinds) <= set(INTEGERS):
        return max(kinds, key=INTEGERS.index)
    if {"float", "double"}.intersection(kinds) and all(map(_is_number, values)):
        return "double"
    decimal = widest_decimal(kinds)
    if decimal is None:
        raise _NotCompiled(f"{what} of {' and '.join(kinds) or 'nulls'}")
    return decimal


def _cast(value: _Value, kind: str) -> _Value:
    """Return the value cast to this type. Raises _NotCompiled where the result may not
    be Spark's.
    """
    if value.type == kind:
        return value
    if value.type == "void":
        return _constant(None, kind)
    if is_nested(kind) or is_nested(value.type):
        raise _NotCompiled(f"a cast of {value.type} to {kind}")
    if isinstance(value.literal, str) and kind in ("date", "timestamp"):
        return _constant(_moment(value.literal, kind), kind)
    if type(value.literal) is int and kind in INTEGERS:
        return _constant(value.literal, kind)
    if type(value.literal) in (int, Decimal):
        if kind == "double":
            return _constant(float(value.literal), kind)
        if kind.startswith("decimal("):
            return _constant(Decimal(value.literal), kind)
    function = cast_function(value.type, kind)
    if function is None:
        raise _NotCompiled(f"a cast of {value.type} to {kind}")
    return _call(function, kind, value)


def _cast_together(values: Sequence[_Value], what: str) -> tuple[str, list[_Value]]:
    """Return the type to which Spark casts these values together, and the cast values; `what`
    names the operation.
    """
    kind = _common_type(values, what)
    return kind, [_cast(value, kind) for value in values]


def _cast_node(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `cast(value as type)`."""
    to = node.args["to"]
    name = {"TEXT": "string", "TIMESTAMPTZ": "timestamp"}.get(to.this.name, to.this.name.lower())
    if name == "decimal":
        given = [item.name for item in to.expressions]
        defaults = ["10", "0"]
        name = f"decimal({','.join(given + defaults[len(given) :])})"
    if not is_storable(name):
        raise _NotCompiled(f"a cast to {name}")
    value = _cast(compiler.value(node.this), name)
    return _Value(value.type, value.compute)  # without `literal`: a cast is not one


# Rules, by the parser's nodes


def _compared(function: Function, *values: _Value) -> _Value:
    """Return a comparison of these values, which are cast to one type."""
    kind, values_of_one_type = _cast_together(values, "a comparison")
    if is_nested(kind):
        raise _NotCompiled(f"a comparison of {kind}")
    return _call(function, "boolean", *values_of_one_type)


def _comparison_rule(name: str) -> Rule:
    """Return the rule of an operator that compares by the Arrow function of this name."""
    return lambda compiler, node: _compared(comparison(name), *compiler.sides(node))


def _null_safe(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `one <=> other`."""
    return _compared(equal_or_both_null, *compiler.sides(node))


def _logical(name: str) -> Rule:
    """Return the rule of AND, OR or NOT, by its Arrow function."""
    return lambda compiler, node: _call(
        kernel(name), "boolean", *[compiler.condition(part) for part in node.iter_expressions()]
    )


def _is(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `value IS NULL`, `value IS TRUE` and `value IS FALSE`."""
    if type(node.expression).__name__ == "Null":
        return _call(kernel("is_null"), "boolean", compiler.value(node.this))
    if type(node.expression).__name__ != "Boolean":
        raise _NotCompiled(_describe(node))
    return _compared(
        equal_or_both_null, compiler.condition(node.this), compiler.value(node.expression)
    )


def _in(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `value IN (literal, …)`."""
    value, *choices = map(compiler.value, (node.this, *node.expressions))
    not_null = [choice for choice in choices if choice.type != "void"]
    are_literals = all(choice.literal is not None for choice in not_null)
    if not choices or value.type == "void" or not are_literals:
        raise _NotCompiled("IN with values that are not literals")
    kind, (value, *not_null) = _cast_together([value, *not_null], "a comparison")
    if kind in ("float", "double"):
        raise _NotCompiled(f"IN of {kind}")
    chosen = pa.array([choice.literal for choice in not_null], arrow_type(kind))
    return _call(membership(chosen, or_null=len(not_null) < len(choices)), "boolean", value)


def _between(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `value BETWEEN low AND high`."""
    value, low, high = compiler.values(node, "this", "low", "high")
    above = _compared(comparison("greater_equal"), value, low)
    return _call(
        kernel("and_kleene"), "boolean", above, _compared(comparison("less_equal"), value, high)
    )


def _first_true(
    conditions: Sequence[_Value], results: Sequence[_Value], otherwise: _Value
) -> _Value:
    """Return the result of the first condition that is true, or else `otherwise`."""
    kind, (*results, value) = _cast_together([*results, otherwise], "a result")
    for condition, result in reversed(list(zip(conditions, results, strict=True))):
        value = _Value(kind, _choice(condition.compute, result.compute, value.compute))
    return value


def _choice(condition: Compute, result: Compute, otherwise: Compute) -> Compute:
    """Return a computation of both results for all rows, which is fastest; if one fails, of each
    for its own rows.
    """

    def compute(batch: _Batch) -> Any:
        if compute not in batch.results:
            chosen = condition(batch)
            try:
                found = choose(chosen, result(batch), otherwise(batch))
            except (NeedsSpark, pa.ArrowException):
                found = choose_by_row(
                    chosen,
                    batch.table,
                    lambda rows: result(_Batch(rows)),
                    lambda rows: otherwise(_Batch(rows)),
                )
            batch.results[compute] = found
        return batch.results[compute]

    return compute


def _case(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile CASE, with conditions or with values that are compared with a first one."""
    if node.this is None:
        conditions = [compiler.condition(branch.this) for branch in node.args["ifs"]]
    else:
        value = compiler.value(node.this)
        others = [compiler.value(branch.this) for branch in node.args["ifs"]]
        conditions = [_compared(comparison("equal"), value, other) for other in others]
    results = [compiler.value(branch.args["true"]) for branch in node.args["ifs"]]
    default = node.args.get("default")
    return _first_true(conditions, results, _NULL if default is None else compiler.value(default))


def _if(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `if(condition, result, otherwise)`."""
    result, otherwise = compiler.values(node, "true", "false")
    return _first_true([compiler.condition(node.this)], [result], otherwise)


def _nvl2(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `nvl2(value, result, otherwise)`, whose result depends on whether the
    value is null.
    """
    value, result, otherwise = compiler.values(node, "this", "true", "false")
    return _first_true([_call(kernel("is_valid"), "boolean", value)], [result], otherwise)


def _nullif(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `nullif(value, other)`."""
    value, other = compiler.sides(node)
    if value.type == "void":
        raise _NotCompiled("an untyped null")
    return _first_true([_compared(comparison("equal"), value, other)], [_NULL], value)


def _coalesce(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `coalesce(value, …)`."""
    values = [compiler.value(part) for part in (node.this, *node.expressions)]
    kind, values = _cast_together(values, "a result")
    return _call(kernel("coalesce"), kind, *values)


def _negation(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `-value`."""
    if type(node.this).__name__ == "Literal" and not node.this.is_string:
        return _literal(compiler, node.this, "-")
    value = compiler.value(node.this)
    digits = digits_as_decimal(value.type)
    is_exact = digits is not None and digits.precision <= _MOST_NEGATED
    if value.type not in NUMBERS and not is_exact:
        raise _NotCompiled(f"minus before {value.type}")
    return _call(kernel("negate_checked"), value.type, value)


def _arithmetic(function: Function, kind: str | None = None) -> Rule:
    """Return the rule of an arithmetic operator. Its result has the type `kind`, or that of the
    operands.
    """

    def compiled(compiler: _Compiler, node: exp.Expr) -> _Value:
        """Compile the operator. Decimals have rules of their own. Several large integer constants,
        and `%` and `div` of floating-point numbers, are left to Spark.
        """
        values = compiler.sides(node)
        common = _common_type(values, "arithmetic")
        if common not in NUMBERS:
            if any(value.type.startswith("decimal(") for value in values):
                return _decimal_arithmetic(function, node, values)
            raise _NotCompiled(f"arithmetic of {common}")
        if common in INTEGERS:
            if _product_of_constants(node) >= 2 ** _BITS[common]:
                raise _NotCompiled("arithmetic with several large constants")
        elif type(node).__name__ in ("Mod", "IntDiv"):
            raise _NotCompiled(f"arithmetic of {common}")
        result_type = kind or common
        return _call(function, result_type, *[_cast(value, result_type) for value in values])

    return compiled


def _product_of_constants(node: exp.Expr) -> int:
    """Return a bound of what Spark may compute from the constants alone; 1 if there are fewer than
    two.

    Spark reads `a + 1 + 2` as `a + (1 + 2)`, and the sum or product of the constants may overflow.
    """
    sizes = []
    for part in node.find_all(exp.Literal, exp.Boolean):
        if part.find_ancestor(exp.DataType):
            continue
        size = int(part.name) if part.name.isdecimal() else len(part.name)
        sizes.append(max(size, 2))  # so that the product is a bound of the sum, too
    if len(sizes) > 1:
        return math.prod(sizes)
    return 1


def _decimal_arithmetic(function: Function, node: exp.Expr, values: Sequence[_Value]) -> _Value:
    """Compile an operator of two decimals, or of a decimal and an integer."""
    name = type(node).__name__
    sides = []
    digits_of_sides = []
    for value in values:
        digits = _digits(value)
        if digits is not None:
            digits_of_sides.append(digits)
            sides.append(_cast(value, f"decimal({digits.precision},{digits.scale})"))
    kind = None
    if name in ("Add", "Sub", "Mul") and len(digits_of_sides) == 2:
        kind = arithmetic_type(name, *digits_of_sides)
    # The parser does not distinguish 1L, a decimal of one digit, from cast(1 as bigint), a decimal
    # of 20 digits.
    if kind is None or any(map(_is_cast_literal, node.iter_expressions())):
        raise _NotCompiled(f"arithmetic of {' and '.join(value.type for value in values)}")
    return _call(function, kind, *sides)


def _digits(value: _Value) -> Digits | None:
    """Return the digits of an operand of decimal arithmetic, None for one without digits. An
    integer literal has as many as its value.
    """
    if value.type in INTEGERS and value.literal is not None:
        return Digits(len(str(abs(value.literal))), 0)
    return digits_as_decimal(value.type)


def _is_cast_literal(node: exp.Expr) -> bool:
    """Whether a node is a cast of a literal, perhaps negated or in parentheses."""
    while isinstance(node, exp.Paren | exp.Neg):
        node = node.this
    return isinstance(node, exp.Cast) and isinstance(node.this, exp.Literal)


def _text_call(function: Function, kind: str, *values: _Value) -> _Value:
    """Return the value of a function of strings. Raises _NotCompiled for values of other types."""
    if others := [value.type for value in values if value.type != "string"]:
        raise _NotCompiled(f"a function of strings for {others[0]}")
    return _call(function, kind, *values)


def _of_text(function: Function, kind: str = "string") -> Rule:
    """Return the rule of a function of one string, whose result has the type `kind`."""
    return lambda compiler, node: _text_call(function, kind, *compiler.values(node, "this"))


def _concat(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `concat(text, …)` and `text || text`."""
    values = [compiler.value(part) for part in node.expressions] or compiler.sides(node)
    return _text_call(concatenate, "string", *values)


def _trim(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `trim(text)`, `ltrim(text)` and `rtrim(text)`."""
    name = {"LEADING": "utf8_ltrim", "TRAILING": "utf8_rtrim"}.get(
        node.args.get("position", ""), "utf8_trim"
    )
    if node.args.get("expression") is not None:
        raise _NotCompiled("a trim of other characters")
    return _text_call(kernel(name, characters=" "), "string", compiler.value(node.this))


def _substring(*names: str) -> Rule:
    """Return the rule of `substring(text, start, length)` or `left(text, length)`; `names` are the
    node's arguments that have the positions.
    """

    def compiled(compiler: _Compiler, node: exp.Expr) -> _Value:
        numbers = {"start": 1}
        for name in names:
            if name == "length" and node.args.get(name) is None:
                continue  # up to the end
            number = compiler.values(node, name)[0].literal
            if type(number) is not int or not 0 <= number < 2**31:
                raise _NotCompiled("a substring without literal positions")
            numbers[name] = number
        begin = max(numbers.pop("start"), 1) - 1  # Spark counts from 1, and reads 0 as 1
        bounds = [begin, *[begin + length for length in numbers.values()]]
        return _text_call(
            kernel("utf8_slice_codeunits", *bounds), "string", compiler.value(node.this)
        )

    return compiled


def _search(name: str) -> Rule:
    """Return the rule of a function that looks for a literal in a string, by its Arrow function."""

    def compiled(compiler: _Compiler, node: exp.Expr) -> _Value:
        text, pattern = compiler.sides(node)
        if not isinstance(pattern.literal, str):
            raise _NotCompiled("a search for a value that is not a literal")
        return _text_call(kernel(name, pattern.literal), "boolean", text)

    return compiled


def _like(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `text LIKE pattern`, if the pattern is a literal that has "%" only at its ends, and
    no "_".
    """
    text, value = compiler.sides(node)
    pattern = value.literal
    part = pattern.strip("%") if isinstance(pattern, str) else ""
    if not isinstance(pattern, str) or "_" in part or "%" in part:
        raise _NotCompiled("LIKE with a pattern that is no prefix, suffix or part")
    begins_anyhow = pattern.startswith("%")
    ends_anyhow = pattern.endswith("%")
    if begins_anyhow and ends_anyhow:
        name = "match_substring"
    elif begins_anyhow:
        name = "ends_with"
    elif ends_anyhow:
        name = "starts_with"
    else:
        name = "equal"
    matched = _text_call(kernel(name, part), "boolean", text)
    if node.args.get("negate"):
        return _call(kernel("invert"), "boolean", matched)
    return matched


def _by_name(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile a call of a function that the parser has no class for."""
    called = node.name.lower()
    if called == "get" and len(node.expressions) == 2:
        array, index = map(compiler.value, node.expressions)
        return _element(array, _literal_index(index), or_null=True)
    if called == "cardinality" and len(node.expressions) == 1:
        return _size_of(compiler.value(node.expressions[0]))
    name = {"isnull": "is_null", "isnotnull": "is_valid"}.get(called)
    if name is None or len(node.expressions) != 1:
        raise _NotCompiled(_describe(node))
    return _call(kernel(name), "boolean", compiler.value(node.expressions[0]))


def _column(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile a column, or a field of one: `customer.city`."""
    if not isinstance(node, exp.Column) or type(node.this).__name__ != "Identifier":
        raise _NotCompiled(_describe(node))
    if _has_number_as_name(node):
        raise _NotCompiled(UNSURE)
    names = [part.name for part in node.parts]
    value = compiler.column(names[0])
    for name in names[1:]:
        value = _field(value, name)
    return value


# Parts of nested values


def _field(value: _Value, name: str) -> _Value:
    """Return `value.name` of a struct, an array of structs or a map."""
    type_ = known_type(value.type)
    if type_ is None:
        raise _NotCompiled(f"a field of {value.type}")
    found = type_of_field(type_, name)
    if found is None:
        raise _NotCompiled(describe_missing_field(type_, name))
    if isinstance(type_, Map):
        return _call(arrow_kernels.value_of(name), str(found), value)
    owner = type_.element if isinstance(type_, Array) else type_
    if not name.isascii() or not isinstance(owner, Struct):
        raise _NotCompiled(f"a field of {value.type}")
    spelled = next(item.name for item in owner.members if item.name.lower() == name.lower())
    kind = str(found)
    return _call(arrow_kernels.field_of(spelled, arrow_type(kind)), kind, value)


def _dot(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile a field of a value that is no column: `items[0].price`."""
    if type(node.expression).__name__ != "Identifier":
        raise _NotCompiled(_describe(node))
    return _field(compiler.value(node.this), node.expression.name)


def _bracket(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `values[index]`, which counts from 0, or `element_at(values, index)`, whose node has
    the offset 1 and which counts from 1, or from the end for negative indexes.
    """
    if len(node.expressions) != 1:
        raise _NotCompiled(_describe(node))
    is_element_at = bool(node.args.get("offset"))
    value = compiler.value(node.this)
    index = compiler.value(node.expressions[0])
    is_map = isinstance(known_type(value.type), Map)
    if index.is_text_literal and (is_map or not is_element_at):
        return _field(value, index.literal)
    place = _literal_index(index)
    if not is_element_at:
        return _element(value, place, or_null=False)
    if place == 0:
        raise _NotCompiled("the index 0, which element_at does not have")
    or_null = bool(node.args.get("safe"))  # try_element_at
    if place > 0:
        return _element(value, place - 1, or_null=or_null)
    return _element(value, place, or_null=or_null, from_end=True)


def _literal_index(index: _Value) -> int:
    """Return an index that is a literal. Raises _NotCompiled for any other."""
    if index.type != "int" or type(index.literal) is not int:
        raise _NotCompiled("an index that is not a literal")
    return index.literal


def _element(value: _Value, place: int, *, or_null: bool, from_end: bool = False) -> _Value:
    """Return the element of an array at a place: from 0 on, or with `from_end` from -1 for the last
    one. Where there is none, it is null with `or_null`, else an error.
    """
    type_ = known_type(value.type)
    if not isinstance(type_, Array):
        raise _NotCompiled(f"an index of {value.type}")
    if place < 0 and not from_end:
        raise _NotCompiled("a negative index")
    return _call(arrow_kernels.element_at(place, or_null=or_null), str(type_.element), value)


def _size(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `size(value)`."""
    return _size_of(compiler.value(node.this))


def _size_of(value: _Value) -> _Value:
    """Return the number of elements of an array, or of entries of a map."""
    if not isinstance(known_type(value.type), Array | Map):
        raise _NotCompiled(f"the size of {value.type}")
    return _call(arrow_kernels.size, "int", value)


def _array_contains(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `array_contains(array, wanted)`."""
    array, wanted = compiler.sides(node)
    type_ = known_type(array.type)
    if not isinstance(type_, Array) or is_nested(str(type_.element)):
        raise _NotCompiled(f"a search in {array.type}")
    element = str(type_.element)
    same = _common_type([_Value(element, array.compute), wanted], "a search")
    if same != element or wanted.type == "void" or element in ("float", "double"):
        raise _NotCompiled(f"a search for {wanted.type} in {array.type}")
    return _call(arrow_kernels.contains, "boolean", array, _cast(wanted, element))


def _struct(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile `struct(…)` and `named_struct(…)` with fields that have names."""
    named: list[tuple[str, _Value]] = []
    for item in node.expressions:
        if type(item).__name__ != "PropertyEQ" or type(item.this).__name__ != "Identifier":
            raise _NotCompiled("a struct with fields that have no names")
        if re.fullmatch(r"col\d+", item.this.name):  # perhaps named by the parser
            raise _NotCompiled("a struct with fields that have no names")
        named.append((item.this.name, compiler.value(item.expression)))
    kind = struct_type([(name, value.type) for name, value in named])
    if not is_storable(kind):
        raise _NotCompiled(f"a struct of type {kind}")
    members = list(arrow_type(kind))

    def compute(batch: _Batch) -> Any:
        columns = []
        for _, value in named:
            column = value.compute(batch)
            if isinstance(column, pa.Scalar):
                column = pa.repeat(column, batch.table.num_rows)
            columns.append(column)
        return pa.StructArray.from_arrays(columns, fields=members)

    return _Value(kind, compute)


def _inner(compiler: _Compiler, node: exp.Expr) -> _Value:
    """Compile what is in parentheses."""
    return compiler.value(node.this)


# By the class of nodes.
_RULES: dict[str, Rule] = {
    "Column": _column,
    "Dot": _dot,
    "Bracket": _bracket,
    "ArraySize": _size,
    "ArrayContains": _array_contains,
    "Struct": _struct,
    "PropertyEQ": _dot,
    "Literal": _literal,
    "Null": lambda compiler, node: _NULL,
    "Boolean": lambda compiler, node: _constant(node.this, "boolean"),
    "Paren": _inner,
    "Cast": _cast_node,
    "TryCast": _cast_node,
    "EQ": _comparison_rule("equal"),
    "NEQ": _comparison_rule("not_equal"),
    "LT": _comparison_rule("less"),
    "LTE": _comparison_rule("less_equal"),
    "GT": _comparison_rule("greater"),
    "GTE": _comparison_rule("greater_equal"),
    "NullSafeEQ": _null_safe,
    "EqualNull": _null_safe,
    "And": _logical("and_kleene"),
    "Or": _logical("or_kleene"),
    "Not": _logical("invert"),
    "Is": _is,
    "In": _in,
    "Between": _between,
    "If": _if,
    "Case": _case,
    "Nvl2": _nvl2,
    "Nullif": _nullif,
    "Coalesce": _coalesce,
    "Neg": _negation,
    "Add": _arithmetic(kernel("add_checked")),
    "Sub": _arithmetic(kernel("subtract_checked")),
    "Mul": _arithmetic(kernel("multiply_checked")),
    "Mod": _arithmetic(remainder),
    "Div": _arithmetic(divide, "double"),
    "IntDiv": _arithmetic(kernel("divide_checked"), "bigint"),
    "DPipe": _concat,
    "Concat": _concat,
    "Upper": _of_text(of_ascii("ascii_upper")),
    "Lower": _of_text(of_ascii("ascii_lower")),
    "Length": _of_text(kernel("utf8_length"), "int"),
    "Trim": _trim,
    "Substring": _substring("start", "length"),
    "Left": _substring("expression"),
    "StartsWith": _search("starts_with"),
    "EndsWith": _search("ends_with"),
    "Contains": _search("match_substring"),
    "Like": _like,
    "Anonymous": _by_name,
}
# The arguments that rules read: of nodes of any class, and the further ones of these.
_OF_EACH_NODE = ("this", "expression", "expressions")
_OF_SOME_NODES = {
    "Column": ("table", "db", "catalog"),
    "Bracket": ("offset", "safe"),
    "Literal": ("is_string",),
    "Cast": ("to",),
    "TryCast": ("to",),
    "Between": ("low", "high"),
    "If": ("true", "false"),
    "Case": ("ifs", "default"),
    "Nvl2": ("true", "false"),
    "Div": ("typed", "safe"),
    "DPipe": ("safe",),
    "Concat": ("safe", "coalesce"),
    "Trim": ("position",),
    "Substring": ("start", "length"),
    "Like": ("negate",),
}
