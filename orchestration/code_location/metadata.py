"""Dagster metadata of datasets, streams, tables and runs; failures, previews and column lineage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import dagster as dg
from pydantic import BaseModel

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.unbounded.progress import PartitionLag
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import OutputStream
from dagster_adjunct.orchestration.application.lineage import dataset_source
from dagster_adjunct.orchestration.operators.lookups import RESTATED
from dagster_adjunct.orchestration.operators.stream_facts import (
    ColumnSources,
    LineageNode,
    Sources,
    add_sources,
    identity_sources,
    sources_from_sql,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.code_lines import CodeLine
from dagster_adjunct.resources.file_streams.overview import count_files
from dagster_adjunct.resources.file_streams.streams import FileStreams, find_source_url
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import format_nested, to_json_value
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.values import python_rows
from dagster_adjunct.resources.spark.tasks import find_adjunct_error
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.table_backends.columns import describe_function
from dagster_adjunct.resources.tables.table import AnyTable

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
    from dagster_adjunct.orchestration.step.progress import StepReport

# Tag of a materialization's data version.
DATA_VERSION_TAG = "dagster/data_version"
DATASET = "adjunct/dataset"
STREAM = "adjunct/stream"
_SHOWN_FILES = 10


def column_schema(
    schema: Schema, descriptions: Mapping[str, str] | None = None
) -> dg.MetadataValue:
    """Return a schema as metadata, with Spark's type names and column descriptions."""
    return _table_schema(schema.types, descriptions or {})


def lineage_metadata(
    made: ColumnSources, key_of: Callable[[LineageNode], dg.AssetKey | None]
) -> dict[str, Any]:
    """Return the column lineage as metadata, empty if it is unknown."""
    deps: dict[str, list[dg.TableColumnDep]] = {}
    for name, sources in made.items():
        for node, column in sources:
            key = key_of(node)
            if key is not None:
                deps.setdefault(name, []).append(dg.TableColumnDep(key, column))
    if not deps:
        return {}
    return {"dagster/column_lineage": dg.TableColumnLineage(deps)}


def dataset_metadata(report: AdvanceReport, uri: str) -> dict[str, Any]:
    """Return the metadata of an advance: version, rows, schema, offsets, decision, counters, and
    what it waits for.

    Rows are omitted if deltas would have to be merged to count them.
    """
    facts = {
        "adjunct/action": report.action,
        "adjunct/version": report.version or "none",
        "adjunct/offsets": dg.MetadataValue.json(dict(report.offsets)),
    }
    for name, count in report.counters.items():
        facts[f"adjunct/records_{name}"] = count
    facts |= _timing_metadata(report.seconds)
    facts |= {
        "dagster/uri": uri,
        "dagster/storage_kind": "parquet",
        "dagster/row_count": report.rows,
        "adjunct/waiting": _list(report.waiting),
        "adjunct/decision": _document(report.decision),
        "adjunct/note": report.note or None,
        "adjunct/warnings": _list(report.warnings),
    }
    if report.waiting_since is not None:
        facts["adjunct/waiting_since"] = dg.MetadataValue.timestamp(report.waiting_since)
    if report.schema is not None:
        facts["dagster/column_schema"] = column_schema(report.schema)
    return _known(facts)


def _list(items: Collection[object]) -> dg.MetadataValue | None:
    """Return items as metadata, None if there are none."""
    if items:
        return dg.MetadataValue.json(list(items))
    return None


def _document(value: BaseModel | None) -> dg.MetadataValue | None:
    """Return a stored document as metadata, None if there is none."""
    if value is None:
        return None
    return dg.MetadataValue.json(value.model_dump(mode="json"))


def _by_partition(values: Mapping[SystemStreamPartition, object]) -> dg.MetadataValue:
    """Return values by partition as metadata."""
    return dg.MetadataValue.json({str(ssp): value for ssp, value in values.items()})


