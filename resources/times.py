"""Moments in time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST = datetime.min.replace(tzinfo=UTC)


def before(now: datetime, span: timedelta) -> datetime:
    """Return the moment so long before `now`; the first of the year 1 where `timedelta.max` says "without limit"."""
    return now - min(span, now - _FIRST)


def microseconds(moment: datetime) -> int:
    """Return the microseconds since 1970 of a moment with a zone; exact."""
    return (moment - _EPOCH) // timedelta(microseconds=1)


def utc_now() -> datetime:
    """Return this machine's time: what a lake goes by that was given no other clock."""
    return datetime.now(UTC)
