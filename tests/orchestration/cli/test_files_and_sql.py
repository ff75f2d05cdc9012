"""`adjunct stream append` and `adjunct sql`: files into a stream once, and queries out of the
lake.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagster_adjunct import Lake, LakeStreams, Schema, open_lake
from dagster_adjunct.assets.exchange import file_appends
from dagster_adjunct.assets.exchange.file_appends import append_files
from dagster_adjunct.errors import ConfigurationError, SchemaMismatchError, StreamNotFoundError
from dagster_adjunct.resources.streams.lake import append
from tests.orchestration.cli.commands import document, invoke, printed, refused
from tests.rounds import rounds

SCHEMA = Schema.of(k="string", n="bigint")


@dataclass
class World:
    lake: Lake
    folder: Path
    streams: LakeStreams

    def file(self, name: str, text: str | bytes) -> str:
        path = self.folder / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    def records(self, stream: str = "s") -> list[tuple[str, int]]:
        table = self.streams.read_arrow(self.streams.all_ranges(stream))
        return sorted((row["k"], row["n"]) for row in table.to_pylist())


@pytest.fixture
def world(tmp_path: Path) -> World:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    streams.create("s", schema=SCHEMA, key=["k"], partitions=4)
    return World(lake, tmp_path, streams)


CSV = "k,n\na,1\nb,2\n"
LINES = '{"k": "a", "n": 1}\n{"n": 2, "k": "b"}\n'


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"k": ["a", "b"], "n": pa.array([1, 2], pa.int64())}), sink)
    return bytes(sink.getvalue().to_pybytes())


FILES: dict[str, Callable[[], bytes]] = {
    "x.csv": CSV.encode,
    "x.CSV": CSV.encode,
    "x.csv.gz": lambda: gzip.compress(CSV.encode()),
    "x.csv.bz2": lambda: bz2.compress(CSV.encode()),
    "x.jsonl": LINES.encode,
    "x.ndjson": LINES.encode,
    "x.json": LINES.encode,
    "x.parquet": parquet,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_appended_once_in_the_format_of_its_name(name: str, world: World) -> None:
    path = world.file(name, FILES[name]())
    assert "2 records appended" in printed(world, "stream", "append", "s", path)
    for stream in ("s", "lake.s"):
        assert "its 2 records were appended before" in printed(
            world, "stream", "append", stream, path
        )
    assert world.records() == [("a", 1), ("b", 2)]


def test_records_are_hashed_to_partitions_as_those_of_other_appends(world: World) -> None:
    world.streams.create("other", schema=SCHEMA, key=["k"], partitions=4)
    records = [{"k": f"key {n}", "n": n} for n in range(40)]
    lines = "".join(f"{json.dumps(record)}\n" for record in records)
    printed(world, "stream", "append", "s", world.file("x.jsonl", lines))
    world.streams.append("other", records, producer="p", sequence=1)
    places = []
    for stream in ("s", "other"):
        table = world.streams.read_arrow(world.streams.all_ranges(stream))
        places.append(
            {(row["k"], row["__partition"], row["__offset"]) for row in table.to_pylist()}
        )
    assert places[0] == places[1]


def test_several_files_are_each_appended_once_and_equal_ones_together(world: World) -> None:
    one, two, same = (
        world.file("1.csv", CSV),
        world.file("2.csv", "k,n\nc,3\n"),
        world.file("3.csv", CSV),
    )
    found = document(world, "stream", "append", "s", one, two, same)
    assert [(item["appended"], item["same_as"]) for item in found["files"]] == [
        (2, None),
        (1, None),
        (0, one),
    ]
    renamed = str(Path(one).rename(world.folder / "4.csv"))
    assert document(world, "stream", "append", "s", renamed, two)["files"][0]["appended"] == 0
    assert world.records() == [("a", 1), ("b", 2), ("c", 3)]


def test_the_standard_input_is_appended_once_too(world: World) -> None:
    for _ in range(2):
        done = invoke(world, "stream", "append", "s", "-", "--format", "jsonl", input=LINES)
        assert done.exit_code == 0, done.exception
    assert world.records() == [("a", 1), ("b", 2)]
    error = invoke(world, "stream", "append", "s", "-", input=LINES).exception
    assert isinstance(error, ConfigurationError)
    assert error.setting == "--format"


def test_a_dry_run_checks_and_appends_nothing(world: World) -> None:
    path = world.file("x.csv", CSV)
    found = document(world, "stream", "append", "s", path, "--dry-run")
    assert (found["dry_run"], found["files"][0]["appended"]) == (True, 2)
    assert world.records() == []
    printed(world, "stream", "append", "s", path)
    assert document(world, "stream", "append", "s", path, "--dry-run")["files"][0]["appended"] == 0


MISTAKES: dict[str, tuple[str, str, int | None, str | None]] = {
    "a value of another type": ("x.csv", "k,n\na,1\nb,two\n", 3, "n"),
    "a value of another type in JSON": (
        "x.jsonl",
        '{"k": "a", "n": 1}\n{"k": "b", "n": "2"}\n',
        2,
        "n",
    ),
    "a column too few": ("x.csv", "k\na\n", None, "n"),
    "a column too many": ("x.csv", "k,n,m\na,1,2\n", None, "m"),
    "a line that is too short": ("x.csv", "k,n\na,1\nb\n", 3, None),
    "no JSON": ("x.jsonl", '{"k": "a", "n": 1}\n{"k"\n', 2, None),
    "nothing": ("x.csv", "", 1, None),
    "no Parquet": ("x.parquet", "k,n\n", None, None),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_any_file_appends_nothing_and_names_file_and_line(
    name: str, world: World
) -> None:
    file, text, line, column = MISTAKES[name]
    good, bad = world.file("good.csv", CSV), world.file(file, text)
    error = invoke(world, "stream", "append", "s", good, bad).exception
    assert isinstance(error, SchemaMismatchError)
    assert (error.file, error.line) == (bad, line)
    assert column is None or error.column == column
    assert world.records() == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_file_with_former_names_is_refused_with_those_of_now(tmp_path: Path, name: str) -> None:
    streams = LakeStreams(open_lake(tmp_path / "lake"))
    columns = Schema.of(k="string", limit="bigint", meta={"rev": "bigint"})
    streams.create("s", schema=columns, key=["k"], partitions=1)
    streams.change_columns("s", renamed={"limit": "bounds", "meta.rev": "revision"})
    record = {"k": "a", "limit": 1, "meta": {"rev": 2}}
    file = tmp_path / name
    if name.endswith("jsonl"):
        file.write_text(json.dumps(record))
    else:
        pq.write_table(pa.Table.from_pylist([record], columns.to_arrow()), file)
    with pytest.raises(SchemaMismatchError) as caught:
        append_files(streams.lake, "s", [file])
    assert "limit was renamed to bounds" in caught.value.next_step


def test_what_can_not_be_appended_to_is_refused_by_name(world: World) -> None:
    path = world.file("x.csv", CSV)
    assert "system 'kafka'" in refused(world, "stream", "append", "kafka.scans", path)
    assert isinstance(
        invoke(world, "stream", "append", "nope", path).exception, StreamNotFoundError
    )
    for absent in (world.folder / "nothing.csv", world.folder):
        assert isinstance(
            invoke(world, "stream", "append", "s", str(absent)).exception, ConfigurationError
        )
    unknown = world.file("x.txt", CSV)
    assert "--format" in refused(world, "stream", "append", "s", unknown)
    assert "2 records appended" in printed(
        world, "stream", "append", "s", unknown, "--format", "csv"
    )


def test_values_of_sensitive_columns_are_not_in_errors(world: World) -> None:
    world.streams.create("t", schema=SCHEMA.with_sensitive("n"), key=["k"], partitions=1)
    assert "secret" not in refused(
        world, "stream", "append", "t", world.file("x.csv", "k,n\na,secret\n")
    )


@pytest.mark.parametrize("appended", range(4))
def test_an_interrupted_append_goes_on_with_the_next_part(
    appended: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_appends, "PART", 2)
    path = Path(world.file("x.csv", "k,n\n" + "".join(f"k{n},{n}\n" for n in range(7))))
    appends, calls = LakeStreams.append, []

    def killed(self: LakeStreams, *args: object, **more: object) -> object:
        if len(calls) == appended:
            raise KeyboardInterrupt
        calls.append(more["sequence"])
        return appends(self, *args, **more)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(LakeStreams, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            append_files(world.lake, "s", [path])
    (done,) = append_files(world.lake, "s", [path])
    assert (done.records, done.appended) == (7, 7 - 2 * appended)
    assert world.records() == [(f"k{n}", n) for n in range(7)]


@pytest.mark.lengthy
def test_a_file_of_more_parts_than_a_stream_remembers_is_appended_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_appends, "PART", 1)
    path = Path(world.file("x.csv", "k,n\n" + "".join(f"k{n:02},{n}\n" for n in range(40))))
    for appended in (40, 0):
        assert append_files(world.lake, "s", [path])[0].appended == appended
    assert len(world.records()) == 40


def test_many_files_make_a_stream_forget_no_other_producer(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(append, "PRODUCERS", 8)
    monkeypatch.setattr(append, "FILE_PRODUCERS", 4)
    world.streams.append("s", [{"k": "app", "n": 0}], producer="application", sequence=1)
    for number in range(append.PRODUCERS + 1):
        append_files(world.lake, "s", [Path(world.file("x.csv", f"k,n\nf,{number}\n"))])
    assert world.streams.append(
        "s", [{"k": "app", "n": 0}], producer="application", sequence=1
    ).duplicate
    producers = world.streams.state("s").state.producers
    assert len(producers) == append.FILE_PRODUCERS + 1
    for number in range(append.PRODUCERS + 1):
        world.streams.append("s", [{"k": "q", "n": 0}], producer=f"p{number}", sequence=1)
    again = append_files(
        world.lake, "s", [Path(world.file("x.csv", f"k,n\nf,{append.PRODUCERS}\n"))]
    )
    assert again[0].appended == 0, "nor do other producers push out files"


def test_a_table_a_list_and_files_have_the_same_rows(world: World) -> None:
    printed(world, "stream", "append", "s", world.file("x.csv", CSV))
    query = 'select k, n from "lake.s" order by k'
    assert printed(world, "sql", query).count("│ a │ 1 │") == 1
    expected = [{"k": "a", "n": 1}, {"k": "b", "n": 2}]
    assert document(world, "sql", query) == expected
    assert (
        json.loads(printed(world, "sql", query, "--format", "json", "--limit", "1")) == expected[:1]
    )
    assert list(csv.DictReader(printed(world, "sql", query, "--format", "csv").splitlines())) == [
        {"k": "a", "n": "1"},
        {"k": "b", "n": "2"},
    ]
    for form in ("csv", "json", "parquet"):
        target = world.folder / f"out.{form}"
        printed(world, "sql", query, "--format", form, "--output", str(target))
        assert "exists" in refused(world, "sql", query, "--format", form, "--output", str(target))
    assert pq.read_table(world.folder / "out.parquet").to_pylist() == expected
    assert json.loads((world.folder / "out.json").read_text()) == expected


def test_a_table_says_that_there_are_more_rows(world: World) -> None:
    assert "the first 100 rows; there are more" in printed(world, "sql", "from range(101)")
    assert "100 rows" in printed(world, "sql", "from range(100)")


def test_a_query_comes_from_the_standard_input(world: World) -> None:
    done = invoke(world, "sql", "-", "--json", input="select 1 as one, 2 as one")
    assert json.loads(done.output) == [{"one": 1, "one_1": 2}]


def test_formats_that_need_a_file_or_can_not_hold_values_are_refused(world: World) -> None:
    assert "--output" in refused(world, "sql", "select 1", "--format", "parquet")
    assert "--format" in refused(world, "sql", "select 1", "--output", str(world.folder / "x.csv"))
    target = world.folder / "nested.csv"
    assert "json or parquet" in refused(
        world, "sql", "select [1] a", "--format", "csv", "--output", str(target)
    )
    assert not target.exists(), "nothing is left of a file that could not be written"


TEXTS = st.one_of(
    st.none(), st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=5)
)


@pytest.mark.lengthy
@pytest.mark.rounds
@settings(max_examples=rounds(30, 100))
@given(
    st.lists(st.tuples(TEXTS, st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1))), max_size=5)
)
def test_csv_that_a_query_writes_is_what_an_append_reads(
    rows: list[tuple[str | None, int | None]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = open_lake(Path(folder) / "lake")
        world = World(lake, Path(folder), LakeStreams(lake))
        for name in ("written", "read"):
            world.streams.create(name, schema=SCHEMA, key=[], partitions=1)
        world.streams.append(
            "written", [{"k": k, "n": n} for k, n in rows], producer="p", sequence=1
        )
        target = str(world.folder / "x.csv")
        printed(
            world, "sql", "select k, n from lake.written", "--format", "csv", "--output", target
        )
        printed(world, "stream", "append", "read", target)
        found = [
            world.streams.read_arrow(world.streams.all_ranges(name)).select(["k", "n"]).to_pylist()
            for name in ("written", "read")
        ]
    assert found[0] == found[1]


def test_errors_are_one_json_document(world: World) -> None:
    error = document(world, "sql", "from nothing", code=1)["error"]
    assert error["type"] == "DatasetNotFoundError"


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress], ids=["gz", "bz2"])
def test_a_compressed_copy_of_a_file_is_the_same_file(
    world: World, compress: Callable[[bytes], bytes]
) -> None:
    suffix = "gz" if compress is gzip.compress else "bz2"
    files = [world.file("a.csv", CSV), world.file(f"b.csv.{suffix}", compress(CSV.encode()))]
    invoke(world, "stream", "append", "s", files[0])
    assert document(world, "stream", "append", "s", files[1])["files"][0]["appended"] == 0
    assert world.records() == [("a", 1), ("b", 2)]


def test_a_file_that_is_named_twice_is_counted_once_by_a_dry_run(world: World) -> None:
    file = world.file("a.csv", CSV)
    done = append_files(world.lake, "s", [Path(file), Path(file)], dry_run=True)
    assert [each.appended for each in done] == [2, 0]


def test_a_json_line_without_the_key_is_refused_and_a_null_one_is_not(world: World) -> None:
    file = world.file("a.jsonl", '{"k": null, "n": 1}\n\n{"n": 2}\n')
    with pytest.raises(SchemaMismatchError) as caught:
        append_files(world.lake, "s", [Path(file)])
    assert (caught.value.column, caught.value.line, caught.value.file) == ("k", 3, file)
    append_files(world.lake, "s", [Path(world.file("b.jsonl", '{"k": null, "n": 1}\n'))])
    table = world.streams.read_arrow(world.streams.all_ranges("s"))
    assert table.column("k").to_pylist() == [None]


def test_the_standard_input_is_named_once(world: World) -> None:
    error = invoke(world, "stream", "append", "s", "-", "-", "--format", "csv", input=CSV).exception
    assert isinstance(error, ConfigurationError)
    assert error.argument == "FILE"
    assert world.records() == []


def test_columns_are_renamed_and_dropped_on_the_command_line(world: World) -> None:
    world.streams.append("s", [{"k": "a", "n": 1}], producer="p", sequence=0)
    change = ("stream", "change-columns", "s", "--rename", "n=number")
    assert document(world, *change, "--dry-run")["dry_run"]
    assert world.streams.info("s").schema == SCHEMA
    assert document(world, *change)["changes"] == ["n is renamed to number"]
    assert document(world, *change)["changes"] == []
    assert world.streams.info("s").schema == Schema.of(k="string", number="bigint")
    for wrong in ("n", "=n", "n=", "other=m"):
        refused(world, "stream", "change-columns", "s", "--rename", wrong)
    refused(world, "stream", "change-columns", "s", "--drop", "k")
    printed(world, "stream", "change-columns", "s", "--drop", "number", "--yes")
    assert world.streams.info("s").schema == Schema.of(k="string")
