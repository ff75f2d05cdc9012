"""What was rejected keeps its name until it is dropped, what is revoked gives it back: it can be
delivered again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.bounded import advance as place_in_input
from dagster_adjunct.assets.bounded.advance import advance_version_set
from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    FileSource,
    bounded_dataset,
    version_set,
)
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.version import Verdict
from dagster_adjunct.resources.errors import MarkerConflictError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import Fault, FaultyStore

SCHEMA = Schema.of(k="string", n="int")
WHY = {"reason": "ticket 7", "by": "ada"}


class Positive:
    """Refuses versions in which `a` is not positive."""

    name = "positive"
    severity = "error"

    def __call__(self, candidate: Any) -> Verdict:
        number = (candidate.view.get("a") or {"n": 1})["n"]
        return Verdict(name=self.name, passed=number > 0, message=f"a is {number}")


def of_stream(name: str) -> AdjunctDataset:
    return bounded_dataset(
        name, input=f"lake.{name}", key="k", partitions=2, validators=[Positive()]
    )


PRICES = of_stream("prices")
SET = version_set("both", of_stream("fares"), of_stream("routes"))


@pytest.fixture
def plain(world: World) -> World:
    world.spark = IN_PROCESS
    for name in ("prices", "fares", "routes"):
        world.stream(name, SCHEMA, ["k"], 2)
    return world


def deliver(world: World, version: str, number: int, name: str = "prices") -> None:
    world.send(name, [("a", number), ("b", 1)], version=version)


def served(world: World, name: str = "prices") -> int:
    entry = StoredVersions(world.lake, name).require_current().get("a")
    assert entry is not None
    return int(entry["n"])


@pytest.mark.lengthy
def test_a_rejected_version_that_was_dropped_can_be_delivered_again_under_its_name(
    plain: World,
) -> None:
    deliver(plain, "v1", 1)
    deliver(plain, "v2", -2)
    report = plain.advance(PRICES)
    (rejected,) = report.rejected
    for step in ("show prices", "accept prices", "remove-version prices"):
        assert f"adjunct dataset {step} {rejected}" in report.note
    assert "and deliver it again under the same name" in report.note

    deliver(plain, "v2", 2)
    report = plain.advance(PRICES)
    assert (report.action, report.counters, served(plain)) == ("up-to-date", {"redelivered": 2}, 1)

    StoredVersions(plain.lake, PRICES).remove_version("v2", **WHY)
    assert plain.advance(PRICES).action == "up-to-date", (
        "what was dropped as a re-delivery does not come back"
    )
    deliver(plain, "v2", 3)
    report = plain.advance(PRICES)
    assert (report.action, report.counters.get("redelivered"), served(plain)) == ("sealed", None, 3)
    assert [ref.name for ref in StoredVersions(plain.lake, PRICES).versions()] == ["v1", "v2"]

    deliver(plain, "v2", 4)
    assert plain.advance(PRICES).counters == {"redelivered": 2}, "the name is taken again"


def test_a_rejected_version_that_comes_again_with_other_counts_stops_nothing(plain: World) -> None:
    plain.mark("prices", "v1", [0, 1], {0: 7, 1: 7})
    assert plain.advance(PRICES).action == "rejected"
    plain.mark("prices", "v1", [0, 1], {0: 0, 1: 0})
    assert plain.advance(PRICES).action == "waiting"
    StoredVersions(plain.lake, PRICES).remove_version("v1", **WHY)
    plain.mark("prices", "v1", [0, 1], {0: 0, 1: 0})
    assert plain.advance(PRICES).action == "sealed"


def test_a_version_that_was_refused_before_it_was_built_is_not_reported_as_forceable(
    plain: World,
) -> None:
    plain.mark("prices", "v1", [0, 1], {0: 7, 1: 7})
    note = plain.advance(PRICES).note
    assert "adjunct dataset remove-version prices" in note
    assert "adjunct dataset accept" not in note


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("gone", ["v2", "v3"])
def test_the_name_of_a_revoked_version_can_be_delivered_again(
    plain: World, drop: bool, gone: str
) -> None:
    for number in (1, 2, 3):
        deliver(plain, f"v{number}", number)
    plain.advance(PRICES)
    store = StoredVersions(plain.lake, PRICES)
    store.revoke(gone, **WHY)
    assert served(plain) == (2 if gone == "v3" else 3)
    if drop:
        store.remove_version(gone, **WHY)
    assert plain.advance(PRICES).action == "up-to-date"
    deliver(plain, gone, 7)
    report = plain.advance(PRICES)
    assert (report.action, report.counters.get("redelivered"), served(plain)) == ("sealed", None, 7)
    deliver(plain, gone, 8)
    assert (plain.advance(PRICES).counters, served(plain)) == ({"redelivered": 2}, 7), (
        "the name is taken again"
    )
    store.revoke(gone, **WHY)
    deliver(plain, gone, 9)
    assert (plain.advance(PRICES).action, served(plain)) == ("sealed", 9)


def test_a_revoked_version_delivered_unchanged_is_not_served_and_takes_no_name(
    plain: World,
) -> None:
    for number in (1, 2):
        deliver(plain, f"v{number}", number)
    plain.advance(PRICES)
    store = StoredVersions(plain.lake, PRICES)
    (gone,) = [ref.id for ref in store.versions() if ref.name == "v2"]
    store.revoke("v2", **WHY)
    deliver(plain, "v2", 2)
    report = plain.advance(PRICES)
    assert (report.action, served(plain)) == ("rejected", 1)
    assert (
        f"the content of version {gone} of this name, which is revoked: ticket 7 (by ada)"
        in report.note
    )
    deliver(plain, "v2", 3)
    assert (plain.advance(PRICES).action, served(plain)) == ("sealed", 3)
    assert store.accept(report.rejected[0], make_current=True, **WHY).version is not None
    assert served(plain) == 2, "on somebody's word"


@pytest.mark.parametrize("names", [["v1", "v2", "v3"], ["longago"]])
def test_a_version_frees_all_names_that_it_has_where_it_is_revoked(
    plain: World, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    deliver(plain, "v0", 1)
    for name in names:
        deliver(plain, name, 2)
    plain.advance(PRICES)
    if names == ["longago"]:
        monkeypatch.setattr(place_in_input, "MAX_DELIVERIES", 1)
        for name in ("x", "y"):
            deliver(plain, name, ord(name))
            plain.advance(PRICES)
    StoredVersions(plain.lake, PRICES).revoke(names[-1], **WHY)
    for number, name in enumerate(names, 3):
        deliver(plain, name, number)
        assert (plain.advance(PRICES).action, served(plain)) == ("sealed", number)


@pytest.mark.lengthy
@pytest.mark.parametrize("late", [False, True], ids=["dropped before", "dropped after"])
def test_the_name_is_free_however_many_versions_come_between(
    plain: World, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr(place_in_input, "MAX_DELIVERIES", 2)
    store = StoredVersions(plain.lake, PRICES)
    deliver(plain, "v1", -1)
    plain.advance(PRICES)
    if not late:
        store.remove_version("v1", **WHY)
    for number in (2, 3, 4, 5):
        deliver(plain, f"v{number}", number)
        plain.advance(PRICES)
    manifest = store.require_manifest()
    assert ("v1" in manifest.known) is late
    assert "v2" in manifest.known
    if late:
        store.remove_version("v1", **WHY)
    deliver(plain, "v1", 6)
    assert (plain.advance(PRICES).action, served(plain)) == ("sealed", 6)
    deliver(plain, "v1", 7)
    assert plain.advance(PRICES).counters == {"redelivered": 2}


@pytest.mark.lengthy
def test_a_drop_during_a_build_does_not_cost_the_build(plain: World) -> None:
    deliver(plain, "v1", -1)
    plain.advance(PRICES)
    store = StoredVersions(plain.lake, PRICES)
    for nth in range(1, 100):
        deliver(plain, f"d{nth}", -1)
        rejected = plain.advance(PRICES).rejected[-1]
        deliver(plain, f"e{nth}", nth)
        fault = Fault("*", nth, "meanwhile", lambda id=rejected: store.remove_version(id, **WHY))
        faulty = FaultyStore(plain.lake.store, [fault])
        report = plain.advance(PRICES, lake=Lake(faulty, plain.lake.id))
        assert (report.action, served(plain)) == ("sealed", nth)
        taken = store.require_manifest().taken
        assert (f"d{nth}" in taken, f"e{nth}" in taken) == (len(faulty.requests) < nth, True)
        if len(faulty.requests) < nth:
            return
    raise AssertionError("an advance has less requests")


@pytest.mark.lengthy
def test_of_a_version_set_the_name_is_free_in_all_members(plain: World) -> None:
    def advance() -> list[str]:
        reports = advance_version_set(
            SET, lake=plain.lake, systems=plain.systems, spark=IN_PROCESS, by="test"
        )
        return [report.action for report in reports]

    deliver(plain, "v1", 1, "fares")
    deliver(plain, "v1", -1, "routes")
    assert advance() == ["rejected", "rejected"]
    for name in ("fares", "routes"):
        deliver(plain, "v1", 2, name)
    assert advance() == ["waiting", "waiting"]

    StoredVersions(plain.lake, "fares").remove_version("v1", **WHY)
    deliver(plain, "v1", 3, "routes")
    assert advance() == ["waiting", "waiting"]
    deliver(plain, "v1", 3, "fares")
    assert advance() == ["sealed", "sealed"]
    assert (served(plain, "fares"), served(plain, "routes")) == (3, 3)


@pytest.mark.lengthy
def test_a_revoked_name_of_a_version_set_can_be_delivered_again(plain: World) -> None:
    def advance() -> list[str]:
        reports = advance_version_set(
            SET, lake=plain.lake, systems=plain.systems, spark=IN_PROCESS, by="test"
        )
        return [report.action for report in reports]

    def send(version: str, fares: int, routes: int) -> list[str]:
        deliver(plain, version, fares, "fares")
        deliver(plain, version, routes, "routes")
        return advance()

    assert send("v1", 1, 1) == ["sealed", "sealed"]
    assert send("v2", 2, 1) == ["sealed", "unchanged"]
    StoredVersions(plain.lake, "fares").revoke("v2", **WHY)
    assert (served(plain, "fares"), served(plain, "routes")) == (1, 1)
    assert send("v2", 2, 1) == ["rejected", "rejected"], "as it was"
    assert send("v2", 3, 4) == ["sealed", "sealed"]
    assert (served(plain, "fares"), served(plain, "routes")) == (3, 4)

    StoredVersions(plain.lake, "routes").revoke("v2", **WHY)
    assert (served(plain, "fares"), served(plain, "routes")) == (1, 1)
    assert send("v2", 3, 5) == ["sealed", "sealed"], (
        "fares was right, and goes with what was corrected"
    )
    assert (served(plain, "fares"), served(plain, "routes")) == (3, 5)


# -- files


def folder_of(tmp_path: Path, version: str, done: str) -> None:
    """Complete a folder with a file that has a header line only, so that nothing has to be
    built.
    """
    folder = tmp_path / "incoming" / version
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "part.csv").write_text("k,n\n")
    (folder / "_SUCCESS").write_text(done)


def test_a_rejected_and_dropped_folder_is_a_version_once_completed_again(
    world: World, tmp_path: Path
) -> None:
    source = FileSource(str(tmp_path / "incoming"), "csv", SCHEMA)
    spec = bounded_dataset("prices", input=source, key="k", partitions=2)
    folder_of(tmp_path, "v1", '{"rows": 7}')
    report = world.advance(spec)
    assert report.action == "rejected"
    assert "and complete the folder again" in report.note
    StoredVersions(world.lake, spec).remove_version("v1", **WHY)
    assert world.advance(spec).action == "waiting", (
        "the folder that was refused is not taken once more"
    )

    folder_of(tmp_path, "v1", '{"rows": 0}')
    assert world.advance(spec).action == "sealed"
    assert [ref.name for ref in StoredVersions(world.lake, spec).versions()] == ["v1"]


def test_a_dropped_folder_blocks_nothing_and_is_late_after_another_version(
    world: World, tmp_path: Path
) -> None:
    source = FileSource(str(tmp_path / "incoming"), "csv", SCHEMA)
    spec = bounded_dataset("prices", input=source, key="k", partitions=2)
    folder_of(tmp_path, "v1", '{"rows": 7}')
    world.advance(spec)
    StoredVersions(world.lake, spec).remove_version("v1", **WHY)
    folder_of(tmp_path, "v2", '{"rows": 0}')
    assert world.advance(spec).action == "sealed"
    assert world.advance(spec).action == "up-to-date"
    folder_of(tmp_path, "v1", '{"rows": 1}')
    with pytest.raises(MarkerConflictError) as failure:
        world.advance(spec)
    assert failure.value.version == "v2"
