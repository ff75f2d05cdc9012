"""Readers in processes of their own, for tests of what they meet while versions are published and
discarded.

Every entry of a version carries the version's number, and every version has the same keys: whoever
reads two numbers, or misses a key, has met a mix.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from typing import Any

# What readers import is imported here, once, for all that are forked from a process that has read
# this module.
import pyarrow.parquet  # noqa: F401
import pytest

from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.versions.leases import Lease
from dagster_adjunct.resources.errors import VersionDiscardedError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema

DATASET = "rates"
SCHEMA = Schema.of(code="int", version="int")
CODES = range(300)
PATIENCE = 60
_AT_ONCE = DiscardPolicy(keep=1, grace=timedelta(0))


@dataclass
class Seen:
    """What one reader met: whole versions by how often, how often it came too late, and what
    must not be.
    """

    whole: dict[int, int]
    late: int = 0
    problem: str = ""


def read_until(
    stop: Event,
    started: Queue[int],
    seen: Queue[Seen],
    url: str,
    env: Mapping[str, str],
    way: str,
    pause: float,
) -> None:
    """Read the version served, whole, again and again until `stop` is set; then say what was met.

    `pause` is for how many seconds a version is held, or nothing is read. The number of each
    version goes to `started` when it is met first.
    """
    os.environ.update(env)
    mine = Seen({})
    try:
        WAYS[way](open_lake(url), stop, pause, started, mine)
    except Exception as error:  # noqa: BLE001 - the process ends here, and its word is all that remains
        mine.problem = f"{type(error).__name__}: {error}"
        started.put(-1)
    seen.put(mine)


def _by_lease(lake: Lake, stop: Event, pause: float, started: Queue[int], mine: Seen) -> None:
    """Hold a lease on what is current and read it, and once more after a while, as a batch does."""
    last = 0
    while not stop.is_set():
        view = StoredVersions(lake, DATASET).require_current()
        try:
            lease = Lease.acquire(lake, DATASET, [view.version], holder=f"process {os.getpid()}")
        except VersionDiscardedError:
            mine.late += 1
            continue
        with lease:
            last = _note(mine, started, last, dict(view.items()), view.sealed.number)
            stop.wait(pause)
            again = VersionReader(view.store, DATASET, view.sealed)  # with nothing in its cache
            last = _note(mine, started, last, dict(again.items()), view.sealed.number)
            lease.check()


def _by_opening(lake: Lake, stop: Event, pause: float, started: Queue[int], mine: Seen) -> None:
    """Open the dataset anew for each reading, as a script does."""
    last = 0
    while not stop.wait(pause):
        with open_dataset(lake, DATASET) as dataset:
            last = _note(mine, started, last, *_whole(dataset))


def _by_serving(lake: Lake, stop: Event, pause: float, started: Queue[int], mine: Seen) -> None:
    """Keep it open and move on between two calls, as a service does; half of the readings are by
    key.
    """
    last = 0
    with open_dataset(lake, DATASET) as dataset:
        while not stop.is_set():
            dataset.refresh()
            dataset.take_lease()
            held = dataset.version
            stop.wait(pause)
            last = _note(mine, started, last, *_whole(dataset))
            assert dataset.version == held, (
                f"{dataset.version} took the place of {held}, which was held"
            )
            entries = {(code,): entry for code, entry in dataset.get_all(CODES).items()}
            last = _note(mine, started, last, entries, None)


def _whole(dataset: Dataset) -> tuple[dict[Any, Any], None]:
    return dict(dataset.items()), None


def _note(
    mine: Seen, started: Queue[int], last: int, entries: Mapping[Any, Any], number: int | None
) -> int:
    """Count what was read, if it is one whole version that is not older than the one before;
    return its number.
    """
    numbers = {entry["version"] for entry in entries.values()}
    assert len(entries) == len(CODES), f"{len(entries)} of {len(CODES)} keys"
    assert len(numbers) == 1, f"a mix of versions {sorted(numbers)}"
    (served,) = numbers
    assert number in (None, served), f"version {number} holds the entries of version {served}"
    assert served >= last, f"version {served} after version {last}"
    if served not in mine.whole:
        started.put(int(served))
    mine.whole[served] = mine.whole.get(served, 0) + 1
    return int(served)


Way = Callable[[Lake, Event, float, "Queue[int]", Seen], None]
WAYS: dict[str, Way] = {"lease": _by_lease, "open": _by_opening, "serve": _by_serving}


@contextmanager
def reading(
    url: str, env: Mapping[str, str], ways: Sequence[str], pause: float
) -> Iterator[tuple[list[Seen], Queue[int]]]:
    """Start a reader for each way and wait until each has read.

    The list is what they met, once the context has ended, and from the queue come the numbers of
    the versions that one of them meets first, -1 where one has died.
    """
    readings: list[Seen] = []
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.assets.reading"])
    stop, started, seen = context.Event(), context.Queue(), context.Queue()
    processes = [
        context.Process(target=read_until, args=(stop, started, seen, url, dict(env), way, pause))
        for way in ways
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
        pytest.fail("a reader died or met nothing, or what should go was never discarded")
    finally:
        stop.set()
        for process in processes:
            process.join(PATIENCE)
            process.kill()


@contextmanager
def discarding(url: str, gone: queue.Queue[str]) -> Iterator[list[str]]:
    """Discard again and again, beside whoever else does: put what went into `gone`; the list is
    of what went wrong.
    """
    problems: list[str] = []
    stop = threading.Event()

    def run() -> None:
        lake = open_lake(url)
        try:
            while not stop.wait(0.1):
                for judged in discard(
                    lake, DATASET, _AT_ONCE, by=threading.current_thread().name
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
