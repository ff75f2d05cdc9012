"""How far an application has come: lag and event times of its inputs, events and reports of its
runs, state sizes.

Watermarks follow from the event times in the batch log, by pure functions:

    newest event time of each source partition
    -> its watermark: newest - delay, never decreasing
    -> an operator's watermark: the lowest of all non-idle source partitions above it,
       minus the delays of the operators in between, never decreasing
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, BoundedDataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions, no_complete_version_error
from dagster_adjunct.assets.sources.open_source import open_source
from dagster_adjunct.assets.sources.version_source import Awaiting
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import as_bounded
from dagster_adjunct.assets.versions.version import datetime_from_micros
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.batch_log.event_times import PartitionTimes, TimeState
from dagster_adjunct.orchestration.batch_log.intent import Intent, Offsets, of_stream
from dagster_adjunct.orchestration.operators.event_times import EventTime
from dagster_adjunct.orchestration.operators.operator import watermark_inputs
from dagster_adjunct.orchestration.operators.records import InputSpec
from dagster_adjunct.orchestration.operators.waiting import HeldRecord
from dagster_adjunct.orchestration.startpoints.positions import choose_default_offset
from dagster_adjunct.resources.errors import MalformedDocumentError, StreamNotFoundError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.times import subtract_span

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far an application has come in one input stream.

    `unread` has the next offset of each partition with unread records; `lag` counts unread offsets,
    including those of replays. `due` says why a run is needed regardless of the lag; "" for no
    reason.
    """

    lag: int = 0
    unread: Offsets = field(default_factory=dict)
    due: str = ""


def ignore_disabled_startpoints(app: Application, state: ApplicationState) -> ApplicationState:
    """Return the state as a run uses it: without startpoints and replays if the application
    disables them.
    """
    if app.startpoints:
        return state
    offsets = state.offsets.model_copy(update={"resolved": {}, "replays": {}})
    return state.model_copy(update={"offsets": offsets})


def snapshot_system(systems: Mapping[str, StreamSystem], stream: str) -> StreamSystem:
    """Return a snapshot of a stream's system, for questions about this stream ("system.stream")."""
    name, short = split_stream_name(stream)
    return systems[name].snapshot(short)


def measure_stream_progress(
    system: StreamSystem, source: InputSpec, state: ApplicationState
) -> StreamProgress:
    """Return how far the application has come in one input stream; `system` is a snapshot for that
    stream.

    There is nothing to read of a stream that does not exist. A partition without a stored position
    counts if a run would read it from its beginning.
    """
    name, stream = split_stream_name(source.stream)
    try:
        info = system.info(stream)
    except StreamNotFoundError:
        return StreamProgress()
    ssps = [SystemStreamPartition(name, stream, number) for number in range(info.partitions)]
    upcoming = system.upcoming(ssps)
    starts = _list_stored_positions(state, ssps)
    if info.was_recreated(state.offsets.streams.get(source.stream)):
        due = f"{source.stream} was deleted and recreated"
    else:
        due = _describe_lost_end(system, starts, upcoming)
    fresh = [ssp for ssp in ssps if ssp not in starts]
    if fresh:
        begins_at_oldest = choose_default_offset(source, info, system) == "oldest"
        if begins_at_oldest:
            starts |= system.oldest(fresh)
        elif not due:
            due = f"{source.stream}: no position is stored yet"
    unread = {}
    lag = 0
    for ssp, offset in starts.items():
        behind = system.distance(ssp, offset, upcoming[ssp])
        lag += behind
        if behind:
            unread[ssp] = offset
    return StreamProgress(lag + _count_replayed(system, source, state), unread, due)


def _list_stored_positions(
    state: ApplicationState, ssps: Iterable[SystemStreamPartition]
) -> Offsets:
    """Return the offset at which each of these partitions is read next, if it is stored: that of
    its startpoint, else the checkpoint.
    """
    positions = {}
    for ssp in ssps:
        start = state.offsets.resolved.get(ssp)
        if start is not None:
            positions[ssp] = start.offset
        elif ssp in state.checkpoint:
            positions[ssp] = state.checkpoint[ssp]
    return positions


