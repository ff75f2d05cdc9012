"""Marks of Arrow batches against plain Python: sources, positions, and ordinals over the borders
of batches.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.arrow import MarkedSource, Marking, Marks, Shape, split_batch
from dagster_adjunct.resources.tables.operation import OperationKind, position_of

SOURCES = {
    "lake.s.0": MarkedSource("app/lake.s.0", 3),
    "lake.s.1": MarkedSource("app/lake.s.1@made", 0),
}
MARKING = Marking(("__partition",), "__offset", SOURCES, "lake.s", "app/")
Row = tuple[int, int, str]


def batch(rows: list[Row]) -> pa.RecordBatch:
    schema = pa.schema([("__partition", pa.int32()), ("__offset", pa.int64()), ("k", pa.string())])
    return pa.RecordBatch.from_pylist(
        [dict(zip(schema.names, row, strict=True)) for row in rows], schema=schema
    )


@pytest.mark.lengthy
@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from("abc")), max_size=40),
    st.lists(st.integers(1, 7), min_size=1, max_size=10),
)
def test_rows_of_one_message_and_key_are_numbered_wherever_batches_end(
    rows: list[Row], sizes: list[int]
) -> None:
    rows = sorted(rows)
    seen: Counter[Row] = Counter()
    expected = []
    for partition, offset, key in rows:
        source = SOURCES.get(f"lake.s.{partition}") or MarkedSource(f"app/lake.s.{partition}")
        ordinal = seen[partition, offset, key]
        seen[partition, offset, key] += 1
        expected.append((source.name, position_of(source.epoch, offset, ordinal)))
    marks, marked, start, number = Marks(MARKING, ["k"], "sink"), [], 0, 0
    while start < len(rows):
        size = sizes[number % len(sizes)]
        sources, positions = marks.of(batch(rows[start : start + size]))
        marked += list(zip(sources.to_pylist(), positions.to_pylist(), strict=True))
        start, number = start + size, number + 1
    assert marked == expected


def test_a_tie_of_rows_that_may_be_others_next_time_is_refused() -> None:
    guessing = Marking(("__partition",), "__offset", SOURCES, "lake.s", "app/", exact=False)
    Marks(guessing, ["k"], "sink").of(batch([(0, 1, "a"), (0, 1, "b"), (0, 2, "a")]))
    with pytest.raises(
        ConfigurationError, match=r"sink: the message at offset 1 of 0 yields several .* 'a'"
    ):
        Marks(guessing, ["k"], "sink").of(batch([(0, 1, "a"), (0, 1, "a")]))


@pytest.mark.lengthy
@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), min_size=1, max_size=60))
def test_puts_and_deletes_in_few_operations_end_as_one_by_one(
    changes: list[tuple[str, bool]],
) -> None:
    deleted = pa.array([gone for _, gone in changes])
    rows = pa.RecordBatch.from_pydict(
        {
            "__tombstone": deleted,
            "k": pa.array([key for key, _ in changes]),
            "v": pa.array(range(len(changes))),
        }
    )
    expected: dict[str, Any] = {}
    switches: Counter[str] = Counter()
    last: dict[str, bool] = {}
    for place, (key, gone) in enumerate(changes):
        expected.pop(key, None)
        if not gone:
            expected[key] = place
        switches[key] += last.get(key, gone) is not gone
        last[key] = gone
    table: dict[str, Any] = {}
    parts = split_batch(rows, Shape(("k",)), None, "sink")
    for part in parts:
        entries = part.operation.entries
        for place, key in enumerate(entries.keys):
            if part.operation.kind is OperationKind.DELETE:
                table.pop(key, None)
            else:
                assert entries.values is not None
                table[key] = entries.values[place]["v"]
    assert table == expected
    assert len(parts) <= 2 * (max(switches.values()) + 1)
