"""Moments in time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_FIRST = datetime.min.replace(tzinfo=UTC)


def before(now: datetime, span: timedelta) -> datetime:
    """Return the moment so long before `now`; the first of the year 1 where `timedelta.max` says "without limit"."""
    return now - min(span, now - _FIRST)


def utc_now() -> datetime:
    """Return this machine's time: what a lake goes by that was given no other clock."""
    return datetime.now(UTC)
