from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ManifestMismatchError,
    OffsetOutOfRangeError,
    ProducerConflictError,
)
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition
from tests.resources.streams.stream_helpers import SCHEMA

Records = Callable[..., pa.Table]
ZERO = SystemStreamPartition("lake", "s", 0)


@pytest.fixture
def s(streams: LakeStreams) -> LakeStreams:
    streams.create("s", schema=SCHEMA, partitions=1)
    return streams


def values(s: LakeStreams, start: int, end: int) -> list[int]:
    return s.read_arrow({ZERO: OffsetRange(str(start), str(end))}).column("v").to_pylist()


def test_a_range_is_exact_over_segments_and_markers(s: LakeStreams, records: Records) -> None:
    s.append(
        "s", records(("a", 0), ("b", 1), ("c", 2)), producer="p", sequence=0, end_of_dataset="v1"
    )
    s.append("s", records(("d", 4), ("e", 5)), producer="p", sequence=1)
    assert values(s, 0, 6) == [0, 1, 2, 4, 5]
    assert values(s, 1, 5) == [1, 2, 4]
    assert values(s, 3, 4) == []
    assert s.records_between({ZERO: OffsetRange("1", "5")}) == 3
    assert s.records_between({ZERO: OffsetRange("3", "4")}) == 0
    assert s.upcoming([ZERO]) == {ZERO: "6"}


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        ("0", "3", "the range ends at offset 3, the stream's upcoming one is 2"),
        ("2", "1", "the range begins at 2, after its end 1"),
        ("x", "1", "'x' is not an offset"),
    ],
)
def test_a_range_that_the_stream_does_not_hold_is_refused(
    s: LakeStreams, records: Records, start: str, end: str, message: str
) -> None:
    s.append("s", records(("a", 0), ("b", 1)), producer="p", sequence=0)
    with pytest.raises(OffsetOutOfRangeError, match=f"lake.s.0: {message}"):
        s.read_arrow({ZERO: OffsetRange(start, end)})


def test_a_partition_or_stream_too_many_is_refused(s: LakeStreams) -> None:
    with pytest.raises(OffsetOutOfRangeError) as failure:
        s.oldest([SystemStreamPartition("lake", "s", 1)])
    assert failure.value.facts == {"stream": "lake.s", "partition": 1}
    with pytest.raises(ConfigurationError, match=r"lake\.s, lake\.t"):
        s.read_arrow(
            {
                ZERO: OffsetRange("0", "0"),
                SystemStreamPartition("lake", "t", 0): OffsetRange("0", "0"),
            }
        )


def test_markers_take_an_offset_and_count_what_was_delivered(
    streams: LakeStreams, records: Records
) -> None:
    streams.create("m", schema=SCHEMA, key=["k"], partitions=2)
    table = records(*[(f"k{i}", i) for i in range(10)])
    streams.append("m", table.slice(0, 4), producer="p", sequence=0)
    streams.append("m", table.slice(4), producer="p", sequence=1, end_of_dataset="v1")
    streams.append("m", table.slice(0, 3), producer="p", sequence=2, end_of_dataset="v2")
    markers = streams.markers("m")
    assert [(m.version, m.ssp.partition) for m in markers] == [
        ("v1", 0),
        ("v1", 1),
        ("v2", 0),
        ("v2", 1),
    ]
    assert sum(m.rows or 0 for m in markers[:2]) == 10
    assert sum(m.rows or 0 for m in markers[2:]) == 3
    assert [int(m.offset) for m in markers[:2]] == [m.rows for m in markers[:2]]
    since = {m.ssp: str(int(m.offset) + 1) for m in markers[:2]}
    assert [m.version for m in streams.markers("m", since)] == ["v2", "v2"]
    assert streams.markers("m", streams.upcoming(streams.partitions("m"))) == []


