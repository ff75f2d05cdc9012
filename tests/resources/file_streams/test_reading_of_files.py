"""Records of files are the same by every engine, for any range of offsets, and those that plain Python
expects.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

from dagster_adjunct.resources.errors import AdmittedFileError, SchemaMismatchError
from dagster_adjunct.resources.file_streams import reading
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.tasks import translate_spark_errors
from tests.nested import PLAIN_NAMES, SIMPLE, Limits, draw_rows, draw_schema
from tests.resources.file_streams.written_files import (
    AT,
    COMPRESSED,
    FORMATS,
    WRITERS,
    Rows,
    cuts,
    expected,
    parquet_bytes,
    put,
    ranges,
    records,
    stream_of,
    zstd,
)
from tests.rounds import rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FLAT = Schema.of(
    k="bigint",
    name="string",
    small="int",
    ok="boolean",
    ratio="double",
    price="decimal(10,2)",
    day="date",
    at="timestamp",
)
META = ("__partition", "__timestamp", "__tombstone", "__epoch")


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture(autouse=True)
def _nothing_counted() -> None:
    reading._counted.clear()


def draw(random_: Random, format: str) -> tuple[Schema, Rows]:
    simple = SIMPLE[2:] if format == "avro" else SIMPLE  # Avro has no tinyint and smallint
    limits = Limits(PLAIN_NAMES, simple, finite=format == "jsonl")
    schema = (
        FLAT if format == "csv" or random_.random() < 0.3 else draw_schema(random_, 2, 2, limits)
    )
    return schema, draw_rows(random_, schema, range(random_.randint(0, 40)), limits)


def write_all(
    folder: Path, random_: Random, schema: Schema, rows: Rows, format: str
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Write rows to some files; return them with what their file adds."""
    made = []
    places = sorted(random_.randint(0, len(rows)) for _ in range(2))
    for number, (start, end) in enumerate(zip([0, *places], [*places, len(rows)], strict=True)):
        ending = random_.choice(["", ".gz", ".bz2", ".zst"]) if format != "parquet" else ""
        data = WRITERS[format](schema, rows[start:end])
        data = zstd(data) if ending == ".zst" else COMPRESSED[ending](data)
        day = random_.choice(["2026-11-28", "2026-11-29", None])
        at = AT + number
        part = day or "__HIVE_DEFAULT_PARTITION__"
        path = f"part day={quote('a b/%c+d', safe='')}/on={part}/{number} ü%20+.{format}{ending}"
        put(folder, path, data, at)
        added = {
            "part day": "a b/%c+d",
            "on": day and dt.date.fromisoformat(day),
            "from file": path,
            "changed": dt.datetime.fromtimestamp(at, dt.UTC),
            "__timestamp": dt.datetime.fromtimestamp(at, dt.UTC),
            "__partition": 0,
            "__tombstone": False,
            "__epoch": 0,
        }
        made += [(row, added) for row in rows[start:end]]
    return made


def with_added(schema: Schema) -> Schema:
    added = {"part day": "string", "on": "date", "from file": "string", "changed": "timestamp"}
    return Schema.of({**schema.types, **added})


ADDED = {
    "path_columns": ("part day", "on"),
    "path_column": "from file",
    "modified_column": "changed",
}


@pytest.mark.rounds
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seed", range(rounds(4, 40)))
def test_any_range_has_the_records_that_were_written(
    lake: Lake, tmp_path: Path, format: str, seed: int
) -> None:
    random_ = Random(f"{seed} {format}")
    schema, rows = draw(random_, format)
    made = write_all(tmp_path, random_, schema, rows, format)
    streams = stream_of(lake, tmp_path, with_added(schema), format, **ADDED)
    names = with_added(schema).names
    for counted in (True, False):
        if not counted:
            reading._counted.clear()
        for start, end in cuts(random_, len(rows)):
            asked = ranges(streams, start, end)
            table = streams.read_arrow(asked)
            assert table.select(names).schema == with_added(schema).to_arrow()
            assert records(table) == expected(made, start, end)
            some = random_.sample(names, random_.randint(0, len(names)))
            by_task = list(streams.task_reads(asked, some)(0))
            rest = pa.concat_tables([streams.read_arrow(asked, some).slice(0, 0), *by_task])
            assert records(rest) == records(table.select([*some, "__offset", *META]))


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(5, 40)))
def test_spark_reads_the_same_records(
    lake: Lake, tmp_path: Path, spark: SparkSession, seed: int
) -> None:
    random_ = Random(seed)
    format = ["parquet", "parquet", "avro", "csv", "jsonl"][seed % 5]
    schema, rows = draw(random_, format)
    if seed == 0:
        schema = FLAT
        rows = draw_rows(random_, schema, range(40))
    made = write_all(tmp_path, random_, schema, rows, format)
    streams = stream_of(lake, tmp_path, with_added(schema), format, **ADDED)
    for start, end in cuts(random_, len(rows))[: rounds(2, 5)]:
        asked = ranges(streams, start, end)
        frame = streams.read(spark, asked)
        assert (
            Schema.from_spark(frame.select(*[f"`{name}`" for name in schema.names]).schema)
            == schema
        )
        assert records(frame.toArrow()) == expected(made, start, end)
        assert frame.count() == end - start


