"""How tables fit a terminal: ids as short as they are unique, times by the minute, long texts beneath the rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

_ID = re.compile(r"v(\d{6,})-([0-9a-f]{8,})")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d)?(\.\d+)?(Z|\+00:00)")
# A time that somebody asked for, within a text: shorter without losing anything.
_ASKED = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d(?:(?!:00\+00:00):\d\d(?:\.\d+)?)?)(?::00)?\+00:00")
# Columns that hold sentences: they go beneath the table where they do not fit beside the rest.
TEXTS = ("what happens", "error", "message", "why", "reason", "by")


def shortened(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return rows whose version ids are as short as they stay different, and whose times end with the minute."""
    ids = {cell for row in rows for cell in row if isinstance(cell, str) and _ID.fullmatch(cell)}
    short = short_ids(ids)

    def shorter(cell: Any) -> Any:
        if isinstance(cell, str):
            return short.get(cell) or in_minutes(cell)
        return in_minutes(cell) if isinstance(cell, datetime) else cell

    return [[shorter(cell) for cell in row] for row in rows]


def short_ids(ids: set[str]) -> dict[str, str]:
    """Return each id's number, with as many digits of the rest as tell it from the others of that number."""
    short = {}
    for version in ids:
        number, rest = version.split("-")
        others = [other.split("-")[1] for other in ids if other != version and other.startswith(f"{number}-")]
        needed = next((n for n in range(len(rest) + 1) if not any(other[:n] == rest[:n] for other in others)), 99)
        short[version] = f"{number}-{rest[:needed]}" if needed else number
    return short


def in_minutes(value: str | datetime) -> str:
    """Return a stored time (ISO, UTC) as people read it; other texts as they are."""
    text = value.isoformat() if isinstance(value, datetime) else value
    time = _TIME.fullmatch(text)
    return f"{time[1]} {time[2]}" if time else _ASKED.sub(r"\1Z", text)


def in_seconds(value: Any) -> Any:
    """Return a stored time (UTC) to the second, with its zone; anything else as it is."""
    text = value.isoformat() if isinstance(value, datetime) else value
    time = _TIME.fullmatch(text) if isinstance(text, str) else None
    return f"{time[1]} {time[2]}{time[3] or ''} UTC" if time else value


def told(value: Any, *, own: bool = False) -> str:
    """Return any value as text: what is none, yes and no, thousands, lists and mappings as words.

    With `own` it is a user's, and a number or a bool is written as it is: a whole number may be a year.
    """
    if value is None:
        return "-"
    if own and isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    if isinstance(value, Mapping):
        apart = "; " if any(isinstance(item, Mapping | list | tuple) for item in value.values()) else ", "
        return apart.join(f"{name}: {told(item, own=own)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, Mapping) for item in value):
            return "; ".join(told(item, own=own) for item in value)
        return ", ".join(map(str, value))
    return str(value)


def beneath(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return which columns of sentences go beneath the table, so that the others need no second line in `width`."""
    moved: list[str] = []
    for name in TEXTS:
        if natural_width([c for c in columns if c not in moved], columns, rows) <= width:
            break
        if name in columns[1:] and any(row[columns.index(name)] not in ("", "-") for row in rows):
            moved.append(name)
    return moved


def natural_width(shown: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Return how wide a table of these columns is when no cell is folded: three more for each, and one."""
    wide = [max([len(name), *(len(row[columns.index(name)]) for row in rows)]) for name in shown]
    return sum(wide) + 3 * len(shown) + 1
