"""Where the user's code has declared something: found when it is made, never stored by Adjunct."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

# The folder that the floors are imported from; examples are written as users write, and are installed beside them.
_PACKAGE = Path(__file__).parents[1]
_EXAMPLES = str(_PACKAGE / "examples")


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file of this machine."""

    file: str
    line: int

    def words(self) -> str:
        """Return it for a message: "flights.py, line 12", below the working directory with the folders on the way."""
        file = Path(self.file)
        here = Path.cwd()
        shown = file.relative_to(here) if file.is_relative_to(here) else Path(file.name)
        return f"{shown}, line {self.line}"


def is_ours(file: str) -> bool:
    """Whether a file of code belongs to this distribution, whose examples are written as users write."""
    return file.startswith(str(_PACKAGE)) and not file.startswith(_EXAMPLES)


def caller() -> Place | None:
    """Return the line that called into this distribution, None where there is none (an interactive session)."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith("<") and not is_ours(file):
            return Place(file, frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None
