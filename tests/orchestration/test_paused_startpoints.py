"""A run that holds startpoints, paused at any request to the lake, while a command takes them back
or replaces them and others go on: what the command has reported is what happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import pytest

from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.manifest import as_unbounded
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.orchestration.startpoints.store import PendingStartpoint
from dagster_adjunct.resources.errors import CommitConflictError, LeaseLostError, RunLeaseLostError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.startpoint import StartpointOldest, StartpointSpecific
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.paused_runs import PausedWorld
from tests.rounds import rounds

Place = tuple[int, int]
"""A partition of the input, and an offset."""
Allowed = Callable[[Place], set[int]]
LATER = 4


def copying(world: PausedWorld, first: bool) -> Application:
    app = Application("sets", engine="auto", max_batch_records=16)
    records = app.input_stream("lake.changes", default_offset="oldest")
    records.send_to(app.output_stream("lake.copy", partitions=2, key="k"))
    return app


def prepare() -> PausedWorld:
    """Return a world whose records were read once, and are requested to be read again."""
    world = PausedWorld(copying)
    world.run("zeroth")
    asked = Startpoints(copying(world, False), lake=world.lake)
    asked.request("lake.changes", StartpointOldest(), by="ada", reason="again")
    return world


def take_back(world: PausedWorld) -> Allowed:
    """Take the startpoints back; return how often the record at a place of the first round may be
    read again.
    """
    startpoints = Startpoints(copying(world, False), lake=world.lake)
    removed = {
        held.request.ssp.partition for held in startpoints.clear(by="ada", reason="no").startpoints
    }
    return lambda place: {0} if place[0] in removed else {1}


def replace_by_later(world: PausedWorld) -> Allowed:
    """Request to read from a later offset; return how often the record at a place of the first
    round may be read again.
    """
    startpoints = Startpoints(copying(world, False), lake=world.lake)
    asked = startpoints.request(
        "lake.changes", StartpointSpecific(str(LATER)), by="bob", reason="later"
    )
    replaced = {held.request.ssp.partition for held in asked.replaced}

    def times(place: Place) -> set[int]:
        partition, offset = place
        if partition in replaced:
            return {int(offset >= LATER)}
        # The batch that has begun reads from the oldest record; the next one from the later offset.
        return {1, 2} if offset >= LATER else {1}

    return times


def copies(world: PausedWorld, written: Collection[int]) -> dict[Place, int]:
    """Return how often each record of the first round was copied."""
    read = world.streams.read_arrow(world.streams.all_ranges("changes")).to_pylist()
    copied = world.streams.read_arrow(world.streams.all_ranges("copy")).to_pylist()
    counted = Counter(row["n"] for row in copied)
    return {
        (row["__partition"], row["__offset"]): counted[row["n"]]
        for row in read
        if row["n"] in written
    }


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("pauses", [True, False])
@pytest.mark.parametrize("command", [take_back, replace_by_later])
def test_what_a_command_has_reported_while_a_run_had_startpoints_is_what_happens(
    command: Callable[[PausedWorld], Allowed], pauses: bool
) -> None:
    counting = prepare()
    counted = FaultyStore(counting.store)
    counting.run("first", Lake(counted, counting.lake.id))
    requests = counted.requests
    for nth in rounds([*range(2, len(requests), 18)], [*range(1, len(requests) + 1)]):
        world = prepare()
        expected: list[Allowed] = []

        def act(world: PausedWorld = world, expected: list[Allowed] = expected) -> None:
            if not expected:
                expected.append(command(world))
                if pauses:
                    world.pause()

        pause = Fault("*", nth, "meanwhile", action=act)
        error = world.run_paused(Lake(FaultyStore(world.store, [pause]), world.lake.id))
        made = (nth, requests[nth - 1], error)
        assert world.paused == pauses, made
        assert error is None or isinstance(
            error, RunLeaseLostError | CommitConflictError | LeaseLostError
        ), made
        if not pauses:
            world.go_on()
        world.run("last")
        (again,) = expected
        found = copies(world, range(100, 200))
        assert {p: n for p, n in found.items() if n - 1 not in again(p)} == {}, made
        assert set(copies(world, range(200, 500)).values()) == {1}, made
        listed = Startpoints(copying(world, False), lake=world.lake).list()
        left = [*listed["waiting"], *listed["handed"], *listed["replays"]]
        assert left == [], made


def new_world() -> PausedWorld:
    """Return a world whose application has not run yet, and is asked to begin at the oldest
    record.
    """
    world = PausedWorld(copying)
    asked = Startpoints(copying(world, False), lake=world.lake)
    asked.request("lake.changes", StartpointSpecific(str(LATER)), by="ada", reason="first")
    return world


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_first_run_that_expired_while_paused_may_apply_what_is_taken_back() -> None:
    """Nobody takes its lease: it goes on, and is told of only by what it may have read."""
    counting = new_world()
    counted = FaultyStore(counting.store)
    counting.run("first", Lake(counted, counting.lake.id))
    requests = counted.requests
    outcomes = set[tuple[bool, int]]()
    handed = next(nth for nth, (_, key) in enumerate(requests, 1) if "fan-out" in key)
    committed = requests.index(("put_if_absent", "applications/sets/CURRENT")) + 1
    for nth in rounds([*range(handed, committed + 4, 2)], [*range(1, len(requests) + 1)]):
        world = new_world()
        removed: list[set[int]] = []

        def act(world: PausedWorld = world, removed: list[set[int]] = removed) -> None:
            world.clocks.by += 3600
            world.expire_lease()
            startpoints = Startpoints(copying(world, False), lake=world.lake)
            done = startpoints.clear(by="ada", reason="no")
            removed.append({held.request.ssp.partition for held in done.startpoints})

        pause = Fault("*", nth, "meanwhile", action=act)
        assert world.run_paused(Lake(FaultyStore(world.store, [pause]), world.lake.id)) is None
        for (partition, offset), count in copies(world, range(100, 200)).items():
            outcomes.add((partition in removed[0], count))
            if partition in removed[0]:
                assert count == 1, (nth, requests[nth - 1], partition, offset)
    assert (False, 0) in outcomes, "some had begun"
    assert (True, 1) in outcomes


def copying_facts(world: PausedWorld, first: bool) -> Application:
    app = copying(world, first)
    app.table(unbounded_dataset("facts", input="lake.changes", key="k", partitions=2))
    return app


def prepare_facts() -> PausedWorld:
    """Return a world whose dataset has all records, and is asked to read them again."""
    world = PausedWorld(copying_facts)
    world.run("zeroth")
    asked = Startpoints(copying_facts(world, False), lake=world.lake)
    asked.request(
        "lake.changes", StartpointOldest(), task="dataset facts", by="ada", reason="again"
    )
    return world


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_dataset_is_not_rewound_to_what_was_taken_back() -> None:
    counting = prepare_facts()
    counted = FaultyStore(counting.store)
    counting.run("first", Lake(counted, counting.lake.id))
    requests = counted.requests
    handed = next(nth for nth, (_, key) in enumerate(requests, 1) if "fan-out" in key)
    for nth in rounds([*range(handed, len(requests), 8)], [*range(1, len(requests) + 1)]):
        world = prepare_facts()
        taken: list[PendingStartpoint] = []

        def act(world: PausedWorld = world, taken: list[PendingStartpoint] = taken) -> None:
            startpoints = Startpoints(copying_facts(world, False), lake=world.lake)
            taken.extend(startpoints.clear(by="ada", reason="no").startpoints)

        during = Fault("*", nth, "meanwhile", action=act)
        world.run("first", Lake(FaultyStore(world.store, [during]), world.lake.id))
        facts = as_unbounded(DatasetLog(world.lake, "facts").require()[1])
        applied = [
            held for held in taken if facts.has_applied(str(held.request.ssp), held.request.id)
        ]
        assert applied == [], (nth, requests[nth - 1])
