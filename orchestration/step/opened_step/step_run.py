"""What a run of the step works over, and how far it has come: two frozen values that its stages are given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.batch_log import add_counters
from dagster_adjunct.orchestration.step.batch_compiler.state_tables import states_of
from dagster_adjunct.orchestration.step.progress.step_report import StepEvent, StepReport
from dagster_adjunct.orchestration.step.progress.time_progress import input_times, state_sizes
from dagster_adjunct.resources.tables.metrics import TableMetrics

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog, ClosedBatch, LoggedState
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import StartpointManager
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.orchestration.step.opened_step.batch_engine import BatchEngine
    from dagster_adjunct.orchestration.step.opened_step.opened_versions import OpenedVersions
    from dagster_adjunct.orchestration.step.opened_step.version_leases import VersionLeases
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

Counters = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class OpenedStep:
    """What a run of the step works over: its context, what its batches are computed by, and what was opened for it.

    `tasks` are those of the plan, with the input partitions that each reads; `states` are the tables of state, by name.
    """

    context: StepContext
    engine: BatchEngine
    log: BatchLog
    startpoints: StartpointManager
    tasks: Mapping[str, frozenset[SystemStreamPartition]]
    states: tuple[str, ...]
    versions: OpenedVersions
    leases: VersionLeases


@dataclass(frozen=True, slots=True)
class StepRun:
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

    def told(self, context: StepContext, texts: Iterable[str]) -> StepRun:
        """Tell what became of startpoints, an event each; return the run that has told it."""
        lines = tuple(texts)
        for text in lines:
            context.on_event(StepEvent("startpoint", self.logged.state.batch, {"text": text}))
        return replace(self, startpoints=(*self.startpoints, *lines))

    def with_batch(
        self, done: ClosedBatch, commit_seconds: float, measured: Mapping[str, TableMetrics], *, few: bool
    ) -> StepRun:
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
            watermarks=input_times(context.app, state.times, context.lake.now()),
            state_sizes=state_sizes(context.lake, states_of(context)),
        )
