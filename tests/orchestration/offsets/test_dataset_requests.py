"""Startpoints on the streams of datasets: who gets them, what they do, and what becomes of them
(issue 6.7).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    UnboundedDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import OffsetState
from dagster_adjunct.orchestration.startpoints.coordinator import (
    DatasetOutcome,
    apply_dataset_startpoints,
    fan_out_requests,
)
from dagster_adjunct.orchestration.startpoints.fan_out import FanOut
from dagster_adjunct.orchestration.startpoints.request import (
    StartpointRequest,
    dataset_task_name,
    find_reading_tasks,
)
from dagster_adjunct.orchestration.startpoints.store import StartpointManager
from dagster_adjunct.resources.errors import DatasetError, MalformedDocumentError
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import (
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointUpcoming,
)
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded.facts import SCHEMA, TENFOLD, Fact
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.orchestration.offsets.stored_startpoints import handed_to, write_startpoint

FIRST: list[Fact] = [("a", 1, 1), ("b", 2, 2), ("c", 3, 3), ("d", 4, 4), ("e", 5, 5)]
WHO: dict[str, Any] = {"by": "ada", "reason": "ticket 7"}


def followed(name: str, stream: str | None = None, **options: Any) -> AdjunctDataset:
    return unbounded_dataset(name, input=f"lake.{stream or name}", key="k", partitions=2, **options)


def ssp(stream: str, number: int) -> SystemStreamPartition:
    return SystemStreamPartition("lake", stream, number)


def followed_on(dataset: AdjunctDataset) -> bool:
    return isinstance(dataset, UnboundedDataset) and dataset.persistent


def app_of(*datasets: AdjunctDataset, inputs: tuple[str, ...] = ("lake.main",)) -> Application:
    app = Application("app")
    for name in inputs:
        app.input_stream(name)
    for dataset in datasets:
        app.table(replace(dataset, extractor=TENFOLD) if followed_on(dataset) else dataset)
    return app


@pytest.fixture
def world() -> World:
    """Two tables, one and two, that have taken in what their streams hold; read again, n is ten
    times as large.
    """
    world = World(lake_in(InMemoryStore()), IN_PROCESS)
    for name in ("one", "two", "main"):
        world.stream(name, SCHEMA, ["k"], 2)
        world.send(name, FIRST)  # type: ignore[arg-type]
    for name in ("one", "two"):
        world.advance(followed(name))
    return world


def manager(world: World, *faults: Fault) -> StartpointManager:
    return StartpointManager(
        MetadataStore(Lake(FaultyStore(world.lake.store, faults), world.lake.id)), "app"
    )


def ask(world: World, app: Application, *requests: StartpointRequest) -> StartpointManager:
    """Write the requests and hand them out, as a run of the application does."""
    startpoints = manager(world)
    startpoints.write_startpoints(requests)
    readers = find_reading_tasks(app, None, world.systems)
    tasks = {"Partition 0": [ssp("main", 0)], **readers.of_datasets}
    startpoints.fan_out(tasks, named_only=readers.named_only)
    return startpoints


def apply(
    world: World,
    app: Application,
    startpoints: StartpointManager,
    *,
    lake: Lake | None = None,
    **options: Any,
) -> DatasetOutcome:
    return apply_dataset_startpoints(
        Runtime(lake or world.lake, world.systems, IN_PROCESS, by="run 1"),
        app,
        startpoints,
        FanOut(startpoints.get_fan_outs()),
        **options,
    )


def request(stream: str, number: int, startpoint: Startpoint, **options: Any) -> StartpointRequest:
    return StartpointRequest(ssp=ssp(stream, number), startpoint=startpoint, **{**WHO, **options})


def values(world: World, name: str) -> dict[str, int]:
    return {
        key: entry["n"] for key, entry in StoredVersions(world.lake, name).require_current().items()
    }


def tenfold_in(world: World, stream: str, *partitions: int) -> dict[str, int]:
    """Return the first values, ten times as large where the key lies in one of these partitions."""
    rows = world.streams.read_arrow(world.streams.all_ranges(stream)).to_pylist()
    where = {row["k"]: row["__partition"] for row in rows}
    return {key: n * (10 if where[key] in partitions else 1) for key, _, n in FIRST}  # type: ignore[misc, index]


def test_unbounded_datasets_have_a_task_and_those_of_an_input_only_by_name(world: World) -> None:
    app = app_of(
        followed("one"),
        followed("again", "one"),
        followed("beside", "main"),
        followed("passing", "two", persistent=False),
        followed("nothing-yet"),
        bounded_dataset("versions", input="lake.two", key="k", broadcast=True),
    )
    one, main = (frozenset(ssp(stream, number) for number in (0, 1)) for stream in ("one", "main"))
    assert find_reading_tasks(app, None, world.systems).of_datasets == {
        "dataset one": one,
        "dataset again": one,
        "dataset beside": main,
    }
    assert find_reading_tasks(app, None, world.systems).named_only == {"dataset beside"}


def test_a_request_for_all_is_not_for_a_dataset_next_to_the_application(world: World) -> None:
    app = app_of(followed("one"), followed("again", "one"), followed("beside", "main"))
    for_all, for_one, named = StartpointOldest(), StartpointOldest(), StartpointOldest()
    startpoints = ask(
        world,
        app,
        request("main", 0, for_all),
        request("one", 1, for_one),
        request("main", 1, named, task=dataset_task_name("beside")),
    )
    pending = {
        t: {at: handed.startpoint for at, handed in held.items()}
        for t, held in startpoints.get_fan_outs().items()
    }
    assert pending == {
        "Partition 0": {ssp("main", 0): for_all},
        "dataset one": {ssp("one", 1): for_one},
        "dataset again": {ssp("one", 1): for_one},
        "dataset beside": {ssp("main", 1): named},
    }
    readers = find_reading_tasks(app, None, world.systems)
    report = startpoints.fan_out(readers.of_datasets, named_only=readers.named_only)
    left = {
        task: [handed.startpoint for handed in held.values()]
        for task, held in report.stranded.items()
    }
    assert left == {"Partition 0": [for_all]}, "nor what a task that is gone has left"
    assert report.tasks.keys() == pending.keys() - {"Partition 0"}


def test_what_is_asked_of_a_dataset_is_applied_in_one_commit_and_then_removed(world: World) -> None:
    app = app_of(followed("one"), followed("two"))
    startpoints = ask(
        world,
        app,
        request("one", 0, StartpointSpecific(offset="0")),
        request("one", 1, StartpointSpecific(offset="0"), by="bob"),
        request("two", 1, StartpointOldest()),
        request("main", 0, StartpointOldest()),
    )
    received: list[AdvanceReport] = []
    outcome = apply(world, app, startpoints, on_report=received.append)
    assert [(report.dataset, report.action) for report in received] == [
        ("one", "rewound"),
        ("two", "rewound"),
    ]
    assert outcome == DatasetOutcome(tuple(received))
    assert values(world, "one") == tenfold_in(world, "one", 0, 1)
    assert values(world, "two") == tenfold_in(world, "two", 1)
    assert startpoints.get_fan_outs().keys() == {"Partition 0"}
    entry, bootstrap = StoredVersions(world.lake, "one").history(limit=2)
    assert (entry.action, entry.by) == ("rewind", "run 1")
    assert entry.reason == "ticket 7 (asked for by ada); ticket 7 (asked for by bob)"
    assert bootstrap.action == "bootstrap"
    assert apply(world, app, startpoints) == DatasetOutcome()


def test_oldest_for_all_partitions_builds_the_table_again(world: World) -> None:
    app = app_of(followed("one"))
    startpoints = ask(
        world, app, *(request("one", number, StartpointOldest()) for number in (0, 1))
    )
    outcome = apply(world, app, startpoints)
    assert [report.action for report in outcome.reports] == ["bootstrapped"]
    assert startpoints.get_fan_outs() == {}


def test_a_dataset_that_refuses_fails_alone_and_its_request_stays(world: World) -> None:
    app = app_of(followed("one"), followed("two"))
    upcoming, oldest = StartpointUpcoming(), StartpointOldest()
    startpoints = ask(world, app, request("one", 0, upcoming), request("two", 0, oldest))
    outcome = apply(world, app, startpoints)
    assert isinstance(outcome.failed["one"], DatasetError)
    assert "it would skip the changes in between" in str(outcome.failed["one"])
    assert [report.dataset for report in outcome.reports] == ["two"]
    assert startpoints.get_fan_outs().keys() == {"dataset one"}
    assert apply(world, app, startpoints).failed.keys() == {"one"}, (
        "until somebody takes it back or forces it"
    )
    startpoints = ask(world, app, request("one", 0, upcoming, force=True))
    assert apply(world, app, startpoints).failed == {}
    assert startpoints.get_fan_outs() == {}


def test_force_is_for_the_partition_that_it_was_asked_for(world: World) -> None:
    app = app_of(followed("one"))
    world.send("one", FIRST)  # type: ignore[arg-type]
    ends = world.streams.upcoming([ssp("one", 0), ssp("one", 1)])
    startpoints = ask(
        world,
        app,
        request("one", 0, StartpointUpcoming(), force=True),
        request("one", 1, StartpointSpecific(offset=ends[ssp("one", 1)])),
    )
    assert "startpoint of lake.one.1" in str(apply(world, app, startpoints).failed["one"])
    assert values(world, "one") == tenfold_in(world, "one")


def test_a_crash_between_the_commit_and_the_removal_applies_nothing_twice(world: World) -> None:
    app = app_of(followed("one"))
    ask(world, app, request("one", 0, StartpointSpecific(offset="0")))
    with pytest.raises(Crash):
        apply(world, app, manager(world, Fault("put_if_match", 1, "crash-before")))
    assert values(world, "one") == tenfold_in(world, "one", 0)
    before = StoredVersions(world.lake, "one").read()[0]
    startpoints = manager(world)
    assert startpoints.get_fan_outs().keys() == {"dataset one"}
    outcome = apply(world, app, startpoints)
    assert [report.action for report in outcome.reports] == ["up-to-date"]
    assert StoredVersions(world.lake, "one").read()[0] == before
    assert startpoints.get_fan_outs() == {}


def test_what_comes_while_it_is_applied_stays_for_the_next_run(world: World) -> None:
    app = app_of(followed("one"))
    startpoints = ask(world, app, request("one", 0, StartpointSpecific(offset="0")))
    newer = StartpointOldest()
    meanwhile = Fault(
        "put_if_match", 1, "meanwhile", lambda: ask(world, app, request("one", 0, newer))
    )
    outcome = apply(
        world,
        app,
        startpoints,
        lake=Lake(FaultyStore(world.lake.store, [meanwhile]), world.lake.id),
    )
    assert [report.action for report in outcome.reports] == ["rewound"]
    assert handed_to(startpoints, "dataset one")[ssp("one", 0)].startpoint == newer
    assert [report.action for report in apply(world, app, startpoints).reports] == ["rewound"]
    assert startpoints.get_fan_outs() == {}


def test_what_has_no_offset_fails_the_dataset_or_stays_as_its_request_says(world: World) -> None:
    app = app_of(followed("one"), followed("two"))
    nowhere = StartpointSpecific(offset="99")
    startpoints = ask(
        world,
        app,
        request("one", 0, nowhere, on_unresolved="checkpoint"),
        request("one", 1, StartpointSpecific(offset="0")),
        request("two", 0, nowhere),
    )
    outcome = apply(world, app, startpoints)
    assert values(world, "one") == tenfold_in(world, "one", 1)
    assert "lake.two.0: the startpoint's offset 99 is not on the stream" in str(
        outcome.failed["two"]
    )
    left = {task: set(held) for task, held in startpoints.get_fan_outs().items()}
    assert left == {"dataset one": {ssp("one", 0)}, "dataset two": {ssp("two", 0)}}


def test_a_replay_up_to_an_end_is_refused(world: World) -> None:
    app = app_of(followed("one"))
    until = StartpointSpecific(offset="1")
    startpoints = ask(world, app, request("one", 0, StartpointOldest(), until=until))
    assert "can't be replayed" in str(apply(world, app, startpoints).failed["one"])


def test_a_dataset_with_an_unreadable_startpoint_fails_alone_and_stays_as_it_is(
    world: World,
) -> None:
    app = app_of(followed("one"), followed("two"))
    before = values(world, "one")
    newer = {"pending": [{"version": 2, "ssp": str(ssp("one", 0))}], "handed": {}}
    namespace = MetadataStore(world.lake).namespace("startpoints-fan-out", "app")
    namespace.transact(lambda _: ({'["task","dataset one"]': newer}, None), by="newer")
    startpoints = manager(world)
    startpoints.write_startpoints([request("two", 0, StartpointSpecific(offset="0"))])
    readers = find_reading_tasks(app, None, world.systems)
    handed = startpoints.fan_out(readers.of_datasets, named_only=readers.named_only)
    runtime = Runtime(world.lake, world.systems, IN_PROCESS, by="run 1")
    outcome = apply_dataset_startpoints(runtime, app, startpoints, handed)
    assert [report.dataset for report in outcome.reports] == ["two"]
    with pytest.raises(MalformedDocumentError) as caught:
        outcome.raise_failed()
    assert caught.value.dataset == "one"
    assert values(world, "one") == before


def test_what_a_tables_commit_has_applied_is_not_handed_out_again(world: World) -> None:
    app = app_of(followed("one"))
    asked = request("one", 0, StartpointSpecific(offset="0"))
    apply(world, app, ask(world, app, asked))
    startpoints = manager(world)
    startpoints.write_startpoints([asked])
    report = fan_out_requests(startpoints, world.systems, app, None, OffsetState())
    assert (report.tasks, [repeated.id for repeated in report.already_applied]) == ({}, [asked.id])


def test_a_repeated_request_for_a_dataset_is_applied_once_whatever_came_between(
    world: World,
) -> None:
    app = app_of(followed("one"))
    asked, between = (request("one", 0, StartpointSpecific(offset="0")) for _ in range(2))
    for startpoint in (asked, between):
        assert apply(world, app, ask(world, app, startpoint)).reports[0].action == "rewound"
    before = StoredVersions(world.lake, "one").read()[0]
    startpoints = manager(world)
    startpoints.write_startpoints([asked])
    report = fan_out_requests(startpoints, world.systems, app, None, OffsetState())
    assert (report.tasks, [repeated.id for repeated in report.already_applied]) == ({}, [asked.id])
    again = apply(world, app, ask(world, app, asked)).reports
    assert [outcome.note for outcome in again] == ["its startpoints were applied before"]
    assert StoredVersions(world.lake, "one").read()[0] == before


def test_a_startpoint_requested_again_rewinds_a_dataset_again(world: World) -> None:
    app, startpoint = app_of(followed("one")), StartpointSpecific(offset="0")
    for _ in range(2):
        startpoints = manager(world)
        write_startpoint(startpoints, ssp("one", 0), startpoint, **WHO)
        # nothing new while it waits
        write_startpoint(startpoints, ssp("one", 0), startpoint, **WHO)
        fan_out_requests(startpoints, world.systems, app, None, OffsetState())
        assert [outcome.action for outcome in apply(world, app, startpoints).reports] == ["rewound"]
        assert fan_out_requests(startpoints, world.systems, app, None, OffsetState()).tasks == {}
