"""The names of `dagster_adjunct` itself, those for Dagster aside: what a first application needs, and most others."""

from __future__ import annotations

import importlib

from dagster_adjunct import _MODULES, _MODULES_FOR_DAGSTER
from dagster_adjunct._arguments import guard
from dagster_adjunct.assets.advancing.advance_dataset import advance_dataset
from dagster_adjunct.assets.advancing.dataset_manager import AdjunctDatasetManager
from dagster_adjunct.assets.bounded.advance_versions import advance_version_set
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
    version_set,
)
from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy, VersionPartitions
from dagster_adjunct.assets.reading.dataset_names import list_datasets
from dagster_adjunct.assets.reading.open_dataset import current_versions, open_dataset
from dagster_adjunct.assets.versions.advance_report import AdvanceReport, StageEvent
from dagster_adjunct.assets.versions.sealed_version import VersionRef
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.application.update_expressions import update_message
from dagster_adjunct.orchestration.batchlog.batch_log import (
    ApplicationState,
    application_state,
    served_versions,
)
from dagster_adjunct.orchestration.operators.spec.sink_context import SinkContext
from dagster_adjunct.orchestration.planner.lake_catalog import plan_application, systems_for
from dagster_adjunct.orchestration.step.progress.step_report import StepEvent, StepReport
from dagster_adjunct.orchestration.step.run_application import RunReport, run_application
from dagster_adjunct.orchestration.step.session_scope import session_scope
from dagster_adjunct.resources.objects import Lake, LakeSettings
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.spark.given_session import IN_PROCESS
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams
from dagster_adjunct.resources.tables import UpdateContract

__all__ = [
    "IN_PROCESS",
    "AdjunctDataset",
    "AdjunctDatasetManager",
    "AdvanceReport",
    "Application",
    "ApplicationState",
    "DiscardPolicy",
    "Field",
    "Lake",
    "LakeSettings",
    "LakeStreams",
    "MessageStream",
    "RunReport",
    "Schema",
    "SinkContext",
    "StageEvent",
    "StepEvent",
    "StepReport",
    "SystemStreamPartition",
    "UpdateContract",
    "VersionPartitions",
    "VersionRef",
    "advance_dataset",
    "advance_version_set",
    "application_state",
    "bounded_dataset",
    "current_versions",
    "list_datasets",
    "open_dataset",
    "open_lake",
    "plan_application",
    "run_application",
    "served_versions",
    "session_scope",
    "systems_for",
    "unbounded_dataset",
    "update_message",
    "version_set",
]

guard(globals(), __all__)
# What these functions return is declared there: whoever calls them has it checked, too.
for _module in sorted({*_MODULES} - {*_MODULES_FOR_DAGSTER}):
    importlib.import_module(f"dagster_adjunct.{_module}")
