"""Which types in operators' expressions planning leaves to Spark, in a note: what functions take, what is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.extractors.extractor import Projection
from dagster_adjunct.assets.sources.decode_changes import stored_schema
from dagster_adjunct.assets.validation.named_columns import rules_in_sql, select_types
from dagster_adjunct.orchestration.operators.columns.known_columns import types_of
from dagster_adjunct.orchestration.planner.known_records.dataset_columns import extracted_rows, records_of
from dagster_adjunct.orchestration.planner.known_records.unproven_columns import note_of
from dagster_adjunct.resources.sql.expression_types import type_of
from dagster_adjunct.resources.sql.parsing import functions_of_others, parsed
from dagster_adjunct.resources.sql.unproven_types import unproven_types

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.columns.known_columns import Types
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog


def unproven_operands(app: Application, types: Mapping[str, Types]) -> tuple[str, ...]:
    """Return the note, () where the types of all operands are proven; `types` are those after each operator.

    Where columns are not known at all another note says so (`unproven_columns`), and nothing is said of types.
    """
    unproven: list[str] = []
    told: dict[str, frozenset[str]] = {}
    proven: set[tuple[Sequence[str], int, frozenset[str], type]] = set()  # over records of the same types
    for operator in app.operators:
        before = [told[source] for source in operator.inputs]
        columns = before[0] if len(before) == 1 else frozenset[str]().union(*before)
        arriving = types.get((operator.inputs or (operator.id,))[0])
        sql = tuple(operator.spec.sql)
        alike = (sql, id(arriving), columns, type(operator.spec))
        if arriving is not None and sql and alike not in proven:
            words, columns = _of_operator(operator, arriving, types.get(operator.id), columns)
            unproven += words
            if not words and columns == alike[2]:
                proven.add(alike)
        told[operator.id] = columns
    return note_of("Unproven types, asked of Spark over no records before a batch begins", unproven)


def _of_operator(
    operator: Operator, arriving: dict[str, str | None], leaving: Types, told: frozenset[str]
) -> tuple[list[str], frozenset[str]]:
    """Return what is unproven of an operator's expressions, and the columns behind it of which it is told by then."""
    unproven: list[str] = []
    known, named_unknown = arriving, 0
    for text in operator.spec.sql:
        judged = unproven_types(text, known, told, condition=text in operator.spec.conditions)
        unproven += [f"{operator.id}: {words}" for words in judged.words]
        told |= judged.columns
        expression = parsed(text)
        if expression.alias is not None and expression.alias not in known:
            known = {**known, expression.alias: type_of(expression, known)}
        renamed = expression.name != expression.column and (expression.column or "").lower() in told
        if judged.words or expression.unread or renamed or functions_of_others(text):
            named_unknown += type_of(expression, known) is None
    if not named_unknown or leaving is None:
        return unproven, told
    made = [name.lower() for name, kind in leaving.items() if kind is None and arriving.get(name, "") is not None]
    return unproven, told.union(made) if len(made) == named_unknown else told


def unproven_operands_of_datasets(app: Application, catalog: Catalog) -> tuple[str, ...]:
    """Return the note on the types in what datasets say in SQL; () where all is proven, or no column is known."""
    unproven: list[str] = []
    for dataset in app.datasets:
        records = records_of(dataset, catalog)
        if records is None:
            continue
        rules, projection = list(rules_in_sql(dataset)), dataset.extractor
        stored = types_of(stored_schema(dataset, records)) if rules else {}
        for name, text, is_select in rules:
            words = select_types(text, stored) if is_select else unproven_types(text, stored).words
            unproven += [f"validator {name!r} of dataset {dataset.name!r}: {what}" for what in words]
        if isinstance(projection, Projection):
            rows = types_of(extracted_rows(dataset, records))
            for text in (*dict(projection.select).values(), projection.where or ""):
                words = unproven_types(text, rows).words
                unproven += [f"the projection of dataset {dataset.name!r}: {what}" for what in words]
    return note_of("Unproven types, asked of Spark when the dataset is advanced", unproven)
