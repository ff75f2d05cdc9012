"""The hidden columns of records, which every operator passes on, and checks of operators'
arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError, SchemaMismatchError
from dagster_adjunct.resources.lazy_modules import F
from dagster_adjunct.resources.schemas.paths import split_path
from dagster_adjunct.resources.schemas.schema import COPY, Field, Schema, check_key_types
from dagster_adjunct.resources.sql.expression import parse_expression
from dagster_adjunct.resources.streams.system import POSITION, RECORD_META
from dagster_adjunct.resources.times import describe_span, write_span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# An expression and the name after it, with or without "as"; the name may be in backticks.
_ALIAS = re.compile(
    r"(?P<expression>.*?[^\s])\s*(?:(?<=[\s)\]'\"`])as\s+)?(?:`(?:[^`]|``)+`|\w+)\s*",
    re.IGNORECASE | re.DOTALL,
)


def plain_column(expression: str) -> str | None:
    """Return the name if the expression is only the name of a column, else None."""
    parsed = parse_expression(expression)
    if parsed.alias is not None:
        return None
    return parsed.column


def plain_path(expression: str) -> tuple[str, ...]:
    """Return the steps if the expression is only a column or the path of a value in one, else
    ().
    """
    steps = split_path(expression)
    columns = parse_expression(expression).columns
    if [column.parts for column in columns] != [steps]:
        return ()
    return steps


class AliasedExpression(NamedTuple):
    """An expression, and the name that the user gave it, None for none."""

    expression: str
    alias: str | None


def split_alias(text: str) -> AliasedExpression:
    """Split "upper(model) as model" into the expression and the name; the text without a name is
    the expression.
    """
    alias = parse_expression(text).alias
    match = _ALIAS.fullmatch(text.strip())
    if alias is None or match is None:
        return AliasedExpression(text.strip(), None)
    return AliasedExpression(match["expression"].strip(), alias)


TASK = "__task"
"""The number of the task that this copy of a broadcast record is for."""
BRANCH = "__branch"
"""The number (from 0) of the merge's input that the record came from: "1"; "1/0" after two
merges, the later first.
"""
ORDINAL = "__ordinal"
"""The record's number, from 0, among all made of one record: "0000000002";
"0000000002/0000000000" after two steps.
"""
ORIGIN = "__origin"
"""The stream to which the record's partition and offset refer, after an operator has combined
several streams.
"""
EVENT_TIME = "__event_time"
"""The record's event time, as its input stream declares it; null where the record has none."""
BEHIND = "__behind"
"""The watermark of the source partition when the record arrived, if the record's event time is
below it; else null.
"""
REPLAYED = "__again"
"""Whether the application has read the record before, because a startpoint went back. Operators
with state skip it.
"""
_BATCH_ONLY = (ORIGIN, EVENT_TIME, BEHIND, REPLAYED)  # streams do not store these
_DIGITS = 10  # of a number in an ordinal
# The hidden columns that only some records have.
_OPTIONAL = (*POSITION, TASK, BRANCH, ORDINAL, ORIGIN, EVENT_TIME, BEHIND, REPLAYED)


def is_own(name: str) -> bool:
    """Whether a column of this name is one of the user's, not a hidden one."""
    return not name.startswith("__")


def list_hidden_columns(names: Collection[str]) -> list[str]:
    """Return the hidden columns among these names, which an operator must pass on: all of
    RECORD_META, and the optional ones that are there.
    """
    return [*RECORD_META, *keep_present(_OPTIONAL, names)]


def list_copies(names: Collection[str]) -> list[str]:
    """Return the columns among these names that copy a value inside another column
    (`copy_name`).
    """
    return [name for name in names if name.startswith(COPY)]


def list_batch_columns(names: Collection[str]) -> list[str]:
    """Return the columns among these names that exist only within a batch, and so are not written
    to streams.
    """
    return [*keep_present(_BATCH_ONLY, names), *list_copies(names)]


