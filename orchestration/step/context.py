"""What a run of the step works with, how far it has come, and the dataset versions that its
batches read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, LocalTable
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.served_history import ServedHistory
from dagster_adjunct.assets.reading.served_over_time import ServedOverTime, read_served
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.valid_time import VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.sources.entries import require_changes
from dagster_adjunct.assets.unbounded.local_table import state_dataset_name
from dagster_adjunct.assets.unbounded.transient_table import (
    TransientTable,
    TransientVersion,
    is_transient,
)
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.table_registry import RegisteredTables
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    BatchLog,
    ClosedBatch,
    Counters,
    LoggedState,
    Replay,
    add_counters,
)
from dagster_adjunct.orchestration.batch_log.event_times import TimeState
from dagster_adjunct.orchestration.batch_log.intent import (
    Intent,
    JoinedVersions,
    Offsets,
    Ranges,
    ServedCommits,
)
from dagster_adjunct.orchestration.batch_log.run_lease import RunLease
from dagster_adjunct.orchestration.operators.batch import SAMPLE_SIZE
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.orchestration.operators.waiting import HeldRecord
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.recorded_plan import RecordedPlan
from dagster_adjunct.orchestration.startpoints.recorded_replay import read_plan
from dagster_adjunct.orchestration.startpoints.store import StartpointManager, open_startpoints
from dagster_adjunct.orchestration.step.lookups import OpenTables
from dagster_adjunct.orchestration.step.progress import (
    MAX_STARTPOINTS,
    MAX_VERSIONS,
    StepEvent,
    StepReport,
    measure_input_times,
    measure_state_sizes,
)
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectNotFoundError,
    VersionDiscardedError,
)
from dagster_adjunct.resources.lazy_modules import np, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.objects.store import requests_at_once
from dagster_adjunct.resources.reports import sum_counters
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.version_columns import NamedColumns
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    SourceRange,
    Sources,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.table import AnyTable
from dagster_adjunct.resources.threads import map_in_threads, requested_once

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession


View = VersionReader | TransientVersion | None
"""A version of a dataset as joins read it; None if the dataset has none yet."""


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What one batch reads: its intent, and what the intent names, opened.

    - `views`: the version of each dataset and state table. It is None for a dataset without
      `bootstrap` that has no version yet, in which joins find no match.
    - `identities`: the identity of each input stream that has one; a recreated stream has another.
    - `records`: the number of input records, or of offsets where these may have gaps.
    - `few`: whether there are so few records that Spark uses one task a stage.
    - `interpreted`: whether Spark interprets its plans instead of compiling them.
    - `over_time`: all versions of each bounded dataset that is joined by time.
    - `served`: what each dataset has served that is joined as it was known then.
    - `times`: the event times of the inputs at the start of the batch.
    - `streams`: the system of each input stream, as it was when the batch was planned.
    - `arrived`: the records of the input streams that this process has read already.
    - `places`: the places of the records whose results the batch restates, by input stream.
    """

    intent: Intent
    views: Mapping[str, View]
    identities: Mapping[str, str] = field(default_factory=dict)
    records: int = 0
    few: bool = False
    interpreted: bool = False
    over_time: Mapping[str, VersionsOverTime] = field(default_factory=dict)
    served: Mapping[str, ServedOverTime] = field(default_factory=dict)
    times: TimeState = field(default_factory=TimeState)
    streams: Mapping[str, StreamSystem] = field(default_factory=dict)
    arrived: Mapping[str, pa.Table] = field(default_factory=dict)
    places: Mapping[str, pa.Table] = field(default_factory=dict)

    @property
    def looked_back_at(self) -> tuple[VersionsOverTime | ServedOverTime, ...]:
        """The readers of datasets over time, of which all versions are read."""
        return (*self.over_time.values(), *self.served.values())

    @property
    def consumed(self) -> Offsets | None:
        """The offsets at which the main input continues after the batch; None for a batch that
        reads records again, and for a dry run.
        """
        is_dry_run = self.intent.batch == 0
        if self.intent.reads_again or is_dry_run:
            return None
        return {ssp: span.end for ssp, span in self.intent.ranges.items()}

    def sources(self, application: str, stream: str) -> Sources | None:
        """Return the ranges that the batch reads of a stream, as outputs store them; None if
        offsets are no numbers. Of a restating batch, they are the spans of the read records.
        """
        ranges = []
        for ssp, span in sorted(self.intent.ranges_of(stream).items()):
            if not (span.start.isdecimal() and span.end.isdecimal()):
                return None
            epoch = self.intent.epochs.get(ssp, 0)
            if stream in self.places:
                spans = list_spans(self.places[stream], ssp.partition)
            else:
                spans = [(int(span.start), int(span.end))]
            ranges += [SourceRange(str(ssp), start, end, epoch) for start, end in spans]
        identity = self.identities.get(stream)
        reader = f"{application}@{identity}" if identity else application
        return Sources(stream, reader, tuple(ranges))


