"""Files that are damaged, or that have malformed values: errors by their names, or set aside."""

from __future__ import annotations

import gzip
import io
from pathlib import Path
from random import Random
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.file_streams import reading
from dagster_adjunct.resources.file_streams.folder import FileRules
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from tests.nested import draw_rows
from tests.resources.file_streams.written_files import (
    COMPRESSED,
    FORMATS,
    WRITERS,
    avro_bytes,
    put,
    ranges,
    stream_of,
    zstd,
)

SCHEMA = Schema.of(k="bigint", t="string", at="timestamp", n="int", d="decimal(10,2)", day="date")
ROWS = draw_rows(Random(1), SCHEMA, range(300))
SET_ASIDE = FileRules(damaged="set-aside")


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    reading._counted.clear()


def fails(lake: Lake, folder: Path, schema: Schema, format: str) -> SchemaMismatchError:
    """Return the error of admitting or reading, which names the file, and check that such a file is
    set aside if it fails at admission.
    """
    try:
        streams = stream_of(lake, folder, schema, format)
    except SchemaMismatchError as error:
        caught = error
        aside = stream_of(lake, folder, schema, format, rules=SET_ASIDE)
        state = aside.state(aside.tested)  # type: ignore[attr-defined]
        assert state is not None
        assert [file.path for file in state.tail if file.problem] == ["bad"]
        assert aside.read_arrow(ranges(aside)).num_rows == sum(file.rows for file in state.tail)
    else:
        with pytest.raises(SchemaMismatchError) as reading_error:
            streams.read_arrow(ranges(streams))
        caught = reading_error.value
    assert str(folder / "bad") in caught.problem or "/bad" in caught.problem
    assert caught.file is not None
    assert caught.file.endswith("/bad")
    return caught


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", ["other", "text", "noise"])
def test_bytes_of_another_kind_are_an_error_with_the_name(
    lake: Lake, tmp_path: Path, format: str, how: str
) -> None:
    data = {
        "other": WRITERS["parquet" if format != "parquet" else "avro"](SCHEMA, ROWS[:5]),
        "text": b"these are no records\n",
        "noise": Random(1).randbytes(3_000),
    }[how]
    put(tmp_path, "bad", data)
    put(tmp_path, "good", WRITERS[format](SCHEMA, ROWS[:7]))
    fails(lake, tmp_path, SCHEMA, format)


@pytest.mark.parametrize("format", ["parquet", "avro", "jsonl"])
def test_a_file_that_is_cut_off_is_an_error(lake: Lake, tmp_path: Path, format: str) -> None:
    data = WRITERS[format](SCHEMA, ROWS)
    for seed in range(12):
        cut = Random(seed).randrange(1, len(data) - 1)
        if format == "jsonl" and data[cut - 1 : cut] in (b"\n", b"}"):
            continue
        put(tmp_path, "bad", data[:cut])
        try:
            fails(lake, tmp_path, SCHEMA, format)
        except pytest.fail.Exception:
            # Avro has no mark at its end: one that is cut between two blocks is a shorter file.
            assert format == "avro"
            assert len(list(fastavro.reader(io.BytesIO(data[:cut])))) < len(ROWS)


