"""The newest time before each record of a source partition, and its watermarks: arrays in the order of offsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

TIME = "time"
"""The event time of a record in microseconds since 1970, null for none; with it its partition and its offset."""
NEVER = -(2**62)
"""Microseconds: before all times."""


@dataclass(frozen=True, slots=True)
class Stood:
    """How far a partition had come before some records, in microseconds: its newest time and its watermark."""

    newest: int | None = None
    watermark: int | None = None


def spans(partition: np.ndarray[Any, Any]) -> Iterator[tuple[int, slice]]:
    """Yield each number, and where its records are, of numbers in their order."""
    import numpy as np

    if not len(partition):
        return
    starts = np.flatnonzero(np.r_[True, partition[1:] != partition[:-1]]).tolist()
    for start, end in zip(starts, [*starts[1:], len(partition)], strict=True):
        yield int(partition[start]), slice(start, end)


def running(before: Stood, times: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the newest time before the first, and after each."""
    import numpy as np

    first = NEVER if before.newest is None else before.newest
    return np.maximum.accumulate(np.r_[first, times])


def marks_at(before: Stood, newest: np.ndarray[Any, Any], delay: int) -> np.ndarray[Any, Any]:
    """Return the watermarks at these newest times."""
    import numpy as np

    floor = NEVER if before.watermark is None else before.watermark
    return np.maximum(np.where(newest > NEVER, newest - delay, NEVER), floor)
