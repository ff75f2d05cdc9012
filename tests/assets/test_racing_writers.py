"""Two writers that race to seal the same version: one wins, and nothing of the other is left."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from pathlib import Path

import pytest

from assets import DatasetStore
from resources.objects import open_lake
from tests.assets import writing
from tests.assets.cycle import NAME, content, data_and_documents, deliver, objects, planes_in, reached, served, whole
from tests.servers.s3 import S3Server

ROUNDS, WRITERS = 12, 2


def test_of_two_writers_that_seal_the_same_version_one_wins(tmp_path: Path) -> None:
    seal_in_two_processes(str(tmp_path / "lake"), {})


@pytest.mark.server
def test_of_two_writers_that_seal_the_same_version_one_wins_on_a_real_s3_server(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in versitygw.env.items():
        monkeypatch.setenv(variable, value)
    seal_in_two_processes(versitygw.url(), versitygw.env)


def seal_in_two_processes(url: str, env: Mapping[str, str]) -> None:
    world = planes_in(open_lake(url))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.assets.reading", "tests.assets.writing"])
    start, built, told = context.Barrier(WRITERS + 1), context.Barrier(WRITERS), context.Queue()
    writers = [
        context.Process(target=writing.race, args=(url, dict(env), ROUNDS, start, built, told)) for _ in range(WRITERS)
    ]
    for writer in writers:
        writer.start()
    met = 0
    try:
        for number in range(1, ROUNDS + 1):
            deliver(world, number)
            start.wait(writing.PATIENCE)
            outcomes = sorted((told.get(timeout=writing.PATIENCE) for _ in writers), key=lambda each: each.action)
            met += outcomes[0].action == "conflict"
            assert [each.action for each in outcomes] in (["conflict", "sealed"], ["sealed", "up-to-date"]), outcomes
            if outcomes[0].action == "conflict":
                assert "Nothing of this attempt is" in outcomes[0].problem
            (sealed,) = next(each.sealed for each in outcomes if each.action == "sealed")
            store = DatasetStore(world.lake, NAME)
            assert [ref.name for ref in store.versions()] == [f"v{done}" for done in range(1, number + 1)]
            assert store.require_current().version == sealed
            assert served(world.lake) == whole(number)
            assert data_and_documents(world.lake) == reached(world.lake), "the loser left nothing"
            if built.broken:
                built.reset()
            start.wait(writing.PATIENCE)
    finally:
        for writer in writers:
            writer.join(5)
            writer.kill()
    assert met > ROUNDS // 2, "they did race"
    for ref in DatasetStore(world.lake, NAME).versions():
        assert content(DatasetStore(world.lake, NAME).version(ref.id)) == whole(ref.number)
    assert objects(world.lake, f"datasets/{NAME}/attempts/") == {}
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
