from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    ProducerConflictError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    AppendOptions,
    AppendResult,
    OffsetRange,
    StreamCapabilities,
    StreamSystem,
    SystemStreamPartition,
)
from tests.clocks import Clock, on_clock
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.streams.stream_helpers import SCHEMA

Records = Callable[..., pa.Table]


@pytest.fixture
def s(streams: LakeStreams) -> LakeStreams:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    return streams


def everything(streams: LakeStreams, stream: str = "s") -> list[tuple[object, ...]]:
    table = streams.read_arrow(streams.all_ranges(stream))
    return [tuple(row.values()) for row in table.to_pylist()]


def test_records_get_dense_offsets_in_the_partition_of_their_key(
    s: LakeStreams, records: Records
) -> None:
    rows = [("a", 1), ("b", 2), (None, 3), ("a", 4), ("c", 5), (None, 6)]
    s.append("s", records(*rows[:3]), producer="p", sequence=0)
    result = s.append("s", records(*rows[3:]), producer="p", sequence=1)
    expected: dict[int, list[tuple[object, ...]]] = {p: [] for p in range(4)}
    for k, v in rows:
        p = bucket_of_key([k], ["string"], 4)
        expected[p].append((k, v, p, len(expected[p])))
    assert [row[:4] for row in everything(s)] == [row for p in range(4) for row in expected[p]]
    assert bucket_of_key([None], ["string"], 4) == 42 % 4
    assert dict(result.next) == {p: str(len(expected[p])) for p in range(4)}
    assert result.rows == 3
    assert not result.duplicate


def test_a_retried_append_adds_nothing(s: LakeStreams, records: Records, clock: Clock) -> None:
    first = s.append(
        "s", records(("a", 1), ("b", 2)), producer="p", sequence=7, end_of_dataset="v1"
    )
    before = everything(s)
    clock.forward(minutes=5)
    chunked = pa.concat_tables([records(("a", 1)), records(("b", 2))])
    again = s.append("s", chunked, producer="p", sequence=7, end_of_dataset="v1")
    assert again.duplicate
    assert (again.first, again.next, again.rows) == (first.first, first.next, 2)
    assert everything(s) == before
    assert s.appended("s", "p", 7) == again
    assert s.appended("s", "p", 8) is None
    files = [item.key for item in s.lake.store.list("streams/s/data/")]
    assert len({key.split("/")[3] for key in files}) == 1


def test_one_sequence_with_other_contents_is_a_conflict(s: LakeStreams, records: Records) -> None:
    s.append("s", records(("a", 1)), producer="p", sequence=0)
    for other in (
        records(("a", 2)),
        records(("a", 1), ("a", 1)),
        records(("a", 1), __tombstone=[True]),
    ):
        with pytest.raises(ProducerConflictError) as failure:
            s.append("s", other, producer="p", sequence=0)
        assert failure.value.facts == {
            "stream": "lake.s",
            "producer": "p",
            "sequence": 0,
            "newest": 0,
        }
    with pytest.raises(ProducerConflictError):
        s.append("s", records(("a", 1)), producer="p", sequence=0, end_of_dataset="v1")
    assert not s.append("s", records(("a", 2)), producer="q", sequence=0).duplicate
    assert [row[1] for row in everything(s)] == [1, 2]


@pytest.mark.parametrize("sequence", [0, 1, 9, 10])
def test_a_producer_whose_counter_begins_again_is_refused_with_its_newest_sequence(
    s: LakeStreams, records: Records, sequence: int
) -> None:
    for number in range(10, 43):
        s.append("s", records(("a", number)), producer="p", sequence=number)
    before = [item.key for item in s.lake.store.list("streams/s/data/")]
    for append in (
        lambda: s.append("s", records(("a", sequence)), producer="p", sequence=sequence),
        lambda: s.append_markers("s", "v1", producer="p", sequence=sequence),
        lambda: s.appended("s", "p", sequence),
    ):
        with pytest.raises(ProducerConflictError) as refused:
            append()
        error = refused.value
        assert (error.stream, error.producer, error.sequence, error.newest) == (
            "lake.s",
            "p",
            sequence,
            42,
        )
    assert [item.key for item in s.lake.store.list("streams/s/data/")] == before
    assert s.append("s", records(("a", 1)), producer="p", sequence=43).rows == 1
    assert s.append("s", records(("a", 12)), producer="p", sequence=12).duplicate, (
        "the oldest that is known"
    )
    assert len(everything(s)) == 34


