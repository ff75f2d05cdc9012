"""Expressions held against the columns that there are: what Spark would refuse is refused here, with the nearest name.

Only what is certain is refused. What is not known of an expression is left to Spark, and its type is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import TYPES
from dagster_adjunct.resources.sql.expression import NILADIC, ColumnName, Expression
from dagster_adjunct.resources.sql.operands import find_operand_problem, relative_datetime_literals
from dagster_adjunct.resources.sql.parser import (
    called_functions,
    has_star_argument,
    multi_record_functions,
    parse_expression,
    parse_select,
)
from dagster_adjunct.resources.sql.spark_functions import GENERATOR_FUNCTIONS
from dagster_adjunct.resources.sql.syntax_checks import did_you_mean
from dagster_adjunct.resources.sql.types import expression_type, find_non_boolean_operand, referenced_types

if TYPE_CHECKING:
    from dagster_adjunct.resources.sql.spark_grammar import SelectParts

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
# What Spark takes for the day or the moment: a literal of a time, and a text that is made one; `special_times` knows
# those that it makes one by itself.
_SPECIAL = re.compile(
    r"\b(?:date|timestamp(?:_ntz|_ltz)?|cast|try_cast|to_date|to_timestamp(?:_ntz|_ltz)?)\s*\(?\s*"
    r"(['\"])\s*(now|today|tomorrow|yesterday)\b[^'\"]*\1",
    re.IGNORECASE,
)
_TEXT = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|`(?:[^`]|``)*`")


def nondeterministic_parts(text: str, types: Mapping[str, str | None]) -> list[str]:
    """Return these in words, each once, of an expression over columns of these types: "rand()", "'now' as a time"."""
    named = [match[2].lower() for match in _SPECIAL.finditer(text)]
    special = [f"'{name}' as a time" for name in dict.fromkeys((*named, *relative_datetime_literals(text, types)))]
    if not _NONDETERMINISTIC_NAME.search(text):  # most name none, and are not taken apart for that
        return special
    plain = _TEXT.sub("''", text)
    names = [name for name in called_functions(text) if name in _NONDETERMINISTIC_FUNCTIONS]
    names += [match[1].lower() for match in _BARE.finditer(plain)]
    names += ["unix_timestamp"] if _NO_TIME.search(plain) else []
    return [f"{name}()" for name in names] + special


_HIDDEN = "__"
# Spark answers for these itself: the file of a record, and variables of the session.
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
    """Return the type of an expression over records of these columns, in Spark's simple spelling; None: unproven.

    `columns` None means that they are not known: then only what is certain without them is refused. `aliases` are
    names that stand before it in the same list of expressions, with their types: Spark lets an expression use them.
    Raises PlanningError, with operator and column, for a column that is not there, a field of what has none, a hidden
    column, and for what is no expression.
    """
    expression = parse_expression(text)
    if expression.mistake:
        raise PlanningError(
            f"{operator}: {text!r} is no expression of Spark SQL: {expression.mistake}.", next_step, operator=operator
        )
    if has_star_argument(expression):
        raise PlanningError(
            f"{operator}: {text!r} takes all columns in a function with '*': those that carry a record's own position "
            "and marks would be among them.",
            "Name the columns that it takes.",
            operator=operator,
        )
    return check_parsed_expression(
        operator, expression, columns, types, side=side, next_step=next_step, aliases=aliases
    )


def check_parsed_expression(
    operator: str,
    expression: Expression,
    columns: Sequence[str] | None,
    types: Mapping[str, str | None] | None = None,
    *,
    side: str,
    next_step: str = _CORRECT,
    aliases: Mapping[str, str | None] | None = None,
) -> str | None:
    """Return the type of an expression that is read already; see `checked_expression`."""
    text, known = expression.text, aliases or {}
    for name in expression.columns:
        check_column_reference(operator, expression, name, columns, types or {}, known, side, next_step)
    for excepted in expression.excepted:
        if columns is not None and _find_column(excepted.lower(), excepted, columns) is None:
            raise _missing_column_error(operator, expression, ColumnName((excepted,)), columns or (), side, next_step)
    known_types = types or {}
    if known:  # which stand back behind columns, whatever their case
        there = {name.lower() for name in known_types}
        known_types = {**{name: kind for name, kind in known.items() if name.lower() not in there}, **known_types}
    wrong, operand = _find_operand_problems(expression, referenced_types(expression, known_types))
    if wrong is not None:
        raise PlanningError(
            f"{operator}: {text!r} takes {wrong[0]!r} for true or false, and it is {wrong[1]}.",
            f"Compare it with something: {wrong[0]} is not null.",
            operator=operator,
        )
    if operand is not None:
        raise PlanningError(
            f"{operator}: {text!r} {operand}.",
            f"Cast it to what fits, or write another. {next_step}",
            operator=operator,
        )
    return expression_type(resolve_niladic_name(expression, columns), known_types)


@lru_cache(maxsize=65_536)
def _find_operand_problems(
    expression: Expression, named: tuple[tuple[str, str | None], ...]
) -> tuple[tuple[str, str] | None, str | None]:
    """Return what `no_boolean` and `wrong_operand` say; an operator's expressions are asked about several times."""
    types = dict(named)
    return find_non_boolean_operand(expression, types), find_operand_problem(expression, types)