@pytest.mark.parametrize("format", ["csv", "jsonl", "avro"])
@pytest.mark.parametrize("ending", [".gz", ".bz2", ".zst"])
def test_compressed_files_are_read_by_name_and_damaged_ones_are_errors(
    lake: Lake, tmp_path: Path, format: str, ending: str
) -> None:
    schema = Schema.of(k="bigint", t="string")
    rows = [{"k": k, "t": f"text {k * 7919 % 1000}"} for k in range(3_000)]
    plain = WRITERS[format](schema, rows)
    data = zstd(plain) if ending == ".zst" else COMPRESSED[ending](plain)
    put(tmp_path, f"a{ending}", data)
    streams = stream_of(lake, tmp_path, schema, format)
    found = streams.read_arrow(ranges(streams, 1_000, 2_999))
    assert found.select(["k", "t"]).to_pylist() == rows[1_000:2_999]
    for bad in (data[: len(data) // 2], plain, data[:100] + b"\0" * 50 + data[150:], data[:-6]):
        put(tmp_path, f"a{ending}", bad)
        with pytest.raises(SchemaMismatchError, match=f"a{ending}") as caught:
            read_all(lake, tmp_path, schema, format)
        assert caught.value.file == f"{tmp_path}/a{ending}"
        reading._counted.clear()


def read_all(lake: Lake, folder: Path, schema: Schema, format: str) -> pa.Table:
    streams = stream_of(lake, folder, schema, format)
    return streams.read_arrow(ranges(streams))


def test_gzip_members_one_after_the_other_are_one_file(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path, "a.gz", gzip.compress(b'{"k":1}\n') + gzip.compress(b'{"k":2}\n'))
    streams = stream_of(lake, tmp_path, Schema.of(k="int"), "jsonl")
    assert streams.read_arrow(ranges(streams)).column("k").to_pylist() == [1, 2]


@pytest.mark.parametrize(
    ("format", "data", "column", "line"),
    [
        ("jsonl", b'{"k":1}\n{"k":"x"}\n', "k", 2),
        ("jsonl", b'{"k":1}\n{"k":1.5}\n', "k", 2),
        ("jsonl", b'{"k":1}\n[1]\n', None, 2),
        ("jsonl", b'{"k":1}\n{"k":1}{"k":2}\n', None, 2),
        ("jsonl", b'{"k":99999999999999999999}\n', "k", 1),
        ("csv", b"k\n1\nx\n", "k", 3),
        ("csv", b"k\n1\n2,3\n", None, 3),
        ("csv", b"k\n1\n0x10\n", "k", 3),
        ("csv", b'k\n1\n"2\n', None, 3),
    ],
)
def test_malformed_values_of_texts_are_errors_with_the_line(
    lake: Lake, tmp_path: Path, format: str, data: bytes, column: str | None, line: int
) -> None:
    put(tmp_path, "bad", data)
    error = fails(lake, tmp_path, Schema.of(k="bigint"), format)
    assert (error.column, error.line) == (column, line)


def test_values_of_parquet_that_do_not_fit_are_errors_with_the_row(
    lake: Lake, tmp_path: Path
) -> None:
    nanos = pa.array([0, 1_000, 1_001], pa.timestamp("ns", "UTC"))
    pq.write_table(pa.table({"at": nanos}), tmp_path / "bad")
    error = fails(lake, tmp_path, Schema.of(at="timestamp"), "parquet")
    assert (error.column, error.line) == ("at", 3)
    pq.write_table(pa.table({"at": nanos.cast(pa.timestamp("ns"))}), tmp_path / "bad")
    assert fails(lake, tmp_path, Schema.of(at="timestamp"), "parquet").column == "at"


def avro(schema: Any, rows: list[Any], **options: Any) -> bytes:
    out = io.BytesIO()
    fastavro.writer(out, fastavro.parse_schema(schema), rows, **options)
    return out.getvalue()


def record(**types: Any) -> dict[str, Any]:
    fields = [{"name": name, "type": kind} for name, kind in types.items()]
    return {"type": "record", "name": "row", "fields": fields}


def test_logical_types_enums_unions_and_names_of_avro_are_read_as_in_kafka(
    lake: Lake, tmp_path: Path
) -> None:
    import datetime as dt
    from decimal import Decimal
    from uuid import UUID

    kind = {"type": "enum", "name": "kind", "symbols": ["A", "B"]}
    schema = record(
        e=kind,
        same="kind",
        u=["null", "int", "string"],
        ms={"type": "long", "logicalType": "timestamp-millis"},
        local={"type": "long", "logicalType": "local-timestamp-micros"},
        time={"type": "int", "logicalType": "time-millis"},
        id={"type": "string", "logicalType": "uuid"},
        fixed={"type": "fixed", "name": "four", "size": 4},
        dec={"type": "fixed", "name": "dec", "size": 8, "logicalType": "decimal", "precision": 12, "scale": 3},
        m={"type": "map", "values": {"type": "array", "items": ["null", "long"]}},
    )  # fmt: skip
    at = dt.datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.UTC)
    row = {
        "e": "A", "same": "B", "u": "x", "ms": at, "local": at.replace(tzinfo=None),
        "time": dt.time(1, 2, 3), "id": UUID(int=5), "fixed": b"abcd", "dec": Decimal("-1.250"),
        "m": {"b": [1, None], "a": []},
    }  # fmt: skip
    put(tmp_path, "a", avro(schema, [row, {**row, "u": 5}, {**row, "u": None}]))
    declared = Schema.of(
        e="string", same="string", u="string", ms="timestamp", local="string", time="string",
        id="string", fixed="binary", dec="decimal(12,3)", m="map<string,array<bigint>>",
    )  # fmt: skip
    streams = stream_of(lake, tmp_path, declared, "avro")
    found = streams.read_arrow(ranges(streams)).select(declared.names)
    one, two, three = found.to_pylist(maps_as_pydicts="strict")
    assert one == {
        **row, "u": '"x"', "local": "2026-01-02T03:04:05.678000", "time": "01:02:03",
        "id": str(UUID(int=5)),
    }  # fmt: skip
    assert (two["u"], three["u"]) == ("5", None)


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "xz"])
def test_codecs_of_avro(lake: Lake, tmp_path: Path, codec: str) -> None:
    put(tmp_path, "a", avro_bytes(SCHEMA, ROWS, codec))
    streams = stream_of(lake, tmp_path, SCHEMA, "avro")
    assert streams.read_arrow(ranges(streams, 150, 290)).column("k").to_pylist() == list(
        range(150, 290)
    )
    assert streams.read_arrow(ranges(streams), []).num_rows == 300


def test_a_value_of_avro_that_no_column_holds_is_an_error_with_its_record(
    lake: Lake, tmp_path: Path
) -> None:
    schema = record(at={"type": "long", "logicalType": "timestamp-micros"})
    put(tmp_path, "bad", avro(schema, [{"at": 1}, {"at": 2}, {"at": 2**62}]))
    error = fails(lake, tmp_path, Schema.of(at="timestamp"), "avro")
    assert error.line == 3


def test_avro_that_is_no_record_is_an_error(lake: Lake, tmp_path: Path) -> None:
    put(tmp_path, "bad", avro("long", [1, 2]))
    fails(lake, tmp_path, Schema.of(k="bigint"), "avro")


def test_without_its_package_avro_is_a_mistake_of_the_installation(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    from dagster_adjunct.resources.errors import ConfigurationError

    put(tmp_path, "a", avro(record(k="long"), [{"k": 1}]))
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(ConfigurationError) as caught:
        stream_of(lake, tmp_path, Schema.of(k="bigint"), "avro", rules=SET_ASIDE)
    assert "dagster-adjunct[avro]" in caught.value.next_step
