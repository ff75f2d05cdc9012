"""The names of `dagster_adjunct` that are for Dagster: importing it takes longer than all the others together."""

from __future__ import annotations

import importlib

from dagster_adjunct import _MODULES_FOR_DAGSTER
from dagster_adjunct._arguments import guard
from dagster_adjunct.orchestration.code_location.definitions import build_definitions
from dagster_adjunct.orchestration.code_location.resources import LakeResource
from dagster_adjunct.resources.spark.session import SparkResource

__all__ = ["LakeResource", "SparkResource", "build_definitions"]

guard(globals(), __all__)
# What these are given and what they return is declared there: whoever calls it has it checked, too.
for _module in ("_api", *_MODULES_FOR_DAGSTER):
    importlib.import_module(f"dagster_adjunct.{_module}")