def _count_replayed(system: StreamSystem, source: InputSpec, state: ApplicationState) -> int:
    """Return the number of offsets of a stream that replays have still to read."""
    count = 0
    for replay in state.offsets.replays.values():
        if replay.ssp.qualified_stream == source.stream:
            count += system.distance(replay.ssp, replay.next, replay.until)
    return count


def _describe_lost_end(system: StreamSystem, starts: Offsets, upcoming: Offsets) -> str:
    """Return why a run is needed if a partition ends before its position; "" if none does."""
    for ssp, start in starts.items():
        if system.compare(start, upcoming[ssp]) > 0:
            return f"{ssp} ends before the offset that comes next"
    return ""


def position_to_json(app: Application, state: ApplicationState) -> dict[str, object]:
    """Return the application's position, in the streams that it reads now, as JSON values; it
    changes with every batch and every startpoint.
    """
    offsets = state.offsets
    checkpoint = {}
    for ssp, at in state.checkpoint.items():
        if ssp.qualified_stream in app.inputs or ssp.qualified_stream in app.restated:
            checkpoint[str(ssp)] = at
    return {
        "checkpoint": checkpoint,
        "resolved": {str(ssp): start.id for ssp, start in offsets.resolved.items()},
        "replays": {key: replay.next for key, replay in offsets.replays.items()},
        "opened": {str(ssp): epoch for ssp, epoch in offsets.epochs.highest.items()},
    }


def describe_unfinished(state: ApplicationState) -> tuple[str, ...]:
    """Return what a run has begun and not finished, one text each."""
    unfinished = []
    if state.open is not None:
        unfinished.append(f"batch {state.open.batch} is open")
    replays = sorted({str(replay.ssp) for replay in state.offsets.replays.values()})
    if replays:
        unfinished.append(f"a replay is under way on {', '.join(replays[:3])}")
    return tuple(unfinished)


def find_version_delivered_to_all(
    lake: Lake, systems: Mapping[str, StreamSystem], datasets: Sequence[BoundedDataset]
) -> NextVersion:
    """Return the next version that a dataset, or all members of a version set, can build; without
    one, what they wait for.

    A member that has published the version already, before it joined the set, is not waited for.
    """
    delivered = {}
    for dataset in datasets:
        delivered[dataset.name] = find_delivered_version(lake, systems, dataset)
    versions = dict.fromkeys(found.version for found in delivered.values())
    for version in versions:
        if version is None:
            continue
        others = [dataset for dataset in datasets if delivered[dataset.name].version != version]
        if all(_has_taken(lake, other, version) for other in others):
            return NextVersion(version)
    if len(datasets) == 1:
        return NextVersion(None, delivered[datasets[0].name].awaited)
    awaited = [f"{name}: {found.describe()}" for name, found in delivered.items()]
    return NextVersion(None, "; ".join(awaited))


def _has_taken(lake: Lake, dataset: BoundedDataset, version: str) -> bool:
    """Return whether a dataset has published this version already."""
    manifest = StoredVersions(lake, dataset).manifest()
    return manifest is not None and version in as_bounded(manifest).taken


def list_dataset_streams(app: Application) -> tuple[str, ...]:
    """Return the streams that the application's datasets are built from, each once."""
    streams = dict.fromkeys(dataset.stream for dataset in app.datasets)
    return tuple(stream for stream in streams if stream is not None)


def read_stream_ends(system: StreamSystem, stream: str) -> dict[str, str]:
    """Return the end offset of each partition of a stream; empty if the stream does not exist."""
    try:
        ends = system.upcoming(system.partitions(split_stream_name(stream)[1]))
    except StreamNotFoundError:
        return {}
    return {str(ssp): end for ssp, end in ends.items()}


def describe_waiting_datasets(
    lake: Lake, systems: Mapping[str, StreamSystem], app: Application
) -> tuple[str, ...]:
    """Return a text for each dataset with `bootstrap` that can't be built yet: what it waits for.

    A dataset has no text if it has a version, or if a run can build its first one.
    """
    waiting = []
    for dataset in app.datasets:
        if dataset.bootstrap:
            try:
                waiting.append(_describe_waiting(lake, systems, dataset))
            except StreamNotFoundError as error:
                waiting.append(error.problem)
    return tuple(text for text in waiting if text)


