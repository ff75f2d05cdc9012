"""Delta tables as streams: what is admitted of which history, in which order, and what is refused
by name.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams.delta import DeltaStreams, delta_stream
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.file_streams.table_lab import DeltaLab, commits, forget_declarations, plain
from tests.servers.s3 import S3Server

pytest_plugins = ["tests.resources.file_streams.table_lab"]

SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.date32()), ("note", pa.string())])


def some(*ids: int) -> pa.Table:
    rows = [
        {"id": n, "day": date(2026, 1, 1 + n % 3), "note": None if n % 2 else f"n{n}"} for n in ids
    ]
    return pa.Table.from_pylist(rows, SCHEMA)


def ids(rows: list[dict[str, Any]]) -> list[int]:
    return [row["id"] for row in rows]


def folder(delta: DeltaLab) -> Path:
    return Path(delta.place())


def test_each_version_adds_its_records_with_its_time(delta: DeltaLab) -> None:
    delta.write(some(0))
    stream = delta.stream(start="oldest")
    for number in range(1, 3):
        assert ids(stream.rows()) == list(range(number))
        delta.write(some(number))
    records = stream.table()
    history = sorted(delta.load().history(), key=lambda one: one["version"])
    times = records.column("__timestamp").cast(pa.int64()).to_pylist()
    assert times == [one["timestamp"] * 1000 for one in history]
    files = stream.system.file_log(stream.short).files(stream.state())
    assert [file.origin for file in files] == ["0", "1", "2"]
    assert plain(records.select(SCHEMA.names)) == plain(delta.load().to_pyarrow_table())


def test_a_first_look_has_all_that_the_table_has_now(delta: DeltaLab) -> None:
    for number in range(4):
        delta.write(some(number))
    delta.load().delete("id = 1")
    stream = delta.stream()
    assert ids(stream.rows()) == [0, 2, 3]
    delta.write(some(4))
    assert ids(stream.rows()) == [0, 2, 3, 4]
    with pytest.raises(errors.AdmittedFileError, match="deletes or overwrites"):
        delta.stream(start="oldest").rows()


VALUES = [
    {
        "text": "a b/ü=%20",
        "n": 7,
        "day": date(2026, 1, 2),
        "at": datetime(2026, 1, 2, 3, 4, 5, 678901, UTC),
        "yes": True,
        "price": Decimal("1.50"),
    },
    {"text": "'q'", "n": -1, "day": None, "at": None, "yes": False, "price": None},
    {"text": None, "n": None, "day": date(1, 1, 1), "at": None, "yes": None, "price": None},
]
KINDS = {
    "text": pa.string(),
    "n": pa.int32(),
    "day": pa.date32(),
    "at": pa.timestamp("us", "UTC"),
    "yes": pa.bool_(),
    "price": pa.decimal128(9, 2),
}


@pytest.mark.parametrize("mapping", ["none", "name", "id"])
def test_partition_values_are_those_that_were_written(delta: DeltaLab, mapping: str) -> None:
    rows = [{"id": number, **values} for number, values in enumerate(VALUES)]
    table = pa.Table.from_pylist(rows, pa.schema({"id": pa.int64(), **KINDS}))
    more = {"partition_by": list(KINDS), "configuration": {"delta.columnMapping.mode": mapping}}
    delta.write(table, **more)
    early = delta.stream(start="oldest")
    assert plain(early.table(table.column_names).select(table.column_names)) == plain(table)
    delta.write(table)
    for stream in (early, delta.stream(), delta.stream(start="oldest")):
        assert sorted(stream.rows(), key=repr) == plain(pa.concat_tables([table, table]))
        assert stream.table(["day"]).num_rows == 6
        assert stream.table([]).num_rows == 6


def test_compactions_add_no_records(delta: DeltaLab) -> None:
    delta.write(some(0))
    stream = delta.stream()
    stream.rows()
    delta.write(some(1))
    delta.load().optimize.compact()
    delta.write(some(2))
    delta.load().optimize.z_order(["id"])
    assert ids(stream.rows()) == [0, 1, 2]
    assert sorted(ids(delta.stream().rows())) == [0, 1, 2]


@pytest.mark.parametrize("change", ["delete", "overwrite", "update", "restore"])
def test_a_version_that_deletes_is_an_error_or_left_out_and_counted(
    delta: DeltaLab, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta.write(some(0))
    delta.write(some(1))
    if change == "restore":
        delta.load().delete()
    stream = delta.stream()
    before = ids(stream.rows())
    if change == "delete":
        delta.load().delete("id = 1")
    elif change == "overwrite":
        delta.write(some(5), mode="overwrite")
    elif change == "update":
        delta.load().update(updates={"note": "'x'"}, predicate="id = 0")
    else:
        delta.load().restore(1)
    delta.write(some(2))
    with pytest.raises(errors.AdmittedFileError, match="on_delete") as caught:
        stream.rows()
    assert caught.value.rule == "deleted"
    assert (
        ids(stream.system.read_arrow({stream.ssp: OffsetRange("0", str(len(before)))}).to_pylist())
        == before
    )
    forget_declarations(monkeypatch)
    ignoring = delta.stream(name=stream.short, on_delete="ignore")
    assert ids(ignoring.rows()) == [*before, 2]
    assert ignoring.state().set_aside == {"ignored": 1}


def test_deletion_vectors_are_refused(delta: DeltaLab) -> None:
    delta.write(some(0, 1), configuration={"delta.enableDeletionVectors": "true"})
    stream = delta.stream(start="oldest", on_delete="ignore")
    assert ids(stream.rows()) == [0, 1]
    add_deletion_vector(folder(delta))
    assert ids(stream.rows()) == [0, 1]
    assert stream.state().set_aside == {"ignored": 1}
    with pytest.raises(errors.AdmittedFileError, match="deletion vector") as caught:
        delta.stream().rows()
    assert caught.value.rule == "deleted"


def add_deletion_vector(place: Path) -> None:
    """Commit what Spark's DELETE does: the file of version 0 again, with a deletion vector that
    deletes its first row.
    """
    first = [json.loads(line) for line in next(commits(place)).read_text().splitlines()]
    add = next(action["add"] for action in first if "add" in action)
    # the inline form of a vector that has the row 0: a RoaringBitmapArray, in Z85
    vector = {
        "storageType": "i",
        "pathOrInlineDv": inline_vector(),
        "sizeInBytes": 34,
        "cardinality": 1,
    }
    removed = {
        "path": add["path"],
        "dataChange": True,
        "deletionTimestamp": add["modificationTime"],
        "size": add["size"],
        "partitionValues": add["partitionValues"],
    }
    actions = [
        {"commitInfo": {"timestamp": add["modificationTime"], "operation": "DELETE"}},
        {"remove": removed},
        {"add": {**add, "deletionVector": vector}},
    ]
    number = len(list(commits(place)))
    text = "\n".join(map(json.dumps, actions))
    (place / "_delta_log" / f"{number:020}.json").write_text(text)


def inline_vector() -> str:
    import struct

    bitmap = struct.pack("<IIHHIH", 12346, 1, 0, 0, 16, 0)  # one container, with the value 0
    data = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    return z85(data)


_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def z85(data: bytes) -> str:
    data += b"\0" * (-len(data) % 4)
    text = ""
    for at in range(0, len(data), 4):
        number = int.from_bytes(data[at : at + 4], "big")
        text += "".join(_Z85[number // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return text


def test_a_log_that_was_cleaned_up_before_it_was_read_is_an_error(delta: DeltaLab) -> None:
    delta.write(some(0))
    stream = delta.stream()
    stream.rows()
    for number in range(1, 4):
        delta.write(some(number))
    delta.load().create_checkpoint()
    for commit in [*commits(folder(delta))][:3]:
        commit.unlink()
    with pytest.raises(errors.AdmittedFileError, match="is gone") as caught:
        stream.rows()
    assert caught.value.rule == "expired"
    delta.write(some(4))
    assert ids(delta.stream().rows()) == [0, 1, 2, 3, 4]
    assert ids(delta.stream(start="oldest").rows()) == [0, 1, 2, 3, 4]


def test_a_damaged_file_is_named_and_can_be_set_aside(delta: DeltaLab) -> None:
    delta.write(some(0, 1))
    stream = delta.stream()
    stream.rows()
    (file,) = stream.system.file_log(stream.short).files(stream.state())
    path = Path(delta.place()) / file.path
    data = bytearray(path.read_bytes())
    data[4:40] = b"\xff" * 36  # the header of its first page
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(errors.AdjunctError) as caught:
            stream.table()
        assert f"set-aside {stream.name} {file.path} --reason" in caught.value.next_step
    stream.system.set_aside(stream.short, file.path, reason="damaged")
    delta.write(some(3))
    assert stream.table().column("__offset").to_pylist() == [2]


def test_vacuumed_files_are_named_and_can_be_set_aside(delta: DeltaLab) -> None:
    delta.write(some(0, 1))
    stream = delta.stream()
    stream.rows()
    delta.write(some(2))
    stream.rows()
    delta.load().optimize.compact()
    delta.load().vacuum(0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(errors.AdmittedFileError, match="is gone") as caught:
        stream.table()
    assert caught.value.rule == "expired"
    first = next(iter(stream.system.file_log(stream.short).files(stream.state())))
    for file in [*stream.system.file_log(stream.short).files(stream.state())]:
        stream.system.set_aside(stream.short, file.path, reason="vacuumed")
    assert first.rows == 2
    assert stream.table().num_rows == 0
    delta.write(some(3))
    assert stream.table().column("__offset").to_pylist() == [3]


@pytest.mark.parametrize("how", ["recreated", "set back"])
def test_another_table_under_the_name_is_an_error(delta: DeltaLab, how: str) -> None:
    delta.write(some(0))
    delta.write(some(1))
    stream = delta.stream()
    stream.rows()
    if how == "recreated":
        shutil.rmtree(folder(delta))
        with pytest.raises(errors.TableNotFoundError):
            stream.rows()
        for number in range(3):
            delta.write(some(number))
    else:
        [*commits(folder(delta))][-1].unlink()
    with pytest.raises(errors.AdmittedFileError) as caught:
        stream.rows()
    assert caught.value.rule == {"recreated": "replaced", "set back": "rolled-back"}[how]


def test_new_columns_are_null_in_older_files_and_widened_ones_as_declared(
    delta: DeltaLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = pa.schema([("id", pa.int64()), ("n", pa.int16())])
    delta.write(pa.table([[0], [1]], schema=narrow))
    stream = delta.stream(schema="id bigint, n bigint")
    assert stream.rows() == [{"id": 0, "n": 1}]
    more = pa.table({"id": [1], "n": pa.array([2], pa.int16()), "more": ["x"]})
    delta.write(more, schema_mode="merge")
    assert stream.rows() == [{"id": 0, "n": 1}, {"id": 1, "n": 2}]
    forget_declarations(monkeypatch)
    again = delta.stream(name=stream.short)
    assert again.rows() == [{"id": 0, "n": 1, "more": None}, {"id": 1, "n": 2, "more": "x"}]


def test_column_mapping_keeps_columns_that_are_renamed_and_dropped(
    delta: DeltaLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    nested = pa.schema(
        [
            ("id", pa.int64()),
            ("s", pa.struct([("a", pa.int32()), ("b", pa.string())])),
            ("l", pa.list_(pa.struct([("x", pa.int32())]))),
        ]
    )
    rows = [
        {"id": 0, "s": {"a": 1, "b": "b"}, "l": [{"x": 1}, None]},
        {"id": 1, "s": None, "l": None},
        {"id": 2, "s": {"a": None, "b": None}, "l": []},
    ]
    data = pa.Table.from_pylist(rows, nested)
    delta.write(data, configuration={"delta.columnMapping.mode": "name"})
    stream = delta.stream()
    assert sorted(stream.rows(), key=repr) == sorted(rows, key=repr)
    change_schema(folder(delta), rename_and_drop)
    assert sorted(stream.rows(), key=repr) == sorted(rows, key=repr)
    forget_declarations(monkeypatch)
    again = delta.stream(
        name=stream.short, schema="key bigint, s struct<b:string,z:int>, id bigint"
    )
    assert again.rows() == [
        {
            "key": row["id"],
            "s": row["s"] and {"b": row["s"]["b"], "z": row["s"]["a"]},
            "id": row["id"],
        }
        for row in rows
    ]


def rename_and_drop(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rename id to key and s.a to s.z, and drop l."""
    fields[0]["name"] = "key"
    fields[1]["type"]["fields"][0]["name"] = "z"
    return fields[:2]


