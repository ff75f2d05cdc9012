"""The kinds of windows: Tumbling, Sliding and Session, as users write them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeAlias

from dagster_adjunct.orchestration.operators.arguments import LONGEST
from dagster_adjunct.resources.errors import ConfigurationError

_MOST = 1_000


@dataclass(frozen=True, slots=True)
class Tumbling:
    """Windows of one `size`, one after the other: each time is in one of them.

    They begin at whole multiples of the size since 1970-01-01T00:00Z.
    """

    size: timedelta

    def __post_init__(self) -> None:
        _check("Tumbling", "size", self.size)

    @property
    def every(self) -> timedelta:
        """How far the begins of two windows are apart."""
        return self.size

    def words(self) -> str:
        """Return what it is, as plans show it."""
        return f"tumbling {self.size}"


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows of one `size`, one beginning `every` so often: each time is in size / every of them."""

    size: timedelta
    every: timedelta

    def __post_init__(self) -> None:
        _check("Sliding", "size", self.size)
        _check("Sliding", "every", self.every)
        if not self.every <= self.size <= self.every * _MOST:
            raise ConfigurationError(
                f"Sliding has size={self.size} and every={self.every}: expected a size of 1 to {_MOST:,} times every; "
                "each record is counted in that many windows.",
                "Choose others; windows with gaps between them are a filter behind Tumbling.",
                argument="every",
            )

    def words(self) -> str:
        """Return what it is, as plans show it."""
        return f"sliding {self.size} every {self.every}"


@dataclass(frozen=True, slots=True)
class Session:
    """A window for each run of records of a key of which each follows the one before it in less than `gap`.

    It ends `gap` after the last of them.
    """

    gap: timedelta

    def __post_init__(self) -> None:
        _check("Session", "gap", self.gap)

    def words(self) -> str:
        """Return what it is, as plans show it."""
        return f"sessions with gaps of {self.gap}"


Kind: TypeAlias = Tumbling | Sliding | Session


def micros(length: timedelta) -> int:
    """Return a length of time in microseconds."""
    return length // timedelta(microseconds=1)


def longest(kind: Kind) -> timedelta:
    """Return for how long a window takes records at least after its first: its size, or the gap of a session."""
    return kind.gap if isinstance(kind, Session) else kind.size


def _check(kind: str, argument: str, value: object) -> None:
    if not isinstance(value, timedelta) or not timedelta(0) < value <= LONGEST:
        raise ConfigurationError(
            f"{kind} has {argument}={value!r}: expected a timedelta above none, and of 100 years at most.",
            f"Write {kind}({argument}=timedelta(minutes=5)), say.",
            argument=argument,
        )
