"""Named readers: each record once, whatever dies before the commit, and of two that read at once
one wins.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import (
    CommitConflictError,
    CommitStateUnknownError,
    ConfigurationError,
    InvalidNameError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.objects import commit_log
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.readers import (
    NewRecords,
    list_readers,
    read_new,
    remove_reader,
)
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import AppendOptions, SourceRange, Sources
from tests.clocks import Clock, on_clock
from tests.faulty_store import Fault, FaultyStore
from tests.resources.streams.stream_helpers import SCHEMA

Records = Callable[..., pa.Table]


@pytest.fixture
def s(streams: LakeStreams, records: Records) -> LakeStreams:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=2)
    streams.append("s", records(*[(f"k{i}", i) for i in range(10)]), producer="p", sequence=0)
    return streams


def values(batch: NewRecords) -> list[int]:
    return sorted(batch.table(["v"])["v"].to_pylist())


def test_a_stream_of_another_system_has_no_readers_here(lake: Lake, s: LakeStreams) -> None:
    for ask in (
        lambda: read_new(lake, "kafka.s", reader="report"),
        lambda: list_readers(lake, "kafka.s"),
        lambda: remove_reader(lake, "kafka.s", "report"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            ask()
        assert (caught.value.stream, caught.value.system) == ("kafka.s", "kafka")
    for name in ("lake.", "lake.s.0", "s/../t"):
        with pytest.raises(InvalidNameError):
            list_readers(lake, name)


def test_a_reader_gets_each_record_once_and_begins_where_it_committed(
    lake: Lake, s: LakeStreams, records: Records
) -> None:
    with read_new(lake, "lake.s", reader="report") as batch:
        assert (batch.number, batch.records, values(batch)) == (1, 10, list(range(10)))
        batch.commit()
        batch.commit()  # once more does nothing
    s.append("s", records(("a", 10), ("b", 11)), producer="p", sequence=1, end_of_dataset="v1")
    with read_new(lake, "s", reader="report") as batch:
        assert (batch.number, batch.records, values(batch)) == (2, 2, [10, 11])
        batch.commit()
    with read_new(lake, "s", reader="report") as batch:
        assert (batch.number, batch.records, values(batch)) == (3, 0, [])
    with read_new(lake, "s", reader="another") as batch:
        assert values(batch) == list(range(12))


def test_what_was_not_committed_is_read_again_under_the_same_number(
    lake: Lake, s: LakeStreams, records: Records
) -> None:
    with read_new(lake, "s", reader="report") as batch:
        first = values(batch)
    s.append("s", records(("a", 10)), producer="p", sequence=1)
    again = read_new(lake, "s", reader="report")
    assert again.number == batch.number == 1
    assert values(again) == [*first, 10]
    assert values(batch) == first  # a batch that is open stays as it is


def test_of_two_at_once_one_commits_and_the_other_is_reported_who(
    lake: Lake, s: LakeStreams
) -> None:
    mine, theirs = (
        read_new(lake, "s", reader="report"),
        read_new(lake, "s", reader="report", by="the other run"),
    )
    theirs.commit()
    with pytest.raises(
        CommitConflictError, match=r"batch 1 can't be committed: the other run committed batch 1 at"
    ):
        mine.commit()
    assert not mine.committed
    assert read_new(lake, "s", reader="report").records == 0


def test_upcoming_begins_with_what_comes_next(lake: Lake, s: LakeStreams, records: Records) -> None:
    read_new(lake, "s", reader="report", start="upcoming").commit()
    s.append("s", records(("a", 10)), producer="p", sequence=1)
    assert values(read_new(lake, "s", reader="report")) == [10]


@pytest.mark.parametrize("limit", [1, 3, 7, 10, 11])
def test_a_limit_gives_all_in_turns(lake: Lake, s: LakeStreams, limit: int) -> None:
    taken: list[int] = []
    for _ in range(-(-10 // limit)):
        batch = read_new(lake, "s", reader="report", max_records=limit)
        assert batch.records == min(limit, 10 - len(taken))
        taken += batch.table(["v"])["v"].to_pylist()
        batch.commit()
    assert sorted(taken) == list(range(10))


def test_what_retention_took_unread_is_an_error_or_reported(
    lake: Lake, s: LakeStreams, records: Records, clock: Clock
) -> None:
    read_new(lake, "s", reader="report").commit()
    s.append("s", records(("a", 10), ("b", 11)), producer="p", sequence=1)
    clock.forward(days=3)
    s.append("s", records(("a", 12)), producer="p", sequence=2)
    s.configure("s", retention=Retention(max_age=timedelta(days=1)), compaction=CompactionPolicy())
    s.maintain("s")
    with pytest.raises(
        OffsetOutOfRangeError,
        match=r"retention has passed its position in lake\.s\.\d .*(?s:.*)keep",
    ):
        read_new(lake, "s", reader="report")
    (info,) = list_readers(lake, "s")
    assert (info.name, info.behind, info.lost, info.problem) == ("report", 1, 2, "")
    batch = read_new(lake, "s", reader="report", on_lost="oldest")
    assert sum(int(span.end) - int(span.start) for span in batch.lost.values()) == 2
    assert values(batch) == [12]
    batch.commit()
    assert read_new(lake, "s", reader="report").lost == {}


def test_a_stream_recreated_is_refused_until_the_reader_is_forgotten(
    lake: Lake, s: LakeStreams, clock: Clock
) -> None:
    batch = read_new(lake, "s", reader="report")
    batch.commit()
    for item in lake.store.list(f"{lake.stream_prefix('s')}/"):
        if "/readers/" not in item.key:
            lake.store.delete(item.key)
    again = LakeStreams(on_clock(lake, clock))
    again.create("s", schema=SCHEMA, key=["k"], partitions=2)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"deleted and recreated .*remove-reader s report"
    ):
        read_new(lake, "s", reader="report")
    assert "recreated" in list_readers(lake, "s")[0].problem
    assert remove_reader(lake, "lake.s", "report")
    assert not remove_reader(lake, "s", "report")
    assert list_readers(lake, "s") == []
    assert read_new(lake, "s", reader="report").number == 1


def test_a_batch_of_a_reader_that_was_forgotten_can_t_commit(lake: Lake, s: LakeStreams) -> None:
    read_new(lake, "s", reader="report", max_records=2).commit()
    batch = read_new(lake, "s", reader="report")
    remove_reader(lake, "s", "report")
    with pytest.raises(CommitConflictError, match="the reader was removed") as caught:
        batch.commit()
    assert caught.value.stream == "lake.s"


@pytest.mark.parametrize("outer", ["remove", "commit"])
def test_a_reader_that_commits_first_while_it_is_removed_can_be_read(
    lake: Lake, s: LakeStreams, outer: str
) -> None:
    """At any request of either, the other one runs in between."""
    for nth in range(1, 6):
        name = f"r{nth}"
        plan: list[Fault] = []
        faulty = lake_in(FaultyStore(lake.store, plan))
        first = read_new(faulty if outer == "commit" else lake, "s", reader=name)
        read_new(lake, "s", reader=name, max_records=2).commit()
        read_new(lake, "s", reader=name, max_records=2).commit()
        store = faulty.store
        assert isinstance(store, FaultyStore)
        store.requests.clear()
        if outer == "commit":
            store.plan = (
                Fault("*", nth, "meanwhile", lambda name=name: remove_reader(lake, "s", name)),
            )
            with suppress(CommitConflictError, CommitStateUnknownError):
                first.commit()
        else:

            def commit(first: NewRecords = first) -> None:
                with suppress(CommitConflictError, CommitStateUnknownError):
                    first.commit()

            store.plan = (Fault("*", nth, "meanwhile", commit),)
            remove_reader(faulty, "s", name)
        number = read_new(lake, "s", reader=name).number
        assert number == (2 if first.committed else 1)


def test_nonsense_is_refused(lake: Lake, s: LakeStreams) -> None:
    with pytest.raises(InvalidNameError):
        read_new(lake, "s", reader="a/b")
    with pytest.raises(ConfigurationError) as failure:
        read_new(lake, "s", reader="r", start="newest")  # type: ignore[arg-type]
    assert failure.value.argument == "start"
    with pytest.raises(ConfigurationError) as failure:
        read_new(lake, "s", reader="r", max_records=0)
    assert failure.value.argument == "max_records"
    assert list_readers(lake, "s") == []


def test_a_reader_is_reported_which_sources_were_read_again_since_its_last_commit(
    lake: Lake, s: LakeStreams, records: Records
) -> None:
    def send(sequence: int, start: int, end: int, epoch: int) -> None:
        count = end - start
        table = records(
            *[(f"k{i}", 100 * epoch + i) for i in range(start, end)],
            __epoch=pa.array([epoch] * count, pa.int32()),
            __source=pa.array(["lake.in.0"] * count, pa.string()),
            __source_offset=pa.array(range(start, end), pa.int64()),
            __source_epoch=pa.array([epoch] * count, pa.int32()),
            __source_reader=pa.array(["app"] * count, pa.string()),
        )
        ranges = (SourceRange("lake.in.0", start, end, epoch),)
        s.append(
            "s",
            table,
            producer="app",
            sequence=sequence,
            options=AppendOptions(sources=Sources("lake.in", "app", ranges)),
        )

    with read_new(lake, "s", reader="report") as batch:
        batch.commit()
    send(1, 0, 10, 0)
    with read_new(lake, "s", reader="report") as batch:
        assert (batch.replaced, values(batch)) == ((), list(range(10)))
        batch.commit()
    send(2, 4, 6, 1)
    send(3, 10, 12, 0)
    send(4, 10, 11, 2)
    with read_new(lake, "s", reader="report") as batch:
        assert batch.replaced == (("app", "lake.in.0", 4, 6, 1),)
        assert values(batch) == [10, 11, 104, 105, 210]
        assert sorted(batch.table(["v"], epochs="latest")["v"].to_pylist()) == [11, 104, 105, 210]
        batch.commit()


@pytest.mark.parametrize("seed", range(5))
def test_racing_and_dying_runs_commit_each_record_once(
    lake: Lake, s: LakeStreams, records: Records, seed: int
) -> None:
    chance, sent, counted = random.Random(seed), 10, [0] * 300
    open_batches: list[NewRecords] = []
    for step in range(60):
        what = chance.random()
        if what < 0.3:
            count = chance.randrange(1, 5)
            s.append(
                "s",
                records(*[(f"k{i}", sent + i) for i in range(count)]),
                producer="p",
                sequence=step + 1,
            )
            sent += count
        elif what < 0.6 or not open_batches:
            open_batches.append(
                read_new(lake, "s", reader="r", max_records=chance.choice([None, 1, 4]))
            )
        elif what < 0.7:
            open_batches.pop(chance.randrange(len(open_batches)))
        else:
            batch = open_batches.pop(chance.randrange(len(open_batches)))
            taken = values(batch)
            try:
                batch.commit()
            except CommitConflictError:
                continue
            for value in taken:
                counted[value] += 1
    for value in values(read_new(lake, "s", reader="r")):
        counted[value] += 1
    assert counted[:sent] == [1] * sent


@pytest.mark.lengthy
def test_old_positions_are_collected(
    lake: Lake, s: LakeStreams, records: Records, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "MANIFESTS_KEPT", 100)
    for sequence in range(1, 125):
        s.append("s", records(("a", sequence)), producer="p", sequence=sequence)
        read_new(lake, "s", reader="r").commit()
    assert s.maintain("s", clock.forward(days=365)).deleted_objects > 24
    assert len(list(lake.store.list(f"{lake.stream_prefix('s')}/readers/r/manifests/"))) == 100
    assert read_new(lake, "s", reader="r").records == 0