OLD = dt.datetime(1, 1, 1, 12, 30, 0, 1, tzinfo=dt.UTC)
TIMES = [
    OLD,
    dt.datetime(1500, 2, 28, 23, 59, 59, 999_999, tzinfo=dt.UTC),
    dt.datetime(1899, 12, 31, 0, 0, 0, 1, tzinfo=dt.UTC),
    dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC),
    dt.datetime(2026, 11, 30, 1, 2, 3, 4, tzinfo=dt.UTC),
    None,
]


@pytest.mark.parametrize(
    "options",
    [
        {"use_deprecated_int96_timestamps": True},
        {"coerce_timestamps": "us"},
        {"store_decimal_as_integer": True, "compression": "gzip", "data_page_version": "2.0"},
        {"use_dictionary": False, "store_schema": False, "version": "2.4"},
    ],
)
def test_spark_reads_what_other_writers_have_written(
    lake: Lake, tmp_path: Path, spark: SparkSession, options: dict[str, Any]
) -> None:
    schema = Schema.of(
        k="int", at="timestamp", day="date", price="decimal(30,4)", raw="binary", f="float",
        tags="array<struct<name:string,at:timestamp>>", s="struct<b:string,a:array<date>>",
    )  # fmt: skip
    random_ = Random(str(options))
    rows = draw_rows(random_, schema, range(30), Limits(PLAIN_NAMES))
    for row, time in zip(rows, TIMES * 5, strict=True):
        row["at"] = time
        if "use_deprecated_int96_timestamps" in options:  # int96 has nanoseconds since 1970
            row["at"] = time and time.replace(year=max(1700, time.year))
            row["tags"] = None
        row["day"] = time and time.date()
    put(tmp_path, "a.parquet", parquet_bytes(schema, rows, **options))
    put(tmp_path, "b.parquet", parquet_bytes(schema, rows[:3], **options))
    streams = stream_of(lake, tmp_path, schema, "parquet")
    found = streams.read(spark, ranges(streams)).toArrow()
    meta = {"__timestamp": dt.datetime.fromtimestamp(AT, dt.UTC), "__partition": 0,
            "__tombstone": False, "__epoch": 0}  # fmt: skip
    assert records(found) == expected([(row, meta) for row in [*rows, *rows[:3]]], 0, 33)


def test_spark_reads_files_of_any_name(lake: Lake, tmp_path: Path, spark: SparkSession) -> None:
    names = ["a b", "%41", "ü", "a+b&c=d#e", "o'k", 'q"t', "_p=1/x", "b,c", "$x~!;@", "(1)"]
    names += ["at 12:30", "x*y", "[z]", "what?", "{q}", "o\\k", "a\nb", " x/y"]
    for number, name in enumerate(names):
        put(tmp_path, f"{name}.parquet", parquet_bytes(Schema.of(k="int"), [{"k": number}]))
    streams = stream_of(lake, tmp_path, Schema.of(k="int", p="string"), "parquet", path_column="p")
    found = streams.read(spark, ranges(streams)).toArrow()
    assert {row["p"]: row["k"] for row in found.to_pylist()} == {
        f"{name}.parquet": number for number, name in enumerate(names)
    }
    assert records(found) == records(streams.read_arrow(ranges(streams)))


def test_tasks_share_a_large_parquet_file_by_its_row_groups(
    lake: Lake, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"k": k} for k in range(1_000)]
    schema = Schema.of(k="bigint")
    put(tmp_path, "a.parquet", parquet_bytes(schema, rows, row_group_size=70, compression="none"))
    put(tmp_path, "b.parquet", parquet_bytes(schema, rows[:10]))
    size = (tmp_path / "a.parquet").stat().st_size // 1_000 * 130
    monkeypatch.setattr("dagster_adjunct.resources.file_streams.streams.TASK_BYTES", size)
    monkeypatch.setattr("dagster_adjunct.resources.spark.tasks.TASK_BYTES", size)
    monkeypatch.setattr("dagster_adjunct.resources.spark.tasks._LEAST_BYTES", size)
    streams = stream_of(lake, tmp_path, schema, "parquet")
    for start, end in [(0, 1_010), (75, 990), (139, 141), (500, 1_005)]:
        frame = streams.read(spark, ranges(streams, start, end))
        tasks = {*frame.select(F.spark_partition_id()).toArrow().column(0).to_pylist()}
        assert len(tasks) >= (end - start) // 280
        found = frame.toArrow().sort_by("__offset")
        assert found.column("__offset").to_pylist() == list(range(start, end))
        assert found.column("k").to_pylist() == [*range(1_000), *range(10)][start:end]


