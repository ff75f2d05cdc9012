"""Finds operands and arguments of types that Spark never accepts, neither in ANSI mode nor without
it, and fields that values do not have.

Where a type is unknown, nothing is rejected. `test_operands.py` and `test_what_functions_take.py`
check over all pairs of types that Spark rejects whatever is rejected here, `test_spark_agrees.py`
does so over drawn expressions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, TypeAlias

from dagster_adjunct.resources.lazy_modules import exp
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Simple,
    Struct,
    Type,
    known_type,
    write_name,
)
from dagster_adjunct.resources.sql.expression import did_you_mean
from dagster_adjunct.resources.sql.parsed import Expression, Taken, taken_arguments, written_call
from dagster_adjunct.resources.sql.result_types import (
    describe_missing_field,
    field_names,
    type_of_field,
)
from dagster_adjunct.resources.sql.types import (
    KnownTypes,
    function_of_lambda,
    lambda_arguments,
    sql_of,
    walk_with_types,
)


class Mistake(NamedTuple):
    """What is wrong in an expression, as the end of a sentence about it, and a sentence that
    suggests what was meant, or "".
    """

    phrase: str
    suggestion: str = ""


Rule: TypeAlias = Callable[["Operands", "exp.Expr"], str | None]
"""Returns a phrase about an operand of a node that Spark certainly rejects, None without one."""

_GROUPS = {
    "number": ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal"),
    "text": ("string",),
    "boolean": ("boolean",),
    "time": ("date", "timestamp", "timestamp_ntz"),
    "binary": ("binary",),
    "interval": ("interval",),
    "array": ("array",),
    "map": ("map",),
    "struct": ("struct",),
}
_GROUP_OF = {word: group for group, words in _GROUPS.items() for word in words}
# The groups of types that spark_functions.txt names.
NARROW_GROUPS = {
    **dict.fromkeys(("tinyint", "smallint", "int", "bigint"), "whole"),
    **dict.fromkeys(("float", "double"), "floating"),
    **{kind: kind for kind in ("decimal", "string", "boolean", "date", "timestamp")},
    **{kind: kind for kind in ("timestamp_ntz", "binary", "interval", "array", "map", "struct")},
}
_SIMPLE_GROUPS = frozenset(NARROW_GROUPS.values()) - {"array", "map", "struct"}
# Strings are cast to numbers and times.
_WIDE_GROUPS = {
    "any": frozenset(NARROW_GROUPS.values()),
    "simple": _SIMPLE_GROUPS,
    "number": frozenset({"whole", "decimal", "floating", "string"}),
    "time": frozenset({"date", "timestamp", "timestamp_ntz", "string"}),
}
_WORD = re.compile("[a-z_]+")
_NESTED = frozenset({"array", "map", "struct"})
_COMPARISONS = frozenset({"EQ", "NEQ", "LT", "LTE", "GT", "GTE", "NullSafeEQ", "NullSafeNEQ"})
_PREDICATES = frozenset({"In", "Between", "Like", "ILike", "RegexpLike", "Is"})
_FIELDS = """year y years yr yrs yearofweek quarter qtr month mon mons months week w weeks day d
    days dayofweek dow dayofweek_iso dow_iso doy hour h hours hr hrs minute m min mins minutes
    second s sec seconds secs"""
_NO_DDL = re.compile(r"[!?;@#%^&*+=/~|$]")


def find_operand_problem(expression: Expression, types: Mapping[str, str | None]) -> Mistake | None:
    """Return the mistake of the first operand whose type Spark is certain to reject, or None.

    For example "compares 'n', which is int, with …".
    """
    if expression.tree is None or expression.unread:
        return None
    for operands, node in walk_with_types(Operands(types), expression.tree):
        if _binds_differently_in_spark(node):
            continue
        rule = _RULES.get(type(node).__name__)
        problem = None if rule is None else rule(operands, node)
        problem = problem or _argument_problem(operands, node)
        if problem is not None:
            is_cast = type(node).__name__ in ("Cast", "TryCast")
            return Mistake(problem, "" if is_cast else "Cast it to a type that fits. ")
        problem = _constant_problem(operands, node)
        if problem is not None:
            return Mistake(problem, "Write a number or a text in its place. ")
    return None


def _argument_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about an argument of a function call that the function does not take; None
    without one.
    """
    for argument, taken in _taken_by_call(node):
        problem = _group_problem(operands, argument, taken.groups)
        if problem is not None:
            return problem
    return None