def list_spans(places: pa.Table, partition: int) -> list[tuple[int, int]]:
    """Return the spans [start, end) of adjacent offsets among the places in a partition, whose
    offsets ascend.
    """
    here = places.filter(pc.equal(places.column(PARTITION), partition))
    offsets = here.column(OFFSET).to_numpy()
    is_first = np.diff(offsets, prepend=-2) != 1  # -2 is not adjacent to any offset
    first_places = np.flatnonzero(is_first)
    last_places = np.append(first_places[1:], len(offsets)) - 1
    starts = offsets[first_places].tolist()
    ends = (offsets[last_places] + 1).tolist()
    return list(zip(starts, ends, strict=True))


@dataclass(frozen=True, slots=True)
class BatchMetrics:
    """The metrics of a batch.

    `counters` are by output or join, `measured` has the metrics of each remote table. `times` are
    the event times of the inputs after the batch, None if they did not change. `in_process` says
    that Spark was not used. `samples` describe some records that did not meet an expectation, by
    operator.
    """

    counters: Counters
    measured: Mapping[str, TableMetrics]
    times: TimeState | None = None
    in_process: bool = False
    samples: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _CachedFrame:
    """A DataFrame that Spark has cached, made of these dataset versions."""

    versions: object
    frame: DataFrame


