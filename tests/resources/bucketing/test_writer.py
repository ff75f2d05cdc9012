"""The writer of one bucket, without Spark."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.resources.bucketing import writer
from dagster_adjunct.resources.bucketing.files import (
    BucketFile,
    BucketLayout,
    Generation,
    bucket_file_name,
    unpack_footer,
)
from dagster_adjunct.resources.bucketing.hashing import assign_buckets
from dagster_adjunct.resources.bucketing.writer import (
    BucketFileWriter,
    WriteOptions,
    write_arrow_buckets,
)
from dagster_adjunct.resources.errors import (
    MalformedDocumentError,
    ManifestMismatchError,
    NullKeyError,
    SchemaMismatchError,
)
from dagster_adjunct.resources.objects.local_store import LocalStore
from dagster_adjunct.resources.objects.store import InMemoryStore, ObjectStore
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.schemas.schema import Schema
from tests.faulty_store import Fault, FaultyStore

SCHEMA = Schema.of(k="string", v="bigint")
FOLDER = "datasets/d/data/attempt-1"
KEYED = BucketLayout(SCHEMA, ("k",), 4, key=("k",))


def table(rows: list[tuple[str | None, int]]) -> pa.Table:
    return pa.table(
        {
            "k": pa.array([k for k, _ in rows], pa.string()),
            "v": pa.array([v for _, v in rows], pa.int64()),
        }
    )


def read(store: ObjectStore, file: BucketFile, folder: str = FOLDER) -> pa.Table:
    return pq.read_table(pa.BufferReader(store.get(f"{folder}/{file.name}").data))


def test_rows_land_in_their_buckets_in_order_with_their_facts() -> None:
    store = InMemoryStore()
    rows = [(f"k{i % 13}", i) for i in range(100)]
    layout = BucketLayout(SCHEMA, ("k",), 4, hidden=(("__row", "bigint"),))
    files = write_arrow_buckets(
        table(rows), store, FOLDER, layout, WriteOptions("d", number_rows=True)
    )
    numbers = assign_buckets([pa.array([k for k, _ in rows])], 4).tolist()
    for file in files:
        mine = [
            (k, v, at)
            for at, (k, v) in enumerate(
                r for r, n in zip(rows, numbers, strict=True) if n == file.bucket
            )
        ]
        written = read(store, file)
        assert [tuple(row.values()) for row in written.to_pylist()] == mine
        assert file.name == bucket_file_name(file.bucket, "attempt-1")
        assert (file.rows, file.size) == (len(mine), len(store.get(f"{FOLDER}/{file.name}").data))
    assert sum(file.rows for file in files) == 100


@pytest.mark.parametrize("seed", range(20))
def test_the_last_row_of_a_key_wins_across_batch_borders(seed: int) -> None:
    chance = random.Random(seed)
    rows = sorted(((f"k{chance.randrange(15):02d}", i) for i in range(60)), key=lambda row: row[0])
    deleted = [chance.random() < 0.3 for _ in rows]
    data = table(rows).append_column("__tombstone", pa.array(deleted))
    winners = {k: (v, gone) for (k, v), gone in zip(rows, deleted, strict=True)}
    alive = {k: v for k, (v, gone) in winners.items() if not gone}

    store = InMemoryStore()
    options = WriteOptions("d", last_per_key=True, drop_tombstones=True)
    writer = BucketFileWriter(store, FOLDER, 0, BucketLayout(SCHEMA, (), 1, key=("k",)), options)
    at = 0
    while at < data.num_rows:
        size = chance.randint(1, 9)
        writer.write(data.slice(at, size))
        at += size
    file = writer.finish()
    if not alive:
        assert file is None
        return
    assert file is not None
    assert {row["k"]: row["v"] for row in read(store, file).to_pylist()} == alive
    assert file.stats == {
        "superseded": len(rows) - len(winners),
        "deleted": len(winners) - len(alive),
    }
    assert (file.min_key, file.max_key) == ([min(alive)], [max(alive)])


def test_a_null_key_is_refused_with_its_column() -> None:
    with pytest.raises(NullKeyError) as caught:
        write_arrow_buckets(
            table([("a", 1), (None, 2)]),
            InMemoryStore(),
            FOLDER,
            KEYED,
            WriteOptions("dataset 'd'"),
        )
    assert caught.value.column == "k"


@pytest.mark.parametrize("claimed", [0, 1])
def test_a_row_of_another_bucket_is_refused(claimed: int) -> None:
    """Both when Spark itself says so, and when only the key's own hash does."""
    wrong = next(k for k in "abcdefgh" if assign_buckets([pa.array([k])], 4)[0] != 0)
    data = table([(wrong, 1)]).append_column("__bucket", pa.array([claimed], pa.int32()))
    store = InMemoryStore()
    writer = BucketFileWriter(store, FOLDER, 0, KEYED, WriteOptions("d"))
    with pytest.raises(ManifestMismatchError) as caught:
        writer.write(data)
    assert caught.value.partition_by == "k"
    writer.discard()
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    "batches", [[[("b", 1), ("a", 2)]], [[("a", 1), ("b", 2)], [("a", 3), ("c", 4)]]]
)
def test_rows_that_are_not_in_the_order_of_the_key_are_refused(
    batches: list[list[tuple[str | None, int]]],
) -> None:
    """Look-ups would not find them, and a join that takes their order for granted would lose
    them.
    """
    store = InMemoryStore()
    layout = BucketLayout(SCHEMA, (), 1, key=("k",))
    writer = BucketFileWriter(store, FOLDER, 0, layout, WriteOptions("d"))
    *before, wrong = map(table, batches)
    for rows in before:
        writer.write(rows)
    with pytest.raises(ManifestMismatchError, match="rows of a file are not ordered by k"):
        writer.write(wrong)
    writer.discard()
    assert list(store.list("")) == []


