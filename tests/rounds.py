"""How often a test that draws what it does, or repeats it, does so."""

from __future__ import annotations

import os


def rounds(few: int, all_of_them: int) -> int:
    """Return `few`, and `all_of_them` where `make test-long` runs what is marked `rounds`."""
    return all_of_them if os.environ.get("ADJUNCT_ALL_ROUNDS") else few
