"""Refuses joins whose keys have different types: equal values of different types lie in different partitions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.planning_values import ComparedColumn


def check_key_types(operator: str, compared: Iterable[ComparedColumn], *, strict: bool) -> list[str]:
    """Raise PlanningError for the first column that is compared with one of another type; return what is unproven.

    A strict application is refused for that, too.
    """
    unproven = []
    for pair in compared:
        if pair.type is None or pair.other_type is None:
            unproven.append(_unproven(operator, pair))
        elif pair.type != pair.other_type:
            raise PlanningError(
                f"{operator}: the stream's {pair.column!r} is {pair.type} and {pair.other} is {pair.other_type}; equal "
                "values of different types lie in different buckets.",
                f'Cast it first: .map("*", "cast({pair.column} as {pair.other_type}) as {pair.column}_key").',
                operator=operator,
                column=pair.column,
            )
    if unproven and strict:
        raise PlanningError(
            f"{unproven[0]} The application is strict.",
            "Have the type known: give the streams columns with types, and cast columns with map() after a function. "
            "Or leave strict out.",
            operator=operator,
        )
    return unproven


def _unproven(operator: str, pair: ComparedColumn) -> str:
    if pair.type is None and pair.other_type is None:
        what = f"the types of the stream's {pair.column!r} and of {pair.other} are"
    elif pair.type is None:
        what = f"the type of the stream's {pair.column!r}, to be {pair.other_type} as {pair.other} is, is"
    else:
        what = f"the type of {pair.other}, to be {pair.type} as the stream's {pair.column!r} is, is"
    return f"{operator}: {what} not known before it runs, and unproven."
