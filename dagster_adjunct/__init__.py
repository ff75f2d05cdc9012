"""Streams joined with versioned reference data and written as partial updates, on Dagster and
Spark.

Here is what a first application needs. The other modules directly in this package have the rest,
each name in exactly one of them; its folders are not for users. A name is imported when it is first
used, because Spark's tasks import parts of this package on machines that may have no Dagster.
"""

from __future__ import annotations

from pkgutil import iter_modules
from typing import TYPE_CHECKING

# also of a zip file
_MODULES = [module.name for module in iter_modules(__path__) if not module.ispkg]

_NAMES = {  # what is imported below for type checkers; tests compare the two
    "dagster_adjunct.assets.advance_dataset": ("AdjunctDatasetManager", "advance_dataset"),
    "dagster_adjunct.assets.bounded.advance": ("advance_version_set",),
    "dagster_adjunct.assets.declaration.dataset": (
        "AdjunctDataset",
        "BoundedDataset",
        "UnboundedDataset",
        "bounded_dataset",
        "unbounded_dataset",
        "version_set",
    ),
    "dagster_adjunct.assets.declaration.policies": ("DiscardPolicy", "VersionPartitions"),
    "dagster_adjunct.assets.reading.dataset": ("current_versions", "open_dataset"),
    "dagster_adjunct.assets.reading.stored_versions": ("list_datasets",),
    "dagster_adjunct.assets.versions.reports": ("AdvanceReport", "StageEvent"),
    "dagster_adjunct.assets.versions.version": ("VersionRef",),
    "dagster_adjunct.orchestration.application.application": ("Application",),
    "dagster_adjunct.orchestration.application.message_stream": ("MessageStream",),
    "dagster_adjunct.orchestration.batch_log.batch_log": (
        "ApplicationState",
        "application_state",
        "served_versions",
    ),
    "dagster_adjunct.orchestration.code_location.definitions": ("build_definitions",),
    "dagster_adjunct.orchestration.code_location.resources": ("LakeResource", "SparkResource"),
    "dagster_adjunct.orchestration.operators.calls": ("SinkContext",),
    "dagster_adjunct.orchestration.operators.lookups": ("Restate", "Wait"),
    "dagster_adjunct.orchestration.operators.table_updates": ("update_message",),
    "dagster_adjunct.orchestration.planner.planner": ("plan_application", "systems_for"),
    "dagster_adjunct.orchestration.step.progress": ("StepEvent", "StepReport"),
    "dagster_adjunct.orchestration.step.run": ("RunReport", "run_application"),
    "dagster_adjunct.resources.file_streams.delta": ("delta_stream",),
    "dagster_adjunct.resources.file_streams.folder": ("FileRules", "file_stream"),
    "dagster_adjunct.resources.file_streams.iceberg": ("iceberg_stream",),
    "dagster_adjunct.resources.file_streams.log": ("FileRetention",),
    "dagster_adjunct.resources.files.columns": ("ColumnRules",),
    "dagster_adjunct.resources.objects.lake": ("Lake", "LakeSettings", "open_lake"),
    "dagster_adjunct.resources.schemas.schema": ("Field", "Schema"),
    "dagster_adjunct.resources.spark.in_process": ("IN_PROCESS",),
    "dagster_adjunct.resources.spark.session": ("session_scope",),
    "dagster_adjunct.resources.streams.lake.streams": ("LakeStreams",),
    "dagster_adjunct.resources.streams.system": ("SystemStreamPartition",),
    "dagster_adjunct.resources.tables.operation": ("UpdateContract",),
}