def change_schema(place: Path, change: Any) -> None:
    """Commit a change of the columns' metadata, as Spark's ALTER TABLE does."""
    logged = [line for commit in commits(place) for line in commit.read_text().splitlines()]
    metadata = [json.loads(line)["metaData"] for line in logged if "metaData" in line][-1]
    schema = json.loads(metadata["schemaString"])
    schema["fields"] = change(schema["fields"])
    metadata["schemaString"] = json.dumps(schema)
    number = len(list(commits(place)))
    text = json.dumps({"metaData": metadata})
    (place / "_delta_log" / f"{number:020}.json").write_text(text)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("id bigint, nothing string", "does not exist"),
        ("id int", "is declared int, and is bigint"),
        ("id struct<a:int>", "and is bigint"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused(delta: DeltaLab, schema: str, message: str) -> None:
    delta.write(some(0))
    with pytest.raises(errors.SchemaMismatchError, match=message):
        delta.stream(schema=schema).rows()


def test_features_that_are_not_read_are_an_error(delta: DeltaLab) -> None:
    delta.write(some(0))
    stream = delta.stream()
    stream.rows()
    features = {"readerFeatures": ["teleportation"], "writerFeatures": ["teleportation"]}
    protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}}
    (folder(delta) / "_delta_log" / f"{1:020}.json").write_text(json.dumps(protocol))
    with pytest.raises(errors.AdmittedFileError, match="teleportation") as caught:
        stream.rows()
    assert caught.value.rule == "format"


