"""Adjunct's public API: the only package to import.

Streams joined with versioned reference data and written as partial updates, on Dagster and Spark. The
floors under it (`orchestration`, `assets`, `resources`) have everyday names, so importing this checks that
they are ours and not folders of the same name that come first on the path.
"""

from __future__ import annotations

from dagster_adjunct._floors import check_floors

check_floors()

from assets import (  # noqa: E402
    AdjunctDataset,
    AdvanceReport,
    DatasetStore,
    DatasetView,
    abandon_version,
    advance_dataset,
    bounded_dataset,
    open_dataset,
    unbounded_dataset,
)
from orchestration import (  # noqa: E402
    AdjunctTranslator,
    Application,
    ApplicationState,
    AssetSubject,
    LakeResource,
    MessageStream,
    RunReport,
    StepEvent,
    StepReport,
    application_state,
    build_definitions,
    plan_application,
    prepare_dagster_home,
    run_application,
    served_versions,
    session_scope,
    systems_for,
    update_message,
)
from resources.backends import PostgresTable, SqliteTable, register_backend  # noqa: E402
from resources.errors import (  # noqa: E402
    AdjunctError,
    CommitConflict,
    CommitStateUnknown,
    ConfigurationError,
    PermanentError,
    PlanningError,
    RecordNotFoundError,
    TransientError,
)
from resources.objects import Lake, LakeSettings, open_lake  # noqa: E402
from resources.schema import Field, Schema  # noqa: E402
from resources.spark import SparkResource  # noqa: E402
from resources.streams import (  # noqa: E402
    CompactionPolicy,
    LakeStreams,
    Marker,
    OffsetRange,
    Retention,
    StreamSystem,
    SystemStreamPartition,
    register_system,
)
from resources.tables import (  # noqa: E402
    BlockingTable,
    RateLimit,
    RemoteTable,
    RetryPolicy,
    TableMetrics,
    TableReadFunction,
    TableWriteFunction,
    UpdateContract,
    UpdateMessage,
)

__all__ = [
    "AdjunctDataset",
    "AdjunctError",
    "AdjunctTranslator",
    "AdvanceReport",
    "Application",
    "ApplicationState",
    "AssetSubject",
    "BlockingTable",
    "CommitConflict",
    "CommitStateUnknown",
    "CompactionPolicy",
    "ConfigurationError",
    "DatasetStore",
    "DatasetView",
    "Field",
    "Lake",
    "LakeResource",
    "LakeSettings",
    "LakeStreams",
    "Marker",
    "MessageStream",
    "OffsetRange",
    "PermanentError",
    "PlanningError",
    "PostgresTable",
    "RateLimit",
    "RecordNotFoundError",
    "RemoteTable",
    "Retention",
    "RetryPolicy",
    "RunReport",
    "Schema",
    "SparkResource",
    "SqliteTable",
    "StepEvent",
    "StepReport",
    "StreamSystem",
    "SystemStreamPartition",
    "TableMetrics",
    "TableReadFunction",
    "TableWriteFunction",
    "TransientError",
    "UpdateContract",
    "UpdateMessage",
    "abandon_version",
    "advance_dataset",
    "application_state",
    "bounded_dataset",
    "build_definitions",
    "open_dataset",
    "open_lake",
    "plan_application",
    "prepare_dagster_home",
    "register_backend",
    "register_system",
    "run_application",
    "served_versions",
    "session_scope",
    "systems_for",
    "unbounded_dataset",
    "update_message",
]