def _known(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata without the keys whose value is None."""
    found = {}
    for name, value in metadata.items():
        if value is not None:
            found[name] = value
    return found


def version_metadata(manifest: DatasetManifest) -> dict[str, Any]:
    """Return the number of retained versions, the served one's name, the pin, the rejected
    versions, and the head.

    The head, the version to serve without a pin, is left out if it is served. Empty for unbounded
    datasets.
    """
    if manifest.versions_are_commits:
        return {}
    rejected = []
    retained = 0
    for ref in manifest.listed:
        retained += ref.state == "sealed"
        if ref.state == "rejected":
            rejected.append({"id": ref.id, "name": ref.name, "reason": ref.reason})
    facts = {
        "adjunct/retained": retained,
        "adjunct/pin": _document(manifest.pin),
        "adjunct/head": manifest.head,
        "adjunct/rejected": _list(rejected),
    }
    served = manifest.ref(manifest.served_id or "")
    if served is not None:
        facts["adjunct/name"] = served.name
        if manifest.head == served.id:
            del facts["adjunct/head"]
    return _known(facts)


def lag_metadata(lags: Mapping[SystemStreamPartition, PartitionLag]) -> dict[str, Any]:
    """Return how far an unbounded dataset is behind its stream: by partition, and as totals,
    which Dagster plots. The seconds are left out if those of a partition are unknown.
    """
    records = 0
    lost = 0
    for lag in lags.values():
        records += lag.records
        lost += lag.lost
    facts = {
        "adjunct/lag": _by_partition({ssp: lag.to_json() for ssp, lag in lags.items()}),
        "adjunct/lag_records": records,
        "adjunct/lost_offsets": lost or None,
    }
    longest = _largest([lag.seconds for lag in lags.values()])
    facts["adjunct/lag_seconds"] = longest
    return _known(facts)


def _largest(seconds: Sequence[float | None]) -> float | None:
    """Return the largest of these times, rounded; None if one is unknown, or if there are none."""
    known = []
    for each in seconds:
        if each is None:
            return None
        known.append(each)
    return round(max(known), 1) if known else None


def served_metadata(manifest: DatasetManifest, uri: str) -> dict[str, Any]:
    """Return the metadata of the version that a dataset serves, without the report of an
    advance.
    """
    facts: dict[str, Any] = {
        "adjunct/version": manifest.served_id or "none",
        "dagster/uri": uri,
        "adjunct/change": _document(manifest.change),
    }
    if manifest.version is not None:
        facts["dagster/column_schema"] = column_schema(manifest.version.columns)
        facts["dagster/row_count"] = manifest.version.rows
    return _known(facts) | version_metadata(manifest)


def stream_metadata(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    name: str,
    descriptions: Mapping[str, str] | None = None,
) -> dict[str, Any] | None:
    """Return the metadata of the stream "system.stream", None if it does not exist."""
    system_name, stream = split_stream_name(name)
    system = systems[system_name]
    try:
        info = system.info(stream)
    except errors.StreamNotFoundError:
        return None
    ssps = system.partitions(stream)
    oldest = system.oldest(ssps)
    upcoming = system.upcoming(ssps)
    facts: dict[str, Any] = {
        "adjunct/oldest": _by_partition(oldest),
        "adjunct/upcoming": _by_partition(upcoming),
    }
    if system.capabilities.counts_unread:
        whole = {ssp: OffsetRange(oldest[ssp], upcoming[ssp]) for ssp in ssps}
        facts["dagster/row_count"] = system.records_between(whole)
    if system_name == "lake":
        facts["dagster/uri"] = f"{lake.url}/{lake.stream_prefix(stream)}"
    if isinstance(system, FileStreams):
        facts |= _file_stream_metadata(system, stream)
    if info.schema is not None:
        facts["dagster/column_schema"] = column_schema(info.schema, descriptions)
    return _known(facts)


def _file_stream_metadata(system: FileStreams, stream: str) -> dict[str, Any]:
    """Return where the files of a stream come from, how many were admitted and set aside, and how
    many wait.
    """
    state = system.state(stream)
    waiting = system.waiting(stream)
    set_aside = {} if state is None else state.set_aside
    facts: dict[str, Any] = {
        "dagster/uri": system.declaration(stream).source_url or None,
        "adjunct/files": count_files(state),
        "adjunct/set_aside": sum(set_aside.values()),
        "adjunct/waiting": len(waiting),
    }
    if set_aside:
        facts["adjunct/set_aside_by"] = dg.MetadataValue.json(dict(set_aside))
    if waiting:
        shown = [f"{path}: {why}" for path, why in sorted(waiting.items())[:_SHOWN_FILES]]
        facts["adjunct/waiting_files"] = dg.MetadataValue.json(shown)
    return facts


def declared_metadata(dataset: AdjunctDataset) -> dict[str, Any]:
    """Return the metadata of a dataset's declaration: key, input and partitioning."""
    if dataset.broadcast:
        partitioning = "one broadcast copy"
    else:
        partitioning = f"{dataset.partitions} by {', '.join(dataset.partition_by)}"
    facts = {
        DATASET: dataset.name,
        "adjunct/kind": dataset.kind,
        "adjunct/key": dg.MetadataValue.json(list(dataset.key)),
        "adjunct/input": str(dataset.input),
        "adjunct/partitioning": partitioning,
        "adjunct/holds_back": dataset.bootstrap,
        "adjunct/partitions": dataset.partitions,
        "adjunct/version_set": dataset.version_set,
    }
    if dataset.columns.names is not None:
        facts["adjunct/columns"] = dg.MetadataValue.json(list(dataset.columns.names))
    return _known(facts)


def declared_stream_metadata(name: str, output: OutputStream | None) -> dict[str, Any]:
    """Return the name of a stream, the declared key and partitions of an output stream, and where
    the files of a stream of files are.
    """
    if output is None:
        url = find_source_url(name)
        return _known({STREAM: name, "dagster/uri": url or None})
    key = dg.MetadataValue.json(list(output.key))
    return {STREAM: name, "adjunct/key": key, "adjunct/partitions": output.partitions}


def table_metadata(
    table: AnyTable, descriptions: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the declared key, location and columns of a remote table."""
    declared = _describe_table(table)
    facts = {
        "adjunct/key": dg.MetadataValue.json(list(table.key)),
        "dagster/storage_kind": declared.get("backend") or None,
    }
    if declared.get("columns"):
        facts["dagster/column_schema"] = _table_schema(declared["columns"], descriptions or {})
    if declared.get("table"):
        parts = [declared.get("schema"), declared["table"]]
        facts["dagster/table_name"] = ".".join(filter(None, parts))
    return _known(facts)


def backend_name(table: AnyTable) -> str:
    """Return the registered name of a remote table's backend ("sqlite"), "" if it is not
    registered.
    """
    return str(_describe_table(table).get("backend", ""))


def step_metadata(report: StepReport) -> dict[str, Any]:
    """Return the metadata that all outputs of a step share: batches, versions, checkpoint, joins,
    startpoints, times.

    Also the largest lag of an input's watermark in seconds, and the sizes of state.
    """
    state = report.state
    json = dg.MetadataValue.json
    joins = {name: counts for name, counts in report.counters.items() if "unmatched" in counts}
    lost = sum(counts.get("lost_offsets", 0) for counts in report.counters.values())
    facts = {
        "adjunct/batches": report.batches,
        "adjunct/few_batches": report.few_batches,
        "adjunct/in_process_batches": report.in_process_batches,
        "adjunct/last_batch": state.batch,
        "adjunct/caught_up": report.caught_up,
        "adjunct/versions": json(report.versions),
        "adjunct/checkpoint": json({str(ssp): at for ssp, at in state.checkpoint.items()}),
        "adjunct/joins": json(joins),
    }
    for name, counts in joins.items():
        for what in ("unmatched", "before_history", "null_times", "early", "late_changes"):
            facts[f"adjunct/{what}/{name}"] = counts.get(what)
    for what, count in report.counters.get(RESTATED, {}).items():
        facts[f"adjunct/{RESTATED}_{what}"] = count
    facts |= _timing_metadata(report.seconds)
    facts["adjunct/lost_offsets"] = lost or None
    facts |= _list_metadata(report)
    facts["adjunct/watermark_lag_seconds"] = _largest_lag(report)
    for name, size in report.event_time.state_sizes.items():
        for fact, value in asdict(size).items():
            facts[f"adjunct/state/{name}/{fact}"] = value
    return _known(facts)


def _list_metadata(report: StepReport) -> dict[str, Any]:
    """Return what a step's startpoints, replays and watermarks are, without empty lists."""
    state = report.state
    offsets = state.offsets
    marks = {name: mark.isoformat() for name, mark in state.times.operators.items()}
    lists: dict[str, Any] = {
        "startpoints": list(report.startpoints),
        "held": [record.describe() for record in report.event_time.held],
        "epochs": {str(ssp): epoch for ssp, epoch in offsets.epochs.main.items()},
        "replays": [replay.model_dump(mode="json") for replay in offsets.replays.values()],
        "watermarks": [times.to_json() for times in report.event_time.watermarks],
        "operator_watermarks": marks,
    }
    return {
        f"adjunct/{name}": dg.MetadataValue.json(value) for name, value in lists.items() if value
    }


def _largest_lag(report: StepReport) -> float | None:
    """Return the largest lag of an input's watermark in seconds; None if one is unknown, or if no
    input has a watermark.
    """
    seconds = []
    for times in report.event_time.watermarks:
        seconds.append(None if times.lag is None else times.lag.total_seconds())
    return _largest(seconds)


def output_metadata(report: StepReport, name: str) -> dict[str, Any]:
    """Return one output's counters of this run and totals of all runs.

    For a remote table also its measurements in this run, with durations in seconds.
    """
    counters: dict[str, float] = {}
    if name in report.measured:
        counters |= report.measured[name].to_dict()
    counters |= report.counters.get(name, {})
    facts: dict[str, Any] = {
        f"adjunct/{counter}": round(value, 6) for counter, value in counters.items()
    }
    facts["adjunct/totals"] = dg.MetadataValue.json(dict(report.state.totals.get(name, {})))
    return facts


def lookup_metadata(report: StepReport, tables: Iterable[str]) -> dict[str, Any]:
    """Return the counters and measurements of lookup tables in this run, by table."""
    facts = {}
    for name in tables:
        if name not in report.measured:
            continue
        for counter, value in report.measured[name].to_dict().items():
            if value or counter in ("reads", "found"):
                facts[f"adjunct/lookups/{name}/{counter}"] = round(value, 6)
    return facts


def _describe_table(table: AnyTable) -> dict[str, Any]:
    """Return what is declared of a table's backend, location and columns; only the columns, or
    nothing, for a function that is not registered.
    """
    function = table.write_function or table.read_function
    try:
        return describe_function(function)
    except errors.ConfigurationError:
        columns = getattr(function, "columns", None)
        if isinstance(columns, Mapping):
            return {"columns": columns}
        return {}


def _table_schema(columns: Mapping[str, str], descriptions: Mapping[str, str]) -> dg.MetadataValue:
    """Return columns, with their types and descriptions, as metadata."""
    texts = {name.lower(): text for name, text in descriptions.items()}
    shown = [dg.TableColumn(name, kind, texts.get(name.lower())) for name, kind in columns.items()]
    return dg.MetadataValue.table_schema(dg.TableSchema(shown))


def _timing_metadata(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return wall time by stage, as numbers that Dagster plots."""
    return {f"adjunct/seconds/{stage}": round(value, 3) for stage, value in seconds.items()}


def code_references(place: CodeLine | None) -> dict[str, Any]:
    """Return the metadata that links to a line of a local file, empty for an unknown place."""
    if place is None:
        return {}
    reference = dg.LocalFileCodeReference(
        file_path=place.file, line_number=place.line, label="declared here"
    )
    return {"dagster/code_references": dg.CodeReferencesMetadataValue(code_references=[reference])}


# Errors after which a new run can succeed, but a retry within this run can't.
RETRY_IN_NEW_RUN = (errors.CommitStateUnknownError, errors.LeaseLostError)
MAX_RETRIES = 2
_RETRY_SECONDS = 5.0


@contextmanager
def translate_errors(
    context: dg.AssetExecutionContext | dg.OpExecutionContext,
    *,
    retry: tuple[type[errors.AdjunctError], ...] = (errors.TransientError,),
) -> Iterator[None]:
    """Turn AdjunctErrors into Dagster failures with a next step; errors in `retry` are retried
    first.

    Other exceptions pass unchanged.
    """
    try:
        yield
    except Exception as error:
        ours = find_adjunct_error(error)
        if ours is None:
            raise
        # Not retried: the run has already waited for the application's other run to end.
        may_help = isinstance(ours, retry) and not isinstance(ours, errors.ApplicationBusyError)
        if may_help and context.retry_number < MAX_RETRIES:
            context.log.warning(f"{type(ours).__name__}, retrying in {_RETRY_SECONDS:g} s: {ours}")
            raise dg.RetryRequested(
                max_retries=MAX_RETRIES, seconds_to_wait=_RETRY_SECONDS
            ) from error
        for note in getattr(ours, "__notes__", ()):  # errors of other datasets that failed too
            context.log.error(note)
        helps_to_run_again = isinstance(ours, RETRY_IN_NEW_RUN)
        raise dg.Failure(
            description=str(ours),
            metadata={
                "error": type(ours).__name__,
                "next step": ours.next_step or "See the message.",
                "permanent": isinstance(ours, errors.PermanentError) and not helps_to_run_again,
            },
            allow_retries=False,
        ) from error


MAX_PLAN_LENGTH = 100_000  # characters; stored with each materialization of each output


def plan_metadata(planned: ExecutionPlan) -> dict[str, Any]:
    """Return a run's plan as text, because Dagster's UI does not draw Mermaid, and as a document
    for `from_json`.
    """
    text = planned.render()
    document = planned.to_json()
    backticks = re.findall("`+", text)
    fence = "`" * max([3, *(len(found) + 1 for found in backticks)])  # longer than any in the text
    shown = text if len(text) <= MAX_PLAN_LENGTH else f"{text[:MAX_PLAN_LENGTH]}\n…\n"
    metadata: dict[str, Any] = {"adjunct/plan": dg.MetadataValue.md(f"{fence}text\n{shown}{fence}")}
    if len(json.dumps(document)) <= MAX_PLAN_LENGTH:
        metadata["adjunct/plan_document"] = dg.MetadataValue.json(document)
    return metadata


MASKED = "(masked)"
MAX_PREVIEW_ROWS = 50
_MAX_CELL_LENGTH = 100


def dataset_preview(lake: Lake, dataset: AdjunctDataset, version: str, rows: int) -> dict[str, Any]:
    """Return the first `rows` entries of a version, in key order, as metadata; empty for 0 rows."""
    if not rows:
        return {}
    with open_dataset(lake, dataset.name, version=version, lease=False) as opened:
        entries = (entry for _, entry in islice(opened.items(), rows))
        return _preview_table(entries, opened.schema.names, dataset.masked)


def stream_preview(
    systems: Mapping[str, StreamSystem],
    name: str,
    rows: int,
    hidden: Callable[[Sequence[str]], Collection[str]],
) -> dict[str, Any]:
    """Return the newest `rows` records of the first partition that has records, as metadata.

    Empty for streams outside the lake. `hidden` returns which of the given columns to mask.
    """
    system_name, stream = split_stream_name(name)
    system = systems[system_name]
    if not rows or not isinstance(system, LakeStreams):
        return {}
    ssps = system.partitions(stream)
    oldest = system.oldest(ssps)
    upcoming = system.upcoming(ssps)
    for ssp in ssps:
        count = int(upcoming[ssp]) - int(oldest[ssp])
        if count > 0:
            start = str(int(upcoming[ssp]) - min(rows, count))
            table = system.read_arrow({ssp: OffsetRange(start, upcoming[ssp])})
            names = []
            for column in table.column_names:
                if not column.startswith("__"):
                    names.append(column)
            newest = python_rows(table.select(names))
            return _preview_table(newest, names, hidden(names))
    return {}


def _preview_table(
    entries: Iterable[Mapping[str, Any]], names: Sequence[str], sensitive: Collection[str]
) -> dict[str, Any]:
    """Return entries as a table in metadata, with sensitive columns masked; empty if there are
    none.
    """
    hidden = {name.lower() for name in sensitive}
    records = []
    for entry in entries:
        values = {name: _preview_value(entry.get(name)) for name in names}
        for name in names:
            if name.lower() in hidden:
                values[name] = MASKED
        records.append(dg.TableRecord(values))
    if not records:
        return {}
    schema = dg.TableSchema([dg.TableColumn(name) for name in names])
    return {"adjunct/preview": dg.MetadataValue.table(records, schema)}


def _preview_value(value: object) -> str | int | float | bool | None:
    """Return a value as a cell of the preview: a number, boolean or null as it is, all else as
    short text.
    """
    if isinstance(value, Mapping | list):
        return _cut(format_nested(value), _MAX_CELL_LENGTH)
    plain = to_json_value(value)
    if plain is None or isinstance(plain, bool | int | float):
        return plain
    return _cut(str(plain), _MAX_CELL_LENGTH)


def _cut(text: str, length: int) -> str:
    """Return the text with at most `length` characters; "…" stands for the rest."""
    if len(text) <= length:
        return text
    return f"{text[: length - 1]}…"


_MAX_TAG_LENGTH = 200


def join_shortened(texts: Iterable[str], separator: str = ", ") -> str:
    """Join as many distinct texts, at least one, as fit into one of Dagster's run tags, and add how
    many others there are.
    """
    every = list(dict.fromkeys(texts))
    shown: list[str] = []
    for text in every:
        if shown and len(separator.join([*shown, text])) > _MAX_TAG_LENGTH:
            break
        shown.append(_cut(text, _MAX_TAG_LENGTH))
    joined = separator.join(shown)
    if len(shown) < len(every):
        joined += f" and {len(every) - len(shown)} more"
    return joined


def has_ended(instance: dg.DagsterInstance, run_id: str) -> bool:
    """Whether a run has ended according to this instance; False for an unknown run."""
    run = instance.get_run_by_id(run_id)
    return run is not None and run.is_finished


def output_columns(app: Application, plan: ExecutionPlan) -> dict[LineageNode, ColumnSources]:
    """Return, for each output, the source columns (of streams and datasets) of each of its columns.

    A computed column has all columns of its expression as sources. The sources of columns that a
    function returns are unknown.
    """
    outputs: dict[LineageNode, ColumnSources] = {}
    for operator in app.operators:
        target = operator.spec.target(app)
        if target is not None:
            (source,) = operator.inputs
            for name, sources in operator.spec.written(plan.columns[source]).sources.items():
                add_sources(outputs.setdefault(target, {}), name, sources)
    return outputs


def dataset_columns(
    dataset: AdjunctDataset, stored: Iterable[str], records: Iterable[str] | None
) -> ColumnSources:
    """Return the source columns of each stored column of a dataset.

    `stored` are the names of its columns, `records` those of its input (None: unknown). A column
    has the input's column of the same name as its source, or all columns of its expression in a
    `Projection`. Empty for a dataset without a source, for an extractor that is a function, and for
    a `Projection` of an input with unknown columns.
    """
    source = dataset_source(dataset)
    if source is None:
        return {}
    if dataset.extractor is None:
        kept = list(stored)
        if records is not None:
            input_names = {name.lower() for name in records}
            kept = [name for name in kept if name.lower() in input_names]
        return identity_sources(source, kept)
    if not isinstance(dataset.extractor, Projection) or records is None:
        return {}
    of_records = identity_sources(source, records)
    computed = dict(dataset.extractor.select)
    return {name: sources_from_sql(computed.get(name, f"`{name}`"), of_records) for name in stored}


def trace_sources(outputs: Mapping[LineageNode, ColumnSources]) -> dict[LineageNode, ColumnSources]:
    """Return the outputs with their source columns traced back: a source that is a column of an
    earlier output is replaced by that column's own sources.
    """
    traced: dict[LineageNode, ColumnSources] = {}
    for node, made in outputs.items():
        traced[node] = {}
        for name, sources in made.items():
            for source, column in sources:
                earlier = None
                if source != node:
                    earlier = traced.get(source, {}).get(column)
                add_sources(traced[node], name, earlier or ((source, column),))
    return traced


def inherited_descriptions(app: Application, made: Mapping[str, Sources]) -> dict[str, str]:
    """Return the descriptions of columns that have one dataset column as their only source."""
    descriptions: dict[tuple[LineageNode, str], str] = {}
    for dataset in app.datasets:
        for name, text in dataset.presentation.column_descriptions:
            descriptions[LineageNode("dataset", dataset.name), name] = text
    inherited = {}
    for name, sources in made.items():
        if len(sources) == 1 and sources[0] in descriptions:
            inherited[name] = descriptions[sources[0]]
    return inherited


def masked_columns(
    app: Application, made: Mapping[str, Sources], columns: Iterable[str]
) -> set[str]:
    """Return the columns to mask: those with a sensitive source or the name of a sensitive column.

    If there are sensitive columns, columns of unknown origin are masked too.
    """
    sensitive: set[tuple[LineageNode, str]] = set()
    names: set[str] = set()
    for dataset in app.datasets:
        for name in dataset.masked:
            sensitive.add((LineageNode("dataset", dataset.name), name.lower()))
            names.add(name.lower())
    if not sensitive:
        return set()
    masked = set()
    for name in columns:
        sources = {(node, column.lower()) for node, column in made.get(name, ())}
        if name.lower() in names or not sources or not sources.isdisjoint(sensitive):
            masked.add(name)
    return masked