def _constant_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about an argument of a function call that has to be a constant; None if
    none has to, or it is one.
    """
    called = ""
    call = written_call(node)
    if call is not None:
        called = call.name
    for argument, taken in _taken_by_call(node):
        if taken.is_constant and operands.depends_on_record(argument):
            return f"takes {sql_of(argument)!r} as an argument of {called}(): expected a constant"
    return None


def _taken_by_call(node: exp.Expr) -> Iterator[tuple[exp.Expr, Taken]]:
    """Yield the arguments of a function call with what the function takes there; none for another
    node, and for arguments by name.
    """
    call = written_call(node)
    if call is None or any(isinstance(argument, exp.Kwarg) for argument in call.arguments):
        return
    takes = taken_arguments(call.name, len(call.arguments))
    yield from zip(call.arguments, takes, strict=False)


def may_cast(kind: str, target: str) -> bool:
    """Whether Spark may cast values of a type to another one, as far as these are known."""
    words = [_WORD.match(text) for text in (kind, target)]
    groups = [NARROW_GROUPS.get(word[0], "") if word else "" for word in words]
    castable = _CASTABLE.get(groups[1])
    return castable is None or groups[0] in castable.split()


def groups_in(groups: Iterable[str]) -> frozenset[str]:
    """Return the narrow groups of types that these groups consist of."""
    return frozenset().union(*(_WIDE_GROUPS.get(group, {group}) for group in groups))


def find_mistake(expression: Expression, types: Mapping[str, str | None]) -> Mistake | None:
    """Return the first field that a value certainly does not have, or lambda with a wrong number of
    variables; None if there is none.

    Fields of columns outside of lambdas, as in `customer.city`, are checked elsewhere.
    """
    if expression.tree is None or expression.unread:
        return None
    for operands, node in walk_with_types(Operands(types), expression.tree):
        rule = _MISTAKES.get(type(node).__name__)
        mistake = None if rule is None else rule(operands, node)
        if mistake is not None:
            return mistake
    return None


def _find_missing_field(operands: Operands, node: exp.Expr) -> Mistake | None:
    """Return the mistake of `value.field` or `value['field']` without such a field, None if it has
    one, or may have.
    """
    field = node.args.get("expression")
    if type(node).__name__ == "Bracket":
        field = node.expressions[0] if len(node.expressions) == 1 else None
        if node.args.get("offset") or not getattr(field, "is_string", False):
            return None
    elif type(field).__name__ != "Identifier":
        return None
    type_ = known_type(operands.kind(node.this))
    if type_ is None or field is None:
        return None
    if isinstance(type_, Simple) and type(node).__name__ == "Bracket":  # reported as an index
        return None
    return _describe_field(node, type_, field.name, operands.path(node.this))


def _find_missing_field_of_variable(operands: Operands, node: exp.Expr) -> Mistake | None:
    """Return the mistake of `x.price` for a variable `x` of a lambda without such a field. The
    parser reads it as a column if it is written `X.price`. None for a real column.
    """
    first, *fields = [part.name for part in node.parts]  # type: ignore[attr-defined]
    variable = operands.variable(first)
    kind = variable.type
    for field in fields:
        type_ = known_type(kind)
        if type_ is None:
            return None
        mistake = _describe_field(node, type_, field, variable.path)
        if mistake is not None:
            return mistake
        kind = str(type_of_field(type_, field))
    return None


def _describe_field(node: exp.Expr, type_: Type, field: str, path: str) -> Mistake | None:
    """Return the mistake if a value of this type, with this path, has no such field, else None."""
    if type_of_field(type_, field) is not None:
        return None
    missing = describe_missing_field(type_, field)
    place = sql_of(node)
    if path and node.find_ancestor(exp.Lambda) is not None:
        place += f" ({path}.{write_name(field)})"
    suggestion = did_you_mean(field, field_names(type_))
    return Mistake(f"has a mistake in {place}: {missing}", suggestion)


def _find_wrong_count(operands: Operands, node: exp.Expr) -> Mistake | None:
    """Return the mistake of a lambda with a wrong number of variables, None if it is right."""
    given = lambda_arguments(operands, node)
    if given is None:
        return None
    if function_of_lambda(node) in ("Transform", "ArrayFilter"):
        fewest = 1
        wanted = "1 or 2, the second is the index"
    else:
        fewest = len(given)
        wanted = str(fewest)
    count = len(node.expressions)
    if fewest <= count <= len(given):
        return None
    return Mistake(f"has {count} variables in {sql_of(node)!r}: expected {wanted}")


_MISTAKES = {
    "Bracket": _find_missing_field,
    "Column": _find_missing_field_of_variable,
    "Dot": _find_missing_field,
    "Lambda": _find_wrong_count,
}


def _binds_differently_in_spark(node: exp.Expr) -> bool:
    """Whether the parser binds operands differently from Spark, which reads `a = b IN (c)` as
    `(a = b) IN (c)`.
    """
    if type(node).__name__ in _COMPARISONS:
        return any(_is_predicate(side) for side in (node.this, node.args.get("expression")))
    above = node.parent
    while type(above).__name__ == "Not":
        above = above.parent if above is not None else None
    return _is_predicate(node) and type(above).__name__ in _COMPARISONS


def _is_predicate(node: exp.Expr | None) -> bool:
    """Whether a node is IN, BETWEEN, LIKE or IS, perhaps negated."""
    while type(node).__name__ == "Not" and node is not None:
        node = node.this
    return type(node).__name__ in _PREDICATES


class Operands(KnownTypes):
    """Describes operands of an expression over columns of these types."""

    def kind(self, node: exp.Expr | None) -> str | None:
        """Return the type of an operand; None if it is unknown, or is null, which fits every
        type.
        """
        type_ = self.type(node)
        if type_ == "void":
            return None
        return type_

    def group(self, node: exp.Expr | None) -> str | None:
        """Return the group of an operand's type ("number", "time", …), None where the type is
        unknown.
        """
        kind = self.kind(node)
        if kind is None:
            return None
        word = _WORD.match(kind)
        if word is None:
            return None
        return _GROUP_OF.get(word[0])

    def narrow_group(self, node: exp.Expr | None) -> str | None:
        """Return the group of an operand's type as spark_functions.txt names it, None where the
        type is unknown.
        """
        word = _WORD.match(self.kind(node) or "")
        if word is None:
            return None
        return NARROW_GROUPS.get(word[0])

    def depends_on_record(self, node: exp.Expr) -> bool:
        """Whether an operand certainly has other values for other records: it uses a column whose
        type is known.
        """
        return any(self.type(column) is not None for column in node.find_all(exp.Column))

    def describe(self, node: exp.Expr) -> str:
        """Return an operand with its type for messages."""
        return f"{sql_of(node)!r}, which is {self.kind(node)}"


def _comparison_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about operands of a comparison, of IN or of BETWEEN that can't be compared;
    None without one.
    """
    first = operands.group(node.this)
    if first is None:
        return None
    others = [node.args.get(name) for name in ("expression", "low", "high")]
    if len(node.expressions) > 1 and {"text", None} & set(map(operands.group, node.expressions)):
        return None  # all become strings, or are of one unknown type
    for other in filter(None, [*others, *node.expressions]):
        if _are_incomparable(operands, node.this, other, type(node).__name__):
            return f"compares {operands.describe(node.this)}, with {operands.describe(other)}"
    return None