class BatchVersions:
    """The dataset versions that the batches of one run read, opened once, and a lease for each
    dataset.

    The leases are on the versions that the current batch reads. It also keeps the tables of
    datasets that live for one run, and the plans of recorded replays.
    """

    def __init__(self, runtime: Runtime, app: Application) -> None:
        self._runtime = runtime
        self._app = app
        self._stored: dict[str, StoredVersions] = {}
        self._readers: dict[tuple[str, str], VersionReader] = {}  # by dataset and version
        self._histories: dict[str, ServedHistory] = {}
        self._tables: dict[str, TransientTable] = {}
        self._plans: dict[str, RecordedPlan] = {}
        self._leases: dict[str, Lease] = {}
        self._frames: dict[str, _CachedFrame] = {}
        self.refused: dict[object, errors.RestatementError] = {}
        """Why results are not restated because of some changes, so that this is found out once."""

    def stored(self, name: str) -> StoredVersions:
        """Return the stored versions of a dataset or state table."""
        if name not in self._stored:
            declared = {dataset.name: dataset for dataset in self._app.datasets}
            self._stored[name] = StoredVersions(
                self._runtime.lake, declared.get(name, name), named_now=True
            )
        return self._stored[name]

    def table(self, name: str, state: ApplicationState) -> TransientTable:
        """Return the table of a dataset that lives for one run; it continues from the version of
        the last batch.
        """
        if name not in self._tables:
            last = None
            if state.last is not None:
                last = state.last.intent.versions.get(name)
            dataset = require_changes(self._app.dataset(name))
            self._tables[name] = TransientTable(self._runtime.systems, dataset, last=last)
        return self._tables[name]

    def keep(self, readers: Mapping[str, VersionReader | None]) -> None:
        """Keep these open readers, by dataset, so that `view` need not open their versions
        again.
        """
        for name, reader in readers.items():
            if reader is not None:
                self._readers[name, reader.version] = reader

    def view(self, name: str, version: str | None, state: ApplicationState) -> View:
        """Return this version of a dataset as joins read it; None if `version` is None."""
        if version is None:
            return None
        if is_transient(version):
            return self.table(name, state).restore(version, self._runtime.spark)
        return self._reader(name, version)

    def _reader(self, name: str, version: str) -> VersionReader:
        """Return the reader of a version, which is opened once."""
        if (name, version) not in self._readers:
            self._readers[name, version] = self.stored(name).version_of_batch(version)
        return self._readers[name, version]

    def over_time(self, name: str, versions: Iterable[str]) -> VersionsOverTime:
        """Return these versions of a bounded dataset as joins by time read them."""
        sealed = [self._reader(name, version).sealed for version in versions]
        return VersionsOverTime(self._runtime.lake.store, name, sealed)

    def columns_of(self, name: str, version: str) -> NamedColumns:
        """Return the columns of a version as joins read it."""
        return self._reader(name, version).sealed.named_columns

    def served_until_now(self, name: str, columns: NamedColumns) -> ServedOverTime | None:
        """Return what a dataset has served up to now, with these columns; None if it serves
        nothing. What was read before of its history is not read again.
        """
        history = ServedHistory.read(self._runtime.lake, name)
        known = self._histories.get(name)
        if known is not None:
            history = history.with_known(known)
        self._histories[name] = history
        return read_served(history, columns=columns)

    def served(self, name: str, commits: ServedCommits, columns: NamedColumns) -> ServedOverTime:
        """Return what a dataset has served from the first to the last of these commits, with these
        columns. Raises VersionDiscardedError if a part of it is gone.
        """
        history = self._histories.get(name)
        if history is None or history.number < commits.last:
            history = ServedHistory.read(self._runtime.lake, name)
            self._histories[name] = history
        reader = read_served(history.up_to(commits.last), first=commits.first, columns=columns)
        if reader is None or reader.commits != (commits.first, commits.last):
            raise history.discarded_error(commits.first)
        return reader

    def persisted(self, rows: str, versions: object, frame: Callable[[], DataFrame]) -> DataFrame:
        """Return the DataFrame that Spark has cached under the name `rows`, or cache the one that
        `frame` makes.

        It is cached until `unpersist`, or until it is asked for with other `versions`.
        """
        cached = self._frames.get(rows)
        if cached is not None:
            if cached.versions == versions:
                return cached.frame
            cached.frame.unpersist()
        cached = _CachedFrame(versions, frame().persist())
        self._frames[rows] = cached
        return cached.frame

    def unpersist(self) -> None:
        """Drop everything that `persisted` has cached, which frees Spark's memory for the tasks
        of a large batch.
        """
        for cached in self._frames.values():
            with suppress(Exception):  # its session has ended
                cached.frame.unpersist()
        self._frames.clear()

    def plan_of(self, replay: Replay) -> RecordedPlan:
        """Return the plan of a recorded replay. Raises ConfigurationError if it is gone."""
        plan_id = replay.recorded or ""
        if plan_id not in self._plans:
            try:
                self._plans[plan_id] = read_plan(self._runtime.lake, self._app.name, plan_id)
            except ObjectNotFoundError as error:
                raise ConfigurationError(
                    f"{replay.describe()} can't continue: the plan of its versions is gone"
                    f" ({error.key}).",
                    f"Cancel it (adjunct startpoint clear MODULE:APP {replay.ssp} --reason …) and"
                    " ask again.",
                    application=self._app.name,
                ) from error
        return self._plans[plan_id]

    def lease(self, joined: JoinedVersions, *, reopened: bool = False) -> list[str]:
        """Lease the dataset versions that a batch reads; return the names of the datasets whose
        versions could not be leased.

        Leases begin before the intent is committed; an open intent retains its versions, too. So
        for a `reopened` batch a version may be retained that can't be leased. For any other batch,
        VersionDiscardedError is raised for such a version.
        """
        missing: dict[str, set[str]] = {}
        for name, versions in joined.list_all().items():
            wanted = {version for version in versions if not is_transient(version)}
            if not self._holds(name, wanted):
                missing[name] = wanted

        def try_lease(name: str) -> bool:
            try:
                self._acquire_lease(name, missing[name])
            except VersionDiscardedError:
                if not reopened:  # a reopened version may have been rewritten by an erasure
                    raise
                return False
            return True

        leased = map_in_threads(try_lease, missing, requests_at_once(self._runtime.lake.store))
        return [name for name, is_leased in zip(missing, leased, strict=True) if not is_leased]

    def _acquire_lease(self, name: str, wanted: set[str]) -> None:
        """Lease these versions of a dataset, in place of those that the last batch has leased,
        whose readers are dropped.
        """
        lake = self._runtime.lake
        before = self._leases.get(name)
        self._leases[name] = Lease.acquire(lake, name, sorted(wanted), holder=self._runtime.by)
        if before is not None:
            before.release()
            self._forget_readers(name, wanted)

    def _holds(self, name: str, wanted: set[str]) -> bool:
        """Return whether a lease on the dataset that is not lost has all these versions; True also
        for no versions.
        """
        if not wanted:
            return True
        held = self._leases.get(name)
        return held is not None and not held.lost and wanted <= set(held.versions)

    def _forget_readers(self, name: str, wanted: Collection[str]) -> None:
        """Drop the readers of a dataset's versions, except those in `wanted`: a run that stays
        reads thousands of versions.
        """
        # A list, because other threads change the dictionary, for other datasets.
        for dataset, version in list(self._readers):
            if dataset == name and version not in wanted:
                del self._readers[dataset, version]

    def check_leases(self) -> None:
        """Raise LeaseLostError if a lease on a version in use was lost."""
        for name in sorted(self._leases):  # they were acquired by threads
            self._leases[name].check()

    def close(self) -> None:
        """Release the leases, what Spark has cached, and the tables that live for one run."""
        try:
            map_in_threads(
                Lease.release, self._leases.values(), requests_at_once(self._runtime.lake.store)
            )
        finally:
            self.unpersist()
            for table in self._tables.values():
                table.release()


