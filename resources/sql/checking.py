"""Checks expressions against the available columns, and rejects what Spark would reject, with suggestions for names.

Only certain errors are raised. Whatever is unknown here is left to Spark, and has the type None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import TYPES
from dagster_adjunct.resources.sql.expression import (
    NILADIC,
    ColumnName,
    Expression,
    calls,
    did_you_mean,
    has_star_argument,
    multi_record_functions,
    parse_expression,
    parse_select,
)
from dagster_adjunct.resources.sql.operands import find_operand_problem, relative_datetime_literals
from dagster_adjunct.resources.sql.spark_functions import GENERATOR_FUNCTIONS
from dagster_adjunct.resources.sql.types import expression_type, find_non_boolean_operand, referenced_types

_NONDETERMINISTIC_FUNCTIONS = frozenset(
    {
        "aes_encrypt", "curdate", "current_date", "current_time", "current_timestamp", "current_user",
        "input_file_block_length", "input_file_block_start", "input_file_name", "java_method", "localtime",
        "localtimestamp", "monotonically_increasing_id", "now", "rand", "randn", "random", "randstr", "reflect",
        "session_user", "shuffle", "spark_partition_id", "try_reflect", "uniform", "user", "uuid",
    }
)  # fmt: skip
_NONDETERMINISTIC_NAME = re.compile(
    rf"\b(?:{'|'.join(sorted(_NONDETERMINISTIC_FUNCTIONS))}|unix_timestamp)\b", re.IGNORECASE
)
_BARE = re.compile(
    r"\b(current_date|current_time|current_timestamp|current_user|localtimestamp|session_user)\b(?!\s*\()",
    re.IGNORECASE,
)
_NO_TIME = re.compile(r"\bunix_timestamp\s*\(\s*\)", re.IGNORECASE)
# String literals that Spark reads as the current date or time, in a typed literal or an explicit cast.
# `relative_datetime_literals` finds those that are cast implicitly.
_SPECIAL = re.compile(
    r"\b(?:date|timestamp(?:_ntz|_ltz)?|cast|try_cast|to_date|to_timestamp(?:_ntz|_ltz)?)\s*\(?\s*"
    r"(['\"])\s*(now|today|tomorrow|yesterday)\b[^'\"]*\1",
    re.IGNORECASE,
)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`")


def nondeterministic_parts(text: str, types: Mapping[str, str | None]) -> list[str]:
    """Return the nondeterministic parts of an expression for messages, each once: "rand()", "'now' as a time"."""
    named = [match[2].lower() for match in _SPECIAL.finditer(text)]
    special = [f"'{name}' as a time" for name in dict.fromkeys((*named, *relative_datetime_literals(text, types)))]
    if not _NONDETERMINISTIC_NAME.search(text):  # the usual case, without parsing
        return special
    plain = _TEXT.sub("''", text)
    names = list(dict.fromkeys(call.name for call in calls(text) if call.name in _NONDETERMINISTIC_FUNCTIONS))
    names += [match[1].lower() for match in _BARE.finditer(plain)]
    names += ["unix_timestamp"] if _NO_TIME.search(plain) else []
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
    """Return the type of an expression over these columns, as Spark's simple name, or None where it is uncertain.

    `columns` is None where they are unknown; then only errors that are certain without them are raised. `aliases` are
    the aliases before it in the same list of expressions, with their types, which Spark lets it reference. Raises
    PlanningError, with operator and column, for a missing column, a field of a column that has none, a hidden column,
    and a syntax error.
    """
    expression, scope = parse_expression(text), _Scope(operator, columns, types or {}, side, next_step, aliases or {})
    if expression.mistake:
        raise scope.error(f"{text!r} is not a Spark SQL expression: {expression.mistake}.", next_step)
    if has_star_argument(expression):
        problem = f"{text!r} passes all columns to a function with '*', which would include hidden columns."
        raise scope.error(problem, "Name the columns to pass.")
    return scope.check(expression)


@dataclass(frozen=True, slots=True)
class _Scope:
    """The names that an expression can reference, and what errors say; see `check_expression`."""

    operator: str
    columns: Sequence[str] | None
    types: Mapping[str, str | None]
    side: str
    next_step: str
    aliases: Mapping[str, str | None]

    def error(self, problem: str, next_step: str, column: str | None = None) -> PlanningError:
        return PlanningError(f"{self.operator}: {problem}", next_step, operator=self.operator, column=column)

    def check(self, expression: Expression) -> str | None:
        """Return the type of an expression."""
        text, types = expression.text, self.types
        for name in expression.columns:
            self.check_reference(expression, name)
        for excepted in expression.excepted:
            if self.columns is not None and self._find_column(excepted) is None:
                raise self._missing_column(expression, ColumnName((excepted,)))
        if self.aliases:  # columns take precedence over aliases, ignoring case
            there = {name.lower() for name in types}
            types = {**{name: kind for name, kind in self.aliases.items() if name.lower() not in there}, **types}
        wrong, operand = _find_operand_problems(expression, referenced_types(expression, types))
        if wrong is not None:
            problem = f"{text!r} uses {wrong[0]!r} as a boolean, but it is {wrong[1]}."
            raise self.error(problem, f"Compare it with something: {wrong[0]} is not null.")
        if operand is not None:
            raise self.error(f"{text!r} {operand}.", f"Cast it to a type that fits. {self.next_step}")
        return expression_type(resolve_niladic_name(expression, self.columns), types)

    def check_reference(self, expression: Expression, name: ColumnName) -> None:
        """Raise PlanningError unless a name is a column, an alias or known to Spark."""
        lower = name.name.lower()
        if lower.startswith("__"):
            problem = f"{expression.text!r} names {name.name!r}: columns that begin with '__' are reserved."
            raise self.error(problem, "Use the record's own columns, such as a time that it contains.", name.name)
        if self.columns is None or lower in _SPARK_NAMES or any(lower == alias.lower() for alias in self.aliases):
            return
        column = self._find_column(name.name)
        if column is None:
            if lower in NILADIC and len(name.parts) == 1:
                return
            raise self._missing_column(expression, name)
        if len(name.parts) > 1 and _has_no_fields(self.types.get(column)):
            place = f"{self.side}{expression.place(name)}"
            problem = f"{expression.text!r} takes {str(name)!r} of {place}, but {column!r} is {self.types[column]}"
            step = f"Write {column!r}, or put a column name that contains a dot in backticks: `{name}`."
            raise self.error(f"{problem} and has no fields.", step, column)

    def _find_column(self, name: str) -> str | None:
        """Return the column of this name, ignoring case. An exact match is found faster."""
        columns, lower = self.columns or (), name.lower()
        return name if name in columns else next((column for column in columns if column.lower() == lower), None)

    def _missing_column(self, expression: Expression, name: ColumnName) -> PlanningError:
        columns = self.columns or ()
        where = "" if expression.column is not None else f" ({expression.text!r}{expression.place(name)})"
        problem = f"{self.side} has no column {name.name!r}{where}; its columns there are {', '.join(columns)}."
        return self.error(problem, did_you_mean(name.name, columns) + self.next_step, name.name)


@lru_cache(maxsize=65_536)
def _find_operand_problems(
    expression: Expression, named: tuple[tuple[str, str | None], ...]
) -> tuple[tuple[str, str] | None, str | None]:
    """Return what both checks find, cached because an operator's expressions are checked several times."""
    types = dict(named)
    return find_non_boolean_operand(expression, types), find_operand_problem(expression, types)


