"""A stream system in plain Python: times of records, offsets that are no numbers, retention, new
partitions and all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.errors import OffsetOutOfRangeError, StreamNotFoundError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import (
    AppendResult,
    OffsetRange,
    StreamCapabilities,
    StreamInfo,
    StreamSystem,
    StreamWriter,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass
class FakePartition:
    """Records are their times (ms); `oldest` is the number of the first that is still there."""

    times: list[int] = field(default_factory=list)
    oldest: int = 0


@dataclass
class FakeStream:
    partitions: list[FakePartition]
    key: tuple[str, ...]
    default_offset: Literal["oldest", "upcoming"] | None
    incarnation: int = 1


class FakeStreams(StreamSystem):
    """Streams named `fake.…`. Record 10 of a partition is at the offset "@10", which as text
    comes before "@9".
    """

    name = "fake"
    capabilities = StreamCapabilities(finds_times=True)

    def __init__(self) -> None:
        self.streams: dict[str, FakeStream] = {}
        self.questions: list[str] = []

    # -- what tests do to a stream

    def make(
        self,
        stream: str,
        partitions: int,
        *,
        key: Sequence[str] = (),
        default_offset: Literal["oldest", "upcoming"] | None = "oldest",
    ) -> None:
        """Create a stream, or delete it and make it anew."""
        before = self.streams.get(stream)
        number = before.incarnation + 1 if before else 1
        made = [FakePartition() for _ in range(partitions)]
        self.streams[stream] = FakeStream(made, tuple(key), default_offset, number)

    def add_partitions(self, stream: str, count: int) -> None:
        self.streams[stream].partitions += [FakePartition() for _ in range(count)]

    def write(self, stream: str, partition: int, *times: int) -> None:
        self.streams[stream].partitions[partition].times += times

    def retain_from(self, stream: str, partition: int, number: int) -> None:
        """Drop what lies before record `number`."""
        self.streams[stream].partitions[partition].oldest = number

    # -- what the step asks

    def list_streams(self) -> list[str]:
        return sorted(self.streams)

    def info(self, stream: str) -> StreamInfo:
        self.questions.append("info")
        made = self._stream(stream)
        return StreamInfo(
            name=stream,
            partitions=len(made.partitions),
            key=made.key,
            partitioner="unknown",
            schema=Schema.of(k="string"),
            default_offset=made.default_offset,
            identity=f"made-{made.incarnation}",
        )

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        self.questions.append("oldest")
        return {ssp: _offset(self._at(ssp).oldest) for ssp in ssps}

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        self.questions.append("upcoming")
        return {ssp: _offset(len(self._at(ssp).times)) for ssp in ssps}

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        self.questions.append("offset_for_timestamp")
        at = self._at(ssp)
        numbers = range(at.oldest, len(at.times))
        return _offset(
            next((number for number in numbers if at.times[number] >= timestamp_ms), len(at.times))
        )

    def compare(self, left: str, right: str) -> int:
        a, b = _number(left), _number(right)
        return (a > b) - (a < b)

    def distance(self, ssp: SystemStreamPartition, start: str, end: str) -> int:
        return max(_number(end) - _number(start), 0)

    def advance(self, ssp: SystemStreamPartition, start: str, count: int) -> str:
        return _offset(_number(start) + count)

    def _stream(self, stream: str) -> FakeStream:
        if stream not in self.streams:
            raise StreamNotFoundError(f"there is no stream {stream!r}.", "Make it.")
        return self.streams[stream]

    def _at(self, ssp: SystemStreamPartition) -> FakePartition:
        return self._stream(ssp.stream).partitions[ssp.partition]

    # -- what the runs of these tests never ask

    def read(
        self, spark: SparkSession, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> DataFrame:
        raise NotImplementedError


class WritableStreams(FakeStreams, StreamWriter):
    """The same, as plans for outputs see them."""

    def create(
        self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int
    ) -> StreamInfo:
        raise NotImplementedError

    def append(self, stream: str, data: object, **options: object) -> AppendResult:
        raise NotImplementedError


class TimelessStreams(FakeStreams):
    """The same, without positions by time."""

    capabilities = StreamCapabilities()


def _offset(number: int) -> str:
    return f"@{number}"


def _number(offset: str) -> int:
    if not offset.startswith("@") or not offset[1:].isdecimal():
        raise OffsetOutOfRangeError(
            f"offset {offset!r} is none of fake streams.", "Write it as in '@42'."
        )
    return int(offset[1:])
