"""The diff of two versions, against dictionaries of the same entries."""

from __future__ import annotations

import datetime as dt
import json
import math
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.reading.diff import VersionDiff, compare_tables, diff_versions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import (
    POSITION,
    TOMBSTONE,
    SealedVersion,
    StoredPositions,
    build_layout,
)
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError, ManifestMismatchError
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.sealing import Row, table_of, view_of

UTC = dt.UTC
PLANES = Schema.of(tailnum="string", seats="int", maker="string")
TIMES = st.datetimes(dt.datetime(1600, 1, 1), dt.datetime(2400, 1, 1), timezones=st.just(UTC))
DECIMALS = st.decimals(-9999999, 9999999, places=2, allow_nan=False)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "string": TEXTS,
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "tinyint": st.integers(-128, 127),
    "date": st.dates(dt.date(1, 1, 1)),
    "timestamp": TIMES,
    "decimal(9,2)": DECIMALS,
    "decimal(38,2)": DECIMALS,
    "binary": st.binary(max_size=5),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    **KEYS,
    "double": st.floats(),
    "boolean": st.booleans(),
}


def oracle(
    schema: Schema, key: list[str], old: list[Row], new: list[Row]
) -> tuple[set[Row], set[Row], set[Row]]:
    """Return the keys added, removed and changed."""
    places = [schema.names.index(name) for name in key]

    def by_key(rows: list[Row]) -> dict[Row, Row]:
        return {tuple(row[place] for place in places): tuple(map(comparable, row)) for row in rows}

    before, after = by_key(old), by_key(new)
    changed = {shared for shared in before.keys() & after.keys() if before[shared] != after[shared]}
    return after.keys() - before.keys(), before.keys() - after.keys(), changed


def comparable(value: Any) -> Any:
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


@st.composite
def two_versions(draw: st.DrawFn) -> tuple[Schema, list[str], list[Row], list[Row]]:
    """Return a schema, its key, and the rows of an old and a new version, with some keys in
    both.
    """
    key_types = draw(st.lists(st.sampled_from(sorted(KEYS)), min_size=1, max_size=3))
    value_types = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3))
    keys = draw(st.lists(st.tuples(*(KEYS[kind] for kind in key_types)), max_size=12, unique=True))
    values = st.tuples(*(st.none() | VALUES[kind] for kind in value_types))
    old, new = [], []
    for key_values in keys:
        where = draw(st.sampled_from(["old", "new", "same", "both"]))
        first = draw(values)
        if where != "new":
            old.append((*key_values, *first))
        if where != "old":
            new.append((*key_values, *(draw(values) if where == "both" else first)))
    names = [f"k.{index}" for index in range(len(key_types))]
    columns = dict(zip(names, key_types, strict=True)) | {
        f"v{i}": kind for i, kind in enumerate(value_types)
    }
    return Schema.of(columns), names, old, new


@pytest.mark.lengthy
@given(two_versions(), st.integers(1, 3), st.sampled_from([None, 1, 3]), st.integers(0, 4))
@settings(max_examples=100)
def test_a_diff_equals_that_of_two_dictionaries(
    versions: tuple[Schema, list[str], list[Row], list[Row]],
    partitions: int,
    others: int | None,
    sample: int,
) -> None:
    schema, key, old, new = versions
    store = InMemoryStore()
    before = view_of(store, old, schema=schema, key=key, partitions=partitions, number=1)
    after = view_of(store, new, schema=schema, key=key, partitions=others or partitions, number=2)
    added, removed, changed = oracle(schema, key, old, new)

    diff = diff_versions(before, after, sample=sample)

    assert (diff.old, diff.new) == (before.version, after.version)
    assert (diff.added, diff.removed, diff.changed) == (len(added), len(removed), len(changed))
    assert diff.unchanged == len(old) - len(removed) - len(changed)
    assert [tuple(row.values()) for row in diff.sample.added] == sorted(added)[:sample]
    assert [tuple(row.values()) for row in diff.sample.removed] == sorted(removed)[:sample]
    assert [tuple(row.key.values()) for row in diff.sample.changed] == sorted(changed)[:sample]
    for entry in diff.sample.changed:
        place = tuple(entry.key.values())
        assert comparable_entry(entry.old) == comparable_entry(before.get(place))
        assert comparable_entry(entry.new) == comparable_entry(after.get(place))
    json.dumps(diff.to_json(), allow_nan=False)


def comparable_entry(entry: dict[str, Any] | None) -> dict[str, Any] | None:
    return entry and {name: comparable(value) for name, value in entry.items()}