def _are_incomparable(operands: Operands, one: exp.Expr, other: exp.Expr, operator: str) -> bool:
    """Whether Spark certainly does not compare two operands by an operator."""
    first = operands.group(one)
    second = operands.group(other)
    if first is None or second is None:
        return False
    if not _is_comparable(first, second, operator):
        return True
    if first != "array" or operator == "In":
        return False
    elements = [_element_group(operands.kind(node)) for node in (one, other)]
    return None not in elements and elements[0] != elements[1]


def _element_group(kind: str | None) -> str | None:
    """Return the group of the elements of an array, None if it is unknown."""
    type_ = known_type(kind)
    if not isinstance(type_, Array):
        return None
    word = _WORD.match(str(type_.element))
    return _GROUP_OF.get(word[0]) if word else None


def _is_comparable(first: str, second: str, operator: str) -> bool:
    """Whether Spark may compare operands of these groups by an operator."""
    both = {first, second}
    if first == second:
        return first != "map"
    if both == {"boolean", "number"}:  # without ANSI mode Spark takes booleans as 0 and 1
        return operator in ("EQ", "NEQ", "NullSafeEQ", "NullSafeNEQ")
    if both == {"text", "interval"}:
        return operator == "In"
    return "text" in both and not both & _NESTED


# By the node of an operator: the groups of its first operand, and which groups of the second one it
# takes with each.
_NUMBERS = "whole decimal floating string"
_TIMES = "string date timestamp timestamp_ntz"
_BITS = {"whole": "whole string", "string": "whole"}
_PAIRS: dict[str, dict[str, str]] = {
    "Add": {
        **dict.fromkeys(_NUMBERS.split(), _NUMBERS),
        "whole": f"{_NUMBERS} date",
        "string": f"{_NUMBERS} interval",
        "date": "whole interval",
        "timestamp": "interval",
        "timestamp_ntz": "interval",
        "interval": f"{_TIMES} interval",
    },
    "Sub": {
        **dict.fromkeys(_NUMBERS.split(), _NUMBERS),
        "string": f"{_NUMBERS} {_TIMES} interval",
        "date": f"whole {_TIMES} interval",
        "timestamp": f"{_TIMES} interval",
        "timestamp_ntz": f"{_TIMES} interval",
        "interval": "interval",
    },
    "Mul": {**dict.fromkeys(_NUMBERS.split(), f"{_NUMBERS} interval"), "interval": _NUMBERS},
    "Div": dict.fromkeys((*_NUMBERS.split(), "interval"), _NUMBERS),
    "Mod": dict.fromkeys(_NUMBERS.split(), _NUMBERS),
    "IntDiv": {
        "whole": "whole decimal string",
        "decimal": "whole decimal",
        "string": "whole",
        "interval": "interval",
    },
    "BitwiseLeftShift": dict.fromkeys(_NUMBERS.split(), _NUMBERS),
    "BitwiseRightShift": dict.fromkeys(_NUMBERS.split(), _NUMBERS),
    "BitwiseAnd": _BITS,
    "BitwiseOr": _BITS,
    "BitwiseXor": _BITS,
}


