"""Options that several commands share: who does it and why, durations, and times that are still to come."""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import click

from dagster_adjunct.orchestration.cli.output import zoned
from dagster_adjunct.resources.errors import ConfigurationError

C = TypeVar("C", bound=Callable[..., Any])
_DURATION = re.compile(r"(\d+)\s*(m|h|d|w)")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def explained(command: C) -> C:
    """Add what every change needs: why, and by whom."""
    why = click.option("--reason", required=True, help="Why; it is kept with the change.")
    who = click.option("--by", help="Who does it. Default: the user of this machine.")
    return why(who(command))


def who(by: str | None) -> str:
    """Return who does it: as given, or the user of the operating system. Raises ConfigurationError for nobody."""
    if by is None:
        try:
            by = getpass.getuser()
        except (KeyError, OSError, ImportError) as error:
            raise ConfigurationError(
                "this machine does not say who you are.", "Pass --by NAME.", setting="--by"
            ) from error
    if not by.strip():
        raise ConfigurationError("--by is empty.", "Name who does it, or leave --by out.", setting="--by")
    return by.strip()


def duration(text: str) -> timedelta | None:
    """Return what 90m, 2h, 7d or 1w says, None for another text."""
    written = _DURATION.fullmatch(text.strip())
    return timedelta(**{_UNITS[written[2]]: int(written[1])}) if written else None


def expiry(text: str | None, now: datetime) -> datetime | None:
    """Return when a pin ends: an ISO time with its zone, or a duration from now such as 90m, 2h, 7d, 1w."""
    if text is None:
        return None
    span = duration(text)
    if span is not None:
        return now + span
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None:
        raise ConfigurationError(
            f"--expires {text!r} is neither a duration nor a time with its zone.",
            "Write for example 2h, 7d, or 2026-01-31T18:00Z.",
            setting="--expires",
        )
    moment = zoned("--expires", text, moment)
    if moment <= now:
        raise ConfigurationError(f"--expires {text} has passed already.", "Give a later time.", setting="--expires")
    return moment.astimezone(UTC)
