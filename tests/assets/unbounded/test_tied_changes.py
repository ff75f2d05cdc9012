"""Changes of a key in several partitions with equal order values: offsets must not decide."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import starmap
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeadLetters, DeltaCompaction
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.tied_changes import NumberedChange, TieRule, resolve_group
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.resources.errors import KeyOrderError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from tests.assets.conftest import World
from tests.assets.grown_streams import GrownWorld

SCHEMA = Schema.of(site="string", k="string", at="bigint", since="timestamp", n="int")
# The stream is keyed by site, so that a key has changes in several partitions.
FIRST = "s0"
Change = tuple[str, str, int, int | None]  # site, key, order value, value; None deletes


SPARK = pytest.param(None, marks=pytest.mark.spark)
BY_SPARK_AT_LENGTH = pytest.param(None, marks=[pytest.mark.spark, pytest.mark.long])


@pytest.fixture(params=[IN_PROCESS, BY_SPARK_AT_LENGTH])
def quick(request: Any, world: World) -> World:
    """A world by each engine. Both find ties by the same function, once they have found the
    changes of a key: for `by_each` Spark does so in `make test`, too.
    """
    engine = request.param or request.getfixturevalue("sparkling").spark
    return GrownWorld(world.lake, engine)


by_each = pytest.mark.parametrize("quick", [IN_PROCESS, SPARK], indirect=True)


def table(world: World, **options: Any) -> AdjunctDataset:
    if "facts" not in world.streams.list_streams():
        world.stream("facts", SCHEMA, ["site"], 2)
    by_hand = DeltaCompaction(inside_commit=False)
    declared = {"partitions": 2, "compaction": by_hand, "order_by": "at", **options}
    if "history" in declared:
        declared |= {"valid_from": "since"}
        del declared["order_by"]
    return unbounded_dataset("facts", input="lake.facts", key="k", **declared)


def send(world: World, changes: Sequence[Change]) -> None:
    columns = {
        "site": pa.array([change[0] for change in changes]),
        "k": pa.array([change[1] for change in changes]),
        "at": pa.array([change[2] for change in changes], pa.int64()),
        "since": pa.array(
            [datetime(2026, 1, 1 + change[2], tzinfo=UTC) for change in changes],
            pa.timestamp("us", tz="UTC"),
        ),
        "n": pa.array([change[3] for change in changes], pa.int32()),
        "__tombstone": pa.array([change[3] is None for change in changes]),
    }
    world.streams.append("facts", pa.table(columns), producer="test", sequence=world._next("facts"))


def other_site(world: World) -> str:
    """Return a site whose records are in another partition than those of FIRST."""
    from dagster_adjunct.resources.bucketing.hashing import assign_buckets

    sites = [FIRST, *(f"s{number}" for number in range(1, 50))]
    places = assign_buckets([pa.chunked_array([pa.array(sites)])], 2).tolist()
    return next(site for site, place in zip(sites, places, strict=True) if place != places[0])


def content(world: World) -> dict[str, int]:
    view = StoredVersions(world.lake, "facts").require_current()
    return {key: entry["n"] for key, entry in view.items()}


DECLARED = [{"order_by": "at"}, {"history": "all"}]


@pytest.mark.parametrize("declared", DECLARED, ids=["order", "history"])
@pytest.mark.parametrize("cut", [False, True], ids=["one-chunk", "stored"])
def test_tied_changes_of_two_partitions_are_refused(
    quick: World, declared: dict[str, Any], cut: bool
) -> None:
    spec = table(quick, **declared)
    send(quick, [(FIRST, "z", 1, 0)] * 5 + [(FIRST, "a", 5, 1)])
    if cut:
        quick.advance(spec)
    send(quick, [(other_site(quick), "a", 5, 2)])
    with pytest.raises(KeyOrderError) as refused:
        quick.advance(spec)
    assert refused.value.dataset == "facts"
    assert refused.value.partition is not None
    assert refused.value.offset is not None
    assert "'a'" in refused.value.problem
    assert "DeadLetters" in refused.value.next_step
    if cut:
        assert content(quick) == {"z": 0, "a": 1}


@pytest.mark.parametrize(
    ("quick", "cut", "declared"),
    [
        *((IN_PROCESS, cut, declared) for cut in (False, True) for declared in DECLARED),
        pytest.param(None, False, DECLARED[0], marks=pytest.mark.spark),
        pytest.param(None, True, DECLARED[1], marks=pytest.mark.spark),
    ],
    indirect=["quick"],
)
def test_tied_changes_are_set_aside_with_dead_letters(
    quick: World, declared: dict[str, Any], cut: bool
) -> None:
    spec = table(quick, on_bad_change=DeadLetters("lake.dead"), **declared)
    quick.advance(spec)
    send(quick, [(FIRST, "z", 1, 0)] * 5 + [(FIRST, "a", 5, 1)])
    if cut:
        quick.advance(spec)
    send(quick, [(other_site(quick), "a", 5, 2), (other_site(quick), "b", 5, 3)])
    report = quick.advance(spec)
    assert report.counters["quarantined"] == 1
    dead = quick.streams.read_arrow(quick.streams.all_ranges("dead")).to_pylist()
    values = {1, 2}
    set_aside = json.loads(dead[0]["value"])["n"]
    assert content(quick) == {"z": 0, "a": (values - {set_aside}).pop(), "b": 3}
    send(quick, [(other_site(quick), "a", 6, 4)])
    quick.advance(spec)
    assert content(quick)["a"] == 4


@pytest.mark.parametrize("declared", DECLARED, ids=["order", "history"])
@pytest.mark.parametrize("value", [1, None], ids=["value", "deleted"])
def test_equal_contents_and_one_partition_are_no_ties(
    quick: World, declared: dict[str, Any], value: int | None
) -> None:
    spec = table(quick, **declared)
    send(quick, [(FIRST, "a", 5, value), (FIRST, "b", 5, 1)])
    quick.advance(spec)
    send(quick, [(FIRST, "a", 5, value), (FIRST, "b", 5, 2), (FIRST, "b", 5, 3)])
    quick.advance(spec)
    found = content(quick)
    assert found.pop("b") == 3
    assert repr(found.get("a")) == repr(value)


@pytest.mark.parametrize("cut", [False, True], ids=["one-chunk", "stored"])
def test_a_tie_below_a_newer_change_decides_nothing(quick: World, cut: bool) -> None:
    spec = table(quick)
    send(quick, [(FIRST, "a", 5, 1), (FIRST, "a", 7, 3)])
    if cut:
        quick.advance(spec)
    send(quick, [(other_site(quick), "a", 5, 2)])
    quick.advance(spec)
    assert content(quick) == {"a": 3}


@by_each
def test_ties_with_compacted_rows_are_refused(quick: World) -> None:
    spec = table(quick)
    send(quick, [(FIRST, "a", 5, 1)])
    quick.advance(spec)
    send(quick, [(FIRST, "b", 9, 1)])
    quick.advance(spec)
    assert compact_dataset(quick.lake, "facts", spark=quick.spark, level="major").changed
    send(quick, [(other_site(quick), "a", 5, 2)])
    with pytest.raises(KeyOrderError):
        quick.advance(spec)
    with pytest.raises(KeyOrderError):
        rebuild_dataset(
            spec, lake=quick.lake, systems=quick.systems, spark=quick.spark, reason="t", by="t"
        )


def test_an_order_of_two_columns_is_compared_as_a_whole(quick: World) -> None:
    spec = table(quick, order_by=["at", "n"])
    send(quick, [(FIRST, "a", 5, 1)])
    quick.advance(spec)
    send(quick, [(other_site(quick), "a", 5, 2)])
    quick.advance(spec)
    assert content(quick) == {"a": 2}


def test_rows_are_compared_with_their_last_change_and_nan_equals_itself() -> None:
    rule = TieRule("facts", Schema.of(k="string", n="double"), ("k",), ("at",))

    def change(partition: int, offset: int, n: float | None) -> dict[str, Any]:
        place = {"__partition": partition, "__offset": offset, "__position": 5}
        return {"k": "a", "n": n, "__tombstone": n is None, **place}

    nan = float("nan")
    same = [change(0, 7, nan), change(2, 1, 3.0), change(2, 2, nan)]
    assert resolve_group(starmap(NumberedChange, enumerate(same)), None, rule) == []
    other = [change(2, 1, 3.0), change(0, 7, nan), change(2, 2, None)]
    ties = resolve_group(starmap(NumberedChange, enumerate(other)), None, rule)
    assert [(tie.row, tie.with_row["__partition"]) for tie in ties] == [(0, 0), (2, 0)]
    stored = {name: value for name, value in change(2, 0, 1.0).items() if name != "__offset"}
    ties = resolve_group([NumberedChange(4, change(0, 7, 2.0))], stored, rule)
    assert [tie.row for tie in ties] == [4]


@pytest.mark.spark
def test_a_table_that_lives_for_one_run_refuses_ties_too(sparkling: World) -> None:
    world = GrownWorld(sparkling.lake, sparkling.spark)
    run = TransientTable(world.systems, table(world, persistent=False, bootstrap=True))
    send(world, [(FIRST, "a", 5, 1), (FIRST, "a", 6, 2), (other_site(world), "a", 5, 9)])
    run.advance(world.spark)
    assert run.view is not None
    assert [row.n for row in run.view.frame(world.spark()).collect()] == [2]
    send(world, [(other_site(world), "a", 6, 3)])
    with pytest.raises(KeyOrderError), translate_spark_errors():
        run.advance(world.spark)
    run.release()


def test_partitions_are_kept_by_an_erasure(quick: World) -> None:
    spec = table(quick)
    send(quick, [(FIRST, "a", 5, 1), (FIRST, "b", 5, 1)])
    quick.advance(spec)
    erase_keys(quick.lake, "facts", ["b"], reason="asked for", by="test")
    assert content(quick) == {"a": 1}
    send(quick, [(other_site(quick), "a", 5, 2)])
    with pytest.raises(KeyOrderError):
        quick.advance(spec)
