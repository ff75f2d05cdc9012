"""Datasets, tables and applications in YAML, for Dagster's components and `dg`."""

from dagster_adjunct.orchestration.code_location.components import (
    AdjunctComponent as AdjunctComponent,
)
from dagster_adjunct.orchestration.code_location.components import (
    load_applications as load_applications,
)
