"""Validators, which check a version before it is published: ready-made ones, and what a
validator of your own needs.
"""

from dagster_adjunct.assets.declaration.policies import Validator as Validator
from dagster_adjunct.assets.validation.validators import Candidate as Candidate
from dagster_adjunct.assets.validation.validators import Finding as Finding
from dagster_adjunct.assets.validation.validators import custom as custom
from dagster_adjunct.assets.validation.validators import evaluate as evaluate
from dagster_adjunct.assets.validation.validators import min_rows as min_rows
from dagster_adjunct.assets.validation.validators import no_null_keys as no_null_keys
from dagster_adjunct.assets.validation.validators import no_nulls as no_nulls
from dagster_adjunct.assets.validation.validators import row_count_within as row_count_within
from dagster_adjunct.assets.validation.validators import schema_compatible as schema_compatible
from dagster_adjunct.assets.validation.validators import sql_check as sql_check
from dagster_adjunct.assets.validation.validators import unique_keys as unique_keys
from dagster_adjunct.assets.validation.validators import values_in as values_in
from dagster_adjunct.assets.versions.version import Verdict as Verdict