def check_single_record(operator: str, text: str) -> None:
    """Raise PlanningError for an expression that calls a generator, or an aggregate without `over (…)`."""
    for name, is_over in multi_record_functions(text):
        if name in GENERATOR_FUNCTIONS:
            problem = f"{operator}: {text!r} returns several records for one with {name}(), and none has a number."
            step = 'Use flat_map("an array as its_element"), which numbers them.'
            raise PlanningError(problem, step, operator=operator)
        if not is_over:
            problem = f"{operator}: {text!r} aggregates several records with {name}(): an expression sees one."
            step = "Aggregate records in a window, window(…), or elements of an array with aggregate(…)."
            raise PlanningError(problem, step, operator=operator)


def check_condition(
    operator: str, text: str, columns: Sequence[str] | None, types: Mapping[str, str | None] | None = None
) -> None:
    """Raise PlanningError for a condition that `check_expression` rejects, or that is certainly not boolean."""
    kind = check_expression(operator, text, columns, types, next_step="Correct the condition.")
    check_single_record(operator, text)
    if parse_expression(text).star:
        problem = f"{operator}: the condition {text!r} is all columns: expected boolean."
        raise PlanningError(problem, "Compare one of them with something.", operator=operator)
    windows = [name for name, _ in multi_record_functions(text)]
    if windows:
        problem = f"{operator}: the condition {text!r} uses {windows[0]}() over a window, which Spark does not allow."
        step = "Compute it as a column with with_columns(…), and filter by that column."
        raise PlanningError(problem, step, operator=operator)
    if kind not in (None, "boolean", "void"):
        step = f"Compare it with something: {text} is not null."
        raise PlanningError(f"{operator}: the condition {text!r} is {kind}: expected boolean.", step, operator=operator)


