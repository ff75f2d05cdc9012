"""A bit of a version's document that flips in its store: the version is neither read nor served,
and others are.
"""

from __future__ import annotations

import pytest

from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.errors import MalformedDocumentError, StoreUnavailableError
from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from tests.assets.cycle import NAME, World, content, planes_in, publish, served, whole
from tests.faulty_store import Fault, FaultyStore


@pytest.fixture
def planes() -> World:
    world = planes_in(lake_in(InMemoryStore()))
    publish(world, 1, 2)
    return world


def test_a_damaged_version_is_not_served_by_a_rollback(planes: World) -> None:
    versions = StoredVersions(planes.lake, NAME)
    first = versions.versions()[0]
    assert first.document is not None
    good = planes.lake.store.get(first.document).data
    for place in range(0, len(good), 9):
        bad = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
        planes.lake.store.put(first.document, bad)
        with pytest.raises(MalformedDocumentError) as raised:
            versions.rollback(reason="v2 is wrong", by="bob")
        assert raised.value.document == first.document
        assert versions.require_current().sealed.name == "v2"
    planes.lake.store.put(first.document, good)
    versions.rollback(reason="v2 is wrong", by="bob")
    assert served(planes.lake) == whole(1)


def test_a_store_that_does_not_answer_is_not_a_damaged_document(planes: World) -> None:
    below = f"datasets/{NAME}/versions/"
    store = FaultyStore(planes.lake.store, [Fault("get", 1, "lost-before", below=below)])
    versions = StoredVersions(Lake(store, planes.lake.id), NAME)
    with pytest.raises(StoreUnavailableError):
        versions.version("v1")
    assert content(versions.version("v1")) == whole(1)
