"""Which inputs wait for which datasets, and what waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from dagster_adjunct.orchestration.operators.lookups import Wait
from dagster_adjunct.orchestration.operators.operator import Operator, sum_along_paths
from dagster_adjunct.resources.streams.system import SystemStreamPartition

LATE_CHANGES = "late_changes"
"""The counter of changes that came after a watermark, or a join, had passed their time."""


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """The records of a join wait for its `dataset`, as `wait` says: for its current version, or
    with `over_time` for its newest.
    """

    join: str
    dataset: str
    wait: Wait
    over_time: bool


def waits_by_input(operators: Iterable[Operator]) -> dict[str, tuple[WaitsFor, ...]]:
    """Return what the records of each input stream wait for, without streams that do not wait."""
    waits: dict[str, tuple[WaitsFor, ...]] = {}
    # Only which streams reach an operator counts, not with what delay.
    for operator, delays in sum_along_paths(operators, lambda spec: timedelta(0)):
        match = operator.spec.match
        if match is None or match.dataset is None or match.wait is None:
            continue
        over_time = match.as_of is not None
        waiting = WaitsFor(operator.id, match.dataset, match.wait, over_time)
        for stream in delays:
            waits[stream] = (*waits.get(stream, ()), waiting)
    return waits


def list_waits(operators: Iterable[Operator]) -> tuple[WaitsFor, ...]:
    """Return the joins whose records wait, each once."""
    found: dict[WaitsFor, None] = {}
    for waits in waits_by_input(operators).values():
        found |= dict.fromkeys(waits)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """The first record of a partition that waits: for which dataset, its event time, and since when
    it is in its stream. `known_until` is the dataset's watermark; None if it has none.

    `newest` is the latest event time of the partition up to the offset `seen_to`; None if no record
    waits by event time, or if one of these times is not believed (`Wait`). `stream` is the identity
    of the stream.
    """

    ssp: SystemStreamPartition
    offset: int
    dataset: str
    time: datetime
    since: datetime
    known_until: datetime | None
    newest: datetime | None = None
    seen_to: str | None = None
    stream: str | None = None

    def describe(self) -> str:
        """Return the record in a sentence without a period."""
        if self.known_until is None:
            known = "is not known to be complete up to any time"
        else:
            known = f"is complete up to {self.known_until:%Y-%m-%d %H:%M:%S}"
        return (
            f"{self.ssp} waits at offset {self.offset} ({self.time:%Y-%m-%d %H:%M:%S}, since"
            f" {self.since:%Y-%m-%d %H:%M:%S}) for dataset {self.dataset}, which {known}"
        )