def resolve_niladic_name(expression: Expression, columns: Iterable[str] | None) -> Expression:
    """Return the expression with a name such as "current_date" read as a call, unless a column has the name."""
    if expression.column is None or expression.column.lower() not in NILADIC:
        return expression
    if columns is not None and expression.column.lower() in {column.lower() for column in columns}:
        return expression
    return replace(expression, name=expression.alias, column=None, columns=())


def _has_no_fields(kind: str | None) -> bool:
    if kind is not None and kind.startswith("array<"):  # a field of an array of structs is an array
        return _has_no_fields(kind[6:-1])
    return kind is not None and (kind in TYPES or kind.startswith("decimal("))


def check_select(
    operator: str, text: str, table: str, types: Mapping[str, str | None], *, side: str, next_step: str
) -> None:
    """Raise PlanningError for a SELECT with a missing column of `table`, or with an error that Spark is certain to
    raise; `types` are those of the table's columns.

    Where other tables are joined, only names that are qualified with the table's own, `v.city`, are checked.
    """
    select = parse_select(text, table)
    if select is None or _names_hidden(select.expressions):
        return
    if select.mistake:
        raise PlanningError(f"{operator}: {text!r} is not valid: {select.mistake}.", next_step, operator=operator)
    scope = _Scope(operator, tuple(types), types, side, next_step, {})
    for name in select.qualified:
        scope.check_reference(Expression(text, unread="more than one table"), name)
    before: dict[str, str | None] = {}
    for item in select.items:
        kind = replace(scope, aliases=before).check(item)
        if item.alias is not None:
            before[item.alias] = kind
    kind = None if select.where is None else scope.check(select.where)
    if kind not in (None, "boolean", "void"):
        raise scope.error(f"the where clause of {text!r} is {kind}: expected a condition.", next_step)
    # After the items a name may mean a column or an item, depending on the clause, so the type of both is unknown.
    given = {alias.lower() for alias in before}
    known = {name: None if name.lower() in given else kind for name, kind in types.items()}
    for expression in select.later:
        replace(scope, types=known, aliases=dict.fromkeys(before)).check(expression)


def needs_spark_analysis(text: str, table: str) -> bool:
    """Whether some part of a SELECT can only be checked by Spark, even where all columns of `table` are known."""
    select = parse_select(text, table)
    if select is None or not select.expressions or select.groups or _names_hidden(select.expressions):
        return True
    return any(expression.unread for expression in select.expressions)


def _names_hidden(expressions: tuple[Expression, ...]) -> bool:
    return any(name.name.startswith("__") for expression in expressions for name in expression.columns)


@dataclass(frozen=True, slots=True)
class TypedExpression:
    """An expression of a list, with its type where that is certain."""

    expression: Expression
    type: str | None

    def expand_star(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return those of the columns that "*" or "* except (…)" selects."""
        excepted = {name.lower() for name in self.expression.excepted}
        return tuple(name for name in columns if name.lower() not in excepted)


def check_expressions(
    operator: str, texts: Sequence[str], columns: Sequence[str] | None, types: Mapping[str, str | None] | None = None
) -> tuple[TypedExpression, ...]:
    """Return a list of expressions with their types over these columns; see `check_expression`.

    Spark lets an expression use aliases before it in the list, unless a column has the name.
    """
    items: list[TypedExpression] = []
    before: dict[str, str | None] = {}
    for text in texts:
        kind = check_expression(operator, text, columns, types, aliases=before)
        expression = resolve_niladic_name(parse_expression(text), columns)
        items.append(TypedExpression(expression, kind))
        if expression.alias is not None:
            before[expression.alias] = kind
    return tuple(items)
