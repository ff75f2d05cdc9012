"""How long versions are kept, and how Dagster partitions a dataset."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Literal

from dagster_adjunct.resources.checked_numbers import check_whole_number
from dagster_adjunct.resources.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class DiscardPolicy:
    """Which versions stay: the newest `keep` (None: all), what is served, pinned or leased, and nothing young.

    Nothing is deleted that is younger than `grace`, by the store's clock: versions, and what failed attempts
    left. Rejected and withdrawn versions go when they are older than `grace`.
    """

    keep: int | None = 3
    grace: timedelta = timedelta(hours=24)

    def __post_init__(self) -> None:
        if self.keep is not None:
            what = f"a discard policy keeps {self.keep!r} versions"
            check_whole_number(self.keep, what, "1 or more", argument="keep", next_step="Change keep=.")
        if not isinstance(self.grace, timedelta) or self.grace < timedelta(0):
            raise ConfigurationError(
                f"a discard policy has a grace period of {self.grace!r}: expected a timedelta that is not negative.",
                "Change grace=.",
                argument="grace",
            )


@dataclass(frozen=True, slots=True)
class VersionPartitions:
    """Versions as partitions in Dagster: one a day since `start` ("2026-01-01"), or one a name in `names`.

    With neither, names are added in Dagster as they come (dynamic). A version takes the name of its partition,
    and versions are ordered by name, numbers in it by value: an older one never becomes current by being built.
    """

    by: Literal["day", "name"] = "name"
    start: str | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.by == "day") != (self.start is not None):
            raise ConfigurationError(
                f"version partitions by {self.by} have start={self.start!r}.",
                'Write VersionPartitions("day", start="2026-01-01"), or leave start out.',
                argument="start",
            )
        if self.start is not None and not _is_day(self.start):
            raise ConfigurationError(
                f"version partitions by day have start={self.start!r}.",
                "Write a day such as 2026-01-01.",
                argument="start",
            )

    def has(self, name: str) -> bool:
        """Whether this is the name of one of the partitions; any name is, where they come as they come."""
        if self.start is not None:
            return _is_day(name) and name >= self.start
        return not self.names or name in self.names


def _is_day(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def natural_order(name: str) -> tuple[tuple[int, int, str], ...]:
    """Return what orders version names as people do: v2 before v10, 2026-01-31 before 2026-02-01."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return tuple((0, int(part), part) if part[0] in "0123456789" else (1, 0, part) for part in parts)
