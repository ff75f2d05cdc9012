"""What planning is told about the streams of the world. Plain data, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dagster_adjunct.orchestration.operators.arguments import partition_count
from dagster_adjunct.resources.errors import ConfigurationError, PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.registered_systems import LAKE
from dagster_adjunct.resources.streams.interface.stream_system import NewStreams
from dagster_adjunct.resources.streams.lake.stream_declaration import NEW_STREAMS

Partitioner = Literal["spark-murmur3", "kafka-murmur2", "task number", "unknown"]
SPARK: Partitioner = "spark-murmur3"
TASK_NUMBER: Partitioner = "task number"
UNKNOWN: Partitioner = "unknown"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream as it exists: `name` is "system.stream"; `key` are the columns that choose the partition.

    `schema` holds the record's columns, None where they are not known; `evolves` says that columns may be added and
    widened by who writes to it, `numbered` that offsets are numbers. `size` is how many bytes it holds, None where
    that is not known.
    """

    name: str
    partitions: int
    key: tuple[str, ...] = ()
    partitioner: Partitioner = UNKNOWN
    schema: Schema | None = None
    evolves: bool = False
    numbered: bool = True
    size: int | None = None

    def __post_init__(self) -> None:
        if partition_count(f"partitions of stream {self.name!r}", self.partitions) is None:
            raise ConfigurationError(f"stream {self.name!r} has no partition count.", "Give it one.", stream=self.name)

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The names of the record's columns."""
        return None if self.schema is None else self.schema.names


Catalog: TypeAlias = Mapping[str, StreamFacts]


class FoundStreams(dict[str, StreamFacts]):
    """A catalog that also holds why the systems don't have some streams: where they looked.

    `size_of` says how many bytes a stream holds; it is asked only where an application is refused. `new_streams` is
    what each system says of streams that it has not made yet, by its name.
    """

    def __init__(
        self,
        facts: Mapping[str, StreamFacts],
        missing: Mapping[str, str],
        size_of: Callable[[str], int | None],
        new_streams: Mapping[str, NewStreams],
    ) -> None:
        super().__init__(facts)
        self.missing = dict(missing)
        self.size_of = size_of
        self.new_streams = dict(new_streams)


def facts_of(catalog: Catalog, stream: str, what: str) -> StreamFacts:
    """Return the facts of a stream that has to exist; `what` says in the error who needs it."""
    facts = catalog.get(stream)
    if facts is None:
        missing = catalog.missing.get(stream) if isinstance(catalog, FoundStreams) else None
        there = ", ".join(sorted(catalog)) or "none"
        raise PlanningError(
            f"{what} reads stream {stream!r}, which does not exist: " + (missing or f"streams there: {there}."),
            _how_to_have(stream),
            stream=stream,
        )
    return facts


def _how_to_have(stream: str) -> str:
    system, name = split_stream_name(stream)
    if system != LAKE:
        return "Correct the name, or create the stream first."
    create = f"LakeStreams(open_lake()).create({name!r}, schema=Schema.of(…), key=[…], partitions=…)"
    return f"Correct the name, run first what writes the stream, or create it and append to it: {create}."


def bytes_of(catalog: Catalog, stream: str) -> int | None:
    """Return how many bytes a stream holds, as far as its system tells."""
    facts = catalog.get(stream)
    if facts is None or facts.size is not None or not isinstance(catalog, FoundStreams):
        return None if facts is None else facts.size
    return catalog.size_of(stream)


def partitioner_of_output(catalog: Catalog, stream: str) -> Partitioner:
    """Return how records of an output stream are (or will be) spread."""
    facts = catalog.get(stream)
    if facts is not None:
        return facts.partitioner
    return new_streams_in(catalog, stream).partitioner


def new_streams_in(catalog: Catalog, stream: str) -> NewStreams:
    """Return what the system of a stream says of those that it has not made yet.

    Facts alone, of which no system was asked, are of a world with the lake: nothing is known of other systems there.
    """
    by_system = catalog.new_streams if isinstance(catalog, FoundStreams) else {LAKE: NEW_STREAMS}
    return by_system.get(split_stream_name(stream)[0], NewStreams())