def _arithmetic_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about operands that Spark does not calculate with, alone or together; None
    without one.
    """
    pairs = _PAIRS[type(node).__name__]
    left = node.this
    right = node.args.get("expression")
    first = operands.narrow_group(left)
    second = operands.narrow_group(right)
    if first is not None and first not in pairs:
        return f"calculates with {operands.describe(left)}"
    if second is None or right is None:
        return None
    taken = set(" ".join(pairs.values()).split())
    if second not in taken:
        return f"calculates with {operands.describe(right)}"
    is_bigint = "bigint" in (operands.kind(left), operands.kind(right))
    is_day_count = is_bigint and "date" in (first, second)  # days are tinyint to int
    if first is None or (second in pairs[first].split() and not is_day_count):
        return None
    sides = f"{operands.describe(left)}, and {operands.describe(right)}"
    if type(node).__name__ == "Add" and {"timestamp", "timestamp_ntz"} & {first, second}:
        return f"adds to a timestamp: {sides}"
    return f"calculates with {sides}"


def _concatenation_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about a part that is concatenated with another type; None if all may be
    texts, or all are arrays.
    """
    parts = node.expressions or [node.this, node.args.get("expression")]
    groups = {group for group in map(operands.group, parts) if group is not None}
    for part in parts:
        group = operands.group(part)
        if group in ("map", "struct") or (group == "array" and groups != {"array"}):
            return f"concatenates {operands.describe(part)}, with another type"
    return None


def _expects(*groups: str) -> Rule:
    """Return the rule of a syntax whose first operand has to be of one of these groups."""

    def problem(operands: Operands, node: exp.Expr) -> str | None:
        return _group_problem(operands, node.this, groups)

    return problem


def _group_problem(
    operands: Operands, operand: exp.Expr | None, groups: Sequence[str]
) -> str | None:
    """Return a phrase about an operand that is of none of these groups; None if it is, or if its
    type is unknown.
    """
    group = operands.narrow_group(operand)
    if operand is None or group is None or group in groups_in(groups):
        return None
    expected = " or ".join(_GROUP_WORDS[name] for name in groups)
    return f"takes {operands.describe(operand)}: expected {expected}"


_is_indexed = _expects("array", "map", "struct")
_GROUP_WORDS = {
    "any": "any value",
    "simple": "a single value",
    "number": "a number or a text",
    "time": "a date or timestamp or a text",
    "whole": "a whole number",
    "decimal": "a decimal",
    "floating": "a float or double",
    "string": "a text",
    "boolean": "a boolean",
    "date": "a date",
    "timestamp": "a timestamp",
    "timestamp_ntz": "a timestamp_ntz",
    "binary": "binary",
    "interval": "an interval",
    "array": "an array",
    "map": "a map",
    "struct": "a struct",
}


