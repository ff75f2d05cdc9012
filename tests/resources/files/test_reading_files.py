"""What a file of each format may look like, and how what it may not look like is told."""

from __future__ import annotations

import bz2
import csv
import datetime as dt
import gzip
import io
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.resources.errors import SchemaMismatchError, SourceChangedError
from dagster_adjunct.resources.files.formats import (
    DeclaredFiles,
    FileFormat,
    QuoteReader,
    count_file_records,
    plan_tasks,
)
from dagster_adjunct.resources.files.tree import ListedFile, open_tree
from dagster_adjunct.resources.schemas.schema import Schema
from tests.rounds import rounds

PLANES = Schema.of(tailnum="string", seats="int")
EVERYTHING = Schema.of(
    id="bigint",
    name="string",
    small="tinyint",
    ok="boolean",
    ratio="double",
    price="decimal(10,2)",
    day="date",
    at="timestamp",
    raw="binary",
)
NOON = dt.datetime(2026, 1, 31, 12, 0, 0, 123456, tzinfo=dt.UTC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def rows(
    folder: Path, name: str, format: FileFormat, schema: Schema = PLANES
) -> list[dict[str, Any]]:
    tree = open_tree(str(folder))
    file = next(file for file in tree.list() if file.path == name)
    records: list[dict[str, Any]] = []
    for number, table in DeclaredFiles(tree, format, schema, "dataset 'planes'").tables(file):
        assert number == len(records)
        assert table.schema.equals(schema.to_arrow())
        records += table.to_pylist()
    return records


def refused(
    folder: Path, name: str, format: FileFormat, *parts: str, schema: Schema = PLANES
) -> SchemaMismatchError:
    with pytest.raises(SchemaMismatchError) as caught:
        rows(folder, name, format, schema)
    for part in ("dataset 'planes'", name, *parts):
        assert part in caught.value.problem
    return caught.value


# -- CSV


def test_a_csv_file_is_typed_by_the_schema_whatever_the_order_of_its_columns(folder: Path) -> None:
    (folder / "a.csv").write_text(
        'name,id,small,ok,ratio,price,day,at,raw\n"Boeing,'
        ' ""737""\nMAX",1,-128,true,0.1,12.3,2026-01-31,2026-01-31T13:00:00.123456+01:00,xyz\n"",2,,False,1,5,,2026-01-31'
        " 12:00:00Z,\n,3,,,,,,,\n"
    )
    first, second, third = rows(folder, "a.csv", "csv", EVERYTHING)
    assert first == {
        "id": 1,
        "name": 'Boeing, "737"\nMAX',
        "small": -128,
        "ok": True,
        "ratio": 0.1,
        "price": Decimal("12.30"),
        "day": dt.date(2026, 1, 31),
        "at": NOON,
        "raw": b"xyz",
    }
    assert (second["name"], second["small"], second["at"]) == (
        "",
        None,
        NOON.replace(microsecond=0),
    )
    assert [value for value in third.values() if value is not None] == [3]


def test_the_byte_order_mark_and_carriage_returns_of_a_csv_file_are_no_content(
    folder: Path,
) -> None:
    (folder / "a.csv").write_bytes("\ufefftailnum,seats\r\nN1,2\r\n".encode())
    assert rows(folder, "a.csv", "csv") == [{"tailnum": "N1", "seats": 2}]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tailnum,seats\nN1,2\nN2,many\n", ["'seats'", "line 3", "declared int", "'many'"]),
        ("tailnum,seats\nN1,2.0\n", ["'seats'", "line 2", "'2.0'"]),
        ("tailnum,seats\nN1,99999999999\n", ["'seats'", "'99999999999'"]),
        ("seats,tailnum\nmany,N1\n", ["'seats'", "'many'"]),
        ("tailnum,seats\nN1\n", ["line 2", "Expected 2 columns, got 1"]),
        ("tailnum,seats\nN1,2,3\n", ["line 2", "Expected 2 columns, got 3"]),
        ("tailnum\nN1\n", ["column 'seats' is missing"]),
        ("tailnum,seats,maker\nN1,2,B\n", ["column 'maker' is not declared"]),
        ("tailnum,seats,seats\nN1,2,2\n", ["column 'seats' occurs twice"]),
        ("Tailnum,seats\nN1,2\n", ["column 'tailnum' is missing", "column 'Tailnum' is not declared"]),
        ("", ["is empty", "a header line"]),
        ("\n\n", ["is empty"]),
        ('seats,tailnum\n1,N1\n2,"N2\n3,N3\n', ["line 3", "ends within a quoted value", "N2"]),
        ('seats,tailnum\n1,N1\n2,"N2' + "\n3,N3" * 5_000, ["line 3", "ends within a quoted value"]),
        ('seats,tailnum\n1,"N1"\n2,"N2\n3,"N3"\n4,"N4"\n', ["line 4", "after its closing quote"]),
        ('seats,tailnum\n1,"the ""first"" N1"\n2,"the "second" N2"\n', ["line 3", "after its closing quote", "second"]),
        ('seats,tailnum\n1,N1\n2,"N2', ["ends within a quoted value"]),
        ('tailnum,seats\n"N1,1\nN2,2\n', ["line 2"]),
        (f'tailnum,"seats\n{"N1,1" * 50_000}\n', ["field larger than field limit"]),
    ],
)  # fmt: skip
def test_a_csv_file_that_is_not_as_declared_is_refused_with_file_line_and_column(
    folder: Path, text: str, parts: list[str]
) -> None:
    (folder / "bad one.csv").write_text(text)
    error = refused(folder, "bad one.csv", "csv", *parts)
    assert error.file == f"{folder}/bad one.csv"
    for line in re.findall(r", line (\d+):", error.problem):
        assert error.line == int(line)


