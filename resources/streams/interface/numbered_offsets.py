"""Offsets that are whole numbers from 0, one a record or more: what lake streams and Kafka have in common."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

# One way of writing each number, within 64 bits: "0003" would be offset 3, and another text than "3".
_OFFSET = re.compile(r"0|[1-9][0-9]{0,18}")


class NumberedOffsets(StreamSystem):
    """A stream system whose offsets are numbers, written in decimal digits."""

    numbered_offsets = True

    def compare(self, left: str, right: str) -> int:
        a, b = parse_offset(left, self.name), parse_offset(right, self.name)
        return (a > b) - (a < b)

    def distance(self, ssp: SystemStreamPartition, start: str, end: str) -> int:
        return max(parse_offset(end, str(ssp)) - parse_offset(start, str(ssp)), 0)

    def advance(self, ssp: SystemStreamPartition, start: str, count: int) -> str:
        return str(parse_offset(start, str(ssp)) + count)


def parse_offset(text: str, what: str) -> int:
    """Return an offset as a number; `what` says in the error whose it is. Raises OffsetOutOfRangeError."""
    if isinstance(text, str) and _OFFSET.fullmatch(text):
        return int(text)
    raise OffsetOutOfRangeError(
        f"{what}: {text!r:.80} is no offset there: expected decimal digits, the first of several not 0, as in '42'.",
        "Use offsets as this system gave them out.",
        offset=f"{text!s:.80}",
    )


@dataclass(frozen=True, slots=True)
class HeldOffsets:
    """The words in which a system says what it holds: of a "topic", say, up to its `upcoming` offset.

    `dropped` is what to do where records before the oldest are asked for, and `ahead` where the range ends too late.
    """

    of: str
    upcoming: str
    dropped: str
    ahead: str

    def check(self, ssp: SystemStreamPartition, start: int, end: int, oldest: int, upcoming: int) -> None:
        """Raise OffsetOutOfRangeError for a range that the partition does not hold whole."""
        if start > end:
            problem = f"{ssp}: the range begins at {start}, after its end {end}."
            raise _out_of_range(ssp, start, problem, "Give the smaller offset first.")
        if start < oldest:
            raise self.too_old(ssp, start, oldest)
        if end > upcoming:
            problem = f"{ssp}: the range ends at offset {end}, {self.upcoming} is {upcoming}."
            step = f"End at {upcoming} or before{self.ahead}"
            raise _out_of_range(ssp, end, problem, step, upcoming=str(upcoming))

    def too_old(self, ssp: SystemStreamPartition, start: int, oldest: int) -> OffsetOutOfRangeError:
        """Return the error for a range that begins before what is still held."""
        problem = f"{ssp}: the range begins at offset {start}, the oldest that the {self.of} still holds is {oldest}."
        return _out_of_range(ssp, start, problem, self.dropped, oldest=str(oldest))


def _out_of_range(
    ssp: SystemStreamPartition, offset: int, problem: str, next_step: str, **edge: str
) -> OffsetOutOfRangeError:
    return OffsetOutOfRangeError(
        problem, next_step, stream=ssp.qualified_stream, partition=ssp.partition, offset=str(offset), **edge
    )
