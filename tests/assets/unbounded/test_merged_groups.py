"""Changes of several writers, each with an order for the columns that it owns."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.change_formats import OperationColumn
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.extractors import Projection
from dagster_adjunct.assets.declaration.policies import DeadLetters, DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.assets.retention.erasure import erase_keys
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.rewind import rewind_dataset
from dagster_adjunct.assets.unbounded.transient_table import TransientTable
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    DatasetError,
    KeyOrderError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.startpoint import StartpointSpecific
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded.tables import BY_HAND

NAME = "shoppers"
STREAM = Schema.of(
    k="string", site="string", sold="bigint", total="int", note="string", seen="timestamp", page="string"
)  # fmt: skip
GROUPS = {"sold": ["total", "note"], "seen": ["page"]}
Table = dict[str, dict[str, Any]]


def at(second: int | None) -> datetime | None:
    return None if second is None else datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)


@dataclass(frozen=True)
class Change:
    """What a change sets, or deletes, of each of the two groups whose order it has."""

    key: str
    sold: int | None = None
    seen: int | None = None
    deletes: bool = False
    site: str = "s0"

    @property
    def row(self) -> dict[str, Any]:
        row = {"k": self.key, "site": self.site, "sold": self.sold, "seen": at(self.seen)}
        if not self.deletes and self.sold is not None:
            note = None if self.sold % 3 == 0 else f"note {self.sold}"
            row |= {"total": self.sold * 10, "note": note}
        if not self.deletes and self.seen is not None:
            row |= {"page": f"page {self.seen}"}
        return {**row, "__tombstone": self.deletes}


def declared(world: World, **more: Any) -> AdjunctDataset:
    if NAME not in world.streams.list_streams():
        world.stream(NAME, STREAM, more.pop("stream_key", ["k"]), 2)
    columns = ["k", "sold", "total", "note", "seen", "page"]
    options = {"partitions": 2, "compaction": BY_HAND, "order_by": GROUPS, "columns": columns}
    return unbounded_dataset(NAME, input=f"lake.{NAME}", key="k", **{**options, **more})


def send(world: World, *changes: Change) -> None:
    schema = world.streams.info(NAME).schema
    assert schema is not None
    arrow = schema.to_arrow().append(pa.field("__tombstone", pa.bool_()))
    table = pa.Table.from_pylist([one.row for one in changes], schema=arrow)
    world.streams.append(NAME, table, producer="test", sequence=world._next(NAME))


def merged(changes: Sequence[Change]) -> Table:
    """Return the full join of what each group comes to."""
    groups: dict[str, dict[str, dict[str, Any] | None]] = {"sold": {}, "seen": {}}
    for order, table in groups.items():
        named = [one for one in changes if getattr(one, order) is not None]
        for one in sorted(named, key=lambda one: getattr(one, order)):
            columns = (order, *GROUPS[order])
            table[one.key] = None if one.deletes else {n: one.row.get(n) for n in columns}
    found: Table = {}
    for table in groups.values():
        for key, values in table.items():
            if values is not None:
                empty = dict.fromkeys(("sold", "total", "note", "seen", "page"))
                found[key] = found.get(key, empty) | values
    return found


def content(world: World, spec: AdjunctDataset) -> Table:
    view = StoredVersions(world.lake, spec).current()
    found: Table = {}
    for key, entry in () if view is None else view.items():
        found[key] = {name: entry[name] for name in ("sold", "total", "note", "seen", "page")}
    return found


def drawn(draw: random.Random, count: int) -> list[Change]:
    changes = []
    for number in range(count):
        names = draw.choice([("sold",), ("seen",), ("sold", "seen")])
        deletes = draw.random() < 0.25
        orders = dict.fromkeys(names, number)
        changes.append(Change(draw.choice("abcd"), **orders, deletes=deletes))
    draw.shuffle(changes)
    return changes


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 10))]
)
def test_every_order_and_cut_gives_the_full_join_of_the_groups(either: World, seed: int) -> None:
    draw = random.Random(seed)
    changes = drawn(draw, 80 if either.spark is IN_PROCESS else 40)
    changes += draw.sample(changes, 8)  # delivered again
    spec = declared(either, chunk=draw.choice([4, 1000]))
    begin = 0
    while begin < len(changes):
        cut = changes[begin : (begin := begin + draw.choice([1, 5, 20]))]
        send(either, *cut)
        either.advance(spec)
        assert content(either, spec) == merged(changes[:begin])
        if draw.random() < 0.3:
            level = draw.choice(["minor", "major"])
            compact_dataset(either.lake, NAME, spark=either.spark, by="test", level=level)
            assert content(either, spec) == merged(changes[:begin])


@pytest.mark.lengthy
def test_upkeep_and_rewinds_keep_the_orders_of_the_groups(world: World) -> None:
    world.spark = IN_PROCESS
    draw = random.Random(3)
    spec = declared(world)
    sent: list[Change] = []
    changes = drawn(draw, 60)
    while changes:
        for _ in range(6):
            sent.append(changes.pop())
            send(world, sent[-1])
        world.advance(spec)
        assert content(world, spec) == merged(sent)
        compact_dataset(world.lake, NAME, spark=IN_PROCESS, by="test", level="major")
        discard(world.lake, NAME, DiscardPolicy(keep=1, grace=timedelta(0)), by="test")
        manifest = StoredVersions(world.lake, NAME).require_manifest()
        assert isinstance(manifest, UnboundedManifest)
        positions = {}
        for ssp, end in manifest.offsets.items():
            offset = str(draw.randint(0, int(end)))
            positions[SystemStreamPartition.parse(ssp)] = StartpointSpecific(offset=offset)
        where: dict[str, Any] = {"lake": world.lake, "systems": world.systems, "spark": IN_PROCESS}
        rewind_dataset(spec, positions=positions, reason="again", by="test", **where)
        assert content(world, spec) == merged(sent)
    repartition_dataset(world.lake, NAME, 3, reason="more machines", by="test")
    erase_keys(world.lake, NAME, ["a"], reason="asked for", by="test")
    spec = declared(world, partitions=3)
    late = [Change("b", sold=30), Change("c", seen=1000), Change("d", sold=1000, deletes=True)]
    send(world, *late)
    world.advance(spec)
    assert content(world, spec) == merged([one for one in [*sent, *late] if one.key != "a"])


@pytest.mark.long
def test_a_table_of_one_run_merges_groups_too(sparkling: World) -> None:
    changes = drawn(random.Random(4), 40)
    table = TransientTable(sparkling.systems, declared(sparkling, persistent=False))
    for cut in (changes[:5], changes[5:15], [], changes[15:]):
        if cut:
            send(sparkling, *cut)
        table.advance(sparkling.spark)
    assert table.view is not None
    rows = table.view.frame(sparkling.spark()).collect()
    table.release()
    assert {row.k: (row.total, row.page) for row in rows} == {
        key: (entry["total"], entry["page"]) for key, entry in merged(changes).items()
    }


def test_a_change_without_any_order_is_a_bad_change(either: World) -> None:
    spec = declared(either, on_bad_change=DeadLetters("lake.dead"))
    send(either, Change("k", sold=1), Change("k", deletes=True), Change("l"))
    assert either.advance(spec).counters["quarantined"] == 2
    assert content(either, spec) == merged([Change("k", sold=1)])


@pytest.mark.parametrize("named", [["page"], []])
def test_changes_of_groups_that_are_stored_elsewhere_are_passed_over(
    either: World, named: list[str]
) -> None:
    spec = declared(
        either,
        columns=["k", "sold", "total", "note"],
        order_by={"sold": ["total", "note"], "seen": named},
        on_bad_change=DeadLetters("lake.dead"),
    )
    of_others = [Change("l", seen=1), Change("k", seen=2, deletes=True), Change("k", seen=3)]
    own = [Change("k", sold=1), Change("m", sold=2, seen=4)]
    send(either, *of_others, *own, Change("n"))
    counters = either.advance(spec).counters
    assert (counters["of_others"], counters["quarantined"]) == (3, 1)
    assert counters["superseded"] == 0
    found = {key: (entry["sold"], entry["total"]) for key, entry in either.view(spec).items()}
    assert found == {"k": (1, 10), "m": (2, 20)}
    send(either, Change("k", seen=9, deletes=True))  # nothing else: nothing is written
    assert either.advance(spec).counters["of_others"] == 1
    every = declared(either)  # what was passed over is not there
    send(either, Change("l", sold=7, seen=5))
    either.advance(every)
    assert content(either, every)["l"]["page"] == "page 5"


@pytest.mark.parametrize("cut", [False, True])
def test_offsets_of_two_partitions_do_not_decide_which_change_set_a_group(
    world: World, cut: bool
) -> None:
    from dagster_adjunct.resources.bucketing.hashing import bucket_of_key

    world.spark = IN_PROCESS
    sites = {bucket_of_key([site], ["string"], 2): site for site in ("s0", "s1", "s2", "s3")}
    spec = declared(world, stream_key=["site"])
    send(world, Change("k", sold=5, site=sites[0]), Change("k", sold=5, seen=1, site=sites[1]))
    send(world, Change("k", seen=7, site=sites[0]))
    world.advance(spec)
    send(world, Change("k", seen=7, site=sites[0]))
    if cut:
        world.advance(spec)
    send(world, Change("k", seen=7, deletes=True, site=sites[1]))
    with pytest.raises(KeyOrderError):
        world.advance(spec)
    spec = declared(world, on_bad_change=DeadLetters("lake.dead"))
    assert world.advance(spec).counters["quarantined"] == 1
    assert content(world, spec) == merged([Change("k", sold=5, seen=7)])


@pytest.mark.parametrize(
    ("more", "argument"),
    [
        ({"history": "all"}, "history"),
        ({"keep_tombstones": 5}, "keep_tombstones"),
        ({"changes": OperationColumn(missing="_missing")}, "order_by"),
        ({"order_by": {"sold": ["total", "page"], "seen": ["page"]}}, "order_by"),
        ({"extractor": Projection("k STRING, sold BIGINT")}, "extractor"),
    ],
)
def test_what_groups_can_not_be_combined_with_is_named(
    world: World, more: dict[str, Any], argument: str
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        declared(world, **more)
    assert (refused.value.argument, refused.value.dataset) == (argument, NAME)


@pytest.mark.parametrize(
    ("groups", "column"),
    [
        ({"sold": ["total", "note"], "seen": []}, "page"),
        ({"sold": ["total", "note"], "seen": ["page", "pages"]}, "pages"),
        ({"sold": ["total"], "note": [], "seen": ["page"]}, "note"),
        ({"sold": ["total", "note", "k"], "seen": ["page"]}, "k"),
        ({"site": [], "sold": ["total", "note"]}, "seen"),
    ],
)
def test_each_stored_column_is_in_one_group(world: World, groups: Any, column: str) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        world.advance(declared(world, order_by=groups))
    assert (refused.value.column, refused.value.dataset) == (column, NAME)


def test_a_dataset_stores_one_group_at_least(world: World) -> None:
    with pytest.raises(SchemaMismatchError) as refused:
        world.advance(declared(world, columns=["k"], order_by={"seen": ["page"]}))
    assert refused.value.column == "seen"


def test_columns_keep_their_groups_and_groups_may_be_added(world: World) -> None:
    world.spark = IN_PROCESS
    few = declared(world, columns=["k", "sold", "total"], order_by={"sold": ["total"]})
    send(world, Change("k", sold=5, seen=5))
    world.advance(few)
    assert dict(world.view(few).items()) == {"k": {"k": "k", "sold": 5, "total": 50}}
    spec = declared(world)
    send(world, Change("k", sold=4, seen=3), Change("l", sold=1))
    world.advance(spec)
    entry = content(world, spec)["k"]
    assert [entry[name] for name in ("sold", "total", "page")] == [5, 50, "page 3"]
    with pytest.raises(DatasetError):
        world.advance(declared(world, order_by={"sold": ["total"], "seen": ["page", "note"]}))
    with pytest.raises(DatasetError):
        world.advance(declared(world, order_by="sold"))