def test_files_without_statistics_are_counted(delta: DeltaLab) -> None:
    delta.write(some(0, 1))
    for commit in commits(folder(delta)):
        actions = [json.loads(line) for line in commit.read_text().splitlines()]
        for action in actions:
            if "add" in action:
                action["add"]["stats"] = None
        commit.write_text("\n".join(map(json.dumps, actions)))
    assert ids(delta.stream().rows()) == [0, 1]
    assert ids(delta.stream(start="oldest").rows()) == [0, 1]


def test_a_looker_that_dies_leaves_nothing_or_all(delta: DeltaLab) -> None:
    delta.write(some(0))
    stream = delta.stream()
    expected = ids(stream.rows())
    deaths = 0
    while True:
        delta.write(some(len(expected)))
        expected.append(len(expected))
        faulty = FaultyStore(delta.lake.store, [Fault("*", deaths + 1, "crash-after")])
        try:
            DeltaStreams(Lake(faulty, delta.lake.id)).admit(stream.short)
        except Crash:
            deaths += 1
        else:
            break
        assert ids(stream.rows()) == expected
    assert deaths >= 3
    assert ids(stream.rows()) == expected


def test_two_lookers_admit_each_file_once(delta: DeltaLab) -> None:
    from concurrent.futures import ThreadPoolExecutor

    delta.write(some(0))
    stream = delta.stream()
    stream.rows()
    for number in range(1, 5):
        delta.write(some(number))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: stream.system.admit(stream.short), range(8)))
    assert ids(stream.rows()) == [0, 1, 2, 3, 4]