@dataclass(frozen=True, slots=True)
class RunHooks:
    """What a run of the step calls.

    - `on_event`: receives each event.
    - `on_report`: receives the report after each batch.
    - `between_batches`: called before each batch but the first.
    - `wait`: called when there is nothing to read; waits, and returns whether the step goes on. Its
      argument says whether records wait for a dataset.
    - `go_on`: called after each batch; returns whether the step goes on, without waiting.
    """

    on_event: Callable[[StepEvent], None] = lambda event: None
    on_report: Callable[[StepReport], None] = lambda report: None
    between_batches: Callable[[], None] = lambda: None
    wait: Callable[[bool], bool] = lambda held: False
    go_on: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class StepContext:
    """What a run of the step works with.

    - `fan_out`: the startpoints that were handed to this run's tasks.
    - `still_ours`: called before each batch, output and commit; raises if another run may have
      taken over. It is None for a run without a lease, which fails as soon as another run has
      committed. A run with a lease starts again from that commit if it has not committed anything
      itself.
    - `lease`: the run's lease, whose fence its writes to tables carry; None for a run without one.
    - `registered`: the remote tables whose stores are asked before each batch whether they still
      hold them. Those that it has found or created are never created again, and are an error to
      look up if they are missing.
    - `open_tables`: the tables of lookups, with their caches, and the run's part of rate limits.
    - `writes_as`: the former name of a renamed application, which its outputs and state tables
      keep.
    - `earlier`: the report of the run's former steps, to which this step adds.
    """

    runtime: Runtime
    app: Application
    plan: ExecutionPlan
    fan_out: FanOut
    hooks: RunHooks = RunHooks()
    max_batches: int | None = None
    still_ours: Callable[[], None] | None = None
    lease: RunLease | None = None
    registered: RegisteredTables | None = None
    open_tables: OpenTables = field(default_factory=OpenTables)
    writes_as: str | None = None
    earlier: StepReport | None = None

    @property
    def lake(self) -> Lake:
        """The lake of the run."""
        return self.runtime.lake

    @property
    def at_once(self) -> int:
        """How many requests to the lake are made at the same time."""
        return requests_at_once(self.lake.store)

    @property
    def systems(self) -> Mapping[str, StreamSystem]:
        """The stream systems of the run, by name."""
        return self.runtime.systems

    @property
    def spark(self) -> Callable[[], SparkSession]:
        """Returns the Spark session of the run; the first call may start it."""
        return self.runtime.spark

    def as_known(self, table: AnyTable) -> AnyTable:
        """Return a remote table for which a missing table of the store is an error, if the store
        had it earlier in this run.
        """
        if self.registered is not None and table.name in self.registered.existing:
            return table.with_existing_store()
        return table

    @property
    def run(self) -> str:
        """The name of this run in commits."""
        return self.runtime.by

    @cached_property
    def fence(self) -> Fence | None:
        """The fence of the run's writes, under the name that tables know the application by; None
        without a lease.
        """
        return None if self.lease is None else self.lease.fence.of_application(self.writer)

    @property
    def writer(self) -> str:
        """The name under which outputs and state tables know the application."""
        return self.writes_as or self.app.name

    @cached_property
    def log(self) -> BatchLog:
        """The batch log of the application."""
        return BatchLog(self.lake, self.app.name)

    @cached_property
    def startpoints(self) -> StartpointManager:
        """The stored startpoints of the application."""
        return open_startpoints(self.lake, self.app)

    @cached_property
    def versions(self) -> BatchVersions:
        """The dataset versions that the run's batches read; close it at the end of the run."""
        return BatchVersions(self.runtime, self.app)

    @cached_property
    def tasks(self) -> Mapping[str, frozenset[SystemStreamPartition]]:
        """The input partitions that each task of the plan reads."""
        return self.plan.partitions_by_task()

    @requested_once
    def sensitive(self) -> frozenset[tuple[LineageNode, str]]:
        """The columns that datasets and schemas mark as sensitive, in lower case."""
        return list_sensitive_columns(self.app, self.systems)

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The names of the datasets that hold the state of the application's operators."""
        names: list[str] = []
        for operator in self.app.operators:
            names += [state_dataset_name(self.writer, name) for name in operator.spec.states]
        return tuple(names)

    @property
    def unit(self) -> str:
        """The unit in which inputs are counted: "offsets" where a system's offsets may have
        gaps, else "records".
        """
        for stream in self.app.inputs:
            if not self.system_of(stream).capabilities.counts_unread:
                return "offsets"
        return "records"

    def system_of(self, stream: str) -> StreamSystem:
        """Return the system of a stream ("lake.flights")."""
        return self.systems[split_stream_name(stream)[0]]

    def count_offsets(self, ranges: Ranges) -> dict[SystemStreamPartition, int]:
        """Return the number of offsets in each of these ranges."""
        return {
            ssp: self.systems[ssp.system].distance(ssp, span.start, span.end)
            for ssp, span in ranges.items()
        }

    def compare(self, ssp: SystemStreamPartition, left: str, right: str) -> int:
        """Compare two offsets of a partition, which only its system can: below 0, 0 or above."""
        return self.systems[ssp.system].compare(left, right)

    def report(self, what: str, batch: int, **detail: Any) -> None:
        """Send an event of this batch."""
        self.hooks.on_event(StepEvent(what, batch, detail))

    def check(self) -> None:
        """Raise the error of `still_ours` if the run may not continue."""
        if self.still_ours is not None:
            self.still_ours()


