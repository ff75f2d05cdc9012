from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.types import arrow_type
from dagster_adjunct.resources.streams.lake.maintenance import (
    MaintenanceResult,
    count_expired,
    plan_merges,
)
from dagster_adjunct.resources.streams.lake.manifest import (
    FAN_OUT,
    HIDDEN_COLUMNS,
    CompactionPolicy,
    FileEntry,
    Retention,
    Segment,
)
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    POSITION,
    AppendOptions,
    OffsetRange,
    SourceRange,
    Sources,
    SystemStreamPartition,
)
from tests.clocks import Clock, on_clock
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.streams.stream_helpers import SCHEMA
from tests.rounds import rounds

Records = Callable[..., pa.Table]
ZERO = SystemStreamPartition("lake", "s", 0)


def segment(number: int, size: int, appended: int = 0) -> Segment:
    file = FileEntry(0, 1, size, "", None, None, 1)
    return Segment(
        id=number, attempt="a", base=(number,), next=(number + 1,), appended=appended, files=(file,)
    )


def fill(streams: LakeStreams, records: Records, count: int, start: int = 0) -> None:
    for i in range(start, start + count):
        end = f"v{i}" if i % 10 == 9 else None
        streams.append("s", records(("a", i)), producer="p", sequence=i, end_of_dataset=end)


def rows(streams: LakeStreams) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in streams.read_arrow(streams.all_ranges("s")).to_pylist()]


def unasked(segment: Segment) -> int | None:
    raise AssertionError(f"the store was asked about {segment}")


def test_age_and_size_drop_from_the_front() -> None:
    segments = [segment(i, 100, appended=i * 1000) for i in range(10)]
    assert count_expired(segments, None, 10**9, unasked) == 0
    assert count_expired(segments, Retention(max_age=timedelta(seconds=3)), 9000, unasked) == 7
    assert count_expired(segments, Retention(max_bytes=250), 9000, unasked) == 8
    assert (
        count_expired(
            segments, Retention(max_age=timedelta(seconds=3), max_bytes=100), 9000, unasked
        )
        == 9
    )
    assert count_expired(segments, Retention(max_age=timedelta(seconds=3)), 10**9, unasked) == 10


def test_what_a_clock_that_is_ahead_dates_in_the_future_has_the_age_of_its_files() -> None:
    future = [segment(at, 100).model_copy(update={"appended": 10**12}) for at in range(3, 8)]
    segments = [*(segment(at, 100, at * 1000) for at in range(3)), *future]
    ages = {3: 3000, 4: None, 5: 5000, 6: None, 7: 8000}
    for now_ms, dropped in ((3500, 1), (5500, 3), (6500, 4), (8500, 6), (12_000, 8)):
        retention = Retention(max_age=timedelta(seconds=3))
        assert count_expired(segments, retention, now_ms, lambda one: ages[one.id]) == dropped, (
            now_ms
        )


def test_retention_goes_on_after_an_append_by_a_clock_that_is_years_ahead(
    lake: Lake, records: Records
) -> None:
    streams, ahead = (
        LakeStreams(on_clock(lake, lambda by=by: datetime.now(UTC) + by))
        for by in (timedelta(0), timedelta(days=3650))
    )
    streams.create(
        "s", schema=SCHEMA, partitions=1, retention=Retention(max_age=timedelta(hours=1))
    )
    for sequence, writer in enumerate((streams, ahead, streams)):
        writer.append("s", records(("k", sequence)), producer="p", sequence=sequence)
    assert streams.maintain("s").dropped_segments == 0
    later = datetime.now(UTC) + timedelta(hours=2)
    assert streams.maintain("s", later).dropped_segments == 3


def test_a_maintenance_by_a_clock_that_is_days_ahead_does_what_one_by_the_stores_clock_does(
    lake: Lake, records: Records
) -> None:
    right, ahead = (
        LakeStreams(on_clock(lake, lambda by=by: datetime.now(UTC) + by))
        for by in (timedelta(0), timedelta(days=3))
    )
    kept = Retention(max_age=timedelta(days=1))
    merging = CompactionPolicy(min_segments=2)
    right.create("s", schema=SCHEMA, partitions=1, retention=kept, compaction=merging)
    for sequence in range(3):
        right.append("s", records(("k", sequence)), producer="p", sequence=sequence)
    files = {item.key for item in lake.store.list("streams/s/data/")}
    done = ahead.maintain("s")
    assert (done.dropped_segments, done.merged_segments, done.deleted_objects) == (0, 3, 0)
    assert files < {item.key for item in lake.store.list("streams/s/data/")}, "somebody reads them"
    right.append("s", records(("k", 3)), producer="p", sequence=3)
    assert right.read_arrow(right.all_ranges("s")).num_rows == 4


