"""Two writers that race to seal the same version: one wins, and nothing of the other is left.
Operators beside them.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path

import pytest

from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.objects.lake import lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.assets import writing
from tests.assets.cycle import (
    NAME,
    PLANES,
    WHY,
    content,
    data_and_documents,
    deliver,
    faulty,
    objects,
    planes_in,
    publish,
    reached,
    served,
    whole,
)
from tests.faulty_store import Fault
from tests.servers.s3 import S3Server

ROUNDS, WRITERS = 12, 2


@pytest.mark.long  # at each commit: test_dataset_crashes.py
@pytest.mark.lengthy
def test_of_two_writers_that_seal_the_same_version_one_wins(tmp_path: Path) -> None:
    seal_in_two_processes(str(tmp_path / "lake"), {})


@pytest.mark.server
@pytest.mark.long  # of unbounded datasets: tests/assets/unbounded/test_on_s3.py
def test_of_two_writers_that_seal_the_same_version_one_wins_on_a_real_s3_server(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    seal_in_two_processes(versitygw.url(), versitygw.env)


def seal_in_two_processes(url: str, env: Mapping[str, str]) -> None:
    world = planes_in(open_lake(url))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.assets.reading", "tests.assets.writing"])
    start, built, reported = context.Barrier(WRITERS + 1), context.Barrier(WRITERS), context.Queue()
    writers = [
        context.Process(target=writing.race, args=(url, dict(env), ROUNDS, start, built, reported))
        for _ in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    matched = 0
    try:
        for number in range(1, ROUNDS + 1):
            deliver(world, number)
            start.wait(writing.PATIENCE)
            outcomes = sorted(
                (reported.get(timeout=writing.PATIENCE) for _ in writers),
                key=lambda report: report.action,
            )
            matched += outcomes[0].action == "conflict"
            assert [report.action for report in outcomes] in (
                ["conflict", "sealed"],
                ["sealed", "up-to-date"],
            ), outcomes
            if outcomes[0].action == "conflict":
                assert "Nothing of this attempt is" in outcomes[0].problem
            (sealed,) = next(report.sealed for report in outcomes if report.action == "sealed")
            store = StoredVersions(world.lake, NAME)
            assert [ref.name for ref in store.versions()] == [
                f"v{done}" for done in range(1, number + 1)
            ]
            assert store.require_current().version == sealed
            assert served(world.lake) == whole(number)
            assert data_and_documents(world.lake) == reached(world.lake), "the loser left nothing"
            if built.broken:
                built.reset()
            start.wait(writing.PATIENCE)
    finally:
        for writer in writers:
            writer.join(60)
            writer.kill()
    assert matched > ROUNDS // 2, "they did race"
    for ref in StoredVersions(world.lake, NAME).versions():
        assert content(StoredVersions(world.lake, NAME).version(ref.id)) == whole(ref.number)
    assert objects(world.lake, f"datasets/{NAME}/attempts/") == {}
    assert [writer.exitcode for writer in writers] == [0] * WRITERS


@pytest.mark.lengthy
@pytest.mark.parametrize("delivered", ["whole", "in part", "again"])
def test_what_operators_do_meanwhile_costs_no_advance_and_is_not_undone(delivered: str) -> None:
    """Somebody pins the version served just before the nth request of an advance, for every n."""
    for nth in range(1, 100):
        world = planes_in(lake_in(InMemoryStore()))
        publish(world, 1)
        if delivered == "in part":
            world.mark(NAME, "v2", [0])
        else:
            deliver(world, 2 if delivered == "whole" else 1)
        lake = faulty(
            world,
            Fault(
                "*", nth, "meanwhile", lambda w=world: StoredVersions(w.lake, NAME).pin("v1", **WHY)
            ),
        )
        report = world.advance(PLANES, lake=lake)
        assert (
            report.action
            == {"whole": "sealed", "in part": "waiting", "again": "up-to-date"}[delivered]
        )
        manifest = StoredVersions(world.lake, NAME).require_manifest()
        assert served(world.lake) == whole(1 if manifest.pin or delivered != "whole" else 2)
        if delivered == "in part":
            assert manifest.awaited is not None
            assert manifest.awaited.version == "v2"
        if len(lake.store.requests) < nth:
            assert manifest.pin is None
            return
        assert manifest.pin is not None
    raise AssertionError("an advance has less requests")
