"""What becomes of files that are not as expected: an error by name, or set aside and counted."""

from __future__ import annotations

import os
import shlex
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams import reading
from dagster_adjunct.resources.file_streams.folder import (
    FileRules,
    FolderFeed,
    FolderStreams,
    _describe_change,
    file_stream,
)
from dagster_adjunct.resources.file_streams.log import AdmittedFile
from dagster_adjunct.resources.file_streams.overview import list_files
from dagster_adjunct.resources.files.columns import ColumnRules
from dagster_adjunct.resources.files.tree import ListedFile, open_tree
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import OffsetRange
from dagster_adjunct.resources.times import to_microseconds
from tests.resources.file_streams.landing import (
    CLICKS,
    Landing,
    LocalLanding,
    clicks,
    counts,
    lines,
    look,
    numbers,
    offsets,
    problems,
)
from tests.resources.file_streams.table_lab import forget_declarations


@pytest.mark.parametrize(
    ("now", "how"), [(lines(7, 8, 9), "grown"), (lines(), "shrunk"), (lines(8), "written again")]
)
def test_a_file_that_was_overwritten_is_an_error_by_name(
    either: Landing, lake: Lake, now: bytes, how: str
) -> None:
    system = clicks(either, lake)
    either.put("a b", lines(7))
    assert look(system) == [7]
    either.put("a b", now)
    with pytest.raises(errors.AdmittedFileError, match=how) as caught:
        system.admit("clicks")
    assert caught.value.rule == "changed"
    assert caught.value.file == f"{either.url}/a b"
    assert caught.value.stream == "files.clicks"
    assert caught.value.problem.startswith(f"stream files.clicks: {either.url}/a b ")
    assert "adjunct stream set-aside files.clicks 'a b'" in caught.value.next_step
    with pytest.raises(errors.AdmittedFileError, match=how) as caught:
        FolderStreams(lake).waiting("clicks")
    assert "adjunct stream set-aside files.clicks 'a b'" in caught.value.next_step
    with pytest.raises(errors.AdmittedFileError) as caught:
        numbers(system)
    assert caught.value.rule == "lost"
    assert caught.value.problem.startswith("stream files.clicks: ")
    # What it says helps: the new contents are not admitted. The old ones are gone, and are left out
    # by a second command only.
    system.set_aside("clicks", "a b", reason="overwritten by mistake")
    either.put("c", lines(1))
    system.admit("clicks")
    with pytest.raises(errors.AdmittedFileError) as caught:
        numbers(system)
    assert caught.value.rule == "lost"
    assert system.set_aside("clicks", "a b", reason="its first contents are gone").rows == 1
    assert look(system) == [1]
    assert offsets(system) == {1: 1}
    # Delivered again, it is admitted.
    either.put("a b", lines(70))
    assert look(system) == [1, 70]


def test_what_was_admitted_before_a_file_was_overwritten_stays(
    s3_landing: Landing, lake: Lake
) -> None:
    system = clicks(s3_landing, lake)
    s3_landing.put("a", lines(7, 8))
    assert look(system) == [7, 8]
    s3_landing.put("a", lines(9))
    assert system.set_aside("clicks", "a", reason="overwritten by mistake").rows == 0
    s3_landing.put("a", lines(7, 8))  # restored, with its first ETag
    assert look(system) == [7, 8]
    assert system.upcoming([CLICKS]) == {CLICKS: "2"}


def test_the_error_of_a_file_that_was_touched_says_how_to_undo_it(
    landing: LocalLanding, lake: Lake
) -> None:
    system = clicks(landing, lake)
    landing.put("a b", lines(7))
    assert look(system) == [7]
    os.utime(landing.root / "a b", ns=(0, 1_700_000_000_000_000_001))
    with pytest.raises(errors.AdmittedFileError) as caught:
        system.admit("clicks")
    assert caught.value.rule == "changed"
    command = shlex.split(caught.value.next_step.split("set it back: ")[1])[:4]
    subprocess.run([*command[:3], command[3].removesuffix(".")], check=True)
    assert look(system) == [7]


