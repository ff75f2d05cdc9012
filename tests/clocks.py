"""A clock that tests move, and lakes on another clock than the machine's."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from dagster_adjunct.resources.objects.lake import Lake


def on_clock(lake: Lake, clock: Callable[[], datetime]) -> Lake:
    """Return the same lake, going by this clock."""
    return Lake(lake.store, lake.id, shared=lake.shared, clock=clock)


class Clock:
    """A clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now

    def forward(self, **by: float) -> datetime:
        self.now += timedelta(**by)
        return self.now
