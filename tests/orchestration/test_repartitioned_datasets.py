"""The command that rewrites a stream, over the datasets that follow it: carried with it, or
refusing it.
"""

from __future__ import annotations

import itertools
from contextlib import suppress

import pytest

from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.maintenance.repartition import (
    repartition_dataset,
    repartition_stream,
)
from dagster_adjunct.resources.errors import StillReadError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.assets.conftest import World
from tests.assets.cycle import NAME, PLANES, deliver, planes_in, publish, served, whole
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.rounds import rounds

WHY = {"reason": "more machines", "by": "ada"}


def published() -> World:
    world = planes_in(lake_in(InMemoryStore()))
    publish(world, 1)
    return world


def test_a_dataset_that_has_read_all_goes_on_and_is_named() -> None:
    world = published()
    assert repartition_stream(world.lake, NAME, 5, dry_run=True, **WHY).datasets == (NAME,)
    assert repartition_stream(world.lake, NAME, 5, **WHY).datasets == (NAME,)
    assert len(StoredVersions(world.lake, NAME).require_manifest().offsets) == 5
    repartition_dataset(world.lake, NAME, 5, **WHY)
    assert served(world.lake) == whole(1)


def test_one_that_has_not_refuses_the_rewriting_unless_it_is_forced() -> None:
    world = published()
    deliver(world, 2)
    with pytest.raises(StillReadError) as failure:
        repartition_stream(world.lake, NAME, 5, **WHY)
    assert failure.value.stream == "lake.planes"
    world.advance(PLANES)
    assert repartition_stream(world.lake, NAME, 5, **WHY).affected == ()


@pytest.mark.lengthy
@pytest.mark.rounds
def test_a_crash_at_any_request_leaves_a_dataset_that_goes_on() -> None:
    seen = set()
    for nth in itertools.count(1, rounds(2, 1)):
        world = published()
        store = FaultyStore(world.lake.store, [Fault("*", nth, "crash-after")])
        with suppress(Crash):
            repartition_stream(Lake(store, world.lake.id), NAME, 5, **WHY)
        seen.add(
            (
                world.streams.info(NAME).partitions,
                len(StoredVersions(world.lake, NAME).require_manifest().offsets),
            )
        )
        publish(world, 2)
        assert served(world.lake) == whole(2)
        assert [ref.name for ref in StoredVersions(world.lake, NAME).versions()] == ["v1", "v2"]
        if nth > len(store.requests):
            break
    assert seen == {(2, 2), (5, 2), (5, 5)}