@pytest.mark.parametrize("now", [lines(8), lines(7, 8)])
def test_a_file_that_was_replaced_can_not_be_had_back_by_touching_it(
    landing: LocalLanding, lake: Lake, now: bytes
) -> None:
    system = clicks(landing, lake)
    landing.put("a", lines(7))
    look(system)
    landing.put("a", now)
    with pytest.raises(errors.AdmittedFileError) as caught:
        system.admit("clicks")
    assert "touch" not in caught.value.next_step


def test_the_error_of_a_file_that_was_replaced_with_its_time_says_what_differs(
    landing: LocalLanding, lake: Lake
) -> None:
    system = clicks(landing, lake)
    landing.put("a", lines(7), modified=1_700_000_000)
    before = (landing.root / "a").stat().st_ino
    assert look(system) == [7]
    landing.put("a", lines(8), modified=1_700_000_000)
    now = (landing.root / "a").stat().st_ino
    with pytest.raises(errors.AdmittedFileError, match=f"inode is {now}, and was {before}"):
        system.admit("clicks")
    os.utime(landing.root / "a", ns=(0, 1_700_000_000_000_000_001))
    with pytest.raises(errors.AdmittedFileError, match=r"differs by \+0\.000000001 seconds"):
        system.admit("clicks")


def test_an_object_that_was_replaced_within_a_second_is_told_by_its_etag() -> None:
    at = datetime(2026, 11, 30, tzinfo=UTC)
    tree = open_tree("s3://bucket/in")
    admitted = AdmittedFile("a", 9, "before", to_microseconds(at), 1)
    found = _describe_change(tree, ListedFile("a", 9, "now", at), admitted)
    assert "its ETag is now, and was before" in found


def test_a_file_that_is_moved_back_is_the_admitted_one(landing: LocalLanding, lake: Lake) -> None:
    system = clicks(landing, lake)
    landing.put("a", lines(7))
    assert look(system) == [7]
    (landing.root / "a").rename(landing.root / "_kept")
    landing.put("a", lines(8, 9))
    with pytest.raises(errors.AdmittedFileError):
        system.admit("clicks")
    with pytest.raises(errors.AdmittedFileError, match="Move the file back"):
        numbers(system)
    (landing.root / "_kept").rename(landing.root / "a")
    assert look(system) == [7]


def test_contents_that_changed_may_be_ignored_or_appended(
    landing: LocalLanding, lake: Lake
) -> None:
    landing.put("a", lines(1))
    system = clicks(landing, lake, rules=FileRules(changed="append"))
    assert look(system) == [1]
    landing.put("a", lines(1, 2))
    system.admit("clicks")
    assert system.upcoming([CLICKS]) == {CLICKS: "3"}
    assert numbers(system, 1) == [1, 2]
    system.set_aside("clicks", "a", reason="its first contents are gone")
    assert offsets(system) == {1: 1, 2: 2}
    assert counts(system) == {"set aside": 1}


def test_ignored_changes_are_counted_once_each(landing: LocalLanding, lake: Lake) -> None:
    landing.put("a", lines(1))
    system = clicks(landing, lake, rules=FileRules(changed="ignore"))
    assert look(system) == [1]
    for number in (2, 3):
        landing.put("a", lines(number, number))
        for _ in range(2):
            system.admit("clicks")
    assert system.upcoming([CLICKS]) == {CLICKS: "1"}
    assert counts(system) == {"changed": 2}


def test_damaged_files_are_errors_or_set_aside_until_they_are_delivered_again(
    landing: LocalLanding, lake: Lake
) -> None:
    landing.put("a", lines(1), modified=1_700_000_000)
    landing.put("b", b'{"n": 1}\n{"n": "x"}\n')
    system = clicks(landing, lake)
    with pytest.raises(errors.SchemaMismatchError, match="line 2") as caught:
        system.admit("clicks")
    assert caught.value.file == f"{landing.url}/b"
    assert "set-aside files.clicks b" in caught.value.next_step
    system.set_aside("clicks", "b", reason="truncated")
    assert look(system) == [1]
    assert problems(system) == {"b": "set aside"}
    landing.put("b", lines(2))
    assert look(system) == [1, 2]


