"""What a run of the step works over, and how far it has come: two frozen values that its stages are given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.batch_log.batch_log import TimeState, add_counters
from dagster_adjunct.orchestration.operators.stream_facts import AS_OF, JoinVersions
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport, measure_input_times, measure_state_sizes
from dagster_adjunct.orchestration.step.recorded_answers import OpenTables
from dagster_adjunct.orchestration.step.state import iter_state_names
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.streams.system import SourceRange, Sources
from dagster_adjunct.resources.tables.metrics import TableMetrics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.reading.history import VersionsOverTime
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient import TransientVersion
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog, ClosedBatch, LoggedState
    from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
    from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
    from dagster_adjunct.orchestration.startpoints.store import StartpointManager
    from dagster_adjunct.orchestration.step.engine import BatchEngine
    from dagster_adjunct.orchestration.step.versions import VersionCache, VersionLeases
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.system import OffsetRange, StreamSystem, SystemStreamPartition
    from dagster_adjunct.resources.tables.shared_rate import RunCredits


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What one batch reads: offsets [start, end) of each input partition, and one version of each dataset.

    A view is None for a dataset that holds nothing back and has no version yet: its joins find no match. `epochs` are
    those of the partitions' positions, without zeros; `consumed` are the offsets at which the main input goes on after
    the batch, None for one that replays. `identities` are those of the input streams that have one. `tasks` is how many
    read broadcast inputs; None: as many as the plan has. `few` records are for one task a stage; where datasets
    have few rows, too, Spark's plans are `interpreted`. `reading` says which versions the records meet. `over_time` are
    all versions that joins by time meet of bounded datasets. `states` are the tables of state as the batch is begun
    with them, by dataset. `clock` is when the batch was begun, `times` how far its inputs had come by then.
    Of a batch that is `cut` retention has taken records since it was begun: an output that has it keeps what it has.
    """

    batch: int
    ranges: Mapping[SystemStreamPartition, OffsetRange]
    views: Mapping[str, VersionReader | TransientVersion | None]
    epochs: Mapping[SystemStreamPartition, int] = field(default_factory=dict)
    consumed: Mapping[SystemStreamPartition, str] | None = None
    identities: Mapping[str, str] = field(default_factory=dict)
    tasks: int | None = None
    few: bool = False
    interpreted: bool = False
    over_time: Mapping[str, VersionsOverTime] = field(default_factory=dict)
    reading: JoinVersions = AS_OF
    states: Mapping[str, VersionReader | None] = field(default_factory=dict)
    clock: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    times: TimeState = field(default_factory=TimeState)
    cut: bool = False

    def sources(self, application: str, stream: str) -> Sources | None:
        """Return what is read of a stream, as records say what they are made of; None where offsets are no numbers."""
        ranges = {ssp: span for ssp, span in self.ranges.items() if ssp.qualified_stream == stream}
        if not all(text.isdecimal() for span in ranges.values() for text in (span.start, span.end)):
            return None
        identity = self.identities.get(stream)
        return Sources(
            stream,
            f"{application}@{identity}" if identity else application,
            tuple(
                SourceRange(str(ssp), int(span.start), int(span.end), self.epochs.get(ssp, 0))
                for ssp, span in sorted(ranges.items())
            ),
        )


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step works with; its run, named in commits, is the runtime's `by`.

    `fan_out` is what was fanned out for this run, once: its tasks start at what they are handed there.
    `between_batches` is called before each batch is planned but the first of the run: what it brings up to date is met
    by the next batch. `still_ours` raises where the run may not go on: before each batch, each output and each commit.
    It is None for who holds no lease: then another run's commit ends this one, even where it has committed nothing.
    `credits` are the step's own, as long as it runs: what its tables' rates are kept by. `open_tables` are those that
    it looks records up in, open from batch to batch. `sensitive_of_streams` is what was asked of schemas already,
    `declared_sensitive` what came of it, once it was asked for.
    `writes_as` is the name that outputs and tables of state know the application by, where it was renamed since.
    """

    runtime: Runtime
    app: Application
    plan: ExecutionPlan
    fan_out: FanOut
    on_event: Callable[[StepEvent], None] = lambda event: None
    max_batches: int | None = None
    between_batches: Callable[[], None] = lambda: None
    still_ours: Callable[[], None] | None = None
    credits: RunCredits | None = None
    open_tables: OpenTables = field(default_factory=OpenTables)
    sensitive_of_streams: dict[str, frozenset[str]] = field(default_factory=dict)
    declared_sensitive: list[set[tuple[LineageNode, str]]] = field(default_factory=list)
    writes_as: str | None = None

    @property
    def lake(self) -> Lake:
        return self.runtime.lake

    @property
    def systems(self) -> Mapping[str, StreamSystem]:
        return self.runtime.systems

    @property
    def spark(self) -> Callable[[], SparkSession]:
        return self.runtime.spark

    @property
    def run(self) -> str:
        return self.runtime.by

    @property
    def writer(self) -> str:
        """The name that outputs and tables of state know the application by."""
        return self.writes_as or self.app.name

    @property
    def unit(self) -> str:
        """What is counted of the inputs: in systems with holes, offsets have no records behind them everywhere."""
        names = {split_stream_name(stream)[0] for stream in self.app.inputs}
        return "records" if all(self.systems[name].counts_unread for name in names) else "offsets"

    def check(self) -> None:
        """Raise where the run may not go on."""
        if self.still_ours is not None:
            self.still_ours()


Counters = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class StepResources:
    """What a run of the step works over: its context, what its batches are computed by, and what was opened for it.

    `tasks` are those of the plan, with the input partitions that each reads; `states` are the tables of state, by name.
    """

    context: StepContext
    engine: BatchEngine
    log: BatchLog
    startpoints: StartpointManager
    tasks: Mapping[str, frozenset[SystemStreamPartition]]
    states: tuple[str, ...]
    versions: VersionCache
    leases: VersionLeases


@dataclass(frozen=True, slots=True)
class StepState:
    """How far a run of the step has come: the batch log as it has left it, and what its report will tell.

    Partitions that are `held` are not read in this run; None before its start. `shapes` are the columns of the inputs,
    and columns and buckets of the datasets, that a batch was last rehearsed with; None before the first rehearsal.
    """

    logged: LoggedState
    held: frozenset[SystemStreamPartition] | None = None
    shapes: Mapping[str, object] | None = None
    batches: int = 0
    few_batches: int = 0
    counters: Counters = field(default_factory=dict)
    versions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, TableMetrics] = field(default_factory=dict)
    startpoints: tuple[str, ...] = ()

    def with_messages(self, context: StepContext, texts: Iterable[str]) -> StepState:
        """Tell what became of startpoints, an event each; return the run that has told it."""
        lines = tuple(texts)
        for text in lines:
            context.on_event(StepEvent("startpoint", self.logged.state.batch, {"text": text}))
        return replace(self, startpoints=(*self.startpoints, *lines))

    def with_batch(
        self, done: ClosedBatch, commit_seconds: float, measured: Mapping[str, TableMetrics], *, few: bool
    ) -> StepState:
        """Return the run with one more batch of its own, of `few` records or not, and what tables measured in it."""
        versions, seconds = dict(self.versions), dict(self.seconds)
        for name, version in done.intent.versions.items():
            met = versions.setdefault(name, ())
            if version is not None and version not in met:
                versions[name] = (*met, version)
        for stage, value in {**done.seconds, "commit": commit_seconds}.items():
            seconds[stage] = seconds.get(stage, 0.0) + value
        counters = add_counters(self.counters, done.counters)
        tables = {name: self.measured.get(name, TableMetrics()) + metrics for name, metrics in measured.items()}
        return replace(
            self,
            batches=self.batches + 1,
            few_batches=self.few_batches + few,
            counters=counters,
            versions=versions,
            seconds=seconds,
            measured={**self.measured, **tables},
        )

    def report(self, context: StepContext, *, caught_up: bool) -> StepReport:
        """Return what the run did, and tell that it has caught up."""
        state = self.logged.state
        if caught_up:
            context.on_event(StepEvent("caught-up", state.batch))
        return StepReport(
            batches=self.batches,
            caught_up=caught_up,
            counters=self.counters,
            versions={name: list(met) for name, met in self.versions.items()},
            seconds=dict(self.seconds),
            state=state,
            startpoints=self.startpoints,
            measured=dict(self.measured),
            few_batches=self.few_batches,
            watermarks=measure_input_times(context.app, state.times, context.lake.now()),
            state_sizes=measure_state_sizes(context.lake, iter_state_names(context)),
        )
