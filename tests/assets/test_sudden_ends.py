"""Processes that are killed (SIGKILL) anywhere in an advance or a discard: the next run ends as
if nothing had been.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import FileSource, bounded_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.retention.discard import discard
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets import writing
from tests.assets.conftest import World
from tests.assets.cycle import (
    AT_ONCE,
    NAME,
    PLANES,
    SCHEMA,
    builds,
    data_and_documents,
    deliver,
    faulty,
    make_older,
    objects,
    planes_in,
    publish,
    reached,
    served,
    whole,
)
from tests.faulty_store import Crash, Fault, FaultyStore, deaths

STAGES = ("collect", "build", "unchanged", "validate", "seal", "switch")


@pytest.fixture
def planes(tmp_path: Path) -> World:
    """Two versions are published, a third is delivered."""
    world = planes_in(open_lake(tmp_path / "lake"))
    publish(world, 1, 2)
    deliver(world, 3)
    return world


def copy_of(world: World, folder: Path) -> World:
    shutil.copytree(world.lake.url, folder)
    return World(open_lake(folder), IN_PROCESS, dict(world.sequences))


def kill(target: Callable[..., None], *args: Any) -> None:
    """Run this in a process of its own, which has to end by SIGKILL."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.assets.reading", "tests.assets.writing"])
    process = context.Process(target=target, args=args)
    process.start()
    process.join(writing.PATIENCE)
    assert process.exitcode == -signal.SIGKILL


def state_of(world: World) -> dict[str, object]:
    """Return what a user sees; ids differ from run to run."""
    manifest = StoredVersions(world.lake, NAME).require_manifest()
    return {
        "served": served(world.lake),
        "versions": [(ref.number, ref.name, ref.state, ref.rows) for ref in manifest.versions],
        "delivered": [
            (done.name, done.version == manifest.versions[-1].id) for done in manifest.delivered
        ],
        "offsets": manifest.offsets,
        "doomed": manifest.doomed,
        "left over": len(data_and_documents(world.lake)) - len(reached(world.lake)),
        "attempts": len(objects(world.lake, f"datasets/{NAME}/attempts/")),
    }


def tidied(world: World) -> dict[str, object]:
    """Return the state once everything that died is long past and a discard has run."""
    make_older(world.lake, timedelta(hours=1))
    discard(world.lake, NAME, AT_ONCE, by="test")
    return state_of(world)


@pytest.mark.lengthy
def test_an_advance_killed_at_any_stage_is_taken_up_where_it_was(
    planes: World, tmp_path: Path
) -> None:
    uninterrupted = copy_of(planes, tmp_path / "uninterrupted")
    uninterrupted.advance(PLANES)
    expected = state_of(uninterrupted)
    for stage in STAGES:
        copy = copy_of(planes, tmp_path / stage)
        kill(writing.advance_until_killed, copy.lake.url, stage)
        assert served(copy.lake) == whole(3 if stage == "switch" else 2)
        assert reached(copy.lake) <= data_and_documents(copy.lake)
        again = faulty(copy)
        report = copy.advance(PLANES, lake=again)
        assert report.action == ("up-to-date" if stage == "switch" else "sealed")
        assert builds(again) == (1 if stage == "collect" else 0), (
            "what was built is not built again"
        )
        garbage = 1 if stage == "seal" else 0  # the document that no commit came to name
        assert state_of(copy) == expected | {"left over": garbage}
        assert copy.advance(PLANES).action == "up-to-date"
        assert tidied(copy) == tidied(copy_of(uninterrupted, tmp_path / f"{stage}-tidied"))


def test_a_build_from_files_is_taken_up_as_well_unless_the_files_are_others(
    planes: World, tmp_path
) -> None:
    spec = bounded_dataset(
        "files", input=FileSource(str(tmp_path / "in"), "jsonl", SCHEMA), key="k", partitions=2
    )
    folder = tmp_path / "in" / "v1"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text('{"k": "a", "n": 1}')
    (folder / "_SUCCESS").touch()

    def die_before_the_seal() -> int:
        lake = faulty(planes, Fault("put_if_absent", 1, "crash-before"))
        with pytest.raises(Crash):
            planes.advance(spec, lake=lake)
        return builds(lake)

    assert [die_before_the_seal(), die_before_the_seal()] == [1, 0], (
        "what was built is not built again"
    )
    (folder / "rows.jsonl").write_text('{"k": "a", "n": 2}')
    assert [die_before_the_seal(), die_before_the_seal()] == [1, 0]
    last = faulty(planes)
    assert planes.advance(spec, lake=last).action == "sealed"
    assert (builds(last), served(planes.lake, "files")) == (0, {"a": 2})


@pytest.mark.lengthy
@pytest.mark.rounds
def test_an_advance_killed_at_any_request_is_taken_up(planes: World, tmp_path: Path) -> None:
    uninterrupted = copy_of(planes, tmp_path / "uninterrupted")
    counting = FaultyStore(uninterrupted.lake.store)
    uninterrupted.advance(PLANES, lake=Lake(counting, planes.lake.id))
    expected = tidied(uninterrupted)
    for nth in deaths(counting.requests):
        copy = copy_of(planes, tmp_path / f"{nth}")
        kill(writing.advance_until_request, copy.lake.url, nth)
        assert served(copy.lake) in (whole(2), whole(3))
        copy.advance(PLANES)
        assert copy.advance(PLANES).action == "up-to-date"
        assert tidied(copy) == expected


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_discard_killed_at_any_request_is_ended_by_the_next_one(
    planes: World, tmp_path: Path
) -> None:
    planes.advance(PLANES)
    make_older(planes.lake, timedelta(hours=1))
    uninterrupted = copy_of(planes, tmp_path / "uninterrupted")
    counting = FaultyStore(uninterrupted.lake.store)
    assert len(discard(Lake(counting, planes.lake.id), NAME, AT_ONCE, by="test").discarded) == 2
    expected = state_of(uninterrupted)
    for nth in deaths(counting.requests):
        copy = copy_of(planes, tmp_path / f"{nth}")
        kill(writing.discard_until_request, copy.lake.url, nth)
        assert served(copy.lake) == whole(3)
        assert reached(copy.lake) <= data_and_documents(copy.lake)
        assert tidied(copy) == expected