def test_a_key_of_two_columns_is_in_order_by_the_first_then_the_second() -> None:
    layout = BucketLayout(Schema.of(k="string", v="bigint"), (), 1, key=("k", "v"))
    ascending = table([("a", 1), ("a", 2), ("a", 2), ("b", 1), ("c", -1)])
    assert (
        write_arrow_buckets(ascending, InMemoryStore(), FOLDER, layout, WriteOptions("d"))[0].rows
        == 5
    )
    with pytest.raises(ManifestMismatchError, match="not ordered by k, v"):
        write_arrow_buckets(
            table([("a", 2), ("a", 1)]), InMemoryStore(), FOLDER, layout, WriteOptions("d")
        )


def test_a_retried_task_returns_the_facts_of_the_object_that_is_there() -> None:
    store = InMemoryStore()
    options = WriteOptions("d", number_rows=True)
    layout = BucketLayout(SCHEMA, ("k",), 4, hidden=(("__row", "bigint"),))
    first = write_arrow_buckets(table([("a", 1), ("a", 2)]), store, FOLDER, layout, options)
    again = write_arrow_buckets(table([("a", 1)]), store, FOLDER, layout, options)
    assert again == first
    assert read(store, again[0]).num_rows == 2


def test_no_rows_make_no_file_and_nothing_stays_in_staging(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    writer = BucketFileWriter(store, FOLDER, 0, KEYED, WriteOptions("d"))
    assert writer.finish() is None
    broken = FaultyStore(store, [Fault("upload", 1, "throttle")])
    with pytest.raises(Exception, match="throttle"):
        write_arrow_buckets(table([("a", 1)]), broken, FOLDER, KEYED, WriteOptions("d"))
    assert list(store.staging_dir().iterdir()) == []
    assert list(store.list("")) == []


def test_the_range_of_a_timestamp_column_is_in_the_stats() -> None:
    schema = Schema.of(at="timestamp")
    data = pa.table({"at": pa.array([5, None, 3], pa.timestamp("us", tz="UTC"))})
    layout = BucketLayout(schema, (), 1)
    (file,) = write_arrow_buckets(
        data, InMemoryStore(), FOLDER, layout, WriteOptions("d", range_of="at")
    )
    assert file.stats == {"range": [3, 5], "range_nulls": 1}


def test_a_layout_without_columns_to_hash_has_one_bucket() -> None:
    with pytest.raises(SchemaMismatchError) as caught:
        BucketLayout(SCHEMA, (), 4)
    assert caught.value.argument == "bucket_by"


def test_facts_come_back_from_json_or_are_named() -> None:
    (file,) = write_arrow_buckets(
        table([("a", 1)]), InMemoryStore(), FOLDER, KEYED, WriteOptions("d")
    )
    generation = Generation(3, FOLDER, (file,))
    assert Generation.from_json(generation.to_json()) == generation
    with pytest.raises(MalformedDocumentError) as caught:
        Generation.from_json({"id": 1})
    assert caught.value.document == "a generation of a manifest"
    with pytest.raises(MalformedDocumentError) as caught:
        BucketFile.from_json({"bucket": 0, "colour": "red"})
    assert caught.value.document == "a file entry of a manifest"


def test_keys_are_written_as_json_can_hold_them() -> None:
    import datetime as dt
    from decimal import Decimal

    key = ["a", 5, b"\x00\xff", Decimal("1.50"), dt.date(2026, 1, 2)]
    assert to_json_value(key) == ["a", 5, "AP8=", "1.50", "2026-01-02"]


def test_files_with_a_key_bring_their_footer_and_the_first_key_of_each_row_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "ROWS_PER_GROUP", 10)
    store = InMemoryStore()
    rows = table([(f"k{n:03d}", n) for n in range(35)])
    (file,) = write_arrow_buckets(
        rows, store, FOLDER, BucketLayout(SCHEMA, (), 1, key=("k",)), WriteOptions("d")
    )
    assert file.footer is not None
    tail = unpack_footer(file.footer)
    assert store.get(f"{FOLDER}/{file.name}").data.endswith(tail)
    metadata = pq.read_metadata(pa.BufferReader(tail))
    assert metadata.num_row_groups == 4
    assert json.loads(metadata.metadata[writer.GROUP_KEYS]) == [
        ["k000"],
        ["k010"],
        ["k020"],
        ["k030"],
    ]


