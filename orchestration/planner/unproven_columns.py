"""What of columns planning leaves to Spark, in one note: where their names end to be known, what could not be read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.sql.nearest_names import nearest
from dagster_adjunct.resources.sql.parsing import functions_of_others, parsed
from dagster_adjunct.resources.sql.spark_functions import KNOWN

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner.record_flows import Flows

_MOST = 10
_LENGTH = 60


def unproven_columns(app: Application, flows: Flows) -> tuple[str, ...]:
    """Return the note, () where everything is proven. What only follows from what it names is not in it."""
    found: list[str] = []
    for operator in app.operators:
        texts = [text for text in operator.spec.sql if parsed(text).unread]
        found += [f"{operator.id}: {_short(text)} ({parsed(text).unread})" for text in texts]
        for name in dict.fromkeys(name for text in operator.spec.sql for name in functions_of_others(text)):
            like = nearest(name, KNOWN, 1)
            found.append(f"{operator.id}: {name}() is none of Spark's functions" + (f" ({like[0]}?)" if like else ""))
        known_before = all(flows.after[source].columns is not None for source in operator.inputs)
        if flows.after[operator.id].columns is None and known_before:
            nameless = [text for text in operator.spec.sql if _gives_unknown(text)]
            why = f"{_short(nameless[0])} has no name that can be read off" if nameless else operator.spec.summary()
            found.append(f"the columns after {operator.id} ({why})")
    if not found:
        return ()
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return (f"Unproven, asked of Spark over no records before a batch begins: {'; '.join(found[:_MOST])}{more}.",)


def _gives_unknown(text: str) -> bool:
    read = parsed(text)
    return not read.star and read.name is None


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return repr(one_line if len(one_line) <= _LENGTH else f"{one_line[:_LENGTH]}…")
