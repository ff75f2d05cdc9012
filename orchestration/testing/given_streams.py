"""What a test says of the streams around an application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from dagster_adjunct.orchestration.operators.arguments import column_names
from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog, StreamFacts
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.stream_system import Partitioner


@dataclass(frozen=True)
class TestStream:
    """A stream that exists, as far as a test says: its columns (None: not known), those that choose the partition, how
    many partitions, by which hash ("spark-murmur3", "kafka-murmur2" or "unknown"), and whether offsets are numbers."""

    __test__: ClassVar[bool] = False
    schema: Schema | None = None
    key: str | Sequence[str] = ()
    partitions: int = 1
    partitioner: Partitioner = "spark-murmur3"
    numbered_offsets: bool = True


Streams: TypeAlias = Mapping[str, TestStream]


def catalog_of(streams: Streams) -> Catalog:
    """Return the facts of these streams, for the planner. Raises ConfigurationError for a wrong name or key."""
    facts = {}
    for name, stream in streams.items():
        system, _ = split_stream_name(name)
        key = column_names(f"stream {name!r}: key", stream.key)
        partitioner = stream.partitioner if key else "unknown"
        evolves = system == "lake"
        facts[name] = StreamFacts(
            name, stream.partitions, key, partitioner, stream.schema, evolves, stream.numbered_offsets
        )
    return facts