RATIOS = Schema.of(id="bigint", small="float", large="double")


@pytest.mark.parametrize(
    ("small", "large", "column"),
    [("1e39", "1", "small"), ("1", "-1.7976931348623159e308", "large"), (" 3.5e38", "1", "small")],
)
@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_a_number_too_large_for_its_column_is_not_read_as_infinity(
    folder: Path, small: str, large: str, column: str, format: FileFormat
) -> None:
    if format == "csv":
        (folder / "a").write_text(f"large,small,id\ninf,-inf,1\n{large},{small},2\n")
    else:
        (folder / "a").write_text(f'{{"id": 1}}\n{{"id": 2, "small": {small}, "large": {large}}}\n')
    error = refused(folder, "a", format, "too large", schema=RATIOS)
    assert (error.column, error.line) == (column, 3 if format == "csv" else 2)


def test_an_infinity_that_a_csv_file_writes_as_a_word_is_read(folder: Path) -> None:
    (folder / "a.csv").write_text("id,small,large\n1,inf,-inf\n2,3.4e38,1.7e308\n")
    first, second = rows(folder, "a.csv", "csv", RATIOS)
    assert (first["small"], first["large"]) == (math.inf, -math.inf)
    assert (second["small"], second["large"]) == (pytest.approx(3.4e38), 1.7e308)


@pytest.mark.parametrize("ending", ["\r", "\n", "\r\n"])
def test_the_lines_of_a_csv_file_may_end_in_any_way(folder: Path, ending: str) -> None:
    (folder / "a.csv").write_text(ending.join(["tailnum,seats", "N1,2", "N2,3", ""]), newline="")
    assert rows(folder, "a.csv", "csv") == [
        {"tailnum": "N1", "seats": 2},
        {"tailnum": "N2", "seats": 3},
    ]


@pytest.mark.parametrize("last", ["N2", '"N2"', '""', "", 'N"2', '"N""2"', '"N\n2"'])
@pytest.mark.parametrize("ending", ["", "\n", "\r\n", "\n\n"])
def test_the_last_value_of_a_csv_file_may_end_it_in_any_way(
    folder: Path, last: str, ending: str
) -> None:
    (folder / "a.csv").write_text(f"seats,tailnum\n1,N1\n2,{last}{ending}", newline="")
    assert len(rows(folder, "a.csv", "csv")) == 2


