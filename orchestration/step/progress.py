"""How far an application has come: the lag of its inputs, from the batch log and the streams alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.orchestration.batch_log.batch_log import PartitionTimes, TimeState
from dagster_adjunct.orchestration.operators.stream_facts import watermark_inputs
from dagster_adjunct.orchestration.startpoints.positions import choose_default_offset
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.common import subtract_span as long_before
from dagster_adjunct.resources.errors import MalformedDocumentError, StreamNotFoundError
from dagster_adjunct.resources.streams.system import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, Intent
    from dagster_adjunct.orchestration.operators.event_time import EventTime
    from dagster_adjunct.orchestration.operators.inputs import Input
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.system import StreamInfo, StreamSystem
    from dagster_adjunct.resources.tables.metrics import TableMetrics


@dataclass(frozen=True, slots=True)
class StreamProgress:
    """How far an application has come in one of its input streams.

    `unread` has the next offset of each partition that holds more; `lag` counts these offsets, and those of replays
    under way. `due` says what a run is needed for, however little waits; "" for nothing.
    """

    lag: int = 0
    unread: Mapping[SystemStreamPartition, str] = field(default_factory=dict)
    due: str = ""


def ignore_disabled_startpoints(app: Application, state: ApplicationState) -> ApplicationState:
    """Return what a run follows of an application's state: without startpoints where they are switched off."""
    if app.startpoints:
        return state
    return state.model_copy(update={"offsets": state.offsets.model_copy(update={"resolved": {}, "replays": {}})})


def snapshot_system(systems: Mapping[str, StreamSystem], stream: str) -> StreamSystem:
    """Return the system of the stream "system.stream" as it answers questions about that stream now."""
    name, short = split_stream_name(stream)
    return systems[name].snapshot(short)


def measure_stream_progress(system: StreamSystem, source: Input, state: ApplicationState) -> StreamProgress:
    """Return how far the application has come in one input stream, which `system` has been opened for."""
    name, stream = split_stream_name(source.stream)
    try:
        info = system.info(stream)
    except StreamNotFoundError:
        return StreamProgress()
    ssps = [SystemStreamPartition(name, stream, number) for number in range(info.partitions)]
    upcoming = system.upcoming(ssps)
    starts = {ssp: start for ssp in ssps if (start := _next_offset(state, ssp)) is not None}
    fresh = [ssp for ssp in ssps if ssp not in starts]
    due = _describe_mismatch(source, system, info, state, starts, upcoming)
    if fresh and choose_default_offset(source, info, system) == "upcoming":
        due = due or f"{source.stream}: no position is stored yet"
    elif fresh:
        starts |= system.oldest(fresh)
    lags = {ssp: system.distance(ssp, start, upcoming[ssp]) for ssp, start in starts.items()}
    replays = [replay for replay in state.offsets.replays.values() if replay.ssp.qualified_stream == source.stream]
    again = sum(system.distance(replay.ssp, replay.next, replay.until) for replay in replays)
    return StreamProgress(sum(lags.values()) + again, {ssp: starts[ssp] for ssp, lag in lags.items() if lag}, due)


def position_to_json(app: Application, state: ApplicationState) -> dict[str, object]:
    """Return where the application stands by its batch log, in JSON-able values.

    Another one after every batch, and after a startpoint also where it leads back to offsets that were passed before.
    """
    offsets = state.offsets
    return {
        "checkpoint": {str(ssp): at for ssp, at in state.checkpoint.items() if ssp.qualified_stream in app.inputs},
        "resolved": {str(ssp): start.id for ssp, start in offsets.resolved.items()},
        "replays": {key: replay.next for key, replay in offsets.replays.items()},
        "opened": {str(ssp): epoch for ssp, epoch in offsets.opened.items()},
    }


def describe_unfinished(state: ApplicationState) -> tuple[str, ...]:
    """Return what of the application a run has begun and not finished, a text each."""
    open_batch = [f"batch {state.open.batch} is open"] if state.open is not None else []
    replays = sorted({str(replay.ssp) for replay in state.offsets.replays.values()})
    return (*open_batch, *([f"a replay is under way on {', '.join(replays[:3])}"] if replays else []))


