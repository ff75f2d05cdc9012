"""Runs the step with no Spark: what each batch would have read is written down instead, once for
each batch number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pytest

from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, BatchLog
from dagster_adjunct.orchestration.planner.planned import Task
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_for_run
from dagster_adjunct.orchestration.startpoints.request import OnUnresolved, StartpointRequest
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.orchestration.step.context import (
    BatchInputs,
    BatchMetrics,
    RunHooks,
    StepContext,
)
from dagster_adjunct.orchestration.step.progress import StepEvent, StepReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.startpoint import Startpoint
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from tests.clocks import on_clock
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.offsets.fake_streams import FakeStreams
from tests.orchestration.stub_engine import StubEngine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ssp = SystemStreamPartition.parse
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
Tasks = Mapping[str, Sequence[SystemStreamPartition | str]]
Ranges = dict[SystemStreamPartition, tuple[str, str]]


@dataclass(frozen=True)
class Batch:
    """What one batch was handed; `main` says whether it moves the checkpoint."""

    number: int
    ranges: Ranges
    epochs: dict[SystemStreamPartition, int]
    main: bool

    def read(self) -> Ranges:
        """Return the ranges that hold anything."""
        return {ssp: span for ssp, span in self.ranges.items() if span[0] != span[1]}


@dataclass
class Output(StubEngine):
    """An idempotent output: a batch that comes again has to be the same, and counts once."""

    batches: dict[int, Batch] = field(default_factory=dict)
    before: Callable[[Batch], None] = lambda batch: None

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        batch = Batch(
            inputs.intent.batch,
            {ssp: (span.start, span.end) for ssp, span in inputs.intent.ranges.items()},
            dict(inputs.intent.epochs),
            inputs.consumed is not None,
        )
        assert (inputs.consumed or {}) == (
            {ssp: end for ssp, (_, end) in batch.ranges.items()} if batch.main else {}
        )
        before_output("output")
        self.before(batch)
        assert self.batches.setdefault(batch.number, batch) == batch, (
            "a batch came again as another one"
        )
        return BatchMetrics({}, {})


def no_spark() -> SparkSession:
    raise AssertionError("nothing here starts Spark")


@dataclass
class OffsetsWorld:
    """A lake in memory with `lake` streams, a `fake` system beside it, a clock, and what runs
    delivered.
    """

    lake: Lake = field(default_factory=lambda: lake_in(InMemoryStore()))
    fake: FakeStreams = field(default_factory=FakeStreams)
    output: Output = field(default_factory=Output)
    now: datetime = BEGIN
    runs: int = 0
    sent: int = 0
    store: FaultyStore = field(init=False)

    def __post_init__(self) -> None:
        self.lake = on_clock(self.lake, lambda: self.now)

    def faulty(self, faults: Sequence[Fault]) -> Lake:
        """Return the lake as it is over a network on which these things happen."""
        return on_clock(Lake(FaultyStore(self.lake.store, faults), self.lake.id), lambda: self.now)

    @property
    def now_ms(self) -> int:
        return round(self.now.timestamp() * 1000)

    def systems(self, lake: Lake | None = None) -> dict[str, StreamSystem]:
        return {"lake": LakeStreams(lake or self.lake), "fake": self.fake}

    # -- streams of the lake

    def stream(self, name: str, partitions: int, **options: Any) -> None:
        streams = LakeStreams(self.lake)
        streams.create(
            name,
            schema=Schema.of(k="bigint", at="timestamp"),
            key=["k"] if partitions > 1 else [],
            partitions=partitions,
            timestamp="at",
            **options,
        )

    def send(self, stream: str, *keys: int) -> None:
        """Append a record for each key, at the clock's time."""
        self.sent += 1
        rows = pa.table(
            {
                "k": pa.array(keys, pa.int64()),
                "at": pa.array([self.now] * len(keys), pa.timestamp("us", tz="UTC")),
            }
        )
        self.systems()["lake"].append(stream, rows, producer="test", sequence=self.sent)

    def wait(self, **how_long: float) -> None:
        self.now += timedelta(**how_long)

    # -- startpoints

    def startpoints(self, app: Application, lake: Lake | None = None) -> StartpointManager:
        return StartpointManager(
            MetadataStore(lake or self.lake), app.name, expires_after=app.startpoints_expire_after
        )

    def ask(
        self,
        app: Application,
        ssps: SystemStreamPartition | str | Sequence[SystemStreamPartition | str],
        startpoint: Callable[..., Startpoint],
        *,
        until: Startpoint | None = None,
        task: str | None = None,
        on_unresolved: OnUnresolved = "fail",
        **position: Any,
    ) -> str:
        """Write a request for each partition with a startpoint made now, all with one id; return
        it.
        """
        made = startpoint(creation_timestamp_ms=self.now_ms, **position)
        self.startpoints(app).write_startpoints(
            StartpointRequest(
                ssp=SystemStreamPartition.parse(str(ssp)),
                startpoint=made,
                by="ada",
                reason="ticket 7",
                task=task,
                until=until,
                on_unresolved=on_unresolved,
                id=made.id,
            )
            for ssp in ([ssps] if isinstance(ssps, str | SystemStreamPartition) else ssps)
        )
        return made.id

    def fanned_out(self, app: Application) -> dict[tuple[str, SystemStreamPartition], str]:
        """Return the ids of the requests that wait at tasks, by task and partition."""
        held_by_task = self.startpoints(app).get_fan_outs()
        return {
            (task, ssp): request.id
            for task, held in held_by_task.items()
            for ssp, request in held.items()
        }

    # -- runs

    def context(
        self,
        app: Application,
        *,
        tasks: Tasks | None = None,
        max_batches: int | None = None,
        on_event: Callable[[StepEvent], None] = lambda event: None,
        faults: Sequence[Fault] = (),
        leased: bool = False,
    ) -> StepContext:
        """Return what a run works with; it meets the faults, counted from its first request.

        A `leased` run is told at each check that it holds its lease.
        """
        self.runs += 1
        plan = plan_application(app, systems=self.systems())
        if tasks is not None:
            made = tuple(
                Task(name, tuple(SystemStreamPartition.parse(str(ssp)) for ssp in ssps), (), ())
                for name, ssps in tasks.items()
            )
            plan = replace(plan, tasks=made)
        lake = self.faulty(faults)
        self.store = cast(FaultyStore, lake.store)
        runtime = Runtime(lake, self.systems(lake), no_spark, by=f"run-{self.runs}")
        context = StepContext(
            runtime, app, plan, fan_out_for_run(runtime, app, plan), RunHooks(on_event), max_batches
        )
        return replace(context, still_ours=(lambda: None) if leased else None)

    def run(self, app: Application, **options: Any) -> StepReport:
        context = self.context(app, **options)
        report = run_step(context, self.output)
        commit, stored = BatchLog(self.lake, app.name).read()
        theirs = commit is not None and commit.by != context.run
        assert theirs or report.state == stored, (
            "a run reports another state than the one that it has stored"
        )
        return report

    def delivered(self, app: Application, **options: Any) -> list[Batch]:
        """Run, and return the batches that this run was the first to deliver."""
        before = set(self.output.batches)
        self.run(app, **options)
        return [
            batch for number, batch in sorted(self.output.batches.items()) if number not in before
        ]

    def reads(self, app: Application, **options: Any) -> list[Ranges]:
        """Run, and return what each batch that this run was the first to deliver read, without
        empty ranges.
        """
        return [batch.read() for batch in self.delivered(app, **options)]

    def begin(self, app: Application) -> None:
        """Let a run die when it has resolved startpoints and stored the positions, before it
        reads anything.
        """

        def die(event: StepEvent) -> None:
            if event.what == "startpoint":
                raise Crash("after the start")

        with pytest.raises(Crash, match="after the start"):
            self.run(app, on_event=die)

    def die_before_the_removal(self, app: Application) -> None:
        """Let a run die when what tasks were handed is applied, before it is removed from the
        fan-outs.
        """
        removal = Fault(
            "put_if_match",
            1,
            "crash-before",
            below=f"metadata/startpoints-fan-out/{app.name}/CURRENT",
        )
        with pytest.raises(Crash):
            self.run(app, faults=[removal])

    def die_after(self, requests: int) -> None:
        """Let the run that is under way die after it has made so many more requests."""
        self.store.plan = (Fault("*", len(self.store.requests) + requests + 1, "crash-before"),)

    def state(self, app: Application) -> ApplicationState:
        return BatchLog(self.lake, app.name).read()[1]


def two_partitions() -> OffsetsWorld:
    """Return a world with fake.s in two partitions, records 0 to 2 in each, at ms 1 to 3."""
    world = OffsetsWorld()
    world.fake.make("s", 2)
    for partition in (0, 1):
        world.fake.write("s", partition, 1, 2, 3)
    return world


def reader(**options: Any) -> Application:
    """Return an application that reads fake.s."""
    app = Application("app", **options)
    app.input_stream("fake.s")
    return app
