"""A SELECT of the rows of one table, held against the table's columns; see `checking.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.sql.checking import check_name, checked
from dagster_adjunct.resources.sql.expression import Expression
from dagster_adjunct.resources.sql.parsing import selected

if TYPE_CHECKING:
    from dagster_adjunct.resources.sql.selects import SelectParts


def check_select(
    operator: str, text: str, table: str, types: Mapping[str, str | None], *, side: str, next_step: str
) -> None:
    """Raise PlanningError for a SELECT that names what is no column of `table`, or asks of one what Spark is certain to
    refuse; `types` are those of the table's columns.

    Of a SELECT that joins others only names with the table's own before them, `v.city`, are judged.
    """
    select = selected(text, table)
    if select is None or _names_hidden(select.expressions):
        return
    if select.mistake:
        raise PlanningError(f"{operator}: {text!r} can't be asked: {select.mistake}.", next_step, operator=operator)
    columns = tuple(types)
    for name in select.qualified:
        check_name(operator, Expression(text, unread="more than one table"), name, columns, types, {}, side, next_step)
    before: dict[str, str | None] = {}
    for item in select.items:
        kind = checked(operator, item, columns, types, side=side, next_step=next_step, aliases=before)
        if item.alias is not None:
            before[item.alias] = kind
    if select.where is not None:
        kind = checked(operator, select.where, columns, types, side=side, next_step=next_step)
        if kind not in (None, "boolean", "void"):
            raise PlanningError(
                f"{operator}: what {text!r} has after where is {kind}: expected a condition.",
                next_step,
                operator=operator,
            )
    known = {**types, **_of_either(select, types)}
    for expression in select.behind:
        checked(operator, expression, columns, known, side=side, next_step=next_step, aliases=dict.fromkeys(before))


def leaves_to_spark(text: str, table: str) -> bool:
    """Whether something in a SELECT can't be judged here, even where all columns of `table` are known."""
    select = selected(text, table)
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