def test_a_field_that_is_not_declared_leads_to_the_rules_for_columns(
    landing: LocalLanding, lake: Lake
) -> None:
    system = clicks(landing, lake)
    landing.put("a", b'{"n": 1, "other": 2}')
    with pytest.raises(errors.SchemaMismatchError) as caught:
        system.admit("clicks")
    assert caught.value.column == "other"
    assert "add 'other' to the schema" in caught.value.next_step
    assert "renamed={'other': NAME}" in caught.value.next_step
    assert 'undeclared="ignore"' in caught.value.next_step
    assert not caught.value.problem.startswith(":")


def test_a_column_that_is_not_declared_may_be_declared(tmp_path: Path, lake: Lake) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    pq.write_table(pa.table({"n": [1], "other": [2]}), folder / "a.parquet")
    file_stream("clicks", str(folder), format="parquet", schema="n bigint")
    with pytest.raises(errors.SchemaMismatchError) as caught:
        FolderStreams(lake).admit("clicks")
    assert "add 'other' to the schema" in caught.value.next_step


def test_narrower_types_of_parquet_are_widened(tmp_path: Path, lake: Lake) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    pq.write_table(pa.table({"n": pa.array([1, None], pa.int32())}), folder / "a.parquet")
    file_stream("clicks", str(folder), format="parquet", schema="n bigint")
    assert look(FolderStreams(lake)) == [1, None]


def test_a_run_that_looks_says_once_what_was_set_aside(
    landing: LocalLanding, lake: Lake, caplog: pytest.LogCaptureFixture
) -> None:
    system = clicks(landing, lake, rules=FileRules(damaged="set-aside"))
    landing.put("a", lines(1))
    landing.put("b", b"{")
    system.snapshot("clicks")
    assert "files.clicks: 1 file(s) set aside (damaged)" in caplog.text
    caplog.clear()
    landing.put("c", lines(2))
    system.snapshot("clicks")
    assert caplog.text == ""


def test_damaged_and_empty_files_are_set_aside_as_declared(
    landing: LocalLanding, lake: Lake
) -> None:
    system = clicks(landing, lake, rules=FileRules(damaged="set-aside"))
    landing.put("damaged", b"{")
    landing.put("undeclared", b'{"m": 1}\n')
    landing.put("empty", b"")
    landing.put("blank", b"\n\n")
    landing.put("good", lines(1))
    assert look(system) == [1]
    assert problems(system) == {
        "damaged": "damaged",
        "undeclared": "damaged",
        "empty": "empty",
        "blank": "empty",
    }
    assert counts(system) == {"damaged": 2, "empty": 2}
    for name in ("damaged", "empty"):
        landing.put(name, lines(len(name)))
    assert sorted(look(system)) == [1, 5, 7]
    assert counts(system) == {"damaged": 2, "empty": 2}


