"""The changes of a dataset between two versions, against dictionaries of the entries of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.reading.diff import diff_versions
from dagster_adjunct.assets.reading.entry_changes import EntryChanges
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.assets.sealing import view_of
from tests.assets.unbounded.tables import BY_HAND, KEYS, Content, send, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Difference = dict[str, tuple[str, int | None, int | None]]
"""By key: the kind, and n before and after."""


@pytest.fixture
def quick(world: World) -> World:
    """A lake in which nothing needs Spark."""
    world.spark = IN_PROCESS
    return world


def expected(before: Content, after: Content) -> Difference:
    found: Difference = {}
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if old != new:
            kind = "insert" if old is None else "delete" if new is None else "update"
            found[key] = (kind, old, new)
    return found


def seen(changes: EntryChanges) -> Difference:
    found: Difference = {}
    for change in changes:
        key = change.key["k"]
        assert key not in found, "a key changes once"
        for entry in filter(None, (change.before, change.after)):
            assert entry["k"] == key
        before, after = ((entry or {}).get("n") for entry in (change.before, change.after))
        found[key] = (change.kind, before, after)
    return found


@pytest.fixture
def opened(quick: World) -> Iterator[Any]:
    held: list[Dataset] = []

    def open_(name: str) -> Dataset:
        held.append(open_dataset(quick.lake, name))
        return held[-1]

    yield open_
    for dataset in held:
        dataset.close()


OPTIONS: dict[str, dict[str, Any]] = {
    "partitioned": {},
    "broadcast": {"broadcast": True},
    "history": {"history": "all"},
    "history of one file": {"history": "all", "broadcast": True},
}


@pytest.mark.lengthy
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_any_two_versions_of_a_change_stream_differ_as_dictionaries_do(
    quick: World, opened: Any, options: dict[str, Any]
) -> None:
    draw = random.Random(str(options))
    spec = table(quick, **options)
    states = [(None, Content())]
    for number in range(7):
        if number in (2, 5):
            level = "major" if number == 2 else "minor"
            report = compact_dataset(
                quick.lake, spec.name, spark=IN_PROCESS, by="test", level=level
            )
            if report.version:
                states.append((str(report.version), states[-1][1]))
        keys = draw.sample(KEYS, draw.randrange(1, 8))
        states.append(
            send(quick, spec, {key: draw.choice([None, draw.randrange(3)]) for key in keys})
        )
    dataset = opened(spec.name)
    for since, before in states:
        for until, after in states[1:]:
            assert seen(dataset.changes(since, until)) == expected(before, after)


def test_only_the_changed_keys_of_deltas_are_read(
    quick: World, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = table(quick)
    first, _ = send(quick, spec, dict.fromkeys(KEYS, 1))
    send(quick, spec, {"a": 2})

    def read_whole(*_: Any, **__: Any) -> Any:
        raise AssertionError("a whole bucket was read")

    monkeypatch.setattr("dagster_adjunct.assets.reading.entry_changes.read_entries", read_whole)
    assert seen(opened(spec.name).changes(first)) == {"a": ("update", 1, 2)}


def test_late_changes_that_lose_by_their_order_change_nothing(quick: World, opened: Any) -> None:
    quick.stream("ordered", Schema.of(k="string", n="int", at="bigint"), ["k"], 1)
    spec = unbounded_dataset(
        "ordered",
        input="lake.ordered",
        key="k",
        order_by="at",
        partitions=2,
        compaction=BY_HAND,
        columns=["k", "n"],
    )
    quick.send("ordered", [("a", 1, 10), ("b", 1, 10)])
    quick.advance(spec)
    first = quick.view(spec).version
    quick.send("ordered", [("a", 5, 9), ("b", 2, 11), ("c", 3, 1)])
    quick.advance(spec)
    changes = opened("ordered").changes(first)
    assert seen(changes) == {"b": ("update", 1, 2), "c": ("insert", None, 3)}


def versions(quick: World, *contents: Content) -> None:
    """Publish these versions, named v1, v2, …, of the dataset `planes`."""
    if "planes" not in quick.streams.list_streams():
        quick.stream("planes", Schema.of(k="string", n="int"), ["k"], 1)
    spec = bounded_dataset("planes", input="lake.planes", key="k", partitions=2)
    for number, content in enumerate(contents, 1):
        quick.send("planes", list(content.items()), version=f"v{number}")
        quick.advance(spec)


def test_versions_of_deliveries_differ_in_both_directions(quick: World, opened: Any) -> None:
    one, two = {"a": 1, "b": 2, "c": 3}, {"b": 2, "c": 4, "d": 5}
    versions(quick, one, two)
    dataset = opened("planes")
    assert seen(dataset.changes("v1", "v2")) == expected(one, two)
    assert seen(dataset.changes("v2", "v1")) == expected(two, one)
    assert seen(dataset.changes()) == expected({}, two)
    assert seen(dataset.changes("v2")) == {}


def test_after_a_rollback_the_changes_go_back(quick: World, opened: Any) -> None:
    one, two = {"a": 1, "b": 2}, {"a": 2}
    versions(quick, one, two)
    position = opened("planes").version
    StoredVersions(quick.lake, "planes").rollback(reason="wrong", by="test")
    changes = opened("planes").changes(since=position)
    assert seen(changes) == expected(two, one)
    assert opened("planes").version == changes.until


def test_times_and_commits_name_versions_too(quick: World, opened: Any) -> None:
    spec = table(quick)
    before = datetime.now(UTC) - timedelta(days=1)
    send(quick, spec, {"a": 1})
    _, after = send(quick, spec, {"b": 2})
    dataset = opened(spec.name)
    second = StoredVersions(quick.lake, spec.name).newest()[0]
    assert seen(dataset.changes(before)) == expected({}, after)
    assert seen(dataset.changes(second.number - 1)) == {"b": ("insert", None, 2)}
    assert seen(dataset.changes(datetime.now(UTC))) == {}


def test_a_table_of_changes_goes_to_other_engines(
    quick: World, opened: Any, spark: SparkSession
) -> None:
    versions(quick, {"a": 1, "b": 2}, {"b": 3})
    changes = opened("planes").changes("v1")
    table = pa.table(changes)
    assert table.schema == changes.schema
    rows = duckdb.sql("select kind, key.k, before.n, after.n, version from changes").fetchall()
    assert rows == [("delete", "a", 1, None, changes.until), ("update", "b", 2, 3, changes.until)]
    frame = changes.frame(spark).selectExpr("kind", "key.k", "before.n", "after.n as m", "at")
    assert [tuple(row)[:4] for row in frame.collect()] == [row[:4] for row in rows]
    assert table.column("at").to_pylist() == [changes.at] * 2


def test_columns_that_came_later_are_null_before(quick: World, opened: Any) -> None:
    quick.stream("wide", Schema.of(k="string", n="int", more="string"), ["k"], 1)
    spec = bounded_dataset("wide", input="lake.wide", key="k", partitions=2, columns=["k", "n"])
    quick.send("wide", [("a", 1, "x"), ("b", 1, None)], version="v1")
    quick.advance(spec)
    wider = bounded_dataset("wide", input="lake.wide", key="k", partitions=2)
    quick.send("wide", [("a", 1, "x"), ("b", 1, None)], version="v2")
    quick.advance(wider)
    (change,) = opened("wide").changes("v1")
    assert (change.kind, change.before) == ("update", {"k": "a", "n": 1})
    assert change.after == {"k": "a", "n": 1, "more": "x"}


@pytest.mark.parametrize("is_compacted", [False, True])
def test_a_renamed_column_is_compared_with_what_it_was(
    quick: World, opened: Any, is_compacted: bool
) -> None:
    spec = table(quick)
    first, _ = send(quick, spec, {"a": 1, "b": 2})
    quick.streams.change_columns(spec.name, renamed={"n": "seats"})
    renamed = table(quick, renamed={"n": "seats"})
    quick.send(spec.name, [("a", 1), ("b", 3)])
    quick.advance(renamed)
    if is_compacted:
        compact_dataset(quick.lake, spec.name, spark=IN_PROCESS, by="test", level="major")
    (change,) = opened(spec.name).changes(first)
    assert (change.before, change.after) == ({"k": "b", "seats": 2}, {"k": "b", "seats": 3})


def test_members_that_one_version_lacks_are_null_there() -> None:
    old_schema = Schema.of(k="string", s={"x": "int", "gone": "string"}, tags=[{"a": "int"}])
    new_schema = Schema.of(
        k="string", s={"added": "string", "x": "bigint"}, tags=[{"a": "int", "b": "int"}]
    )
    store = InMemoryStore()
    old = view_of(
        store,
        [
            ("same", {"x": 1, "gone": None}, [{"a": 1}]),
            ("gone", {"x": 1, "gone": "g"}, None),
            ("x", {"x": 1, "gone": None}, []),
            ("added", {"x": 1, "gone": None}, None),
            ("tag", None, [{"a": 1}]),
        ],
        schema=old_schema,
        key=["k"],
    )
    new = view_of(
        store,
        [
            ("same", {"x": 1, "added": None}, [{"a": 1, "b": None}]),
            ("gone", {"x": 1, "added": None}, None),
            ("x", {"x": 2, "added": None}, []),
            ("added", {"x": 1, "added": "a"}, None),
            ("tag", None, [{"a": 1, "b": 2}]),
        ],
        schema=new_schema,
        key=["k"],
        number=2,
    )
    assert {change.key["k"] for change in EntryChanges(old, new)} == {"gone", "x", "added", "tag"}
    compared = diff_versions(old, new)
    assert (compared.changed, compared.unchanged) == (1, 4), "in the members of both"
    assert compared.sample.changed[0].key == {"k": "x"}


def test_versions_with_other_keys_have_no_changes() -> None:
    schema = Schema.of(k="string", n="int")
    old, new = (
        view_of(InMemoryStore(), [("a", 1)], schema=schema, key=[key]) for key in ("k", "n")
    )
    with pytest.raises(DatasetError) as caught:
        EntryChanges(old, new)
    assert caught.value.version == old.version


def test_both_versions_are_leased_until_the_dataset_is_closed(quick: World) -> None:
    versions(quick, {"a": 1}, {"a": 2}, {"a": 3})
    store = quick.lake.store
    with open_dataset(quick.lake, "planes") as dataset:
        changes = dataset.changes("v1")
        assert len(list(store.list("datasets/planes/leases/"))) == 2
        assert seen(changes) == {"a": ("update", 1, 3)}
    assert not list(store.list("datasets/planes/leases/"))
