"""What is done to a table with history beside following it: read again, repartitioned, erased,
verified, compared.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.exchange.handover import polars_frame
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.rebucketing import repartition_table
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.assets.versions.version import datetime_from_micros, has_row_ends
from dagster_adjunct.resources.errors import BadChangeError, DatasetError, SchemaMismatchError
from dagster_adjunct.resources.objects.lake import lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded.over_time import (
    KEYS,
    NAME,
    Change,
    Model,
    at,
    check,
    prices,
    prices_in,
    second_of,
    send,
)

FIRST: list[Change] = [("a", 1, 1), ("b", 2, 2), ("a", 5, 3), ("c", 3, 1), ("b", 6, None)]
SECOND: list[Change] = [("a", 3, 9), ("d", 7, 1), ("c", 3, 2), ("b", 9, 4), ("a", 9, None)]
SPANS = timedelta(seconds=5)


def filled(*commits: list[Change], **options: Any) -> tuple[World, Any, Model]:
    """Return a world whose table has taken in these, a commit each, and the model of them."""
    world, model, spec = (
        prices_in(World(lake_in(InMemoryStore()), IN_PROCESS)),
        Model(),
        prices(**options),
    )
    for changes in commits:
        send(world, changes)
        world.advance(spec)
        model.add(changes)
    return world, spec, model


def compacted(world: World, level: Any = "major") -> Any:
    return compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level=level)


def test_what_is_older_than_the_history_goes_but_for_what_was_valid_at_its_edge() -> None:
    changes: list[Change] = [
        ("a", 1, 1),
        ("a", 4, 2),
        ("a", 20, 3),
        ("b", 2, 1),
        ("b", 3, None),
        ("c", 14, 1),
    ]
    world, spec, model = filled(changes, [("a", 21, 4)], history=SPANS)
    assert world.view(spec).sealed.edge == int(at(16).timestamp() * 1e6)
    report = compacted(world)
    assert (report.counters["pruned"], report.counters["forgotten"], report.rows) == (2, 1, (7, 4))
    assert datetime_from_micros(report.horizon) == at(3)
    check(world.view(spec), model)
    assert [second_of(part.valid_from) for part in world.view(spec).history_of("a")] == [4, 20, 21]
    assert world.view(spec).history_of("b") == []


def test_changes_below_the_horizon_are_late_and_those_above_correct_the_past() -> None:
    dead = DeadLetters("lake.dead-prices")
    for options in ({}, {"on_bad_change": dead}):
        world, spec, model = filled(
            [("b", 3, None), ("a", 1, 1)], [("a", 30, 2)], history=SPANS, **options
        )
        compacted(world)
        late: list[Change] = [("b", 2, 7), ("b", 3, 7), ("b", 4, 8)]
        send(world, late)
        counters = world.advance(spec).counters
        model.add(late, horizon=3)
        check(world.view(spec), model)
        assert counters["quarantined" if options else "late"] == 2
        assert counters["corrections"] == 1
        if options:
            letters = world.streams.read_arrow(
                world.streams.all_ranges("dead-prices"), ["reason"]
            ).column("reason")
            assert (
                "deletions up to 2026-01-01 00:00:03.000000 UTC are no longer stored"
                in letters[0].as_py()
            )


def test_without_deletions_nothing_ever_comes_too_late() -> None:
    world, spec, model = filled([("a", 1, 1)], [("a", 30, 2)], history=SPANS)
    assert compacted(world).horizon is None
    send(world, [("b", 2, 7)])
    assert "late" not in world.advance(spec).counters
    model.add([("b", 2, 7)])
    check(world.view(spec), model)


def test_a_history_may_be_shortened_and_lengthened_but_not_beyond_what_is_kept() -> None:
    world, _, model = filled([("a", 1, 1), ("a", 10, 2)], [("a", 20, 3)], history=SPANS)
    compacted(world)
    longer = prices(history=timedelta(seconds=18))
    for second in (21, 40):
        send(world, [("b", second, 1)])
        model.add([("b", second, 1)])
        world.advance(longer)
        expected = {21: 15, 40: 22}[second]  # what was pruned, then 18 seconds below the newest
        assert world.view(longer).sealed.edge == int(at(expected).timestamp() * 1e6)
        check(world.view(longer), model)


def test_a_longer_history_holds_from_the_next_advance_though_no_change_has_come() -> None:
    world, _, model = filled([("a", 1, 1), ("a", 10, 2)], [("a", 20, 3)], history=SPANS)
    longer = prices(history=timedelta(seconds=18))
    assert world.advance(longer).action == "up-to-date"
    entry = open_dataset(world.lake, NAME).history()[0]
    assert (entry.action, entry.reason) == ("evolve", "history is 0:00:18, was 0:00:05")
    assert compacted(world).counters.get("pruned", 0) == 0
    assert world.view(longer).sealed.edge == int(at(2).timestamp() * 1e6)
    check(world.view(longer), model)
    commits = len(open_dataset(world.lake, NAME).history())
    world.advance(longer)
    assert len(open_dataset(world.lake, NAME).history()) == commits


@pytest.mark.parametrize(
    "options", [{}, {"history": None, "valid_from": None}], ids=["history", "none"]
)
def test_a_delta_that_an_erasure_left_alone_is_merged_before_other_engines_take_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    world, spec = prices_in(World(open_lake(tmp_path / "lake"), IN_PROCESS)), prices(**options)
    for changes in ([("d", 1, 1)], [("a", 1, 1), ("a", 5, 2), ("b", 2, 3), ("c", 4, None)]):
        send(world, changes)
        world.advance(spec)
    assert erase_keys(world.lake, NAME, ["d"], reason="request 7", by="test").complete
    with open_dataset(world.lake, spec) as served:
        assert len(served.sealed.generations) == 1
        with pytest.raises(
            DatasetError, match="rows in its one generation some are superseded"
        ) as caught:
            polars_frame(served)
        assert "adjunct dataset compact prices --level major" in caught.value.next_step
    assert compacted(world).action == "compacted"
    assert compacted(world).action == "nothing"
    with open_dataset(world.lake, spec) as served:
        assert sorted(row["n"] for row in polars_frame(served).collect().to_dicts()) == [2, 3]
        if not options:
            rows = polars_frame(served.over_time()).sort("k", "since").collect().to_dicts()
            assert [(row["n"], row["is_current"]) for row in rows] == [
                (1, False),
                (2, True),
                (3, True),
            ]
            then = polars_frame(served.valid_at(at(3))).sort("k").collect().to_dicts()
            assert [row["n"] for row in then] == [1, 3]


@pytest.mark.parametrize(
    "options",
    [{"history": None, "valid_from": None}, {"valid_from": None}],
    ids=["none", "by the record's time"],
)
def test_another_history_on_a_table_that_is_there_is_refused_with_what_to_do(
    options: dict[str, Any],
) -> None:
    world, _, _ = filled(FIRST)
    send(world, SECOND)
    with pytest.raises(
        DatasetError, match=r"history is .*, was by since.*needs a rebuild"
    ) as caught:
        world.advance(prices(**options))
    assert "under a new name" in caught.value.next_step


def test_valid_from_names_a_time() -> None:
    with pytest.raises(SchemaMismatchError) as failure:
        filled(FIRST, valid_from="n")
    assert failure.value.column == "n"
    with pytest.raises(SchemaMismatchError) as caught:
        filled(FIRST, valid_from="nothing")
    assert caught.value.column == "nothing"


def test_entries_are_valid_from_their_records_time_unless_a_column_is_named() -> None:
    world, spec, _ = filled([("a", 1, 1)], [("a", 1, 2)], [("a", 1, None)], valid_from=None)
    parts = world.view(spec).history_of("a")
    assert [part.entry and part.entry["n"] for part in parts] == [1, 2, None]
    records = world.streams.read_arrow(world.streams.all_ranges(NAME), ["n"])
    times = records.column("__timestamp").cast(pa.timestamp("us", tz="UTC")).to_pylist()
    assert [part.valid_from for part in parts] == times


def test_a_bad_time_fails_the_advance_whatever_the_horizon() -> None:
    world, spec, _ = filled([("b", 3, None)], [("a", 30, 2)], history=SPANS)
    assert compacted(world).horizon is not None
    columns = {
        "k": ["a"],
        "since": pa.array([None], pa.timestamp("us", tz="UTC")),
        "n": pa.array([1], pa.int32()),
    }
    world.streams.append(NAME, pa.table(columns), producer="test", sequence=world._next(NAME))
    with pytest.raises(BadChangeError, match="no time from which it is valid"):
        world.advance(spec)


@pytest.mark.parametrize("level", [None, "minor", "major"])
def test_a_re_delivery_changes_nothing_that_can_be_read(level: str | None) -> None:
    world, spec, model = filled(FIRST, SECOND)
    before = [world.view(spec).history_of(key) for key in KEYS]
    for _ in range(2):
        send(world, [*SECOND])
        world.advance(spec)
    if level:
        compacted(world, level)
    check(world.view(spec), model)
    assert [world.view(spec).history_of(key) for key in KEYS] == before


@pytest.mark.parametrize("compact", [False, True])
def test_a_repartitioned_table_has_the_same_history(compact: bool) -> None:
    world, spec, model = filled(FIRST, SECOND, history=SPANS)
    if compact:
        compacted(world)
    repartition_table(world.lake, NAME, 3, reason="more", by="test", roots=dict)
    spec = replace(spec, partitions=3)
    check(world.view(spec), model)
    assert [has_row_ends(generation) for generation in world.view(spec).sealed.generations] == [
        True,
        False,
    ][: 2 - compact]
    assert verify_version(world.view(spec), deep=True).ok
    send(world, [("a", 12, 5)])
    model.add([("a", 12, 5)])
    world.advance(spec)
    check(world.view(spec), model)
    compacted(world)
    check(world.view(spec), model)


@pytest.mark.parametrize("keys", [["a"], ["a", "b", "c"]])
@pytest.mark.parametrize("compact", [False, True])
def test_an_erasure_takes_all_times_of_a_key(keys: list[str], compact: bool) -> None:
    world, spec, model = filled(FIRST, SECOND)
    if compact:
        compacted(world)
    report = erase_keys(world.lake, NAME, keys, reason="asked", by="test")
    assert report.complete, report.to_json()
    for key in keys:
        del model.valid[key]
        assert world.view(spec).history_of(key) == []
    check(world.view(spec), model)
    send(world, [("d", 2, 4)])
    model.add([("d", 2, 4)])
    world.advance(spec)
    check(world.view(spec), model)
    compacted(world)
    check(world.view(spec), model)
    assert verify_version(world.view(spec), deep=True).ok


def test_applying_history_again_changes_nothing_but_corrected_times() -> None:
    from tests.assets.unbounded.facts import PythonExtractor

    world, spec, model = filled(FIRST, SECOND)
    positions = {
        SystemStreamPartition("lake", NAME, part): StartpointSpecific(offset="0")
        for part in range(2)
    }
    rewind: Any = {"positions": positions, "reason": "again", "by": "test"}
    rewind_dataset(spec, lake=world.lake, systems=world.systems, spark=IN_PROCESS, **rewind)
    check(world.view(spec), model)
    made = PythonExtractor(
        "tests.assets.unbounded.facts:tenfold",
        "k STRING, since TIMESTAMP, n INT",
        unchanged=("k", "since"),
    )
    positions.update({ssp: StartpointSpecific(offset="0") for ssp in positions})
    rewind_dataset(
        replace(spec, extractor=made),
        lake=world.lake,
        systems=world.systems,
        spark=IN_PROCESS,
        **rewind,
    )
    for rows in model.valid.values():
        rows.update({second: value and 10 * value for second, value in rows.items()})
    check(world.view(spec), model)


def test_versions_are_compared_by_their_entries_and_read_as_they_were() -> None:
    world, spec, model = filled(FIRST)
    first = world.view(spec).version
    send(world, SECOND)
    world.advance(spec)
    dataset = open_dataset(world.lake, spec)
    diff = dataset.diff(first, dataset.version)
    assert (diff.added, diff.removed, diff.changed) == (2, 1, 1)
    check(open_dataset(world.lake, NAME, version=first)._served.enter(leased=False).reader, model)
    assert dataset.verify(deep=True).ok
    assert dataset.history_of("a")[-1].entry is None


def test_a_table_without_history_says_how_to_have_one() -> None:
    world, spec, _ = filled(FIRST, history=None, valid_from=None)
    with pytest.raises(DatasetError, match="keeps no history") as caught:
        world.view(spec).history_of("a")
    assert "history=timedelta" in caught.value.next_step


@pytest.mark.parametrize("level", [None, "minor", "major"])
def test_of_one_moment_the_higher_value_to_order_by_counts_whichever_came_first(
    level: str | None,
) -> None:
    world, spec, _ = filled(
        [("a", 5, 9), ("b", 4, 1)], [("a", 5, 3), ("a", 2, 4)], [("b", 4, 2)], order_by="n"
    )
    if level:
        compacted(world, level)
    view = world.view(spec)
    assert [
        (second_of(part.valid_from), part.entry and part.entry["n"])
        for part in view.history_of("a")
    ] == [(2, 4), (5, 9)]
    assert {key: entry["n"] for key, entry in view.items()} == {"a": 9, "b": 2}
