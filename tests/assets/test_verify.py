"""Checking the stored objects of a version against its manifest."""

from __future__ import annotations

import datetime as dt
import errno
import json
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.assets.reading.stored_file import list_stored_files
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.resources.bucketing.files import BucketFile
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ManifestMismatchError,
    StoreUnavailableError,
)
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.sealing import table_of, view_of

SCHEMA = Schema.of(origin="string", at="timestamp", v="bigint")
NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
ROWS = [(f"A{number % 7}", NOON + dt.timedelta(hours=number), number) for number in range(60)]


def weather(rows: list[Any] = ROWS) -> VersionReader:
    return view_of(InMemoryStore(), rows, schema=SCHEMA, key=["origin", "at"], partitions=4)


def first_file(view: VersionReader) -> tuple[str, BucketFile]:
    generation = view.sealed.generations[0]
    return f"{generation.folder}/{generation.files[0].name}", generation.files[0]


def problems(view: VersionReader, *, deep: bool = False) -> list[str]:
    report = verify_version(view, deep=deep)
    assert report.ok is (not report.damaged)
    return [str(damage) for damage in report.damaged]


def test_a_whole_version_is_as_listed_and_the_report_says_how_much_was_read() -> None:
    view = weather()
    for deep in (False, True):
        report = verify_version(view, deep=deep)
        assert report.ok
        assert (report.objects, report.rows) == (len(view.sealed.generations[0].files), 60)
        assert report.bytes == sum(
            len(view.store.get(item.key).data) for item in view.store.list("datasets/planes/data/")
        )
        assert report.summary().endswith("all as listed")
        assert json.loads(json.dumps(report.to_json()))["ok"] is True


def test_every_missing_changed_and_stray_object_is_named() -> None:
    view = weather()
    generation = view.sealed.generations[0]
    gone, cut, flipped, *_ = [f"{generation.folder}/{file.name}" for file in generation.files]
    view.store.delete(gone)
    data = view.store.get(cut).data
    view.store.put(cut, data[:-1])
    other = bytearray(view.store.get(flipped).data)
    other[50] ^= 1
    view.store.put(flipped, bytes(other))
    view.store.put(f"{generation.folder}/part-00000-stray.parquet", b"")
    reported = problems(view)
    assert [problem.partition(":")[0] for problem in reported[:3]] == [gone, cut, flipped]
    assert "it is missing" in reported[0]
    assert f"it has {len(data) - 1:,} bytes, the manifest lists {len(data):,}" in reported[1]
    assert "its SHA-256 is" in reported[2]
    assert "part-00000-stray.parquet: the manifest does not list it" in reported[3]
    assert len(reported) == 4
    assert "4 damaged" in verify_version(view).summary()


def replaced(
    view: VersionReader, change: Callable[[pa.Table], pa.Table], **listed: Any
) -> VersionReader:
    """Store other rows in the first file, and list them as if the writer had done so."""
    import hashlib

    key, file = first_file(view)
    table = change(pq.read_table(pa.BufferReader(view.store.get(key).data)))
    path = view.store.staging_dir() / "other.parquet"
    pq.write_table(table, path, row_group_size=4)
    data = path.read_bytes()
    view.store.put(key, data)
    facts = {
        "rows": table.num_rows,
        "size": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    } | listed
    generation = view.sealed.generations[0]
    files = (replace(file, **facts), *generation.files[1:])
    sealed = view.sealed.model_copy(update={"generations": (replace(generation, files=files),)})
    return VersionReader(view.store, view.dataset, sealed)


def swapped(table: pa.Table) -> pa.Table:
    order = list(range(table.num_rows))
    order[4], order[5] = order[5], order[4]
    return table.take(order)


def doubled(table: pa.Table) -> pa.Table:
    return pa.concat_tables([table.slice(0, 4), table.slice(3)])


def foreign(table: pa.Table) -> pa.Table:
    key = next(
        f"B{n}"
        for n in range(99)
        if weather([(f"B{n}", NOON, 1)]).sealed.generations[0].files[0].bucket != 0
    )
    return pa.concat_tables([table, table_of(SCHEMA, [(key, NOON, 1)])])


