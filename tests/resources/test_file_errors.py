"""A disk that is full, or may not be written: an error that says so wherever files are written,
and nothing is lost.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.errors import PythonException

from dagster_adjunct import (
    IN_PROCESS,
    Lake,
    LakeStreams,
    Schema,
    advance_dataset,
    bounded_dataset,
    open_dataset,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.maintenance import compact_dataset, erase_keys, rebuild_dataset
from dagster_adjunct.orchestration.cli.streams import export_records
from dagster_adjunct.repartitioning import repartition_dataset, repartition_stream
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    StoreUnavailableError,
    TableAccessError,
    TransientError,
    file_error,
    translate_file_errors,
)
from dagster_adjunct.resources.files.tree import ListedFile, open_tree
from dagster_adjunct.resources.spark.tasks import find_adjunct_error
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.sources import FileSource
from tests.resources.table_backends.every_type import blocking

SCHEMA = Schema.of(k="string", n="bigint")
WHY = {"reason": "a test", "by": "me"}
BOUNDED = bounded_dataset("b", input="lake.a", key="k", partitions=1)
FOLLOWED = unbounded_dataset("u", input="lake.c", key="k", partitions=1)


def rows(first: int, count: int) -> pa.Table:
    numbers = np.random.default_rng(first).integers(0, 2**62, count)
    return pa.table(
        {"k": [f"{first + number:08}" for number in range(count)], "n": pa.array(numbers)}
    )


@contextmanager
def no_room(bytes_a_file: int = 30_000) -> Iterator[None]:
    """Let no file grow further, as on a disk that is full: small metadata still have room, data
    files have not.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO])
def test_a_full_or_failing_disk_may_pass(number: int) -> None:
    with pytest.raises(StoreUnavailableError) as reported, translate_file_errors("/data", "it"):
        raise OSError(number, "what the library says")
    assert isinstance(reported.value.__cause__, OSError)
    assert reported.value.__cause__.errno == number
    assert isinstance(reported.value, TransientError)
    assert reported.value.url == "/data"


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ENOENT]
)
def test_what_the_file_system_refuses_is_to_be_changed(number: int) -> None:
    reported = file_error(OSError(number, "what the library says"), "/data", "it")
    assert isinstance(reported, ConfigurationError)
    assert (reported.url, os.strerror(number) in reported.problem) == ("/data", True)


Written = Callable[[Lake, LakeStreams], Any]
WRITERS: dict[str, Written] = {
    "append": lambda lake, streams: streams.append("a", rows(0, 20_000), producer="q", sequence=1),
    "bounded": lambda lake, streams: advance_dataset(
        BOUNDED, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me"
    ),
    "bootstrap": lambda lake, streams: advance_dataset(
        FOLLOWED, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me"
    ),
}
LATER: dict[str, Written] = {
    "changes": lambda lake, streams: advance_dataset(
        FOLLOWED, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me"
    ),
    "compaction": lambda lake, streams: compact_dataset(
        lake, "u", spark=IN_PROCESS, by="me", level="major"
    ),
    "rebuild": lambda lake, streams: rebuild_dataset(
        FOLLOWED, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, **WHY
    ),
    "erasure": lambda lake, streams: erase_keys(lake, "b", [{"k": "00000001"}], **WHY),
    "repartition": lambda lake, streams: repartition_dataset(lake, "b", 2, **WHY),
    "repartition of a table": lambda lake, streams: repartition_dataset(lake, "u", 2, **WHY),
    "repartition of a stream": lambda lake, streams: repartition_stream(lake, "a", 2, **WHY),
}


@pytest.mark.lengthy
@pytest.mark.parametrize("name", [*WRITERS, *LATER])
def test_no_room_for_data_files_is_reported_and_what_was_begun_is_done_later(
    tmp_path: Path, name: str
) -> None:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    for stream in ("a", "c"):
        streams.create(stream, schema=SCHEMA, key=["k"], partitions=1)
        streams.append(
            stream,
            rows(0, 20_000),
            producer="p",
            sequence=1,
            end_of_dataset="v1" if stream == "a" else None,
        )
    if name in LATER:
        for made in ("bounded", "bootstrap"):
            WRITERS[made](lake, streams)
        streams.append("c", rows(20_000, 20_000), producer="p", sequence=2)
        if name != "changes":
            LATER["changes"](lake, streams)
    write = {**WRITERS, **LATER}[name]
    with no_room(), pytest.raises(StoreUnavailableError) as reported:
        write(lake, streams)
    assert reported.value.url == lake.url
    assert list((tmp_path / "lake" / ".adjunct-store" / "staging").iterdir()) == [], (
        "what was begun takes no room"
    )
    write(lake, streams)
    if name in LATER:
        with open_dataset(lake, "b") as b, open_dataset(lake, "u") as u:
            assert (b.rows, len(list(u.items()))) == (20_000 - (name == "erasure"), 40_000)


