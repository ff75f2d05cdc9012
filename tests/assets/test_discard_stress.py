"""Readers in eight processes while versions are published and discarded under them."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.reading import CODES, DATASET, PATIENCE, SCHEMA, WAYS, discarding, reading
from tests.rounds import rounds
from tests.servers.s3 import S3Server

SPEC = bounded_dataset(DATASET, input="lake.rates", key="code", partitions=2)
NOTHING_BUT_THE_NEWEST = DiscardPolicy(keep=1, grace=timedelta(0))
READERS = [sorted(WAYS)[number % len(WAYS)] for number in range(8)]
VERSIONS = rounds(6, 50)


@pytest.mark.lengthy
@pytest.mark.rounds
def test_eight_readers_meet_whole_versions_while_others_are_published_and_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_and_discard_under_readers(
        str(tmp_path / "lake"), {}, monkeypatch, pause=0.2, collectors=2
    )


@pytest.mark.long  # on a folder above; tests/resources/objects has what the store promises
@pytest.mark.rounds
@pytest.mark.server
def test_eight_readers_meet_whole_versions_on_a_real_s3_server(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    publish_and_discard_under_readers(
        versitygw.url(), versitygw.env, monkeypatch, pause=0.4, collectors=1
    )


def publish_and_discard_under_readers(
    url: str, env: Mapping[str, str], patch: pytest.MonkeyPatch, *, pause: float, collectors: int
) -> None:
    world = World(open_lake(url), IN_PROCESS)
    world.stream("rates", SCHEMA, ["code"], 2)
    deliver(world, 1)
    assert world.advance(SPEC).action == "sealed"
    with ExitStack() as running:
        readers, matched = running.enter_context(reading(url, env, READERS, pause))
        gone: queue.Queue[str] = queue.Queue()
        problems = [running.enter_context(discarding(url, gone)) for _ in range(collectors)]
        for first in range(2, VERSIONS + 1, 2):
            numbers = range(first, min(first + 2, VERSIONS + 1))
            for number in numbers:
                deliver(world, number)
            assert len(world.advance(SPEC).sealed) == len(numbers)
            while matched.get(timeout=PATIENCE) not in {*numbers, -1}:
                pass
        discarded = [gone.get(timeout=PATIENCE) for _ in range(1, VERSIONS)]
    assert [seen.problem for seen in readers] == [""] * len(READERS)
    assert all(seen.whole for seen in readers)
    assert len({number for seen in readers for number in seen.whole}) > 3, (
        "they read on while versions went"
    )
    assert problems == [[]] * collectors
    assert len(set(discarded)) == VERSIONS - 1, (
        "two that discard at once don't both claim a version"
    )
    assert gone.empty(), "the newest version stays"
    discard(world.lake, DATASET, NOTHING_BUT_THE_NEWEST, by="the end")
    assert left(world) == {StoredVersions(world.lake, DATASET).require_current().version}


def deliver(world: World, number: int) -> None:
    world.send("rates", [(code, number) for code in CODES], version=f"v{number}")


def left(world: World) -> set[str]:
    """Return the ids of all versions of which anything is left: files, a document, a lease, a
    build on record.
    """
    store, prefix = world.lake.store, f"datasets/{DATASET}"
    (served,) = [
        ref for ref in StoredVersions(world.lake, DATASET).versions() if ref.state == "sealed"
    ]
    assert not list(store.list(f"{prefix}/leases/")), "every reader has given its leases back"
    assert not list(store.list(f"{prefix}/attempts/"))
    documents = {
        item.key.rsplit("/", 1)[1].rpartition("-")[0] for item in store.list(f"{prefix}/versions/")
    }
    folders = {item.key.split("/")[3] for item in store.list(f"{prefix}/data/")}
    return documents | {served.id if folder in served.id else folder for folder in folders}
