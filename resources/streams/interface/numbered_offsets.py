"""Offsets that are whole numbers from 0, one a record or more: what lake streams and Kafka have in common."""

from __future__ import annotations

import re

from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

# One way of writing each number, within 64 bits: "0003" would be offset 3, and another text than "3".
_OFFSET = re.compile(r"0|[1-9][0-9]{0,18}")


class NumberedOffsets(StreamSystem):
    """A stream system whose offsets are numbers, written in decimal digits."""

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
    )
