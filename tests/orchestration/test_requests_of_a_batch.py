"""Requests of a batch: none is made twice, and those that do not depend on each other are made
at the same time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Application,
    Lake,
    LakeStreams,
    Schema,
    bounded_dataset,
    run_application,
)
from dagster_adjunct.orchestration.step import step
from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.streams import delete_stream
from tests.clocks import Clock, on_clock
from tests.faulty_store import Fault, FaultyStore

T = TypeVar("T")
OWNED = [("get", "applications/shop/run.json")]
OUTPUT = [*OWNED, ("get", "applications/shop/CURRENT"), ("get", "streams/out/CURRENT")]
CLOSE = [*OWNED, ("put_if_absent", "applications/shop/manifests/")]
PLAN = [
    *OWNED,
    *[("get", f"{place}/CURRENT") for place in ("datasets/a", "datasets/b", "streams/orders")],
]
READ = [("get", f"{place}/data/") for place in ("datasets/a", "datasets/b", "streams/orders")]
COMMIT = ["put_if_absent", "put_if_match"]


class Meetings(FaultyStore):
    """A store that answers the requests of each of `meetings`, one after the other, when all of
    them have come.
    """

    meetings: tuple[list[tuple[str, str]], ...] = ()
    barrier: threading.Barrier | None = None

    def call(self, *meetings: list[tuple[str, str]]) -> None:
        self.meetings = meetings
        self.barrier = threading.Barrier(len(meetings[0]), self._next) if meetings else None

    def _next(self) -> None:
        self.call(*self.meetings[1:])

    def _do(self, request: str, key: str, act: Callable[[], T]) -> T:
        barrier = self.barrier
        if barrier is not None and any(
            request == kind and key.startswith(begin) for kind, begin in self.meetings[0]
        ):
            barrier.wait(60)
        return super()._do(request, key, act)


def test_a_batch_waits_for_ten_requests_in_turn_and_makes_none_twice() -> None:
    store = Meetings(InMemoryStore())
    lake = Lake(store, "memory")
    streams = LakeStreams(lake)
    schema = Schema.of(k="string", n="int")
    app = Application("shop", engine="auto", max_batch_records=1)
    streams.create("orders", schema=schema, key=["k"], partitions=1)
    joined = app.input_stream("lake.orders", default_offset="oldest")
    for name in ("a", "b"):
        streams.create(name, schema=schema, key=["k"], partitions=1)
        streams.append(name, [{"k": "k", "n": 1}], producer="p", sequence=1, end_of_dataset="v1")
        table = app.table(bounded_dataset(name, input=f"lake.{name}", key="k", partitions=1))
        joined = joined.join(table, on="k", prefix=f"{name}_")
    joined.send_to(app.output_stream("lake.out", partitions=1, key="k"))
    for sequence in range(3):
        streams.append("orders", [{"k": "k", "n": sequence}], producer="p", sequence=sequence)
    run_application(app, lake=lake, spark=IN_PROCESS, max_batches=1)
    store.call(READ, OUTPUT, CLOSE, PLAN, OUTPUT, CLOSE)
    run_application(app, lake=lake, spark=IN_PROCESS, max_batches=2)
    assert not store.meetings

    commits = [
        at
        for at, made in enumerate(store.requests)
        if made == ("put_if_match", "applications/shop/CURRENT")
    ]
    requests = store.requests[commits[-3] + 1 : commits[-1] + 1]
    turns = [
        PLAN,
        COMMIT[:1],
        COMMIT[1:],
        ["get"],
        OUTPUT,
        ["upload"],
        COMMIT[:1],
        COMMIT[1:],
        CLOSE,
        COMMIT[1:],
    ]
    assert (len(turns), len(requests)) == (10, sum(map(len, turns)))
    rows = streams.read_arrow(streams.all_ranges("out")).select(["n", "a_n", "b_n"]).to_pylist()
    assert rows == [{"n": number, "a_n": 1, "b_n": 1} for number in range(3)]


def retried(
    monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[LakeStreams, Clock], object]
) -> LakeStreams:
    """Run a batch that copies two records, and fails for its store once after `meanwhile`."""
    monkeypatch.setattr(step, "_RETRY_PAUSES", (0.0,))
    clock, inner = Clock(), InMemoryStore()
    streams = LakeStreams(on_clock(Lake(inner, "memory"), clock))
    fill(streams, 0)
    app = Application("shop", engine="auto")
    app.input_stream("lake.orders", default_offset="oldest").send_to(
        app.output_stream("lake.out", partitions=1)
    )
    plan = [
        Fault("upload", 1, "meanwhile", lambda: meanwhile(streams, clock), below="streams/out/"),
        Fault("upload", 1, "lost-before", below="streams/out/"),
    ]
    run_application(
        app, lake=on_clock(Lake(FaultyStore(inner, plan), "memory"), clock), spark=IN_PROCESS
    )
    return streams


def fill(streams: LakeStreams, first: int) -> None:
    streams.create("orders", schema=Schema.of(k="string", n="int"), key=["k"], partitions=1)
    for number in range(2):
        streams.append("orders", [{"k": "k", "n": first + number}], producer="p", sequence=number)


def test_a_batch_that_is_retried_reads_its_inputs_as_they_are_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def merge_files_and_delete_the_old_ones(streams: LakeStreams, clock: Clock) -> None:
        streams.configure("orders", retention=None, compaction=CompactionPolicy(min_segments=2))
        streams.maintain("orders")
        clock.forward(hours=2)
        assert streams.maintain("orders").deleted_objects

    streams = retried(monkeypatch, merge_files_and_delete_the_old_ones)
    assert streams.read_arrow(streams.all_ranges("out")).column("n").to_pylist() == [0, 1]


def test_a_batch_that_is_retried_does_not_read_a_stream_that_was_recreated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def recreate(streams: LakeStreams, clock: Clock) -> None:
        delete_stream(streams, "orders", streams.state("orders")[0], reason="a test", by="ada")
        fill(streams, 100)

    with pytest.raises(OffsetOutOfRangeError, match="the open batch 1 ") as caught:
        retried(monkeypatch, recreate)
    assert (caught.value.application, caught.value.stream) == ("shop", "lake.orders")
