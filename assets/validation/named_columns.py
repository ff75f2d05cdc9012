"""What validators name of a dataset's columns, held against those that it is going to store."""

from __future__ import annotations

import re
from collections.abc import Iterator

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.validator import Validator
from dagster_adjunct.assets.validation import checks
from dagster_adjunct.assets.validation.possible_values import impossible
from dagster_adjunct.assets.validation.validators import Check
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.sql.checked_selects import check_select, leaves_to_spark
from dagster_adjunct.resources.sql.checking import checked_expression
from dagster_adjunct.resources.sql.nearest_names import did_you_mean
from dagster_adjunct.resources.sql.parsing import beyond_a_record, parsed

_SELECT = re.compile(r"\(*\s*(select|with)\b", re.IGNORECASE)


def check_validator_columns(dataset: AdjunctDataset, stored: Schema) -> None:
    """Raise PlanningError for the first validator that names a column which the dataset will not have.

    A condition of `sql_check` has to be boolean, as far as its type is certain. Of a SELECT that reads the new version
    alone all names are judged, of one that joins others those that say that they are the version's; functions are not.
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
        _check_values(what, dataset, validator, types)
        condition = _condition(validator)
        if condition is not None:
            _check_condition(what, dataset, condition, types)
    for name, text, is_select in rules_in_sql(dataset):
        if is_select:
            what = f"validator {name!r} of dataset {dataset.name!r}"
            check_select(what, text, checks.VERSION, types, side="the dataset", next_step="Correct the validator.")


def rules_in_sql(dataset: AdjunctDataset) -> Iterator[tuple[str, str, bool]]:
    """Yield name and SQL of each validator that Spark judges, and whether that is a SELECT and no condition."""
    for validator in dataset.validators:
        if isinstance(validator, Check) and validator.function is checks.sql:
            (text,) = validator.arguments
            yield validator.name, text, _SELECT.match(text) is not None


def left_to_spark(select: str) -> bool:
    """Whether something in a validator's SELECT is not judged here, even where all the dataset's columns are known."""
    return leaves_to_spark(select, checks.VERSION)


def _check_values(what: str, dataset: AdjunctDataset, validator: Validator, types: dict[str, str | None]) -> None:
    if not isinstance(validator, Check) or validator.function is not checks.values_in:
        return
    column, values = validator.arguments
    kind = types[column]
    wrong = [] if kind is None else impossible(values, kind)
    if wrong:
        raise PlanningError(
            f"{what}: it allows {wrong[0]!r} in column {column!r}, which is {kind}.",
            "List values of that type.",
            dataset=dataset.name,
            column=column,
        )


def _check_condition(what: str, dataset: AdjunctDataset, condition: str, types: dict[str, str | None]) -> None:
    over = [name for name, _ in beyond_a_record(condition)]
    if over:
        raise PlanningError(
            f"{what}: the condition {condition!r} takes {over[0]}() over several rows: expected one that holds or does "
            "not hold of each row.",
            "Write a SELECT of the rows that break the rule.",
            dataset=dataset.name,
        )
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
