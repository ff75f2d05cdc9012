"""What only the local store has to prove: processes, kills, and a folder that people look into."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectExistsError,
    PreconditionFailedError,
)
from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog
from dagster_adjunct.resources.objects.local_store import LocalStore
from tests.spawned import call_all, spawned

if TYPE_CHECKING:
    from pathlib import Path


def _create_and_replace(root: str, who: int, turns: int) -> tuple[int, int]:
    """Return how many creations and how many replacements this process won."""
    store = LocalStore(root)
    created = replaced = 0
    for turn in range(turns):
        try:
            store.put_if_absent(f"created/{turn}", b"%d" % who)
            created += 1
        except ObjectExistsError:
            pass
        stored = store.get("counter")
        try:
            store.put_if_match("counter", b"%d" % (int(stored.data) + 1), stored.etag)
            replaced += 1
        except PreconditionFailedError:
            pass
    return created, replaced


def _count(root: str, who: str, turns: int) -> None:
    log = CommitLog(LocalStore(root), "streams/x", "stream")

    def add(current: Commit | None) -> dict[str, Any]:
        return {"total": 1 if current is None else current.body["total"] + 1}

    for _ in range(turns):
        log.transact(add, by=who, attempts=500)


@pytest.mark.lengthy
def test_of_racing_processes_exactly_one_creates_and_no_replacement_is_lost(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("counter", b"0")
    with spawned(3) as pool:
        won = call_all(pool, _create_and_replace, [(str(tmp_path), who, 60) for who in range(3)])
        assert sum(created for created, _ in won) == 60
        assert int(store.get("counter").data) == sum(replaced for _, replaced in won)
        call_all(pool, _count, [(str(tmp_path), f"p{n}", 20) for n in range(3)])
    current = CommitLog(store, "streams/x", "stream").current()
    assert current is not None
    assert (current.number, current.body) == (60, {"total": 60})


_HOLD = """
import sys, time
from dagster_adjunct.resources.objects.local_store import LocalStore
store = LocalStore(sys.argv[1])
with store._temporary_file("x", b"half") as temporary, store._lock("CURRENT"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_process_leaves_neither_a_lock_nor_an_object(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    etag = store.put("CURRENT", b"one")
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    store.put_if_match("CURRENT", b"two", etag)
    assert [info.key for info in store.list("")] == ["CURRENT"]
    assert len(list(store.staging_dir().iterdir())) == 1


def test_what_killed_processes_left_is_swept_after_a_day(tmp_path: Path) -> None:
    staging = LocalStore(tmp_path).staging_dir()
    for name, age in (("old", 25 * 3600), ("young", 3600)):
        (staging / name).write_bytes(b"x")
        os.utime(staging / name, (time.time() - age, time.time() - age))
    assert [path.name for path in LocalStore(tmp_path).staging_dir().iterdir()] == ["young"]


def test_only_objects_are_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    (tmp_path / ".DS_Store").write_bytes(b"x")
    (tmp_path / "a" / ".b.crc").write_bytes(b"x")
    (store.staging_dir() / "c").write_bytes(b"x")
    assert [info.key for info in store.list("")] == ["a/b"]


def test_a_folder_emptied_by_deletes_goes_away(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete("a/b/c")
    assert not (tmp_path / "a/b").exists()
    assert store.get("a/d").data == b"x"
    store.delete("a")
    assert store.get("a/d").data == b"x"


def test_a_staged_upload_costs_no_copy(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    staged = store.staging_dir() / "part"
    staged.write_bytes(b"x" * 2_000_000)
    store.upload(staged, "data/part")
    assert (tmp_path / "data/part").stat().st_ino == staged.stat().st_ino
    large = store.head("data/part")
    assert large is not None
    assert store.get("data/part").etag == large.etag


def test_an_object_can_not_be_the_folder_of_another(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    store.put("b/c", b"x")
    for write in (store.put, store.put_if_absent):
        with pytest.raises(ConfigurationError) as caught:
            write("a/under", b"x")
        assert caught.value.key == "a/under"
        with pytest.raises(ConfigurationError) as caught:
            write("b", b"x")
        assert caught.value.key == "b"
    assert store.head("b") is None


def test_spark_gets_the_plain_path_after_the_scheme(tmp_path: Path) -> None:
    root = tmp_path / "a lake 100%"
    assert LocalStore(root).spark_uri("streams/x") == f"file:{root}/streams/x"
    with pytest.raises(ConfigurationError) as caught:
        LocalStore(tmp_path / "a[b]").spark_uri("streams/x")
    assert caught.value.key == "streams/x"


def test_a_folder_that_a_delete_removes_meanwhile_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, mkdir, failed = LocalStore(tmp_path / "lake"), os.mkdir, []

    def removed_at_once(path: Any, mode: int = 0o777) -> None:
        if not failed and str(path).endswith("leases"):
            failed.append(path)
            raise FileExistsError(path)
        mkdir(path, mode)

    monkeypatch.setattr(os, "mkdir", removed_at_once)
    store.put_if_absent("leases/a", b"1")
    assert (failed, store.get("leases/a").data) == ([tmp_path / "lake" / "leases"], b"1")
