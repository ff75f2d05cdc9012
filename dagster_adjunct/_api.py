"""Adjunct's public API: the only package to import.

Streams joined with versioned reference data and written as partial updates, on Dagster and Spark.
"""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.assets.advancing.advance import advance_dataset
from dagster_adjunct.assets.advancing.manager import AdjunctDatasetManager
from dagster_adjunct.assets.bounded.advance import abandon_version, advance_version_set
from dagster_adjunct.assets.bounded.version_set import current_versions
from dagster_adjunct.assets.declaration.changes.debezium import DebeziumEnvelope
from dagster_adjunct.assets.declaration.changes.formats import (
    ChangeFormat,
    DebeziumUnwrapped,
    OperationColumn,
    Upserts,
)
from dagster_adjunct.assets.declaration.dataset import (
    BY_OFFSET,
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
    version_set,
)
from dagster_adjunct.assets.declaration.extractors.extractor import (
    KeyValueExtractor,
    Projection,
    PythonExtractor,
)
from dagster_adjunct.assets.declaration.following import DeadLetters, DeltaCompaction
from dagster_adjunct.assets.declaration.initial_load import InitialLoad, ParquetSnapshot, QuerySnapshot, Snapshot
from dagster_adjunct.assets.declaration.inputs import Computation, FileSource, QuerySource
from dagster_adjunct.assets.declaration.policies import DiscardPolicy, VersionPartitions
from dagster_adjunct.assets.declaration.postgres_snapshot import PostgresSnapshot
from dagster_adjunct.assets.declaration.validator import Validator
from dagster_adjunct.assets.exchange.handover import (
    duckdb_view,
    parquet_files,
    polars_frame,
    pyarrow_dataset,
)
from dagster_adjunct.assets.exchange.iceberg import (
    IcebergSnapshot,
    IcebergTable,
    publish_to_iceberg,
    register_in_iceberg,
    release_from_iceberg,
)
from dagster_adjunct.assets.exchange.stream_view import StreamView, stream_view
from dagster_adjunct.assets.reading.diff import ChangedEntry, VersionDiff, diff_versions
from dagster_adjunct.assets.reading.file_cache import FileCache
from dagster_adjunct.assets.reading.serving import ServedDataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions as DatasetStore
from dagster_adjunct.assets.reading.stored_versions import list_datasets, open_dataset
from dagster_adjunct.assets.reading.verify import VerifyReport, verify_version
from dagster_adjunct.assets.reading.watch import Watch
from dagster_adjunct.assets.rebucketing.report import RebucketReport
from dagster_adjunct.assets.retention.discard import DiscardReport
from dagster_adjunct.assets.retention.erasing.erasure import ErasureReport, find_keys, forget
from dagster_adjunct.assets.retention.erasing.key_search import KeySearch
from dagster_adjunct.assets.unbounded.compaction import CompactionReport, compact_dataset
from dagster_adjunct.assets.unbounded.rebuild import rebuild_dataset
from dagster_adjunct.assets.unbounded.rewind import plan_rewind, rewind_dataset
from dagster_adjunct.assets.unbounded.rewind_plan import RewindPlan
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
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.assets.versions.manifest import Verdict, VersionRef
from dagster_adjunct.assets.versions.operator_actions import HistoryEntry
from dagster_adjunct.assets.versions.report import AdvanceReport, StageEvent
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.orchestration.application.update_expressions import update_message
from dagster_adjunct.orchestration.batchlog.history import (
    Checkpoint,
    CheckpointChange,
    CheckpointManager,
)
from dagster_adjunct.orchestration.batchlog.log import (
    ApplicationState,
    application_state,
    served_versions,
)
from dagster_adjunct.orchestration.code_location.build import build_definitions
from dagster_adjunct.orchestration.code_location.instance import prepare_dagster_home
from dagster_adjunct.orchestration.code_location.sensing.launch_when import LaunchWhen
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.orchestration.code_location.shared.translator import (
    AdjunctTranslator,
    AssetSubject,
)
from dagster_adjunct.orchestration.planner.lake_catalog import (
    plan_application,
    systems_for,
)
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.startpoint_manager import StartpointManager
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.report import StepEvent, StepReport
from dagster_adjunct.orchestration.step.run import RunReport, run_application
from dagster_adjunct.orchestration.step.session_scope import session_scope
from dagster_adjunct.orchestration.upkeep.deletion import (
    DeletionReport,
    delete_dataset,
    delete_stream,
)
from dagster_adjunct.orchestration.upkeep.discarding import discard, discard_all
from dagster_adjunct.orchestration.upkeep.repartitioning import (
    RepartitionReport,
    repartition_dataset,
    repartition_stream,
)
from dagster_adjunct.resources.backends import PostgresTable, SqliteTable, register_backend
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ApplicationBusyError,
    BadChangeError,
    CommitConflict,
    CommitStateUnknown,
    ConfigurationError,
    DatasetError,
    DatasetNotFoundError,
    LakeNotFoundError,
    LeaseLostError,
    MalformedDocumentError,
    ManifestMismatchError,
    MarkerConflictError,
    NoSealedVersionError,
    NullKeyError,
    OffsetOutOfRangeError,
    PartitionCountMismatch,
    PermanentError,
    PlanningError,
    ProducerConflict,
    RecordNotFoundError,
    RunLeaseLostError,
    SchemaMismatchError,
    SourceChangedError,
    StaleDatasetError,
    StillReadError,
    StreamExistsError,
    StreamNotFoundError,
    StreamUnavailableError,
    TableAccessError,
    TableError,
    TransientError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects import Lake, LakeSettings, open_lake
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.spark.resource import SparkResource
from dagster_adjunct.resources.streams.interface.checksum import records_checksum
from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
from dagster_adjunct.resources.streams.interface.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
    resolve_startpoint_to_offset,
)
from dagster_adjunct.resources.streams.interface.system import (
    RECORD_META,
    AppendResult,
    Marker,
    OffsetRange,
    StreamInfo,
    StreamSystem,
)
from dagster_adjunct.resources.streams.kafka import KafkaSettings, KafkaTopic, kafka_system
from dagster_adjunct.resources.streams.kafka.avro_format import Avro
from dagster_adjunct.resources.streams.kafka.json_format import Json
from dagster_adjunct.resources.streams.kafka.protobuf_format import Protobuf
from dagster_adjunct.resources.streams.kafka.raw_format import KeyText, Raw, Text
from dagster_adjunct.resources.streams.kafka.registry import SchemaRegistry
from dagster_adjunct.resources.streams.lake.document import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.readers import (
    NewRecords,
    ReaderInfo,
    forget_reader,
    list_readers,
    read_new,
)
from dagster_adjunct.resources.streams.lake.sources import SourceRange, Sources
from dagster_adjunct.resources.streams.lake.system import LakeStreams
from dagster_adjunct.resources.streams.registry import open_system, register_system
from dagster_adjunct.resources.tables import (
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
    "BY_OFFSET",
    "RECORD_META",
    "AdjunctDataset",
    "AdjunctDatasetManager",
    "AdjunctError",
    "AdjunctTranslator",
    "AdvanceReport",
    "AppendResult",
    "Application",
    "ApplicationBusyError",
    "ApplicationState",
    "AssetSubject",
    "Avro",
    "BadChangeError",
    "BlockingTable",
    "Candidate",
    "ChangeFormat",
    "ChangedEntry",
    "Checkpoint",
    "CheckpointChange",
    "CheckpointManager",
    "CommitConflict",
    "CommitStateUnknown",
    "CompactionPolicy",
    "CompactionReport",
    "Computation",
    "ConfigurationError",
    "DatasetError",
    "DatasetNotFoundError",
    "DatasetStore",
    "DeadLetters",
    "DebeziumEnvelope",
    "DebeziumUnwrapped",
    "DeletionReport",
    "DeltaCompaction",
    "DiscardPolicy",
    "DiscardReport",
    "ErasureReport",
    "Field",
    "FileCache",
    "FileSource",
    "Finding",
    "HistoryEntry",
    "IcebergSnapshot",
    "IcebergTable",
    "InitialLoad",
    "Json",
    "KafkaSettings",
    "KafkaTopic",
    "KeySearch",
    "KeyText",
    "KeyValueExtractor",
    "Lake",
    "LakeNotFoundError",
    "LakeResource",
    "LakeSettings",
    "LakeStreams",
    "LaunchWhen",
    "Lease",
    "LeaseLostError",
    "MalformedDocumentError",
    "ManifestMismatchError",
    "Marker",
    "MarkerConflictError",
    "MessageStream",
    "MetadataStore",
    "NewRecords",
    "NoSealedVersionError",
    "NullKeyError",
    "OffsetOutOfRangeError",
    "OffsetRange",
    "OperationColumn",
    "ParquetSnapshot",
    "PartitionCountMismatch",
    "PermanentError",
    "PlanningError",
    "PostgresSnapshot",
    "PostgresTable",
    "ProducerConflict",
    "Projection",
    "Protobuf",
    "PythonExtractor",
    "QuerySnapshot",
    "QuerySource",
    "RateLimit",
    "Raw",
    "ReaderInfo",
    "RebucketReport",
    "RecordNotFoundError",
    "RemoteTable",
    "RepartitionReport",
    "Retention",
    "RetryPolicy",
    "RewindPlan",
    "RunLeaseLostError",
    "RunReport",
    "Schema",
    "SchemaMismatchError",
    "SchemaRegistry",
    "ServedDataset",
    "Snapshot",
    "SourceChangedError",
    "SourceRange",
    "Sources",
    "SparkResource",
    "SqliteTable",
    "StageEvent",
    "StaleDatasetError",
    "Startpoint",
    "StartpointManager",
    "StartpointOldest",
    "StartpointRequest",
    "StartpointSpecific",
    "StartpointTimestamp",
    "StartpointUpcoming",
    "Startpoints",
    "StepEvent",
    "StepReport",
    "StillReadError",
    "StreamExistsError",
    "StreamInfo",
    "StreamNotFoundError",
    "StreamSystem",
    "StreamUnavailableError",
    "StreamView",
    "SystemStreamPartition",
    "TableAccessError",
    "TableError",
    "TableMetrics",
    "TableReadFunction",
    "TableWriteFunction",
    "Text",
    "TransientError",
    "UpdateContract",
    "UpdateMessage",
    "Upserts",
    "Validator",
    "Verdict",
    "VerifyReport",
    "VersionDiff",
    "VersionDiscardedError",
    "VersionPartitions",
    "VersionRef",
    "Watch",
    "abandon_version",
    "advance_dataset",
    "advance_version_set",
    "application_state",
    "bounded_dataset",
    "build_definitions",
    "compact_dataset",
    "current_versions",
    "custom",
    "delete_dataset",
    "delete_stream",
    "diff_versions",
    "discard",
    "discard_all",
    "duckdb_view",
    "evaluate",
    "find_keys",
    "forget",
    "forget_reader",
    "kafka_system",
    "list_datasets",
    "list_readers",
    "min_rows",
    "no_null_keys",
    "no_nulls",
    "open_dataset",
    "open_lake",
    "open_system",
    "parquet_files",
    "plan_application",
    "plan_rewind",
    "polars_frame",
    "prepare_dagster_home",
    "publish_to_iceberg",
    "pyarrow_dataset",
    "read_new",
    "rebuild_dataset",
    "records_checksum",
    "register_backend",
    "register_in_iceberg",
    "register_system",
    "release_from_iceberg",
    "repartition_dataset",
    "repartition_stream",
    "resolve_startpoint_to_offset",
    "rewind_dataset",
    "row_count_within",
    "run_application",
    "schema_compatible",
    "served_versions",
    "session_scope",
    "sql_check",
    "stream_view",
    "systems_for",
    "unbounded_dataset",
    "unique_keys",
    "update_message",
    "values_in",
    "verify_version",
    "version_set",
]

guard(globals(), __all__)