class Blocks(io.BytesIO):
    def __init__(self, data: bytes, size: int) -> None:
        super().__init__(data)
        self._size = size

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self._size)


@pytest.mark.rounds
def test_quotes_are_misplaced_where_a_strict_reader_of_csv_finds_them_so() -> None:
    draw, found = random.Random(5), Counter[str]()
    for _ in range(rounds(300, 30_000)):
        text = "".join(draw.choices('""",\nab\r', k=draw.randint(1, 12)))
        reader = QuoteReader(Blocks(text.encode(), draw.randint(1, 6)))
        while reader.read():
            pass
        try:
            expected = str(list(csv.reader(io.StringIO(text, newline=""), strict=True)) and "")
        except csv.Error as error:
            expected = "within a quoted" if "unexpected end" in str(error) else "after its closing"
        refusal = reader.quote_error("a.csv")
        assert (
            (expected in refusal.problem)
            if refusal and expected
            else (not refusal and not expected)
        ), text
        found[expected] += 1
    assert min(found.values()) > 20


def test_an_open_value_of_bytes_is_no_value_and_the_header_alone_is_a_file(folder: Path) -> None:
    (folder / "a.csv").write_text('id,raw\n1,"a\n2,b\n')
    refused(
        folder,
        "a.csv",
        "csv",
        "line 2",
        "ends within a quoted value",
        schema=Schema.of(id="int", raw="binary"),
    )
    (folder / "b.csv").write_text("tailnum,seats")
    assert rows(folder, "b.csv", "csv") == []


def test_a_csv_value_that_is_not_utf_8_or_has_no_zone_is_refused(folder: Path) -> None:
    (folder / "a.csv").write_bytes(b"tailnum,seats\n\xff,1\n")
    refused(folder, "a.csv", "csv", "'tailnum'", "UTF-8")
    (folder / "b.csv").write_text("at\n2026-01-31 12:00:00\n")
    refused(folder, "b.csv", "csv", "'at'", "zone", schema=Schema.of(at="timestamp"))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("date", "0000-12-31"),
        ("timestamp", "0000-01-01T00:00:00Z"),
        ("timestamp", "9999-12-31T23:59:59-01:00"),
        ("timestamp", "0001-01-01T00:00:00+01:00"),
    ],
)
def test_a_date_that_python_lacks_is_refused_at_the_very_end_of_a_csv_file(
    folder: Path, kind: str, value: str
) -> None:
    (folder / "a.csv").write_text(f"id,when\n1,\n2,{value}\n")
    error = refused(folder, "a.csv", "csv", "line 3", schema=Schema.of(id="int", when=kind))
    assert (error.column, error.line) == ("when", 3)


def test_compressed_texts_are_read_by_their_ending_and_refused_when_cut(folder: Path) -> None:
    text = b"tailnum,seats\n" + b"N1,2\n" * 10_000
    (folder / "a.csv.gz").write_bytes(gzip.compress(text))
    (folder / "b.CSV.BZ2").write_bytes(bz2.compress(text))
    (folder / "cut.csv.gz").write_bytes(gzip.compress(text)[:-20])
    assert len(rows(folder, "a.csv.gz", "csv")) == len(rows(folder, "b.CSV.BZ2", "csv")) == 10_000
    refused(folder, "cut.csv.gz", "csv")


# -- JSON lines