def _describe_waiting(
    lake: Lake, systems: Mapping[str, StreamSystem], dataset: AdjunctDataset
) -> str:
    """Return what a dataset waits for; "" if it has a version, or a run builds it. Raises
    StreamNotFoundError for a dataset of a stream that does not exist.
    """
    store = StoredVersions(lake, dataset)
    try:
        manifest = store.manifest()
    except MalformedDocumentError:
        if not dataset.follows_changes:
            raise
        manifest = None  # a run rebuilds the table
    if manifest is not None and manifest.version is not None:
        return ""
    if dataset.follows_changes:  # a run bootstraps it
        system, stream = dataset.system_stream
        systems[system].info(stream)  # raises if the stream does not exist
        return ""
    if dataset.versions is not None:
        return f"dataset {dataset.name!r} has no version yet: materialise a partition of its asset"
    awaiting = store.awaiting(systems, manifest)
    if awaiting is None:
        return ""
    return no_complete_version_error(dataset, manifest, awaiting).problem


@dataclass(frozen=True, slots=True)
class NextVersion:
    """The next completely delivered version of a bounded dataset; None if there is none, with what
    is `awaited`.

    `outside` names versions that have arrived, but are no partitions of the dataset.
    """

    version: str | None
    awaited: str = ""
    outside: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return in words that the version is there, or what is awaited."""
        if self.version is None:
            return self.awaited
        return f"version {self.version} is there"


def find_delivered_version(
    lake: Lake, systems: Mapping[str, StreamSystem], dataset: BoundedDataset
) -> NextVersion:
    """Return the next completely delivered version of a bounded dataset, or what it waits for."""
    try:
        source = open_source(systems, dataset, lake)
    except StreamNotFoundError as error:
        return NextVersion(None, error.problem.rstrip("."))
    stored = StoredVersions(lake, dataset).manifest()
    manifest = source.first_manifest() if stored is None else as_bounded(stored)
    arrived = source.next(as_bounded(source.follow_repartition(manifest) or manifest))
    if not isinstance(arrived, Awaiting):
        return NextVersion(arrived.version, "", arrived.outside)
    if arrived.missing:
        version = f"version {arrived.version}" if arrived.version else "the next one"
        awaited = f"{version} waits for {', '.join(arrived.missing)}"
    else:
        awaited = "nothing was delivered"
    return NextVersion(None, awaited, arrived.outside)


@dataclass(frozen=True, slots=True)
class StepEvent:
    """An event of a run of the step; `batch` is the batch that it belongs to, else the last one
    before it, or 0.

    The values of `what`, in order of time, with the keys of `detail` in parentheses:

    - "lease" (text): the run waited for another run, or took over from it.
    - "planned" (numbers of inputs, operators, outputs, tables and datasets): once a run.
    - "startpoint" (text): a startpoint was resolved or applied, or a replay began or ended.
    - "table" (report): a dataset that lives for one run was built, or has changed.
    - "lost" (text): retention deleted records before they were read.
    - "analysis": the dry run begins; once a run, and when columns change.
    - "intent" (records, unit, versions, few: whether it takes one task a stage, restates: what it
      restates, "" for nothing): the intent is committed.
    - "output" (output): an output is about to be written.
    - "again" (text): the batch is retried after a store failure, or computed by Spark after all.
    - "outputs": all outputs are written.
    - "batch" (records so far, unit, counters, watermarks, in_process: whether it was computed
      without Spark): its end is committed.
    - "caught-up": the run has read its inputs to their ends.
    - "follow" (text): a run stays, or ends after that.
    """

    what: str
    batch: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the event as one line for logs."""
        detail = self.detail
        match self.what:
            case "caught-up":
                return f"caught up after batch {self.batch}"
            case "table":
                return str(detail["report"].summary())
            case "lease" | "startpoint" | "lost" | "follow":
                return str(detail["text"])
            case "planned":
                counted = []
                for kind, count in detail.items():
                    if count:
                        plural = "s" if count > 1 else ""
                        counted.append(f"{count} {kind}{plural}")
                return f"planned: {', '.join(counted)}"
        parts = [_EVENT_TEXTS[self.what].format(**{"unit": "records", **detail})]
        if detail.get("restates"):
            parts.append(detail["restates"])
        if detail.get("in_process"):
            parts.append("computed without Spark")
        elif detail.get("few"):
            parts.append("one task a stage, as they are few")
        parts += [times.describe() for times in detail.get("watermarks", ())]
        return f"batch {self.batch}: {'; '.join(parts)}"


