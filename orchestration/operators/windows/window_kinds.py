"""The kinds of windows: Tumbling, Sliding and Session, as users write them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias
from zoneinfo import ZoneInfo

from dagster_adjunct.orchestration.operators.arguments import LONGEST
from dagster_adjunct.resources.errors import ConfigurationError

_MOST = 1_000
_HOURS = (1, 2, 3, 4, 6, 8, 12)
# Files beside the zones that Python takes for zones, and nothing else does; those in right/ count leap seconds.
_NO_ZONE = re.compile(r"(posix|right)/|(localtime|posixrules|Factory)$")


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Windows one after the other: each time is in one of them.

    Of one `size`, they begin at whole multiples of it since 1970-01-01T00:00Z. Or they are so many `days` or `hours` of
    a `zone`, such as "America/New_York", by its clocks: days begin at midnight there and have 23 or 25 hours where
    clocks change; several days are counted from 1970-01-01. Hours (1, 2, 3, 4, 6, 8 or 12) are counted from midnight.
    With `hours=1`, an hour that clocks show twice is two windows; in longer windows both are in one.

    Raises ConfigurationError for anything else.
    """

    size: timedelta | None = None
    days: int | None = None
    hours: int | None = None
    zone: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("size", "days", "hours") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigurationError(
                f"Tumbling has {' and '.join(given) or 'no size'}: expected a size, or days= or hours= of a zone.",
                'Write Tumbling(timedelta(minutes=5)), or Tumbling(days=1, zone="America/New_York").',
                argument=given[-1] if given else "size",
            )
        if self.size is not None:
            _check("Tumbling", "size", self.size)
        if (self.size is None) != (self.zone is not None):
            without = "a size is not counted by the clocks of a zone" if self.zone is not None else "it names no zone"
            raise ConfigurationError(
                f"Tumbling has {given[0]}={getattr(self, given[0])!r} and zone={self.zone!r}: {without}.",
                'Write days=1 or hours=1 with a zone, such as zone="UTC"; or a timedelta without one.',
                argument="zone",
            )
        if self.zone is not None:
            _check_calendar(self.days, self.hours, self.zone)

    @property
    def local(self) -> timedelta | None:
        """How long a window is by the clocks of its zone; None where windows have one size."""
        if self.zone is None:
            return None
        return timedelta(days=self.days or 0, hours=self.hours or 0)

    def words(self) -> str:
        """Return what it is, as plans show it."""
        if self.zone is None:
            return f"tumbling {self.size}"
        count, unit = (self.days, "day") if self.days is not None else (self.hours, "hour")
        return f"tumbling {count} {unit}{'s' if count != 1 else ''} of {self.zone}"


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows of one `size`, one beginning `every` so often: each time is in size / every of them."""

    size: timedelta
    every: timedelta

    def __post_init__(self) -> None:
        _check("Sliding", "size", self.size)
        _check("Sliding", "every", self.every)
        if not self.every <= self.size <= self.every * _MOST:
            raise ConfigurationError(
                f"Sliding has size={self.size} and every={self.every}: expected a size of 1 to {_MOST:,} times every; "
                "each record is counted in that many windows.",
                "Choose others; windows with gaps between them are a filter behind Tumbling.",
                argument="every",
            )

    def words(self) -> str:
        """Return what it is, as plans show it."""
        return f"sliding {self.size} every {self.every}"


@dataclass(frozen=True, slots=True)
class Session:
    """A window for each run of records of a key of which each follows the one before it in less than `gap`.

    It ends `gap` after the last of them.
    """

    gap: timedelta

    def __post_init__(self) -> None:
        _check("Session", "gap", self.gap)

    def words(self) -> str:
        """Return what it is, as plans show it."""
        return f"sessions with gaps of {self.gap}"


Kind: TypeAlias = Tumbling | Sliding | Session


def micros(length: timedelta) -> int:
    """Return a length of time in microseconds."""
    return length // timedelta(microseconds=1)


def longest(kind: Kind) -> timedelta:
    """Return for how long a window takes records after its first: at most its size, or at least the gap of a session.

    Clocks of a zone were put back by a day at most.
    """
    if isinstance(kind, Session):
        return kind.gap
    if isinstance(kind, Tumbling) and kind.local is not None:
        return kind.local + timedelta(days=1)
    assert kind.size is not None
    return kind.size


def _check_calendar(days: int | None, hours: int | None, zone: object) -> None:
    """Refuse days and hours of a zone that can't be counted, and zones that are none."""
    argument, count = ("days", days) if days is not None else ("hours", hours)
    possible = range(1, 366) if days is not None else _HOURS
    if isinstance(count, bool) or not isinstance(count, int) or count not in possible:
        wanted = "a whole number from 1 to 365" if days is not None else f"one of {', '.join(map(str, _HOURS))}"
        raise ConfigurationError(
            f"Tumbling has {argument}={count!r}: expected {wanted}.",
            "Days of a zone begin at midnight, and hours are counted from there: choose hours that divide a day.",
            argument=argument,
        )
    try:
        known = isinstance(zone, str) and not _NO_ZONE.match(zone) and ZoneInfo(zone) is not None
    except (KeyError, ValueError, OSError):  # a name that is unknown, or none at all
        known = False
    if not known:
        raise ConfigurationError(
            f"Tumbling has zone={zone!r}, which is no time zone that this machine knows.",
            'Write a name of the IANA database, such as "America/New_York" or "UTC".',
            argument="zone",
        )


def _check(kind: str, argument: str, value: object) -> None:
    if not isinstance(value, timedelta) or not timedelta(0) < value <= LONGEST:
        raise ConfigurationError(
            f"{kind} has {argument}={value!r}: expected a timedelta above none, and of 100 years at most.",
            f"Write {kind}({argument}=timedelta(minutes=5)), say.",
            argument=argument,
        )
