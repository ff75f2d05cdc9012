"""The names of `dagster_adjunct` that are for Dagster: importing it takes longer than all the others together."""

from __future__ import annotations

from dagster_adjunct.orchestration.code_location.definitions import build_definitions
from dagster_adjunct.orchestration.code_location.resources import LakeResource
from dagster_adjunct.resources.spark.session import SparkResource

__all__ = ["LakeResource", "SparkResource", "build_definitions"]
