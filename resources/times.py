"""Moments in UTC, and durations."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_FIRST = datetime.min.replace(tzinfo=UTC)

_LAST = datetime.max.replace(tzinfo=UTC)

_DURATION = re.compile(r"(\d+)\s*(s|m|h|d|w)", re.ASCII)

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


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
