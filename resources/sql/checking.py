"""Checks expressions against the available columns, and rejects what Spark would reject, with
suggestions for names.

Only certain errors are raised. Whatever is unknown here is left to Spark, and has the type None.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from dagster_adjunct.resources.errors import PlanningError
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
from dagster_adjunct.resources.sql.expression import (
    NILADIC,
    calls,
    did_you_mean,
    has_star_argument,
    multi_record_functions,
    parse_expression,
    parse_select,
)
from dagster_adjunct.resources.sql.parsed import GENERATOR_FUNCTIONS, ColumnName, Expression
from dagster_adjunct.resources.sql.result_types import (
    describe_missing_field,
    field_names,
    type_of_field,
)
from dagster_adjunct.resources.sql.types import (
    KnownTypes,
    TypedOperand,
    expression_type,
    find_non_boolean_operand,
    function_of_lambda,
    lambda_arguments,
    referenced_types,
    walk_with_types,
)

_NONDETERMINISTIC_FUNCTIONS = frozenset(
    {
        "aes_encrypt",
        "curdate",
        "current_date",
        "current_time",
        "current_timestamp",
        "current_user",
        "input_file_block_length",
        "input_file_block_start",
        "input_file_name",
        "java_method",
        "localtime",
        "localtimestamp",
        "monotonically_increasing_id",
        "now",
        "rand",
        "randn",
        "random",
        "randstr",
        "reflect",
        "session_user",
        "shuffle",
        "spark_partition_id",
        "try_reflect",
        "uniform",
        "user",
        "uuid",
    }
)
_NONDETERMINISTIC_NAME = re.compile(
    rf"\b(?:{'|'.join(sorted(_NONDETERMINISTIC_FUNCTIONS))}|unix_timestamp)\b", re.IGNORECASE
)
_BARE = re.compile(
    r"\b(current_date|current_time|current_timestamp|current_user|localtimestamp|session_user)\b"
    r"(?!\s*\()",
    re.IGNORECASE,
)
_NO_TIME = re.compile(r"\bunix_timestamp\s*\(\s*\)", re.IGNORECASE)
# String literals that Spark reads as the current date or time, in a typed literal or an explicit
# cast. `relative_datetime_literals` finds those that are cast implicitly.
_SPECIAL = re.compile(
    r"\b(?:date|timestamp(?:_ntz|_ltz)?|cast|try_cast|to_date|to_timestamp(?:_ntz|_ltz)?)\s*\(?\s*"
    r"(['\"])\s*(now|today|tomorrow|yesterday)\b[^'\"]*\1",
    re.IGNORECASE,
)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`")


def nondeterministic_parts(text: str, types: Mapping[str, str | None]) -> list[str]:
    """Return the nondeterministic parts of an expression, for messages, each once: "rand()",
    "'now' as a time".
    """
    named = [match[2].lower() for match in _SPECIAL.finditer(text)]
    special = [
        f"'{name}' as a time"
        for name in dict.fromkeys((*named, *relative_datetime_literals(text, types)))
    ]
    if not _NONDETERMINISTIC_NAME.search(text):  # the usual case, without parsing
        return special
    plain = _TEXT.sub("''", text)
    names = list(
        dict.fromkeys(call.name for call in calls(text) if call.name in _NONDETERMINISTIC_FUNCTIONS)
    )
    names += [match[1].lower() for match in _BARE.finditer(plain)]
    if _NO_TIME.search(plain):
        names += ["unix_timestamp"]
    return [f"{name}()" for name in names] + special


# Names that Spark resolves itself: the file of a record, and variables of the session.
_SPARK_NAMES = frozenset({"_metadata", "session", "system"})
_CORRECT = "Correct the expression."


def check_expression(
    operator: str,
    text: str,
    columns: Sequence[str] | None,
    types: Mapping[str, str | None] | None = None,
    *,
    side: str = "the stream",
    next_step: str = _CORRECT,
    aliases: Mapping[str, str | None] | None = None,
) -> str | None:
    """Return the type of an expression over these columns, as Spark's simple name, or None where it
    is uncertain.

    `columns` is None where they are unknown; then only errors that are certain without them are
    raised. `aliases` are those of earlier expressions in the same list, with their types: Spark
    lets this one use them. Raises PlanningError, with operator and column, for a missing column, a
    field of a column that has none, a hidden column, and a syntax error.
    """
    expression = parse_expression(text)
    scope = _Scope(operator, columns, types or {}, side, next_step, aliases or {})
    if expression.mistake:
        raise scope.error(
            f"{text!r} is not a Spark SQL expression: {expression.mistake}.", next_step
        )
    if has_star_argument(expression):
        problem = (
            f"{text!r} passes all columns to a function with '*', which would include hidden"
            " columns."
        )
        raise scope.error(problem, "Name the columns to pass.")
    return scope.check(expression)


@dataclass(frozen=True, slots=True)
class _Scope:
    """The names that an expression can reference, and texts for errors; see `check_expression`."""

    operator: str
    columns: Sequence[str] | None
    types: Mapping[str, str | None]
    side: str
    next_step: str
    aliases: Mapping[str, str | None]

    def error(self, problem: str, next_step: str, column: str | None = None) -> PlanningError:
        """Return the error of the operator with this problem."""
        return PlanningError(
            f"{self.operator}: {problem}", next_step, operator=self.operator, column=column
        )

    def check(self, expression: Expression) -> str | None:
        """Return the type of an expression, None if it is unknown.

        Raises PlanningError for a missing column or field, a reserved name, and a part whose type
        Spark certainly rejects.
        """
        for name in expression.columns:
            self.check_reference(expression, name)
        for excepted in expression.excepted:
            if self.columns is not None and self._find_column(excepted) is None:
                raise self._missing_column(expression, ColumnName((excepted,)))
        types = self._known_types()
        self._check_operands(expression, types)
        return expression_type(resolve_niladic_name(expression, self.columns), types)

    def _known_types(self) -> Mapping[str, str | None]:
        """Return the types of columns and aliases; columns take precedence, ignoring case."""
        there = {name.lower() for name in self.types}
        known = dict(self.types)
        for alias, kind in self.aliases.items():
            if alias.lower() not in there:
                known[alias] = kind
        return known

    def _check_operands(self, expression: Expression, types: Mapping[str, str | None]) -> None:
        """Raise PlanningError for a part whose type Spark certainly rejects."""
        text = expression.text
        found = _find_operand_problems(expression, referenced_types(expression, types))
        operand = found.non_boolean
        if operand is not None:
            problem = f"{text!r} uses {operand.text!r} as a boolean, but it is {operand.type}."
            raise self.error(problem, f"Compare it with something: {operand.text} is not null.")
        mistake = found.mistake
        if mistake is not None:
            raise self.error(f"{text!r} {mistake.phrase}.", mistake.suggestion + self.next_step)
        if found.rejected:
            raise self.error(
                f"{text!r} {found.rejected}.", f"Cast it to a type that fits. {self.next_step}"
            )

    def check_reference(self, expression: Expression, name: ColumnName) -> None:
        """Raise PlanningError unless a name is a column, an alias or known to Spark."""
        lower = name.name.lower()
        if lower.startswith("__"):
            problem = (
                f"{expression.text!r} names {name.name!r}: columns that begin with '__' are"
                " reserved."
            )
            raise self.error(
                problem, "Use the record's own columns, such as a time that it contains.", name.name
            )
        if self.columns is None or lower in _SPARK_NAMES:
            return
        if lower in map(str.lower, self.aliases):
            return
        column = self._find_column(name.name)
        if column is None:
            if lower in NILADIC and len(name.parts) == 1:
                return
            raise self._missing_column(expression, name)
        self._check_fields(expression, name, column)

    def _check_fields(self, expression: Expression, name: ColumnName, column: str) -> None:
        """Raise PlanningError if a name with several parts is certainly no field of a column."""
        type_ = known_type(self.types.get(column))
        if type_ is None or len(name.parts) == 1:
            return
        if isinstance(type_, Simple):
            place = f"{self.side}{expression.place(name)}"
            problem = (
                f"{expression.text!r} takes {str(name)!r} of {place}, but {column!r} is"
                f" {self.types[column]}"
            )
            step = (
                f"Write {column!r}, or put a column name that contains a dot in backticks:"
                f" `{name}`."
            )
            raise self.error(f"{problem} and has no fields.", step, column)
        for field in name.parts[1:]:
            found = type_of_field(type_, field)
            if found is None:
                missing = describe_missing_field(type_, field)
                step = did_you_mean(field, field_names(type_)) + self.next_step
                problem = f"{expression.text!r}{expression.place(name)}: {name}: {missing}."
                raise self.error(problem, step, column)
            type_ = found

    def _find_column(self, name: str) -> str | None:
        """Return the column of this name, ignoring case; None if there is none."""
        columns = self.columns or ()
        lower = name.lower()
        if name in columns:
            return name
        return next((column for column in columns if column.lower() == lower), None)

    def _missing_column(self, expression: Expression, name: ColumnName) -> PlanningError:
        """Return the error for a name that is no column."""
        columns = self.columns or ()
        where = ""
        if expression.column is None:
            where = f" ({expression.text!r}{expression.place(name)})"
        problem = (
            f"{self.side} has no column {name.name!r}{where}; its columns there are"
            f" {', '.join(columns)}."
        )
        return self.error(problem, did_you_mean(name.name, columns) + self.next_step, name.name)


class Mistake(NamedTuple):
    """What is wrong in an expression, as the end of a sentence about it, and a sentence that
    suggests what was meant, or "".
    """

    phrase: str
    suggestion: str = ""


class _OperandProblems(NamedTuple):
    """What `find_non_boolean_operand`, `find_mistake` and `find_operand_problem` find in an
    expression.
    """

    non_boolean: TypedOperand | None
    mistake: Mistake | None
    rejected: str | None


@lru_cache(maxsize=65_536)
def _find_operand_problems(
    expression: Expression, named: tuple[tuple[str, str | None], ...]
) -> _OperandProblems:
    """Return the problems of an expression; `named` has (name, type) of the columns.

    Cached, because an operator's expressions are checked several times.
    """
    types = dict(named)
    return _OperandProblems(
        find_non_boolean_operand(expression, types),
        find_mistake(expression, types),
        find_operand_problem(expression, types),
    )


def check_single_record(operator: str, text: str) -> None:
    """Raise PlanningError for an expression that calls a generator, or an aggregate without
    `over (…)`.
    """
    for name, is_over in multi_record_functions(text):
        if name in GENERATOR_FUNCTIONS:
            problem = (
                f"{operator}: {text!r} returns several records for one with {name}(), and none has"
                " a number."
            )
            step = 'Use flat_map("an array as its_element"), which numbers them.'
            raise PlanningError(problem, step, operator=operator)
        if not is_over:
            problem = (
                f"{operator}: {text!r} aggregates several records with {name}(): expressions apply"
                " to one record."
            )
            step = (
                "Aggregate records in a window, window(…), or elements of an array with"
                " aggregate(…)."
            )
            raise PlanningError(problem, step, operator=operator)


def check_condition(
    operator: str,
    text: str,
    columns: Sequence[str] | None,
    types: Mapping[str, str | None] | None = None,
) -> None:
    """Raise PlanningError for a condition that `check_expression` rejects, or that is certainly
    not boolean.
    """
    kind = check_expression(operator, text, columns, types, next_step="Correct the condition.")
    check_single_record(operator, text)
    if parse_expression(text).star:
        problem = f"{operator}: the condition {text!r} is all columns: expected boolean."
        raise PlanningError(problem, "Compare one of them with something.", operator=operator)
    windows = [name for name, _ in multi_record_functions(text)]
    if windows:
        problem = (
            f"{operator}: the condition {text!r} uses {windows[0]}() over a window, which Spark"
            " does not allow."
        )
        step = "Compute it as a column with with_columns(…), and filter by that column."
        raise PlanningError(problem, step, operator=operator)
    if kind not in (None, "boolean", "void"):
        step = f"Compare it with something: {text} is not null."
        raise PlanningError(
            f"{operator}: the condition {text!r} is {kind}: expected boolean.",
            step,
            operator=operator,
        )


def resolve_niladic_name(expression: Expression, columns: Iterable[str] | None) -> Expression:
    """Return the expression; if it is a name such as "current_date", and no column has the name,
    as a function call.
    """
    if expression.column is None or expression.column.lower() not in NILADIC:
        return expression
    if columns is not None and expression.column.lower() in {column.lower() for column in columns}:
        return expression
    return replace(expression, name=expression.alias, column=None, columns=())


def check_select(
    operator: str,
    text: str,
    table: str,
    types: Mapping[str, str | None],
    *,
    side: str,
    next_step: str,
) -> None:
    """Raise PlanningError for a SELECT with a missing column of `table`, or an error that Spark is
    certain to raise.

    `types` has the type of each column. If other tables are joined, only names that are qualified
    with that of this table (`v.city`) are checked.
    """
    select = parse_select(text, table)
    if select is None or _names_hidden(select.expressions):  # Spark has to analyze it
        return
    if select.mistake:
        raise PlanningError(
            f"{operator}: {text!r} is not valid: {select.mistake}.", next_step, operator=operator
        )
    scope = _Scope(operator, tuple(types), types, side, next_step, {})
    for name in select.qualified:
        scope.check_reference(Expression(text, unread="more than one table"), name)
    alias_types: dict[str, str | None] = {}
    for item in select.items:
        item_type = replace(scope, aliases=alias_types).check(item)
        if item.alias is not None:
            alias_types[item.alias] = item_type
    where_type = None
    if select.where is not None:
        where_type = scope.check(select.where)
    if where_type not in (None, "boolean", "void"):
        raise scope.error(
            f"the where clause of {text!r} has the type {where_type}: expected a condition.",
            next_step,
        )
    # In later clauses, a name of a column and an item may mean either, depending on the clause, so
    # its type is unknown.
    aliases = {alias.lower() for alias in alias_types}
    known = {name: None if name.lower() in aliases else kind for name, kind in types.items()}
    for expression in select.later:
        replace(scope, types=known, aliases=dict.fromkeys(alias_types)).check(expression)


def needs_spark_analysis(text: str, table: str) -> bool:
    """Whether a part of a SELECT can only be checked by Spark, even where all columns of `table`
    are known.
    """
    select = parse_select(text, table)
    if select is None or not select.expressions or select.groups:
        return True
    if _names_hidden(select.expressions):
        return True
    return any(expression.unread for expression in select.expressions)


def _names_hidden(expressions: tuple[Expression, ...]) -> bool:
    """Whether one of these expressions references a hidden column."""
    for expression in expressions:
        for name in expression.columns:
            if name.name.startswith("__"):
                return True
    return False


def check_expressions(
    operator: str,
    texts: Sequence[str],
    columns: Sequence[str] | None,
    types: Mapping[str, str | None] | None = None,
) -> list[tuple[Expression, str | None]]:
    """Return the parsed expressions of a list, each with its type or None, and raise the errors of
    `check_expression`.

    Spark lets an expression use aliases before it in the list, unless a column has the name.
    """
    items: list[tuple[Expression, str | None]] = []
    before: dict[str, str | None] = {}
    for text in texts:
        kind = check_expression(operator, text, columns, types, aliases=before)
        expression = resolve_niladic_name(parse_expression(text), columns)
        items.append((expression, kind))
        if expression.alias is not None:
            before[expression.alias] = kind
    return items


# Operands with types that Spark never accepts in a comparison, calculation or cast, neither in ANSI
# mode nor without it.
#
# Only groups of types are considered: nothing is rejected if operands are of one group, or one of
# them is a string that is cast to the other's type. `test_spark_agrees.py` checks over all pairs of
# types that Spark rejects whatever is rejected here.

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
_WORD = re.compile("[a-z_]+")
_NESTED = frozenset({"array", "map", "struct"})
_COMPARISONS = frozenset({"EQ", "NEQ", "LT", "LTE", "GT", "GTE", "NullSafeEQ", "NullSafeNEQ"})
_PREDICATES = frozenset({"In", "Between", "Like", "ILike", "RegexpLike", "Is"})
_FIELDS = """year y years yr yrs yearofweek quarter qtr month mon mons months week w weeks day d
    days dayofweek dow dayofweek_iso dow_iso doy hour h hours hr hrs minute m min mins minutes
    second s sec seconds secs"""
_NO_DDL = re.compile(r"[!?;@#%^&*+=/~|$]")


def find_operand_problem(expression: Expression, types: Mapping[str, str | None]) -> str | None:
    """Return a phrase about the first operand whose type Spark is certain to reject, or None.

    For example "compares 'n', which is int, with …".
    """
    if expression.tree is None or expression.unread:
        return None
    for operands, node in walk_with_types(Operands(types), expression.tree):
        rule = _RULES.get(type(node).__name__)
        if rule is None or _binds_differently_in_spark(node):
            continue
        problem = rule(operands, node)
        if problem is not None:
            return problem
    return None


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
    place = node.sql("spark")
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
    return Mistake(f"has {count} variables in {node.sql('spark')!r}: expected {wanted}")


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

    def describe(self, node: exp.Expr) -> str:
        """Return an operand with its type for messages."""
        return f"{node.sql('spark')!r}, which is {self.kind(node)}"


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
        second = operands.group(other)
        if second is not None and not _is_comparable(first, second, type(node).__name__):
            return f"compares {operands.describe(node.this)}, with {operands.describe(other)}"
    return None


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


def _arithmetic_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about an operand of arithmetic that Spark does not calculate with, or about a
    number that is added to a timestamp; None without one. Only `+` and `-` take times.
    """
    never = {*_NESTED, "boolean", "binary"}
    if type(node).__name__ not in ("Add", "Sub"):
        never.add("time")
    sides = list(filter(None, [node.this, node.args.get("expression")]))
    groups = list(map(operands.group, sides))
    for side, group in zip(sides, groups, strict=True):
        if group in never:
            return f"calculates with {operands.describe(side)}"
    if "number" not in groups:
        return None
    for side in sides:
        if (operands.kind(side) or "").startswith("timestamp"):
            return f"adds a number to a timestamp, {' and '.join(map(operands.describe, sides))}"
    return None


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
    """Return the rule of a function whose first argument has to be of one of these groups."""

    def problem(operands: Operands, node: exp.Expr) -> str | None:
        operand = node.this
        # The parser puts such a node around the arguments of some functions.
        is_added = type(operand).__name__ == "TsOrDsToDate" and not operand.args.get("safe")
        if is_added:
            operand = operand.this
        group = operands.group(operand)
        if group is None or group in groups:
            return None
        if groups == _SCALARS:
            expected = "a single value"
        else:
            expected = " or ".join(_GROUP_WORDS.get(name, name) for name in groups)
        return f"takes {operands.describe(operand)}: expected {expected}"

    return problem


