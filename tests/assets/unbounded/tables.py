"""Small tables that follow a stream of (k, n), and what is in them by Spark and by key."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.reading.stored_file import list_stored_files, read_stored_file
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.superseded import make_mask
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.compaction import read_generations
from dagster_adjunct.assets.versions.leases import attempt_key, list_attempts
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import Fault, FaultyStore

COLUMNS = Schema.of(k="string", n="int")
BY_HAND = DeltaCompaction(inside_commit=False)
KEYS = [*"abcdefghijklmnopqrstuvwxyz"]
Content = dict[str, int]


def table(world: World, name: str = "table", **options: Any) -> AdjunctDataset:
    """Declare a table, with a stream of its name; nothing is compacted unless it is asked for."""
    if not options.keys() & {"partitions", "broadcast"}:
        options["partitions"] = 2
    if name not in world.streams.list_streams():
        world.stream(name, COLUMNS, ["k"], options.get("partitions", 1))
    return unbounded_dataset(
        name, input=f"lake.{name}", key="k", **{"compaction": BY_HAND, **options}
    )


def send(
    world: World, spec: AdjunctDataset, changes: Mapping[str, int | None]
) -> tuple[str, Content]:
    """Apply changes in one commit (None deletes); return the version that it made, and what is
    in it.
    """
    view = StoredVersions(world.lake, spec).current()
    before = {} if view is None else {key: entry["n"] for key, entry in view.items()}
    world.send(spec.name, list(changes.items()))
    world.advance(spec)
    after = {key: n for key, n in {**before, **changes}.items() if n is not None}
    return world.view(spec).version, after


def entries(world: World, spec: AdjunctDataset, version: str | None = None) -> Content:
    """Return what a version holds, by key and in order, and the same by Spark where the world
    has it.
    """
    store = StoredVersions(world.lake, spec.name)
    view = store.require_current() if version is None else store.version(version)
    held = content(view)
    assert view.rows in (None, len(held))
    assert unmasked(view) == sorted(held.items()), "a mask of this version would be another one"
    if world.spark is not IN_PROCESS:
        rows = [(row.k, row.n) for row in view.frame(world.spark()).collect()]
        assert len(dict(rows)) == len(rows), "a key stands twice in the frame"
        assert dict(rows) == held
    return held


def stored(world: World, spec: AdjunctDataset) -> set[tuple[int, str, bool]]:
    """Return (generation, key, whether it is a tombstone) of all stored rows of the version that
    is served.
    """
    sealed = world.view(spec).sealed
    rows = read_generations(
        world.spark, world.lake.store, "test", sealed.layout, sealed.generations
    )
    named = (
        rows.to_pylist() if world.spark is IN_PROCESS else [row.asDict() for row in rows.collect()]
    )
    return {(row["__gen"], row["k"], row["__tombstone"]) for row in named}


def content(view: Any) -> Content:
    """Return what a view holds, read without Spark."""
    values = {key: entry["n"] for key, entry in view.items()}
    assert {key: entry["n"] for key, entry in view.get_all(KEYS).items()} == values
    return values


def unmasked(view: VersionReader) -> list[tuple[str, int]]:
    """Return the stored rows that a mask of the version leaves, by key."""
    if view.sealed.history is not None:
        return sorted(content(view).items())
    mask = make_mask(view.store, view.dataset, view.sealed)
    left = []
    for stored in list_stored_files(view.store, view.dataset, view.sealed):
        rows = read_stored_file(stored, view.sealed.layout).select(["k", "n"]).to_pylist()
        packed = mask.bits.get((stored.generation.id, stored.file.bucket), b"\0" * len(rows))
        left += [
            (row["k"], row["n"]) for at, row in enumerate(rows) if not packed[at // 8] >> at % 8 & 1
        ]
    return sorted(left)


def copy_of(world: World, folder: Path) -> World:
    """Return a copy of the lake, with what the producer has sent."""
    shutil.copytree(world.lake.url, folder)
    return World(open_lake(folder), world.spark, dict(world.sequences))


def faulty(world: World, *faults: Fault) -> Lake:
    """Return the world's lake with these faults."""
    return Lake(FaultyStore(world.lake.store, faults), world.lake.id)


def left_over(world: World, spec: AdjunctDataset) -> set[str]:
    """Return folders that neither the current version nor earlier ones need, and records of
    builds.
    """
    manifest = StoredVersions(world.lake, spec.name).require_manifest()
    assert manifest.version is not None
    needed = {generation.folder for generation in manifest.version.generations}
    needed |= {retired.folder for retired in manifest.retired}
    there = {
        item.key.rsplit("/", 1)[0] for item in world.lake.store.list(f"datasets/{spec.name}/data/")
    }
    return (there - needed) | {
        attempt_key(world.lake, spec.name, attempt)
        for attempt in list_attempts(world.lake, spec.name)
    }