@dataclass(frozen=True, slots=True)
class StepState:
    """How far a run of the step has come: the batch log as it last committed it, and its report so
    far.

    `unreadable` are the partitions that this run does not read, because their startpoint can't be
    read; None before the run's first positions are stored. `shapes` are the columns of inputs and
    datasets, and the numbers of buckets, that the last dry run checked; None before the first.
    """

    logged: LoggedState
    report: StepReport
    unreadable: frozenset[SystemStreamPartition] | None = None
    shapes: Mapping[str, object] | None = None

    def with_messages(self, context: StepContext, texts: Sequence[str]) -> StepState:
        """Send an event for each of these texts about startpoints; return the state in whose report
        they are, too.
        """
        for text in texts:
            context.report("startpoint", self.logged.state.batch, text=text)
        startpoints = (*self.report.startpoints, *texts)[-MAX_STARTPOINTS:]
        return replace(self, report=replace(self.report, startpoints=startpoints))

    def with_batch(
        self, done: ClosedBatch, commit_seconds: float, outputs: BatchMetrics, *, few: bool
    ) -> StepState:
        """Return the state whose report includes one more batch; `few` says that Spark used one
        task a stage.
        """
        before = self.report
        versions = dict(before.versions)
        for name, version in done.intent.versions.items():
            known = versions.setdefault(name, [])
            if version is not None and version not in known:
                versions[name] = [*known, version][-MAX_VERSIONS:]
        measured = dict(before.measured)
        for name, metrics in outputs.measured.items():
            measured[name] = measured.get(name, TableMetrics()) + metrics
        samples = dict(before.samples)
        for operator, described in outputs.samples.items():
            samples[operator] = (*samples.get(operator, ()), *described)[:SAMPLE_SIZE]
        report = replace(
            before,
            batches=before.batches + 1,
            few_batches=before.few_batches + few,
            in_process_batches=before.in_process_batches + outputs.in_process,
            counters=add_counters(before.counters, done.counters),
            versions=versions,
            seconds=sum_counters(before.seconds, {**done.seconds, "commit": commit_seconds}),
            measured=measured,
            samples=samples,
        )
        return replace(self, report=report)

    def with_held(self, held: tuple[HeldRecord, ...]) -> StepState:
        """Return the state in whose report these are the records that wait for a dataset."""
        event_time = replace(self.report.event_time, held=held)
        return replace(self, report=replace(self.report, event_time=event_time))

    def finish(self, context: StepContext, *, caught_up: bool) -> StepReport:
        """Return the report of the run; send a "caught-up" event if it has caught up."""
        state = self.logged.state
        if caught_up:
            context.report("caught-up", state.batch)
        event_time = replace(
            self.report.event_time,
            watermarks=measure_input_times(context.app, state.times, context.lake.now()),
            state_sizes=measure_state_sizes(context.lake, context.states),
        )
        return replace(self.report, caught_up=caught_up, state=state, event_time=event_time)


