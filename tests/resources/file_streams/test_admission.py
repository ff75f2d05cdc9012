"""Each file is admitted once: whoever looks, whatever dies, whichever replies are lost."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams import log as file_log
from dagster_adjunct.resources.file_streams.folder import FileRules, FolderStreams
from dagster_adjunct.resources.file_streams.log import FileRetention
from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.clocks import Clock, on_clock
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.resources.file_streams.landing import (
    CLICKS,
    Landing,
    LocalLanding,
    clicks,
    lines,
    look,
    numbers,
    offsets,
    problems,
)
from tests.rounds import rounds
from tests.spawned import call_all, spawned


def put_some(place: Landing, first: int, count: int) -> None:
    for number in range(first, first + count):
        place.put(f"{number:04}", lines(number))


@pytest.mark.lengthy
@pytest.mark.parametrize("listing", ["all", "after-last"])
@pytest.mark.usefixtures("small_pages")
def test_whatever_dies_each_file_is_admitted_once(landing: LocalLanding, listing: str) -> None:
    died = 0
    for nth in range(1, 40):
        for kind in ("crash-before", "crash-after"):
            inner = InMemoryStore()
            system = clicks(landing, lake_in(inner), listing=listing)
            for name in [path.name for path in landing.root.iterdir()]:
                landing.delete(name)
            put_some(landing, 0, 5)
            before = offsets(system) if system.admit("clicks") else {}
            put_some(landing, 5, 6)
            store = FaultyStore(inner, [Fault("*", nth, kind)])  # type: ignore[arg-type]
            try:
                clicks(landing, lake_in(store), listing=listing).admit("clicks")
            except Crash:
                died += 1
            system = clicks(landing, lake_in(inner), listing=listing)
            put_some(landing, 11, 2)
            assert sorted(look(system)) == [*range(13)]
            assert before.items() <= offsets(system).items()
        if nth > len(store.requests):
            break
    assert died > 8


@pytest.mark.parametrize("kind", ["lost-after", "lost-before", "409", "throttle"])
@pytest.mark.parametrize("request_kind", ["put_if_absent", "put_if_match"])
def test_lost_replies_admit_nothing_twice(
    landing: LocalLanding, kind: str, request_kind: str, small_pages: None
) -> None:
    for nth in range(1, 5):
        inner = InMemoryStore()
        for name in [path.name for path in landing.root.iterdir()]:
            landing.delete(name)
        store = FaultyStore(inner, [Fault(request_kind, nth, kind)])  # type: ignore[arg-type]
        system = clicks(landing, lake_in(store))
        for first in (0, 4, 8):
            put_some(landing, first, 4)
            with contextlib.suppress(errors.TransientError):
                system.admit("clicks")
        assert sorted(look(clicks(landing, lake_in(inner)))) == [*range(12)]


def test_two_lookers_in_threads_admit_each_file_once(either: Landing, small_pages: None) -> None:
    inner = InMemoryStore()
    clicks(either, lake_in(inner))

    def admit(number: int) -> None:
        system = FolderStreams(lake_in(inner))
        for step in range(5):
            either.put(f"{number}-{step}", lines(number * 10 + step))
            system.admit("clicks")

    with ThreadPoolExecutor(3) as threads:
        assert [*threads.map(admit, range(3))] == [None] * 3
    system = FolderStreams(lake_in(inner))
    expected = [number * 10 + step for number in range(3) for step in range(5)]
    assert sorted(look(system)) == expected
    assert [*offsets(system)] == [*range(15)]


def admit_often(lake: str, landing: str, name: str) -> list[int]:
    """Put files and look for files, in a process of its own; return what was read at last."""
    place = LocalLanding(Path(landing))
    system = clicks(place, open_lake(lake))
    for step in range(10):
        place.put(f"{name}-{step}", lines(int(name) * 100 + step))
        system.admit("clicks")
    return numbers(system)


@pytest.mark.lengthy
def test_two_lookers_in_processes_admit_each_file_once(tmp_path: Path) -> None:
    lake = open_lake(tmp_path / "lake")
    place = LocalLanding(tmp_path / "landing")
    with spawned(2) as pool:
        calls = [(str(tmp_path / "lake"), place.url, name) for name in ("1", "2")]
        found = call_all(pool, admit_often, calls)
    last = numbers(clicks(place, lake))
    assert sorted(last) == [*range(100, 110), *range(200, 210)]
    for one in found:
        assert one == last[: len(one)]


def test_a_looker_that_was_overtaken_sees_what_the_other_admitted(landing: LocalLanding) -> None:
    inner = InMemoryStore()
    put_some(landing, 0, 3)
    other = clicks(landing, lake_in(inner))
    meanwhile = Fault("put_if_absent", 1, "meanwhile", lambda: other.admit("clicks"))
    assert look(clicks(landing, lake_in(FaultyStore(inner, [meanwhile])))) == [0, 1, 2]
    assert look(other) == [0, 1, 2]


# -- retention


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_retention_moves_the_oldest_offset_and_admits_nothing_again(
    landing: LocalLanding, clock: Clock, small_pages: None
) -> None:
    lake = on_clock(lake_in(InMemoryStore()), clock)
    keep = FileRetention(max_age=timedelta(days=1))
    system = clicks(landing, lake, retention=keep)
    for number in range(10):
        # However old a file is: its age counts from its admission.
        landing.put(f"{number}", lines(number, number), modified=1_000_000 + number)
    assert len(look(system)) == 20
    clock.forward(hours=20)
    landing.put("later", lines(100))
    look(system)
    assert system.maintain("clicks").dropped_files == 0
    clock.forward(hours=5)
    done = system.maintain("clicks")
    assert (done.dropped_files, done.dropped_rows) == (10, 20)
    assert system.oldest([CLICKS]) == {CLICKS: "20"}
    assert look(system) == [100]
    assert system.maintain("clicks").dropped_files == 0
    with pytest.raises(errors.OffsetOutOfRangeError) as caught:
        numbers(system, 3)
    assert caught.value.stream == "files.clicks"
    assert sorted(path.name for path in landing.root.iterdir())[0] == "0"
    assert system.offset_for_timestamp(CLICKS, 0) == "20"
    # A name that the log still knows may be that of new contents.
    landing.put("3", lines(7))
    with pytest.raises(errors.AdmittedFileError, match=r"changed|shrunk"):
        system.admit("clicks")


def test_retention_by_count(landing: LocalLanding, lake: Lake, small_pages: None) -> None:
    keep = FileRetention(max_files=3)
    system = clicks(landing, lake, retention=keep, rules=FileRules(damaged="set-aside"))
    for number in range(8):
        landing.put(f"{number}", lines(number), modified=1_000_000 + number)
        landing.put(f"{number} bad", b"{", modified=1_000_000 + number)
        system.admit("clicks")
    assert system.maintain("clicks").dropped_files == 5
    assert look(system) == [5, 6, 7]
    assert len(problems(system)) == 8


def test_names_are_forgotten_once_their_files_are_gone(
    landing: LocalLanding, lake: Lake, small_pages: None
) -> None:
    system = clicks(landing, lake, retention=FileRetention(max_files=1))
    for number in range(12):
        landing.put(f"{number:02}", lines(number), modified=1_000_000 + number)
    look(system)
    system.maintain("clicks")
    log = system.file_log("clicks")

    def known() -> list[str]:
        state = log.read()
        assert state is not None
        return sorted(log.known(state))

    assert len(known()) == 12
    for number in range(7):
        landing.delete(f"{number:02}")
    system.maintain("clicks")
    assert known() == [f"{number:02}" for number in range(7, 12)]
    assert look(system) == [11]
    # Where nothing is there, a disk may be missing: no name is forgotten.
    aside = landing.root.rename(landing.root.with_name("aside"))
    system.maintain("clicks")
    landing.root.mkdir()
    system.maintain("clicks")
    assert len(known()) == 5
    landing.root.rmdir()
    aside.rename(landing.root)
    assert look(system) == [11]


def test_only_pages_that_nobody_needs_are_deleted(
    landing: LocalLanding, small_pages: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = InMemoryStore()
    clock = Clock()
    clock.now = datetime.now(UTC)  # that of the store, which dates its objects
    lake = on_clock(lake_in(store), clock)
    system = clicks(landing, lake)
    for number in range(9):
        landing.put(f"{number}", lines(number), modified=1_000_000 + number)
        system.admit("clicks")
    view = system.snapshot("clicks")
    # The pages are old, but nobody has replaced them before.
    clock.forward(hours=2)
    for number in range(9, 15):
        landing.put(f"{number:02}", lines(number), modified=1_000_000 + number)
        system.admit("clicks")

    def pages() -> int:
        return len([*store.list("file-streams/files/clicks/pages/")])

    system.maintain("clicks", clock())
    state = system.file_log("clicks").read()
    assert state is not None
    assert pages() == len(state.pages) + 1
    file_log._read_files.cache.clear()  # type: ignore[attr-defined]
    assert numbers(view) == [*range(9)]
    before = pages()
    clock.forward(minutes=59)
    assert system.maintain("clicks", clock()).deleted_objects == 0
    clock.forward(minutes=2)
    done = system.maintain("clicks", clock())
    state = system.file_log("clicks").read()
    assert state is not None
    assert done.deleted_objects == before - len(state.pages) > 0
    assert pages() == len(state.pages)
    assert look(system) == [*range(15)]


def test_a_look_that_slept_for_hours_loses_its_race_with_a_maintenance(
    landing: LocalLanding, small_pages: None
) -> None:
    inner = InMemoryStore()
    clock = Clock()
    clock.now = datetime.now(UTC)
    put_some(landing, 0, 5)

    def maintained_later() -> None:
        clock.forward(hours=5)
        done = FolderStreams(on_clock(lake_in(inner), clock)).maintain("clicks", clock())
        assert done.deleted_objects == 2

    clicks(landing, on_clock(lake_in(inner), clock)).admit("clicks")
    put_some(landing, 5, 4)
    # The page is written, the manifest is not.
    below = "file-streams/files/clicks/manifests/"
    sleeper = Fault("put_if_absent", 1, "meanwhile", maintained_later, below=below)
    store = FaultyStore(inner, [sleeper])
    system = clicks(landing, on_clock(lake_in(store), clock))
    # What the sleeper has written is older than an hour, and nothing refers to it.
    assert sorted(look(system)) == [*range(9)]
    assert sorted(numbers(FolderStreams(lake_in(inner)))) == [*range(9)]


@pytest.mark.parametrize("where", ["crash-before", "crash-after"])
def test_a_maintenance_that_dies_loses_nothing(
    landing: LocalLanding, small_pages: None, where: str
) -> None:
    for nth in range(1, 12):
        inner = InMemoryStore()
        clock = Clock()
        clock.now = datetime.now(UTC)
        shutil.rmtree(landing.root)
        put_some(landing, 0, 10)
        keep = FileRetention(max_files=2)
        system = clicks(landing, on_clock(lake_in(inner), clock), retention=keep)
        system.admit("clicks")
        put_some(landing, 10, 5)
        system.admit("clicks")
        clock.forward(hours=2)
        store = FaultyStore(inner, [Fault("*", nth, where)])  # type: ignore[arg-type]
        with contextlib.suppress(Crash):
            FolderStreams(on_clock(lake_in(store), clock)).maintain("clicks", clock())
        system.maintain("clicks", clock())
        assert len(look(system)) == 2
        assert system.oldest([CLICKS]) == {CLICKS: "13"}


# -- a drawn history


@pytest.mark.rounds
@pytest.mark.parametrize("seed", range(rounds(3, 100)))
def test_whatever_happens_every_record_is_admitted_once_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(file_log, "PAGE", draw.choice([2, 5, 10_000]))
    monkeypatch.setattr(file_log, "_MOST_IN_TAIL", draw.choice([1, 3, 1_000]))
    place = LocalLanding(tmp_path / "landing")
    options = draw.choice([{}, {"listing": "after-last"}])
    rules = FileRules(changed="append", damaged="set-aside", lost="set-aside")
    inner = InMemoryStore()
    model = _Model()

    def system(*faults: Fault) -> FolderStreams:
        store = FaultyStore(inner, faults)
        return clicks(place, lake_in(store), rules=rules, **options)

    def put(name: str) -> None:
        rows = [model.new() for _ in range(draw.choice([0, 1, 1, 3]))]
        place.put(name, lines(*rows))
        model.files[name] = rows

    def put_damaged(name: str) -> None:
        place.put(name, b"{" + str(model.new()).encode())
        model.files[name] = []

    def remove(name: str) -> None:
        if name in model.files:
            place.delete(name)
            del model.files[name]

    def look_at_all(_: str) -> None:
        made = system()
        made.admit("clicks", all_files=True)
        model.check(made, complete=True)

    def look_and_die(_: str) -> None:
        kind = draw.choice(["crash-before", "crash-after", "lost-after", "lost-before"])
        fault = Fault("*", draw.randint(1, 9), kind)  # type: ignore[arg-type]
        with contextlib.suppress(Crash, errors.AdjunctError):
            system(fault).admit("clicks")

    def plain_look(_: str) -> None:
        made = system()
        made.admit("clicks")
        model.check(made, complete=not options)

    actions: list[Callable[[str], None]] = [put, put, put, put_damaged, remove]
    actions += [look_at_all, look_and_die, look_and_die, plain_look]
    for _ in range(60):
        draw.choice(actions)(f"{draw.randint(0, 15):02}")
    look_at_all("")


class _Model:
    """What the stream has to say, in plain Python."""

    def __init__(self) -> None:
        self.files: dict[str, list[int]] = {}
        self.seen: dict[int, int] = {}
        self._next = 0

    def new(self) -> int:
        self._next += 1
        return self._next

    def check(self, system: FolderStreams, *, complete: bool) -> None:
        """Compare the records that can be read with the files that are there."""
        found = offsets(system)
        there = {row for rows in self.files.values() for row in rows}
        assert len(set(found.values())) == len(found)
        # Of what is gone, nothing is read; of what is there, nothing is missing.
        assert set(found.values()) <= there
        if complete:
            assert set(found.values()) == there
        for offset, row in found.items():
            assert self.seen.setdefault(offset, row) == row
        upcoming = int(system.upcoming([CLICKS])[CLICKS])
        assert all(offset < upcoming for offset in self.seen)
