"""A lake in memory, a clock that tests move, and records as tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from dagster_adjunct.resources.objects.lake import Lake, lake_in, open_lake
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from tests.clocks import Clock, on_clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture
def streams(lake: Lake, clock: Clock) -> LakeStreams:
    return LakeStreams(on_clock(lake, clock))


@pytest.fixture
def local_lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake in ünïcode")


@pytest.fixture
def records() -> Callable[..., pa.Table]:
    """Return a table of SCHEMA from (key, value) pairs."""

    def table(*rows: tuple[str | None, int], **marks: list[object]) -> pa.Table:
        made = pa.table(
            {
                "k": pa.array([k for k, _ in rows], pa.string()),
                "v": pa.array([v for _, v in rows], pa.int64()),
            }
        )
        for name, values in marks.items():
            made = made.append_column(name, pa.array(values))
        return made

    return table
