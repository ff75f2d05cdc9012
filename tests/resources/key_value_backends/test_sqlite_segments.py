"""What is SQLite's own: its file, its locks, forks, commits that fail, and what is kept of
tokens.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import sqlite3
import threading
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    TableAccessError,
    TableNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import (
    ConditionsFailed,
    KeyValueTableConfiguration,
    ReplyLostError,
    TableId,
)
from dagster_adjunct.resources.key_value.serializers import TextSerializer
from dagster_adjunct.resources.key_value.table import KeyValueTable
from dagster_adjunct.resources.key_value_backends import sqlite as sqlite_connections
from dagster_adjunct.resources.key_value_backends import sqlite as sqlite_segment
from dagster_adjunct.resources.key_value_backends.sqlite import SqliteSegments
from tests.resources.key_value_backends.segment_handle import (
    Handle,
    Request,
    insert,
    of,
    put,
    replace,
)
from tests.resources.key_value_backends.segment_stores import new_table_id

APPLE, PEAR = of(b"apple"), of(b"pear")


def driven(coroutine):
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it suspends")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "tables" / "values.sqlite"


@pytest.fixture
def table(path) -> TableId:
    table = new_table_id()
    SqliteSegments(path).create(table, 1)
    return table


@pytest.fixture
def handle(path, table) -> Handle:
    return handle_of(SqliteSegments(path, busy_timeout=0.05), table)


def handle_of(backend: SqliteSegments, table: TableId) -> Handle:
    return Handle(backend.open(table, 0), driven)


def bare(path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, isolation_level=None, timeout=0))


# The file


def test_the_file_is_in_write_ahead_mode_and_another_client_reads_it(handle, path, table):
    [version] = handle.write(put(APPLE, b"red"))
    with bare(path) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        rows = connection.execute(
            f"SELECT partition, key, version, value FROM kvt_{table.incarnation}"
        ).fetchall()
    assert rows == [(0, APPLE, version, b"red")]


def test_what_is_deleted_leaves_nothing_in_the_file(handle, path, table):
    backend = SqliteSegments(path)
    handle.write(put(APPLE, b"red"))
    backend.seal(table, 1)
    backend.delete(table, 1)
    with bare(path) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == []


def test_a_missing_file_is_reported_and_not_made(tmp_path):
    backend = SqliteSegments(tmp_path / "none.sqlite")
    table = new_table_id()
    with pytest.raises(TableNotFoundError) as caught:
        handle_of(backend, table).get(APPLE)
    assert "none.sqlite" in str(caught.value.table)
    with pytest.raises(TableAccessError):
        backend.seal(table, 1)
    backend.delete(table, 1)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_removed_or_replaced_while_it_is_open_takes_no_write_any_more(
    handle, path, tmp_path
):
    handle.write(put(APPLE, b"red"))
    with bare(path) as connection:
        connection.execute("VACUUM INTO ?", (str(tmp_path / "copy.sqlite"),))
    handle.write(put(APPLE, b"brown"))
    path.unlink()
    for use in (lambda: handle.get(APPLE), lambda: handle.write(put(PEAR))):
        with pytest.raises(TableAccessError):
            use()
    for nearby in path.parent.iterdir():
        nearby.unlink()
    (tmp_path / "copy.sqlite").rename(path)
    assert handle.value(APPLE) == b"red"
    handle.write(put(PEAR, b"green"))
    with bare(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert handle_of(SqliteSegments(path), handle.segment._table).value(PEAR) == b"green"


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_wait_that_never_ends_or_begins_is_refused(path, seconds):
    with pytest.raises(ConfigurationError) as caught:
        SqliteSegments(path, busy_timeout=seconds)
    assert caught.value.argument == "busy_timeout"


def test_what_is_no_database_is_reported(tmp_path):
    other = tmp_path / "notes.txt"
    other.write_text("no database, but long enough to be taken for one" * 20)
    with pytest.raises(TableAccessError) as caught:
        SqliteSegments(other).create(new_table_id(), 1)
    assert "notes.txt" in str(caught.value.table)
    with pytest.raises(TableAccessError):
        SqliteSegments(tmp_path).create(new_table_id(), 1)
    with pytest.raises(TableAccessError):
        SqliteSegments(other / "below.sqlite").create(new_table_id(), 1)
    assert other.read_text().startswith("no database")


@pytest.mark.parametrize("path", ["", ":memory:"])
def test_a_database_without_a_file_is_refused(path):
    with pytest.raises(ConfigurationError) as caught:
        SqliteSegments(path)
    assert caught.value.argument == "path"


def test_a_relative_path_means_the_same_in_another_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backend = SqliteSegments("values.sqlite")
    assert backend.to_dict() == {"path": str(tmp_path / "values.sqlite"), "busy_timeout": 10.0}


@pytest.mark.parametrize("incarnation", ["", "x; DROP TABLE y", "0123456789ABCDEF", "0" * 17])
def test_an_incarnation_is_never_taken_for_sql(path, incarnation):
    with pytest.raises(ConfigurationError) as caught:
        SqliteSegments(path).create(TableId("scope", "name", incarnation), 1)
    assert caught.value.table is not None


# Locks


def test_a_write_waits_for_the_lock_and_then_says_that_nothing_happened(handle, path):
    request = Request.of([insert(APPLE, b"red")])
    with bare(path) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(TableUnavailableError, match="locked"):
            handle.send(request)
        assert handle.get(APPLE) == [None]  # who reads does not wait
        connection.execute("ROLLBACK")
    handle.send(request)
    assert handle.value(APPLE) == b"red"


def test_a_table_goes_on_when_the_lock_is_given_back(path, table):
    async def put_while_locked() -> None:
        text = TextSerializer()
        backend = SqliteSegments(path, busy_timeout=0.01)
        async with KeyValueTable(
            table, KeyValueTableConfiguration(partitions=1), backend, text, text
        ) as kept:
            with bare(path) as connection:
                connection.execute("BEGIN IMMEDIATE")
                writing = asyncio.create_task(kept.put_if_absent("apple", "red", family="fruit"))
                await asyncio.sleep(0.05)
                assert not writing.done()
                connection.execute("ROLLBACK")
            version = await writing
            assert (await kept.get("apple", family="fruit")).version == version

    asyncio.run(put_while_locked())


def test_a_file_of_others_becomes_write_ahead_while_they_use_it(tmp_path):
    path = tmp_path / "others.sqlite"
    with bare(path) as connection:
        connection.execute("CREATE TABLE theirs (n)")
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(TableUnavailableError):
            SqliteSegments(path, busy_timeout=0.05).create(new_table_id(), 1)
        connection.execute("ROLLBACK")
        table = new_table_id()
        SqliteSegments(path).create(table, 1)
        handle_of(SqliteSegments(path), table).write(put(APPLE))
        assert connection.execute("SELECT count(*) FROM theirs").fetchone() == (0,)


def test_a_file_that_can_not_be_looked_at_is_not_missing(tmp_path):
    segments = SqliteSegments(tmp_path / ("x" * 300))  # the name is too long
    table = new_table_id()
    for use in (
        lambda: handle_of(segments, table).get([APPLE]),
        lambda: segments.delete(table, 1),
        lambda: segments.check_may_delete(table, 1),
    ):
        with pytest.raises(TableAccessError):
            use()
    missing = SqliteSegments(tmp_path / "missing.sqlite")
    with pytest.raises(TableNotFoundError):
        handle_of(missing, table).get([APPLE])
    missing.delete(table, 1)


# Processes and threads


OPEN_FILES = Path("/proc/self/fd")
needs_open_files = pytest.mark.skipif(
    not OPEN_FILES.is_dir(), reason="needs Linux's list of open files"
)


@needs_open_files
def test_no_connection_lives_in_a_fork_and_both_processes_go_on(handle, path):
    [first] = handle.write(put(APPLE, b"the parent's"))
    before = set(open_files(path))
    assert before
    process = os.fork()
    if process == 0:
        done = 1
        try:
            if not set(open_files(path)):  # nothing was inherited
                handle.write(replace(APPLE, first, b"the child's"))
                done = 0
        finally:
            os._exit(done)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    assert handle.value(APPLE) == b"the child's"
    handle.write(put(APPLE, b"the parent's again"))
    with bare(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def open_files(path) -> list[str]:
    names = []
    for link in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):  # the folder itself, which is open for the listing
            names.append(str(link.readlink()))
    return [name for name in names if name.startswith(str(path))]


@needs_open_files
def test_what_nobody_uses_any_more_is_closed(path, table):
    handle = handle_of(SqliteSegments(path), table)
    handle.write(put(APPLE))
    assert open_files(path)
    del handle
    assert open_files(path) == []


@needs_open_files
def test_closing_gives_the_file_back(handle, path):
    handle.write(put(APPLE))
    assert open_files(path)
    driven(handle.segment.close())
    assert open_files(path) == []


def test_processes_that_are_forked_while_threads_write_lose_nothing(path, table):
    backend = SqliteSegments(path)
    threads, forks, increments = 2, 4, 30

    def count_up(key: bytes) -> None:
        mine = handle_of(backend, table)
        done = 0
        while done < increments:
            [entry] = mine.get(key)
            try:
                mine.write(
                    insert(key, b"1")
                    if entry is None
                    else replace(key, entry.version, b"%d" % (int(entry.value) + 1))
                )
                done += 1
            except ConditionsFailed:
                continue

    writers = [threading.Thread(target=count_up, args=(APPLE,)) for _ in range(threads)]
    for writer in writers:
        writer.start()
    forked = multiprocessing.get_context("fork")
    children = [forked.Process(target=count_up, args=(APPLE,)) for _ in range(forks)]
    for child in children:
        child.start()
    for worker in (*writers, *children):
        worker.join(60)
    assert [child.exitcode for child in children] == [0] * forks
    assert handle_of(backend, table).value(APPLE) == b"%d" % ((threads + forks) * increments)


# Commits that fail


class FailingCommits(sqlite_connections.FileConnection):
    """A connection whose next commit fails as the disk's would; `done`: it has happened all the
    same.
    """

    plan: list[bool] = []  # noqa: RUF012 - of all connections

    def execute(self, sql, *parameters):
        if sql == "COMMIT" and self.plan:
            done = self.plan.pop()
            super().execute("COMMIT" if done else "ROLLBACK")
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
            raise error
        return super().execute(sql, *parameters)


@pytest.fixture
def failing_commits(monkeypatch) -> list[bool]:
    monkeypatch.setattr(FailingCommits, "plan", [])
    monkeypatch.setattr(sqlite_connections, "FileConnection", FailingCommits)
    return FailingCommits.plan


@pytest.mark.parametrize("done", [True, False])
def test_a_commit_that_fails_is_settled_by_the_next_attempt(failing_commits, handle, done):
    request = Request.of([insert(APPLE, b"1"), put(PEAR, b"1")])
    failing_commits.append(done)
    with pytest.raises(ReplyLostError, match="commit"):
        handle.send(request)
    if done:
        handle.write(put(APPLE, b"another's"))
        handle.send(request, repeated=True)
        assert handle.value(APPLE) == b"another's"
    else:
        handle.send(request, repeated=True)
        assert handle.value(APPLE) == b"1"
    assert handle.value(PEAR) == b"1"


def test_a_table_reports_no_conflict_with_itself_when_a_commit_fails(failing_commits, path, table):
    text = TextSerializer()
    configuration = KeyValueTableConfiguration(partitions=1)

    async def run() -> None:
        async with KeyValueTable(table, configuration, SqliteSegments(path), text, text) as kept:
            failing_commits.extend([False, True])
            version = await kept.put_if_absent("apple", "red", family="fruit")
            assert (await kept.get("apple", family="fruit")).version == version
            failing_commits.append(False)
            version = await kept.replace("apple", "green", version, family="fruit")
            assert (await kept.get("apple", family="fruit")).version == version

    asyncio.run(run())
    assert failing_commits == []


@contextmanager
def no_file_beyond(size: int):
    """Let the kernel refuse what would make a file larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_can_not_grow_is_reported_and_the_write_is_done_once_it_can(handle, path):
    handle.write(put(APPLE, b"small"))
    request = Request.of([put(APPLE, b"large" * 100_000), insert(PEAR, b"small")])
    log = path.with_name(path.name + "-wal")
    with (
        no_file_beyond(log.stat().st_size + 100_000),
        pytest.raises((ReplyLostError, TableUnavailableError)),
    ):
        handle.send(request)
    assert handle.value(APPLE) == b"small"
    assert handle.value(PEAR) is None
    handle.send(request, repeated=True)
    assert handle.value(APPLE) == b"large" * 100_000
    with bare(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_full_database_refuses_the_request_and_keeps_what_it_has(handle, path):
    handle.write(put(APPLE, b"small"))
    connection = handle.segment._connections.take()
    connection.execute("PRAGMA max_page_count = 10")
    handle.segment._connections.give(connection)
    with pytest.raises(TableUnavailableError) as reported:
        handle.write(put(APPLE, b"large" * 100_000))
    assert reported.value.needs_action
    assert handle.value(APPLE) == b"small"
    handle.write(put(PEAR, b"small"))


# Tokens


@pytest.mark.lengthy
def test_tokens_are_kept_over_the_horizon_and_not_for_ever(handle, path, table, monkeypatch):
    now = 1_000_000.0
    monkeypatch.setattr(sqlite_segment.time, "time", lambda: now)

    def kept() -> int:
        with bare(path) as connection:
            return connection.execute(
                f"SELECT count(*) FROM kvt_{table.incarnation}_tokens"
            ).fetchone()[0]

    first = Request.of([insert(APPLE, b"red")])
    handle.send(first)
    for number in range(400):
        handle.write(put(PEAR, b"%d" % number))
        now += SqliteSegments.horizon / 401
    handle.send(first, repeated=True)
    for number in range(600):
        handle.write(put(PEAR, b"%d" % number))
        now += 1
    assert 2 * SqliteSegments.horizon <= kept() < 2 * SqliteSegments.horizon + 300
    now += 10_000
    handle_of(SqliteSegments(path), table).write(put(PEAR, b"of a process that writes once"))
    assert kept() == 1


def test_a_page_ends_early_where_its_values_are_large(handle, monkeypatch):
    monkeypatch.setattr(sqlite_segment, "_PAGE_BYTES", 1000)
    keys = [of(b"%03d" % number) for number in range(50)]
    handle.write(*(put(key, b"v" * (1 if place >= 10 else 300)) for place, key in enumerate(keys)))
    pages = handle.pages(limit=20)
    assert [entry.key for page in pages for entry in page] == keys
    assert [len(page) for page in pages] == [4, 4, 20, 20, 2]
    assert [len(page) for page in handle.pages(limit=50, values=False)] == [50]


def test_a_page_ends_soon_after_large_values_come_behind_small_ones(handle, monkeypatch):
    """Few values are looked at once the first ones were small."""
    monkeypatch.setattr(sqlite_segment, "_PAGE_BYTES", 10_000)
    keys = [of(b"%03d" % number) for number in range(500)]
    handle.write(*(put(key, b"v" * (1 if place < 100 else 3000)) for place, key in enumerate(keys)))
    first, *rest = handle.pages(limit=500)
    assert 100 < len(first) < 300
    assert [entry.key for page in (first, *rest) for entry in page] == keys
    assert all(len(page) <= 64 for page in rest)


def test_it_does_not_wait_and_so_never_suspends(path, handle):
    """`driven`, by which all of these tests run it, would say so."""
    assert not SqliteSegments(path).waits
    [version] = handle.write(put(APPLE, b"red"))
    assert handle.refused(insert(APPLE)) == {0: version}
    assert handle.entries() == handle.get(APPLE)
    driven(handle.segment.close())
