"""Dagster metadata of datasets, streams, tables and runs; failures, previews and column lineage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

from dagster import (
    AssetExecutionContext,
    AssetKey,
    CodeReferencesMetadataValue,
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    Failure,
    LocalFileCodeReference,
    MetadataValue,
    OpExecutionContext,
    RetryRequested,
    RunsFilter,
    TableColumn,
    TableColumnDep,
    TableColumnLineage,
    TableRecord,
    TableSchema,
)

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.reading.dataset import Dataset
from dagster_adjunct.assets.unbounded.progress import PartitionLag
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import OutputStream, dataset_source
from dagster_adjunct.orchestration.operators.operator import KeyedTable
from dagster_adjunct.orchestration.operators.stream_facts import (
    ColumnSources,
    LineageContext,
    LineageNode,
    Sources,
    add_sources,
    identity_sources,
    sources_from_sql,
)
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.resources.backends.columns import describe_function
from dagster_adjunct.resources.common import CodeLine, split_stream_name
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ApplicationBusyError,
    CommitStateUnknownError,
    ConfigurationError,
    LeaseLostError,
    PermanentError,
    StreamNotFoundError,
    TransientError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.errors import find_adjunct_error
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import OffsetRange, StreamSystem, SystemStreamPartition

# Tag of a materialization's data version.
DATA_VERSION_TAG = "dagster/data_version"


def column_schema(schema: Schema, descriptions: Mapping[str, str] | None = None) -> MetadataValue:
    """Return a schema as metadata, with Spark's type names and column descriptions."""
    return _table_schema({field.name: field.type for field in schema.fields}, descriptions or {})


def lineage_metadata(made: ColumnSources, key_of: Callable[[LineageNode], AssetKey | None]) -> dict[str, Any]:
    """Return the column lineage as metadata, empty if it is unknown."""
    deps = {
        name: [TableColumnDep(key, column) for node, column in sources if (key := key_of(node)) is not None]
        for name, sources in made.items()
    }
    known = {name: sources for name, sources in deps.items() if sources}
    return {"dagster/column_lineage": TableColumnLineage(known)} if known else {}


def dataset_metadata(report: AdvanceReport, uri: str) -> dict[str, Any]:
    """Return the metadata of an advance: version, rows, schema, offsets, decision, counters, and what it waits for.

    Rows are omitted if deltas would have to be merged to count them.
    """
    metadata: dict[str, Any] = {
        "adjunct/action": report.action,
        "adjunct/version": report.version or "none",
        "adjunct/offsets": MetadataValue.json(dict(report.offsets)),
        "adjunct/counters": MetadataValue.json(dict(report.counters)),
        **{f"adjunct/records_{name}": count for name, count in report.counters.items()},
        **_timing_metadata(report.seconds),
        "dagster/uri": uri,
        "dagster/storage_kind": "parquet",
    }
    if report.rows is not None:
        metadata["dagster/row_count"] = report.rows
    if report.waiting:
        metadata["adjunct/waiting"] = MetadataValue.json(list(report.waiting))
    if report.waiting_since is not None:
        metadata["adjunct/waiting_since"] = MetadataValue.timestamp(report.waiting_since)
    if report.decision is not None:
        metadata["adjunct/decision"] = MetadataValue.json(report.decision.model_dump(mode="json"))
    if report.note:
        metadata["adjunct/note"] = report.note
    if report.warnings:
        metadata["adjunct/warnings"] = MetadataValue.json(list(report.warnings))
    if report.schema is not None:
        metadata["dagster/column_schema"] = column_schema(report.schema)
    return metadata


def version_metadata(manifest: DatasetManifest) -> dict[str, Any]:
    """Return the metadata of listed versions: retained, pinned and rejected ones, and the head."""
    if manifest.versions_are_commits:
        return {}
    sealed = [ref for ref in manifest.listed if ref.state == "sealed"]
    rejected = [ref for ref in manifest.listed if ref.state == "rejected"]
    metadata: dict[str, Any] = {"adjunct/retained": len(sealed)}
    served = manifest.ref(manifest.version.id) if manifest.version else None
    if served is not None and served.name is not None:
        metadata["adjunct/name"] = served.name
    if manifest.pin is not None:
        metadata["adjunct/pin"] = MetadataValue.json(manifest.pin.model_dump(mode="json"))
    if manifest.head is not None and (served is None or manifest.head != served.id):
        metadata["adjunct/head"] = manifest.head
    if rejected:
        listed = [{"id": ref.id, "name": ref.name, "reason": ref.reason} for ref in rejected]
        metadata["adjunct/rejected"] = MetadataValue.json(listed)
    return metadata


