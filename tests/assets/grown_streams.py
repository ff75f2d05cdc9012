"""A lake whose streams say what topics say that got more partitions."""

from __future__ import annotations

from dataclasses import replace

from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import StreamInfo, StreamSystem
from tests.assets.conftest import World


class GrownStreams(LakeStreams):
    """Streams that say what a topic says that got more partitions: keyed by k, which is in several
    of them.
    """

    def info(self, stream: str) -> StreamInfo:
        found = super().info(stream)
        return replace(found, key=("k",), partitioner="kafka-murmur2") if found.key else found

    def snapshot(self, stream: str) -> StreamSystem:
        return self


class GrownWorld(World):
    @property
    def systems(self) -> dict[str, StreamSystem]:
        return {"lake": GrownStreams(self.lake)}