@pytest.mark.lengthy
@given(st.integers(), st.sampled_from([0, 0.01, 0.3, 1]), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_many_rows_are_matched_whatever_their_order(
    seed: int, rate: float, two_columns: bool, shuffled: bool
) -> None:
    chance = random.Random(seed)
    numbers = sorted(chance.sample(range(2000), chance.randrange(400)))
    old = [(f"k{n:05}", n // 50, n) for n in numbers if chance.random() >= rate / 2]
    new = [
        (f"k{n:05}", n // 50, -n if chance.random() < rate / 3 else n)
        for n in numbers
        if chance.random() >= rate / 2
    ]
    if shuffled:
        chance.shuffle(old)
        chance.shuffle(new)
    schema = Schema.of(k="string", group="int", v="int")
    key = ["group", "k"] if two_columns else ["k"]
    added, removed, changed = oracle(schema, key, old, new)

    before, after = table_of(schema, old), table_of(schema, new)
    comparison = compare_tables(before, after, key, ["v"])

    assert comparison is not None
    assert keys(after.take(comparison.added), key) == added
    assert keys(before.take(comparison.removed), key) == removed
    changed_after = after.take(comparison.changed_after).select(key)
    assert keys(changed_after, key) == changed
    assert before.take(comparison.changed_before).select(key).equals(changed_after)
    assert comparison.unchanged == len(old) - len(removed) - len(changed)


def keys(table: pa.Table, key: list[str]) -> set[Row]:
    return {tuple(entry.values()) for entry in table.select(key).to_pylist()}


def test_a_key_that_is_there_twice_is_refused() -> None:
    store = InMemoryStore()
    rows: list[Row] = [("N1", 1, "x"), ("N1", 2, "x"), ("N2", 2, "x")]
    twice = view_of(store, rows, schema=PLANES, key=["tailnum"], number=1)
    once = view_of(store, rows[1:], schema=PLANES, key=["tailnum"], number=2)
    with pytest.raises(
        DatasetError, match=r"the key \(tailnum\) is not unique in version v000002-.* or v000001-"
    ):
        diff_versions(once, twice)


def test_a_bucket_with_equal_contents_is_not_read() -> None:
    store = InMemoryStore()
    rows: list[Row] = [(f"N{n}", n, None) for n in range(100)]
    old = view_of(store, rows, schema=PLANES, key=["tailnum"], partitions=4, number=1)
    new = view_of(
        store,
        [*rows[:-1], ("N99", 0, None)],
        schema=PLANES,
        key=["tailnum"],
        partitions=4,
        number=2,
    )
    equal = {a.sha256 for a in old.sealed.generations[0].files} & {
        b.sha256 for b in new.sealed.generations[0].files
    }
    for view in (old, new):
        for file in view.sealed.generations[0].files:
            if file.sha256 in equal:
                store.delete(f"{view.sealed.generations[0].folder}/{file.name}")
    assert len(equal) == 3
    diff = diff_versions(old, new)
    assert (diff.added, diff.removed, diff.changed, diff.unchanged) == (0, 0, 1, 99)


def test_a_version_is_equal_to_itself_and_to_another_with_the_same_rows() -> None:
    store = InMemoryStore()
    rows: list[Row] = [("N1", 1, None), ("N2", None, "x")]
    one = view_of(store, rows, schema=PLANES, key=["tailnum"], number=1)
    two = view_of(store, rows, schema=PLANES, key=["tailnum"], number=2)
    assert diff_versions(one, one) == VersionDiff(one.version, one.version, 0, 0, 0, 2)
    assert diff_versions(one, two) == VersionDiff(one.version, two.version, 0, 0, 0, 2)


def test_columns_that_came_went_or_changed_their_type_are_named() -> None:
    store = InMemoryStore()
    old = view_of(
        store,
        [("N1", 1, "a", 5, "7"), ("N2", 2, "b", None, "7"), ("N3", 3, "c", 5, None)],
        schema=Schema.of(tailnum="string", seats="int", gone="string", wide="int", text="string"),
        key=["tailnum"],
        number=1,
    )
    new = view_of(
        store,
        [(7, "N1", 5, 1, True), (8, "N2", 5, 2, True), (None, "N3", 5, 3, True)],
        schema=Schema.of(text="int", tailnum="string", wide="bigint", seats="int", came="boolean"),
        key=["tailnum"],
        number=2,
    )
    diff = diff_versions(old, new)
    assert diff.columns.added == ("came",)
    assert diff.columns.removed == ("gone",)
    assert diff.columns.retyped == (("wide", "int", "bigint"), ("text", "string", "int"))
    assert (diff.changed, diff.unchanged) == (1, 2), (
        "text can't be compared with numbers; int with bigint can"
    )
    assert diff.to_json()["sample"]["changed"] == [
        {
            "key": {"tailnum": "N2"},
            "old": {"tailnum": "N2", "seats": 2, "gone": "b", "wide": None, "text": "7"},
            "new": {"text": 8, "tailnum": "N2", "wide": 5, "seats": 2, "came": True},
        }
    ]


def test_keys_that_grew_wider_are_compared_across_their_buckets() -> None:
    store = InMemoryStore()
    rows: list[Row] = [(n, n) for n in range(-50, 50)]
    old = view_of(
        store, rows, schema=Schema.of(k="int", v="int"), key=["k"], partitions=5, number=1
    )
    new = view_of(
        store, rows[1:], schema=Schema.of(k="bigint", v="int"), key=["k"], partitions=5, number=2
    )
    diff = diff_versions(old, new)
    assert (diff.added, diff.removed, diff.changed, diff.unchanged) == (0, 1, 0, 99)
    assert diff.sample.removed == ({"k": -50},)


def test_versions_with_other_keys_are_refused() -> None:
    store = InMemoryStore()
    text = view_of(store, [("1", 1, None)], schema=PLANES, key=["tailnum"], number=1)
    number = view_of(
        store,
        [(1, "a")],
        schema=Schema.of(tailnum="int", maker="string"),
        key=["tailnum"],
        number=2,
    )
    with pytest.raises(
        DatasetError, match=r"is keyed by \(tailnum string\) and version .* by \(tailnum int\)"
    ):
        diff_versions(text, number)
    with pytest.raises(
        DatasetError, match=r"is keyed by \(tailnum int\) and version .* by \(maker string\)"
    ):
        diff_versions(
            number, view_of(store, [(1, "a")], schema=number.schema, key=["maker"], number=3)
        )
    with pytest.raises(ConfigurationError) as caught:
        diff_versions(text, text, sample=-1)
    assert caught.value.argument == "sample"


def test_a_missing_and_a_damaged_file_are_named() -> None:
    store = InMemoryStore()
    old = view_of(
        store, [("N1", 1, None)], schema=PLANES, key=["tailnum"], partitions=None, number=1
    )
    new = view_of(
        store, [("N1", 2, None)], schema=PLANES, key=["tailnum"], partitions=None, number=2
    )
    name = f"{new.sealed.generations[0].folder}/{new.sealed.generations[0].files[0].name}"
    whole = store.get(name).data

    store.put(name, whole[: len(whole) // 2])
    with pytest.raises(ManifestMismatchError, match="its SHA-256 is") as caught:
        diff_versions(old, new)
    assert caught.value.key == name
    columns = Schema.of(a="string", b="int")
    other = view_of(store, [("N1", 2)], schema=columns, key=["a"], partitions=None, dataset="other")
    generation = other.sealed.generations[0]
    store.put(name, store.get(f"{generation.folder}/{generation.files[0].name}").data)
    with pytest.raises(ManifestMismatchError, match="its SHA-256 is") as caught:
        diff_versions(old, new)
    assert caught.value.key == name
    store.delete(name)
    with pytest.raises(ManifestMismatchError, match="is missing") as caught:
        diff_versions(old, new)
    assert caught.value.key == name


@pytest.mark.lengthy
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 9), st.integers(0, 5), st.none() | st.integers(0, 3)),
            max_size=8,
        )
    )
)
@settings(max_examples=30)
def test_deltas_are_merged_by_position_and_generation(
    commits: list[list[tuple[int, int, int | None]]],
) -> None:
    """Each commit is a list of (key, position, value or None for a tombstone)."""
    schema = Schema.of(k="int", v="int")
    layout = build_layout(schema, ("k",), ("k",), 2, StoredPositions())
    store = InMemoryStore()
    generations = []
    winners: dict[int, tuple[int, int, int | None]] = {}
    for number, changes in enumerate([[], *commits], start=1):
        rows = {key: (key, value, position) for key, position, value in changes}
        table = pa.table(
            {
                "k": pa.array([row[0] for row in rows.values()], pa.int32()),
                "v": pa.array([row[1] for row in rows.values()], pa.int32()),
                POSITION: pa.array([row[2] for row in rows.values()], pa.int64()),
                TOMBSTONE: pa.array([row[1] is None for row in rows.values()], pa.bool_()),
            }
        )
        folder = f"datasets/d/data/a{number}"
        files = write_arrow_buckets(table.sort_by("k"), store, folder, layout, WriteOptions("d"))
        generations.append(Generation(number, folder, tuple(files)))
        for key, value, position in rows.values():
            winners[key] = max(
                winners.get(key, (-1, 0, None)), (position, number, value), key=lambda row: row[:2]
            )
    sealed = SealedVersion(
        id="v000001-a",
        number=1,
        name=None,
        sealed_at=dt.datetime.now(UTC),
        columns=schema,
        key=("k",),
        partition_by=("k",),
        partitions=2,
        positioned=True,
        generations=tuple(generations),
        offsets={},
    )
    entries: list[Row] = [
        (key, value) for key, (_, _, value) in winners.items() if value is not None
    ]
    expected = view_of(store, entries, schema=schema, key=["k"], dataset="d", number=2)
    diff = diff_versions(expected, VersionReader(store, "d", sealed))
    assert (diff.added, diff.removed, diff.changed, diff.unchanged) == (0, 0, 0, len(entries))