_is_indexed = _expects("array", "map", "struct")
_GROUP_WORDS = {
    "array": "an array",
    "map": "a map",
    "text": "a text",
    "number": "a number",
    "time": "a date or timestamp",
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
    text = node.sql("spark")
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


def _extraction_problem(operands: Operands, node: exp.Expr) -> str | None:
    """Return a phrase about `extract(field from time)` if the field is no part of a time, else
    None.
    """
    field = node.name
    if type(node.this).__name__ != "Var" or field.lower() in _FIELDS.split():
        return None
    return (
        f"extracts {field.lower()!r}: expected a part of a time, such as year, month, day or hour"
    )


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


_SCALARS = tuple(group for group in _GROUPS if group not in _NESTED)
_RULES = {
    name: rule
    for names, rule in (
        ("EQ NEQ LT LTE GT GTE NullSafeEQ NullSafeNEQ Between In", _comparison_problem),
        ("Add Sub Mul Div Mod", _arithmetic_problem),
        ("DPipe Concat", _concatenation_problem),
        (
            """Upper Lower Trim Length Initcap Ascii Substring Left Right Pad Repeat Unhex
            RegexpReplace RegexpExtract Replace Translate RegexpSplit Levenshtein StrPosition Like
            ILike RegexpLike Contains StartsWith EndsWith""",
            _expects(*_SCALARS),
        ),
        ("Sqrt Exp Ln Round Floor Ceil Pow Sin Cos Tan IsNan", _expects("number", "text")),
        ("Abs Neg", _expects("number", "text", "interval")),
        (
            """Year Month Day DayOfMonth DayOfWeek DayOfYear Hour Minute Second WeekOfYear LastDay
            AddMonths NextDay TimeToStr""",
            _expects("time", "text"),
        ),
        ("MD5 SHA SHA2", _expects("text", "binary")),
        (
            """ArrayDistinct ArraySort ArrayContains ArrayFilter ArraySlice Exists Transform
            Reduce Flatten ArrayToString ArrayMax ArrayMin""",
            _expects("array"),
        ),
        ("ArraySize Explode", _expects("array", "map")),
        ("Bracket", _index_problem),
        ("Lambda", _lambda_problem),
        ("Anonymous", _named_function_problem),
        ("MapKeys", _expects("map")),
        ("Extract", _extraction_problem),
        ("FromJson", _from_json_problem),
    )
    for name in names.split()
}


_TIME_WORD = r"\s*(now|today|tomorrow|yesterday)(?:\s+[\w/:+-]+)?\s*"  # perhaps with a time zone
_QUOTED_TIME = re.compile(rf"(['\"]){_TIME_WORD}\1", re.IGNORECASE)
_TIME_LITERAL = re.compile(_TIME_WORD, re.IGNORECASE)
_COMPARES = "EQ NEQ LT LTE GT GTE NullSafeEQ NullSafeNEQ Between In If Case"
_OF_TIMES = """AddMonths DateAdd DateDiff DateSub Day DayOfMonth DayOfWeek DayOfYear Extract Hour
    LastDay Minute Month MonthsBetween NextDay Quarter Second TimeStrToTime TimestampAdd
    TimestampDiff TimestampTrunc TimeToStr TsOrDsAdd TsOrDsDiff TsOrDsToDate TsOrDsToTimestamp
    WeekOfYear Year"""
"""The syntax nodes that compare, and those whose operands are cast to dates or timestamps."""


def relative_datetime_literals(text: str, types: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the words ("now", "today", …) of string literals that Spark casts implicitly to the
    current date or time, in lower case, in the order of the text. Explicit casts are not among
    them.

    They include literals that are compared with an operand of unknown type, which may be a date or
    time.
    """
    if not _QUOTED_TIME.search(text):
        return ()
    tree = parse_expression(text).tree
    if tree is None:
        return ()
    operands = Operands(types)
    specials: dict[str, None] = {}
    for literal in tree.find_all(exp.Literal, bfs=False):
        if not literal.is_string:
            continue
        special = _TIME_LITERAL.fullmatch(literal.name)
        if special is not None and _becomes_a_time(operands, literal):
            specials[special[1].lower()] = None
    return tuple(specials)


def _becomes_a_time(operands: Operands, literal: exp.Expr) -> bool:
    """Whether Spark casts a literal to a date or timestamp because of what is around it: a function
    of times, or a comparison with a time, or with what may be one.
    """
    node = literal
    parent = literal.parent
    while parent is not None and type(parent).__name__ == "Paren":
        node = parent
        parent = parent.parent
    if parent is None:
        return False
    kind = type(parent).__name__
    if kind not in _COMPARES.split():
        return kind in _OF_TIMES.split()
    above = parent.parent
    if kind == "If" and above is not None and type(above).__name__ == "Case":
        owner = above  # a branch of CASE is compared with its first value
    else:
        owner = parent
    others = [owner.args.get(name) for name in ("expression", "low", "high")]
    for part in filter(None, [owner.this, *others, *owner.expressions]):
        if part is not node and operands.group(part) in (None, "time"):
            return True
    return False