def test_files_with_columns_that_are_declared_later_are_admitted_by_a_look_at_all(
    landing: LocalLanding, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = FileRules(damaged="set-aside")
    system = clicks(landing, lake, rules=rules)
    landing.put("grown", b'{"n": 1, "more": "x"}\n')
    landing.put("damaged", b"{")
    landing.put("good", lines(2))
    assert look(system) == [2]
    system.admit("clicks", all_files=True)
    assert counts(system) == {"damaged": 2}
    forget_declarations(monkeypatch)
    schema = "n bigint, more string"
    file_stream("clicks", landing.url, format="jsonl", schema=schema, rules=rules)
    system = FolderStreams(lake)
    assert look(system) == [2]
    system.admit("clicks", all_files=True)
    assert sorted(look(system)) == [1, 2]
    admitted = system.admit("clicks", all_files=True)
    assert system.admit("clicks", all_files=True) == admitted
    assert sorted(look(system)) == [1, 2]


@pytest.mark.parametrize("data", [b"", b"\n"])
def test_empty_files_may_be_errors_or_admitted(
    landing: LocalLanding, lake: Lake, data: bytes
) -> None:
    landing.put("a", data)
    system = clicks(landing, lake, rules=FileRules(empty="fail"))
    with pytest.raises(errors.AdmittedFileError) as caught:
        system.admit("clicks")
    assert caught.value.rule == "empty"
    declared = system.declaration("clicks").model_copy(update={"rules": FileRules(empty="admit")})
    system.declaration = lambda stream: declared  # type: ignore[method-assign]
    assert look(system) == []
    assert problems(system) == {}


def test_late_files_follow_their_rule(landing: LocalLanding, lake: Lake) -> None:
    landing.put("b", lines(1))
    rules = FileRules(late="set-aside")
    system = clicks(landing, lake, listing="after-last", rules=rules)
    assert look(system) == [1]
    landing.put("a", lines(2))
    assert look(system, all_files=True) == [1]
    assert problems(system) == {"a": "late"}
    declared = system.declaration("clicks").model_copy(update={"rules": FileRules(late="fail")})
    system.declaration = lambda stream: declared  # type: ignore[method-assign]
    landing.put("a2", lines(2))
    assert look(system) == [1]
    with pytest.raises(errors.AdmittedFileError) as caught:
        system.admit("clicks", all_files=True)
    assert caught.value.rule == "late"
    assert caught.value.file == f"{landing.url}/a2"


def test_a_file_that_vanished_after_it_was_admitted_is_an_error_that_helps(
    either: Landing, lake: Lake
) -> None:
    system = clicks(either, lake)
    for name, number in (("a", 1), ("b", 2)):
        either.put(name, lines(number, number))
    assert sorted(look(system)) == [1, 1, 2, 2]
    either.delete("a")
    with pytest.raises(errors.AdmittedFileError, match="is gone") as caught:
        numbers(system)
    suggested = "adjunct stream set-aside files.clicks a --reason"
    assert suggested in caught.value.next_step
    span = OffsetRange("0", "4")
    with pytest.raises(errors.AdmittedFileError, match="is gone") as caught:
        list(system.task_reads({CLICKS: span}, ["n"])(0))
    assert suggested in caught.value.next_step
    assert caught.value.stream == "files.clicks"
    before = system.set_aside("clicks", "a", reason="deleted by its owner")
    assert (before.path, before.rows) == ("a", 2)
    assert system.set_aside("clicks", "a", reason="again").path == "a"
    assert numbers(system) == [2, 2]
    assert system.upcoming([CLICKS]) == {CLICKS: "4"}
    assert counts(system) == {"set aside": 1}


def test_lost_files_are_left_out_where_that_is_declared(either: Landing, lake: Lake) -> None:
    system = clicks(either, lake, rules=FileRules(lost="set-aside", changed="ignore"))
    for number, name in enumerate("abc"):
        either.put(name, lines(number))
    look(system)
    view = system.snapshot("clicks")
    either.delete("a")
    either.put("b", lines(10, 11))
    assert numbers(view) == [2]
    assert numbers(view) == [2]
    assert look(system) == [2]
    assert counts(system) == {"lost": 2, "changed": 1}
    # Whatever is lost at once is rather a disk that is not there.
    either.delete("b")
    either.delete("c")
    if isinstance(either, LocalLanding):
        either.root.rename(f"{either.root} elsewhere")
    with pytest.raises(errors.AdmittedFileError) as caught:
        numbers(system)
    assert caught.value.url == either.url
    assert counts(system) == {"lost": 2, "changed": 1}


def test_a_file_that_changes_while_it_is_examined_is_admitted_by_the_next_look(
    landing: LocalLanding, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagster_adjunct.resources.file_streams.reading import FileReader

    system = clicks(landing, lake, listing="after-last")
    for number, name in enumerate("abc"):
        landing.put(name, lines(number))
    count = FileReader.count
    meanwhile = {"a": lambda: landing.delete("a"), "b": lambda: landing.put("b", lines(7, 8))}

    def counted(reader: Any, file: Any) -> int:
        meanwhile.pop(file.path, lambda: None)()
        return count(reader, file)

    monkeypatch.setattr(FileReader, "count", counted)
    assert look(system) == [2]
    assert look(system) == [2, 7, 8]
    landing.put("a", lines(9))
    # It had never been there: its name is an old one.
    assert look(system, all_files=True) == [2, 7, 8, 9]
    assert problems(system) == {}


@pytest.mark.parametrize("start", [0, 3])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_file_that_changes_while_it_is_read_is_an_error(
    landing: LocalLanding, lake: Lake, monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    system = clicks(landing, lake)
    landing.put("a", lines(*range(10)))
    look(system)
    tables = FolderFeed.tables

    def read(feed: FolderFeed, piece: Any, columns: Any) -> Any:
        for found in tables(feed, piece, columns):
            landing.put("a", lines(*range(10, 20)))
            yield found

    monkeypatch.setattr(FolderFeed, "tables", read)
    span = OffsetRange(str(start), str(10 - start))
    with pytest.raises(errors.AdmittedFileError):
        system.read_arrow({CLICKS: span})


def test_pages_of_a_parquet_file_that_are_damaged_are_an_error_that_helps(
    tmp_path: Path, lake: Lake
) -> None:
    from dagster_adjunct.resources.file_streams.folder import FolderStreams

    path = tmp_path / "p" / "a.parquet"
    path.parent.mkdir()
    damage_page(path)
    file_stream("clicks", str(path.parent), format="parquet", schema="n bigint")
    system = FolderStreams(lake)
    assert system.admit("clicks").next == 1000
    with pytest.raises(errors.AdmittedFileError) as caught:
        numbers(system)
    assert caught.value.rule == "damaged"
    assert "set-aside files.clicks a.parquet" in caught.value.next_step
    system.set_aside("clicks", "a.parquet", reason="damaged")
    assert numbers(system) == []


def damage_page(path: Path) -> None:
    """Write a Parquet file of 1,000 numbers with an intact footer and a damaged page."""
    table = pa.table({"n": pa.array([*range(1000)])})
    pq.write_table(table, path, write_page_checksum=True, compression="none")
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)


def test_files_whose_values_can_not_be_read_are_set_aside_before_they_are_admitted(
    tmp_path: Path, lake: Lake
) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    damage_page(folder / "page.parquet")
    year_14645 = pa.array([0, 400_000_000_000_000_000], pa.timestamp("us", "UTC"))
    pq.write_table(pa.table({"t": year_14645}), folder / "year.parquet")
    pq.write_table(pa.table({"n": [1, 2], "t": year_14645.take([0, 0])}), folder / "good.parquet")
    file_stream(
        "clicks",
        str(folder),
        format="parquet",
        schema="n bigint, t timestamp",
        rules=FileRules(damaged="set-aside"),
        column_rules=ColumnRules(missing="null"),
    )
    system = FolderStreams(lake)
    assert sorted(look(system)) == [1, 2]
    assert problems(system) == {"page.parquet": "damaged", "year.parquet": "damaged"}
    listed = {file["file"]: file for file in list_files(system, "clicks", problems=True)}
    assert "year.parquet: column 't' of row 2" in listed["year.parquet"]["problem"]
    pq.write_table(pa.table({"n": [3]}), folder / "page.parquet")
    assert sorted(look(system)) == [1, 2, 3]


def test_a_value_of_avro_that_does_not_fit_sets_its_file_aside(tmp_path: Path, lake: Lake) -> None:
    schema = {"type": "long", "logicalType": "timestamp-micros"}
    record = {"type": "record", "name": "r", "fields": [{"name": "t", "type": schema}]}
    for name, values in (("bad", [1, 2**62]), ("good", [1])):
        with (tmp_path / name).open("wb") as file:
            fastavro.writer(file, fastavro.parse_schema(record), [{"t": t} for t in values])
    rules = FileRules(damaged="set-aside")
    file_stream("clicks", str(tmp_path), format="avro", schema="t timestamp", rules=rules)
    system = FolderStreams(lake)
    assert system.admit("clicks").next == 1
    assert problems(system) == {"bad": "damaged"}


@pytest.mark.parametrize("when", ["admission", "read"])
@pytest.mark.parametrize("error", [MemoryError(), pa.ArrowMemoryError("malloc of size 2147483647")])
def test_a_file_that_asks_for_too_much_memory_is_named_and_can_be_set_aside(
    when: str, error: MemoryError, tmp_path: Path, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "p"
    folder.mkdir()
    pq.write_table(pa.table({"n": pa.array([1, 2, 3])}), folder / "a file.parquet")
    pq.write_table(pa.table({"n": pa.array([4])}), folder / "b.parquet")
    rules = FileRules(damaged="set-aside")  # it may not be damaged
    file_stream("clicks", str(folder), format="parquet", schema="n bigint", rules=rules)
    system = FolderStreams(lake)
    if when == "read":
        assert system.admit("clicks").next == 4
        reading._counted.clear()  # as in another process
    method = "__init__" if when == "admission" else "iter_batches"
    make = getattr(pq.ParquetFile, method)

    def too_large(self: pq.ParquetFile, *given: Any, **options: Any) -> Any:
        made = make(self, *given, **options)
        if self.metadata.num_rows == 3:
            raise error
        return made

    def read() -> list[int]:
        system.admit("clicks")
        return numbers(system)

    monkeypatch.setattr(pq.ParquetFile, method, too_large)
    for _ in range(2):
        with pytest.raises(errors.AdmittedFileError) as caught:
            read()
        assert (caught.value.file, caught.value.stream) == ("a file.parquet", "files.clicks")
        assert "set-aside files.clicks 'a file.parquet' --reason" in caught.value.next_step
    system.set_aside("clicks", "a file.parquet", reason="a length in it is damaged")
    assert read() == [4]


def test_nothing_that_is_not_there_is_set_aside(landing: LocalLanding, lake: Lake) -> None:
    system = clicks(landing, lake)
    for _ in range(2):
        with pytest.raises(errors.ConfigurationError, match="'nothing'"):
            system.set_aside("clicks", "nothing", reason="a typo")
        system.admit("clicks")


def test_files_in_pages_are_set_aside_too(
    landing: LocalLanding, lake: Lake, small_pages: None
) -> None:
    system = clicks(landing, lake)
    for number in range(10):
        landing.put(f"{number}", lines(number), modified=1_700_000_000 + number)
        system.admit("clicks")
    for number in (3, 9, 0):
        landing.delete(f"{number}")
        system.set_aside("clicks", f"{number}", reason="gone")
    assert numbers(system) == [1, 2, 4, 5, 6, 7, 8]
    assert counts(system) == {"set aside": 3}
    # Times of what is left out begin at what follows.
    at = (1_700_000_000 + 3) * 1000
    assert system.offset_for_timestamp(CLICKS, at) == "4"


def test_the_log_reads_pages_in_many_threads(
    landing: LocalLanding, lake: Lake, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from cachetools import LRUCache

    from dagster_adjunct.resources.file_streams import log

    system = clicks(landing, lake)
    for number in range(100):
        landing.put(f"{number:03}", lines(number), modified=1_700_000_000 + number)
    state = system.admit("clicks")
    assert len(state.pages) == 25
    cache = log._read_files.cache  # type: ignore[attr-defined]
    assert isinstance(cache, LRUCache)
    monkeypatch.setattr(cache, "_LRUCache__maxsize", 3, raising=False)
    files = system.file_log("clicks")

    def paths(_: int) -> list[str]:
        return [file.path for file in files.files(state)]

    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(paths, range(100)):
            assert found == [f"{number:03}" for number in range(100)]


def test_only_pages_that_may_have_the_files_are_read(
    landing: LocalLanding, lake: Lake, small_pages: None
) -> None:
    system = clicks(landing, lake)
    for number in range(40):
        landing.put(f"{number:03}", lines(number), modified=1_700_000_000 + number)
    state = system.admit("clicks")
    files = system.file_log("clicks")
    assert len(state.pages) == 10
    assert set(files.among(state, ["005", "006", "999"])) == {"005", "006"}
    read = [*files._pages_with(state, ["005", "006", "999"])]
    assert [len(page) for page in read] == [4, 0]
    assert all(isinstance(file, AdmittedFile) for page in read for file in page)
