"""Stores are asked for several files at the same time: who waits for one request waits for all
of them.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from dagster_adjunct import Lake, LakeStreams, Schema, advance_dataset, bounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import read_entries
from dagster_adjunct.resources.errors import StoreUnavailableError
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.threads import map_in_threads
from tests.faulty_store import Fault, FaultyStore, T

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = [{"k": f"k{number}", "n": number} for number in range(40)]
PARTITIONS = 4


class MeetingStore(FaultyStore):
    """A store that answers requests for data files in pairs; a request that stays alone breaks
    the barrier.
    """

    def __init__(self) -> None:
        super().__init__(InMemoryStore())
        self.pair = threading.Barrier(2, timeout=300)
        self.meets = False

    def _do(self, request: str, key: str, act: Callable[[], T]) -> T:
        if self.meets and "/data/" in key:
            self.pair.wait()
        return super()._do(request, key, act)


@pytest.fixture
def streams() -> LakeStreams:
    streams = LakeStreams(Lake(MeetingStore(), "tests"))
    streams.create("words", schema=Schema.of(k="string", n="int"), key=["k"], partitions=PARTITIONS)
    return streams


def meeting(streams: LakeStreams) -> MeetingStore:
    store = streams.lake.store
    assert isinstance(store, MeetingStore)
    store.meets = True
    return store


def test_the_files_of_an_append_are_written_and_read_at_the_same_time(streams: LakeStreams) -> None:
    store = meeting(streams)
    assert streams.append("words", ROWS, producer="me", sequence=1).rows == len(ROWS)
    read = streams.read_arrow(streams.all_ranges("words")).to_pylist()
    assert sorted(row["n"] for row in read) == list(range(len(ROWS)))
    assert [row["__partition"] for row in read] == sorted(row["__partition"] for row in read)
    assert sum(request == "upload" for request, _ in store.requests) == PARTITIONS


def test_the_files_of_a_version_are_read_at_the_same_time(streams: LakeStreams) -> None:
    words = bounded_dataset("words", input="lake.words", key="k", partitions=PARTITIONS)
    streams.append("words", ROWS, producer="me", sequence=1, end_of_dataset="v1")
    advance_dataset(words, lake=streams.lake, systems={"lake": streams}, spark=IN_PROCESS)
    meeting(streams)
    entries = read_entries(
        StoredVersions(streams.lake, "words").require_current(), None, threads=False
    )
    assert sorted(entries.column("n").to_pylist()) == list(range(len(ROWS)))


def test_an_append_of_which_a_file_can_not_be_written_has_no_effect(streams: LakeStreams) -> None:
    lake = Lake(
        FaultyStore(streams.lake.store, [Fault("upload", 2, "lost-before")]), streams.lake.id
    )
    with pytest.raises(StoreUnavailableError):
        LakeStreams(lake).append("words", ROWS, producer="me", sequence=1)
    assert streams.read_arrow(streams.all_ranges("words")).num_rows == 0
    assert streams.append("words", ROWS, producer="me", sequence=1).rows == len(ROWS)


def test_a_thread_that_outlives_the_main_one_asks_for_one_after_the_other() -> None:
    code = """
import threading, time
from dagster_adjunct.resources.threads import map_in_threads

def late():
    threading.main_thread().join()
    print(map_in_threads(lambda number: number * number, [1, 2, 3]))

threading.Thread(target=late).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.stdout, done.returncode) == ("[1, 4, 9]\n", 0), done.stderr


def test_results_keep_the_order_and_the_first_error_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    def work(number: int) -> int:
        if number in (3, 5):
            raise ValueError(number)
        ended.append(number)
        return number * number

    assert map_in_threads(work, [4, 1, 2]) == [16, 1, 4]
    assert map_in_threads(work, []) == []
    before = threading.active_count()
    with pytest.raises(ValueError, match="3"):
        map_in_threads(work, range(8))
    assert threading.active_count() == before
