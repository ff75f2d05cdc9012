"""What somebody who mistyped a name may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, there: Iterable[str], most: int = 3) -> tuple[str, ...]:
    """Return the names that are most like one that is not there, the nearest first; case does not count."""
    by_lower: dict[str, str] = {}
    for known in there:
        by_lower.setdefault(known.lower(), known)
    return tuple(by_lower[lower] for lower in get_close_matches(name.lower(), list(by_lower), most, 0.6))


def did_you_mean(name: str, there: Iterable[str]) -> str:
    """Return "Did you mean 'spent'? ", "" where nothing is like it."""
    alike = [repr(known) for known in nearest(name, there)]
    return f"Did you mean {' or '.join(alike)}? " if alike else ""