def test_a_json_lines_file_is_typed_by_the_schema_and_absent_fields_are_null(folder: Path) -> None:
    (folder / "a.jsonl").write_text(
        '{"name": "caf\\u00e9", "id": 1, "small": 7, "ok": false, "ratio": 1, "price": "12.3",'
        ' "day": "2026-01-31", "at": "2026-01-31T12:00:00.123456Z", "raw": "eHl6"}\n\n{"id": 2,'
        ' "price": 4.25, "name": null}'
    )
    first, second = rows(folder, "a.jsonl", "jsonl", EVERYTHING)
    assert first == {
        "id": 1, "name": "café", "small": 7, "ok": False, "ratio": 1.0, "price": Decimal("12.30"),
        "day": dt.date(2026, 1, 31), "at": NOON, "raw": b"xyz",
    }  # fmt: skip
    assert {name: value for name, value in second.items() if value is not None} == {
        "id": 2,
        "price": Decimal("4.25"),
    }


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"tailnum":"N1","seats":2}\n{"tailnum":"N2","seats":"many"}\n', ["line 2", "'seats'", "declared int"]),
        ('{"tailnum":"N1","seats":2}\n{"tailnum":"N2","seats":2.5}\n', ["line 2", "'seats'", "2.5"]),
        ('{"tailnum":"N1","seats":2}\n\n\n{"tailnum":7,"seats":2}\n', ["line 4", "'tailnum'", "declared string"]),
        ('{"tailnum":"N1","seats":{"first":2}}\n', ["line 1", "'seats'"]),
        ('{"tailnum":"N1","maker":"B"}\n', ["line 1", "'maker' is not declared"]),
        ('{"tailnum":"N1"}\n[1]\n', ["line 2", "is a list, expected an object"]),
        ("null\n", ["line 1", "is null, expected an object"]),
        ('{"tailnum":"N1"}\n null', ["line 2", "is null, expected an object"]),
        ('{"tailnum":"N1"}\nnull\n{"tailnum":"N2"}\n', ["line 2", "is null, expected an object"]),
        ('null {"tailnum":"N1"} null\n', ["line 1", "not JSON"]),
        (f'{{"tailnum":{"[" * 100_000}{"]" * 100_000}}}\n', ["line 1", "not JSON"]),
        ('{"tailnum":"N1"}\n{"tailnum":"N2",\n', ["line 2", "not JSON"]),
        ('{"tailnum":"N1","tailnum":"N2"}\n', ["line 1", "'tailnum'", "twice"]),
        ('{"tailnum":"N1"}\n{"tailnum":"N2","seats":1e400}\n', ["line 2", "'seats'", "1e400"]),
    ],
)  # fmt: skip
def test_a_json_line_that_is_not_as_declared_is_refused_with_file_line_and_column(
    folder: Path, text: str, parts: list[str]
) -> None:
    (folder / "bad.jsonl").write_text(text)
    refused(folder, "bad.jsonl", "jsonl", *parts)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("date", "31.1.2026"), ("timestamp", "2026-01-31T12:00:00"), ("binary", "no base64!")],
)
def test_texts_of_dates_times_and_bytes_in_json_are_checked(
    folder: Path, kind: str, value: str
) -> None:
    (folder / "a.jsonl").write_text(f'{{"x": "{value}"}}\n')
    refused(folder, "a.jsonl", "jsonl", "'x'", f"declared {kind}", schema=Schema.of(x=kind))


def test_json_lines_longer_than_a_block_and_files_without_lines_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagster_adjunct.resources.files.formats._JSON_BLOCK", 50)
    lines = [
        f'{{"tailnum": "{"N" * length}", "seats": {length}}}\n' for length in (1, 200, 3, 120, 0)
    ]
    (folder / "a.jsonl").write_text("".join(lines))
    assert [row["seats"] for row in rows(folder, "a.jsonl", "jsonl")] == [1, 200, 3, 120, 0]
    (folder / "bad.jsonl").write_text("".join(lines) + "{}\n7\n")
    refused(folder, "bad.jsonl", "jsonl", "line 7")
    (folder / "empty.jsonl").write_text("\n")
    assert rows(folder, "empty.jsonl", "jsonl") == []


# -- Parquet


def test_parquet_keeps_values_whatever_its_encoding_and_the_order_of_its_columns(
    folder: Path,
) -> None:
    table = pa.table(
        {
            "at": pa.array([NOON, None], pa.timestamp("ns", "Europe/Berlin")),
            "seats": pa.array([2, None], pa.int32()),
            "tailnum": pa.array(["N1", "N1"]).dictionary_encode(),
        }
    )
    pq.write_table(table, folder / "a.parquet")
    schema = Schema.of(tailnum="string", seats="int", at="timestamp")
    assert rows(folder, "a.parquet", "parquet", schema) == [
        {"tailnum": "N1", "seats": 2, "at": NOON}, {"tailnum": "N1", "seats": None, "at": None}
    ]  # fmt: skip