def list_sensitive_columns(
    app: Application, systems: Mapping[str, StreamSystem]
) -> frozenset[tuple[LineageNode, str]]:
    """Return the columns, in lower case, that datasets and schemas mark as sensitive.

    A column of a schema that an operator was given belongs to the node of kind "stream" with the
    operator's id.
    """

    @cache
    def of_stream(stream: str) -> frozenset[str]:
        system, name = split_stream_name(stream)
        try:
            return _sensitive_names(systems[system].info(name).schema)
        except (errors.StreamNotFoundError, KeyError):  # it was deleted, or its system is not open
            return frozenset()

    found = {LineageNode("stream", stream): of_stream(stream) for stream in app.inputs}
    for dataset in app.datasets:
        own = frozenset(column.lower() for column in dataset.masked)
        if isinstance(dataset, LocalTable):
            own |= _sensitive_names(dataset.stored)
        elif dataset.stream:
            own |= _with_made_columns(dataset, of_stream(dataset.stream))
        found[LineageNode("dataset", dataset.name)] = own
    for operator in app.operators:  # results of functions: matched by column name
        names = frozenset[str]().union(*map(_sensitive_names, operator.spec.declared_schemas))
        found[LineageNode("stream", operator.id)] = names
    columns: set[tuple[LineageNode, str]] = set()
    for node, names in found.items():
        columns |= {(node, name) for name in names}
    return frozenset(columns)


def _with_made_columns(dataset: AdjunctDataset, sensitive: frozenset[str]) -> frozenset[str]:
    """Return the `sensitive` columns of a dataset's input, and those that the dataset makes of
    values inside them.
    """
    made = [
        path.name.lower() for path in dataset.columns.paths if path.steps[0].lower() in sensitive
    ]
    return sensitive.union(made)


def _sensitive_names(schema: Schema | None) -> frozenset[str]:
    """Return the names of the columns that a schema marks as sensitive, in lower case."""
    if schema is None:
        return frozenset()
    return frozenset(field.name.lower() for field in schema.fields if field.sensitive)
