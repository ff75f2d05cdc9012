"""A world without Spark for joins that wait: what each batch reads, on a clock that moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import Watermark
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_for_run
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.clocks import Clock, on_clock
from tests.orchestration.stub_engine import StubEngine

MINUTE = timedelta(minutes=1)
START = datetime(2026, 1, 1, tzinfo=UTC)
FACTS = Schema.of(k="string", at="timestamp", n="int")
PRICES = Schema.of(k="string", at="timestamp", v="int")


@dataclass
class Reading(StubEngine):
    """Takes the place of a batch's work: remembers which records each batch reads."""

    batches: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)
    inputs: list[BatchInputs] = field(default_factory=list)
    meanwhile: Callable[[], object] = lambda: None

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        ranges = {
            str(partition): (int(span.start), int(span.end))
            for partition, span in inputs.intent.ranges.items()
            if span.start != span.end
        }
        self.inputs.append(inputs)
        self.meanwhile()
        before_output("out")
        assert self.batches.setdefault(inputs.intent.batch, ranges) == ranges, "another batch"
        return BatchMetrics({}, {})


@dataclass
class QuickWorld:
    """Facts of some partitions that wait for prices; `k0`, `k1`, … are keys of partition 0, 1."""

    partitions: int = 1
    watermark: Watermark = field(default_factory=Watermark)
    wait: timedelta | Wait = 60 * MINUTE
    lake: Lake = field(default_factory=lambda: lake_in(InMemoryStore()))
    work: Reading = field(default_factory=Reading)
    options: dict[str, Any] = field(default_factory=dict)
    facts_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.lake = on_clock(self.lake, self.clock)
        self.sequence = 0
        self.create("facts", FACTS, **self.facts_options)
        self.create("prices", PRICES)
        self.prices = self.dataset("prices")
        self.make: Callable[[], Application] = self.application

    def create(self, stream: str, schema: Schema, **options: Any) -> None:
        self.streams.create(stream, schema=schema, key=["k"], partitions=self.partitions, **options)

    def dataset(self, stream: str, **options: Any) -> AdjunctDataset:
        settings: dict[str, Any] = {
            "input": f"lake.{stream}",
            "key": "k",
            "partitions": self.partitions,
            "history": "all",
            "valid_from": "at",
            "watermark": self.watermark,
        }
        return unbounded_dataset(stream, **{**settings, **options})

    @property
    def streams(self) -> LakeStreams:
        return LakeStreams(self.lake)

    @property
    def systems(self) -> Mapping[str, Any]:
        return {"lake": self.streams}

    def application(self) -> Application:
        app = Application("app", **self.options)
        facts = app.input_stream("lake.facts", default_offset="oldest", event_time="at")
        joined = facts.join(
            app.table(self.prices), on="k", how="left", select=["v"], as_of="at", wait=self.wait
        )
        joined.send_to(app.output_stream("lake.out", partitions=self.partitions, key="k"))
        return app

    def key(self, partition: int) -> str:
        """Return a key of a partition."""
        return next(
            key
            for key in map(str, range(1000))
            if bucket_of_key([key], ["string"], self.partitions) == partition
        )

    def send(self, stream: str, *rows: tuple[str, float | datetime | None, int]) -> None:
        """Append rows of a key, a minute and a value."""
        self.sequence += 1
        names = self.streams.info(stream).schema.names
        records = []
        for key, minute, value in rows:
            at = START + minute * MINUTE if isinstance(minute, (int, float)) else minute
            records.append(dict(zip(names, (key, at, value), strict=True)))
        self.streams.append(stream, records, producer="test", sequence=self.sequence)

    def advance(self, *datasets: AdjunctDataset) -> list[AdvanceReport]:
        return [
            advance_dataset(one, lake=self.lake, systems=self.systems, spark=IN_PROCESS, by="test")
            for one in datasets or (self.prices,)
        ]

    @property
    def startpoints(self) -> Startpoints:
        return Startpoints(self.make(), lake=self.lake)

    def step(self, **options: Any) -> StepReport:
        app = self.make()
        planned = plan_application(app, systems=self.systems)
        runtime = Runtime(self.lake, self.systems, IN_PROCESS, by="me")
        assigned = fan_out_for_run(runtime, app, planned)
        return run_step(StepContext(runtime, app, planned, assigned, **options), self.work)

    def run(self, **options: Any) -> StepReport:
        """Advance every dataset of the application, then run the step."""
        self.advance(*self.make().datasets)
        return self.step(**options)

    def read(self) -> dict[str, list[int]]:
        """Return the offsets that have been read, in their order, of each partition."""
        found: dict[str, list[int]] = {}
        for _, ranges in sorted(self.work.batches.items()):
            for partition, (start, end) in ranges.items():
                found.setdefault(partition, []).extend(range(start, end))
        return found
