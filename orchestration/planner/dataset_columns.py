"""What datasets say of their columns, held against the records that they are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.sources.entries_of_records import schema_of_entries
from dagster_adjunct.assets.validation.named_columns import check_validator_columns
from dagster_adjunct.orchestration.planner.refusals import shown
from dagster_adjunct.resources.errors import AdjunctError, PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.stream_facts import Catalog


def check_validators_of(app: Application, catalog: Catalog) -> None:
    """Raise PlanningError for validators of the application's datasets that name columns which these will not have."""
    for dataset in app.datasets:
        if not dataset.validators:
            continue
        facts = catalog.get(dataset.input) if isinstance(dataset.input, str) else None
        records = (facts.schema if facts else None) if isinstance(dataset.input, str) else dataset.input.schema
        if records is None:
            continue
        try:
            stored = schema_of_entries(dataset, records)
        except AdjunctError:  # which is told of the join, or when the dataset is advanced
            continue
        try:
            check_validator_columns(dataset, stored)
        except PlanningError as error:
            if dataset.declared_at is None:
                raise
            raise error.reworded(error.problem, error.next_step, declared_at=shown(dataset.declared_at)) from None
