"""What a run of the step works with, and how far it has come: frozen values that its stages pass on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.history import VersionsOverTime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.transient import TransientVersion
from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import (
    BatchLog,
    ClosedBatch,
    Intent,
    LoggedState,
    TimeState,
    add_counters,
)
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport, measure_input_times, measure_state_sizes
from dagster_adjunct.orchestration.step.recorded_answers import OpenTables
from dagster_adjunct.orchestration.step.state import iter_state_names
from dagster_adjunct.resources.common import split_stream_name, sum_counters
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import (
    SourceRange,
    Sources,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.tables.metrics import TableMetrics
from dagster_adjunct.resources.tables.shared_rate import RunCredits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.orchestration.step.plan_batch import BatchVersions
    from dagster_adjunct.orchestration.step.step import BatchEngine


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What one batch reads: its intent, and one version of each dataset.

    A view is None for a dataset without `bootstrap` that has no version yet: its joins find no match. `identities` are
    those of the input streams that have one. `records` is the number of records, or of offsets. `few`: run one task a
    stage; `interpreted`: have Spark interpret plans instead of compiling them. `over_time` has all versions of bounded
    datasets that joins by time read. `states` are the state tables at the start of the batch, by dataset, `times` the
    event times of its inputs by then.
    """

    intent: Intent
    views: Mapping[str, VersionReader | TransientVersion | None]
    identities: Mapping[str, str] = field(default_factory=dict)
    records: int = 0
    few: bool = False
    interpreted: bool = False
    over_time: Mapping[str, VersionsOverTime] = field(default_factory=dict)
    states: Mapping[str, VersionReader | None] = field(default_factory=dict)
    times: TimeState = field(default_factory=TimeState)

    @property
    def consumed(self) -> dict[SystemStreamPartition, str] | None:
        """The offsets at which the main input continues after the batch; None for a bounded replay and a dry run."""
        if self.intent.replays or self.intent.batch == 0:
            return None
        return {ssp: span.end for ssp, span in self.intent.ranges.items()}

    def sources(self, application: str, stream: str) -> Sources | None:
        """Return the ranges read of a stream, for the positions of output records; None if offsets are not numbers."""
        ranges = {ssp: span for ssp, span in self.intent.ranges.items() if ssp.qualified_stream == stream}
        if not all(text.isdecimal() for span in ranges.values() for text in (span.start, span.end)):
            return None
        identity = self.identities.get(stream)
        return Sources(
            stream,
            f"{application}@{identity}" if identity else application,
            tuple(
                SourceRange(str(ssp), int(span.start), int(span.end), self.intent.epochs.get(ssp, 0))
                for ssp, span in sorted(ranges.items())
            ),
        )


@dataclass(frozen=True, slots=True)
class StepContext:
    """The settings of a run of the step; `run`, its name in commits, is the runtime's `by`.

    `fan_out` holds the startpoints that were handed to this run's tasks. `between_batches` is called before each batch
    but the first. `still_ours` raises where the run may not continue: before each batch, output and commit. It is None
    for a run without a lease: a commit by another run then ends it, even if it has committed nothing. `credits`
    rate-limit the step's tables. `open_tables` caches lookup tables between batches. `sensitive_of_streams` and
    `declared_sensitive` cache which columns schemas mark as sensitive. `writes_as` is the application's former name,
    which outputs and state tables keep after a rename.
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
        """The name under which outputs and state tables know the application."""
        return self.writes_as or self.app.name

    @property
    def unit(self) -> str:
        """The unit in which inputs are counted: "offsets" where a system's offsets may have gaps, else "records"."""
        names = {split_stream_name(stream)[0] for stream in self.app.inputs}
        return "records" if all(self.systems[name].counts_unread for name in names) else "offsets"

    def check(self) -> None:
        """Raise if the run may not continue."""
        if self.still_ours is not None:
            self.still_ours()


@dataclass(frozen=True, slots=True)
class StepResources:
    """The resources of a run of the step.

    `tasks` maps the plan's tasks to the input partitions that each reads; `states` are the names of the state tables.
    """

    context: StepContext
    engine: BatchEngine
    log: BatchLog
    startpoints: StartpointManager
    tasks: Mapping[str, frozenset[SystemStreamPartition]]
    states: tuple[str, ...]
    versions: BatchVersions


@dataclass(frozen=True, slots=True)
class StepState:
    """How far a run of the step has come: the batch log as it last committed it, and its report so far.

    Partitions in `held` are not read in this run; None before its start. `shapes` are the columns of inputs and
    datasets and the buckets of datasets that the last dry run checked; None before the first.
    """

    logged: LoggedState
    report: StepReport
    held: frozenset[SystemStreamPartition] | None = None
    shapes: Mapping[str, object] | None = None

    def with_messages(self, context: StepContext, texts: Sequence[str]) -> StepState:
        """Send an event for each message about startpoints; return the state with these messages."""
        for text in texts:
            context.on_event(StepEvent("startpoint", self.logged.state.batch, {"text": text}))
        return replace(self, report=replace(self.report, startpoints=(*self.report.startpoints, *texts)))

    def with_batch(
        self, done: ClosedBatch, commit_seconds: float, measured: Mapping[str, TableMetrics], *, few: bool
    ) -> StepState:
        """Return the state after one more batch, with its counters and table metrics."""
        before, took = self.report, {**done.seconds, "commit": commit_seconds}
        versions = {name: before.versions.get(name, []) for name in {**before.versions, **done.intent.versions}}
        for name, version in done.intent.versions.items():
            if version is not None and version not in versions[name]:
                versions[name] = [*versions[name], version]
        report = replace(
            before,
            batches=before.batches + 1,
            few_batches=before.few_batches + few,
            counters=add_counters(before.counters, done.counters),
            versions=versions,
            seconds=sum_counters(before.seconds, took),
            measured=before.measured
            | {name: before.measured.get(name, TableMetrics()) + metrics for name, metrics in measured.items()},
        )
        return replace(self, report=report)

    def finish(self, context: StepContext, *, caught_up: bool) -> StepReport:
        """Return the report of the run; send a "caught-up" event if it has caught up."""
        state = self.logged.state
        if caught_up:
            context.on_event(StepEvent("caught-up", state.batch))
        return replace(
            self.report,
            caught_up=caught_up,
            state=state,
            watermarks=measure_input_times(context.app, state.times, context.lake.now()),
            state_sizes=measure_state_sizes(context.lake, iter_state_names(context)),
        )
