"""Numbers that users declare, whole ones and seconds: what is none, or endless, is refused where it is given."""

from __future__ import annotations

from dagster_adjunct.resources.errors import ConfigurationError

_ENDLESS = 1e12  # seconds: beyond it clocks and stores can't count


def check_whole_number(
    value: object, what: str, expected: str, *, argument: str, least: int = 1, next_step: str = "Change it."
) -> None:
    """Raise ConfigurationError, "`what`: expected `expected`.", unless `value` is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{what}: expected {expected}.", next_step, argument=argument)


def check_seconds(
    value: object, what: str, *, argument: str, none: bool = False, zero: bool = False, next_step: str = "Change it."
) -> None:
    """Raise ConfigurationError, "`what`: expected seconds above 0.", unless `value` is such a number and finite.

    `none`: it may be None; `zero`: it may be 0.
    """
    if value is None and none:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _ENDLESS
    if not number or (value == 0 and not zero):
        expected = ("seconds from 0 on" if zero else "seconds above 0") + (", or None" if none else "")
        raise ConfigurationError(f"{what}: expected {expected}.", next_step, argument=argument)