def test_other_contents_under_a_known_sequence_are_refused_with_the_newest(
    s: LakeStreams, records: Records
) -> None:
    for number in range(1, 4):
        s.append("s", records(("a", number)), producer="p", sequence=number)
    assert s.append("s", records(("a", 1)), producer="p", sequence=1).duplicate
    with pytest.raises(ProducerConflictError) as refused:
        s.append("s", records(("b", 1)), producer="p", sequence=1)
    assert (refused.value.sequence, refused.value.newest) == (1, 3)


def test_sequences_may_have_gaps_and_come_late_within_the_window(
    s: LakeStreams, records: Records
) -> None:
    for sequence in (5, 9, 7):
        assert not s.append(
            "s", records(("a", sequence)), producer="p", sequence=sequence
        ).duplicate
    assert s.append("s", records(("a", 9)), producer="p", sequence=9).duplicate


def test_an_append_of_nothing_only_leaves_its_sequence(s: LakeStreams, records: Records) -> None:
    result = s.append("s", records(), producer="p", sequence=0)
    assert (result.rows, dict(result.next)) == (0, dict.fromkeys(range(4), "0"))
    assert s.append("s", records(), producer="p", sequence=0).duplicate
    assert s.describe("s")["segments"] == 0


def test_a_crash_between_files_and_commit_leaves_nothing_and_a_retry_adds_once(
    records: Records,
) -> None:
    table = records(*[(f"k{i}", i) for i in range(20)])
    for nth in range(1, 40):
        inner = InMemoryStore()
        LakeStreams(lake_in(inner)).create("s", schema=SCHEMA, key=["k"], partitions=4)
        broken = FaultyStore(inner, [Fault("*", nth, "crash-after")])
        ended = False
        try:
            LakeStreams(Lake(broken, "x")).append("s", table, producer="p", sequence=0)
            ended = True
        except Crash:
            pass
        streams = LakeStreams(lake_in(inner))
        assert len(everything(streams)) in (0, 20)
        streams.append("s", table, producer="p", sequence=0)
        assert sorted(str(row[1]) for row in everything(streams)) == sorted(
            str(i) for i in range(20)
        )
        if ended:
            assert nth > 6
            return
    pytest.fail("an append takes more than 39 requests")


def test_a_lost_reply_of_the_commit_is_found_out(records: Records) -> None:
    inner = InMemoryStore()
    LakeStreams(lake_in(inner)).create("s", schema=SCHEMA, partitions=1)
    broken = FaultyStore(inner, [Fault("put_if_match", 1, "lost-after")])
    streams = LakeStreams(Lake(broken, "x"))
    assert not streams.append("s", records(("a", 1)), producer="p", sequence=0).duplicate
    assert len(everything(streams)) == 1


def test_records_that_do_not_fit_name_the_column(s: LakeStreams, records: Records) -> None:
    wrong = pa.table({"k": ["a"], "v": ["12"]})
    with pytest.raises(SchemaMismatchError) as failure:
        s.append("s", wrong, producer="p", sequence=0)
    assert failure.value.facts == {"stream": "lake.s", "column": "v"}
    with pytest.raises(SchemaMismatchError) as failure:
        s.append("s", pa.table({"k": ["a"], "w": [1]}), producer="p", sequence=0)
    assert failure.value.facts == {"stream": "lake.s", "column": "v"}
    with pytest.raises(SchemaMismatchError) as failure:
        s.append("s", records(("a", 1), __tombstone=[1]), producer="p", sequence=0)
    assert failure.value.facts == {"stream": "lake.s", "column": "__tombstone"}
    with pytest.raises(SchemaMismatchError) as failure:
        s.append(
            "s", records(("a", 1), __timestamp=[dt.datetime(2026, 1, 1)]), producer="p", sequence=0
        )
    assert failure.value.facts == {"stream": "lake.s", "column": "__timestamp"}
    with pytest.raises(ConfigurationError) as failure:
        s.append("s", records(("a", 1)), producer="p", sequence=-1)
    assert failure.value.facts == {"argument": "sequence"}
    with pytest.raises(ConfigurationError) as failure:
        s.append(
            "s", records(("a", 1)), producer="p", sequence=0, options=AppendOptions(order_by=("k",))
        )
    assert failure.value.facts == {"argument": "order_by"}
    assert everything(s) == []
    assert s.describe("s")["commits"] == 1


