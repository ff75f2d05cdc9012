"""Checks expressions against the available columns, and rejects what Spark would reject, with
suggestions for names.

Only certain errors are raised. Whatever is unknown here is left to Spark, and has the type None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.lazy_modules import exp
from dagster_adjunct.resources.schemas.types import Simple, known_type
from dagster_adjunct.resources.sql.expression import (
    NILADIC,
    calls,
    did_you_mean,
    has_star_argument,
    multi_record_functions,
    parse_expression,
    parse_select,
)
from dagster_adjunct.resources.sql.operands import (
    Mistake,
    Operands,
    find_mistake,
    find_operand_problem,
)
from dagster_adjunct.resources.sql.parsed import GENERATOR_FUNCTIONS, ColumnName, Expression
from dagster_adjunct.resources.sql.result_types import (
    describe_missing_field,
    field_names,
    type_of_field,
)
from dagster_adjunct.resources.sql.types import (
    TypedOperand,
    expression_type,
    find_non_boolean_operand,
    referenced_types,
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
        mistake = found.mistake or found.rejected
        if mistake is not None:
            raise self.error(f"{text!r} {mistake.phrase}.", mistake.suggestion + self.next_step)

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


class _OperandProblems(NamedTuple):
    """What `find_non_boolean_operand`, `find_mistake` and `find_operand_problem` find in an
    expression.
    """

    non_boolean: TypedOperand | None
    mistake: Mistake | None
    rejected: Mistake | None


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
