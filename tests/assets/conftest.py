"""A lake with streams to make datasets from, and short ways to put records on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import StreamSystem
from tests.assets.foreign_streams import ForeignStreams

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = tuple[Any, ...]


def no_spark() -> SparkSession:
    raise AssertionError("Spark was asked for where there was nothing to build")


@dataclass
class World:
    """One lake, its streams, and what a producer and a reader do with them."""

    lake: Lake
    spark: Callable[[], SparkSession] = no_spark
    sequences: dict[str, int] = field(default_factory=dict)
    foreign: dict[str, Schema] = field(default_factory=dict)

    @property
    def streams(self) -> LakeStreams:
        return LakeStreams(self.lake)

    @property
    def systems(self) -> dict[str, StreamSystem]:
        return {"lake": ForeignStreams(self.lake, self.foreign) if self.foreign else self.streams}

    def stream(self, name: str, schema: Schema, key: Sequence[str], partitions: int) -> None:
        self.streams.create(name, schema=schema, key=key, partitions=partitions)

    def send(self, stream: str, rows: Sequence[Row], *, version: str | None = None) -> None:
        """Append rows (tuples in the stream's order; a tombstone has None in every value
        column).
        """
        schema = self.streams.info(stream).schema
        key = self.streams.info(stream).key
        columns: dict[str, Any] = {
            name: pa.array([row[index] for row in rows], schema.to_arrow().field(name).type)
            for index, name in enumerate(schema.names)
        }
        values = [index for index, name in enumerate(schema.names) if name not in key]
        columns["__tombstone"] = pa.array(
            [all(row[i] is None for i in values) for row in rows], pa.bool_()
        )
        self.streams.append(
            stream,
            pa.table(columns),
            producer="test",
            sequence=self._next(stream),
            end_of_dataset=version,
        )

    def mark(
        self,
        stream: str,
        version: str,
        partitions: Sequence[int],
        rows: dict[int, int] | None = None,
    ) -> None:
        self.streams.append_markers(
            stream,
            version,
            producer="test",
            sequence=self._next(stream),
            partitions=partitions,
            rows=rows,
        )

    def advance(self, spec: AdjunctDataset, *, lake: Lake | None = None) -> AdvanceReport:
        return advance_dataset(
            spec, lake=lake or self.lake, systems=self.systems, spark=self.spark, by="test"
        )

    def view(self, spec: AdjunctDataset) -> VersionReader:
        return StoredVersions(self.lake, spec).require_current(self.systems)

    def _next(self, stream: str) -> int:
        self.sequences[stream] = self.sequences.get(stream, 0) + 1
        return self.sequences[stream]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A fresh lake in a folder; asking for Spark fails the test."""
    return World(open_lake(tmp_path / "lake"))


@pytest.fixture(params=[pytest.param("spark", marks=pytest.mark.long), "in process"])
def either(request: pytest.FixtureRequest, world: World) -> World:
    """A fresh lake whose datasets are made in process, and again by Spark: what holds for one holds
    for the other.

    That both decode the same is compared in tests/assets/changes/test_decoders_alike.py, and that
    they make the same tables in tests/assets/unbounded/test_engines.py.
    """
    session = request.getfixturevalue("spark") if request.param == "spark" else None
    world.spark = IN_PROCESS if session is None else lambda: session
    return world


@pytest.fixture
def sparkling(world: World, spark: SparkSession) -> World:
    """A fresh lake and the shared session."""
    world.spark = lambda: spark
    return world


@pytest.fixture
def new_world(tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Callable[[], World]:
    """Make further lakes, for tests that run many histories."""
    return lambda: World(open_lake(tmp_path_factory.mktemp("lake")), lambda: spark)
