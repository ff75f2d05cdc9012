"""The columns that carry a record's position through every operator, beside the application's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.arguments import first_duplicate
from dagster_adjunct.resources.errors import PlanningError, SchemaMismatchError
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
    """Return the column that an expression is, None when it is anything more than a name."""
    read = parse_expression(expression)
    return read.column if read.alias is None else None


def split_alias(expression: str) -> tuple[str, str | None]:
    """Split "upper(model) as model" into expression and name; the name is None when there is none."""
    alias = parse_expression(expression).alias
    match = None if alias is None else _ALIAS.fullmatch(expression.strip())
    return (expression.strip(), None) if match is None else (match["what"].strip(), alias)


TASK = "__task"
"""The number of the task that a broadcast input's copy of the record is for."""
BRANCH = "__branch"
"""Which input of an operator with several the record came from: "1", or "1/0" where that had several, too."""
ORDINAL = "__ordinal"
"""Which of the records that were made of one it is: "0000000002", or "0000000002/0000000000" of those of that one."""
ORIGIN = "__origin"
"""The stream that the record's position is in, where an operator has brought records of several together."""
EVENT_TIME = "__event_time"
"""When what the record tells of happened, as its input stream is declared; null where the record does not say."""
BEHIND = "__behind"
"""The watermark of the record's source partition when it arrived, where its time is below that; null elsewhere."""
REPLAYED = "__again"
"""Whether the application has read the record before: a startpoint went back. What keeps state leaves it out."""
BATCH_ONLY = (ORIGIN, EVENT_TIME, BEHIND, REPLAYED)
"""What is known of a record in its batch only."""
_DIGITS = 10
_OPTIONAL = (*POSITION, TASK, BRANCH, ORDINAL, ORIGIN, EVENT_TIME, BEHIND, REPLAYED)


def list_hidden_columns(frame: DataFrame) -> list[str]:
    """Return the hidden columns that records have and that an operator has to hand on."""
    return [*RECORD_META, *(name for name in _OPTIONAL if name in frame.columns)]


def tie_breakers(frame: DataFrame) -> tuple[str, ...]:
    """Return the columns that order records of one partition and offset, so that a repeated batch sends the same."""
    return tuple(name for name in (TASK, BRANCH, ORDINAL) if name in frame.columns)


def ordinal_column(frame: DataFrame, number: Column) -> Column:
    """Return the ordinals of records that are made of those of `frame`; `number` counts them within one, from 0.

    They sort as text in the order of the numbers, those of the record that they are made of first.
    """
    from pyspark.sql import functions as F

    digits = F.lpad(number.cast("string"), _DIGITS, "0")
    return F.concat_ws("/", F.col(ORDINAL), digits) if ORDINAL in frame.columns else digits


def ordinal_text(before: str | None, number: int) -> str:
    """Return what `ordinal` gives for one record, of the ordinal of the one that it is made of."""
    digits = f"{number:0{_DIGITS}d}"
    return digits if before is None else f"{before}/{digits}"


def check_state_columns(
    operator: str, types: Mapping[str, str | None], names: Iterable[str], key: Sequence[str]
) -> None:
    """Raise PlanningError for columns that state can't have, and for a key that can't be compared exactly."""
    known = {name: types[name] for name in dict.fromkeys((*key, *names)) if types.get(name) is not None}
    what = f"{operator} keeps records until their time, and can't keep these"
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
"""Names in order; None where they are not known."""
Types = dict[str, str | None] | None
"""Types by name; None for one that is not known, or where the columns are not."""
FINAL = "final"
"""The column of results that may be updated: whether one is the last of its window."""


def require_columns(operator: str, side: str, needed: tuple[str, ...], columns: Columns, next_step: str) -> None:
    """Raise PlanningError when `columns` are known and lack one of the needed."""
    missing = [name for name in needed if columns is not None and name not in columns]
    if missing:
        raise PlanningError(
            f"{operator}: {side} has no column {missing[0]!r}; its columns there are {', '.join(columns or ())}.",
            did_you_mean(missing[0], columns or ()) + next_step,
            operator=operator,
            column=missing[0],
        )


def check_new_names(operator: str, names: list[str], next_step: str) -> None:
    """Raise PlanningError when two of the names are the same, or one is of those that carry a record's position."""
    hidden = next((name for name in names if name.startswith("__")), None)
    if hidden is not None:
        raise PlanningError(
            f"{operator}: a column would be called {hidden!r}: names that begin with '__' are kept for a record's own "
            "position and marks.",
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