def test_small_integers_are_widened(s: LakeStreams) -> None:
    table = pa.table({"k": ["a"], "v": pa.array([3], pa.int8())})
    s.append("s", table, producer="p", sequence=0)
    assert everything(s)[0][1] == 3


def test_the_record_time_is_its_column_then_the_mark_then_the_append(
    streams: LakeStreams, clock: Clock
) -> None:
    streams.create("t", schema=Schema.of(v="bigint", at="timestamp"), partitions=1, timestamp="at")
    day = dt.datetime(2013, 7, 1, tzinfo=dt.UTC)
    mark = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
    kind = pa.timestamp("us", tz="UTC")
    table = pa.table(
        {
            "v": [1, 2, 3],
            "at": pa.array([day, day, None], kind),
            "__timestamp": pa.array([None, mark, None], kind),
        }
    )
    streams.append("t", table, producer="p", sequence=0)
    assert [row[4] for row in everything(streams, "t")] == [day, mark, clock.now]


@pytest.mark.lengthy
def test_the_first_offset_at_a_time_is_found_across_segments(
    streams: LakeStreams, clock: Clock
) -> None:
    streams.create("t", schema=Schema.of(v="bigint", at="timestamp"), partitions=1, timestamp="at")
    day = dt.datetime(2013, 1, 1, tzinfo=dt.UTC)
    for part in range(80):
        times = [day + dt.timedelta(hours=part * 3 + i) for i in range(3)]
        table = pa.table({"v": [0, 1, 2], "at": pa.array(times, pa.timestamp("us", tz="UTC"))})
        streams.append("t", table, producer="p", sequence=part)
    ssp = SystemStreamPartition("lake", "t", 0)

    def at(hours: float) -> str:
        return streams.offset_for_timestamp(
            ssp, int((day + dt.timedelta(hours=hours)).timestamp() * 1000)
        )

    assert [at(-5), at(0), at(0.5), at(7), at(100), at(239), at(239.1)] == [
        "0",
        "0",
        "1",
        "7",
        "100",
        "239",
        "240",
    ]
    streams.create("empty", schema=Schema.of(v="bigint"), partitions=1)
    assert streams.offset_for_timestamp(SystemStreamPartition("lake", "empty", 0), 0) == "0"
    streams.append("empty", pa.table({"v": [1]}), producer="p", sequence=0)
    now_ms = int(clock.now.timestamp() * 1000)
    assert streams.offset_for_timestamp(SystemStreamPartition("lake", "empty", 0), now_ms) == "0"
    assert (
        streams.offset_for_timestamp(SystemStreamPartition("lake", "empty", 0), now_ms + 1) == "1"
    )


def test_an_attempt_older_than_the_horizon_can_not_commit(
    s: LakeStreams, records: Records, clock: Clock
) -> None:
    s.append("s", records(("a", 1)), producer="p", sequence=0)
    slow_store = FaultyStore(
        s.lake.store,
        [Fault("upload", 1, "meanwhile", lambda: s.maintain("s", clock.forward(hours=3)))],
    )
    stray = s.lake.store.put_if_absent("streams/s/data/1700000000000-dead/part", b"x")
    assert stray
    slow = LakeStreams(Lake(slow_store, "x", clock=Clock()))
    with pytest.raises(
        CommitConflictError, match="before the time up to which unlisted files are deleted"
    ) as caught:
        slow.append("s", records(("b", 2)), producer="slow", sequence=0)
    assert caught.value.stream == "lake.s"
    assert [row[1] for row in everything(s)] == [1]
    assert s.lake.store.head("streams/s/data/1700000000000-dead/part") is None


def test_offsets_order_as_numbers(s: LakeStreams) -> None:
    assert s.compare("9", "10") == -1
    assert s.compare("10", "10") == 0
    assert s.compare("11", "9") == 1