def test_an_export_that_has_no_room_leaves_nothing(tmp_path: Path) -> None:
    for records in (None, 15_000):
        target = tmp_path / ("out.parquet" if records is None else "out")
        with no_room(), pytest.raises(StoreUnavailableError) as reported:
            export_records(iter([rows(0, 20_000)]), target, records_per_file=records)
        assert reported.value.url == str(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_delivered_files_that_are_not_given_refuse_no_version(tmp_path: Path) -> None:
    folder = tmp_path / "incoming" / "v1"
    folder.mkdir(parents=True)
    # which is there, and gives an error where it is read
    (folder / "a.csv").symlink_to("/proc/self/mem")
    (folder / "_SUCCESS").touch()
    source = FileSource(str(tmp_path / "incoming"), "csv", SCHEMA)
    spec = bounded_dataset("files", input=source, key="k", broadcast=True)
    lake = open_lake(tmp_path / "lake")
    with pytest.raises(StoreUnavailableError) as caught:
        advance_dataset(spec, lake=lake, systems={}, spark=IN_PROCESS, by="me")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.EIO
    (folder / "a.csv").unlink()
    (folder / "a.csv").write_text("k,n\na,1\n")
    assert (
        advance_dataset(spec, lake=lake, systems={}, spark=IN_PROCESS, by="me").action == "sealed"
    )
    (folder / "b.csv").symlink_to("b.csv")  # a link to itself
    with pytest.raises(ConfigurationError, match="symbolic links"):
        open_tree(str(tmp_path / "incoming")).list()


def test_a_folder_that_may_not_be_listed_is_no_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "v1").mkdir()
    tree, scandir = open_tree(str(tmp_path)), os.scandir

    def refused(path: Any) -> Any:
        if str(path).rstrip("/").endswith("v1"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    # whoever runs the tests may be allowed to list anything
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigurationError, match="Permission denied") as reported:
        tree.list()
    assert reported.value.url == str(tmp_path / "v1")


def test_a_file_that_fails_in_the_middle_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "a.csv").symlink_to("/proc/self/mem")
    tree = open_tree(str(tmp_path))
    (file,) = tree.list()
    assert isinstance(file, ListedFile)
    for read in (
        lambda: tree.read(file),
        lambda: tree.read_range(file, 0, 10),
        lambda: tree.content_tag(file),
    ):
        with pytest.raises(StoreUnavailableError):
            read()


def test_an_sqlite_file_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = SqliteTable(
        tmp_path / "file" / "t.sqlite", "t", "id", columns={"id": "string"}, create=True
    )
    with (
        blocking(store) as table,
        pytest.raises(TableAccessError, match="can't be created") as caught,
    ):
        table.put("a", {})
    assert caught.value.table == "t"


@pytest.mark.parametrize(
    "said_messages",
    [
        "Caused by: java.io.IOException: No space left on device",
        "java.nio.file.FileSystemException: /tmp/blockmgr-1/0e: Read-only file system",
        "OSError: [Errno 122] Disk quota exceeded",
    ],
)
def test_a_full_disk_of_sparks_own_is_reported(said_messages: str) -> None:
    reported = find_adjunct_error(
        PythonException(f"Job aborted due to stage failure\n{said_messages}\n\tat java.base/x")
    )
    assert isinstance(reported, StoreUnavailableError)
    assert "spark.local.dir" in reported.next_step
    assert reported.url == ("/tmp/blockmgr-1/0e" if "blockmgr" in said_messages else None)
    # also of a full standard output
    unnamed = find_adjunct_error(OSError(errno.ENOSPC, "No space left on device"))
    assert isinstance(unnamed, StoreUnavailableError)
    assert "or the output of this command" in unnamed.problem
    other: AdjunctError | None = find_adjunct_error(
        FileNotFoundError(errno.ENOENT, "of a user's function")
    )
    assert other is None
