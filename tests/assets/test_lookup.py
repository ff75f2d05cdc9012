"""Entries by key and in ranges of keys, from sealed files and without Spark, against a dict in
memory.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct.assets.reading.key_lookup import FileCache, RowGroup
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.version import (
    POSITION,
    TOMBSTONE,
    SealedVersion,
    StoredPositions,
    build_layout,
)
from dagster_adjunct.resources.bucketing import writer
from dagster_adjunct.resources.bucketing.files import Generation
from dagster_adjunct.resources.bucketing.hashing import plain_converter
from dagster_adjunct.resources.bucketing.writer import WriteOptions, write_arrow_buckets
from dagster_adjunct.resources.errors import (
    MalformedDocumentError,
    ManifestMismatchError,
    NullKeyError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectStore
from dagster_adjunct.resources.schemas.schema import Schema
from tests.faulty_store import FaultyStore

Key = tuple[Any, ...]
FOLDER = "datasets/d/data"


def generation(
    store: ObjectStore,
    number: int,
    schema: Schema,
    key: Sequence[str],
    rows: Mapping[Key, Mapping[str, Any]],
    *,
    partition_by: Sequence[str],
    partitions: int,
    positioned: bool,
    group: int,
) -> Generation:
    """Write rows (by key, with hidden columns where `positioned`) as one generation, `group`
    rows a row group.
    """
    positions = StoredPositions() if positioned else None
    layout = build_layout(schema, tuple(key), tuple(partition_by), partitions, positions)
    table = pa.Table.from_pylist(
        [dict(rows[k]) for k in sorted(rows)], schema=layout.arrow_schema()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "ROWS_PER_GROUP", group)
        files = write_arrow_buckets(table, store, f"{FOLDER}/g{number}", layout, WriteOptions("d"))
    return Generation(number, f"{FOLDER}/g{number}", tuple(files))


def version(
    generations: Sequence[Generation],
    schema: Schema,
    key: Sequence[str],
    *,
    partition_by: Sequence[str],
    partitions: int,
    positioned: bool = False,
) -> SealedVersion:
    return SealedVersion(
        id="v000001-a",
        number=1,
        name=None,
        sealed_at=dt.datetime.now(dt.UTC),
        columns=schema,
        key=tuple(key),
        partition_by=tuple(partition_by),
        partitions=partitions,
        positioned=positioned,
        generations=tuple(generations),
        offsets={},
    )


def view_of(
    rows: Mapping[Key, Mapping[str, Any]],
    schema: Schema,
    key: Sequence[str],
    *,
    store: ObjectStore | None = None,
    partition_by: Sequence[str] | None = None,
    partitions: int = 3,
    group: int = 4,
    cache: FileCache | None = None,
    footers: bool = True,
) -> VersionReader:
    store = store or InMemoryStore()
    spread: dict[str, Any] = {"partition_by": partition_by or key, "partitions": partitions}
    made = generation(store, 1, schema, key, rows, positioned=False, group=group, **spread)
    sealed = version([made if footers else made.without_footers()], schema, key, **spread)
    return VersionReader(store, "d", sealed, cache)


NUMBERS = Schema.of(k="bigint", v="int")


def numbers(count: int) -> dict[Key, dict[str, Any]]:
    return {(n,): {"k": n, "v": n % 7} for n in range(count)}


# -- equal to a dict, for every type of key

KEY_VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(st.characters(codec="utf-8"), max_size=6),
    "binary": st.binary(max_size=6),
    "tinyint": st.integers(-128, 127),
    "int": st.integers(-(2**31), 2**31 - 1),
    "bigint": st.integers(-(2**63), 2**63 - 1),
    "date": st.dates(),
    "timestamp": st.datetimes(timezones=st.just(dt.UTC)),
    "decimal(9,2)": st.integers(-(10**9) + 1, 10**9 - 1).map(lambda n: Decimal(n) / 100),
    "decimal(38,10)": st.integers(-(10**27), 10**27).map(lambda n: Decimal(n).scaleb(-10)),
}


@st.composite
def datasets(draw: st.DrawFn) -> tuple[Schema, tuple[str, ...], dict[Key, dict[str, Any]]]:
    """Return a schema, its key columns, and rows by key: few values, so that leading ones
    repeat.
    """
    kinds = draw(st.lists(st.sampled_from(sorted(KEY_VALUES)), min_size=1, max_size=3))
    names = tuple(f"k{index}" for index in range(len(kinds)))
    pools = [
        draw(st.lists(KEY_VALUES[kind], min_size=1, max_size=5, unique=True)) for kind in kinds
    ]
    keys = draw(st.sets(st.tuples(*[st.sampled_from(pool) for pool in pools]), max_size=30))
    schema = Schema.of(
        {**dict(zip(names, kinds, strict=True)), "t": "string", "n": "double", "at": "timestamp"}
    )
    rows = {}
    for place, key in enumerate(sorted(keys)):
        at = (
            None
            if place % 4 == 0
            else dt.datetime(2013, 1, 1, tzinfo=dt.UTC) + dt.timedelta(hours=place)
        )
        values = {
            "t": None if place % 3 == 0 else f"é{place}",
            "n": None if place % 5 == 0 else place / 4,
            "at": at,
        }
        rows[key] = {**dict(zip(names, key, strict=True)), **values}
    return schema, names, rows


@pytest.mark.lengthy
@settings(max_examples=60)
@given(datasets(), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.data())
def test_every_key_is_found_and_every_range_is_what_a_dict_has(
    dataset: tuple[Schema, tuple[str, ...], dict[Key, dict[str, Any]]],
    partitions: int,
    group: int,
    footers: bool,
    data: st.DataObject,
) -> None:
    schema, key, rows = dataset
    by = key[: data.draw(st.integers(1, len(key)))]
    view = view_of(
        rows, schema, key, partition_by=by, partitions=partitions, group=group, footers=footers
    )
    assert {k: view.get(k) for k in rows} == rows
    assert view.get_all(rows) == rows
    other = data.draw(st.tuples(*[KEY_VALUES[schema.field(name).type] for name in key]))
    assert view.get(other) == rows.get(other)

    displayed = [k if len(key) > 1 else k[0] for k in sorted(rows)]
    assert list(view.items()) == [
        (k, rows[full]) for k, full in zip(displayed, sorted(rows), strict=True)
    ]
    bounds = st.sampled_from(sorted(rows) or [other]).flatmap(
        lambda full: st.integers(1, len(full)).map(lambda n: full[:n])
    )
    start, end = data.draw(st.none() | bounds), data.draw(st.none() | bounds)
    wanted = [k for k in sorted(rows) if (start is None or k >= start) and (end is None or k < end)]
    assert [entry for _, entry in view.items(start=start, end=end)] == [rows[k] for k in wanted]
    prefix = data.draw(bounds)
    assert [entry for _, entry in view.items(prefix)] == [
        rows[k] for k in sorted(rows) if k[: len(prefix)] == prefix
    ]


@pytest.mark.lengthy
@settings(max_examples=60)
@given(
    st.sets(st.text(st.characters(codec="utf-8"), max_size=5), max_size=40),
    st.text("ab\udbff", max_size=3),
    st.data(),
)
def test_a_text_prefix_gives_the_keys_that_begin_so(
    keys: set[str], begin: str, data: st.DataObject
) -> None:
    rows = {(k,): {"k": k, "v": 1} for k in keys}
    view = view_of(rows, Schema.of(k="string", v="int"), ["k"])
    whole = data.draw(st.sampled_from(sorted(keys) or [""]))
    prefix = whole[: data.draw(st.integers(0, len(whole)))]
    assert [key for key, _ in view.items(prefix)] == sorted(
        key for key in keys if key.startswith(prefix)
    )


def test_a_binary_prefix_of_the_greatest_bytes_has_no_end() -> None:
    keys = [b"\xfe", b"\xff", b"\xff\xff", b"\xff\xff\x01"]
    view = view_of({(k,): {"k": k, "v": 1} for k in keys}, Schema.of(k="binary", v="int"), ["k"])
    assert [key for key, _ in view.items(b"\xff\xff")] == keys[2:]
    assert [key for key, _ in view.items(b"\xff")] == keys[1:]
    assert [key for key, _ in view.items((b"\xff",))] == [b"\xff"], "a tuple is of whole values"


def test_texts_order_as_their_bytes_do_beyond_the_basic_plane() -> None:
    keys = ["\ue000", "\uffff", "\U00010000", "\U0010ffff", "z"]
    view = view_of(
        {(k,): {"k": k, "v": 1} for k in keys},
        Schema.of(k="string", v="int"),
        ["k"],
        partitions=1,
        group=1,
    )
    assert [key for key, _ in view.items()] == sorted(keys)
    assert [view.get(key) for key in keys] == [{"k": key, "v": 1} for key in keys]


def test_what_does_not_fit_the_key_is_an_error_at_once() -> None:
    view = view_of(numbers(5), NUMBERS, ["k"])
    with pytest.raises(SchemaMismatchError) as caught:
        view.items(7)
    assert (caught.value.column, caught.value.argument) == ("k", "prefix")
    with pytest.raises(SchemaMismatchError) as caught:
        view.items((7,), start=1)
    assert caught.value.argument == "prefix"
    with pytest.raises(SchemaMismatchError) as caught:
        view.items(start=(1, 2))
    assert caught.value.argument == "key"
    with pytest.raises(SchemaMismatchError) as caught:
        view.items(end="x")
    assert caught.value.column == "k"
    with pytest.raises(NullKeyError):
        view.get(None)
    texts = view_of({("a",): {"k": "a", "v": 1}}, Schema.of(k="string", v="int"), ["k"])
    with pytest.raises(SchemaMismatchError) as caught:
        texts.get("\ud800")
    assert caught.value.column == "k"
    instants = view_of({}, Schema.of(k="timestamp", v="int"), ["k"])
    with pytest.raises(SchemaMismatchError) as caught:
        instants.get(dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-12))))
    assert caught.value.column == "k"
    assert list(view.items(())) == list(view.items())


# -- generations


@pytest.mark.lengthy
@settings(max_examples=40)
@given(
    st.lists(
        st.dictionaries(st.integers(0, 12), st.booleans(), max_size=8), min_size=1, max_size=4
    ),
    st.randoms(),
)
def test_generations_merge_by_position_and_drop_what_was_deleted(
    changes: list[dict[int, bool]], chance: Any
) -> None:
    store = InMemoryStore()
    spread: dict[str, Any] = {"partition_by": ["k"], "partitions": 2}
    expected: dict[int, tuple[tuple[int, int], dict[str, Any] | None]] = {}
    generations = []
    for number, change in enumerate(changes, 1):
        rows = {}
        for key, deleted in change.items():
            position = chance.randrange(100)
            entry = {"k": key, "v": chance.randrange(1000)}
            rows[(key,)] = {**entry, POSITION: position, TOMBSTONE: deleted}
            if key not in expected or (position, number) > expected[key][0]:
                expected[key] = ((position, number), None if deleted else entry)
        generations.append(
            generation(store, number, NUMBERS, ["k"], rows, positioned=True, group=2, **spread)
        )
    view = VersionReader(
        store, "d", version(generations, NUMBERS, ["k"], positioned=True, **spread)
    )
    alive = {key: entry for key, (_, entry) in expected.items() if entry is not None}
    assert {key: view.get(key) for key in range(13)} == {key: alive.get(key) for key in range(13)}
    assert dict(view.items()) == alive
    assert [key for key, _ in view.items(start=4, end=9)] == sorted(
        key for key in alive if 4 <= key < 9
    )


# -- what is fetched


def fetched(store: FaultyStore) -> list[str]:
    sent = [request for request, _ in store.requests]
    store.requests.clear()
    return sent


def test_a_row_group_is_one_ranged_request_and_is_kept() -> None:
    store = FaultyStore(InMemoryStore())
    view = view_of(numbers(1000), NUMBERS, ["k"], store=store, partitions=1, group=100)
    fetched(store)
    assert view.get(555) == {"k": 555, "v": 555 % 7}
    assert fetched(store) == ["get_range"], "the footer is in the manifest"
    assert view.get(501) == {"k": 501, "v": 501 % 7}
    assert view.get(599) == {"k": 599, "v": 599 % 7}
    assert view.get(1000) is None
    assert view.get(-1) is None
    assert fetched(store) == [], "the same group, and keys outside the file's range"
    assert len(view.get_all([1, 2, 950, 3, 951])) == 5
    assert fetched(store) == ["get_range"] * 2


def test_without_a_footer_in_the_manifest_it_is_fetched_once() -> None:
    store = FaultyStore(InMemoryStore())
    view = view_of(
        numbers(1000), NUMBERS, ["k"], store=store, partitions=1, group=100, footers=False
    )
    fetched(store)
    assert view.get(555) is not None
    assert fetched(store) == ["get_range", "get_range"]
    assert view.get(5) is not None
    assert fetched(store) == ["get_range"]


def test_a_footer_longer_than_the_first_try_is_fetched_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dagster_adjunct.assets.reading.key_lookup._TAIL_BYTES", 100)
    view = view_of(numbers(100), NUMBERS, ["k"], partitions=1, footers=False)
    assert view.get(50) == {"k": 50, "v": 1}


def test_ranges_read_only_the_row_groups_that_they_touch_when_they_get_there() -> None:
    store = FaultyStore(InMemoryStore())
    view = view_of(numbers(1000), NUMBERS, ["k"], store=store, partitions=1, group=100)
    fetched(store)
    assert [key for key, _ in view.items(start=250, end=350)] == [*range(250, 350)]
    assert len(fetched(store)) == 2
    assert [key for key, _ in view.items(start=500, end=600)] == [*range(500, 600)]
    assert len(fetched(store)) == 1, "the bounds of groups are known exactly"
    begun = view.items(start=600)
    assert next(begun)[0] == 600
    assert len(fetched(store)) == 1
    assert list(view.items(start=5000)) == []
    assert list(view.items(start=300, end=300)) == []
    assert fetched(store) == []


def test_a_key_of_several_columns_is_looked_for_in_one_row_group() -> None:
    schema = Schema.of(origin="string", hour="int", temp="int")
    rows = {
        (o, h): {"origin": o, "hour": h, "temp": h}
        for o in ("EWR", "JFK", "LGA")
        for h in range(50)
    }
    store = FaultyStore(InMemoryStore())
    view = view_of(
        rows,
        schema,
        ["origin", "hour"],
        store=store,
        partition_by=["origin"],
        partitions=1,
        group=20,
    )
    for key, row in rows.items():
        fresh = VersionReader(store, "d", view.sealed)
        fetched(store)
        assert fresh.get(key) == row
        assert len(fetched(store)) == 1, key
    assert [key for key, _ in view.items(("JFK",))] == [("JFK", h) for h in range(50)]
    assert [key for key, _ in view.items("J")] == [("JFK", h) for h in range(50)]


def test_a_file_that_does_not_list_its_row_groups_is_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("dagster_adjunct.assets.reading.key_lookup.GROUP_KEYS", b"unknown")
    view = view_of(numbers(100), NUMBERS, ["k"])
    with pytest.raises(ManifestMismatchError) as failure:
        view.get(7)
    assert failure.value.key is not None


def test_what_is_kept_stays_below_the_cache_s_bytes() -> None:
    cache = FileCache(max_bytes=20_000)
    store = FaultyStore(InMemoryStore())
    view = view_of(
        numbers(10_000), NUMBERS, ["k"], store=store, partitions=2, group=500, cache=cache
    )
    for key in range(0, 10_000, 37):
        assert view.get(key) == {"k": key, "v": key % 7}
        assert cache.bytes <= 20_000
    fetched(store)
    view.get(9999)
    view.get(9999)
    assert len(fetched(store)) <= 1, "the newest are kept"


def test_views_share_a_cache() -> None:
    cache, store = FileCache(), FaultyStore(InMemoryStore())
    view = view_of(numbers(100), NUMBERS, ["k"], store=store, cache=cache)
    view.get(7)
    fetched(store)
    assert VersionReader(store, "d", view.sealed, cache).get(7) is not None
    assert fetched(store) == []


# -- damage


def file_of(view: VersionReader) -> str:
    """Return the key of the view's only file."""
    ((folder, (file,)),) = [(made.folder, made.files) for made in view.sealed.generations]
    return f"{folder}/{file.name}"


