"""One partition of one stream, written `system.stream.3`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dagster_adjunct.resources.errors import InvalidNameError
from dagster_adjunct.resources.names import check_name


@dataclass(frozen=True, slots=True, order=True)
class SystemStreamPartition:
    """A partition (from 0) of a stream of a system; ordered by system, stream, then partition number."""

    system: str
    stream: str
    partition: int

    def __post_init__(self) -> None:
        check_name("system", self.system)
        check_name("stream", self.stream)
        if not isinstance(self.partition, int) or isinstance(self.partition, bool) or self.partition < 0:
            raise InvalidNameError(
                f"partition {self.partition!r} of {self.system}.{self.stream} is no partition number: "
                "expected an integer from 0.",
                "Number the partitions of a stream from 0.",
                name=str(self.partition),
                stream=f"{self.system}.{self.stream}",
            )

    @classmethod
    def parse(cls, text: str) -> SystemStreamPartition:
        """Return what `str` wrote. Raises InvalidNameError for anything else."""
        return _parsed(text) if isinstance(text, str) else cls._parse(text)

    @classmethod
    def _parse(cls, text: str) -> SystemStreamPartition:
        parts = text.split(".") if isinstance(text, str) else []
        # "03" and "٣" are digits too, but then two texts would name one partition.
        if len(parts) != 3 or not parts[2].isdecimal() or str(int(parts[2])) != parts[2]:
            raise InvalidNameError(
                f"stream partition {text!r} can't be read: expected SYSTEM.STREAM.NUMBER.",
                "Write it as in lake.flights.3.",
                name=f"{text!s:.300}",
            )
        return cls(parts[0], parts[1], int(parts[2]))

    @property
    def qualified_stream(self) -> str:
        """`system.stream`, without the partition."""
        return f"{self.system}.{self.stream}"

    def __str__(self) -> str:
        return f"{self.system}.{self.stream}.{self.partition}"


@lru_cache(maxsize=65_536)
def _parsed(text: str) -> SystemStreamPartition:
    """The start of a run parses the same few thousand names again and again."""
    return SystemStreamPartition._parse(text)