def check_single_record(operator: str, text: str) -> None:
    """Raise PlanningError for an expression that makes several records of one, or one value of several records."""
    for name, is_over in multi_record_functions(text):
        if name in GENERATOR_FUNCTIONS:
            raise PlanningError(
                f"{operator}: {text!r} makes several records of one with {name}(), and nothing tells these apart.",
                'Use flat_map("an array as its_element"), which numbers them.',
                operator=operator,
            )
        if not is_over:
            raise PlanningError(
                f"{operator}: {text!r} makes one value of several records with {name}(): an operator's expressions are "
                "of one record.",
                "Aggregate in a window, window(…), or the elements of an array with aggregate(…).",
                operator=operator,
            )


def check_condition(
    operator: str, text: str, columns: Sequence[str] | None, types: Mapping[str, str | None] | None = None
) -> None:
    """Raise PlanningError for a condition that `checked_expression` refuses, or that is certainly no boolean."""
    kind = check_expression(operator, text, columns, types, next_step="Correct the condition.")
    check_single_record(operator, text)
    if parse_expression(text).star:
        raise PlanningError(
            f"{operator}: the condition {text!r} is all columns: expected boolean.",
            "Compare one of them with something.",
            operator=operator,
        )
    windows = [name for name, _ in multi_record_functions(text)]
    if windows:
        raise PlanningError(
            f"{operator}: the condition {text!r} takes {windows[0]}() over other records: Spark has no such condition.",
            "Give it as a column, with_columns(…), and keep records by that.",
            operator=operator,
        )
    if kind not in (None, "boolean", "void"):
        raise PlanningError(
            f"{operator}: the condition {text!r} is {kind}: expected boolean.",
            f"Compare it with something: {text} is not null.",
            operator=operator,
        )


def resolve_niladic_name(expression: Expression, columns: Iterable[str] | None) -> Expression:
    """Return the expression where "current_date" is a column only if one of the columns has the name."""
    if expression.column is None or expression.column.lower() not in NILADIC:
        return expression
    if columns is not None and expression.column.lower() in {column.lower() for column in columns}:
        return expression
    return replace(expression, name=expression.alias, column=None, columns=())


def check_column_reference(
    operator: str,
    expression: Expression,
    name: ColumnName,
    columns: Sequence[str] | None,
    types: Mapping[str, str | None],
    aliases: Mapping[str, str | None],
    side: str,
    next_step: str,
) -> None:
    """Raise PlanningError where a name in an expression is neither a column nor one of the aliases; see
    `checked_expression`."""
    lower = name.name.lower()
    if lower.startswith(_HIDDEN):
        raise PlanningError(
            f"{operator}: {expression.text!r} names {name.name!r}: columns that begin with '__' carry a record's own "
            "position and marks.",
            "Use columns of your own, such as a time that the record brings.",
            operator=operator,
            column=name.name,
        )
    if columns is None or lower in _SPARK_NAMES or any(lower == alias.lower() for alias in aliases):
        return
    column = _find_column(lower, name.name, columns)
    if column is None:
        if lower in NILADIC and len(name.parts) == 1:
            return
        raise _missing_column_error(operator, expression, name, columns, side, next_step)
    if len(name.parts) > 1 and _has_no_fields(types.get(column)):
        raise PlanningError(
            f"{operator}: {expression.text!r} takes {str(name)!r} of {side}{expression.place(name)}, and {column!r} is "
            f"{types[column]}: it has no fields.",
            f"Write {column!r}, or a name that has a dot in it within backticks: `{name}`.",
            operator=operator,
            column=column,
        )