@pytest.mark.server
def test_a_table_on_s3(
    versitygw: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versitygw.set_in(monkeypatch)
    options = {**versitygw.env, "AWS_ENDPOINT_URL": versitygw.endpoint, "AWS_ALLOW_HTTP": "true"}
    lab = DeltaLab(open_lake(f"{tmp_path}/lake"), f"s3://{versitygw.bucket()}/tables", options)
    lab.write(some(0, 1))
    stream = lab.stream(start="oldest")
    lab.write(some(2))
    assert sorted(ids(stream.rows())) == [0, 1, 2]
    lab.load().optimize.compact()
    lab.load().vacuum(0, enforce_retention_duration=False, dry_run=False)
    lab.write(some(4))
    with pytest.raises(errors.AdmittedFileError, match="is gone"):
        stream.table()
    assert sorted(ids(lab.stream().rows())) == [0, 1, 2, 4]
    with pytest.raises(errors.TableNotFoundError):
        lab.stream("nothing")


def test_hidden_columns_of_an_output_table_are_not_read_by_default(
    lake: Lake, tmp_path: Path
) -> None:
    from deltalake import write_deltalake

    rows = pa.table({"id": [1], "__epoch": pa.array([0], pa.int32())})
    write_deltalake(str(tmp_path / "hidden"), rows)
    name = delta_stream("hidden", str(tmp_path / "hidden")).partition(".")[2]
    assert DeltaStreams(lake).declaration(name).columns == Schema.of(id="bigint")