def find_version_delivered_to_all(
    lake: Lake, systems: Mapping[str, StreamSystem], datasets: Sequence[AdjunctDataset]
) -> tuple[str | None, str]:
    """Return the version that a dataset, or all members of a version set, have next and whole; else what is awaited.

    A member that has published the version already, before it joined the set, is not waited for.
    """
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.versions.manifest import as_bounded

    delivered = {dataset.name: find_delivered_version(lake, systems, dataset) for dataset in datasets}
    for version in dict.fromkeys(version for version, _ in delivered.values() if version is not None):
        without = [dataset for dataset in datasets if delivered[dataset.name][0] != version]
        manifests = [StoredVersions(lake, dataset).manifest() for dataset in without]
        if all(manifest is not None and version in as_bounded(manifest).taken for manifest in manifests):
            return version, ""
    if len(datasets) == 1:
        return None, delivered[datasets[0].name][1]
    awaited = [f"{name}: {what or f'version {version} is there'}" for name, (version, what) in delivered.items()]
    return None, "; ".join(awaited)


def list_dataset_streams(app: Application) -> tuple[str, ...]:
    """Return the streams that the application's datasets are made from, each once."""
    return tuple(dict.fromkeys(dataset.stream for dataset in app.datasets if dataset.stream is not None))


def read_stream_ends(system: StreamSystem, stream: str) -> dict[str, str]:
    """Return the end of each partition of a stream, nothing where there is none of this name."""
    try:
        return {str(ssp): end for ssp, end in system.upcoming(system.partitions(split_stream_name(stream)[1])).items()}
    except StreamNotFoundError:
        return {}


def describe_waiting_datasets(lake: Lake, systems: Mapping[str, StreamSystem], app: Application) -> tuple[str, ...]:
    """Return, for each dataset that holds the input back and can't be made yet, what it waits for.

    A dataset that has a version, or whose first one is delivered, holds nothing back: a run seals it.
    """
    from dagster_adjunct.assets.reading.no_version_errors import no_complete_version_error
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions

    waiting = []
    for dataset in app.datasets:
        if not dataset.bootstrap:
            continue
        store = StoredVersions(lake, dataset)
        try:
            manifest = store.manifest()
        except MalformedDocumentError:
            if not dataset.follows_changes:
                raise
            manifest = None  # a run builds the table anew
        if manifest is not None and manifest.version is not None:
            continue
        try:
            # What is delivered whole is sealed by the run, and an unbounded dataset bootstraps in it.
            if dataset.follows_changes:
                system, stream = dataset.system_stream
                systems[system].info(stream)
            elif dataset.versions is not None:
                waiting.append(f"dataset {dataset.name!r} has no version yet: materialise a partition of its asset")
            elif (awaiting := store.awaiting(systems, manifest)) is not None:
                waiting.append(no_complete_version_error(dataset, manifest, awaiting).problem)
        except StreamNotFoundError as error:
            waiting.append(error.problem)
    return tuple(waiting)


def find_delivered_version(
    lake: Lake, systems: Mapping[str, StreamSystem], dataset: AdjunctDataset
) -> tuple[str | None, str]:
    """Return the next version of a bounded dataset that is delivered whole, else None and what it waits for."""
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.sources.stream_source import open_source
    from dagster_adjunct.assets.sources.version_source import Awaiting
    from dagster_adjunct.assets.versions.manifest import as_bounded

    try:
        source = open_source(systems, dataset, lake)
    except StreamNotFoundError as error:
        return None, error.problem.rstrip(".")
    stored = StoredVersions(lake, dataset).manifest()
    manifest = source.first_manifest() if stored is None else as_bounded(stored)
    arrived = source.next(as_bounded(source.follow_repartition(manifest) or manifest))
    if not isinstance(arrived, Awaiting):
        return arrived.version, ""
    named = f"version {arrived.version}" if arrived.version else "the next one"
    return None, f"{named} waits for {', '.join(arrived.missing)}" if arrived.missing else "nothing was delivered"


def _next_offset(state: ApplicationState, ssp: SystemStreamPartition) -> str | None:
    resolved = state.offsets.resolved.get(ssp)
    return state.checkpoint.get(ssp) if resolved is None else resolved.offset


def _describe_mismatch(
    source: Input,
    system: StreamSystem,
    info: StreamInfo,
    state: ApplicationState,
    starts: Mapping[SystemStreamPartition, str],
    upcoming: Mapping[SystemStreamPartition, str],
) -> str:
    """Say what of the stream does not fit its checkpoint: a run then fails, and says what to do."""
    if source.reset_offset:
        return ""
    before = state.offsets.streams.get(source.stream)
    if info.was_recreated(before):
        return f"{source.stream} was deleted and made anew"
    behind = [ssp for ssp, start in starts.items() if system.compare(start, upcoming[ssp]) > 0]
    return f"{behind[0]} ends before the offset that comes next" if behind else ""


