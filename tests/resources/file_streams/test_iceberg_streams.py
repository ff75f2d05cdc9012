"""Iceberg tables as streams: what is admitted of which history, in which order, and what is refused
by name.
"""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams.iceberg import IcebergStreams
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.file_streams.table_lab import (
    IcebergLab,
    compact,
    forget_declarations,
    iceberg_lab,
    plain,
    rewrite_metadata,
)
from tests.servers.s3 import S3Server

pytest_plugins = ["tests.resources.file_streams.table_lab"]

SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.date32()), ("note", pa.string())])


def some(*ids: int, schema: pa.Schema = SCHEMA) -> pa.Table:
    values: dict[str, list[Any]] = {
        "id": list(ids),
        "day": [date(2026, 1, 1 + number % 3) for number in ids],
        "note": [None if number % 2 else f"n{number}" for number in ids],
    }
    return pa.table({name: values[name] for name in schema.names}, schema=schema)


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


def test_each_snapshot_adds_its_records_with_its_time(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    assert stream.rows() == []
    for number in range(3):
        table.append(some(number * 2, number * 2 + 1))
        assert ids(stream.rows()) == list(range(number * 2 + 2))
    records = stream.table()
    times = [snapshot.timestamp_ms for snapshot in table.snapshots()]
    assert records.column("__timestamp").cast(pa.timestamp("ms", "UTC")).cast(
        pa.int64()
    ).to_pylist() == [time for time in times for _ in range(2)]
    origins = [file.origin for file in stream.system.file_log(stream.short).files(stream.state())]
    assert origins == [str(snapshot.snapshot_id) for snapshot in table.snapshots()]
    assert plain(records.select(SCHEMA.names)) == plain(table.scan().to_arrow())


def test_a_first_look_has_all_that_the_table_has_now(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA)
    for number in range(4):
        table.append(some(number))
    table.delete("id = 1")
    assert ids(iceberg.stream().rows()) == [0, 2, 3]


def test_reading_from_the_oldest_snapshot_meets_what_happened_since(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA)
    table.append(some(0))
    table.append(some(1))
    assert ids(iceberg.stream(start="oldest").rows()) == [0, 1]
    table.delete("id = 0")
    table.append(some(2))
    with pytest.raises(errors.AdmittedFileError, match="deletes or overwrites") as caught:
        iceberg.stream(start="oldest").rows()
    assert caught.value.rule == "deleted"
    assert ids(iceberg.stream(start="oldest", on_delete="ignore").rows()) == [0, 1, 2]


def test_partition_values_and_evolving_specs(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA)
    with table.update_spec() as update:
        update.add_identity("day")
    stream = iceberg.stream()
    table.append(some(*range(6)))
    first = stream.rows()
    with table.update_spec() as update:
        update.remove_field("day")
        update.add_identity("note")
        update.add_identity("id")
    table.append(some(*range(6, 12)))
    with table.update_spec() as update:
        update.remove_field("note")
    table.append(some(12))
    rows = stream.rows()
    assert rows[:6] == first
    assert sorted(rows, key=repr) == plain(table.scan().to_arrow())


def test_partition_columns_that_files_lack_come_from_the_metadata(
    iceberg: IcebergLab, tmp_path: Path
) -> None:
    """As in tables that were migrated from Hive."""
    import pyarrow.parquet as pq

    table = iceberg.create(SCHEMA)
    with table.update_spec() as update:
        update.add_identity("day")
        update.add_identity("note")
    table.append(some(0, 1, 2, 4))
    expected = table.scan().to_arrow()
    for task in table.scan().plan_files():
        path = task.file.file_path.removeprefix("file://")
        pq.write_table(pq.read_table(path, partitioning=None).select(["id"]), path)
    stream = iceberg.stream()
    assert sorted(stream.rows(), key=repr) == plain(expected)
    assert stream.table(["note"]).num_rows == 4
    assert stream.table([]).num_rows == 4


def test_compactions_add_no_records(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    table.append(some(0))
    table.append(some(1))
    stream.rows()
    compact(table)
    table = iceberg.load()
    assert table.current_snapshot().summary.operation.value == "replace"
    table.append(some(2))
    assert ids(stream.rows()) == [0, 1, 2]
    compact(table)
    late = iceberg.stream()
    assert sorted(ids(late.rows())) == [0, 1, 2]


@pytest.mark.parametrize("change", ["delete", "overwrite", "rewrite"])
def test_a_snapshot_that_deletes_is_an_error_or_left_out_and_counted(
    iceberg: IcebergLab, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    table.append(some(0, 1))
    stream.rows()
    if change == "delete":
        table.delete("id in (0, 1)")
    elif change == "overwrite":
        table.overwrite(some(5))
    else:
        table.delete("id = 0")
    table.append(some(2))
    with pytest.raises(errors.AdmittedFileError, match="on_delete") as caught:
        stream.rows()
    assert caught.value.rule == "deleted"
    assert stream.state().next == 2
    forget_declarations(monkeypatch)
    ignoring = iceberg.stream(name=stream.short, on_delete="ignore")
    # An overwrite of PyIceberg is two snapshots: one deletes, one appends.
    assert ids(ignoring.rows()) == ([0, 1, 5, 2] if change == "overwrite" else [0, 1, 2])
    assert ignoring.state().set_aside == {"ignored": 1}


def test_rows_that_delete_files_delete_are_refused(iceberg: IcebergLab) -> None:
    from pyiceberg.manifest import ManifestContent

    table = iceberg.create(SCHEMA)
    table.append(some(0, 1))
    add_delete_file(table)
    assert any(
        manifest.content == ManifestContent.DELETES
        for manifest in iceberg.load().current_snapshot().manifests(table.io)
    )
    with pytest.raises(errors.AdmittedFileError, match="delete files") as caught:
        iceberg.stream().rows()
    assert caught.value.rule == "deleted"
    from_start = iceberg.stream(start="oldest", on_delete="ignore")
    assert ids(from_start.rows()) == [0, 1]
    assert from_start.state().set_aside == {"ignored": 1}


def add_delete_file(table: Any) -> None:
    """Delete the first row of the table's first file by a position delete file."""
    import pyarrow.parquet as pq

    from dagster_adjunct.assets.exchange.iceberg_snapshot import SnapshotOfFiles
    from dagster_adjunct.assets.exchange.position_deletes import PositionDeletes

    target = next(iter(table.scan().plan_files())).file.file_path
    path = Path(target.removeprefix("file://")).with_name("deletes.parquet")
    fields = [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": "2147483545"}),
    ]
    pq.write_table(pa.table([[target], [0]], schema=pa.schema(fields)), path)
    with table.transaction() as transaction:
        snapshot = SnapshotOfFiles(transaction, table.io, {})
        deletes = PositionDeletes(str(path), 1, path.stat().st_size, target)
        snapshot.replace_files({target}, [], [deletes])
        snapshot.commit()


def test_expired_history_is_an_error_unless_what_was_read_is_an_ancestor(
    iceberg: IcebergLab,
) -> None:
    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    table.append(some(0))
    table.append(some(1))
    stream.rows()
    table.append(some(2))
    table.maintenance.expire_snapshots().by_id(table.snapshots()[0].snapshot_id).commit()
    assert ids(stream.rows()) == [0, 1, 2]
    table.append(some(3))
    table.append(some(4))
    old = [snapshot.snapshot_id for snapshot in table.snapshots()[:-1]]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    with pytest.raises(errors.AdmittedFileError, match="expired") as caught:
        stream.rows()
    assert caught.value.rule == "expired"
    assert stream.state().next == 3
    assert ids(iceberg.stream().rows()) == [0, 1, 2, 3, 4]


def test_the_parent_of_the_oldest_snapshot_may_have_expired(iceberg: IcebergLab) -> None:
    """As with Spark's expire_snapshots, which keeps the parents' ids; PyIceberg removes them."""
    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    table.append(some(0))
    stream.rows()
    table.append(some(1))
    rewrite_metadata(table, lambda metadata: metadata["snapshots"].pop(0))
    assert ids(stream.rows()) == [0, 1]
    table.append(some(2))
    table.append(some(3))
    rewrite_metadata(iceberg.load(), lambda metadata: metadata["snapshots"].pop(0))
    rewrite_metadata(iceberg.load(), lambda metadata: metadata["snapshots"].pop(0))
    with pytest.raises(errors.AdmittedFileError, match="expired"):
        stream.rows()


def test_data_files_that_expiry_deleted_are_named_and_can_be_set_aside(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA)
    table.append(some(0, 1))
    table.append(some(2))
    stream = iceberg.stream()
    stream.rows()
    gone = next(iter(stream.system.file_log(stream.short).files(stream.state()))).path
    Path(gone.removeprefix("file://")).unlink()
    with pytest.raises(errors.AdmittedFileError, match="is gone") as caught:
        stream.table()
    assert (caught.value.file, caught.value.rule) == (gone, "expired")
    stream.system.set_aside(stream.short, gone, reason="expired")
    assert stream.table().column("__offset").to_pylist() == [2]


def test_files_that_are_gone_are_found_without_reading_them(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA)
    table.append(some(0))
    table.append(some(1))
    stream = iceberg.stream()
    stream.rows()
    first, second = stream.system.file_log(stream.short).files(stream.state())
    Path(second.path.removeprefix("file://")).unlink()
    lost = stream.system.find_lost(stream.short, [first, second])
    assert [file.path for file, _ in lost] == [second.path]


@pytest.mark.parametrize("damage", ["torn", "other"])
def test_a_damaged_file_is_named(iceberg: IcebergLab, damage: str) -> None:
    import pyarrow.parquet as pq

    table = iceberg.create(SCHEMA)
    table.append(some(0, 1))
    stream = iceberg.stream()
    stream.rows()
    path = Path(next(iter(table.scan().plan_files())).file.file_path.removeprefix("file://"))
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(errors.AdmittedFileError) as caught:
        stream.table()
    assert str(path) in str(caught.value.file)


def test_a_rollback_is_an_error_or_goes_on_without_records_twice(
    iceberg: IcebergLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    table.append(some(0))
    first = table.current_snapshot().snapshot_id
    table.append(some(1))
    second = table.current_snapshot().snapshot_id
    assert ids(stream.rows()) == [0, 1]
    roll_to(table, first)
    with pytest.raises(errors.AdmittedFileError, match="rolled back") as caught:
        stream.rows()
    assert caught.value.rule == "rolled-back"
    forget_declarations(monkeypatch)
    ignoring = iceberg.stream(name=stream.short, on_delete="ignore")
    assert ids(ignoring.rows()) == [0, 1]
    roll_to(table, second)
    assert ids(ignoring.rows()) == [0, 1]
    roll_to(table, first)
    iceberg.load().append(some(2))
    assert ids(ignoring.rows()) == [0, 1, 2]
    roll_to(table, second)
    assert ids(ignoring.rows()) == [0, 1, 2]
    iceberg.load().append(some(3))
    assert ids(ignoring.rows()) == [0, 1, 2, 3]


def roll_to(table: Any, snapshot_id: int) -> None:
    table.refresh()
    table.manage_snapshots().set_current_snapshot(snapshot_id).commit()


def test_another_table_under_the_name_is_an_error(iceberg: IcebergLab) -> None:
    iceberg.create(SCHEMA).append(some(0))
    stream = iceberg.stream()
    stream.rows()
    iceberg.catalog.drop_table("raw.events")
    with pytest.raises(errors.TableNotFoundError):
        stream.rows()
    iceberg.create(SCHEMA).append(some(1))
    with pytest.raises(errors.AdmittedFileError, match="another table") as caught:
        stream.rows()
    assert caught.value.rule == "replaced"


@pytest.mark.lengthy
def test_columns_are_what_they_were_when_the_table_renames_and_drops_them(
    iceberg: IcebergLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.types import DoubleType, LongType, StringType

    narrow = pa.schema(
        [("id", pa.int64()), ("n", pa.int32()), ("f", pa.float32()), ("note", pa.string())]
    )
    table = iceberg.create(narrow)
    table.append(pa.table([[0], [1], [0.5], ["a"]], schema=narrow))
    stream = iceberg.stream(schema="id bigint, n bigint, f double, note string", start="oldest")
    assert stream.rows() == [{"id": 0, "n": 1, "f": 0.5, "note": "a"}]
    with table.update_schema() as update:
        update.rename_column("id", "key")
        update.update_column("n", LongType())
        update.update_column("f", DoubleType())
        update.delete_column("note")
        update.add_column("more", StringType())
    table.append(pa.table({"key": [1], "n": [2**40], "f": [1e300], "more": ["x"]}))
    expected = [
        {"id": 0, "n": 1, "f": 0.5, "note": "a"},
        {"id": 1, "n": 2**40, "f": 1e300, "note": None},
    ]
    assert stream.rows() == expected
    forget_declarations(monkeypatch)
    again = iceberg.stream(
        name=stream.short, start="oldest", schema="key bigint, id bigint, more string"
    )
    assert again.rows() == [{"key": 0, "id": 0, "more": None}, {"key": 1, "id": 1, "more": "x"}]


def test_a_name_that_is_used_again_is_another_column(
    iceberg: IcebergLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.types import StringType

    table = iceberg.create(SCHEMA)
    table.append(some(0))
    stream = iceberg.stream(schema="id bigint, note string")
    stream.rows()
    with table.update_schema() as update:
        update.delete_column("note")
    with table.update_schema() as update:
        update.add_column("note", StringType())
    table.append(pa.table({"id": [1], "day": [date(2026, 1, 1)], "note": ["new"]}))
    with pytest.raises(errors.SchemaMismatchError, match="another column"):
        stream.rows()
    for schema in ("id bigint", "id bigint, note string"):
        forget_declarations(monkeypatch)
        stream = iceberg.stream(name=stream.short, schema=schema)
        rows = stream.rows()
    assert rows == [{"id": 0, "note": None}, {"id": 1, "note": "new"}]


def test_nested_columns_evolve_by_ids(iceberg: IcebergLab) -> None:
    from pyiceberg.types import IntegerType, LongType

    nested = pa.schema(
        [
            ("s", pa.struct([("a", pa.int32()), ("b", pa.string())])),
            ("l", pa.list_(pa.struct([("x", pa.int32()), ("y", pa.string())]))),
            ("m", pa.map_(pa.string(), pa.struct([("v", pa.int32())]))),
        ]
    )
    table = iceberg.create(nested)
    first = [
        {"s": {"a": 1, "b": "b"}, "l": [{"x": 1, "y": "y"}], "m": [("k", {"v": 1})]},
        {"s": None, "l": [], "m": []},
    ]
    table.append(pa.Table.from_pylist(first, nested))
    kind = "s struct<a:bigint,b:string>, l array<struct<y:string,x:bigint>>, m map<string,struct<v:int>>"
    stream = iceberg.stream(schema=kind)
    expected = [
        {"s": {"a": 1, "b": "b"}, "l": [{"y": "y", "x": 1}], "m": [("k", {"v": 1})]},
        {"s": None, "l": [], "m": []},
    ]
    assert stream.rows() == expected
    with table.update_schema() as update:
        update.rename_column("s.a", "a2")
        update.update_column("l.element.x", LongType())
        update.rename_column("l.element.x", "x2")
        update.delete_column("m.value.v")
        update.add_column(("m", "value", "w"), IntegerType())
    second = {"s": {"a2": 5, "b": None}, "l": [{"x2": 2**40, "y": None}], "m": [("k", {"w": 7})]}
    table.append(pa.Table.from_pylist([second], table.schema().as_arrow()))
    assert stream.rows() == [
        *expected,
        {"s": {"a": 5, "b": None}, "l": [{"y": None, "x": 2**40}], "m": [("k", {"v": None})]},
    ]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("id bigint, nothing string", "does not exist"),
        ("id int", "is declared int, and is bigint"),
        ("id string", "is declared string, and is bigint"),
        ("id array<bigint>", "and is bigint"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(
    iceberg: IcebergLab, schema: str, message: str
) -> None:
    iceberg.create(SCHEMA).append(some(0))
    with pytest.raises(errors.SchemaMismatchError, match=message):
        iceberg.stream(schema=schema).rows()


def test_columns_of_types_that_streams_lack_may_be_left_out(iceberg: IcebergLab) -> None:
    schema = pa.schema([("id", pa.int64()), ("local", pa.timestamp("us")), ("t", pa.time64("us"))])
    table = iceberg.create(schema)
    table.append(pa.table([[1], [datetime(2026, 1, 1)], [None]], schema=schema))
    with pytest.raises(errors.SchemaMismatchError, match="'local'"):
        iceberg.stream()
    assert iceberg.stream(schema="id bigint").rows() == [{"id": 1}]


def test_files_without_field_ids_are_read_by_the_name_mapping(
    iceberg: IcebergLab, tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    table = iceberg.create(SCHEMA)
    pq.write_table(some(0, 1), tmp_path / "added.parquet")
    table.add_files([str(tmp_path / "added.parquet")])
    with table.update_schema() as update:
        update.rename_column("note", "remark")
    stream = iceberg.stream()
    assert sorted(stream.rows(), key=repr) == plain(iceberg.load().scan().to_arrow())
    assert {row["remark"] for row in stream.rows()} == {"n0", None}


@pytest.mark.lengthy
def test_two_lookers_admit_each_file_once(iceberg: IcebergLab) -> None:
    from concurrent.futures import ThreadPoolExecutor

    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    stream.rows()
    for number in range(5):
        table.append(some(number))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: stream.system.admit(stream.short), range(8)))
    assert ids(stream.rows()) == [0, 1, 2, 3, 4]


@pytest.mark.lengthy
def test_a_looker_that_dies_leaves_nothing_or_all(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    assert stream.rows() == []
    expected: list[int] = []
    deaths = 0
    while True:
        table.append(some(len(expected)))
        expected.append(len(expected))
        faulty = FaultyStore(iceberg.lake.store, [Fault("*", deaths + 1, "crash-after")])
        try:
            IcebergStreams(Lake(faulty, iceberg.lake.id)).admit(stream.short)
        except Crash:
            deaths += 1
        else:
            break
        assert ids(stream.rows()) == expected
    assert deaths >= 3
    assert ids(stream.rows()) == expected


def test_ranges_are_read_at_any_offset(iceberg: IcebergLab) -> None:
    table = iceberg.create(SCHEMA, properties={"write.parquet.row-group-limit": "7"})
    table.append(some(*range(20)))
    table.append(some(*range(20, 33)))
    stream = iceberg.stream()
    everything = stream.table(["id"]).drop_columns(["__timestamp"])
    for start, end in [(0, 33), (3, 8), (6, 7), (7, 21), (19, 20), (20, 33), (5, 5)]:
        found = stream.system.read_arrow({stream.ssp: OffsetRange(str(start), str(end))}, ["id"])
        assert found.drop_columns(["__timestamp"]).equals(everything.slice(start, end - start))


def test_positions_by_time_are_those_of_snapshots(iceberg: IcebergLab) -> None:
    import time

    table = iceberg.create(SCHEMA)
    stream = iceberg.stream()
    for number in range(3):
        table.append(some(number * 2, number * 2 + 1))
        time.sleep(0.002)
    stream.rows()
    for number, snapshot in enumerate(table.snapshots()):
        at = snapshot.timestamp_ms
        assert stream.system.offset_for_timestamp(stream.ssp, at) == str(number * 2)
        assert stream.system.offset_for_timestamp(stream.ssp, at + 1) == str(number * 2 + 2)


@pytest.mark.server
def test_a_table_on_s3(
    versitygw: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        name.replace("-", "_").replace(".", "__"): value
        for name, value in versitygw.warehouse().items()
    }
    lab = iceberg_lab(monkeypatch, tmp_path, **settings)
    table = lab.create(SCHEMA)
    table.append(some(0, 1))
    stream = lab.stream()
    table.append(some(2))
    assert ids(stream.rows()) == [0, 1, 2]
    first = next(iter(stream.system.file_log(stream.short).files(stream.state()))).path
    bucket, _, key = first.removeprefix("s3://").partition("/")
    versitygw.client().delete_object(Bucket=bucket, Key=key)
    with pytest.raises(errors.AdmittedFileError, match="is gone"):
        stream.table()
