"""The hidden columns with a record's position, which every operator passes on, and checks of column names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.arguments import first_duplicate
from dagster_adjunct.resources.errors import PlanningError, SchemaMismatchError
from dagster_adjunct.resources.schemas.column_sql import F
from dagster_adjunct.resources.schemas.schema import Field, Schema, check_key_types
from dagster_adjunct.resources.sql.parser import parse_expression
from dagster_adjunct.resources.sql.syntax_checks import did_you_mean
from dagster_adjunct.resources.streams.system import POSITION, RECORD_META

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_ALIAS = re.compile(
    r"(?P<what>.*?[^\s])\s*(?:(?<=[\s)\]'\"`])as\s+)?(?:`(?:[^`]|``)+`|\w+)\s*", re.IGNORECASE | re.DOTALL
)


def plain_column(expression: str) -> str | None:
    """Return the column name if the expression is only that, else None."""
    read = parse_expression(expression)
    return read.column if read.alias is None else None


def split_alias(expression: str) -> tuple[str, str | None]:
    """Split "upper(model) as model" into expression and name; without a name, that is None."""
    alias = parse_expression(expression).alias
    match = None if alias is None else _ALIAS.fullmatch(expression.strip())
    return (expression.strip(), None) if match is None else (match["what"].strip(), alias)


TASK = "__task"
"""The number of the task that a copy of a broadcast record is for."""
BRANCH = "__branch"
"""The input of a multi-input operator that the record came from: "1", or "1/0" for nested ones."""
ORDINAL = "__ordinal"
"""The record's number among those made of one record: "0000000002", or "0000000002/0000000000" for nested ones."""
ORIGIN = "__origin"
"""The stream of the record's position, where an operator has combined several streams."""
EVENT_TIME = "__event_time"
"""The record's event time, as its input stream declares it; null where the record has none."""
BEHIND = "__behind"
"""The watermark of the record's source partition when it arrived, if its time is below that; else null."""
REPLAYED = "__again"
"""Whether the application has read the record before, because a startpoint went back. State ignores it."""
BATCH_ONLY = (ORIGIN, EVENT_TIME, BEHIND, REPLAYED)
"""Columns that are known within the batch only, and not written to streams."""
_DIGITS = 10
_OPTIONAL = (*POSITION, TASK, BRANCH, ORDINAL, ORIGIN, EVENT_TIME, BEHIND, REPLAYED)


def list_hidden_columns(frame: DataFrame) -> list[str]:
    """Return the hidden columns of records, which an operator must pass on."""
    return [*RECORD_META, *(name for name in _OPTIONAL if name in frame.columns)]


def tie_breakers(frame: DataFrame) -> tuple[str, ...]:
    """Return the columns that order records of one position, so that a repeated batch sends the same bytes."""
    return tuple(name for name in (TASK, BRANCH, ORDINAL) if name in frame.columns)


def ordinal_column(frame: DataFrame, number: Column) -> Column:
    """Return the ordinals of records made of those of `frame`; `number` counts them per source record, from 0.

    They sort as text: by the source record's ordinal, then by number.
    """
    digits = F.lpad(number.cast("string"), _DIGITS, "0")
    return F.concat_ws("/", F.col(ORDINAL), digits) if ORDINAL in frame.columns else digits


def ordinal_text(before: str | None, number: int) -> str:
    """Return the value of `ordinal_column` for one record, given its source record's ordinal."""
    digits = f"{number:0{_DIGITS}d}"
    return digits if before is None else f"{before}/{digits}"


def check_state_columns(
    operator: str, types: Mapping[str, str | None], names: Iterable[str], key: Sequence[str]
) -> None:
    """Raise PlanningError for columns that state can't store, and for a key that can't be compared exactly."""
    known = {name: types[name] for name in dict.fromkeys((*key, *names)) if types.get(name) is not None}
    what = f"{operator} can't store these records as state"
    for name, kind in known.items():
        try:
            schema = _one_column(name, str(kind), what)
            check_key_types(schema, [name] if name in key else [], what)
        except SchemaMismatchError as error:
            raise PlanningError(error.problem, error.next_step, operator=operator, column=name) from error


def _one_column(name: str, kind: str, what: str) -> Schema:
    try:
        return Schema((Field(name, kind),))
    except SchemaMismatchError as error:
        raise error.reworded(f"{what}: {error.problem}", error.next_step) from error


Columns = tuple[str, ...] | None
"""Names in order; None where they are unknown."""
Types = dict[str, str | None] | None
"""Types by name; None for an unknown type, or for unknown columns."""
FINAL = "final"
"""The column that tells whether an updated result is the last of its window."""


def require_columns(operator: str, side: str, needed: tuple[str, ...], columns: Columns, next_step: str) -> None:
    """Raise PlanningError if `columns` are known and lack one of `needed`."""
    missing = [name for name in needed if columns is not None and name not in columns]
    if missing:
        raise PlanningError(
            f"{operator}: {side} has no column {missing[0]!r}; its columns there are {', '.join(columns or ())}.",
            did_you_mean(missing[0], columns or ()) + next_step,
            operator=operator,
            column=missing[0],
        )


def check_new_names(operator: str, names: list[str], next_step: str) -> None:
    """Raise PlanningError for duplicate names, and for names reserved for hidden columns."""
    hidden = next((name for name in names if name.startswith("__")), None)
    if hidden is not None:
        raise PlanningError(
            f"{operator}: a column would be called {hidden!r}: names that begin with '__' are reserved for a "
            "record's position.",
            "Choose another name.",
            operator=operator,
            column=hidden,
        )
    double = first_duplicate(names)
    if double is not None:
        raise PlanningError(
            f"{operator}: two columns would be called {double!r}.", next_step, operator=operator, column=double
        )


def types_by_name(schema: Schema) -> dict[str, str | None]:
    """Return the types of a schema's columns by name."""
    return {field.name: field.type for field in schema.fields}
