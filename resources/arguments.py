"""Checks of arguments, with one form of error."""

from __future__ import annotations

import getpass
import re
from collections.abc import Sequence
from typing import Any
from zoneinfo import ZoneInfo

from dagster_adjunct.resources.errors import OF_FILES, ConfigurationError, file_error

MAX_SECONDS = 1e12  # clocks and stores overflow beyond it


def argument_error(
    found: str, expected: str, next_step: str = "", *, argument: str, **about: Any
) -> ConfigurationError:
    """Return the error for an argument with a wrong value: "`found`: expected `expected`."

    `about` are further fields of the error, such as the dataset.
    """
    return ConfigurationError(
        f"{found}: expected {expected}.", next_step, argument=argument, **about
    )


# Names that Python takes for zones, but Spark does not: files next to the zones. Those in right/
# count leap seconds.
_NOT_A_ZONE = re.compile(r"(posix|right)/|(localtime|posixrules|Factory)$")


def check_zone(found: str, zone: str, *, argument: str) -> None:
    """Raise `argument_error` unless `zone` is the name of an IANA time zone that this machine
    knows.

    `found` begins the message, such as "Tumbling has zone".
    """
    is_known = not _NOT_A_ZONE.match(zone)
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError):  # an unknown or invalid name
        is_known = False
    except OSError as error:
        if error.errno in OF_FILES:
            raise file_error(error, "/", f"{found}={zone!r}") from error
        is_known = False  # its name is that of a folder, or too long
    if not is_known:
        expected = 'a time zone that this machine knows, such as "America/New_York" or "UTC"'
        raise argument_error(f"{found}={zone!r}", expected, argument=argument)


def check_choice(
    value: object, found: str, choices: Sequence[object], *, argument: str, **about: Any
) -> None:
    """Raise `argument_error` unless `value` is one of the choices."""
    if value not in choices:
        raise argument_error(
            found, f"one of {', '.join(map(repr, choices))}", argument=argument, **about
        )


def require_reason(reason: str, what: str, changed: str, **facts: str) -> None:
    """Raise ConfigurationError for a change without a reason: `what` can't be `changed`
    ("deleted").
    """
    if not reason.strip():
        step = "Pass a reason, which is recorded with the change."
        raise ConfigurationError(
            f"{what} can't be {changed} without a reason.", step, argument="reason", **facts
        )


def resolve_user(by: str | None) -> str:
    """Return `by`, or else the user of the operating system. Raises ConfigurationError if
    neither is known.
    """
    if by is None:
        try:
            by = getpass.getuser()
        except (KeyError, OSError, ImportError) as error:
            problem = "the operating system does not tell the current user's name."
            raise ConfigurationError(problem, "Pass by=, or --by NAME.", argument="by") from error
    if not by.strip():
        raise ConfigurationError("by is empty.", "Give a name, or omit it.", argument="by")
    return by.strip()
