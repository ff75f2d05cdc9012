"""Crashes between any two requests, and writers that race: what readers get is always one whole
state.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dagster_adjunct.assets.declaration.dataset import bounded_dataset, unbounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.resources.errors import CommitConflictError
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from tests.assets.conftest import World
from tests.faulty_store import Crash, Fault, FaultyStore, deaths

SCHEMA = Schema.of(k="string", v="int")
BOUNDED = bounded_dataset("refs", input="lake.changes", key="k", partitions=2)
UNBOUNDED = unbounded_dataset("refs", input="lake.changes", key="k", partitions=2)


def faulty(world: World, *faults: Fault) -> Lake:
    return Lake(FaultyStore(world.lake.store, faults), world.lake.id)


def content(world: World, spec) -> dict[str, int] | None:
    view = StoredVersions(world.lake, spec).current()
    if view is None:
        return None
    rows = {row.k: row.v for row in view.frame(world.spark()).collect()}
    assert {key: entry["v"] for key, entry in view.get_all(["a", "b", "c", "d"]).items()} == rows
    return rows


def copy_of(world: World, folder: Path) -> World:
    shutil.copytree(world.lake.url, folder)
    return World(open_lake(folder), world.spark, dict(world.sequences))


def crash_everywhere(world: World, spec, folder: Path, before, after) -> int:
    """Die where what is left differs, and after the last request; then advance again: as if nothing
    had been.

    Returned is how many requests there were.
    """
    whole = copy_of(world, folder / "whole")
    counted = faulty(whole)
    whole.advance(spec, lake=counted)
    requests = counted.store.requests  # type: ignore[attr-defined]
    for nth, kind in [
        *((death, "crash-before") for death in deaths(requests)),
        (len(requests), "crash-after"),
    ]:
        copy = copy_of(world, folder / f"{kind}-{nth}")
        with pytest.raises(Crash):
            copy.advance(spec, lake=faulty(copy, Fault("*", nth, kind)))  # type: ignore[arg-type]
        assert content(copy, spec) in (before, after), "neither the old nor the new state"
        copy.advance(spec)
        assert content(copy, spec) == after
        assert copy.advance(spec).action == "up-to-date"
    return len(requests)


@pytest.mark.rounds
@pytest.mark.spark
def test_a_seal_that_dies_after_any_request_is_taken_up(sparkling: World, tmp_path: Path) -> None:
    sparkling.stream("changes", SCHEMA, ["k"], 2)
    sparkling.send("changes", [("a", 1), ("b", 1)], version="v1")
    sparkling.advance(BOUNDED)
    sparkling.send("changes", [("b", 2), ("c", 2)], version="v2")
    assert crash_everywhere(sparkling, BOUNDED, tmp_path, {"a": 1, "b": 1}, {"b": 2, "c": 2}) >= 4


@pytest.mark.rounds
@pytest.mark.long  # in process: tests/assets/unbounded/test_crashes.py
@pytest.mark.spark
def test_a_bootstrap_that_dies_after_any_request_is_taken_up(
    sparkling: World, tmp_path: Path
) -> None:
    sparkling.stream("changes", SCHEMA, ["k"], 2)
    sparkling.send("changes", [("a", 1), ("b", 1), ("a", None)])
    assert crash_everywhere(sparkling, UNBOUNDED, tmp_path, None, {"b": 1}) >= 5


@pytest.mark.rounds
@pytest.mark.long  # in process: tests/assets/unbounded/test_crashes.py
@pytest.mark.spark
def test_a_commit_of_changes_that_dies_after_any_request_is_taken_up(
    sparkling: World, tmp_path: Path
) -> None:
    sparkling.stream("changes", SCHEMA, ["k"], 2)
    sparkling.send("changes", [("a", 1), ("b", 1)])
    sparkling.advance(UNBOUNDED)
    sparkling.send("changes", [("b", None), ("c", 2)])
    assert crash_everywhere(sparkling, UNBOUNDED, tmp_path, {"a": 1, "b": 1}, {"a": 1, "c": 2}) >= 4


@pytest.mark.spark
@pytest.mark.parametrize("spec", [BOUNDED, UNBOUNDED], ids=["bounded", "unbounded"])
def test_of_two_racing_writers_one_wins_and_the_other_leaves_nothing(
    sparkling: World, spec
) -> None:
    world = sparkling
    world.stream("changes", SCHEMA, ["k"], 2)
    world.send("changes", [("a", 1)], version="v1")
    world.advance(spec)
    world.send("changes", [("a", 2), ("b", 2)], version="v2")
    won: list[AdvanceReport] = []
    competitor = Fault("put_if_match", 1, "meanwhile", lambda: won.append(world.advance(spec)))
    with pytest.raises(CommitConflictError) as caught:
        world.advance(spec, lake=faulty(world, competitor))
    assert caught.value.dataset == "refs"
    view = StoredVersions(world.lake, spec).current()
    assert view.version == won[0].version
    assert content(world, spec) == {"a": 2, "b": 2}
    reachable = {
        f"{generation.folder}/{file.name}"
        for version in (
            view,
            *(StoredVersions(world.lake, spec).version(i) for i in _versions(world, spec)),
        )
        for generation in version.sealed.generations
        for file in generation.files
    }
    assert {item.key for item in world.lake.store.list("datasets/refs/data/")} == reachable
    assert world.advance(spec).action == "up-to-date"


def _versions(world: World, spec) -> list[str]:
    return [ref["id"] for ref in StoredVersions(world.lake, spec).describe().get("versions", ())]


def test_a_lost_reply_to_the_switch_counts_as_the_success_it_was(world: World) -> None:
    world.stream("changes", SCHEMA, ["k"], 2)
    world.mark("changes", "v1", [0])
    world.advance(BOUNDED)
    world.mark("changes", "v1", [1])
    report = world.advance(BOUNDED, lake=faulty(world, Fault("put_if_match", 1, "lost-after")))
    assert report.action == "sealed"
    assert world.view(BOUNDED).version == report.version
