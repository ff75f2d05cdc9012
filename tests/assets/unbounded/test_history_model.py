"""Any changes over time, split into any commits, compacted anywhere: what is read is what a
dictionary says.

Times come out of order and twice, deletions end what was valid, and a change may correct the past.
"""

from __future__ import annotations

import itertools
import os
import random
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.reading.version_reader import read_entries
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.versions.version import datetime_from_micros, has_row_ends
from dagster_adjunct.resources.bucketing.files import Timeline, TimelineOptions
from dagster_adjunct.resources.objects.lake import lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.paths import Path
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.unbounded.over_time import (
    KEYS,
    LAST,
    NAME,
    Model,
    at,
    check,
    edge_of,
    manifest_of,
    prices,
    prices_in,
    second_of,
    send,
)
from tests.rounds import rounds
from tests.servers.s3 import S3Server

EXAMPLES = int(os.environ.get("ADJUNCT_HISTORY_EXAMPLES", "25"))
CHANGES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, LAST), st.none() | st.integers(0, 3)),
    min_size=1,
    max_size=6,
)
STEPS = st.lists(CHANGES | st.sampled_from(["minor", "major"]), min_size=1, max_size=9)
LENGTHS = st.sampled_from([None, 4, 12])


def world_of_prices() -> World:
    return prices_in(World(lake_in(InMemoryStore()), IN_PROCESS))


@pytest.mark.rounds
@pytest.mark.lengthy
@given(
    first=CHANGES,
    steps=STEPS,
    length=LENGTHS,
    broadcast=st.booleans(),
    chunk=st.sampled_from([2, 1000]),
)
@example([("a", 1, None)], [[("b", 40, 1)], "major", [("a", 1, 2)], "major"], 4, False, 1000)
@settings(
    max_examples=int(os.environ.get("ADJUNCT_HISTORY_EXAMPLES", rounds(10, 25))),
    suppress_health_check=list(HealthCheck),
)
def test_what_is_read_over_time_is_what_a_dictionary_says(
    first: Any, steps: Any, length: int | None, broadcast: bool, chunk: int
) -> None:
    walk(world_of_prices(), first, steps, length, broadcast, chunk)


@pytest.mark.server
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 12))]
)
def test_on_s3_what_is_read_over_time_is_what_a_dictionary_says(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    versitygw.set_in(monkeypatch)
    chance = random.Random(seed)

    def some() -> list[Any]:
        drawn = [
            (chance.choice(KEYS), chance.randint(0, LAST), chance.choice([None, 0, 1, 2]))
            for _ in range(5)
        ]
        return [[("d", 0, None), *drawn], "minor"] if chance.random() < 0.5 else [drawn, "major"]

    steps = [step for _ in range(3) for step in some()]
    world = prices_in(World(open_lake(versitygw.url()), IN_PROCESS))
    length = [4, None, 12][seed % 3]
    first = [("a", 1, 1), ("b", 1, None), ("z", 1, None)]  # z never comes again
    walk(world, first, steps, length, broadcast=seed % 4 == 3, chunk=2 + seed)
    if length == 4:
        assert manifest_of(world).horizon is not None, "the deletion of z is forgotten"


def walk(
    world: World, first: Any, steps: Any, length: int | None, broadcast: bool, chunk: int
) -> None:
    """Take in changes and compact, step by step, and hold what is read after each against the
    dictionary.
    """
    model = Model()
    kept: Any = "all" if length is None else timedelta(seconds=length)
    spec = prices(history=kept, broadcast=broadcast, chunk=chunk)
    for step in [first, *steps]:
        if isinstance(step, str):
            compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level=step)
        else:
            stored = manifest_of(world).horizon if model.valid else None
            horizon = None if stored is None else second_of(datetime_from_micros(stored))
            assert horizon is None or (length is not None and horizon <= model.newest - 2 * length)
            send(world, step)
            model.add(step, horizon)
            report = world.advance(spec)
            late = 0 if horizon is None else sum(second <= horizon for _, second, _ in step)
            assert report.counters.get("late", 0) == late
        view = world.view(spec)
        assert edge_of(view) == (0 if length is None else max(edge_of(view), model.newest - length))
        check(view, model)
        assert {row["k"]: row["n"] for row in read_entries(view, None).to_pylist()} == model.current


ROWS = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, LAST), st.booleans(), st.integers(0, 1)),
    unique_by=lambda row: row[:2],
    max_size=20,
)


