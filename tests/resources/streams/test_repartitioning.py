"""A stream rewritten into other partitions: every record once, each key's in their order,
markers between the same.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.bucketing.hashing import bucket_of_key
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    OffsetOutOfRangeError,
    ProducerConflictError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention, StreamState
from dagster_adjunct.resources.streams.lake.readers import list_readers, read_new
from dagster_adjunct.resources.streams.lake.repartition import repartition
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.clocks import Clock, on_clock
from tests.faulty_store import Crash, Fault, FaultyStore, deaths
from tests.resources.streams.stream_helpers import SCHEMA

Records = dict[str, list[tuple[int, bool, object, int]]]


def any_reader(state: StreamState) -> None:
    """Refuse nothing."""


def rewrite(streams: LakeStreams, partitions: int) -> StreamState:
    return repartition(streams, "s", partitions, reason="more", by="ada", check=any_reader)


def send(
    streams: LakeStreams, number: int, *rows: tuple[str, int], version: str | None = None
) -> None:
    table = pa.table(
        {
            "k": pa.array([k for k, _ in rows], pa.string()),
            "v": pa.array([v for _, v in rows], pa.int64()),
        }
    )
    streams.append("s", table, producer="p", sequence=number, end_of_dataset=version)


def by_key(streams: LakeStreams) -> Records:
    """Return what the stream holds of each key, in its order; and check that each lies where its
    hash says.
    """
    partitions = streams.info("s").partitions
    records: Records = {}
    rows = streams.read_arrow(streams.all_ranges("s")).to_pylist()
    for row in rows:
        assert row["__partition"] == bucket_of_key([row["k"]], ["string"], partitions)
        records.setdefault(row["k"], []).append(
            (row["v"], row["__tombstone"], row["__timestamp"], row["__epoch"])
        )
    assert len({(row["__partition"], row["__offset"]) for row in rows}) == len(rows)
    return records


def versions(streams: LakeStreams) -> list[tuple[str, dict[str, int]]]:
    """Return the versions by their markers in order, and how many records of each key they have,
    if all told so.
    """
    result: list[tuple[str, dict[str, int]]] = []
    rows = streams.read_arrow(streams.all_ranges("s")).to_pylist()
    markers = streams.markers("s")
    begins = [int(offset) for offset in streams.oldest(streams.partitions("s")).values()]
    for version in dict.fromkeys(marker.version for marker in markers):
        content: dict[str, int] = {}
        for marker in (one for one in markers if one.version == version):
            p = marker.ssp.partition
            mine = [
                r
                for r in rows
                if r["__partition"] == p and begins[p] <= r["__offset"] < int(marker.offset)
            ]
            assert marker.rows in (None, len(mine)), "the count in a marker is that of its records"
            begins[p] = int(marker.offset) + 1
            for row in mine:
                content[row["k"]] = content.get(row["k"], 0) + 1
        result.append((version, content))
    return result


step = st.one_of(
    st.tuples(st.just("send"), st.lists(st.sampled_from("abcdefgh"), max_size=6)),
    st.tuples(st.just("version"), st.lists(st.sampled_from("abcdefgh"), max_size=6)),
    st.tuples(st.just("marks"), st.lists(st.sampled_from("ab"), max_size=1)),
    st.tuples(st.just("maintain"), st.just([])),
)


@pytest.mark.lengthy
@settings(max_examples=30)
@given(st.lists(step, max_size=10), st.integers(1, 4), st.integers(1, 6))
def test_a_rewritten_stream_holds_the_same_of_each_key_and_version(
    steps: list, before: int, after: int
) -> None:
    clock = Clock()
    streams = LakeStreams(on_clock(lake_in(InMemoryStore()), clock))
    streams.create(
        "s",
        schema=SCHEMA,
        key=["k"],
        partitions=before,
        compaction=CompactionPolicy(min_segments=2),
    )
    for number, (what, keys) in enumerate(steps):
        clock.forward(seconds=7)
        rows = [(key, 100 * number + at) for at, key in enumerate(keys)]
        if what in ("send", "version"):
            send(streams, number, *rows, version=f"v{number}" if what == "version" else None)
        # partition after partition, with records of the next version in between
        elif what == "marks":
            for p in range(before):
                sequence = 1000 + number * 10 + p
                streams.append_markers(
                    "s", f"m{number}", producer="m", sequence=sequence, partitions=[p]
                )
                send(streams, 10_000 + 10 * number + p, *rows)
        else:
            streams.maintain("s", clock.forward(hours=2))
    was, marked, identity = by_key(streams), versions(streams), streams.info("s").identity
    if before == after:
        with pytest.raises(ConfigurationError) as caught:
            rewrite(streams, after)
        assert (caught.value.stream, caught.value.argument) == ("lake.s", "partitions")
        return
    rewrite(streams, after)
    assert by_key(streams) == was
    assert versions(streams) == marked
    assert streams.info("s").identity != identity
    clock.forward(seconds=7)
    send(streams, 99_999, ("a", 7), version="last")
    assert by_key(streams)["a"][-1][0] == 7
    assert versions(streams)[:-1] == marked
    streams.maintain("s", clock.forward(hours=3))
    rewrite(streams, before)
    assert versions(streams)[:-1] == marked
    assert {
        k: [r for r in rows if r[0] != 7] for k, rows in by_key(streams).items() if k in was
    } == was


def filled(lake: Lake, clock: Clock) -> LakeStreams:
    streams = LakeStreams(on_clock(lake, clock))
    streams.create("s", schema=SCHEMA, key=["k"], partitions=2)
    send(streams, 1, *[(f"k{i}", i) for i in range(9)], version="v1")
    send(streams, 2, *[(f"k{i}", i + 10) for i in range(9)])
    return streams


@pytest.mark.lengthy
@pytest.mark.rounds
@pytest.mark.parametrize("kind", ["crash-before", "crash-after"])
def test_a_crash_leaves_the_old_stream_or_the_new_one(kind: str) -> None:
    seen = set()
    lake, clock = lake_in(InMemoryStore()), Clock()
    filled(lake, clock)
    counted = FaultyStore(lake.store)
    rewrite(LakeStreams(on_clock(Lake(counted, lake.id), clock)), 5)
    for nth in deaths(counted.requests):
        clock = Clock()
        lake = lake_in(InMemoryStore())
        streams = filled(lake, clock)
        was, marked = by_key(streams), versions(streams)
        store = FaultyStore(lake.store, [Fault("*", nth, kind)])  # type: ignore[arg-type]
        with pytest.raises(Crash):
            rewrite(LakeStreams(on_clock(Lake(store, lake.id), clock)), 5)
        seen.add(streams.info("s").partitions)
        assert (by_key(streams), versions(streams)) == (was, marked)
        if streams.info("s").partitions == 2:
            rewrite(streams, 5)
        streams.maintain("s", clock.forward(hours=3))
        assert (by_key(streams), versions(streams)) == (was, marked)
        files = {item.key.split("/")[3] for item in lake.store.list("streams/s/data/")}
        assert files == {
            segment.attempt for segment in streams.state("s").state.index.tail if segment.files
        }, "no garbage stays"
    assert seen == ({2, 5} if kind == "crash-after" else {2})


def test_what_is_appended_while_it_is_rewritten_is_in_it(lake: Lake, clock: Clock) -> None:
    for request in ("put_if_absent", "put_if_match"):
        lake = lake_in(InMemoryStore())
        streams = filled(lake, clock)
        store = FaultyStore(
            lake.store, [Fault(request, 1, "meanwhile", lambda s=streams: send(s, 3, ("k1", 77)))]
        )
        rewrite(LakeStreams(on_clock(Lake(store, lake.id), clock)), 3)
        assert [row[0] for row in by_key(streams)["k1"]] == [1, 11, 77]


def test_a_retry_of_an_append_from_before_adds_nothing(streams: LakeStreams, clock: Clock) -> None:
    filled(streams.lake, clock)
    rewrite(streams, 3)
    before = by_key(streams)
    send(streams, 2, *[(f"k{i}", i + 10) for i in range(9)])
    assert by_key(streams) == before
    rewrite(streams, 2)
    send(streams, 2, *[(f"k{i}", i + 10) for i in range(9)])
    assert by_key(streams) == before


def test_markers_that_are_repeated_after_a_rewriting_add_nothing(
    streams: LakeStreams, clock: Clock
) -> None:
    filled(streams.lake, clock)
    streams.append_markers("s", "v9", producer="m", sequence=1)
    rewrite(streams, 3)
    assert streams.append_markers("s", "v9", producer="m", sequence=1).duplicate
    with pytest.raises(ProducerConflictError):
        streams.append_markers("s", "v8", producer="m", sequence=1)


def test_a_counter_that_begins_again_after_a_rewriting_is_refused(
    streams: LakeStreams, clock: Clock
) -> None:
    filled(streams.lake, clock)
    rewrite(streams, 3)
    before = by_key(streams)
    with pytest.raises(ProducerConflictError) as refused:
        send(streams, 1, ("k1", 1000))
    assert refused.value.sequence == 1
    assert by_key(streams) == before


def test_what_retention_took_is_not_forgotten(streams: LakeStreams, clock: Clock) -> None:
    filled(streams.lake, clock)
    streams.configure("s", retention=Retention(max_age=timedelta(hours=1)), compaction=None)
    clock.forward(hours=2)
    send(streams, 3, ("k1", 5))
    streams.maintain("s", clock.now)
    assert not streams.has_all_keys("s")
    rewrite(streams, 3)
    assert not streams.has_all_keys("s")
    send(streams, 4, ("k1", 6), version="v2")
    marked = [marker.rows for marker in streams.markers("s")]
    rows = streams.read_arrow(streams.all_ranges("s")).num_rows
    assert rows == 2
    assert sum(count or 0 for count in marked) > rows, "its beginning is gone, so it is never whole"


def test_markers_that_are_uneven_or_promise_checksums_are_refused(
    streams: LakeStreams, clock: Clock
) -> None:
    filled(streams.lake, clock)
    streams.append_markers("s", "v2", producer="m", sequence=1, partitions=[1])
    with pytest.raises(
        ConfigurationError,
        match="partition 0 has the markers of v1, but partition 1 those of v1, v2",
    ):
        rewrite(streams, 3)
    streams.append_markers("s", "v2", producer="m", sequence=2, partitions=[0])
    rewrite(streams, 3)
    streams.append_markers("s", "v3", producer="m", sequence=3, checksum="r2-0123456789abcdef")
    with pytest.raises(ConfigurationError, match="version 'v3' have checksums"):
        rewrite(streams, 2)
    streams.create("t", schema=Schema.of(k="string"), partitions=1)
    with pytest.raises(ConfigurationError, match="has no key"):
        repartition(streams, "t", 2, reason="x", by="ada", check=any_reader)


def test_markers_of_different_times_are_refused_and_one_time_is_that_of_all(
    streams: LakeStreams, clock: Clock
) -> None:
    filled(streams.lake, clock)
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in (3, 4)]
    streams.append_markers("s", "v2", producer="m", sequence=1, partitions=[0])
    streams.append_markers("s", "v2", producer="m", sequence=2, partitions=[1], valid_from=times[0])
    rewrite(streams, 3)
    times_reported = [
        marker.valid_from for marker in streams.markers("s") if marker.version == "v2"
    ]
    assert times_reported == [times[0]] * 3, "partition 0 did not say"
    for partition, time in enumerate((times[0], times[1], None)):
        streams.append_markers(
            "s", "v3", producer="m", sequence=3 + partition, partitions=[partition], valid_from=time
        )
    with pytest.raises(
        ConfigurationError,
        match=(
            r"version 'v3' have different valid_from times \(2026-01-03 .* in partition 0,"
            r" 2026-01-04"
        ),
    ):
        rewrite(streams, 2)
    assert streams.info("s").partitions == 3


def test_a_wrong_count_in_a_marker_stays_wrong(streams: LakeStreams, clock: Clock) -> None:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=2)
    send(streams, 1, *[(f"k{i}", i) for i in range(9)])
    right = {
        p: int(end) for p, end in enumerate(streams.upcoming(streams.partitions("s")).values())
    }
    streams.append_markers(
        "s", "v1", producer="m", sequence=1, rows={0: right[0] + 1, 1: right[1] - 1}
    )
    rewrite(streams, 3)
    reported = {marker.ssp.partition: marker.rows for marker in streams.markers("s")}
    assert sum(count or 0 for count in reported.values()) == 9 + 2


def test_a_named_reader_at_the_end_goes_on_and_another_one_is_reported(
    streams: LakeStreams, clock: Clock
) -> None:
    filled(streams.lake, clock)
    with read_new(streams.lake, "s", reader="whole") as new:
        assert new.table().num_rows == 18
        new.commit()
    with read_new(streams.lake, "s", reader="behind", max_records=4) as new:
        new.commit()
    rewrite(streams, 5)
    send(streams, 3, ("k1", 77))
    assert {
        reader.name: (reader.behind, bool(reader.problem))
        for reader in list_readers(streams.lake, "s")
    } == {"whole": (1, False), "behind": (0, True)}
    with read_new(streams.lake, "s", reader="whole") as new:
        assert new.table().column("v").to_pylist() == [77]
        new.commit()
    with pytest.raises(OffsetOutOfRangeError, match="Start over as a new reader"):
        read_new(streams.lake, "s", reader="behind")


def test_a_time_is_found_in_the_new_partitions(streams: LakeStreams, clock: Clock) -> None:
    filled(streams.lake, clock)
    rewrite(streams, 3)
    when = int(clock.now.timestamp() * 1000)
    for p in range(3):
        ssp = SystemStreamPartition("lake", "s", p)
        assert streams.offset_for_timestamp(ssp, when) in ("0", streams.upcoming([ssp])[ssp])
