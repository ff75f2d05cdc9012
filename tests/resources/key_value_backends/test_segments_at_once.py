"""Several at once on every backend: threads, each with a backend and an event loop of its own,
as processes have.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from dagster_adjunct.resources.errors import (
    KeyValueTableNotFoundError,
    KeyValueTableSealedError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import ConditionsFailed
from tests.resources.key_value_backends.segment_handle import (
    Handle,
    Request,
    insert,
    of,
    put,
    remove,
    replace,
    surely,
)
from tests.resources.key_value_backends.segment_stores import QUICK_STORES, new_table_id

WRITERS = 4
pytestmark = pytest.mark.parametrize("segment_store", QUICK_STORES, indirect=True)


@pytest.fixture
def at_once(segment_store, table) -> Callable[..., list[Any]]:
    """Calls `work(handle, number)` in several threads, and returns the results."""

    def run(work: Callable[[Handle, int], Any], threads: int = WRITERS) -> list[Any]:
        start = threading.Barrier(threads)

        def thread(number: int) -> Any:
            with own_handle(segment_store, table) as handle:
                start.wait()
                return work(handle, number)

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(thread, range(threads)))

    return run


@contextmanager
def own_handle(segment_store, table) -> Iterator[Handle]:
    with segment_store.running() as run:
        handle = Handle(segment_store.backend().open(table, 0), run)
        try:
            yield handle
        finally:
            run(handle.segment.close())


def test_of_several_inserts_of_a_key_one_is_done_and_the_others_find_it(handle, at_once):
    keys = [of(b"%d" % number) for number in range(8)]

    def work(handle: Handle, number: int) -> list[tuple[bytes, bool]]:
        outcomes = []
        for key in keys:
            request = Request.of([insert(key, b"%d" % number), put(of(b"last"), b"%d" % number)])
            try:
                surely(handle, request)
                outcomes.append((request.versions[0], True))
            except ConditionsFailed as error:
                outcomes.append((error.found[0], False))
        return outcomes

    outcomes = at_once(work)
    for place, key in enumerate(keys):
        versions, done = zip(*(of_one[place] for of_one in outcomes), strict=True)
        assert done.count(True) == 1
        assert set(versions) == {handle.get(key)[0].version}


def test_counting_by_conditional_replaces_loses_nothing(handle, at_once):
    count, increments, conflicts = of(b"count"), 10, []
    handle.write(insert(count, b"0"))

    def work(handle: Handle, number: int) -> None:
        done = 0
        while done < increments:
            [entry] = handle.get(count)
            try:
                surely(
                    handle,
                    Request.of([replace(count, entry.version, b"%d" % (int(entry.value) + 1))]),
                )
                done += 1
            except ConditionsFailed as error:
                conflicts.append((entry.version, error.found[0]))

    at_once(work)
    assert all(actual not in (None, expected) for expected, actual in conflicts)
    assert handle.value(count) == b"%d" % (WRITERS * increments)


def test_nobody_sees_a_part_of_a_request(handle, at_once):
    one, two, rounds = of(b"one"), of(b"two"), 15
    handle.write(put(one, b"0"), put(two, b"0"))
    ended = threading.Event()

    def work(handle: Handle, number: int) -> int:
        if number == 0:
            for turn in range(1, rounds + 1):
                surely(handle, Request.of([put(one, b"%d" % turn), put(two, b"%d" % turn)]))
            ended.set()
            return rounds
        first, second = (one, two) if number == 1 else (two, one)
        seen = 0
        while not ended.is_set():
            # What is read later is not older, whichever of the two it is.
            before, after = int(handle.value(first)), int(handle.value(second))
            assert seen <= before <= after
            seen = after
        return seen

    assert max(at_once(work, threads=3)) == rounds


def test_an_iteration_has_each_stable_entry_once_while_others_change(handle, at_once):
    stay, come = (
        [of(b"%03d stay" % number) for number in range(40)],
        [of(b"%03d go" % number) for number in range(40)],
    )
    handle.write(*(put(key) for key in stay))
    ended = threading.Event()

    def work(handle: Handle, number: int) -> None:
        if number == 0:
            for turn in range(6):
                surely(handle, Request.of([put(key) for key in come[turn % 3 :: 3]]))
                surely(handle, Request.of([remove(key) for key in come[turn % 3 :: 3]]))
                surely(handle, Request.of([put(key, b"%d" % turn) for key in stay[:: turn + 1]]))
            ended.set()
            return
        while not ended.is_set():
            seen = [entry.key for entry in handle.entries(limit=9, values=False)]
            assert seen == sorted(set(seen))
            assert set(stay) <= set(seen) <= {*stay, *come}

    at_once(work, threads=2)
    assert [entry.key for entry in handle.entries()] == stay


@pytest.mark.lengthy
def test_no_write_is_applied_after_a_seal_has_returned(handle, at_once, backend, table):
    written, under_way = [], threading.Semaphore(0)

    def work(handle: Handle, number: int) -> dict | None:
        if number == 0:
            for _ in range(6):
                assert under_way.acquire(timeout=300)
            backend.seal(table, 1)
            return handle.stored()
        for turn in range(100_000):
            key = of(b"%d of %d" % (turn, number))
            try:
                surely(
                    handle, Request.of([insert(key), put(of(b"last of %d" % number), b"%d" % turn)])
                )
            except KeyValueTableSealedError:
                return None
            written.append(key)
            under_way.release()
        raise AssertionError("the seal does not come")

    sealed = at_once(work)[0]
    assert handle.stored() == sealed
    assert {key for key in sealed if b" of " in key and b"last" not in key} == set(written)


def test_writers_of_a_table_that_is_deleted_meet_the_error_and_nothing_else(
    at_once, backend, table
):
    under_way = threading.Semaphore(0)

    def work(handle: Handle, number: int) -> None:
        if number == 0:
            for _ in range(6):
                assert under_way.acquire(timeout=300)
            backend.delete(table, 1)
            with pytest.raises(KeyValueTableNotFoundError):
                handle.write(put(of(b"late")))
            return
        with pytest.raises(KeyValueTableNotFoundError):
            write_on(handle, number)

    def write_on(handle: Handle, number: int) -> None:
        for turn in range(100_000):
            surely(
                handle, Request.of([insert(of(b"%d of %d" % (turn, number))), remove(of(b"none"))])
            )
            # a server may be at a loss while a table vanishes
            with suppress(TableUnavailableError):
                handle.get(of(b"0 of 1"))
            under_way.release()

    at_once(work)


def test_creating_sealing_and_deleting_by_several_at_once_end_in_one_state(segment_store, run):
    table = new_table_id()
    backends = [segment_store.backend() for _ in range(3)]
    segment = backends[0].open(table, 0)
    with ThreadPoolExecutor(3) as pool:

        def together(name: str) -> None:
            start = threading.Barrier(3)

            def thread(backend) -> None:
                start.wait()
                getattr(backend, name)(table, 2)

            list(pool.map(thread, backends))

        together("create")
        handle = Handle(segment, run)
        handle.write(insert(of(b"apple"), b"red"))
        together("create")
        assert handle.value(of(b"apple")) == b"red"
        together("seal")
        with pytest.raises(KeyValueTableSealedError):
            handle.write(put(of(b"apple"), b"x"))
        together("delete")
        with pytest.raises(KeyValueTableNotFoundError):
            handle.entries()
    run(segment.close())