def lag_metadata(lags: Mapping[SystemStreamPartition, PartitionLag]) -> dict[str, Any]:
    """Return how far an unbounded dataset is behind its stream: by partition, and totals that Dagster plots."""
    seconds = [lag.seconds for lag in lags.values() if lag.seconds is not None]
    metadata: dict[str, Any] = {
        "adjunct/lag": MetadataValue.json({str(ssp): lag.to_json() for ssp, lag in lags.items()}),
        "adjunct/lag_records": sum(lag.records for lag in lags.values()),
    }
    if lost := sum(lag.lost for lag in lags.values()):
        metadata["adjunct/lost_offsets"] = lost
    return metadata | ({"adjunct/lag_seconds": round(max(seconds), 1)} if len(seconds) == len(lags) else {})


def served_metadata(manifest: DatasetManifest, uri: str) -> dict[str, Any]:
    """Return the metadata of the version that a dataset serves, without the report of an advance."""
    version = manifest.version
    metadata: dict[str, Any] = {"adjunct/version": version.id if version else "none", "dagster/uri": uri}
    if version is not None:
        metadata["dagster/column_schema"] = column_schema(version.columns)
        if version.rows is not None:
            metadata["dagster/row_count"] = version.rows
    if manifest.change is not None:
        metadata["adjunct/change"] = MetadataValue.json(manifest.change.model_dump(mode="json"))
    return metadata | version_metadata(manifest)


