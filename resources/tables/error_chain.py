"""What an error was caused by: drivers and user code wrap the one error that says what happened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

E = TypeVar("E", bound=BaseException)


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and the members of groups; the outermost first."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        here = waiting.pop(0)
        if id(here) in seen:
            continue
        seen.add(id(here))
        yield here
        if isinstance(here, BaseExceptionGroup):
            waiting.extend(here.exceptions)
        if here.__cause__ is not None:
            waiting.append(here.__cause__)
        elif here.__context__ is not None and not here.__suppress_context__:
            waiting.append(here.__context__)


def first_cause(error: BaseException, kind: type[E]) -> E | None:
    """The outermost error of this kind among the causes, or None."""
    return next((cause for cause in causes(error) if isinstance(cause, kind)), None)