def test_only_runs_of_small_neighbours_are_merged() -> None:
    policy = CompactionPolicy(min_segments=3, target_bytes=100)
    sizes = [10, 10, 10, 90, 10, 10, 90, 40, 40, 40, 10, 10]
    segments = [segment(i, size) for i, size in enumerate(sizes)]
    runs = [[s.id for s in run] for run in plan_merges(segments, policy)]
    # 90 is no small one; two are too few; 40 outweighs the 10 and 10 after it
    assert runs == [[0, 1, 2]]
    assert plan_merges(segments, None) == []


def test_compaction_writes_each_byte_only_when_its_neighbours_have_doubled() -> None:
    policy = CompactionPolicy(min_segments=4, target_bytes=10**9)
    segments: list[Segment] = []
    written = 0
    for i in range(2000):
        segments.append(segment(i, 1))
        for run in plan_merges(segments, policy):
            size = sum(s.size for s in run)
            written += size
            at = segments.index(run[0])
            segments[at : at + len(run)] = [segment(run[0].id, size)]
    assert written < 2000 * 14
    assert len(segments) < 50


def test_retention_moves_oldest_and_names_it_to_who_comes_late(
    streams: LakeStreams, records: Records, clock: Clock
) -> None:
    streams.create(
        "s", schema=SCHEMA, partitions=1, retention=Retention(max_age=timedelta(hours=1))
    )
    fill(streams, records, 5)
    clock.forward(minutes=50)
    fill(streams, records, 3, start=5)
    done = streams.maintain("s", clock.forward(minutes=15))
    assert (done.dropped_segments, done.dropped_rows) == (5, 5)
    assert streams.oldest([ZERO]) == {ZERO: "5"}
    assert [row[1] for row in rows(streams)] == [5, 6, 7]
    with pytest.raises(OffsetOutOfRangeError) as failure:
        streams.read_arrow({ZERO: OffsetRange("4", "6")})
    assert failure.value.facts == {"stream": "lake.s", "partition": 0, "offset": "4", "oldest": "5"}
    assert done.deleted_objects == 0
    assert streams.maintain("s", clock.forward(minutes=30)) == MaintenanceResult()
    later = streams.maintain("s", clock.forward(minutes=40))
    assert (later.dropped_rows, later.deleted_objects) == (3, 5)
    assert streams.oldest([ZERO]) == streams.upcoming([ZERO]) == {ZERO: "8"}
    assert streams.append("s", records(("a", 7)), producer="p", sequence=7).duplicate


@pytest.mark.lengthy
def test_compaction_changes_no_offset_marker_or_timestamp(
    streams: LakeStreams, records: Records, clock: Clock
) -> None:
    streams.create("s", schema=SCHEMA, partitions=1, compaction=CompactionPolicy(min_segments=4))
    for i in range(3 * FAN_OUT):
        fill(streams, records, 1, start=i)
        clock.forward(seconds=1)
    before, markers = rows(streams), streams.markers("s")
    done = streams.maintain("s", clock.now)
    assert (done.merged_segments, done.merged_into) == (3 * FAN_OUT, 1)
    assert streams.describe("s")["segments"] == 1
    assert rows(streams) == before
    assert streams.markers("s") == markers
    ms = int(before[50][4].timestamp() * 1000)  # type: ignore[attr-defined]
    assert streams.offset_for_timestamp(ZERO, ms) == str(before[50][3])
    assert streams.records_between({ZERO: OffsetRange("5", "25")}) == 18
    fill(streams, records, 1, start=3 * FAN_OUT)
    assert len(rows(streams)) == 3 * FAN_OUT + 1
    assert streams.maintain("s", clock.forward(hours=2)).deleted_objects >= 3 * FAN_OUT
    assert len(rows(streams)) == 3 * FAN_OUT + 1