@pytest.mark.lengthy
@given(
    rows=ROWS,
    cuts=st.lists(st.integers(1, 5), max_size=20),
    edge=st.none() | st.integers(0, LAST),
    data=st.data(),
)
@settings(max_examples=150)
def test_a_base_says_where_each_row_ends_and_keeps_what_was_valid_at_the_edge(
    rows: list[tuple[str, int, bool, int]], cuts: list[int], edge: int | None, data: st.DataObject
) -> None:
    forget = None if edge is None else data.draw(st.none() | st.integers(0, edge))
    rows = sorted(rows)
    table = pa.table(
        {
            "k": pa.array([row[0] for row in rows], pa.string()),
            "__valid_from": pa.array([at(row[1]) for row in rows], pa.timestamp("us", tz="UTC")),
            "__tombstone": pa.array([row[2] for row in rows], pa.bool_()),
            "n": pa.array([row[3] for row in rows], pa.int32()),
        }
    )
    micros = [
        None if second is None else int(at(second).timestamp() * 1e6) for second in (edge, forget)
    ]
    compared = (Path(("n",), "int"),)
    options = TimelineOptions(True, edge=micros[0], forget=micros[1], compared=compared)
    over = Timeline(("k",), options)
    written: list[dict[str, Any]] = []
    start = 0
    for cut in [*cuts, len(rows)]:
        batch = table.slice(start, cut)
        start += cut
        if batch.num_rows:
            written += over.take(batch).to_pylist()
    rest = over.rest()
    written += [] if rest is None else rest.to_pylist()
    expected = []
    for key in KEYS:
        mine = [row[1:] for row in rows if row[0] == key]
        ends = [second for second, _, _ in mine[1:]]
        spans = list(itertools.zip_longest(mine, ends))
        left = [span for span in spans if edge is None or span[1] is None or span[1] > edge]
        if forget is not None and len(left) == 1 and left[0][0][1] and left[0][0][0] <= forget:
            left = []
        begin = len(spans) - len(left)
        while (
            left and begin and not spans[begin][0][1] and spans[begin][0][1:] == mine[begin - 1][1:]
        ):
            begin -= 1
        if left and begin < len(spans) - len(left):  # the interval begins in an older row
            expected.append((key, at(mine[begin][0]), at(left[0][0][0]), False, True))
        expected += [
            (
                key,
                at(s),
                None if e is None else at(e),
                m,
                i == 0 and begin == len(spans) - len(left),
            )
            for i, ((s, m, _), e) in enumerate(left)
        ]
    names = ("k", "__valid_from", "__valid_to", "__tombstone", "__first")
    assert [tuple(row[name] for name in names) for row in written] == expected
    assert over.stats()["current"] == sum(
        end is None and not mark for _, _, end, mark, _ in expected
    )


def test_a_base_alone_knows_its_entries_and_a_delta_corrects_the_past() -> None:
    world, spec = world_of_prices(), prices()
    send(world, [("a", 5, 1), ("b", 5, 1), ("b", 9, None), ("a", 7, 2)])
    assert world.advance(spec).rows == 1
    assert has_row_ends(world.view(spec).sealed.generations[0])
    send(world, [("a", 6, 3), ("c", 10, 1)])
    report = world.advance(spec)
    assert report.rows is None
    assert report.counters["corrections"] == 1
    assert not has_row_ends(world.view(spec).sealed.generations[1])
    parts = world.view(spec).history_of("a")
    assert [
        (second_of(part.valid_from), part.valid_to and second_of(part.valid_to)) for part in parts
    ] == [(5, 6), (6, 7), (7, None)]
    assert [part.entry and part.entry["n"] for part in parts] == [1, 3, 2]
    assert [part.is_current for part in parts] == [False, False, True]
    ended = world.view(spec).history_of("b")[-1]
    assert (ended.entry, ended.is_current) == (None, False)
    assert (
        compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major").counters.get(
            "pruned", 0
        )
        == 0
    )
    assert world.view(spec).rows == 2


def test_a_change_without_its_time_is_a_bad_change() -> None:
    from dagster_adjunct.resources.errors import BadChangeError

    world, spec = world_of_prices(), prices()
    columns = {
        "k": ["a"],
        "since": pa.array([None], pa.timestamp("us", tz="UTC")),
        "n": pa.array([1], pa.int32()),
    }
    world.streams.append(NAME, pa.table(columns), producer="test", sequence=world._next(NAME))
    with pytest.raises(BadChangeError, match=r"no time from which it is valid: 'since' is null"):
        world.advance(spec)