def tie_breakers(names: Collection[str]) -> tuple[str, ...]:
    """Return the columns among these names that order records with the same position.

    Records must have one order, so that a repeated batch sends the same bytes.
    """
    return keep_present((TASK, BRANCH, ORDINAL), names)


def ordinal_column(frame: DataFrame, number: Column) -> Column:
    """Return the ORDINAL of records that are made of other records; `number` counts those of one
    record, from 0.

    `frame` has one row per new record, with the columns of the record that it is made of. As texts,
    ordinals sort by that record's own ordinal, then by number.
    """
    digits = F.lpad(number.cast("string"), _DIGITS, "0")
    if ORDINAL in frame.columns:
        return F.concat_ws("/", F.col(ORDINAL), digits)
    return digits


def ordinal_text(before: str | None, number: int) -> str:
    """Return the value of `ordinal_column` for one record; `before` is the ordinal of the record
    that it is made of.
    """
    digits = f"{number:0{_DIGITS}d}"
    if before is None:
        return digits
    return f"{before}/{digits}"


RECORD = "record$"
AT = "at$"
STORED_BEHIND = "behind$"
EXPIRES = "expires$"
"""Of a stored row: a unique text of its record, which sorts by position; the record's EVENT_TIME
and BEHIND; and the watermark from which the row is no longer needed."""
STATE_COLUMNS = {RECORD: "string", **dict.fromkeys((AT, STORED_BEHIND, EXPIRES), "timestamp")}
"""The columns that state adds to records, with their types."""


def check_state_names(operator: str, names: Iterable[str], more: Iterable[str] = ()) -> None:
    """Raise PlanningError for a column that has the name of one of STATE_COLUMNS, or of `more`
    columns that an operator's state adds.
    """
    clash = find_taken(names, (*STATE_COLUMNS, *more))
    if clash is not None:
        problem = f"{operator} takes the column {clash!r}, and its state has a column of that name."
        step = (
            f'Rename the column before: .select("… as {clash.replace("$", "")}_of_record"), for'
            " example; or name the columns that a function takes in of=."
        )
        raise PlanningError(problem, step, operator=operator, column=clash)


def check_state_columns(
    operator: str, type_of: Callable[[str], str | None], names: Iterable[str], key: Sequence[str]
) -> None:
    """Raise PlanningError for columns `names` that a state table can't store, and for a column of
    the `key` whose values can't be compared exactly. Columns of unknown type are not checked.
    """
    columns = dict.fromkeys((*key, *names))
    check_state_names(operator, columns)
    what = f"{operator} can't store these records as state"
    for name in columns:
        kind = type_of(name)
        if kind is None:
            continue
        key_columns = [name] if name in key else []
        try:
            check_key_types(Schema((Field(name, kind),)), key_columns, what)
        except SchemaMismatchError as error:
            raise PlanningError(
                error.problem, error.next_step, operator=operator, column=name
            ) from error


Names = tuple[str, ...] | None
"""Names of columns in order; None where they are unknown."""
Types = dict[str, str | None] | None
"""The type of each column, None where it is unknown; None instead of the dictionary if the
columns are unknown.
"""
FINAL = "final"
"""The column that says whether a result is the last one of its window, where each change of a
window is emitted.
"""


def check_new_names(operator: str, names: Sequence[str], next_step: str) -> None:
    """Raise PlanningError for duplicate names, and for names reserved for hidden columns."""
    for name in names:
        if not is_own(name):
            problem = (
                f"{operator}: a column would be called {name!r}: names that begin with '__' are"
                " reserved."
            )
            raise PlanningError(problem, "Choose another name.", operator=operator, column=name)
    double = first_duplicate(names)
    if double is not None:
        problem = f"{operator}: two columns would be called {double!r}."
        raise PlanningError(problem, next_step, operator=operator, column=double)


