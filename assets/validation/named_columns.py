"""What validators name of a dataset's columns, held against those that it is going to store."""

from __future__ import annotations

import re

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.validator import Validator
from dagster_adjunct.assets.validation import checks
from dagster_adjunct.assets.validation.validators import Check
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.checking import checked_expression
from dagster_adjunct.resources.sql.nearest_names import did_you_mean
from dagster_adjunct.resources.sql.parsing import parsed

_SELECT = re.compile(r"\(*\s*(select|with)\b", re.IGNORECASE)


def check_validator_columns(dataset: AdjunctDataset, stored: Schema) -> None:
    """Raise PlanningError for the first validator that names a column which the dataset will not have.

    A condition of `sql_check` has to be boolean, as far as its type is certain; a SELECT and functions are not judged.
    """
    types: dict[str, str | None] = {field.name: field.type for field in stored.fields}
    for validator in dataset.validators:
        what = f"validator {validator.name!r} of dataset {dataset.name!r}"
        for name in _named(validator):
            if name not in types:
                raise PlanningError(
                    f"{what}: the dataset has no column {name!r}; its columns are {', '.join(types)}.",
                    f"{did_you_mean(name, types)}Correct the validator.",
                    dataset=dataset.name,
                    column=name,
                )
        condition = _condition(validator)
        if condition is not None:
            _check_condition(what, dataset, condition, types)


def _check_condition(what: str, dataset: AdjunctDataset, condition: str, types: dict[str, str | None]) -> None:
    kind = checked_expression(
        what, condition, tuple(types), types, side="the dataset", next_step="Correct the validator."
    )
    if kind not in (None, "boolean"):
        raise PlanningError(
            f"{what}: {condition!r} is {kind}: expected a condition, or a SELECT.",
            f"Compare it with something: {condition} is not null.",
            dataset=dataset.name,
        )


def _named(validator: Validator) -> tuple[str, ...]:
    if not isinstance(validator, Check):
        return ()
    if validator.function is checks.no_nulls:
        return validator.arguments
    return validator.arguments[:1] if validator.function is checks.values_in else ()


def _condition(validator: Validator) -> str | None:
    if not isinstance(validator, Check) or validator.function is not checks.sql:
        return None
    (text,) = validator.arguments
    hidden = any(name.name.startswith("__") for name in parsed(text).columns)
    return None if hidden or _SELECT.match(text) else str(text)