def test_timestamps_that_older_sparks_wrote_as_int96_are_utc(folder: Path) -> None:
    table = pa.table({"at": pa.array([NOON.replace(tzinfo=None)], pa.timestamp("us"))})
    pq.write_table(table, folder / "a.parquet", use_deprecated_int96_timestamps=True)
    assert rows(folder, "a.parquet", "parquet", Schema.of(at="timestamp")) == [{"at": NOON}]


@pytest.mark.parametrize(
    ("columns", "parts"),
    [
        ({"tailnum": ["N1"]}, ["column 'seats' is missing"]),
        (
            {"tailnum": ["N1"], "seats": pa.array([1], pa.int64())},
            ["column 'seats' is bigint, declared int"],
        ),
        (
            {"tailnum": [7], "seats": pa.array([1], pa.int32())},
            ["column 'tailnum' is bigint, declared string"],
        ),
        (
            {"tailnum": ["N1"], "seats": pa.array([1], pa.int32()), "x": [1]},
            ["column 'x' is not declared"],
        ),
        ({"tailnum": [["N1"]], "seats": pa.array([1], pa.int32())}, ["'tailnum'", "array"]),
    ],
)
def test_a_parquet_file_that_is_not_as_declared_is_refused_by_its_footer(
    folder: Path, columns: dict[str, Any], parts: list[str]
) -> None:
    pq.write_table(pa.table(columns), folder / "a.parquet")
    refused(folder, "a.parquet", "parquet", *parts)
    tree = open_tree(str(folder))
    with pytest.raises(SchemaMismatchError) as caught:
        count_file_records(DeclaredFiles(tree, "parquet", PLANES, "dataset 'planes'"), tree.list())
    assert str(caught.value.file).endswith("a.parquet")


@pytest.mark.parametrize("dictionary", [True, False])
def test_groups_without_rows_are_read_in_parquet(folder: Path, dictionary: bool) -> None:
    table = pa.table({"tailnum": ["N1", "N2"], "seats": pa.array([1, 2], pa.int32())})
    with pq.ParquetWriter(folder / "a.parquet", table.schema, use_dictionary=dictionary) as writer:
        for part in (table[:0], table[:1], table[:0], table[1:]):
            writer.write_table(part)
    assert rows(folder, "a.parquet", "parquet") == table.to_pylist()


def test_a_time_without_a_zone_is_refused_in_parquet(folder: Path) -> None:
    pq.write_table(
        pa.table({"at": pa.array([NOON.replace(tzinfo=None)], pa.timestamp("us"))}),
        folder / "a.parquet",
    )
    refused(folder, "a.parquet", "parquet", "'at'", "time zone", schema=Schema.of(at="timestamp"))


def test_damaged_parquet_is_refused_and_never_fewer_records(folder: Path) -> None:
    table = pa.table(
        {"tailnum": [f"N{i}" for i in range(1000)], "seats": pa.array(range(1000), pa.int32())}
    )
    pq.write_table(
        table,
        folder / "a.parquet",
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    whole = (folder / "a.parquet").read_bytes()
    for name, content in {
        "empty.parquet": b"", "text.parquet": b"tailnum,seats\n", "cut.parquet": whole[:-10],
        "flipped.parquet": whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:],
    }.items():  # fmt: skip
        (folder / name).write_bytes(content)
        refused(folder, name, "parquet", "can't be read")


def test_the_parts_of_a_large_parquet_file_hold_each_record_once(folder: Path) -> None:
    table = pa.table(
        {"tailnum": [f"N{i}" for i in range(1000)], "seats": pa.array(range(1000), pa.int32())}
    )
    pq.write_table(table, folder / "a.parquet", row_group_size=90)
    tree = open_tree(str(folder))
    file = tree.list()[0]
    edges = [0, 1, 5000, 5001, file.size]
    numbered: list[tuple[int, int]] = []
    for span in pairwise(edges):
        for first, part in DeclaredFiles(tree, "parquet", PLANES, "it").tables(file, span):
            numbered += enumerate(part.column("seats").to_pylist(), first)
    assert sorted(numbered) == [(i, i) for i in range(1000)]


