"""What a read asks of rows: exactly the wanted ones pass, and row groups are skipped where that
can be.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.streams.lake.manifest import FileEntry, Segment
from dagster_adjunct.resources.streams.lake.read import RowRanges, find_row_ranges

N = 3
WIDTHS = st.lists(st.tuples(*[st.integers(0, 6)] * N), min_size=1, max_size=5)
SPANS = st.dictionaries(
    st.integers(0, N - 1), st.tuples(st.integers(0, 25), st.integers(0, 25)), max_size=N
)


def segments_of(widths: list[tuple[int, ...]]) -> list[Segment]:
    segments, base = [], (0,) * N
    for number, width in enumerate(widths):
        after = tuple(b + w for b, w in zip(base, width, strict=True))
        files = tuple(FileEntry(p, w, 1, "", None, None, 0) for p, w in enumerate(width) if w)
        segments.append(
            Segment(id=number, attempt="a", base=base, next=after, appended=0, files=files)
        )
        base = after
    return segments


def passes(cut: RowRanges, segment: int, partition: int, row: int) -> bool:
    """Return whether a row fulfils the conditions."""
    place = segment * N + partition
    return (
        (cut.partitions is None or partition in cut.partitions)
        and (not cut.rows or any(low <= row < high for low, high in cut.rows))
        and (segment not in cut.clipped_low or row >= cut.lows[place])
        and (segment not in cut.clipped_high or row < cut.highs[place])
    )


@pytest.mark.lengthy
@settings(max_examples=200)
@given(WIDTHS, SPANS)
def test_exactly_the_rows_of_the_spans_pass(
    widths: list[tuple[int, ...]], spans: dict[int, tuple[int, int]]
) -> None:
    segments = segments_of(widths)
    cut = find_row_ranges(segments, spans, N)
    for number, segment in enumerate(segments):
        for file in segment.files:
            start, end = spans.get(file.partition, (0, 0))
            for row in range(file.rows):
                wanted = start <= segment.base[file.partition] + row < end
                assert passes(cut, number, file.partition, row) == wanted


def test_whole_segments_ask_nothing_of_their_rows() -> None:
    cut = find_row_ranges(
        segments_of([(4, 4, 4), (9, 2, 0)]), {0: (0, 13), 1: (0, 6), 2: (0, 4)}, N
    )
    assert (cut.partitions, cut.rows, cut.clipped_low, cut.clipped_high) == (None, (), (), ())


def test_only_segments_that_are_cut_compare_rows() -> None:
    cut = find_row_ranges(segments_of([(8, 8, 8)] * 4), dict.fromkeys(range(N), (4, 28)), N)
    assert (cut.partitions, cut.rows, cut.clipped_low, cut.clipped_high) == (None, (), (0,), (3,))


def test_row_groups_in_the_middle_of_two_neighbours_are_skipped() -> None:
    cut = find_row_ranges(segments_of([(1000, 0, 0), (1000, 0, 0)]), {0: (990, 1010)}, N)
    assert cut.rows == ((0, 10), (990, 1000))


def test_many_places_become_one_interval() -> None:
    files = tuple(FileEntry(p, 1000, 1, "", None, None, 0) for p in range(12))
    segment = Segment(id=0, attempt="a", base=(0,) * 12, next=(1000,) * 12, appended=0, files=files)
    spans = {p: (50 * p + 10, 50 * p + 20) for p in range(12)}
    few = {p: spans[p] for p in (0, 2, 5)}
    assert find_row_ranges([segment], few, 12).rows == ((10, 20), (110, 120), (260, 270))
    assert find_row_ranges([segment], spans, 12).rows == ((10, 570),)
