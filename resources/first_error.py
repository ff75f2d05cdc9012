"""What is raised when several things were tried one after the other, and some of them failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def raise_first(errors: Sequence[Exception], *, words: Callable[[Exception], str] = str) -> None:
    """Raise the first of these errors, if there are any, with a note for each of the others."""
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"Also: {words(other)}")
        raise first
