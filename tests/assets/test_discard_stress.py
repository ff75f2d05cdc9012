"""Readers in eight processes while versions are published and discarded under them."""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing.queues import Queue
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.reading import CODES, DATASET, SCHEMA, WAYS, Seen, read_until
from tests.rounds import rounds
from tests.servers.s3 import S3Server

SPEC = bounded_dataset(DATASET, input="lake.rates", key="code", partitions=2)
NOTHING_BUT_THE_NEWEST = DiscardPolicy(keep=1, grace=timedelta(0))
READERS, VERSIONS = 8, rounds(6, 50)
PATIENCE = 60


@pytest.mark.lengthy
@pytest.mark.rounds
def test_eight_readers_meet_whole_versions_while_others_are_published_and_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_and_discard_under_readers(str(tmp_path / "lake"), {}, monkeypatch, pause=0.2, collectors=2)


@pytest.mark.long  # on a folder above; tests/resources/objects has what the store promises
@pytest.mark.rounds
@pytest.mark.server
def test_eight_readers_meet_whole_versions_on_a_real_s3_server(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    publish_and_discard_under_readers(versitygw.url(), versitygw.env, monkeypatch, pause=0.4, collectors=1)


def publish_and_discard_under_readers(
    url: str, env: Mapping[str, str], patch: pytest.MonkeyPatch, *, pause: float, collectors: int
) -> None:
    world = World(open_lake(url), IN_PROCESS)
    world.stream("rates", SCHEMA, ["code"], 2)
    deliver(world, 1)
    assert world.advance(SPEC).action == "sealed"
    with ExitStack() as running:
        readers, met = running.enter_context(reading(url, env, pause))
        gone: queue.Queue[str] = queue.Queue()
        problems = [running.enter_context(discarding(url, gone)) for _ in range(collectors)]
        for first in range(2, VERSIONS + 1, 2):
            numbers = range(first, min(first + 2, VERSIONS + 1))
            for number in numbers:
                deliver(world, number)
            assert len(world.advance(SPEC).sealed) == len(numbers)
            while met.get(timeout=PATIENCE) not in {*numbers, -1}:
                pass
        discarded = [gone.get(timeout=PATIENCE) for _ in range(1, VERSIONS)]
    assert [seen.problem for seen in readers] == [""] * READERS
    assert all(seen.whole for seen in readers)
    assert len({number for seen in readers for number in seen.whole}) > 3, "they read on while versions went"
    assert problems == [[]] * collectors
    assert len(set(discarded)) == VERSIONS - 1, "two that discard at once don't both claim a version"
    assert gone.empty(), "the newest version stays"
    discard(world.lake, DATASET, NOTHING_BUT_THE_NEWEST, by="the end")
    assert left(world) == {StoredVersions(world.lake, DATASET).require_current().version}


def deliver(world: World, number: int) -> None:
    world.send("rates", [(code, number) for code in CODES], version=f"v{number}")


def left(world: World) -> set[str]:
    """Return the ids of all versions of which anything is left: files, a document, a lease, a build on record."""
    store, prefix = world.lake.store, f"datasets/{DATASET}"
    (served,) = [ref for ref in StoredVersions(world.lake, DATASET).versions() if ref.state == "sealed"]
    assert not list(store.list(f"{prefix}/leases/")), "every reader has given its leases back"
    assert not list(store.list(f"{prefix}/attempts/"))
    documents = {item.key.rsplit("/", 1)[1].rpartition("-")[0] for item in store.list(f"{prefix}/versions/")}
    folders = {item.key.split("/")[3] for item in store.list(f"{prefix}/data/")}
    return documents | {served.id if folder in served.id else folder for folder in folders}


@contextmanager
def reading(url: str, env: Mapping[str, str], pause: float) -> Iterator[tuple[list[Seen], Queue[int]]]:
    """Start the readers and wait until each has read; the list is what they met, once the context has ended, and from
    the queue come the numbers of the versions that one of them meets first, -1 where one has died."""
    readings: list[Seen] = []
    ways = sorted(WAYS)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.assets.reading"])
    stop, started, seen = context.Event(), context.Queue(), context.Queue()
    processes = [
        context.Process(target=read_until, args=(stop, started, seen, url, dict(env), ways[number % len(ways)], pause))
        for number in range(READERS)
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            started.get(timeout=PATIENCE)
        yield readings, started
        stop.set()
        readings += [seen.get(timeout=PATIENCE) for _ in processes]
    except queue.Empty:
        pytest.fail("a reader died or met nothing, or a version was never discarded")
    finally:
        stop.set()
        for process in processes:
            process.join(PATIENCE)
            process.kill()


@contextmanager
def discarding(url: str, gone: queue.Queue[str]) -> Iterator[list[str]]:
    """Discard again and again, beside whoever else does: put what went into `gone`; the list is of what went wrong."""
    problems: list[str] = []
    stop = threading.Event()

    def run() -> None:
        lake = open_lake(url)
        try:
            while not stop.wait(0.1):
                for judged in discard(
                    lake, DATASET, NOTHING_BUT_THE_NEWEST, by=threading.current_thread().name
                ).discarded:
                    gone.put(judged.what)
        except Exception as error:  # noqa: BLE001 - told by the test
            problems.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield problems
    finally:
        stop.set()
        thread.join()
