"""Lakes for tests that are to hold wherever metadata are: among a lake's objects, or in a key-value table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from dagster_adjunct.orchestration.upkeep.metadata_moving import move_metadata
from dagster_adjunct.resources.lakes import open_lake
from dagster_adjunct.resources.metadata_tables.store_clock import StoreClock
from dagster_adjunct.resources.objects import Lake
from dagster_adjunct.resources.times import utc_now

PLACES = ("objects", "table")
PLACES_AT_LENGTH = ("objects", pytest.param("table", marks=pytest.mark.long))


def lake_with_metadata_in(place: str, folder: Path) -> Lake:
    """Return a new lake in a folder; "table" has its metadata in SQLite beside it."""
    lake = open_lake(folder)
    if place == "objects":
        return lake
    move_metadata(lake, "lake", "metadata", partitions=2)
    return open_lake(folder)


@contextmanager
def written_ago(lake: Lake, key: str, seconds: float) -> Iterator[None]:
    """Have the object that is written in the block be so old, by the store's clock."""
    old = utc_now() - timedelta(seconds=seconds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoreClock, "now", lambda clock: old)
        yield
    if lake.metadata_place is None:
        os.utime(Path(lake.url) / key, (old.timestamp(), old.timestamp()))
