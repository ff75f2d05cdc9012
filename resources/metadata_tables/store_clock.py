"""The object store's clock, read without asking it each time.

Leases expire by the clock of the store, so that machines with wrong clocks agree. A table has none that all backends
would share: what is written there is dated by the clock of the lake's object store, which this process has looked at.

What holds: the time that is told is never ahead of the store's clock, and behind it by no more than the look took and
the second that S3 rounds to. It is looked at again after ten minutes, and when this machine's two clocks disagree: it
has slept, or was set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import StoreUnavailableError
from dagster_adjunct.resources.metadata_tables.object_addresses import BESIDE
from dagster_adjunct.resources.objects.object_store import time_of_store

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_KEY = f"{BESIDE}clock"
_GOOD_FOR = 600.0
_DISAGREEMENT = 0.5
_SLOW = 5.0
_LOOKS = 3

Clocks = Callable[[], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Look:
    """The store's time, and what the clocks of this machine said after it was told."""

    told: datetime
    steady: float
    wall: float

    def at(self, steady: float, wall: float) -> datetime | None:
        """Return the store's time now, None where this look can't tell it any more."""
        passed = steady - self.steady
        if passed > _GOOD_FOR or abs(wall - self.wall - passed) > _DISAGREEMENT:
            return None
        return self.told + timedelta(seconds=passed)


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.time()


class StoreClock:
    """The time by the clock of an object store. Looking at it writes one small object. For any number of threads."""

    def __init__(self, store: ObjectStore, clocks: Clocks = _clocks) -> None:
        self._store, self._clocks = store, clocks
        self._look: _Look | None = None
        self._lock = threading.Lock()

    def now(self) -> datetime:
        """Return the time. Raises StoreUnavailableError where the store does not tell it, or takes too long to."""
        now = self._look.at(*self._clocks()) if self._look is not None else None
        if now is None:
            with self._lock:
                now = self._look.at(*self._clocks()) if self._look is not None else None
                if now is None:
                    self._look = self._looked()
                    now = self._look.told
        return now

    def _looked(self) -> _Look:
        for _ in range(_LOOKS):
            began = self._clocks()[0]
            told = time_of_store(self._store, _KEY)
            steady, wall = self._clocks()
            if steady - began <= _SLOW:
                return _Look(told, steady, wall)
        raise StoreUnavailableError(
            f"the store {self._store.url} took {steady - began:.1f} seconds to tell the time, {_LOOKS} times: expected "
            f"at most {_SLOW:.0f}, or leases could not be dated.",
            "Try again later.",
            url=self._store.url,
        )
