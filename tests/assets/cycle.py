"""One bounded dataset that goes through the real cycle without Spark, and what the lake holds of
it.

What is reachable is worked out from the stored JSON alone, so that it is no word of the code under
test.
"""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.conftest import World
from tests.faulty_store import Fault, FaultyStore

NAME = "planes"
SCHEMA = Schema.of(k="string", n="int")
PLANES = bounded_dataset(NAME, input="lake.planes", key="k", partitions=2)
KEYS = ("a", "b", "c", "d")
WHY = {"reason": "ticket 7", "by": "ada"}
AT_ONCE = DiscardPolicy(keep=1, grace=timedelta(0))
Content = dict[str, int]


def planes_in(lake: Lake) -> World:
    """Return a world whose lake has the dataset's stream."""
    world = World(lake, IN_PROCESS)
    world.stream(NAME, SCHEMA, ["k"], 2)
    return world


def deliver(world: World, number: int, *, keys: tuple[str, ...] = KEYS) -> None:
    """Deliver version `v{number}`, in which every key has this number."""
    world.send(NAME, [(key, number) for key in keys], version=f"v{number}")


def publish(world: World, *numbers: int, spec: Any = PLANES) -> list[str]:
    """Deliver and advance, version after version; return the ids now retained, oldest first."""
    for number in numbers:
        deliver(world, number)
        world.advance(spec)
    return [ref.id for ref in StoredVersions(world.lake, NAME).versions()]


def content(view: Any) -> Content:
    """Return what a view holds, read whole."""
    return {key: entry["n"] for key, entry in view.items()}


def served(lake: Lake, name: str = NAME) -> Content | None:
    """Return what a new reader gets."""
    view = StoredVersions(lake, name).current()
    return None if view is None else content(view)


def whole(number: int) -> Content:
    """Return the content of version `v{number}`."""
    return dict.fromkeys(KEYS, number)


def faulty(world: World, *faults: Fault) -> Lake:
    """Return the world's lake with these faults; without any, it tells what was asked of it."""
    return Lake(FaultyStore(world.lake.store, faults), world.lake.id)


def builds(lake: Lake) -> int:
    """Return how many generations were written into such a lake."""
    assert isinstance(lake.store, FaultyStore)
    return len(
        {key.rpartition("/")[0] for request, key in lake.store.requests if request == "upload"}
    )


def objects(lake: Lake, prefix: str = "") -> dict[str, str]:
    """Return all objects and their ETags."""
    return {item.key: item.etag for item in lake.store.list(prefix)}


def data_and_documents(lake: Lake, name: str = NAME) -> set[str]:
    """Return what lies in the lake of versions: files and documents."""
    return {
        key for part in ("data", "versions") for key in objects(lake, f"datasets/{name}/{part}/")
    }


def reached(lake: Lake, name: str = NAME) -> set[str]:
    """Return the files and documents that the current manifest needs, from the JSON as it is
    stored.
    """
    pointer = json.loads(lake.store.get(f"datasets/{name}/CURRENT").data)
    body = json.loads(lake.store.get(pointer["manifest"]).data)["body"]
    if body.get("version_set"):
        pointer = json.loads(lake.store.get(f"version-sets/{body['version_set']}/CURRENT").data)
        body = json.loads(lake.store.get(pointer["manifest"]).data)["body"]["members"][name]
    needed = _files(body["version"]) if body["version"] else set()
    for ref in body.get("versions", ()):
        if ref["document"] is not None:
            needed |= {ref["document"], *_files(json.loads(lake.store.get(ref["document"]).data))}
    return needed


def _files(version: dict[str, Any]) -> set[str]:
    return {
        f"{generation['folder']}/{file['name']}"
        for generation in version["generations"]
        for file in generation["files"]
    }


def pin_that_has_ended(store: StoredVersions, version: str) -> None:
    """Pin a version two hours ago, for one hour."""
    lake = store.log.lake
    earlier = Lake(
        lake.store,
        lake.id,
        shared=lake.shared,
        clock=lambda: datetime.now(UTC) - timedelta(hours=2),
    )
    StoredVersions(earlier, store.name).pin(
        version, **WHY, expires_at=datetime.now(UTC) - timedelta(hours=1)
    )


def make_older(lake: Lake, by: timedelta, prefix: str = "datasets/") -> None:
    """Move the modification times of a local lake's objects into the past."""
    for item in lake.store.list(prefix):
        then = time.time() - by.total_seconds()
        os.utime(Path(lake.url) / item.key, (then, then))