def test_reading_nothing_has_the_right_columns(s: LakeStreams) -> None:
    table = s.read_arrow({ssp: OffsetRange("0", "0") for ssp in s.partitions("s")}, columns=["v"])
    assert table.column_names == [
        "v",
        "__partition",
        "__offset",
        "__timestamp",
        "__tombstone",
        "__epoch",
    ]
    assert table.num_rows == 0


STRING = pa.string()
BAD_TIME = 253_402_300_800_000_000
"""The first microsecond of the year 10000."""
KINDS = Schema.of(k="string", day="date", at="timestamp", name="string")


def kinds(**columns: pa.Array) -> pa.Table:
    """Three good records, with these columns in place of theirs."""
    good = {
        "k": pa.array(["a", "b", "c"]),
        "day": pa.array([0, -719_162, 2_932_896], pa.int32()).cast(pa.date32()),
        "at": (
            pa.array([0, -62_135_596_800_000_000, BAD_TIME - 1], pa.int64()).cast(
                pa.timestamp("us", "UTC")
            )
        ),
        "name": pa.array(["é", None, "😀"]),
    }
    return pa.table({**good, **columns})


def unchecked(values: list[bytes | None], kind: pa.DataType = STRING) -> pa.Array:
    return pa.array(values, pa.large_binary() if kind == pa.large_string() else pa.binary()).view(
        kind
    )


def day(count: int) -> pa.Array:
    return pa.array([0, None, count], pa.int32()).cast(pa.date32())


def moment(count: int, unit: str = "us", zone: str = "UTC") -> pa.Array:
    return pa.array([0, None, count], pa.int64()).cast(pa.timestamp(unit, zone))


