"""Moments in UTC, durations, and how much time has passed, also while the machine slept, the
process was stopped, or its clock was set.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import NamedTuple

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_FIRST = datetime.min.replace(tzinfo=UTC)

_LAST = datetime.max.replace(tzinfo=UTC)

_DURATION = re.compile(r"(\d+)\s*(s|m|h|d|w)", re.ASCII)

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

# CLOCK_MONOTONIC stands still while a machine sleeps. Where there is no CLOCK_BOOTTIME, the wall
# clock alone shows it.
_BOOT_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def read_duration(text: str) -> timedelta | None:
    """Return the duration that is written as 30s, 90m, 2h, 7d or 1w; None if it is none."""
    written = _DURATION.fullmatch(text.strip())
    if written is None:
        return None
    try:
        return timedelta(**{_UNITS[written[2]]: int(written[1])})
    except (OverflowError, ValueError):  # int() rejects thousands of digits
        return None


def describe_span(span: object) -> str:
    """Return a timedelta as text, such as "0:05:00" or "-1 day, 0:00:00"; of another value its
    repr.
    """
    if not isinstance(span, timedelta):
        return repr(span)
    if span < timedelta(0):
        return f"-{-span}"
    return str(span)


def write_span(span: timedelta) -> str:
    """Return a positive duration in words, in its largest unit without a rest: "7 days"; as
    "0:00:01.500000" if it has parts of a second.
    """
    for unit in ("days", "hours", "minutes", "seconds"):
        whole, rest = divmod(span, timedelta(**{unit: 1}))
        if not rest:
            return f"{whole:,} {unit if whole > 1 else unit.removesuffix('s')}"
    return str(span)


def subtract_span(now: datetime, span: timedelta) -> datetime:
    """Return `now` minus `span`, or the first moment of the year 1 where that is too far back
    (`timedelta.max`).
    """
    return now - min(span, now - _FIRST)


def add_span(now: datetime, span: timedelta) -> datetime:
    """Return `now` plus `span`, or the last moment of the year 9999 where that is too far ahead
    (`timedelta.max`).
    """
    return now + min(span, _LAST - now)


def to_microseconds(moment: datetime) -> int:
    """Return the exact number of microseconds from 1970 to a moment with a time zone."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def fits_utc(moment: datetime) -> bool:
    """Whether a moment with a time zone is in the years 1 to 9999 of UTC, too."""
    try:
        moment.astimezone(UTC)
    except OverflowError:
        return False
    return True


def utc_now() -> datetime:
    """Return the time of this machine, the default clock of a lake."""
    return datetime.now(UTC)


class Clocks(NamedTuple):
    """A time by two clocks, in seconds: since the boot, with the time that the machine slept, and
    by the wall clock.

    The wall clock also shows the sleep of a virtual machine, whose own clocks all stand still. It
    may be set, so the larger of the two differences counts.
    """

    since_boot: float
    wall: float


def read_clocks() -> Clocks:
    """Return the time of now, to measure spans of time from it."""
    return Clocks(time.clock_gettime(_BOOT_CLOCK), time.time())


@cache
def machine_id() -> str:
    """Return what identifies this machine's clock since its boot; "" if that is not known.

    A container may have a namespace of clocks of its own.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/time').readlink()}"
    return ""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment `seconds` after `since`, which `read_clocks` has returned on this machine."""

    since: Clocks
    seconds: float

    def has_passed(self) -> bool:
        """Return whether it has passed, by the clock that says that more time has."""
        since_boot, wall = self.since
        boot_now, wall_now = read_clocks()
        return max(boot_now - since_boot, wall_now - wall) >= self.seconds