def _index_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about `value[index]` if the value has no elements, or the index does not fit
    them; None without one.

    `value['field']` of a struct, or of an array of structs, is left to `_find_missing_field`.
    """
    type_ = known_type(operands.kind(node.this))
    if type_ is None or len(node.expressions) != 1:
        return _is_indexed(operands, node)
    index = node.expressions[0]
    is_name = bool(getattr(index, "is_string", False))
    is_index = operands.narrow_group(index) in (None, "whole")
    if isinstance(type_, Array) and not is_name and not is_index:
        return f"takes {operands.describe(index)}, as an index: expected a whole number"
    is_element_at = bool(node.args.get("offset"))
    if isinstance(type_, Array | Struct) and is_name and not is_element_at:
        return None
    if isinstance(type_, Struct):
        names = ", ".join(field_names(type_))
        return f"takes an element of {operands.describe(node.this)}: expected a field, {names}"
    if isinstance(type_, Map) and operands.group(index) in _NESTED:
        return f"takes {operands.describe(index)}, as a key of a map: expected a string"
    return _is_indexed(operands, node)


def _lambda_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about a lambda that returns no boolean for a condition, no int for a
    comparison, or another type than the initial value for a merge; None without one.

    `operands` knows the types outside of the lambda.
    """
    caller = function_of_lambda(node)
    result = operands.within(node).kind(node.this)
    if result is None:
        return None
    text = sql_of(node)
    if caller in ("ArrayFilter", "Exists", "forall", "map_filter") and result != "boolean":
        return f"has the condition {text!r}, which is {result}: expected boolean"
    if caller == "ArraySort" and result != "int":
        return f"compares by {text!r}, which is {result}: expected int"
    if caller == "Reduce" and node.parent is not None and node is node.parent.args.get("merge"):
        return _merge_problem(result, operands.kind(node.parent.args.get("initial")), text)
    return None


def _merge_problem(result: str, initial: str | None, text: str) -> str | None:
    """Return a phrase about aggregate() if what it merges has another type than its initial value;
    None if it has not, or if a type is unknown.
    """
    first = known_type(initial)
    merged = known_type(result)
    if first is None or merged is None or _has_equal_parts(first, merged):
        return None
    return f"begins with {initial} and merges by {text!r}, which is {result}: expected one type"


def _has_equal_parts(one: Type, other: Type) -> bool:
    """Whether two types are the same but for the names of fields."""
    if isinstance(one, Array) and isinstance(other, Array):
        return _has_equal_parts(one.element, other.element)
    if isinstance(one, Map) and isinstance(other, Map):
        return _has_equal_parts(one.value, other.value)
    if isinstance(one, Struct) and isinstance(other, Struct):
        pairs = list(zip(one.members, other.members, strict=False))
        equal = all(_has_equal_parts(first.type, second.type) for first, second in pairs)
        return equal and len(one.members) == len(other.members)
    return one == other


def _named_function_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about an argument that is not the array or map which a function passes to its
    lambda; None without one. For functions that the parser has no class for.
    """
    name = node.name.lower()
    wanted = {"forall": "array", "zip_with": "array"}.get(name, "map")
    if name not in _TAKING_LAMBDAS:
        return None
    for argument in node.expressions[:-1]:
        group = operands.group(argument)
        if group not in (None, wanted):
            return f"takes {operands.describe(argument)}: expected {_GROUP_WORDS[wanted]}"
    return None


_TAKING_LAMBDAS = frozenset(
    {"forall", "zip_with", "map_filter", "transform_values", "transform_keys", "map_zip_with"}
)


def _both_simple(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about an operand of LIKE, of trim(both … from …) or of position(… in …) that
    is no single value, else None.
    """
    for name in ("this", "expression", "substr"):
        problem = _group_problem(operands, node.args.get(name), ("simple",))
        if problem is not None:
            return problem
    return None


def _overlay_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about `overlay(text placing other from position)` if a text is no single
    value, or only one of both is binary; else None.
    """
    problem = _both_simple(operands, node)
    sides = (node.this, node.args.get("expression"))
    groups = list(map(operands.narrow_group, sides))
    if problem is None and None not in groups and groups.count("binary") == 1:
        return "puts binary together with another type"
    return problem


def _result_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about alternative results, or elements of an array, that have no common type;
    None if they may have one.
    """
    if type(node).__name__ == "Case":
        results = [branch.args.get("true") for branch in node.args.get("ifs") or ()]
        parts = [*results, node.args.get("default")]
    elif type(node).__name__ in ("If", "Nvl2"):
        parts = [node.args.get("true"), node.args.get("false")]
    else:
        parts = [node.this, *node.expressions]
    given = [part for part in parts if isinstance(part, exp.Expr)]
    groups = list(map(operands.group, given))
    if len(given) > 2 and {"text", None} & set(groups):  # all may become strings
        return None
    for one, other in combinations(given, 2):
        if not _may_have_common_type(operands.group(one), operands.group(other)):
            sides = f"{operands.describe(one)}, and {operands.describe(other)}"
            return f"mixes results without a common type: {sides}"
    return None


