"""What of columns planning leaves to Spark, in a note: where their names end to be known, what could not be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.extractors.extractor import Projection
from dagster_adjunct.assets.validation.named_columns import left_to_spark, rules_in_sql
from dagster_adjunct.orchestration.planner.known_records.dataset_columns import records_of
from dagster_adjunct.resources.sql.nearest_names import nearest
from dagster_adjunct.resources.sql.parsing import functions_of_others, parsed
from dagster_adjunct.resources.sql.spark_functions import KNOWN

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog
    from dagster_adjunct.orchestration.planner.known_records.record_flows import Flows

_MOST = 10
_LENGTH = 60


def unproven_columns(app: Application, flows: Flows) -> tuple[str, ...]:
    """Return the note, () where everything is proven. What only follows from what it names is not in it."""
    unproven: list[str] = []
    for operator in app.operators:
        unproven += _unread(operator.id, operator.spec.sql)
        known_before = all(flows.after[source].columns is not None for source in operator.inputs)
        if flows.after[operator.id].columns is None and known_before:
            nameless = [text for text in operator.spec.sql if _gives_unknown(text)]
            why = f"{_short(nameless[0])} has no name that can be read off" if nameless else operator.spec.summary()
            unproven.append(f"the columns after {operator.id} ({why})")
    return _note("Unproven, asked of Spark over no records before a batch begins", unproven)


def unproven_of_datasets(app: Application, catalog: Catalog) -> tuple[str, ...]:
    """Return the note on what datasets say in SQL that is not read here, () where everything is."""
    unproven: list[str] = []
    for dataset in app.datasets:
        records = records_of(dataset, catalog)
        rules = list(rules_in_sql(dataset))
        for name, text, is_select in rules:
            where = f"validator {name!r} of dataset {dataset.name!r}"
            if is_select and (records is None or left_to_spark(text)):
                unproven.append(f"{where}: {_short(text)} (a SELECT is left to Spark)")
            else:
                unproven += _unread(where, [text], is_select=is_select)
        projection = dataset.extractor
        if isinstance(projection, Projection):
            texts = [*dict(projection.select).values(), projection.where or ""]
            unproven += _unread(f"the projection of dataset {dataset.name!r}", list(filter(None, texts)))
        if records is None and (rules or isinstance(projection, Projection)):
            unproven.append(f"the columns of dataset {dataset.name!r} ({dataset.input} declares none)")
    return _note("Unproven, asked of Spark when the dataset is advanced", unproven)


def _unread(where: str, texts: Sequence[str], *, is_select: bool = False) -> list[str]:
    """Return what can't be read of these expressions, and which functions in them are none of Spark's."""
    unread = [
        f"{where}: {_short(text)} ({parsed(text).unread})" for text in texts if parsed(text).unread and not is_select
    ]
    for name in dict.fromkeys(name for text in texts for name in functions_of_others(text)):
        like = nearest(name, KNOWN, 1)
        unread.append(f"{where}: {name}() is none of Spark's functions" + (f" ({like[0]}?)" if like else ""))
    return unread


def _note(what: str, unproven: Sequence[str]) -> tuple[str, ...]:
    """Return a note of what is unproven, () of nothing; of many things the first are named, and the others counted."""
    more = f"; and {len(unproven) - _MOST} more" if len(unproven) > _MOST else ""
    return (f"{what}: {'; '.join(unproven[:_MOST])}{more}.",) if unproven else ()


def _gives_unknown(text: str) -> bool:
    read = parsed(text)
    return not read.star and read.name is None


def _short(text: str) -> str:
    one_line = " ".join(text.split())
    return repr(one_line if len(one_line) <= _LENGTH else f"{one_line[:_LENGTH]}…")