def test_an_append_during_compaction_is_kept(
    streams: LakeStreams, records: Records, clock: Clock
) -> None:
    streams.create("s", schema=SCHEMA, partitions=1, compaction=CompactionPolicy(min_segments=4))
    fill(streams, records, 8)
    busy = FaultyStore(
        streams.lake.store,
        [Fault("put_if_match", 1, "meanwhile", lambda: fill(streams, records, 3, start=8))],
    )
    done = LakeStreams(on_clock(Lake(busy, "x"), clock)).maintain("s", clock.now)
    assert done.merged_segments == 8
    assert [row[1] for row in rows(streams)] == list(range(11))
    assert streams.describe("s")["segments"] == 4


def test_two_compactions_at_once_replace_their_inputs_once(
    streams: LakeStreams, records: Records, clock: Clock
) -> None:
    streams.create("s", schema=SCHEMA, partitions=1, compaction=CompactionPolicy(min_segments=4))
    fill(streams, records, 8)
    busy = FaultyStore(
        streams.lake.store,
        [Fault("put_if_match", 1, "meanwhile", lambda: streams.maintain("s", clock.now))],
    )
    done = LakeStreams(on_clock(Lake(busy, "x"), clock)).maintain("s", clock.now)
    assert done.merged_segments == 0
    assert [row[1] for row in rows(streams)] == list(range(8))


@pytest.mark.lengthy
@pytest.mark.rounds
def test_maintenance_that_crashes_anywhere_loses_nothing(records: Records) -> None:
    for nth in range(1, 60, rounds(2, 1)):
        clock, inner = Clock(), InMemoryStore()
        streams = LakeStreams(on_clock(lake_in(inner), clock))
        streams.create(
            "s",
            schema=SCHEMA,
            partitions=1,
            compaction=CompactionPolicy(min_segments=4),
            retention=Retention(max_age=timedelta(hours=1)),
        )
        fill(streams, records, 2)
        clock.forward(minutes=70)
        fill(streams, records, 5, start=2)
        broken = FaultyStore(inner, [Fault("*", nth, "crash-after")])
        ended = False
        try:
            LakeStreams(on_clock(Lake(broken, "x"), clock)).maintain("s", clock.now)
            ended = True
        except Crash:
            pass
        assert [row[1] for row in rows(streams)] in ([2, 3, 4, 5, 6], list(range(7)))
        streams.maintain("s", clock.now)
        assert [row[1] for row in rows(streams)] == [2, 3, 4, 5, 6]
        assert streams.describe("s")["segments"] == 1
        if ended:
            assert nth > 10
            return
    pytest.fail("maintenance takes more than 59 requests")


@pytest.mark.lengthy
def test_a_commit_does_not_grow_with_the_number_of_appends(
    streams: LakeStreams, records: Records
) -> None:
    streams.create("s", schema=SCHEMA, partitions=1)
    sizes = []
    for i in range(8 * FAN_OUT):
        streams.append("s", records(("a", i)), producer="p", sequence=i)
        sizes.append(
            max(
                item.size
                for item in streams.lake.store.list("streams/s/manifests/")
                if f"{i + 2:012d}" in item.key
            )
        )
    assert max(sizes[-2 * FAN_OUT :]) < 1.2 * max(sizes[: 4 * FAN_OUT])
    assert [row[1] for row in rows(streams)] == list(range(8 * FAN_OUT))
    assert streams.describe("s")["segments"] == 8 * FAN_OUT
    assert len(streams.read_arrow({ZERO: OffsetRange("40", "45")})) == 5


def test_records_with_and_without_positions_are_merged_again_and_again(
    streams: LakeStreams, clock: Clock
) -> None:
    """What was merged of both says that it has none, and its files have them."""
    streams.create(
        "s", schema=SCHEMA, key=["k"], partitions=1, compaction=CompactionPolicy(min_segments=2)
    )
    source = Sources("lake.in", "app", (SourceRange("lake.in.0", 0, 1),))
    for number in range(6):
        row = pa.table({"k": ["a"], "v": [number]})
        if number == 0:
            for name, value in zip(POSITION, ("lake.in.0", 0, 0, "app"), strict=True):
                row = row.append_column(
                    name, pa.array([value], arrow_type(dict(HIDDEN_COLUMNS)[name]))
                )
        streams.append(
            "s",
            row,
            producer="p",
            sequence=number,
            options=AppendOptions(sources=source if number == 0 else None),
        )
        streams.maintain("s", clock.forward(hours=2))
    assert streams.describe("s")["segments"] < 6
    assert streams.read_arrow(streams.all_ranges("s")).column("v").to_pylist() == list(range(6))