_FEW = "; one task a stage, as they are few"


@dataclass(frozen=True, slots=True)
class StepEvent:
    """One thing that has just happened to batch number `batch`, or ("caught-up") after it.

    In order: "lease" (text) where the run waited for another one or took over from it, "planned" (how many inputs,
    operators, outputs, tables and datasets) once a run, "startpoint" (text, one each) at the start of a run, "table"
    (report) when a dataset that lives for one run was built or has taken changes in, "lost" (text) where retention was
    faster, "analysis" before Spark checks the operators over no records, once a run and where columns have changed,
    "intent" (records, unit, versions, few: whether it takes one task a stage), "output" (output) before each output,
    "again" (text) where the store broke off and the batch's work begins anew, "outputs" when all are written, "batch"
    (records so far, counters, watermarks) when its end is committed.
    """

    what: str
    batch: int
    detail: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        """Return the event in one line, for logs."""
        if self.what == "caught-up":
            return f"caught up after batch {self.batch}"
        if self.what == "table":
            return str(self.detail["report"].summary())
        if self.what in ("lease", "startpoint", "lost"):
            return str(self.detail["text"])
        if self.what == "again":
            return f"batch {self.batch}: {self.detail['text']}"
        if self.what == "planned":
            parts = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in self.detail.items() if count]
            return f"planned: {', '.join(parts)}"
        words = {
            "analysis": "checking all operators with Spark, over no records",
            "intent": f"{{records:,}} {{unit}}, dataset versions {{versions}}{_FEW if self.detail.get('few') else ''}",
            "output": "writing {output}",
            "outputs": "all outputs written",
            "batch": "committed; {records:,} {unit} so far",
        }[self.what]
        told = "; ".join(input_times.words() for input_times in self.detail.get("watermarks", ()))
        more = f"; {told}" if told else ""
        return f"batch {self.batch}: {words.format(**{'unit': 'records', **self.detail})}{more}"


def new_planned_event(app: Application) -> StepEvent:
    """Return the event of a plan without conflicts: how much of everything the application has."""
    kinds = {"input": app.inputs, "operator": app.operators, "output": app.outputs}
    kinds |= {"table": app.tables, "dataset": app.datasets}
    return StepEvent("planned", 0, {kind: len(all_of_it) for kind, all_of_it in kinds.items()})


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one run of the step did. Counters are of this run; `state` is the application's after it.

    `versions` are the ids of the versions that its batches met, by dataset. `startpoints` says in words which
    startpoints were resolved and applied, replays begun and ended, and by whom. `measured` has what each remote table
    has counted and measured in this run's tasks, such as how long requests took and waited. `few_batches` took
    one task a stage, as they had few records. `watermarks` say how far each input has come in the times of its records,
    where it declares these; `state_sizes` how much each table of state holds.
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
    watermarks: tuple[InputTimes, ...] = ()
    state_sizes: Mapping[str, StateSize] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        measured = {name: metrics.to_dict() for name, metrics in self.measured.items()}
        more: dict[str, Any] = {"startpoints": list(self.startpoints), "measured": measured}
        more["watermarks"] = [input_times.to_json() for input_times in self.watermarks]
        more["state_sizes"] = {name: asdict(size) for name, size in self.state_sizes.items()}
        return {**values, **more, "state": self.state.model_dump(mode="json")}