def _may_have_common_type(first: str | None, second: str | None) -> bool:
    """Whether Spark may cast values of these groups to one type; None is an unknown group."""
    if first is None or second is None or first == second:
        return True
    return "text" in (first, second) and not {first, second} & _NESTED


def _case_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about CASE if a condition is not boolean, a value can't be compared with the
    first one, or results have no common type; else None.
    """
    for branch in node.args.get("ifs") or ():
        condition = branch.this
        if node.this is None:
            problem = _group_problem(operands, condition, ("boolean",))
            if problem is not None:
                return problem
        elif _are_incomparable(operands, node.this, condition, "EQ"):
            return f"compares {operands.describe(node.this)}, with {operands.describe(condition)}"
    return _result_problem(operands, node)


def _nullif_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about `nullif(value, other)` if both can't be compared, else None."""
    other = node.args.get("expression")
    if other is not None and _are_incomparable(operands, node.this, other, "EQ"):
        return f"compares {operands.describe(node.this)}, with {operands.describe(other)}"
    return None


def _is_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about `value IS TRUE` if the value can't be a boolean, else None."""
    if type(node.args.get("expression")).__name__ != "Boolean":
        return None
    return _group_problem(operands, node.this, ("boolean", "number"))


# By the group of the target of a cast: which groups Spark casts to it.
_NUMERIC = "whole decimal floating string boolean date timestamp"
_CASTABLE = {
    "whole": f"{_NUMERIC} interval",
    "decimal": f"{_NUMERIC} interval",
    "floating": _NUMERIC,
    "boolean": _NUMERIC,
    "date": "string date timestamp timestamp_ntz",
    "timestamp": f"{_NUMERIC} timestamp_ntz",
    "timestamp_ntz": "string date timestamp timestamp_ntz",
    "binary": "whole string binary",
    "array": "array",
    "map": "map",
    "struct": "struct",
}


def _cast_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about a cast between types that Spark does not cast, else None."""
    target = operands.kind(node)
    kind = operands.kind(node.this)
    if target is None or operands.narrow_group(node.this) is None or kind is None:
        return None
    if may_cast(kind, target):
        return None
    return f"casts {operands.describe(node.this)}, to {target}"


def _extraction_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about `extract(field from time)` if the field is no part of a time, or is
    extracted from something else, else None.
    """
    field = node.name
    if type(node.this).__name__ == "Var" and field.lower() not in _FIELDS.split():
        expected = "expected a part of a time, such as year, month, day or hour"
        return f"extracts {field.lower()!r}: {expected}"
    return _group_problem(operands, node.args.get("expression"), ("time", "interval"))


def _from_json_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about a literal of from_json that is certainly no schema, else None."""
    schema = node.args.get("expression")
    if schema is None or not getattr(schema, "is_string", False):
        return None
    text = schema.name
    if set(text) & set("'\"`{"):  # names in quotes and comments; or a schema that is JSON
        return None
    if _NO_DDL.search(text):
        return f"reads JSON by {text!r}, which is not a schema"
    return None


_RULES = {
    name: rule
    for names, rule in (
        ("EQ NEQ LT LTE GT GTE NullSafeEQ NullSafeNEQ Between In", _comparison_problem),
        (" ".join(_PAIRS), _arithmetic_problem),
        ("DPipe Concat", _concatenation_problem),
        ("Like ILike RegexpLike Trim StrPosition", _both_simple),
        ("Substring Initcap", _expects("simple")),
        ("Overlay", _overlay_problem),
        ("If Nvl2 Coalesce Greatest Least Array", _result_problem),
        ("Case", _case_problem),
        ("Nullif", _nullif_problem),
        ("Is", _is_problem),
        ("BitwiseNot", _expects("whole")),
        ("Cast TryCast", _cast_problem),
        ("Floor Ceil", _expects("number")),
        ("Neg", _expects("number", "interval")),
        ("Transform", _expects("array")),
        ("Bracket", _index_problem),
        ("Lambda", _lambda_problem),
        ("Anonymous", _named_function_problem),
        ("Extract", _extraction_problem),
        ("FromJson", _from_json_problem),
    )
    for name in names.split()
}
