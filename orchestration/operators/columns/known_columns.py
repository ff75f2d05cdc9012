"""Columns of records between operators, as far as they can be known before anything runs: their names, their types."""

from __future__ import annotations

from dagster_adjunct.orchestration.operators.arguments import first_double
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.nearest_names import did_you_mean

Columns = tuple[str, ...] | None
"""Names in order; None where they are not known."""
Types = dict[str, str | None] | None
"""Types by name; None for one that is not known, or where the columns are not."""
FINAL = "final"
"""The column of results that may be updated: whether one is the last of its window."""


def require(operator: str, side: str, needed: tuple[str, ...], columns: Columns, next_step: str) -> None:
    """Raise PlanningError when `columns` are known and lack one of the needed."""
    missing = [name for name in needed if columns is not None and name not in columns]
    if missing:
        raise PlanningError(
            f"{operator}: {side} has no column {missing[0]!r}; its columns there are {', '.join(columns or ())}.",
            did_you_mean(missing[0], columns or ()) + next_step,
            operator=operator,
            column=missing[0],
        )


def check_names(operator: str, names: list[str], next_step: str) -> None:
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
    double = first_double(names)
    if double is not None:
        raise PlanningError(
            f"{operator}: two columns would be called {double!r}.", next_step, operator=operator, column=double
        )


def types_of(schema: Schema) -> dict[str, str | None]:
    """Return the types of a schema's columns by name."""
    return {field.name: field.type for field in schema.fields}
