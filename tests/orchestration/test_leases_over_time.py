"""A step holds all versions that a join by time meets, before it opens one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.leases import list_leases
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.maintenance.expire import expire_all_versions
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.startpoints.coordinator import fan_out_for_run
from dagster_adjunct.orchestration.step.context import BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.step import run_step
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.stub_engine import StubEngine
from tests.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable

ROUTES = bounded_dataset(
    "routes",
    input="lake.routes",
    key="k",
    partitions=1,
    valid_from="name",
    discard=DiscardPolicy(keep=2, grace=timedelta(0)),
)


@dataclass
class Reading(StubEngine):
    """Takes the place of a batch's work: reads every version that the join meets whole, and
    writes nothing.
    """

    seen: list[list[int]] = field(default_factory=list)

    def run(
        self, context: StepContext, inputs: Any, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        store, spans = context.lake.store, inputs.over_time["routes"].spans
        readers = [VersionReader(store, "routes", span.version) for span in spans]
        self.seen.append([entry["n"] for reader in readers for _, entry in reader.items()])
        before_output("out")
        return BatchMetrics({}, {})


def new_world() -> World:
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    world.stream("trips", Schema.of(k="string", at="timestamp"), ["k"], 1)
    world.stream("routes", Schema.of(k="string", n="int"), ["k"], 1)
    world.send("trips", [("a", datetime(2026, 1, 9, tzinfo=UTC))])
    publish(world, 1, 2)
    return world


def publish(world: World, *numbers: int) -> None:
    for number in numbers:
        world.send("routes", [("a", number)], version=f"2026-01-0{number}")
        world.advance(ROUTES)


def run(world: World, lake: Lake) -> list[list[int]]:
    app, reading = Application("app"), Reading()
    joined = app.input_stream("lake.trips", default_offset="oldest").join(
        app.table(ROUTES), on="k", as_of="at"
    )
    joined.send_to(app.output_stream("lake.out", partitions=1, key="k"))
    planned = plan_application(app, systems=world.systems)
    runtime = Runtime(lake, world.systems, IN_PROCESS, by="me")
    run_step(StepContext(runtime, app, planned, fan_out_for_run(runtime, app, planned)), reading)
    return reading.seen


@pytest.mark.rounds
@pytest.mark.lengthy
def test_versions_joined_by_time_may_be_replaced_and_discarded_at_any_request() -> None:
    begun_again = 0
    for nth in range(1, 100, rounds(2, 1)):
        world = new_world()

        def replace(world: World = world) -> None:
            publish(world, 3, 4)
            expire_all_versions(world.lake, {"routes": ROUTES}, by="test")

        lake = Lake(
            FaultyStore(world.lake.store, [Fault("*", nth, "meanwhile", replace)]), world.lake.id
        )
        (seen,) = run(world, lake)
        assert seen in ([1, 2], [3, 4]), "whole, and none of a version that was discarded"
        done = BatchLog(world.lake, "app").read()[1].last
        assert done is not None
        assert [int(version[1:7]) for version in done.intent.joined.over_time["routes"]] == seen
        assert list_leases(world.lake, "routes") == []
        asked = [
            key
            for request, key in lake.store.requests
            if request == "put_if_absent" and "/leases/" in key
        ]  # type: ignore[attr-defined]
        begun_again += len(asked) > 1
        if len(lake.store.requests) < nth:  # type: ignore[attr-defined]
            break
    assert begun_again, "some came between the choice of the versions and their lease"