if TYPE_CHECKING:
    from dagster_adjunct.assets.advance_dataset import (
        AdjunctDatasetManager as AdjunctDatasetManager,
    )
    from dagster_adjunct.assets.advance_dataset import advance_dataset as advance_dataset
    from dagster_adjunct.assets.bounded.advance import advance_version_set as advance_version_set
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset as AdjunctDataset
    from dagster_adjunct.assets.declaration.dataset import BoundedDataset as BoundedDataset
    from dagster_adjunct.assets.declaration.dataset import UnboundedDataset as UnboundedDataset
    from dagster_adjunct.assets.declaration.dataset import bounded_dataset as bounded_dataset
    from dagster_adjunct.assets.declaration.dataset import unbounded_dataset as unbounded_dataset
    from dagster_adjunct.assets.declaration.dataset import version_set as version_set
    from dagster_adjunct.assets.declaration.policies import DiscardPolicy as DiscardPolicy
    from dagster_adjunct.assets.declaration.policies import VersionPartitions as VersionPartitions
    from dagster_adjunct.assets.reading.dataset import current_versions as current_versions
    from dagster_adjunct.assets.reading.dataset import open_dataset as open_dataset
    from dagster_adjunct.assets.reading.stored_versions import list_datasets as list_datasets
    from dagster_adjunct.assets.versions.reports import AdvanceReport as AdvanceReport
    from dagster_adjunct.assets.versions.reports import StageEvent as StageEvent
    from dagster_adjunct.assets.versions.version import VersionRef as VersionRef
    from dagster_adjunct.orchestration.application.application import Application as Application
    from dagster_adjunct.orchestration.application.message_stream import (
        MessageStream as MessageStream,
    )
    from dagster_adjunct.orchestration.batch_log.batch_log import (
        ApplicationState as ApplicationState,
    )
    from dagster_adjunct.orchestration.batch_log.batch_log import (
        application_state as application_state,
    )
    from dagster_adjunct.orchestration.batch_log.batch_log import served_versions as served_versions
    from dagster_adjunct.orchestration.code_location.definitions import (
        build_definitions as build_definitions,
    )
    from dagster_adjunct.orchestration.code_location.resources import LakeResource as LakeResource
    from dagster_adjunct.orchestration.code_location.resources import SparkResource as SparkResource
    from dagster_adjunct.orchestration.operators.calls import SinkContext as SinkContext
    from dagster_adjunct.orchestration.operators.lookups import Restate as Restate
    from dagster_adjunct.orchestration.operators.lookups import Wait as Wait
    from dagster_adjunct.orchestration.operators.table_updates import (
        update_message as update_message,
    )
    from dagster_adjunct.orchestration.planner.planner import plan_application as plan_application
    from dagster_adjunct.orchestration.planner.planner import systems_for as systems_for
    from dagster_adjunct.orchestration.step.progress import StepEvent as StepEvent
    from dagster_adjunct.orchestration.step.progress import StepReport as StepReport
    from dagster_adjunct.orchestration.step.run import RunReport as RunReport
    from dagster_adjunct.orchestration.step.run import run_application as run_application
    from dagster_adjunct.resources.file_streams.delta import delta_stream as delta_stream
    from dagster_adjunct.resources.file_streams.folder import FileRules as FileRules
    from dagster_adjunct.resources.file_streams.folder import file_stream as file_stream
    from dagster_adjunct.resources.file_streams.iceberg import iceberg_stream as iceberg_stream
    from dagster_adjunct.resources.file_streams.log import FileRetention as FileRetention
    from dagster_adjunct.resources.files.columns import ColumnRules as ColumnRules
    from dagster_adjunct.resources.objects.lake import Lake as Lake
    from dagster_adjunct.resources.objects.lake import LakeSettings as LakeSettings
    from dagster_adjunct.resources.objects.lake import open_lake as open_lake
    from dagster_adjunct.resources.schemas.schema import Field as Field
    from dagster_adjunct.resources.schemas.schema import Schema as Schema
    from dagster_adjunct.resources.spark.in_process import IN_PROCESS as IN_PROCESS
    from dagster_adjunct.resources.spark.session import session_scope as session_scope
    from dagster_adjunct.resources.streams.lake.streams import LakeStreams as LakeStreams
    from dagster_adjunct.resources.streams.system import (
        SystemStreamPartition as SystemStreamPartition,
    )
    from dagster_adjunct.resources.tables.operation import UpdateContract as UpdateContract
else:  # hidden from type checkers, for which every name would exist
    from importlib import import_module

    from dagster_adjunct.resources.lazy_modules import lazy_names

    _get_name, __dir__ = lazy_names(__name__, _NAMES)

    def __getattr__(name):
        return import_module(f"{__name__}.{name}") if name in _MODULES else _get_name(name)