def stream_metadata(
    lake: Lake, systems: Mapping[str, StreamSystem], name: str, descriptions: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Return the metadata of the stream "system.stream", None if it does not exist."""
    system_name, stream = split_stream_name(name)
    system = systems[system_name]
    try:
        info = system.info(stream)
    except StreamNotFoundError:
        return None
    ssps = system.partitions(stream)
    oldest, upcoming = system.oldest(ssps), system.upcoming(ssps)
    metadata: dict[str, Any] = {
        "adjunct/oldest": MetadataValue.json({str(ssp): offset for ssp, offset in oldest.items()}),
        "adjunct/upcoming": MetadataValue.json({str(ssp): offset for ssp, offset in upcoming.items()}),
    }
    if system.counts_unread:
        whole = {ssp: OffsetRange(oldest[ssp], upcoming[ssp]) for ssp in ssps}
        metadata["dagster/row_count"] = system.records_between(whole)
    if system_name == "lake":
        metadata["dagster/uri"] = f"{lake.url}/{lake.stream_prefix(stream)}"
    if info.schema is not None:
        metadata["dagster/column_schema"] = column_schema(info.schema, descriptions)
    return metadata


def declared_metadata(dataset: AdjunctDataset) -> dict[str, Any]:
    """Return the metadata of a dataset's declaration: key, input and partitioning."""
    by = ", ".join(dataset.partition_by)
    spread = "one broadcast copy" if dataset.broadcast else f"{dataset.partitions} by {by}"
    metadata: dict[str, Any] = {
        "adjunct/kind": dataset.kind,
        "adjunct/key": MetadataValue.json(list(dataset.key)),
        "adjunct/input": str(dataset.input),
        "adjunct/partitioning": spread,
        "adjunct/holds_back": dataset.bootstrap,
    }
    if dataset.partitions is not None:
        metadata["adjunct/partitions"] = dataset.partitions
    if dataset.columns is not None:
        metadata["adjunct/columns"] = MetadataValue.json(list(dataset.columns))
    if dataset.version_set is not None:
        metadata["adjunct/version_set"] = dataset.version_set
    return metadata


def output_stream_metadata(output: OutputStream) -> dict[str, Any]:
    """Return the declared key and partitions of an output stream."""
    return {"adjunct/key": MetadataValue.json(list(output.key)), "adjunct/partitions": output.partitions}


def table_metadata(table: KeyedTable, descriptions: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the declared key, location and columns of a remote table."""
    declared = _describe_table(table)
    metadata: dict[str, Any] = {"adjunct/key": MetadataValue.json(list(table.key))}
    if declared.get("columns"):
        metadata["dagster/column_schema"] = _table_schema(declared["columns"], descriptions or {})
    if declared.get("table"):
        metadata["dagster/table_name"] = ".".join(filter(None, [declared.get("schema"), declared["table"]]))
    if declared.get("backend"):
        metadata["dagster/storage_kind"] = declared["backend"]
    return metadata


def backend_name(table: KeyedTable) -> str:
    """Return the registered name of a remote table's backend ("sqlite"), "" if it is not registered."""
    return str(_describe_table(table).get("backend", ""))


def step_metadata(report: StepReport) -> dict[str, Any]:
    """Return the metadata that all outputs of a step share: batches, versions, checkpoint, joins, startpoints."""
    joins = {name: counts for name, counts in report.counters.items() if "unmatched" in counts}
    lost = sum(counts.get("lost_offsets", 0) for counts in report.counters.values())
    return {
        "adjunct/batches": report.batches,
        "adjunct/few_batches": report.few_batches,
        "adjunct/last_batch": report.state.batch,
        "adjunct/caught_up": report.caught_up,
        "adjunct/versions": MetadataValue.json(report.versions),
        "adjunct/checkpoint": MetadataValue.json({str(ssp): at for ssp, at in report.state.checkpoint.items()}),
        "adjunct/joins": MetadataValue.json(joins),
        **{f"adjunct/unmatched/{name}": counts["unmatched"] for name, counts in joins.items()},
        **{
            f"adjunct/{counted}/{name}": counts[counted]
            for name, counts in joins.items()
            for counted in ("before_history", "null_times")
            if counted in counts
        },
        **_timing_metadata(report.seconds),
        **({"adjunct/lost_offsets": lost} if lost else {}),
        **startpoint_metadata(report),
        **watermark_metadata(report),
    }


def watermark_metadata(report: StepReport) -> dict[str, Any]:
    """Return watermarks of inputs and operators, the largest lag of an input in seconds, and state sizes."""
    metadata: dict[str, Any] = {}
    if report.watermarks:
        metadata["adjunct/watermarks"] = MetadataValue.json(
            [input_times.to_json() for input_times in report.watermarks]
        )
        lags = [input_times.lag.total_seconds() for input_times in report.watermarks if input_times.lag is not None]
        if len(lags) == len(report.watermarks):
            metadata["adjunct/watermark_lag_seconds"] = round(max(lags), 1)
    if operators := report.state.times.operators:
        shown = {name: mark.isoformat() for name, mark in operators.items()}
        metadata["adjunct/operator_watermarks"] = MetadataValue.json(shown)
    for name, size in report.state_sizes.items():
        metadata |= {f"adjunct/state/{name}/rows": size.rows, f"adjunct/state/{name}/bytes": size.bytes}
        metadata[f"adjunct/state/{name}/kept_for"] = size.kept_for
    return metadata


def startpoint_metadata(report: StepReport) -> dict[str, Any]:
    """Return the startpoints applied in this run, the epochs, and the replays in progress."""
    offsets = report.state.offsets
    replays = [replay.model_dump(mode="json") for replay in offsets.replays.values()]
    values: dict[str, list[Any] | dict[str, int]] = {
        "startpoints": list(report.startpoints),
        "epochs": {str(ssp): epoch for ssp, epoch in offsets.epochs.items()},
        "replays": replays,
    }
    return {f"adjunct/{name}": MetadataValue.json(value) for name, value in values.items() if value}


def output_metadata(report: StepReport, name: str) -> dict[str, Any]:
    """Return one output's counters of this run and totals of all runs.

    For a remote table also its measurements in this run, with durations in seconds.
    """
    counters: dict[str, int | float] = {**report.counters.get(name, {})}
    if (measured := report.measured.get(name)) is not None:
        counters = {**measured.to_dict(), **counters}
    metadata: dict[str, Any] = {
        f"adjunct/{counter}": round(value, 6) if isinstance(value, float) else value
        for counter, value in counters.items()
    }
    return metadata | {"adjunct/totals": MetadataValue.json(dict(report.state.totals.get(name, {})))}


def lookup_metadata(report: StepReport, tables: Iterable[str]) -> dict[str, Any]:
    """Return the counters and measurements of lookup tables in this run, by table."""
    return {
        f"adjunct/lookups/{name}/{counter}": round(value, 6) if isinstance(value, float) else value
        for name in tables
        if name in report.measured
        for counter, value in report.measured[name].to_dict().items()
        if value or counter in ("reads", "found")
    }


def _describe_table(table: KeyedTable) -> dict[str, Any]:
    function = getattr(table, "write_function", None) or getattr(table, "read_function", None)
    try:
        return describe_function(function)
    except ConfigurationError:
        columns = getattr(function, "columns", None)
        return {"columns": columns} if isinstance(columns, Mapping) else {}


def _table_schema(columns: Mapping[str, str], descriptions: Mapping[str, str]) -> MetadataValue:
    texts = {name.lower(): text for name, text in descriptions.items()}
    shown = [TableColumn(name, kind, texts.get(name.lower())) for name, kind in columns.items()]
    return MetadataValue.table_schema(TableSchema(shown))


def _timing_metadata(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return wall time by stage, as one document and as numbers that Dagster plots."""
    rounded = {stage: round(value, 3) for stage, value in seconds.items()}
    plotted = {f"adjunct/seconds/{stage}": value for stage, value in rounded.items()}
    return {"adjunct/seconds": MetadataValue.json(rounded), **plotted}


def code_references(place: CodeLine | None) -> dict[str, Any]:
    """Return the metadata that links to a line of a local file, empty for an unknown place."""
    if place is None:
        return {}
    reference = LocalFileCodeReference(file_path=place.file, line_number=place.line, label="declared here")
    return {"dagster/code_references": CodeReferencesMetadataValue(code_references=[reference])}


# Errors after which a new run can succeed, but a retry within this run can't.
RETRY_IN_NEW_RUN = (CommitStateUnknownError, LeaseLostError)
MAX_RETRIES = 2
_RETRY_SECONDS = 5.0


@contextmanager
def translate_errors(
    context: AssetExecutionContext | OpExecutionContext, *, retry: tuple[type[AdjunctError], ...] = (TransientError,)
) -> Iterator[None]:
    """Turn AdjunctErrors into Dagster failures with a next step; errors in `retry` are retried first.

    Other exceptions pass unchanged.
    """
    try:
        yield
    except Exception as error:
        ours = find_adjunct_error(error)
        if ours is None:
            raise
        # A run that waited for another run to end does not wait again.
        again = isinstance(ours, retry) and not isinstance(ours, ApplicationBusyError)
        if again and context.retry_number < MAX_RETRIES:
            context.log.warning(f"{type(ours).__name__}, retrying in {_RETRY_SECONDS:g} s: {ours}")
            raise RetryRequested(max_retries=MAX_RETRIES, seconds_to_wait=_RETRY_SECONDS) from error
        for note in getattr(ours, "__notes__", ()):  # errors of other datasets that failed too
            context.log.error(note)
        raise Failure(
            description=str(ours),
            metadata={
                "error": type(ours).__name__,
                "next step": ours.next_step or "See the message.",
                "permanent": isinstance(ours, PermanentError) and not isinstance(ours, RETRY_IN_NEW_RUN),
            },
            allow_retries=False,
        ) from error


MAX_PLAN_LENGTH = 100_000  # characters; stored with each materialization of each output


def plan_metadata(planned: ExecutionPlan) -> dict[str, Any]:
    """Return a run's plan as text, because Dagster's UI does not draw Mermaid, and as a document for `from_json`."""
    text, document = planned.render(), planned.to_json()
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    shown = text if len(text) <= MAX_PLAN_LENGTH else f"{text[:MAX_PLAN_LENGTH]}\n…\n"
    metadata: dict[str, Any] = {"adjunct/plan": MetadataValue.md(f"{fence}text\n{shown}{fence}")}
    if len(json.dumps(document)) <= MAX_PLAN_LENGTH:
        metadata["adjunct/plan_document"] = MetadataValue.json(document)
    return metadata


MASKED = "(masked)"
MAX_PREVIEW_ROWS = 50
_MAX_CELL_LENGTH = 100


def dataset_preview(dataset: Dataset, rows: int, sensitive: Collection[str]) -> dict[str, Any]:
    """Return the first entries of an open dataset by key, as metadata."""
    return _preview_table((entry for _, entry in islice(dataset.items(), rows)), dataset.schema.names, sensitive)


def stream_preview(
    systems: Mapping[str, StreamSystem], name: str, rows: int, hidden: Callable[[Sequence[str]], Collection[str]]
) -> dict[str, Any]:
    """Return the newest records of one partition as metadata, for streams of the lake only.

    `hidden` returns the columns to mask.
    """
    system_name, stream = split_stream_name(name)
    system = systems[system_name]
    if not rows or not isinstance(system, LakeStreams):
        return {}
    ssps = system.partitions(stream)
    oldest, upcoming = system.oldest(ssps), system.upcoming(ssps)
    for ssp in ssps:
        if (held := int(upcoming[ssp]) - int(oldest[ssp])) > 0:
            start = str(int(upcoming[ssp]) - min(rows, held))
            table = system.read_arrow({ssp: OffsetRange(start, upcoming[ssp])})
            names = [column for column in table.column_names if not column.startswith("__")]
            return _preview_table(table.select(names).to_pylist()[-rows:], names, hidden(names))
    return {}


def _preview_table(
    entries: Iterable[Mapping[str, Any]], names: Iterable[str], sensitive: Collection[str]
) -> dict[str, Any]:
    hidden = {name.lower() for name in sensitive}
    records = [
        TableRecord({name: MASKED if name.lower() in hidden else _preview_value(entry.get(name)) for name in names})
        for entry in entries
    ]
    schema = TableSchema([TableColumn(name) for name in names])
    return {"adjunct/preview": MetadataValue.table(records, schema)} if records else {}


def _preview_value(value: object) -> str | int | float | bool | None:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= _MAX_CELL_LENGTH else f"{text[: _MAX_CELL_LENGTH - 1]}…"


ACTIVE = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


def is_run_of(run: DagsterRun, job: str, assets: Collection[AssetKey]) -> bool:
    """Whether a run belongs to this job or materializes one of these assets."""
    return run.job_name == job or any(key in assets for key in run.asset_selection or ())


def has_active_run(instance: DagsterInstance, job: str, assets: Collection[AssetKey]) -> bool:
    """Whether a run of this job or of one of these assets is queued or in progress."""
    runs = instance.get_runs(RunsFilter(statuses=ACTIVE), limit=1000)
    return any(is_run_of(run, job, assets) for run in runs)


def has_ended(instance: DagsterInstance, run_id: str) -> bool:
    """Whether a run has ended according to this instance; False for an unknown run."""
    run = instance.get_run_by_id(run_id)
    return run is not None and run.is_finished


def output_columns(app: Application, plan: ExecutionPlan) -> dict[LineageNode, ColumnSources]:
    """Return, for each output, the source columns (of streams and datasets) of each of its columns.

    A computed column has all columns of its expression as sources. The sources of columns that a function returns are
    unknown.
    """
    planned = {operator.id: operator.columns for operator in plan.operators}
    made: dict[str, ColumnSources] = {}
    outputs: dict[LineageNode, ColumnSources] = {}
    for operator in app.operators:
        arriving = [made[source] for source in operator.inputs]
        target = operator.spec.target(app)
        if target is not None:
            for columns in arriving:
                for name, sources in operator.spec.written_columns(columns).items():
                    add_sources(outputs.setdefault(target, {}), name, sources)
        context = LineageContext(app, tuple(planned[source] for source in operator.inputs), planned[operator.id])
        made[operator.id] = operator.spec.column_sources(context, arriving)
    return outputs


def dataset_columns(dataset: AdjunctDataset, stored: Iterable[str], records: Iterable[str] | None) -> ColumnSources:
    """Return the input columns of each stored column of a dataset; `records` are the input's columns."""
    source = dataset_source(dataset)
    if source is None:
        return {}
    if dataset.extractor is None:
        there = None if records is None else {name.lower() for name in records}
        return identity_sources(source, [name for name in stored if there is None or name.lower() in there])
    if not isinstance(dataset.extractor, Projection) or records is None:
        return {}
    taken, computed = identity_sources(source, records), dict(dataset.extractor.select)
    return {name: sources_from_sql(computed.get(name, f"`{name}`"), taken) for name in stored}


def trace_origins(outputs: Mapping[LineageNode, ColumnSources]) -> dict[LineageNode, ColumnSources]:
    """Replace columns of other outputs by their own sources."""
    traced: dict[LineageNode, ColumnSources] = {}
    for node, made in outputs.items():
        traced[node] = {}
        for name, sources in made.items():
            for source, column in sources:
                earlier = traced.get(source, {}).get(column) if source != node else None
                add_sources(traced[node], name, earlier or ((source, column),))
    return traced


def inherited_descriptions(app: Application, made: Mapping[str, Sources]) -> dict[str, str]:
    """Return the descriptions of columns that have one dataset column as their only source."""
    descriptions = {
        (LineageNode("dataset", dataset.name), name): text
        for dataset in app.datasets
        for name, text in dataset.column_descriptions
    }
    sole = {name: sources[0] for name, sources in made.items() if len(sources) == 1}
    return {name: descriptions[source] for name, source in sole.items() if source in descriptions}


def masked_columns(app: Application, made: Mapping[str, Sources], columns: Iterable[str]) -> set[str]:
    """Return the columns to mask: those with a sensitive source or the name of a sensitive column.

    If there are sensitive columns, columns of unknown origin are masked too.
    """
    sensitive = {
        (LineageNode("dataset", dataset.name), name.lower()) for dataset in app.datasets for name in dataset.sensitive
    }
    if not sensitive:
        return set()
    names = {name for _, name in sensitive}
    return {
        name
        for name in columns
        if name.lower() in names
        or not made.get(name)
        or any((node, column.lower()) in sensitive for node, column in made[name])
    }