@pytest.mark.parametrize(
    ("change", "listed", "message"),
    [
        (lambda table: table, {}, None),
        (lambda table: table, {"rows": 3}, "rows, the manifest lists 3"),
        (
            lambda table: table.rename_columns(["origin", "at", "w"]),
            {},
            "its columns are origin string, at",
        ),
        (
            lambda table: table,
            {"min_key": ["A", NOON.isoformat()]},
            "the manifest lists ['A', '2026-01-01T12:00:00+00:00'] to",
        ),
        (swapped, {}, "row group 1: the key ["),
        (doubled, {}, "comes twice"),
        (foreign, {}, "1 keys belong to another bucket, such as ['B"),
    ],
)
def test_deep_checks_look_at_what_the_bytes_say(
    change: Callable[[pa.Table], pa.Table], listed: dict[str, Any], message: str | None
) -> None:
    view = replaced(weather(), change, **listed)
    assert problems(view) == []
    reported = problems(view, deep=True)
    assert len(reported) == (message is not None)
    if message is not None:
        assert first_file(view)[0] in reported[0]
        assert message in reported[0]


def test_bytes_that_are_no_parquet_are_named_when_they_are_looked_into() -> None:
    view = weather()
    key, file = first_file(view)
    junk = b"x" * file.size
    view.store.put(key, junk)
    import hashlib

    generation = view.sealed.generations[0]
    files = (replace(file, sha256=hashlib.sha256(junk).hexdigest()), *generation.files[1:])
    sealed = view.sealed.model_copy(update={"generations": (replace(generation, files=files),)})
    (problem,) = problems(VersionReader(view.store, view.dataset, sealed), deep=True)
    assert "it can't be read" in problem


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("string", ["", "a", "ä", "€", "𝄞", "zz"]),
        ("int", [-(2**31), -1, 0, 7]),
        ("bigint", [-(2**63), 2**63 - 1]),
        ("date", [dt.date(1, 1, 1), dt.date(2026, 1, 1)]),
        ("decimal(20,2)", [Decimal("-1.50"), Decimal("0.00"), Decimal("99.99")]),
        ("binary", [b"", b"\x00", b"\x7f", b"\x80\x00"]),
    ],
)
@pytest.mark.parametrize("partitions", [None, 3])
def test_keys_of_every_type_are_in_order_and_in_their_buckets(
    kind: str, values: list[Any], partitions: int | None
) -> None:
    rows = [(value, number) for number, value in enumerate(values)]
    view = view_of(
        InMemoryStore(), rows, schema=Schema.of(k=kind, v="int"), key=["k"], partitions=partitions
    )
    assert problems(view, deep=True) == []


def test_an_object_of_many_ranges_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagster_adjunct.assets.reading.stored_file._CHUNK", 100)
    view = weather()
    assert problems(view) == []
    key, file = first_file(view)
    data = bytearray(view.store.get(key).data)
    data[-1] ^= 1
    view.store.put(key, bytes(data))
    assert len(problems(view)) == 1
    assert file.size > 300


def raising(error: BaseException) -> Callable[[], None]:
    def read() -> None:
        raise error

    return read


def test_errors_of_the_process_are_not_taken_for_a_damaged_file() -> None:
    view = weather()
    stored = list_stored_files(view.store, "planes", view.sealed)[0]
    for error in (pa.ArrowMemoryError("malloc failed"), pa.ArrowCancelled("cancelled")):
        with pytest.raises(type(error)):
            stored.reading(raising(error))
    with pytest.raises(ConfigurationError):
        stored.reading(raising(OSError(errno.EMFILE, "Too many open files")))
    with pytest.raises(StoreUnavailableError):
        stored.reading(raising(OSError(errno.EIO, "Input/output error")))


@pytest.mark.parametrize(
    "error",
    [
        OSError("Couldn't deserialize thrift"),
        pa.ArrowInvalid("not a Parquet file"),
        pa.ArrowMemoryError("malloc of size 9223372036854775807 failed"),
    ],
)
def test_errors_of_damaged_contents_name_the_file(error: Exception) -> None:
    view = weather()
    stored = list_stored_files(view.store, "planes", view.sealed)[0]
    view.store.put(stored.key, b"x" * stored.file.size)
    with pytest.raises(ManifestMismatchError) as caught:
        stored.reading(raising(error))
    assert caught.value.key == stored.key
