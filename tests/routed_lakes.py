"""Lakes for tests that are to hold wherever metadata are: among a lake's objects, or in a key-value table."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.upkeep.metadata_moving import move_metadata
from dagster_adjunct.resources.lakes import open_lake
from dagster_adjunct.resources.metadata_tables.metadata_table import objects_in
from dagster_adjunct.resources.metadata_tables.routed_store import RoutedStore
from dagster_adjunct.resources.objects import Lake, ObjectStore
from dagster_adjunct.resources.objects.object_store import ObjectInfo
from dagster_adjunct.resources.times import utc_now
from tests.faulty_store import FaultyStore

PLACES = ("objects", "table")
PLACES_AT_LENGTH = ("objects", pytest.param("table", marks=pytest.mark.long))


def lake_with_metadata_in(place: str, folder: Path) -> Lake:
    """Return a new lake in a folder; "table" has its metadata in SQLite beside it."""
    lake = open_lake(folder)
    if place == "objects":
        return lake
    move_metadata(lake, "lake", "metadata", partitions=2)
    return open_lake(folder)


class SlowClock(FaultyStore):
    """A store whose clock is slow."""

    def __init__(self, inner: ObjectStore, seconds: float) -> None:
        super().__init__(inner)
        self.by = timedelta(seconds=seconds)

    def head(self, key: str) -> ObjectInfo | None:
        info = super().head(key)
        return None if info is None else replace(info, modified=info.modified - self.by)


def put_ago(lake: Lake, key: str, data: bytes, seconds: float) -> None:
    """Write an object that is so old, by the store's clock."""
    if lake.metadata_place is not None:
        assert isinstance(lake.store, RoutedStore)
        objects_in(SlowClock(lake.store.objects, seconds), lake.metadata_place).put(key, data)
        return
    lake.store.put(key, data)
    old = utc_now().timestamp() - seconds
    os.utime(Path(lake.url) / key, (old, old))