# How far an application has come in the times of its records: what a batch begins with, and leaves. Pure functions.
#
# records ── newest event time of each source partition
#         ── its watermark: newest - delay, never going back
#         ── of an operator: the lowest of all source partitions above it that are not idle,
#            less what operators on the way hold back, never going back


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a batch's records of one stream say, by partition number: the latest event times (in microseconds; none
    where no record has one), and the offsets after the last."""

    newest: Mapping[int, int] = field(default_factory=dict)
    read_to: Mapping[int, int] = field(default_factory=dict)


def declared_event_times(app: Application) -> dict[str, EventTime]:
    """Return what is declared of the times of the input streams, of those that have any."""
    declared = {name: source.event_time for name, source in app.inputs.items()}
    return {name: time for name, time in declared.items() if time is not None}


def times_at_batch_start(app: Application, state: ApplicationState, intent: Intent) -> TimeState:
    """Return the times that a batch begins with: those stored, and all source partitions that are known by now.

    Partitions whose records wait for a later batch are active: nobody takes them for idle while there is a backlog.
    """
    declared, stood = declared_event_times(app), state.times.partitions
    known = {ssp for ssp in (*state.checkpoint, *intent.ranges) if ssp.qualified_stream in declared}
    changed = {ssp: PartitionTimes(active_at=intent.clock) for ssp in sorted(known - stood.keys())}
    changed |= {
        ssp: stood[ssp].model_copy(update={"active_at": intent.clock}) for ssp in intent.waiting if ssp in stood
    }
    if not changed:
        return state.times
    return state.times.model_copy(update={"partitions": {**stood, **changed}})


def times_after_batch(
    app: Application,
    times: TimeState,
    measured: Mapping[str, Measured],
    clock: datetime,
    ranges: Mapping[SystemStreamPartition, tuple[int, int]] | None = None,
) -> TimeState:
    """Return the times after a batch of this clock, whose records of each stream say this.

    `ranges` are the offsets that it read, [from, to), of the partitions whose offsets are numbers.
    """
    declared, partitions = declared_event_times(app), dict(times.partitions)
    for ssp, stood in times.partitions.items():
        read = measured.get(ssp.qualified_stream, Measured())
        if ssp.partition in read.read_to:
            moved = _advance_times(stood, read, ssp.partition, declared[ssp.qualified_stream].delay, clock)
            span = (ranges or {}).get(ssp)
            partitions[ssp] = (
                moved if span is None else moved.model_copy(update={"skipped": stood.skipped_after(*span)})
            )
    after = times.model_copy(update={"partitions": partitions})
    operators = dict(times.operators)
    for name in watermark_inputs(app.operators):
        now = compute_operator_watermark(app, after, name, clock)
        if now is not None:
            operators[name] = now
    return after.model_copy(update={"operators": operators})


def compute_operator_watermark(app: Application, times: TimeState, name: str, clock: datetime) -> datetime | None:
    """Return the watermark of the stateful operator `name` at these times of its sources; never below its own."""
    stood, lowest = times.operators.get(name), find_holding_partition(app, times, name, clock)
    if lowest is None or lowest.watermark is None:
        return stood
    return lowest.watermark if stood is None else max(stood, lowest.watermark)


@dataclass(frozen=True, slots=True)
class HoldingPartition:
    """The source partition that an operator waits for, and the watermark that follows from it; None before any."""

    ssp: SystemStreamPartition
    watermark: datetime | None


def find_holding_partition(app: Application, times: TimeState, name: str, clock: datetime) -> HoldingPartition | None:
    """Return which source partition holds the watermark of a stateful operator back; None where all are idle."""
    declared = declared_event_times(app)
    lowest: HoldingPartition | None = None
    for stream, span in watermark_inputs(app.operators)[name].items():
        for ssp, stood in sorted(times.partitions.items()):
            if ssp.qualified_stream != stream or is_idle(declared.get(stream), stood, clock):
                continue
            mark = None if stood.watermark is None else long_before(stood.watermark, span)
            if mark is None:
                return HoldingPartition(ssp, None)
            if lowest is None or lowest.watermark is None or mark < lowest.watermark:
                lowest = HoldingPartition(ssp, mark)
    return lowest


def is_idle(declared: EventTime | None, times: PartitionTimes, clock: datetime) -> bool:
    """Whether a source partition is not waited for: it had no record for so long, as the input says."""
    if declared is None or declared.idle_after is None:
        return False
    return clock - times.active_at >= declared.idle_after


def _advance_times(
    stood: PartitionTimes, read: Measured, partition: int, delay: timedelta, clock: datetime
) -> PartitionTimes:
    newest, watermark = stood.newest, stood.watermark
    if partition in read.newest:
        here = EPOCH + timedelta(microseconds=read.newest[partition])
        newest = here if newest is None else max(newest, here)
    if newest is not None:
        mark = long_before(newest, delay)
        watermark = mark if watermark is None else max(watermark, mark)
    read_to = max(stood.read_to, read.read_to[partition])
    return stood.model_copy(update={"active_at": clock, "newest": newest, "watermark": watermark, "read_to": read_to})


@dataclass(frozen=True, slots=True)
class InputTimes:
    """How far one input has come: the watermark of the partition that holds it back, None where that had no record.

    `lag` is how far the watermark is behind the clock, `behind_newest` behind the newest time of any of its records.
    Partitions that are `idle` are not waited for; where all are, the newest watermark of any stands.
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
        """Whether the lag is larger than is declared; where a partition without records holds all back, it is."""
        if self.max_lag is None or self.newest is None:
            return False
        return self.lag is None or self.lag > self.max_lag

    def words(self) -> str:
        """Return it in one line."""
        held = "" if self.held_by is None else f", held back by {self.held_by}"
        if self.watermark is None:
            return f"{self.stream}: no watermark yet{held}"
        return (
            f"{self.stream}: watermark {format_time(self.watermark)}, {_round_seconds(self.lag)} behind the clock{held}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values; spans in seconds."""
        values = {name: value for name, value in asdict(self).items() if name != "max_lag"}
        spans = {name: None if (span := values[name]) is None else span.total_seconds() for name in _SPANS}
        times = {name: None if (time := values[name]) is None else time.isoformat() for name in _TIMES}
        return {**values, **spans, **times, "idle": list(self.idle)}


_SPANS, _TIMES = ("lag", "behind_newest"), ("watermark", "newest")


def format_time(moment: datetime | None) -> str:
    """Return a moment as tables show it."""
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def measure_input_times(app: Application, times: TimeState, clock: datetime) -> tuple[InputTimes, ...]:
    """Return how far each input that says when its records happened has come, by this clock."""
    return tuple(_measure_input(name, declared, times, clock) for name, declared in declared_event_times(app).items())


def find_holding_partitions(
    app: Application, times: TimeState, clock: datetime
) -> dict[str, SystemStreamPartition | None]:
    """Return, by stateful operator, the source partition that holds its watermark back; None where all are idle."""
    lowest = {name: find_holding_partition(app, times, name, clock) for name in watermark_inputs(app.operators)}
    return {name: None if lowest_mark is None else lowest_mark.ssp for name, lowest_mark in lowest.items()}


@dataclass(frozen=True, slots=True)
class StateSize:
    """How much a table of state holds: rows and bytes in its files, expired ones that are not dropped yet included.

    `kept_for` is what it is kept for, in the words of the plan, with the bound that its operator declares.
    """

    rows: int
    bytes: int
    kept_for: str = ""


def measure_state_sizes(lake: Lake, names: Iterable[str]) -> dict[str, StateSize]:
    """Return how much these datasets hold, of those that are tables of state."""
    sizes = {}
    for name in names:
        manifest = DatasetLog(lake, name).read()[1]
        if manifest is None or manifest.declaration.expires is None:
            continue
        stored = () if manifest.version is None else manifest.version.generations
        files = [file for generation in stored for file in generation.files]
        sizes[name] = StateSize(
            sum(file.rows for file in files), sum(file.size for file in files), manifest.declaration.kept_for
        )
    return sizes


def _measure_input(name: str, declared: EventTime, times: TimeState, clock: datetime) -> InputTimes:
    stood = {
        ssp: partition_times
        for ssp, partition_times in sorted(times.partitions.items())
        if ssp.qualified_stream == name
    }
    idle = {ssp for ssp, partition_times in stood.items() if is_idle(declared, partition_times, clock)}
    marks = {ssp: partition_times.watermark for ssp, partition_times in stood.items() if ssp not in idle}
    held = min(marks, key=lambda ssp: (marks[ssp] is not None, marks[ssp] or clock, ssp), default=None)
    known = [partition_times.watermark for partition_times in stood.values() if partition_times.watermark is not None]
    watermark = marks[held] if held is not None else max(known, default=None)
    newest = _newest(stood)
    return InputTimes(
        stream=name,
        watermark=watermark,
        newest=newest,
        lag=None if watermark is None else clock - watermark,
        behind_newest=None if watermark is None or newest is None else newest - watermark,
        held_by=None if held is None else str(held),
        idle=tuple(str(ssp) for ssp in sorted(idle)),
        max_lag=declared.max_lag,
    )


def _newest(stood: Mapping[SystemStreamPartition, PartitionTimes]) -> datetime | None:
    return max(
        (partition_times.newest for partition_times in stood.values() if partition_times.newest is not None),
        default=None,
    )


def _round_seconds(span: timedelta | None) -> timedelta:
    return timedelta(0) if span is None else timedelta(seconds=round(span.total_seconds()))
