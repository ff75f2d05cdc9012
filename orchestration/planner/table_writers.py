"""Under which names an application marks what it has written to remote tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application


def writers_of(app: Application, writer: str) -> dict[str, str]:
    """Return who writes at each send to a remote table, for its marks: `writer`, and which send it is, unless it is
    the first without a name. A send is called by its `marks_as`, or else by its number among those without.

    Marks are of the store: sends to two tables over one store's table are told apart like sends to one table.
    PlanningError where two have one name, or the table keeps no marks that could be named.
    """
    names: dict[str, str] = {}
    unnamed: Counter[str] = Counter()
    taken: dict[tuple[str, str], str] = {}
    for operator in app.operators:
        send = operator.spec.sends
        if send is None:
            continue
        store = store_of(app, send.table)
        if send.marks_as is None:
            unnamed[store] += 1
        elif not keeps_marks(app.tables[send.table]):
            raise PlanningError(
                f"{operator.id}: its marks are named {send.marks_as!r}, and table {send.table} keeps none: it is "
                "declared without idempotent and newest_by.",
                "Leave marks_as out, or declare the table with idempotent=True or newest_by.",
                operator=operator.id,
            )
        number = unnamed[store]
        name = writer if send.marks_as is None and number == 1 else f"{writer}#{send.marks_as or number}"
        names[operator.id] = name
        other = taken.setdefault((store, name), operator.id)
        if other != operator.id:
            raise PlanningError(
                f"{operator.id}: table {send.table} would keep its marks as {name!r}, as it does those of {other}: "
                "each would skip what the other has had.",
                'Give one of them another name: marks_as="…".',
                operator=operator.id,
            )
    return names


def store_of(app: Application, table: str) -> str:
    """What two tables have in common that lie in one table of a store: how its function is shown."""
    return repr(getattr(app.tables[table], "write_function", None) or table)


def keeps_marks(table: object) -> bool:
    return bool(getattr(table, "idempotent", False)) or getattr(table, "newest_by", None) is not None


def marks_notes(app: Application) -> list[str]:
    """Return a warning for each idempotent table whose marks go by the order of an application's sends."""
    sends: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for operator in app.operators:
        send = operator.spec.sends
        if send is not None and send.marks_as is None and getattr(app.tables[send.table], "idempotent", False):
            store = store_of(app, send.table)
            names.setdefault(store, send.table)
            sends.setdefault(store, []).append(operator.id)
    return [
        f"Table {names[store]} knows {' and '.join(operators)} apart by their order: where one is added or taken away "
        'in front, the others get its marks. Name all but the first: marks_as="…".'
        for store, operators in sends.items()
        if len(operators) > 1
    ]
