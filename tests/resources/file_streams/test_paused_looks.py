"""A look, a maintenance or a reader that stops for hours at any request, while others admit, set
aside, maintain and overwrite, loses nothing and repeats nothing when it goes on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

import pytest

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.file_streams import log as file_log
from dagster_adjunct.resources.file_streams.folder import FileRules, FolderStreams
from dagster_adjunct.resources.file_streams.log import FileRetention
from dagster_adjunct.resources.files.tree import _listed_local_file
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.clocks import Clock, on_clock
from tests.faulty_store import Fault, FaultyStore
from tests.resources.file_streams.landing import (
    LocalLanding,
    clicks,
    lines,
    look,
    offsets,
    problems,
)

RULES = FileRules(changed="append", lost="set-aside")


class Stage:
    """A stream with files that were admitted and files that were not, on a clock."""

    def __init__(self, landing: LocalLanding, **declared: object) -> None:
        self.landing = landing
        for path in landing.root.rglob("*.jsonl"):
            path.unlink()
        self.store = InMemoryStore()
        self.clock = Clock()
        self.clock.now = datetime.now(UTC)
        self.system = clicks(landing, on_clock(lake_in(self.store), self.clock), **declared)
        self.put(*range(5))
        self.system.admit("clicks")
        self.before = offsets(self.system)
        self.put(*range(5, 9))

    def put(self, *names: int) -> None:
        for name in names:
            self.landing.put(f"{name:02}.jsonl", lines(name))

    def through(self, store: FaultyStore) -> FolderStreams:
        """Return the streams as another process sees them, through a store."""
        return FolderStreams(on_clock(lake_in(store), self.clock))

    def others_go_on(self) -> None:
        """What other programs do in the hours for which one has stopped."""
        system = FolderStreams(on_clock(lake_in(self.store), self.clock))
        self.landing.put("02.jsonl", lines(102))
        system.set_aside("clicks", "05.jsonl", reason="not wanted")
        self.put(9)
        system.admit("clicks")
        self.put(10, 11)
        system.admit("clicks")
        self.clock.forward(hours=3)
        system.maintain("clicks", self.clock())
        file_log._read_files.cache.clear()  # type: ignore[attr-defined]


def stop_at_each_request(
    stage: Callable[[], Stage], do: Callable[[FolderStreams], object]
) -> Iterator[Stage]:
    """Do something with the streams, and stop before each of its requests in turn."""
    begun = stage()
    counting = FaultyStore(begun.store)
    do(begun.through(counting))
    assert len(counting.requests) > 2
    for nth in range(1, len(counting.requests) + 1):
        begun = stage()
        fault = Fault("*", nth, "meanwhile", begun.others_go_on)
        do(begun.through(FaultyStore(begun.store, [fault])))
        yield begun


@pytest.mark.lengthy
@pytest.mark.usefixtures("small_pages")
@pytest.mark.parametrize("listing", ["all", "after-last"])
def test_a_look_that_stops_at_any_request(landing: LocalLanding, listing: str) -> None:
    def stage() -> Stage:
        return Stage(landing, listing=listing, rules=RULES)

    for done in stop_at_each_request(stage, lambda system: system.admit("clicks")):
        done.system.admit("clicks", all_files=True)
        found = offsets(done.system)
        assert sorted(found.values()) == [0, 1, 3, 4, 6, 7, 8, 9, 10, 11, 102]
        kept = {offset: value for offset, value in done.before.items() if value != 2}
        assert kept.items() <= found.items()
        assert problems(done.system) == {"02.jsonl": "lost", "05.jsonl": "set aside"}


def maintain_later(system: FolderStreams) -> None:
    """Maintain the stream by the clock of its lake, as if that of the store were the same."""
    system.maintain("clicks", system.lake.now())


@pytest.mark.lengthy
@pytest.mark.usefixtures("small_pages")
def test_a_maintenance_that_stops_at_any_request(landing: LocalLanding) -> None:
    def stage() -> Stage:
        made = Stage(landing, rules=RULES, retention=FileRetention(max_files=6))
        made.clock.forward(hours=2)
        return made

    for done in stop_at_each_request(stage, maintain_later):
        found = look(done.system)
        assert sorted(found) == [7, 8, 9, 10, 11, 102]
        done.clock.forward(hours=2)
        maintain_later(done.system)
        file_log._read_files.cache.clear()  # type: ignore[attr-defined]
        assert look(done.system) == found


def test_files_take_the_places_of_folders_and_of_files(landing: LocalLanding) -> None:
    system = clicks(landing, lake_in(InMemoryStore()))
    landing.put("a/x.jsonl", lines(1))
    landing.put("b.jsonl", lines(2))
    assert look(system) == [1, 2]
    landing.delete("a/x.jsonl")
    (landing.root / "a").rmdir()
    landing.put("a", lines(3))
    landing.delete("b.jsonl")
    landing.put("b.jsonl/x.jsonl", lines(4))
    for gone in ("a/x.jsonl", "b.jsonl"):
        with pytest.raises(errors.AdmittedFileError) as caught:
            look(system)
        assert caught.value.rule == "lost"
        system.set_aside("clicks", gone, reason="gone")
    assert look(system) == [3, 4]


def test_links_that_lead_nowhere_are_left_out(landing: LocalLanding) -> None:
    landing.put("a.jsonl", lines(1))
    for name, target in (("here", "."), ("nowhere.jsonl", "nothing")):
        (landing.root / name).symlink_to(target)
    system = clicks(landing, lake_in(InMemoryStore()))
    assert look(system) == [1]
    (landing.root / "circle").symlink_to("circle")
    with pytest.raises(errors.ConfigurationError, match="symbolic links"):
        look(system)


@pytest.mark.parametrize("seconds", [0, -1, -62_135_596_810, 4_000_000_000, 2_600_000_000_000])
def test_wrong_times_of_files(seconds: int) -> None:
    exact = {"st_mtime": float(seconds), "st_mtime_ns": seconds * 10**9}
    facts = os.stat_result((0o100644, 1, 1, 1, 0, 0, 9, seconds, seconds, seconds), exact)
    listed = _listed_local_file("a.jsonl", facts)
    assert datetime(1, 1, 1, tzinfo=UTC) < listed.modified < datetime(9999, 12, 31, tzinfo=UTC)


def test_any_name_of_a_file(landing: LocalLanding) -> None:
    names = ["ü ñ.jsonl", "e\u0301.jsonl", "\u00e9.jsonl", "a b%20c.jsonl", "%.jsonl", "-r.jsonl"]
    names += [
        "q'\"`$;#.jsonl",
        "d=1=2/x.jsonl",
        "back\\slash.jsonl",
        "new\nline.jsonl",
        "*?[].jsonl",
    ]
    names.append("/".join(["d" * 200] * 5) + "/z.jsonl")
    for number, name in enumerate(names):
        landing.put(name, lines(number))
    system = clicks(landing, lake_in(InMemoryStore()))
    assert sorted(look(system)) == [*range(len(names))]
    assert problems(system) == {}