def test_footers_stand_in_json_only_where_they_are_kept() -> None:
    layout = BucketLayout(SCHEMA, ("k",), 4)
    (file, *_) = write_arrow_buckets(
        table([("a", 1)]), InMemoryStore(), FOLDER, layout, WriteOptions("d")
    )
    assert file.footer is None, "streams have no key, and no lookups by key"
    assert "footer" not in file.to_json()
    (keyed, *_) = write_arrow_buckets(
        table([("a", 1)]), InMemoryStore(), FOLDER, KEYED, WriteOptions("d")
    )
    generation = Generation(1, FOLDER, (keyed,))
    assert Generation.from_json(json.loads(json.dumps(generation.to_json()))) == generation
    assert generation.footer_size == len(keyed.footer or "") > 0
    bare = generation.without_footers()
    assert (bare.footer_size, bare.files[0].sha256) == (0, keyed.sha256)
    assert "footer" not in bare.to_json()["files"][0]
    assert Generation.from_json(bare.to_json()) == bare


def test_a_repeated_upload_returns_the_footer_of_the_object_that_is_there() -> None:
    store = InMemoryStore()
    layout = BucketLayout(SCHEMA, (), 1, key=("k",))
    first, again = (
        write_arrow_buckets(
            table([("a", 1), ("b", 2)][:count]), store, FOLDER, layout, WriteOptions("d")
        )[0]
        for count in (2, 1)
    )
    assert again == first