def _find_column(lower: str, name: str, columns: Sequence[str]) -> str | None:
    """Return the column of a name, whatever its case; as it stands it is found fast, among thousands."""
    return name if name in columns else next((column for column in columns if column.lower() == lower), None)


def _missing_column_error(
    operator: str, expression: Expression, name: ColumnName, columns: Sequence[str], side: str, next_step: str
) -> PlanningError:
    where = "" if expression.column is not None else f" ({expression.text!r}{expression.place(name)})"
    return PlanningError(
        f"{operator}: {side} has no column {name.name!r}{where}; its columns there are {', '.join(columns)}.",
        did_you_mean(name.name, columns) + next_step,
        operator=operator,
        column=name.name,
    )


def _has_no_fields(kind: str | None) -> bool:
    if kind is not None and kind.startswith("array<"):  # of structs it has, of each of them
        return _has_no_fields(kind[6:-1])
    return kind is not None and (kind in TYPES or kind.startswith("decimal("))


def check_select(
    operator: str, text: str, table: str, types: Mapping[str, str | None], *, side: str, next_step: str
) -> None:
    """Raise PlanningError for a SELECT that names what is no column of `table`, or asks of one what Spark is certain to
    refuse; `types` are those of the table's columns.

    Of a SELECT that joins others only names with the table's own before them, `v.city`, are judged.
    """
    select = parse_select(text, table)
    if select is None or _names_hidden(select.expressions):
        return
    if select.mistake:
        raise PlanningError(f"{operator}: {text!r} can't be asked: {select.mistake}.", next_step, operator=operator)
    columns = tuple(types)
    for name in select.qualified:
        check_column_reference(
            operator, Expression(text, unread="more than one table"), name, columns, types, {}, side, next_step
        )
    before: dict[str, str | None] = {}
    for item in select.items:
        kind = check_parsed_expression(operator, item, columns, types, side=side, next_step=next_step, aliases=before)
        if item.alias is not None:
            before[item.alias] = kind
    if select.where is not None:
        kind = check_parsed_expression(operator, select.where, columns, types, side=side, next_step=next_step)
        if kind not in (None, "boolean", "void"):
            raise PlanningError(
                f"{operator}: what {text!r} has after where is {kind}: expected a condition.",
                next_step,
                operator=operator,
            )
    known = {**types, **_of_either(select, types)}
    for expression in select.behind:
        check_parsed_expression(
            operator, expression, columns, known, side=side, next_step=next_step, aliases=dict.fromkeys(before)
        )


def needs_spark_analysis(text: str, table: str) -> bool:
    """Whether something in a SELECT can't be judged here, even where all columns of `table` are known."""
    select = parse_select(text, table)
    if select is None or not select.expressions or select.groups or _names_hidden(select.expressions):
        return True
    return any(expression.unread for expression in select.expressions)


def _of_either(select: SelectParts, types: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the columns that an item has the name of, without a type: behind the items, a name may be either's, and
    which of them differs from clause to clause."""
    given = {item.alias.lower() for item in select.items if item.alias is not None}
    return dict.fromkeys(name for name in types if name.lower() in given)


def _names_hidden(expressions: tuple[Expression, ...]) -> bool:
    return any(name.name.startswith("__") for expression in expressions for name in expression.columns)


@dataclass(frozen=True, slots=True)
class TypedExpression:
    """One of the expressions, with its type where it is certain."""

    expression: Expression
    type: str | None

    def expand_star(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Return which of these columns "*" stands for, or "* except (…)"."""
        gone = {name.lower() for name in self.expression.excepted}
        return tuple(name for name in columns if name.lower() not in gone) if gone else tuple(columns)


def check_expressions(
    operator: str,
    texts: Sequence[str],
    columns: Sequence[str] | None,
    types: Mapping[str, str | None] | None = None,
) -> tuple[TypedExpression, ...]:
    """Return what a list of expressions makes of records with these columns; see `checked_expression`.

    Spark lets an expression use the names that stand before it in the list, where no column has them.
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
