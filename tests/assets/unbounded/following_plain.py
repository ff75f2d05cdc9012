"""One table that follows a change stream in process, for what surrounds decoding and writing:
recovery, commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.advance import advance_unbounded
from dagster_adjunct.assets.versions.manifest import DatasetManifest
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, ignore_stage
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    LogCompaction,
    StreamInfo,
    SystemStreamPartition,
)
from tests.assets.conftest import World
from tests.clocks import on_clock

NAME = "accounts"
COLUMNS = Schema.of(k="string", n="int")
BEGAN = datetime.now(UTC)
Content = dict[str, int]


@dataclass
class Shape:
    """What a stream is told to be that a lake stream can't be: compacted by key, or of fewer
    partitions.
    """

    compaction: LogCompaction | None = None
    partitions: int | None = None


class ShapedStreams(LakeStreams):
    """The lake's streams under another shape; a compacted one may lose records from its front
    and still tells all.
    """

    def __init__(self, lake: Lake, shape: Shape) -> None:
        super().__init__(lake)
        self.shape = shape

    def info(self, stream: str) -> StreamInfo:
        info, shape = super().info(stream), self.shape
        partitions = shape.partitions or info.partitions
        return replace(info, partitions=partitions, compaction=shape.compaction)


@dataclass
class Table:
    """One dataset, what is sent to its stream, and what its readers get."""

    world: World
    spec: AdjunctDataset
    shape: Shape = field(default_factory=Shape)

    @property
    def streams(self) -> ShapedStreams:
        return ShapedStreams(self.world.lake, self.shape)

    def send(self, **rows: int | None) -> None:
        """Set keys to numbers; None deletes."""
        self.world.send(NAME, list(rows.items()))

    def advance(
        self,
        *,
        later: timedelta = timedelta(0),
        spec: AdjunctDataset | None = None,
        spark: Any = IN_PROCESS,
        lake: Lake | None = None,
        rebuild: str | None = None,
        on_stage: OnStage = ignore_stage,
    ) -> AdvanceReport:
        """Advance, at a time that is `later` than now."""
        context = Runtime(
            on_clock(lake or self.world.lake, lambda: datetime.now(UTC) + later),
            {"lake": self.streams},
            spark,
            "test",
        )
        return advance_unbounded(context, spec or self.spec, rebuild=rebuild, on_stage=on_stage)

    def drop_the_front(self, keep: int = 1) -> None:
        """Let retention drop all segments of the stream but the newest `keep`."""
        from dagster_adjunct.resources.streams.lake.manifest import Retention, list_segments

        streams = LakeStreams(self.world.lake)
        _, state = streams.state(NAME)
        sizes = [segment.size for segment in list_segments(state, streams.files_of(NAME))]
        streams.configure(
            NAME,
            retention=Retention(max_bytes=max(1, sum(sizes[len(sizes) - keep :]))),
            compaction=None,
        )
        streams.maintain(NAME)

    @property
    def store(self) -> StoredVersions:
        return StoredVersions(self.world.lake, NAME)

    @property
    def manifest(self) -> DatasetManifest:
        return self.store.require_manifest()

    @property
    def content(self) -> Content | None:
        view = self.store.current()
        return None if view is None else {key: entry["n"] for key, entry in view.items()}

    @property
    def commits(self) -> int:
        commit = self.store.read()[0]
        return 0 if commit is None else commit.number


def table_in(
    world: World, *, partitions: int = 2, shape: Shape | None = None, **declared: Any
) -> Table:
    """Return a table on a new stream of this many partitions."""
    world.stream(NAME, COLUMNS, ["k"], partitions)
    spec = unbounded_dataset(NAME, input=f"lake.{NAME}", key="k", partitions=2, **declared)
    return Table(world, spec, shape or Shape())


def partition(number: int) -> SystemStreamPartition:
    return SystemStreamPartition("lake", NAME, number)


def keys_of(world: World, number: int, partitions: int, count: int = 3) -> Sequence[str]:
    """Return keys whose records lie in this partition of the stream."""
    from dagster_adjunct.resources.bucketing.hashing import bucket_function

    bucket = bucket_function(("string",), partitions)
    return [key for i in range(1000) if bucket([(key := f"key{i}").encode()]) == number][:count]
