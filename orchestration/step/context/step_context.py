"""What a step works with: one planned application, where it runs, and who is to hear of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dagster_adjunct.assets.writing.runtime import Runtime
from dagster_adjunct.orchestration.step.answers.table_answers import OpenTables
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.column_lineage import LineageNode
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
    from dagster_adjunct.orchestration.step.progress.step_report import StepEvent
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.tables.credits.run_credits import RunCredits


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
