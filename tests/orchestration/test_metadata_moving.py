"""Metadata that are moved into a key-value table and back: nothing is lost, nobody writes where nobody looks."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, BatchLog
from dagster_adjunct.orchestration.batchlog.known_applications import list_applications
from dagster_adjunct.orchestration.batchlog.run_lease import Claim, RunLease
from dagster_adjunct.orchestration.upkeep.metadata_moving import (
    collect_metadata,
    move_metadata,
    move_metadata_back,
)
from dagster_adjunct.resources.errors import (
    ApplicationBusyError,
    CommitConflictError,
    ConfigurationError,
    MalformedDocumentError,
    MetadataMovedError,
)
from dagster_adjunct.resources.key_value.table_manager import KeyValueTableManager
from dagster_adjunct.resources.lakes import open_lake
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.metadata_tables.routed_store import RoutedStore
from dagster_adjunct.resources.objects import Lake
from dagster_adjunct.resources.objects.documents import Document, decode
from dagster_adjunct.resources.objects.object_store import LAKE_DOCUMENT
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds

Facts = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def lake(folder: Path) -> Lake:
    """A lake with two applications, one of which has committed three times, and some entries of metadata."""
    lake = open_lake(folder)
    for name, commits in (("busy", 3), ("new", 1)):
        lake.store.put(f"applications/_names/{name}", b"")
        for number in range(commits):
            commit(lake, number, name)
    remember(lake, {"a": 1, "b": [2]})
    lake.store.put("streams/s/data/file", b"rows")
    return lake


def commit(lake: Lake, number: int, name: str = "busy") -> None:
    log = BatchLog(lake, name)
    log.move(log.read(), ApplicationState(batch=number), by="test", note=f"number {number}")


def remember(lake: Lake, changes: Facts) -> None:
    MetadataStore(lake).namespace("things", "busy").transact(lambda _: (changes, None), by="test")


def facts(lake: Lake) -> Facts:
    """Return everything that anybody knows of a lake by its metadata."""
    history = {
        name: [c.body for c in lake.commit_log(f"applications/{name}", "application").history()]
        for name in ("busy", "new")
    }
    entries = dict(MetadataStore(lake).namespace("things", "busy").read().items())
    return {"applications": list_applications(lake), "history": history, "entries": entries}


def base_of(lake: Lake) -> Any:
    assert isinstance(lake.store, RoutedStore)
    return lake.store.objects


def test_what_was_there_is_there_after_a_move_and_after_the_way_back(lake: Lake, folder: Path) -> None:
    before = facts(lake)
    report = move_metadata(lake, "lake", "meta")
    assert (report.moved, report.strays) == (True, ())
    moved = open_lake(folder)
    assert moved.metadata_place is not None
    assert facts(moved) == before
    assert moved.store.get("streams/s/data/file").data == b"rows"

    commit(moved, 7)
    remember(moved, {"a": None, "c": 3})
    later = facts(moved)
    assert later != before
    back = move_metadata_back(moved)
    assert back.moved
    home = open_lake(folder)
    assert home.metadata_place is None
    assert facts(home) == later
    commit(home, 8)

    assert move_metadata(home, "lake", "another").moved
    commit(open_lake(folder), 9)
    assert facts(open_lake(folder))["history"]["busy"][0]["batch"] == 9


def test_nothing_of_the_metadata_is_written_to_the_object_store_any_more(lake: Lake, folder: Path) -> None:
    move_metadata(lake, "lake", "meta")
    moved = open_lake(folder)

    def in_objects() -> set[str]:
        return {item.key for item in base_of(moved).list("") if "/clock" not in item.key}

    before = in_objects()
    commit(moved, 7)
    remember(moved, {"c": 3})
    with RunLease(moved, "busy", "r", Claim()):
        pass
    assert in_objects() == before
    moved.store.put("streams/s/data/other", b"rows")
    assert in_objects() == before | {"streams/s/data/other"}


def test_who_opened_the_lake_before_it_was_moved_can_not_commit_where_nobody_looks(lake: Lake, folder: Path) -> None:
    stale = open_lake(folder)
    log = BatchLog(stale, "busy")
    seen = log.read()
    move_metadata(lake, "lake", "meta")
    with pytest.raises(MetadataMovedError, match="key-value table lake/meta"):
        log.read()
    with pytest.raises(MetadataMovedError, match="Open the lake again"):
        log.move(seen, ApplicationState(batch=99), by="stale")
    with pytest.raises(MetadataMovedError):
        remember(stale, {"z": 1})

    routed = open_lake(folder)
    known = facts(routed)
    move_metadata_back(routed)
    for write in (lambda: commit(routed, 99), lambda: remember(routed, {"z": 1})):
        with pytest.raises(MetadataMovedError, match="not in this key-value table any more"):
            write()
    assert facts(open_lake(folder)) == known


def test_a_commit_that_meets_the_move_is_moved_or_refused(lake: Lake, folder: Path) -> None:
    """A writer commits again and again during the move: what it was told is true of the lake afterwards."""
    told: list[tuple[int, bool]] = []
    writer = open_lake(folder)

    def write(number: int) -> Callable[[], None]:
        def act() -> None:
            try:
                commit(writer, 100 + number)
            except (MetadataMovedError, CommitConflictError):
                told.append((100 + number, False))
            else:
                told.append((100 + number, True))

        return act

    # Not every third request: fencing takes three a try, and would lose each of them to the writer.
    plan = [Fault("*", number, "meanwhile", write(number)) for number in range(1, 120, 4)]
    move_metadata(Lake(FaultyStore(lake.store, plan), lake.id), "lake", "meta")
    committed = [body["batch"] for body in facts(open_lake(folder))["history"]["busy"]]
    assert [number for number, done in told if done] == sorted(n for n in committed if n >= 100)
    assert {done for _, done in told} == {True, False}


@pytest.mark.parametrize(
    ("kind", "step"),
    [("crash-before", 5), *(pytest.param(k, 1, marks=pytest.mark.long) for k in ("crash-before", "crash-after"))],
)
def test_a_move_that_dies_at_any_request_is_ended_by_the_next_one_or_taken_back(
    kind: Any, step: int, tmp_path: Path
) -> None:
    for nth in range(3, 1000, step):
        folder = tmp_path / f"lake-{nth}"
        lake = open_lake(folder)
        lake.store.put("applications/_names/busy", b"")
        commit(lake, 1)
        faulty = FaultyStore(lake.store, [Fault("*", nth, kind)])
        with contextlib.suppress(Crash):
            move_metadata(Lake(faulty, lake.id), "lake", "meta", partitions=1)
        if len(faulty.requests) < nth:
            break
        again = open_lake(folder)
        if nth % 2 and again.metadata_place is None:
            move_metadata_back(again)
        else:
            move_metadata(again, "lake", "meta", partitions=1)
        now = open_lake(folder)
        assert [
            body["batch"] for body in (c.body for c in now.commit_log("applications/busy", "application").history())
        ] == [1]
        commit(now, 2)
    assert nth > 10


@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.long)])
def test_the_way_back_that_dies_at_any_request_is_ended_by_the_next_one(step: int, tmp_path: Path) -> None:
    for nth in range(1, 1000, step):
        folder = tmp_path / f"lake-{nth}"
        lake = open_lake(folder)
        lake.store.put("applications/_names/busy", b"")
        commit(lake, 1)
        move_metadata(lake, "lake", "meta", partitions=1)
        commit(open_lake(folder), 2)
        faulty = FaultyStore(lake.store, [Fault("*", nth, "crash-after")])
        with contextlib.suppress(Crash):
            move_metadata_back(Lake(faulty, lake.id))
        if len(faulty.requests) < nth:
            break
        move_metadata_back(open_lake(folder))
        now = open_lake(folder)
        assert now.metadata_place is None
        assert [c.body["batch"] for c in now.commit_log("applications/busy", "application").history()] == [2, 1]
        commit(now, 3)
    assert nth > 5


def test_a_move_is_refused_while_an_application_is_run(lake: Lake, folder: Path) -> None:
    before = facts(lake)
    with RunLease(lake, "busy", "a-run", Claim()), pytest.raises(ApplicationBusyError, match="a-run"):
        move_metadata(lake, "lake", "meta")
    assert facts(open_lake(folder)) == before
    commit(open_lake(folder), 5)
    move_metadata(lake, "lake", "meta")
    moved = open_lake(folder)
    with RunLease(moved, "busy", "b-run", Claim()), pytest.raises(ApplicationBusyError, match="b-run"):
        move_metadata_back(moved)
    commit(moved, 6)


def test_a_run_that_begins_during_the_move_stops_it_and_goes_on(lake: Lake, folder: Path) -> None:
    other = open_lake(folder)
    held = RunLease(other, "busy", "quick", Claim())

    def begin() -> None:
        held.__enter__()

    store = FaultyStore(lake.store, [Fault("put_if_match", 3, "meanwhile", begin)])
    with pytest.raises(ApplicationBusyError, match="quick"):
        move_metadata(Lake(store, lake.id), "lake", "meta")
    commit(other, 5)
    held.__exit__(None, None, None)
    assert open_lake(folder).metadata_place is None


def test_the_table_of_something_else_is_refused(lake: Lake, tmp_path: Path, folder: Path) -> None:
    move_metadata(lake, "lake", "meta")
    with pytest.raises(ConfigurationError, match=r"are in the key-value table lake/meta"):
        move_metadata(open_lake(folder), "lake", "other")
    assert not move_metadata(open_lake(folder), "lake", "meta").moved
    move_metadata_back(open_lake(folder))
    with pytest.raises(ConfigurationError, match="sealed"):
        move_metadata(open_lake(folder), "lake", "meta")


def test_a_release_that_does_not_know_of_it_refuses_the_lake(lake: Lake, folder: Path) -> None:
    class FirstLakeDocument(Document):
        kind: str
        id: str
        probed_at: str

    def read() -> FirstLakeDocument:
        return decode(FirstLakeDocument, (folder / LAKE_DOCUMENT).read_bytes(), "the lake", "none")

    assert read().id == lake.id
    move_metadata(lake, "lake", "meta")
    with pytest.raises(MalformedDocumentError, match="format 2; this release of Adjunct reads format 1"):
        read()
    move_metadata_back(open_lake(folder))
    assert read().id == lake.id


def test_other_processes_find_the_table_by_the_lake_and_by_what_was_pickled(lake: Lake, folder: Path) -> None:
    move_metadata(lake, "lake", "meta")
    moved = open_lake(folder)
    program = (
        "import pickle, sys\n"
        "lake = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState, BatchLog\n"
        "log = BatchLog(lake, 'busy')\n"
        "print(log.move(log.read(), ApplicationState(batch=42), by='other', note='n').state.batch, lake.store)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program, pickle.dumps(moved).hex()], capture_output=True, text=True, check=True
    ).stdout
    assert out == f"42 {moved.store!r}\n"
    assert facts(open_lake(folder))["history"]["busy"][0]["batch"] == 42


def test_what_is_left_of_them_is_collected_and_no_commit_gets_there_afterwards(lake: Lake, folder: Path) -> None:
    stale = open_lake(folder)
    move_metadata(lake, "lake", "meta")
    moved = open_lake(folder)
    known = facts(moved)
    moved.store.put_if_absent("applications/busy/answers/1/op/1.arrow", b"x" * 700_000)
    moved.store.put("applications/busy/answers/2/op/1.arrow", b"y" * 700_000)
    moved.store.put("applications/busy/answers/2/op/1.arrow", b"y")
    assert collect_metadata(moved, dry_run=True) == collect_metadata(moved) > 0
    assert [i.key for i in base_of(moved).list("applications/") if not i.key.endswith("/CURRENT")] == []
    long = list(base_of(moved).list("_adjunct/metadata/long/"))
    assert len(long) == 2, "one that nothing refers to, and too young"
    in_two_hours = Lake(moved.store, moved.id, clock=lambda: lake.now() + timedelta(hours=2))
    assert collect_metadata(in_two_hours) == 1
    assert moved.store.get("applications/busy/answers/1/op/1.arrow").data == b"x" * 700_000
    moved.store.delete("applications/busy/answers/1/op/1.arrow")
    assert list(base_of(moved).list("_adjunct/metadata/long/")) == []
    assert facts(moved) == known
    with pytest.raises(MetadataMovedError):
        commit(stale, 99)
    assert json.loads((folder / "applications/busy/CURRENT").read_bytes())["kind"] == "moved"


def test_the_table_of_a_lakes_metadata_is_neither_sealed_nor_deleted(lake: Lake, folder: Path) -> None:
    move_metadata(lake, "lake", "meta")
    manager = KeyValueTableManager(open_lake(folder))
    with pytest.raises(ConfigurationError, match="holds the metadata of"):
        manager.delete("lake", "meta")
    with pytest.raises(ConfigurationError, match="not sealed"):
        manager.seal("lake", "meta")
    commit(open_lake(folder), 7)
    move_metadata_back(open_lake(folder))
    assert KeyValueTableManager(open_lake(folder)).delete("lake", "meta")


def test_two_who_move_at_once_move_once_and_undo_nothing_of_what_was_done_since(lake: Lake, folder: Path) -> None:
    """The second one goes on from each of its requests after the first one is done, and somebody has committed."""
    before = facts(lake)
    for nth, name in enumerate(("t1", "t2")):

        def first(name: str = name, number: int = nth) -> None:
            move_metadata(open_lake(folder), "lake", name)
            commit(open_lake(folder), 50 + number)
            remember(open_lake(folder), {"since": number})

        late = Fault("list", nth + 1, "meanwhile", first)
        slow = Lake(FaultyStore(open_lake(folder).store, [late]), lake.id)
        move_metadata(slow, "lake", name)
        now = facts(open_lake(folder))
        assert now["history"]["busy"][0]["batch"] == 50 + nth
        assert now["entries"] == {**before["entries"], "since": nth}

        def back(number: int = nth) -> None:
            move_metadata_back(open_lake(folder))
            commit(open_lake(folder), 60 + number)

        routed = open_lake(folder)
        late = Fault("list", nth + 1, "meanwhile", back)
        slow = Lake(FaultyStore(base_of(routed), [late]), lake.id)
        move_metadata_back(slow)
        assert facts(open_lake(folder))["history"]["busy"][0]["batch"] == 60 + nth


def test_a_table_with_what_an_earlier_move_left_there_takes_nothing_back(lake: Lake, folder: Path) -> None:
    """The move dies just before the lake's document is swapped, is taken back, and all goes on among the objects."""
    at_the_swap = Fault("put_if_match", 1, "crash-before", below=LAKE_DOCUMENT)
    with pytest.raises(Crash):
        move_metadata(Lake(FaultyStore(lake.store, [at_the_swap]), lake.id), "lake", "meta")
    move_metadata_back(open_lake(folder))
    commit(open_lake(folder), 7)
    remember(open_lake(folder), {"a": 2})
    before = facts(open_lake(folder))
    lake.store.delete("applications/_names/new")
    with pytest.raises(ConfigurationError, match="'applications/_names/new'"):
        move_metadata(open_lake(folder), "lake", "meta")
    lake.store.put("applications/_names/new", b"")
    assert move_metadata(open_lake(folder), "lake", "meta").moved
    assert facts(open_lake(folder)) == before