def damage(view: VersionReader, change: Any) -> None:
    assert isinstance(view.store, InMemoryStore)
    for made in view.sealed.generations:
        for file in made.files:
            key = f"{made.folder}/{file.name}"
            changed = change(view.store.get(key).data)
            view.store.delete(key)
            if changed is not None:
                view.store.put(key, changed)


@pytest.mark.lengthy
def test_a_flipped_bit_is_an_error_or_harmless_and_never_another_value() -> None:
    entry = view_of(numbers(50), NUMBERS, ["k"], partitions=1, group=100).get(7)
    problems = []
    # pages of all columns, with their headers, whose statistics nobody needs
    for at in range(4, 240):
        view = view_of(numbers(50), NUMBERS, ["k"], partitions=1, group=100)
        damage(view, lambda data, at=at: data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        try:
            assert view.get(7) == entry, at
        except ManifestMismatchError as error:
            problems.append(error.problem)
    assert len(problems) > 150
    assert all(
        "dataset 'd', version v000001-a: " in problem and "and it can't be read" in problem
        for problem in problems
    )


@pytest.mark.parametrize(
    ("change", "reported"),
    [(lambda data: None, "is missing"), (lambda data: data[:60], "ends before its row group 0")],
)
def test_a_missing_or_short_file_is_named_by_get_and_by_items(change: Any, reported: str) -> None:
    view = view_of(numbers(50), NUMBERS, ["k"], partitions=1, group=100)
    damage(view, change)
    with pytest.raises(ManifestMismatchError, match=reported) as caught:
        view.get(7)
    assert caught.value.key == file_of(view)
    with pytest.raises(ManifestMismatchError, match=reported) as caught:
        list(view.items())
    assert caught.value.key == file_of(view)


@pytest.mark.parametrize(
    "change", [lambda data: data[:-20] + b"x" * 20, lambda data: b"", lambda data: b"PAR1" * 9]
)
def test_a_damaged_footer_is_named_where_it_has_to_be_read(change: Any) -> None:
    view = view_of(numbers(50), NUMBERS, ["k"], partitions=1, footers=False)
    damage(view, change)
    with pytest.raises(ManifestMismatchError) as caught:
        view.get(7)
    assert caught.value.key == file_of(view)


def test_a_file_of_other_rows_or_columns_is_refused() -> None:
    view = view_of(numbers(50), NUMBERS, ["k"], partitions=1, footers=False)
    fewer = view_of(numbers(40), NUMBERS, ["k"], partitions=1)
    data = fewer.store.get(f"{FOLDER}/g1/{fewer.sealed.generations[0].files[0].name}").data
    damage(view, lambda _: data)
    with pytest.raises(ManifestMismatchError, match="it has 40 rows"):
        view.get(7)
    other = fewer.sealed.model_copy(update={"columns": Schema.of(k="bigint", v="double")})
    with pytest.raises(ManifestMismatchError, match="its columns are k int64, v int32"):
        VersionReader(fewer.store, "d", other).get(7)


def test_a_malformed_footer_in_the_manifest_is_named() -> None:
    view = view_of(numbers(50), NUMBERS, ["k"], partitions=1)
    made = view.sealed.generations[0]
    broken = replace(made, files=tuple(replace(file, footer="AAAA") for file in made.files))
    sealed = view.sealed.model_copy(update={"generations": (broken,)})
    with pytest.raises(MalformedDocumentError) as caught:
        VersionReader(view.store, "d", sealed).get(7)
    assert caught.value.document == "a footer of a manifest"


@pytest.mark.parametrize("kind", sorted(KEY_VALUES))
def test_rows_in_several_arrays_or_in_a_part_of_one_are_searched_alike(kind: str) -> None:
    @settings(max_examples=20)
    @given(st.sets(KEY_VALUES[kind], min_size=2, max_size=12).map(sorted))
    def check(keys: list[Any]) -> None:
        layout = build_layout(Schema.of(k=kind, v="int"), ("k",), (), None, None)
        table = pa.table(
            {"k": keys, "v": [None, *range(1, len(keys))]}, schema=layout.arrow_schema()
        )
        plain = plain_converter(kind)
        halves = pa.concat_tables([table.slice(0, len(keys) // 2), table.slice(len(keys) // 2)])
        for rows in (RowGroup(table, layout), RowGroup(halves, layout)):
            assert [rows.find((plain(key),)) for key in keys] == [*range(len(keys))]
            assert [rows.entry(["k", "v"], row) for row in range(len(keys))] == table.to_pylist()
        rest = RowGroup(table.slice(1), layout)
        assert [rest.find((plain(key),)) for key in keys] == [None, *range(len(keys) - 1)]
        assert [rest.entry(["k", "v"], row) for row in range(rest.rows)] == table.to_pylist()[1:]

    check()


@pytest.mark.parametrize("group", [1, 3, 200])
@pytest.mark.parametrize(
    ("schema", "make"),
    [
        (Schema.of(k="int", n="int"), lambda n: (n,)),
        (Schema.of(k="string", n="int"), lambda n: (f"key {n:03}",)),
        (Schema.of(k="decimal(9,2)", n="int"), lambda n: (Decimal(n),)),
        (Schema.of(k="int", t="date", n="int"), lambda n: (n // 4, dt.date(2026, 1, 1 + n % 4))),
        (Schema.of(k="string", t="int", n="int"), lambda n: (f"key {n // 4:03}", n % 4)),
    ],
    ids=["numbers", "texts", "decimals", "numbers and dates", "texts and numbers"],
)
def test_many_keys_and_beginnings_of_keys_are_found_at_once(
    schema: Schema, make: Callable[[int], Key], group: int
) -> None:
    key = schema.names[:-1]
    rows = {make(n): {**dict(zip(key, make(n), strict=True)), "n": n} for n in range(3, 90, 3)}
    store = InMemoryStore()
    spread: dict[str, Any] = {"partition_by": (), "partitions": 1}
    made = generation(store, 1, schema, key, rows, positioned=False, group=group, **spread)
    view = VersionReader(store, "d", version([made], schema, key, **spread))
    (files,) = view._generations
    plain = [plain_converter(schema.field(name).type) for name in key]
    draw = random.Random(group)
    for parts in range(1, len(key) + 1):
        drawn = {make(n)[:parts] for n in draw.sample(range(100), 40)}
        asked = sorted(tuple(map(lambda to, value: to(value), plain, each)) for each in drawn)
        found = []
        for table, places in files.rows_of(0, asked):
            found += table.table.column("n").take(pa.array(places)).to_pylist()
        assert found == [row["n"] for k, row in sorted(rows.items()) if k[:parts] in drawn]
    assert [*files.rows_of(0, [])] == []
