"""The names of `dagster_adjunct` that are for Dagster: importing it takes longer than all the others together."""

from dagster_adjunct.orchestration.code_location.definitions import build_definitions as build_definitions
from dagster_adjunct.orchestration.code_location.resources import LakeResource as LakeResource
from dagster_adjunct.orchestration.code_location.resources import SparkResource as SparkResource
