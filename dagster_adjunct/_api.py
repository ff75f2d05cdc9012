"""The names of `dagster_adjunct` itself, those for Dagster aside: what a first application needs, and most others."""

from __future__ import annotations

from dagster_adjunct.assets.advancing.advance_dataset import AdjunctDatasetManager, advance_dataset
from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, bounded_dataset, unbounded_dataset, version_set
from dagster_adjunct.assets.declaration.policies import DiscardPolicy, VersionPartitions
from dagster_adjunct.assets.reading.dataset import current_versions, open_dataset
from dagster_adjunct.assets.reading.stored_versions import list_datasets
from dagster_adjunct.assets.versions.reports import AdvanceReport, StageEvent
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.message_stream import MessageStream, update_message
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, application_state, served_versions
from dagster_adjunct.orchestration.operators.batch_context import SinkContext
from dagster_adjunct.orchestration.planner.planner import plan_application, systems_for
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport
from dagster_adjunct.orchestration.step.run import RunReport, run_application
from dagster_adjunct.resources.objects.lake import Lake, LakeSettings, open_lake
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.scope import session_scope
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.tables.operation import UpdateContract

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