_EVENT_TEXTS = {
    "again": "{text}",
    "analysis": "checking all operators, over no records",
    "intent": "{records:,} {unit}, dataset versions {versions}",
    "output": "writing {output}",
    "outputs": "all outputs written",
    "batch": "committed; {records:,} {unit} so far",
}


def new_planned_event(app: Application) -> StepEvent:
    """Return the event of a plan without conflicts: the numbers of inputs, operators, outputs,
    tables and datasets.
    """
    numbers = {
        "input": len(app.inputs),
        "operator": len(app.operators),
        "output": len(app.outputs) + len(app.output_tables),
        "table": len(app.tables),
        "dataset": len(app.datasets),
    }
    return StepEvent("planned", 0, numbers)


MAX_VERSIONS = 100
MAX_STARTPOINTS = 10_000
"""How many versions of a dataset and lines about startpoints a report has; a run that stays may
have more of them.
"""


@dataclass(frozen=True, slots=True)
class EventTimeReport:
    """How far a run has come in event time: the `watermarks` of the inputs that declare event
    times, and the size of each state table.

    `held` are the first records of partitions that wait for a dataset, as the run last found them.
    """

    watermarks: tuple[InputTimes, ...] = ()
    state_sizes: Mapping[str, StateSize] = field(default_factory=dict)
    held: tuple[HeldRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class StepReport(Report):
    """What one run of the step did. Counters are of this run, by output or operator; `state` is the
    application's state after it.

    `versions` are the dataset versions that its batches read, the last MAX_VERSIONS of each.
    `startpoints` describes the startpoints that were resolved and applied, and the replays that
    began and ended (the last lines). `measured` has the metrics of each remote table in this run's
    tasks, `seconds` the time by stage. `few_batches` took one task a stage, `in_process_batches`
    were computed without Spark. `samples` describe some records that did not meet an expectation,
    by operator: keys and positions, without sensitive values.
    """

    batches: int
    caught_up: bool
    counters: dict[str, dict[str, int]]
    versions: dict[str, list[str]]
    seconds: dict[str, float]
    state: ApplicationState
    startpoints: tuple[str, ...] = ()
    measured: dict[str, TableMetrics] = field(default_factory=dict)
    few_batches: int = 0
    in_process_batches: int = 0
    event_time: EventTimeReport = field(default_factory=EventTimeReport)
    samples: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values, among them those of `event_time`."""
        facts = Report.to_json(self)
        facts |= facts.pop("event_time")
        facts["measured"] = {name: metrics.to_dict() for name, metrics in self.measured.items()}
        return facts


@dataclass(frozen=True, slots=True)
class Measured:
    """The event times of a batch's records of one stream, by partition number.

    `newest` has the latest event time in microseconds (no entry if no record has one), `read_to`
    the offset after the last. `behind` are the records behind the watermark, if any: partition,
    offset, and the watermark at that record.
    """

    newest: Mapping[int, int] = field(default_factory=dict)
    read_to: Mapping[int, int] = field(default_factory=dict)
    behind: pa.Table | None = None

    def newest_in(self, partition: int) -> datetime | None:
        """Return the latest event time of a partition's records; None if none has one."""
        if partition not in self.newest:
            return None
        return datetime_from_micros(self.newest[partition])


def declared_event_times(app: Application) -> dict[str, EventTime]:
    """Return the declared event times of the input streams that have one."""
    declared = {}
    for name, source in app.inputs.items():
        if source.event_time is not None:
            declared[name] = source.event_time
    return declared


def times_at_batch_start(app: Application, state: ApplicationState, intent: Intent) -> TimeState:
    """Return the event times with which a batch begins: the stored ones, with an entry for each
    source partition that is known by now.

    Partitions with records for a later batch (`Intent.left`) count as active, so that a backlog
    never makes them idle.
    """
    declared = declared_event_times(app)
    partitions = dict(state.times.partitions)
    for ssp in intent.left.waiting:
        if ssp in partitions:
            active = {"active_at": intent.clock}
            partitions[ssp] = partitions[ssp].model_copy(update=active)
    for ssp in sorted({*state.checkpoint, *intent.ranges}):
        if ssp.qualified_stream in declared:
            partitions.setdefault(ssp, PartitionTimes(active_at=intent.clock))
    return state.times.model_copy(update={"partitions": partitions})


def times_after_batch(
    app: Application,
    times: TimeState,
    measured: Mapping[str, Measured],
    clock: datetime,
    ranges: Mapping[SystemStreamPartition, tuple[int, int]] | None = None,
) -> TimeState:
    """Return the event times after a batch, in whose records these times were `measured`, by
    stream.

    `ranges` are the offsets [from, to) that it read, of partitions with numeric offsets.
    """
    spans = ranges or {}
    declared = declared_event_times(app)
    partitions = dict(times.partitions)
    for ssp, prior in times.partitions.items():
        read = measured.get(ssp.qualified_stream, Measured())
        read_to = read.read_to.get(ssp.partition)
        if read_to is None:  # the batch has no record of it
            continue
        skipped = prior.skipped
        if ssp in spans:
            start, end = spans[ssp]
            skipped = prior.skipped_after(start, end)
            # Offsets without records, such as those of Kafka's transactions, were not skipped.
            read_to = max(read_to, end)
        newest = _latest(prior.newest, read.newest_in(ssp.partition))
        watermark = prior.watermark
        if newest is not None:
            mark = subtract_span(newest, declared[ssp.qualified_stream].delay)
            watermark = _latest(watermark, mark)
        partitions[ssp] = PartitionTimes(
            active_at=clock,
            newest=newest,
            watermark=watermark,
            read_to=max(prior.read_to, read_to),
            skipped=skipped,
        )
    after = times.model_copy(update={"partitions": partitions})
    operators = dict(times.operators)
    for name in watermark_inputs(app.operators):
        operator_watermark = compute_operator_watermark(app, after, name, clock)
        if operator_watermark is not None:
            operators[name] = operator_watermark
    return after.model_copy(update={"operators": operators})


def _latest(*times: datetime | None) -> datetime | None:
    """Return the latest of these times that are known."""
    return max((time for time in times if time is not None), default=None)


def compute_operator_watermark(
    app: Application, times: TimeState, name: str, clock: datetime
) -> datetime | None:
    """Return the watermark of a stateful operator, by name, at these times of its sources; it is
    never below its former watermark. None before any.
    """
    lowest = _find_lowest_mark(app, times, name, clock).watermark
    return _latest(lowest, times.operators.get(name))


@dataclass(frozen=True, slots=True)
class _LowestMark:
    """The source partition that holds an operator's watermark back, None if all are idle; and the
    watermark that it allows, None before any record.
    """

    partition: SystemStreamPartition | None
    watermark: datetime | None


def _find_lowest_mark(
    app: Application, times: TimeState, name: str, clock: datetime
) -> _LowestMark:
    """Return the lowest watermark of the source partitions of an operator that are not idle; a
    partition without a watermark is lower than all others.
    """
    declared = declared_event_times(app)
    lowest = _LowestMark(None, None)
    for stream, delay in watermark_inputs(app.operators)[name].items():
        for ssp, prior in sorted(of_stream(times.partitions, stream).items()):
            if is_idle(declared.get(stream), prior, clock):
                continue
            if prior.watermark is None:
                return _LowestMark(ssp, None)
            mark = subtract_span(prior.watermark, delay)
            if lowest.watermark is None or mark < lowest.watermark:
                lowest = _LowestMark(ssp, mark)
    return lowest


def find_holding_partitions(
    app: Application, times: TimeState, clock: datetime
) -> dict[str, SystemStreamPartition | None]:
    """Return, by stateful operator, the source partition that holds its watermark back; None if
    all are idle.
    """
    holding = {}
    for name in watermark_inputs(app.operators):
        holding[name] = _find_lowest_mark(app, times, name, clock).partition
    return holding


def is_idle(declared: EventTime | None, times: PartitionTimes, clock: datetime) -> bool:
    """Return whether a source partition is not waited for, because it had no record for the
    input's `idle_after`.
    """
    if declared is None or declared.idle_after is None:
        return False
    return clock - times.active_at >= declared.idle_after


@dataclass(frozen=True, slots=True)
class InputTimes(Report):
    """The event times of one input. Its `watermark` is that of the partition `held_by`, which holds
    it back; None if that had no record.

    `lag` is how far the watermark is behind the clock, `behind_newest` behind the newest event
    time. `idle` partitions are not waited for; if all are idle, the newest watermark of any counts.
    """

    stream: str
    watermark: datetime | None
    newest: datetime | None
    lag: timedelta | None
    behind_newest: timedelta | None
    held_by: str | None
    idle: tuple[str, ...]
    max_lag: timedelta | None = None

    @property
    def exceeds(self) -> bool:
        """Whether the lag exceeds `max_lag`.

        Also true if a partition without records holds the watermark back; but not before the input
        has any record.
        """
        if self.max_lag is None or self.newest is None:
            return False
        return self.lag is None or self.lag > self.max_lag

    def describe(self) -> str:
        """Return the watermark of the input and its lag, as one line."""
        held = "" if self.held_by is None else f", held back by {self.held_by}"
        if self.watermark is None or self.lag is None:
            return f"{self.stream}: no watermark yet{held}"
        lag = timedelta(seconds=round(self.lag.total_seconds()))
        return (
            f"{self.stream}: watermark {format_time(self.watermark)}, {lag} behind the clock{held}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the times as JSON values, durations in seconds; without the declared `max_lag`."""
        facts = Report.to_json(self)
        del facts["max_lag"]
        return facts


def format_time(moment: datetime | None) -> str:
    """Return a time as command-line tables display it, "-" for none."""
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def measure_input_times(
    app: Application, times: TimeState, clock: datetime
) -> tuple[InputTimes, ...]:
    """Return the event times of each input that declares them, by this clock."""
    measured = []
    for name, declared in declared_event_times(app).items():
        partitions = of_stream(times.partitions, name)
        idle = []
        marks = {}
        for ssp, known in sorted(partitions.items()):
            if is_idle(declared, known, clock):
                idle.append(str(ssp))
            else:
                marks[ssp] = known.watermark
        if marks:
            held = _find_lowest(marks)
            watermark = marks[held]
        else:  # no partition is active
            held = None
            watermark = _latest(*(known.watermark for known in partitions.values()))
        newest = _latest(*(known.newest for known in partitions.values()))
        input_times = InputTimes(
            stream=name,
            watermark=watermark,
            newest=newest,
            lag=_subtract(clock, watermark),
            behind_newest=_subtract(newest, watermark),
            held_by=None if held is None else str(held),
            idle=tuple(idle),
            max_lag=declared.max_lag,
        )
        measured.append(input_times)
    return tuple(measured)


def _subtract(later: datetime | None, earlier: datetime | None) -> timedelta | None:
    """Return the time between the two; None if one is unknown."""
    if later is None or earlier is None:
        return None
    return later - earlier


def _find_lowest(marks: Mapping[SystemStreamPartition, datetime | None]) -> SystemStreamPartition:
    """Return the first partition without a watermark; if all have one, that with the lowest."""
    known = []
    for ssp, mark in marks.items():
        if mark is None:
            return ssp
        known.append((mark, ssp))
    _, lowest = min(known)
    return lowest


@dataclass(frozen=True, slots=True)
class StateSize:
    """The rows and bytes in a state table's files, including expired rows that are not dropped yet.

    `kept_for` says what the state is for, as in the plan.
    """

    rows: int
    bytes: int
    kept_for: str = ""


def measure_state_sizes(lake: Lake, names: Iterable[str]) -> dict[str, StateSize]:
    """Return the sizes of those datasets that are state tables."""
    sizes = {}
    for name in names:
        _, manifest = DatasetLog(lake, name).read()
        if manifest is None or manifest.declaration.expires is None:
            continue
        rows = 0
        size = 0
        for generation in manifest.served_generations:
            rows += sum(file.rows for file in generation.files)
            size += sum(file.size for file in generation.files)
        sizes[name] = StateSize(rows, size, manifest.declaration.kept_for)
    return sizes
