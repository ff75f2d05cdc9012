"""Adjunct's public API: the only package to import.

Streams joined with versioned reference data and written as partial updates, on Dagster and Spark. The
floors under it (`orchestration`, `assets`, `resources`) have everyday names, so importing this checks that
they are ours and not folders of the same name that come first on the path.
"""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct._floors import check_floors

check_floors()

from assets import (  # noqa: E402
    AdjunctDataset,
    AdvanceReport,
    DatasetStore,
    DatasetView,
    abandon_version,
    advance_dataset,
    advance_version_set,
    bounded_dataset,
    current_versions,
    list_datasets,
    open_dataset,
    unbounded_dataset,
    version_set,
)
from assets.checking.checks import Finding  # noqa: E402
from assets.checking.validators import (  # noqa: E402
    Candidate,
    Validator,
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
from assets.checking.verify import VerifyReport, verify_version  # noqa: E402
from assets.dataset import BY_OFFSET  # noqa: E402
from assets.erasing.erasure import ErasureReport, find_keys, forget  # noqa: E402
from assets.erasing.key_search import KeySearch  # noqa: E402
from assets.exchange.diff import ChangedEntry, VersionDiff, diff_versions  # noqa: E402
from assets.exchange.handover import duckdb_view, parquet_files, polars_frame, pyarrow_dataset  # noqa: E402
from assets.exchange.iceberg import (  # noqa: E402
    IcebergSnapshot,
    IcebergTable,
    publish_to_iceberg,
    register_in_iceberg,
    release_from_iceberg,
)
from assets.exchange.stream_view import StreamView, stream_view  # noqa: E402
from assets.following import DeadLetters, DeltaCompaction  # noqa: E402
from assets.manifest import Verdict, VersionRef  # noqa: E402
from assets.policies import DiscardPolicy, VersionPartitions  # noqa: E402
from assets.publishing.operations import HistoryEntry  # noqa: E402
from assets.reading.lookup import FileCache  # noqa: E402
from assets.reading.serving import ServedDataset  # noqa: E402
from assets.reading.watch import Watch  # noqa: E402
from assets.rebucketing.report import RebucketReport  # noqa: E402
from assets.report import StageEvent  # noqa: E402
from assets.retention.discard import DiscardReport  # noqa: E402
from assets.retention.leases import Lease  # noqa: E402
from assets.sources.changes.debezium import DebeziumEnvelope  # noqa: E402
from assets.sources.changes.formats import ChangeFormat, DebeziumUnwrapped, OperationColumn, Upserts  # noqa: E402
from assets.sources.extractor import KeyValueExtractor, Projection, PythonExtractor  # noqa: E402
from assets.sources.inputs import Computation, FileSource, QuerySource  # noqa: E402
from assets.unbounded.compaction import CompactionReport, compact_dataset  # noqa: E402
from assets.unbounded.initial import InitialLoad, ParquetSnapshot, QuerySnapshot, Snapshot  # noqa: E402
from assets.unbounded.manager import AdjunctDatasetManager  # noqa: E402
from assets.unbounded.postgres_snapshot import PostgresSnapshot  # noqa: E402
from assets.unbounded.rebuild import rebuild_dataset  # noqa: E402
from assets.unbounded.rewind import plan_rewind, rewind_dataset  # noqa: E402
from assets.unbounded.rewind_plan import RewindPlan  # noqa: E402
from assets.unbounded.transient import TransientView  # noqa: E402
from orchestration import (  # noqa: E402
    AdjunctTranslator,
    Application,
    ApplicationState,
    AssetSubject,
    LakeResource,
    LaunchWhen,
    MessageStream,
    RunReport,
    StepEvent,
    StepReport,
    application_state,
    build_definitions,
    discard,
    discard_all,
    plan_application,
    prepare_dagster_home,
    run_application,
    served_versions,
    session_scope,
    systems_for,
    update_message,
)
from orchestration.deleting import DeletionReport, delete_dataset, delete_stream  # noqa: E402
from orchestration.offsets.checkpoints import Checkpoint, CheckpointChange, CheckpointManager  # noqa: E402
from orchestration.offsets.request import StartpointRequest  # noqa: E402
from orchestration.offsets.startpoints import StartpointManager  # noqa: E402
from orchestration.repartitioning import RepartitionReport, repartition_dataset, repartition_stream  # noqa: E402
from orchestration.startpoints import Startpoints  # noqa: E402
from resources.backends import PostgresTable, SqliteTable, register_backend  # noqa: E402
from resources.errors import (  # noqa: E402
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
from resources.metadata import MetadataStore  # noqa: E402
from resources.objects import Lake, LakeSettings, open_lake  # noqa: E402
from resources.schema import Field, Schema  # noqa: E402
from resources.spark import SparkResource  # noqa: E402
from resources.streams import (  # noqa: E402
    RECORD_META,
    AppendResult,
    CompactionPolicy,
    LakeStreams,
    Marker,
    OffsetRange,
    Retention,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
    open_system,
    records_checksum,
    register_system,
)
from resources.streams.kafka import KafkaSettings, KafkaTopic, kafka_system  # noqa: E402
from resources.streams.kafka.avro_format import Avro  # noqa: E402
from resources.streams.kafka.json_format import Json  # noqa: E402
from resources.streams.kafka.protobuf_format import Protobuf  # noqa: E402
from resources.streams.kafka.raw_format import KeyText, Raw, Text  # noqa: E402
from resources.streams.kafka.registry import SchemaRegistry  # noqa: E402
from resources.streams.readers import NewRecords, ReaderInfo, forget_reader, list_readers, read_new  # noqa: E402
from resources.streams.sources import SourceRange, Sources  # noqa: E402
from resources.streams.startpoint import (  # noqa: E402
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
    resolve_startpoint_to_offset,
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
    "DatasetView",
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
    "TransientView",
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
