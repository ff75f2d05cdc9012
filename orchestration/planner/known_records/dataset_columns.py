"""What datasets say of their columns, held against the records that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.extractors.extractor import Projection, fits
from dagster_adjunct.assets.sources.decode_changes import schema_of_rows, stored_schema
from dagster_adjunct.assets.sources.opened_stream import check_order
from dagster_adjunct.assets.validation.named_columns import check_validator_columns
from dagster_adjunct.orchestration.planner.refused_operators.refusals import shown
from dagster_adjunct.resources.errors import AdjunctError, PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.checking import check_of_one_record, checked_condition, checked_expression
from dagster_adjunct.resources.sql.parsing import parsed

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog


def check_datasets(app: Application, catalog: Catalog) -> None:
    """Raise PlanningError for a dataset that could never be made of its input, joined or not: one whose key, columns,
    order, projection or validators name columns that will not be there, or are of another type."""
    for dataset in app.datasets:
        facts = catalog.get(dataset.input) if isinstance(dataset.input, str) else None
        records = records_of(dataset, catalog)
        try:
            if records is not None:
                _check_columns(dataset, records)
            if facts is not None and dataset.follows_changes:
                check_order(dataset, facts.key, facts.partitions, facts.partitioner)
        except AdjunctError as error:
            facts_known = {name: value for name, value in error.facts.items() if name != "operator"}
            place = None if dataset.declared_at is None else shown(dataset.declared_at)
            told = {**facts_known, "dataset": dataset.name, "declared_at": place}
            raise PlanningError(error.problem, error.next_step, **told) from None


def records_of(dataset: AdjunctDataset, catalog: Catalog) -> Schema | None:
    """Return the columns of what a dataset is made of, None where its stream declares none."""
    if not isinstance(dataset.input, str):
        return dataset.input.schema
    facts = catalog.get(dataset.input)
    return None if facts is None else facts.schema


def extracted_rows(dataset: AdjunctDataset, records: Schema) -> Schema:
    """Return the columns that a dataset's extractor gets, of records with these."""
    return schema_of_rows(dataset, records) if dataset.follows_changes and isinstance(dataset.input, str) else records


def _check_columns(dataset: AdjunctDataset, records: Schema) -> None:
    if isinstance(dataset.extractor, Projection):
        _check_projection(dataset, dataset.extractor, extracted_rows(dataset, records))
    check_validator_columns(dataset, stored_schema(dataset, records))


def _check_projection(dataset: AdjunctDataset, projection: Projection, rows: Schema) -> None:
    what = f"dataset {dataset.name!r}"
    types: dict[str, str | None] = {field.name: field.type for field in rows.fields}
    declared = {field.name: field.type for field in Schema.from_ddl(projection.columns, what).fields}
    for name, text in dict(projection.select).items():
        kind = _checked(what, text, types, f"Correct the projection's column {name!r}.")
        if kind is not None and not fits(kind, declared[name]):
            raise PlanningError(
                f"{what}: the projection declares {name} as {declared[name]}, and {text!r} gives {kind}.",
                f"Declare it as {kind}, or cast it in the expression, where everybody sees it.",
                column=name,
            )
    where = projection.where
    if where is not None and not _names_hidden(where):
        _checked(what, where, types, "Correct the projection's where=.")
        checked_condition(f"{what}: where=", where, tuple(types), types)


def _checked(what: str, text: str, types: dict[str, str | None], next_step: str) -> str | None:
    if _names_hidden(text):
        return None
    check_of_one_record(what, text)
    return checked_expression(what, text, tuple(types), types, side="the record", next_step=next_step)


def _names_hidden(text: str) -> bool:
    """Whether an expression names a column of the record's position, which Spark has there, too."""
    return any(name.name.startswith("__") for name in parsed(text).columns)
