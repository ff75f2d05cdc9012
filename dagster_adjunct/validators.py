"""Rules that a version is held to before anybody reads it: those that ship, and what a rule of your own is made of."""

from __future__ import annotations

from dagster_adjunct.assets.declaration.policies import Validator
from dagster_adjunct.assets.validation.checks import Finding
from dagster_adjunct.assets.validation.validators import (
    Candidate,
    custom,
    evaluate,
    min_rows,
    no_null_keys,
    no_nulls,
    row_count_within,
    schema_compatible,
    sql_check,
    unique_keys,
    values_in,
)
from dagster_adjunct.assets.versions.version import Verdict

__all__ = [
    "Candidate",
    "Finding",
    "Validator",
    "Verdict",
    "custom",
    "evaluate",
    "min_rows",
    "no_null_keys",
    "no_nulls",
    "row_count_within",
    "schema_compatible",
    "sql_check",
    "unique_keys",
    "values_in",
]
