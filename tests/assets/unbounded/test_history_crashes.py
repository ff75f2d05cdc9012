"""A commit or a compaction of a table with history ends at any request: the next run ends as if
it had not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.s3_store import S3Store
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.over_time import (
    NAME,
    Change,
    Model,
    check,
    manifest_of,
    prices,
    prices_in,
    send,
)
from tests.faulty_store import WRITES, Crash, Fault, FaultKind, FaultyStore, deaths
from tests.servers.s3 import S3Server

FIRST: list[Change] = [("a", 1, 1), ("b", 2, None), ("c", 3, 1), ("a", 4, 2)]
SECOND: list[Change] = [("a", 3, 7), ("d", 30, 1), ("c", 29, None)]
THIRD: list[Change] = [("b", 28, 5), ("a", 4, 9)]
CASES: dict[str, tuple[list[list[Change]], list[Change], str, dict[str, Any]]] = {
    "a commit": ([FIRST], SECOND, "advance", {}),
    "a bootstrap of several chunks": ([], [*FIRST, *SECOND], "advance", {"chunk": 3}),
    "a minor compaction": ([FIRST, SECOND, THIRD], [], "minor", {}),
    "a major compaction that prunes and forgets": (
        [FIRST, SECOND],
        [],
        "major",
        {"history": timedelta(seconds=5)},
    ),
}


NewStore = Callable[[], ObjectStore]


def copy_of(world: World, store: ObjectStore) -> World:
    for info in world.lake.store.list(""):
        store.put(info.key, world.lake.store.get(info.key).data)
    return World(Lake(store, world.lake.id), IN_PROCESS, dict(world.sequences))


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("name", CASES)
def test_what_dies_at_any_request_leaves_a_whole_history_and_is_taken_up(name: str) -> None:
    dies_and_is_taken_up(name, InMemoryStore)


@pytest.mark.server
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a commit", marks=pytest.mark.long),
        "a major compaction that prunes and forgets",
    ],
)
def test_on_s3_what_dies_is_taken_up(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    versitygw.set_in(monkeypatch)
    dies_and_is_taken_up(name, stores_on(versitygw), every=5)


@pytest.mark.server
@pytest.mark.long  # all requests and servers, of which the one above takes some
@pytest.mark.parametrize("name", CASES)
def test_on_s3_what_dies_at_any_request_is_taken_up(s3_server: S3Server, name: str) -> None:
    dies_and_is_taken_up(name, stores_on(s3_server))


def stores_on(server: S3Server) -> NewStore:
    """Make stores under prefixes of their own in one bucket."""
    root, number = server.url(), itertools.count()
    return lambda: S3Store(f"{root}-{next(number)}", server.settings.s3_options())


def dies_and_is_taken_up(name: str, new_store: NewStore, every: int = 1) -> None:
    """Run the case into faults, at each so many-th request: what is served is whole, and the
    next run ends it.
    """
    before, sent, act, options = CASES[name]
    spec, models = prices(**options), [Model()]
    begin = prices_in(World(lake_in(new_store()), IN_PROCESS))
    for changes in before:
        send(begin, changes)
        begin.advance(spec)
        models[0].add(changes)
    if sent:
        send(begin, sent)
        models.append(Model({key: dict(rows) for key, rows in models[0].valid.items()}))
        models[1].add(sent)

    def run(world: World, lake: Lake) -> None:
        if act == "advance":
            world.advance(spec, lake=lake)
        else:
            compact_dataset(lake, NAME, spark=IN_PROCESS, by="test", level=act)  # type: ignore[arg-type]

    probe = copy_of(begin, new_store())
    counted = FaultyStore(probe.lake.store)
    run(probe, Lake(counted, probe.lake.id))
    lost: list[tuple[int, FaultKind]] = [
        (nth, "lost-after") for nth, (made, _) in enumerate(counted.requests, 1) if made in WRITES
    ]
    assert len(counted.requests) + len(lost) > 10
    faults: list[tuple[int, FaultKind]] = [
        *((nth, "crash-before") for nth in deaths(counted.requests)),
        *lost,
    ]
    for nth, kind in faults[::every]:
        copy = copy_of(begin, new_store())
        try:
            run(copy, Lake(FaultyStore(copy.lake.store, (Fault("*", nth, kind),)), copy.lake.id))
        except Crash:
            assert kind == "crash-before"
        except (StoreUnavailableError, CommitStateUnknownError, CommitConflictError):
            assert kind == "lost-after"
        served = StoredVersions(copy.lake, NAME).current()
        if served is not None:
            assert any(holds(served, model) for model in models), (nth, kind)
        for _ in range(2):
            copy.advance(spec)
        if act != "advance":
            run(copy, copy.lake)
        check(copy.view(spec), models[-1])
        assert manifest_of(copy).horizon == manifest_of(probe).horizon
        assert copy.view(spec).sealed.edge == probe.view(spec).sealed.edge


def holds(view: VersionReader, model: Model) -> bool:
    try:
        check(view, model)
    except AssertionError:
        return False
    return True


def test_commits_during_a_compaction_stay_and_its_horizon_is_checked_again() -> None:
    """A change that comes meanwhile for a key whose deletion is about to be forgotten must find
    that deletion.
    """
    spec = prices(history=timedelta(seconds=5))
    for late in (("b", 1, 8), ("b", 28, 8)):
        world, model = prices_in(World(lake_in(InMemoryStore()), IN_PROCESS)), Model()
        for changes in (FIRST, SECOND):
            send(world, changes)
            world.advance(spec)
            model.add(changes)
        model.add([late])

        class Meanwhile(FaultyStore):
            """Commits a change before the compaction's own commit."""

            done = False

            def put_if_match(self, *args: Any, **kwargs: Any) -> Any:
                if not self.done:
                    self.done = True
                    send(world, [late])  # noqa: B023
                    world.advance(spec)  # noqa: B023
                return super().put_if_match(*args, **kwargs)

        report = compact_dataset(
            Lake(Meanwhile(world.lake.store), world.lake.id),
            NAME,
            spark=IN_PROCESS,
            by="test",
            level="major",
        )
        assert report.action == "compacted"
        assert (report.horizon is None) == (late[1] == 1)
        check(world.view(spec), model)
        compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
        check(world.view(spec), model)