UNREADABLE = {
    "day after": ("day", day(2_932_897)),
    "day before": ("day", day(-719_163)),
    "days of 64 bits": (
        "day",
        pa.array([0, None, 253_402_300_800_000], pa.int64()).cast(pa.date64()),
    ),
    "time after": ("at", moment(BAD_TIME)),
    "time before": ("at", moment(-62_135_596_800_000_001)),
    "seconds of a zone": ("at", moment(253_402_300_800, "s", "Europe/Paris")),
    "text": ("name", unchecked([b"ok", None, b"caf\xe9"])),
    "large text": ("name", unchecked([b"ok", None, b"caf\xe9"], pa.large_string())),
    "text of a dictionary": (
        "name",
        pa.DictionaryArray.from_arrays(pa.array([0, None, 1]), unchecked([b"ok", b"\xff"])),
    ),
    "key": ("k", unchecked([b"a", b"b", b"\xed\xa0\x80"])),
    "the record's own time": ("__timestamp", moment(BAD_TIME)),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_values_that_python_does_not_have_are_refused_by_column_and_row(
    streams: LakeStreams, name: str
) -> None:
    column, values = UNREADABLE[name]
    streams.create("s", schema=KINDS, key=["k"], partitions=2)
    table = kinds(**{column: values})
    cut = pa.concat_tables([table.slice(0, 1), table.slice(1)])
    for given in (table, cut):
        with pytest.raises(SchemaMismatchError) as caught:
            streams.append("s", given, producer="p", sequence=0)
        assert (caught.value.stream, caught.value.column, caught.value.row) == ("lake.s", column, 2)
    good = table.slice(0, 2)
    assert streams.append("s", good, producer="p", sequence=0).rows == 2
    assert sorted(row[0] for row in everything(streams)) == ["a", "b"]


def test_the_first_and_the_last_day_are_taken_and_read_again(streams: LakeStreams) -> None:
    streams.create("s", schema=KINDS, key=["k"], partitions=2)
    streams.append("s", kinds(), producer="p", sequence=0)
    read = {row[0]: row[1:4] for row in everything(streams)}
    assert read["b"] == (dt.date.min, dt.datetime.min.replace(tzinfo=dt.UTC), None)
    assert read["c"] == (dt.date.max, dt.datetime.max.replace(tzinfo=dt.UTC), "😀")


def test_values_of_sensitive_columns_are_refused_untold(streams: LakeStreams) -> None:
    streams.create("s", schema=KINDS.with_sensitive("name"), key=["k"], partitions=2)
    with pytest.raises(SchemaMismatchError) as caught:
        streams.append(
            "s", kinds(name=unchecked([b"ok", None, b"Jos\xe9"])), producer="p", sequence=0
        )
    assert caught.value.column == "name"
    assert "Jos" not in str(caught.value)


def test_a_writer_that_lost_a_race_reads_before_it_commits_to_that_stream(
    clock: Clock, records: Records
) -> None:
    store = FaultyStore(InMemoryStore())
    streams = LakeStreams(on_clock(lake_in(store), clock))
    streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    other = LakeStreams(streams.lake)
    requests = []
    for sequence in range(3):
        view = streams.snapshot("s")
        assert isinstance(view, LakeStreams)
        assert view.appended("s", "p", sequence) is None
        other.append("s", records(("b", sequence)), producer="q", sequence=sequence)
        before = len(store.requests)
        view.append("s", records(("a", sequence)), producer="p", sequence=sequence)
        requests.append(len(store.requests) - before)
    assert requests[1] == requests[2] < requests[0], "only the first append loses a race"
    rows = sorted(row[:2] for row in everything(streams))
    assert rows == [(key, sequence) for key in "ab" for sequence in range(3)]


def test_a_snapshot_that_is_written_to_asks_once_and_again_after_a_conflict(
    clock: Clock, records: Records
) -> None:
    store = FaultyStore(InMemoryStore())
    streams = LakeStreams(on_clock(lake_in(store), clock))
    streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    wider = Schema((*SCHEMA.fields, *Schema.of(more="int").fields))

    def write(
        sequence: int, schema: Schema, meanwhile: Callable[[], object] = lambda: None
    ) -> AppendResult:
        view = streams.snapshot("s")
        assert isinstance(view, LakeStreams)
        assert view.appended("s", "p", sequence) is None
        meanwhile()
        view.create("s", schema=schema, key=["k"], partitions=4)
        return view.append("s", records(("a", sequence)), producer="p", sequence=sequence)

    store.requests.clear()
    write(0, SCHEMA)
    assert store.requests.count(("get", "streams/s/CURRENT")) == 1
    write(1, wider, lambda: streams.append("s", records(("b", 7)), producer="q", sequence=0))
    write(2, wider, lambda: streams.append("s", records(("b", 8)), producer="q", sequence=1))
    again = write(
        3, wider, lambda: streams.append("s", records(("a", 3)), producer="p", sequence=3)
    )
    assert again.duplicate
    rows = sorted(row[:3] for row in everything(streams))
    assert rows == [
        ("a", 0, None),
        ("a", 1, None),
        ("a", 2, None),
        ("a", 3, None),
        ("b", 7, None),
        ("b", 8, None),
    ]


@pytest.mark.parametrize(
    "rows", [[{"k": "a", "n": 1}, {"n": 2}], [{"k": "a", "n": 1}, {"K": "b", "n": 2}]]
)
def test_a_row_without_a_column_of_the_key_is_refused_though_others_have_it(rows: Any) -> None:
    streams = LakeStreams(lake_in(InMemoryStore()))
    streams.create("s", schema=Schema.of(k="string", n="bigint"), key=["k"], partitions=1)
    with pytest.raises(SchemaMismatchError) as caught:
        streams.append("s", rows, producer="p", sequence=1)
    assert (caught.value.column, caught.value.row) == ("k", 1)
    assert not streams.append("s", [{"k": None, "n": 2}], producer="p", sequence=1).duplicate


@pytest.mark.parametrize(
    "options", [AppendOptions(order_by=["k"]), AppendOptions(partitioned=True)], ids=repr
)
def test_options_for_frames_are_refused_for_a_table(options: AppendOptions) -> None:
    streams = LakeStreams(lake_in(InMemoryStore()))
    streams.create("s", schema=SCHEMA, key=["k"], partitions=1)
    with pytest.raises(ConfigurationError) as caught:
        streams.append("s", [{"k": "a", "n": 1}], producer="p", sequence=0, options=options)
    assert caught.value.argument == "order_by"


def test_a_system_can_do_only_what_it_declares() -> None:
    assert StreamSystem.capabilities == StreamCapabilities()
    assert LakeStreams.capabilities.reads_arrow
    with pytest.raises(FrozenInstanceError):
        LakeStreams.capabilities.evolves = False  # type: ignore[misc]