@pytest.mark.parametrize("longer", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_is_replaced_is_never_read_by_spark(
    lake: Lake, tmp_path: Path, spark: SparkSession, when: str, longer: bool
) -> None:
    for number in range(3):
        some = [{"k": number * 2}, {"k": number * 2 + 1}]
        put(tmp_path, f"{number:04}.parquet", parquet_bytes(Schema.of(k="bigint"), some))
    streams = stream_of(lake, tmp_path, Schema.of(k="bigint"), "parquet")
    value = [{"k": 7}, {"k": 8}]
    other = parquet_bytes(Schema.of(k="bigint"), value * 40 if longer else value)
    path = tmp_path / "0001.parquet"
    assert (len(other) == path.stat().st_size) is not longer
    if when == "before":
        put(tmp_path, "0001.parquet", other, AT + 60)
    frame = streams.read(spark, ranges(streams))
    if when == "after":
        put(tmp_path, "0001.parquet", other, AT + 60)
    with (
        pytest.raises(AdmittedFileError, match=r"0001\.parquet") as caught,
        translate_spark_errors(),
    ):
        frame.select("k").toArrow()
    assert caught.value.rule == "lost"
    name = f"files.{streams.tested}"  # type: ignore[attr-defined]
    assert caught.value.stream == name
    assert f"adjunct stream set-aside {name} 0001.parquet" in caught.value.next_step


def test_values_that_python_can_not_hold_fail_with_the_file_by_every_engine(
    lake: Lake, tmp_path: Path, spark: SparkSession
) -> None:
    good = pa.table({"k": [1], "t": ["x"]})
    bad = good.set_column(1, "t", pa.array([b"\xff"]).view(pa.string()))
    import pyarrow.parquet as pq

    pq.write_table(good, tmp_path / "good.parquet")
    pq.write_table(bad, tmp_path / "bad.parquet")
    streams = stream_of(lake, tmp_path, Schema.of(k="bigint", t="string"), "parquet")
    with pytest.raises(SchemaMismatchError, match=r"bad\.parquet") as caught:
        streams.read_arrow(ranges(streams))
    assert caught.value.column == "t"
    frame = streams.read(spark, ranges(streams))
    with pytest.raises(SchemaMismatchError, match=r"bad\.parquet"), translate_spark_errors():
        frame.toArrow()


# -- how much is read


def test_a_piece_of_a_large_parquet_file_reads_only_its_row_groups_and_columns(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random_ = Random(3)
    schema = Schema.of(k="bigint", wide="binary")
    rows = [{"k": k, "wide": random_.randbytes(2_000)} for k in range(2_000)]
    put(tmp_path, "a.parquet", parquet_bytes(schema, rows, row_group_size=100, compression="none"))
    monkeypatch.setattr("dagster_adjunct.resources.files.formats._MAX_WHOLE_BYTES", 0)
    streams = stream_of(lake, tmp_path, schema, "parquet")
    read = 0
    from dagster_adjunct.resources.files.tree import LocalTree

    original = LocalTree.read_range

    def counted(self: Any, file: Any, start: int, length: int) -> bytes:
        nonlocal read
        read += length
        return original(self, file, start, length)

    monkeypatch.setattr(LocalTree, "read_range", counted)
    found = streams.read_arrow(ranges(streams, 1_050, 1_060))
    assert found.column("wide").to_pylist() == [row["wide"] for row in rows[1_050:1_060]]
    assert read < 2.5 * 1024 * 1024  # a row group, and the read-ahead, of 4 MB
    read = 0
    assert streams.read_arrow(ranges(streams), ["k"]).column("k").to_pylist() == list(range(2_000))
    assert read < 5 * 1024 * 1024


@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_text_files_that_were_just_counted_are_not_parsed_again(
    lake: Lake, tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"k": k} for k in range(50)]
    put(tmp_path, "a", WRITERS[format](Schema.of(k="bigint"), rows))
    streams = stream_of(lake, tmp_path, Schema.of(k="bigint"), format)

    def refuse(*_: object, **__: object) -> Iterator[Any]:
        raise AssertionError("the file was parsed again")

    monkeypatch.setattr(f"dagster_adjunct.resources.files.formats.read_{format}", refuse)
    assert streams.read_arrow(ranges(streams, 10, 30)).column("k").to_pylist() == list(
        range(10, 30)
    )
    reading._counted.clear()
    with pytest.raises(AssertionError):
        streams.read_arrow(ranges(streams))


def test_counted_records_are_kept_up_to_a_limit(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_OF_A_FILE", 1_000)
    put(tmp_path, "a", WRITERS["jsonl"](Schema.of(k="bigint"), [{"k": k} for k in range(500)]))
    put(tmp_path, "b", WRITERS["jsonl"](Schema.of(k="bigint"), [{"k": k} for k in range(5)]))
    streams = stream_of(lake, tmp_path, Schema.of(k="bigint"), "jsonl")
    assert [key[1] for key in reading._counted] == ["b"]
    assert streams.read_arrow(ranges(streams)).num_rows == 505