def test_markers_alone_are_reported_their_counts(streams: LakeStreams) -> None:
    streams.create("m", schema=SCHEMA, key=["k"], partitions=3)
    one = streams.append_markers(
        "m", "v1", partitions=[1], rows={1: 5}, checksum="abc", producer="p", sequence=0
    )
    assert one.next == {0: "0", 1: "1", 2: "0"}
    assert streams.append_markers(
        "m", "v1", partitions=[1], rows={1: 5}, checksum="abc", producer="p", sequence=0
    ).duplicate
    with pytest.raises(ProducerConflictError):
        streams.append_markers(
            "m", "v1", partitions=[1], rows={1: 6}, checksum="abc", producer="p", sequence=0
        )
    streams.append_markers("m", "v2", producer="p", sequence=1)
    assert [(m.version, m.rows, m.checksum) for m in streams.markers("m")][:2] == [
        ("v1", 5, "abc"),
        ("v2", 0, None),
    ]
    with pytest.raises(ConfigurationError) as failure:
        streams.append_markers("m", "v3", partitions=[3], producer="p", sequence=2)
    assert failure.value.facts == {"stream": "lake.m", "argument": "partitions"}
    with pytest.raises(ConfigurationError) as failure:
        streams.append_markers("m", "v3", rows={1: 1}, producer="p", sequence=2)
    assert failure.value.facts == {"stream": "lake.m", "argument": "rows"}
    with pytest.raises(ConfigurationError) as failure:
        streams.append_markers("m", "v3", partitions=[1], rows={1: -1}, producer="p", sequence=2)
    assert failure.value.facts == {"stream": "lake.m", "argument": "rows"}


def test_an_unknown_option_of_a_read_is_rejected_and_not_ignored(
    s: LakeStreams, records: Records
) -> None:
    s.append("s", records(("a", 0)), producer="p", sequence=0)
    with pytest.raises(ConfigurationError) as failure:
        s.read_arrow(s.all_ranges("s"), epoch="latest")  # type: ignore[call-arg]
    assert failure.value.argument == "epoch"


def test_a_missing_or_cut_file_is_an_error_that_names_it(s: LakeStreams, records: Records) -> None:
    s.append("s", records(("a", 0)), producer="p", sequence=0)
    s.append("s", records(("b", 1)), producer="p", sequence=1)
    _, state = s.state("s")
    first, second = [segment.key_of("streams/s", segment.files[0]) for segment in state.index.tail]
    s.lake.store.delete(second)
    with pytest.raises(ManifestMismatchError) as caught:
        values(s, 0, 2)
    assert caught.value.key == second
    assert values(s, 0, 1) == [0]
    s.lake.store.put(first, b"PAR1 not at all")
    with pytest.raises(ManifestMismatchError, match="can't be read"):
        values(s, 0, 1)


@pytest.mark.lengthy
def test_a_large_file_is_read_by_ranges(s: LakeStreams) -> None:
    import numpy as np

    rows = 500_000
    keys = pa.array(
        [f"{x:032x}" for x in np.random.default_rng(1).integers(0, 2**62, rows).tolist()]
    )
    s.append("s", pa.table({"k": keys, "v": np.arange(rows)}), producer="p", sequence=0)
    (file,) = s.lake.store.list("streams/s/data/")
    assert file.size > 4 * 1024 * 1024
    assert values(s, 199_990, 200_010) == list(range(199_990, 200_010))


def test_writers_of_stream_systems_get_the_errors_of_ranges_and_old_sequences() -> None:
    from dagster_adjunct.streams import check_range, stale_sequence_error

    check_range(ZERO, 2, 5, oldest=2, upcoming=5)
    for start, end in ((5, 2), (1, 5), (2, 6)):
        with pytest.raises(OffsetOutOfRangeError) as caught:
            check_range(ZERO, start, end, oldest=2, upcoming=5)
        assert (caught.value.stream, caught.value.partition) == (ZERO.qualified_stream, 0)
    error = stale_sequence_error("sqlite.readings", "gateway", 1, 9)
    assert (error.stream, error.producer, error.sequence, error.newest) == (
        "sqlite.readings",
        "gateway",
        1,
        9,
    )
