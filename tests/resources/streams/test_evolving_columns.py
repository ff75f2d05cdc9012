"""Columns of a stream that are added and widened while it is there: who reads and writes with
which.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ProducerConflictError,
    SchemaMismatchError,
    StreamExistsError,
)
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.clocks import Clock, on_clock
from tests.resources.streams.stream_helpers import SCHEMA

NOW = Schema.of(k="string", v="decimal(20,2)", note="string", n="bigint")
BEFORE = Schema.of(k="string", v="int", n="tinyint")


def table(schema: Schema, *rows: tuple[Any, ...]) -> pa.Table:
    columns = [
        pa.array([row[i] for row in rows], kind.type) for i, kind in enumerate(schema.to_arrow())
    ]
    return pa.table(columns, schema=schema.to_arrow())


def read(streams: LakeStreams, *columns: str) -> list[tuple[Any, ...]]:
    names = columns or streams.state("s")[1].declaration.columns.names
    records = streams.read_arrow(streams.all_ranges("s"), columns or None)
    return [tuple(row[name] for name in names) for row in records.to_pylist()]


def test_added_columns_are_null_in_old_records_and_widened_ones_are_cast(
    streams: LakeStreams,
) -> None:
    streams.create("s", schema=BEFORE, key=["k"], partitions=1)
    streams.append("s", table(BEFORE, ("a", 1, 7)), producer="p", sequence=1)
    identity = streams.info("s").identity
    info = streams.create("s", schema=NOW, key=["k"], partitions=1)
    assert info.schema == Schema.of(k="string", v="decimal(20,2)", n="bigint", note="string")
    assert info.identity == identity
    streams.append("s", table(NOW, ("b", Decimal("2.50"), "new", 2**40)), producer="p", sequence=2)
    assert read(streams) == [("a", Decimal("1.00"), 7, None), ("b", Decimal("2.50"), 2**40, "new")]
    assert read(streams, "k", "n") == [("a", 7), ("b", 2**40)], (
        "a reader of the old columns alone goes on"
    )
    commits = streams.describe("s")["commits"]
    streams.create("s", schema=NOW.select(["note", "n", "v", "k"]), key=["k"], partitions=1)
    assert streams.describe("s")["commits"] == commits, "the order of columns says nothing"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (Schema.of(k="string"), r"v \(bigint\) is removed"),
        (Schema.of(k="string", w="bigint"), r"v \(bigint\) is removed"),
        (Schema.of(k="string", V="bigint"), r"v \(bigint\) is renamed to V"),
        (Schema.of(k="string", v="int"), "v is int, was bigint, whose values do not all fit"),
        (Schema.of(k="string", v="string"), "v is string, was bigint"),
        (Schema.of(k="binary", v="bigint"), "k is binary, was string, and is a column of the key"),
    ],
)
def test_what_old_records_can_not_be_read_with_is_refused(
    streams: LakeStreams, declared: Schema, message: str
) -> None:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=2)
    for ask in (streams.create, streams.check_create):
        with pytest.raises(StreamExistsError, match=message):
            ask("s", schema=declared, key=["k"], partitions=2)
    assert streams.describe("s")["commits"] == 1


def test_a_check_of_a_declaration_changes_nothing(streams: LakeStreams) -> None:
    streams.check_create("s", schema=BEFORE, key=["k"], partitions=2)
    assert streams.list_streams() == []
    streams.create("s", schema=BEFORE, key=["k"], partitions=2)
    streams.check_create("s", schema=NOW, key=["k"], partitions=2)
    assert streams.info("s").schema == BEFORE


def test_who_writes_the_columns_of_before_goes_on(streams: LakeStreams) -> None:
    streams.create("s", schema=BEFORE, key=["k"], partitions=1)
    streams.create("s", schema=NOW, key=["k"], partitions=1)
    assert streams.append("s", table(BEFORE, ("a", 1, 7)), producer="old", sequence=1).rows == 1
    assert streams.append("s", table(BEFORE, ("a", 1, 7)), producer="old", sequence=1).duplicate
    assert read(streams) == [("a", Decimal("1.00"), 7, None)]
    with pytest.raises(SchemaMismatchError) as failure:
        streams.append("s", table(SCHEMA, ("a", 1)), producer="old", sequence=2)
    assert failure.value.facts == {"stream": "lake.s", "column": "n"}


def test_a_retry_with_more_columns_is_the_same_append(streams: LakeStreams) -> None:
    streams.create("s", schema=BEFORE, key=["k"], partitions=1)
    streams.append("s", table(BEFORE, ("a", 1, 7)), producer="app", sequence=1)
    streams.create("s", schema=NOW, key=["k"], partitions=1)
    again = table(NOW, ("a", Decimal(1), "known now", 7))
    assert streams.append("s", again, producer="app", sequence=1).duplicate
    assert read(streams) == [("a", Decimal("1.00"), 7, None)]
    for other in (
        ("a", Decimal(2), "x", 7),
        ("a", Decimal("1.50"), "x", 7),
        ("a", Decimal(1), "x", 2**40),
    ):
        with pytest.raises((ProducerConflictError, SchemaMismatchError)):
            streams.append("s", table(NOW, other), producer="app", sequence=1)
    assert len(read(streams)) == 1


def test_two_that_append_the_same_sequence_with_old_and_new_columns_add_it_once(
    lake: Lake, clock: Clock
) -> None:
    """Each of the two begins while the stream has no such sequence, and the other one commits in
    between.
    """

    class Racing(LakeStreams):
        race: Callable[[], object] | None = None

        def _commit(self, seen: Any, append: Any) -> Any:
            if self.race is not None:
                race, self.race = self.race, None
                race()
            return super()._commit(seen, append)

    old, new = Racing(on_clock(lake, clock)), Racing(on_clock(lake, clock))
    old.create("s", schema=BEFORE, key=["k"], partitions=1)
    new.create("s", schema=NOW, key=["k"], partitions=1)
    less, more = table(BEFORE, ("a", 1, 7)), table(NOW, ("a", Decimal(1), "x", 7))
    new.race = lambda: old.append("s", less, producer="app", sequence=1)
    assert new.append("s", more, producer="app", sequence=1).duplicate
    old.race = lambda: new.append("s", more, producer="app", sequence=2)
    # it knows no note: whether that is the same nobody can tell
    with pytest.raises(SchemaMismatchError):
        old.append("s", less, producer="app", sequence=2)
    assert [row[3] for row in read(new)] == [None, "x"]


def test_old_files_are_merged_and_found_by_time_as_before(lake: Lake, clock: Clock) -> None:
    streams = LakeStreams(on_clock(lake, clock))
    schema = Schema.of(k="string", at="timestamp")
    streams.create("s", schema=schema, key=["k"], partitions=1, timestamp="at")
    streams.configure(
        "s",
        retention=Retention(max_age=timedelta(days=9)),
        compaction=CompactionPolicy(min_segments=2),
    )
    for number in range(4):
        now = schema if number < 2 else Schema((*schema.fields, *Schema.of(more="int").fields))
        streams.create("s", schema=now, key=["k"], partitions=1)
        row = ("a", clock.forward(minutes=1), number)[: len(now.fields)]
        streams.append("s", table(now, row), producer="p", sequence=number)
    before = read(streams)
    done = streams.maintain("s", clock.forward(hours=3))
    assert (done.merged_segments, done.merged_into) == (4, 1)
    assert read(streams) == before
    assert [row[2] for row in before] == [None, None, 2, 3]
    with pytest.raises(StreamExistsError, match=r"at \(timestamp\) is removed") as caught:
        streams.create("s", schema=Schema.of(k="string", more="int"), key=["k"], partitions=1)
    assert caught.value.stream == "lake.s"


@pytest.mark.lengthy
@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "widen", "send", "old", "maintain"]), st.integers(-9, 9)),
        max_size=14,
    )
)
def test_any_order_of_changes_and_appends_reads_as_a_list_of_rows_would(
    steps: list[tuple[str, int]],
) -> None:
    clock = Clock()
    streams = LakeStreams(on_clock(lake_in(InMemoryStore()), clock))
    wider = ["tinyint", "smallint", "int", "bigint", "decimal(20,0)"]
    columns = {"k": "string", "c0": "tinyint"}
    streams.create(
        "s",
        schema=Schema.of(columns),
        key=["k"],
        partitions=2,
        compaction=CompactionPolicy(min_segments=2),
    )
    was, expected = [dict(columns)], []
    for number, (what, value) in enumerate(steps):
        last = f"c{len(columns) - 2}"
        if what == "maintain":
            streams.maintain("s", clock.forward(hours=2))
        elif what in ("add", "widen"):
            if what == "add":
                columns[f"c{len(columns) - 1}"] = "tinyint"
            else:
                columns[last] = wider[min(wider.index(columns[last]) + 1, 4)]
            streams.create("s", schema=Schema.of(columns), key=["k"], partitions=2)
            was.append(dict(columns))
        else:
            known = Schema.of(was[-1] if what == "send" else was[value % len(was)])
            row = {name: f"k{value}" if name == "k" else value for name in known.names}
            sent = pa.table({f.name: pa.array([row[f.name]], f.type) for f in known.to_arrow()})
            streams.append("s", sent, producer="p", sequence=number)
            expected.append(row)
    order = list(columns)
    rows = sorted(repr([None if r.get(c) is None else str(r[c]) for c in order]) for r in expected)
    records = streams.read_arrow(streams.all_ranges("s")).to_pylist()
    assert (
        sorted(repr([None if r[c] is None else str(r[c]) for c in order]) for r in records) == rows
    )


def test_a_broken_declaration_is_no_silent_change(streams: LakeStreams) -> None:
    streams.create("s", schema=SCHEMA, key=["k"], partitions=1)
    with pytest.raises(AdjunctError) as failure:
        Schema.of(x="int not null")
    assert failure.value.facts == {"column": "x"}