@pytest.mark.rounds
@pytest.mark.parametrize("nth", rounds([4, 5], [*range(1, 7)]))
def test_a_move_that_is_taken_back_while_it_is_under_way_loses_nothing_of_what_follows(
    lake: Lake, folder: Path, nth: int
) -> None:
    """At a look at what there is: the fourth comes when the pointers are fenced, the fifth when all is copied."""
    store, known = FaultyStore(lake.store), list[Facts]()

    def take_back() -> None:
        copied = any(key.startswith("applications/busy/manifests/") for _, key in store.requests)
        assert copied is (nth >= 5)
        assert move_metadata_back(open_lake(folder)).moved is (nth >= 3)
        commit(open_lake(folder), 7)
        known.append(facts(open_lake(folder)))

    store.plan = (Fault("list", nth, "meanwhile", take_back, below="applications/"),)
    done = move_metadata(Lake(store, lake.id), "lake", "meta")
    assert done.moved
    assert open_lake(folder).metadata_place is None or done.strays == ()
    assert facts(open_lake(folder)) == known[0]


def test_what_was_deleted_in_the_table_does_not_come_back(lake: Lake, folder: Path) -> None:
    lake.store.put("applications/busy/answers/1/op/1.arrow", b"secret")
    move_metadata(lake, "lake", "meta")
    moved = open_lake(folder)
    moved.store.delete_many(["applications/busy/answers/1/op/1.arrow", "applications/_names/new"])
    move_metadata_back(moved)
    assert list_applications(open_lake(folder)) == ["busy"]
    assert open_lake(folder).store.head("applications/busy/answers/1/op/1.arrow") is None
