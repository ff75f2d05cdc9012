"""Who opens the store of a lake that keeps its metadata in a key-value table: known here, made far above.

Object stores lie below key-value tables, and are where such a lake is opened from, in any process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# The store of all other objects, and what the lake's document says of the table, as JSON.
Opener = Callable[[Any, str], Any]
_openers: list[Opener] = []


def register_routed_opener(opener: Opener) -> None:
    """Open such stores by this function from now on."""
    _openers[:] = [opener]


def routed_opener() -> Opener:
    """Return the registered function."""
    return _openers[0]
