"""Refuses joins whose keys have different types: equal values of different types lie in different partitions. Says of
other columns that somebody declares where their types are unproven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.expression_types import differ

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.planning_values import ComparedColumn

_MOST = 10


def check_key_types(operator: str, compared: Iterable[ComparedColumn], *, strict: bool) -> list[str]:
    """Raise PlanningError for the first column that is compared with one of another type; return what is unproven.

    A strict application is refused for that, too.
    """
    unproven = []
    for pair in compared:
        if pair.type is None or pair.other_type is None:
            unproven.append(_unproven(operator, pair))
        elif differ(pair.type, pair.other_type):
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


def check_declared_types(
    operator: str, declared: Sequence[ComparedColumn], *, columns_known: bool, strict: bool
) -> list[str]:
    """Return what is unproven of columns whose types others declare, in words; a strict application is refused for it.

    Where not even the columns are known, that is noted already, where it begins.
    """
    unknown = [pair for pair in declared if pair.type is None]
    if not unknown or not (strict or columns_known):
        return []
    shown = shortened([f"{pair.column!r} (to be {pair.other_type})" for pair in unknown])
    what = "the type of {} is" if len(unknown) == 1 else "the types of {} are"
    problem = (
        f"{operator}: {what.format(f'{shown}, as {unknown[0].other} declares,')} not known before it runs, and "
        "unproven."
    )
    if not strict:
        return [problem]
    column = unknown[0].column
    raise PlanningError(
        f"{problem} The application is strict.",
        f'Have the type known: .with_columns({column}="cast({column} as {unknown[0].other_type})"), or a function with '
        "schema=. Or leave strict out.",
        operator=operator,
        column=column,
    )


def shortened(names: Sequence[str]) -> str:
    """Return names in a row, the first of many."""
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return f"{', '.join(names[:_MOST])}{more}"


def _unproven(operator: str, pair: ComparedColumn) -> str:
    if pair.type is None and pair.other_type is None:
        what = f"the types of the stream's {pair.column!r} and of {pair.other} are"
    elif pair.type is None:
        what = f"the type of the stream's {pair.column!r}, to be {pair.other_type} as {pair.other} is, is"
    else:
        what = f"the type of {pair.other}, to be {pair.type} as the stream's {pair.column!r} is, is"
    return f"{operator}: {what} not known before it runs, and unproven."
