"""How often a test that draws what it does, or repeats it, does so."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")


def rounds(few: T, all_of_them: T) -> T:
    """Return `few`, and `all_of_them` where `make test-long` runs what is marked `rounds`."""
    return all_of_them if os.environ.get("ADJUNCT_ALL_ROUNDS") else few