def is_sure_name(name: str, columns: Collection[str]) -> bool:
    """Whether Spark finds the same `columns` by a name as Python, which compares names in lower
    case.

    Spark ignores case as Java does, for which also some letters with different lower cases are
    equal.
    """
    found_by_python = [column for column in columns if column.lower() == name.lower()]
    found_by_spark = [column for column in columns if _fold_as_java(column) == _fold_as_java(name)]
    return found_by_python == found_by_spark


def _fold_as_java(name: str) -> str:
    """Return a text that is equal for names that Java takes for equal but for their case."""
    return "".join(letter.upper().lower()[0] for letter in name)


DataFrameFunction: TypeAlias = Callable[["DataFrame"], "DataFrame"]
OnNullKey = Literal["fail", "skip"]
MAX_DURATION = timedelta(days=36_525)  # 100 years
"""A longer duration is taken for a mistake: with it, times would leave the range that Spark
supports.
"""


def validate_column_names(what: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return column names, given as one string or several; () for None.

    Raises ConfigurationError for duplicate, empty and reserved names.
    """
    if isinstance(value, str):
        names: tuple[str, ...] = (value,)
    else:
        names = tuple(value or ())
    for name in names:
        is_valid = isinstance(name, str) and bool(name.strip()) and is_own(name)
        if not is_valid:
            problem = (
                f"{what} names the column {name!r}: expected a non-empty name that does not begin"
                " with '__'."
            )
            step = "Name a column of the records; names with '__' are reserved."
            raise ConfigurationError(problem, step, column=name)
    double = first_duplicate(names)
    if double:
        problem = f"{what} names column {double!r} twice."
        raise ConfigurationError(problem, "Name it once.", column=double)
    return names


def validate_partition_by(
    what: str, partition_by: str | Sequence[str] | None, key: tuple[str, ...], argument: str
) -> tuple[str, ...]:
    """Return the columns to partition by; by default all of the `key`, which the user gave as
    `argument`.

    Raises ConfigurationError for a column that is not in the key.
    """
    if partition_by is None:
        return key
    columns = validate_column_names(f"{what}: partition_by=", partition_by)
    if columns and set(columns) <= set(key):
        return columns
    found = f"{what} has partition_by={partition_by!r}"
    expected = (
        f"columns in {argument}= ({', '.join(key)}), so that all records of a key are in one"
        " partition"
    )
    raise argument_error(found, expected, argument="partition_by")


def check_duration(
    value: timedelta,
    found: str,
    *,
    argument: str,
    zero: bool = False,
    limited: bool = False,
    **about: Any,
) -> None:
    """Raise ConfigurationError unless `value` is above 0 (with `zero`, at least 0) and, if
    `limited`, at most MAX_DURATION.

    `found` says in the error where the user gave it: "input stream 'lake.flights' has delay".
    `about` are further fields of the error.
    """
    if zero:
        least = timedelta(0)
        expected = "a timedelta of 0 or more"
    else:
        least = timedelta(microseconds=1)
        expected = "a timedelta above 0"
    is_too_long = limited and value > MAX_DURATION
    if least <= value and not is_too_long:
        return
    if limited:
        expected += f" and at most {write_span(MAX_DURATION)}"
    expected += ", such as timedelta(minutes=5)"
    raise argument_error(f"{found}={describe_span(value)}", expected, argument=argument, **about)


def first_duplicate(names: Sequence[str]) -> str | None:
    """Return the first name that was given before, ignoring case as Spark does, or None."""
    seen = set()
    for name in names:
        if name.lower() in seen:
            return name
        seen.add(name.lower())
    return None


def find_taken(names: Iterable[str], others: Iterable[str]) -> str | None:
    """Return the first of these names that is one of the others, ignoring case, or None."""
    taken = set(map(str.lower, others))
    for name in names:
        if name.lower() in taken:
            return name
    return None


def function_label(function: Callable[..., object]) -> str:
    """Return the label of a function in plans: "plus_one()"."""
    return f"{getattr(function, '__name__', type(function).__name__)}()"


def keep_present(wanted: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Return the wanted columns that are among `names`, in the order in which they are wanted."""
    return tuple(name for name in wanted if name in names)