@pytest.mark.parametrize(
    ("format", "content", "place"),
    [
        ("csv", b"tailnum,it's\nN1,2\nN2,hunter2\n", ', line 3: column "it\'s" is declared int'),
        ("csv", b"tailnum,it's\nN1,2\nhunter2\n", ", line 3"),
        ("csv", b"tailnum,hunter2\nN1,2\n", ': column "it\'s" is declared int'),
        ("csv", b"it's,tailnum,hunter2\n1,N1,2\n", ""),
        (
            "jsonl",
            b'{"tailnum":"N1","it\'s":"hunter2"}\n',
            ', line 1: column "it\'s" is declared int',
        ),
        ("jsonl", b'{"tailnum":"N1","hunter2":1}\n', ", line 1"),
        ("jsonl", b"hunter2\n", ", line 1"),
    ],
)
def test_errors_tell_the_place_and_no_value_where_a_column_is_sensitive(
    folder: Path, format: FileFormat, content: bytes, place: str
) -> None:
    (folder / "a").write_bytes(content)
    tree = open_tree(str(folder))
    schema = Schema.of({"tailnum": "string", "it's": "int"})
    with pytest.raises(SchemaMismatchError) as caught:
        list(DeclaredFiles(tree, format, schema, "it", values=False).tables(tree.list()[0]))
    assert f"/a{place}: the value is not shown, because columns are sensitive." in str(caught.value)
    assert "hunter2" not in f"{caught.value} {caught.value.facts}"


# -- which task reads what


def test_large_parquet_files_are_cut_small_files_share_a_task_and_texts_stay_whole() -> None:
    mib = 1024 * 1024
    files = [
        ListedFile(name, size * mib, "", NOON)
        for name, size in (("a", 200), ("b", 3), ("c", 7), ("d", 50))
    ]
    parquet = [
        [(part.file.path, part.start // mib, part.end // mib) for part in task]
        for task in plan_tasks(files, "parquet")
    ]
    assert parquet == [
        [("a", 0, 66)],
        [("a", 66, 133)],
        [("a", 133, 200)],
        [("b", 0, 3), ("c", 0, 7)],
        [("d", 0, 50)],
    ]
    csv = [[part.file.path for part in task] for task in plan_tasks(files, "csv")]
    assert csv == [["a"], ["b", "c"], ["d"]]
    assert plan_tasks([], "csv") == []


# -- files that change


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
def test_a_file_that_is_replaced_or_removed_after_it_was_listed_is_noticed(
    folder: Path, format: FileFormat
) -> None:
    path = folder / "a"
    content = {"csv": b"tailnum,seats\nN1,2\n", "jsonl": b'{"tailnum":"N1"}\n'}.get(format)
    if content is None:
        pq.write_table(pa.table({"tailnum": ["N1"], "seats": pa.array([2], pa.int32())}), path)
        content = path.read_bytes()
    path.write_bytes(content)
    tree = open_tree(str(folder))
    listed = tree.list()[0]
    path.write_bytes(content[:5])
    with pytest.raises(SourceChangedError) as caught:
        list(DeclaredFiles(tree, format, PLANES, "it").tables(listed))
    assert caught.value.file == str(path)
    path.unlink()
    with pytest.raises(SourceChangedError) as caught:
        list(DeclaredFiles(tree, format, PLANES, "it").tables(listed))
    assert caught.value.file == str(path)


def test_a_file_that_is_written_to_while_it_is_read_is_noticed(folder: Path) -> None:
    path = folder / "a.csv"
    path.write_text("tailnum,seats\n" + "N1,2\n" * 10)
    tree = open_tree(str(folder))
    reading: Iterator[Any] = DeclaredFiles(tree, "csv", PLANES, "it").tables(tree.list()[0])
    next(reading)
    path.write_text("tailnum,seats\n")
    with pytest.raises(SourceChangedError):
        list(reading)
