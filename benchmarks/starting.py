"""Where 10,000 partitions begin: from requests for startpoints to stored offsets, without what
the streams take.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from benchmarks.timing import Measured
from dagster_adjunct import Application, LakeStreams, Schema, open_lake
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.coordinator import start_run
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.positions import input_positions, snapshot_streams
from dagster_adjunct.orchestration.startpoints.request import StartpointRequest
from dagster_adjunct.orchestration.startpoints.store import open_startpoints
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.startpoint import StartpointTimestamp
from dagster_adjunct.resources.streams.system import StreamSystem
from tests.faulty_store import FaultyStore
from tests.orchestration.offsets.fake_streams import FakeStreams

PARTITIONS = 10_000
GOAL_SECONDS = 2.0


@dataclass
class Clocked:
    """A stream system, with the time that its answers took."""

    system: Any
    spent: list[float] = field(default_factory=list)

    def snapshot(self, stream: str) -> Clocked:
        return Clocked(self.system.snapshot(stream), self.spent)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.system, name)
        if not callable(attribute):
            return attribute

        def answer(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return attribute(*given, **named)
            finally:
                self.spent.append(time.perf_counter() - began)

        return answer


StreamSystem.register(Clocked)  # it answers all of a system's methods, so a plan takes it for one


@dataclass
class Phases:
    """Seconds (and those of the processor) of each phase besides the system's own, and its
    requests to the lake.
    """

    clocked: Clocked
    store: FaultyStore
    seconds: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)
    own: float = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before, made = sum(self.clocked.spent), len(self.store.requests)
        began, busy = time.perf_counter(), time.process_time()
        yield
        own = sum(self.clocked.spent) - before
        self.busy[name] = time.process_time() - busy
        self.seconds[name] = time.perf_counter() - began - own
        self.requests[name] = len(self.store.requests) - made
        self.own += own


def on_fake_streams(streams: int) -> Callable[[Lake], StreamSystem]:
    """Return a maker of streams with two records in each of their partitions, in memory."""

    def make(lake: Lake) -> StreamSystem:
        system = FakeStreams()
        for number in range(streams):
            system.make(f"s{number}", PARTITIONS // streams)
            for partition in range(PARTITIONS // streams):
                system.write(f"s{number}", partition, 1, 3)
        return system

    return make


def on_lake_streams(streams: int) -> Callable[[Lake], StreamSystem]:
    """Return a maker of empty streams in the lake."""

    def make(lake: Lake) -> StreamSystem:
        system = LakeStreams(lake)
        for number in range(streams):
            schema = Schema.of(k="string")
            system.create(f"s{number}", schema=schema, key=["k"], partitions=PARTITIONS // streams)
        return system

    return make


def start_once(
    folder: Path, make: Callable[[Lake], StreamSystem], streams: int, until: bool
) -> Phases:
    """Ask for a startpoint at every partition of an application, and begin there."""
    lake = open_lake(folder / "lake")
    store = FaultyStore(lake.store)
    lake = Lake(store, lake.id)
    clocked = Clocked(make(lake))
    system = cast(StreamSystem, clocked)
    app = Application("starting", auto_repartition=True)
    for number in range(streams):
        app.input_stream(f"{system.name}.s{number}", default_offset="oldest")
    systems: Mapping[str, StreamSystem] = {system.name: system}
    plan = plan_application(app, systems=systems)
    startpoints = open_startpoints(lake, app)
    tasks = plan.partitions_by_task()
    log = BatchLog(lake, app.name)
    phases = Phases(clocked, store)
    with phases.phase("defaults"):
        logged = log.read()
        streams = snapshot_streams(systems, app.inputs)
        first = start_run(app, streams, tasks, FanOut({}), logged.state, lake.now())
        logged = log.commit(logged, first.state, by="run-1")
    end = StartpointTimestamp(timestamp_ms=3) if until else None
    startpoints.write_startpoints(
        StartpointRequest(
            ssp=ssp,
            startpoint=StartpointTimestamp(timestamp_ms=2),
            until=end,
            by="ada",
            reason="speed",
        )
        for name in app.inputs
        for ssp in system.partitions(name.partition(".")[2])
    )
    with phases.phase("fan-out"):
        handed = startpoints.fan_out(tasks)
    with phases.phase("start"):
        streams = snapshot_streams(systems, app.inputs)
        start = start_run(app, streams, tasks, handed, logged.state, lake.now())
    found = start.state.offsets.begun if until else start.state.offsets.resolved
    assert len(found) == PARTITIONS
    with phases.phase("store"):
        logged = log.commit(logged, start.state, by="run-2")
        startpoints.remove_fan_outs(start.done)
    with phases.phase("positions"):
        assert len(input_positions(app, streams, logged.state, start.held).startpoints) == (
            0 if until else PARTITIONS
        )
    return phases


def show(starts: list[Phases], what: str) -> None:
    """Print the median of what the goal is about, and each phase of the first round."""
    timed = tuple(
        sum(start.seconds[name] for name in ("start", "store", "positions")) for start in starts
    )
    goal = f"goal: {GOAL_SECONDS:.0f} s besides the system's own {starts[0].own:.2f} s"
    print(f"  {Measured(f'{what}: start to positions', timed)} ({goal})")
    for name, seconds in starts[0].seconds.items():
        print(
            f"    {name}: {seconds:.2f} s, CPU {starts[0].busy[name]:.2f} s,"
            f" {starts[0].requests[name]} requests"
        )


def run(rounds: int) -> None:
    """Print the seconds and the requests of each phase."""
    print(f"Starting offsets of {PARTITIONS:,} partitions, each with a startpoint at a time")
    for what, make in (("in memory", on_fake_streams), ("of the lake", on_lake_streams)):
        for streams in (1, 100):
            for until in (False, True):
                starts = []
                for _ in range(rounds):
                    with TemporaryDirectory() as folder:
                        starts.append(start_once(Path(folder), make(streams), streams, until))
                plural = "s" if streams > 1 else ""
                bounded = ", bounded" if until else ""
                show(starts, f"{streams} stream{plural} {what}{bounded}")
    print()
