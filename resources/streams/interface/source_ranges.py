"""Of which ranges of which stream an append was made, for systems that keep it (`StreamSystem.keeps_positions`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SourceRange:
    """The offsets [start, end) of a partition ("lake.orders.3") that an append was made of, read in `epoch`."""

    source: str
    start: int
    end: int
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Sources:
    """All that an append was made of: ranges of `stream` ("lake.orders").

    `reader` names who read it, and the stream's identity where that has one: one made anew holds other records.
    """

    stream: str
    reader: str
    ranges: tuple[SourceRange, ...]
