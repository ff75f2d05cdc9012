"""Which keys of a lake are kept in a table: those below `below`, without those below `but`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutedKeys:
    """Beginnings of keys, each up to a slash, or "" for all keys."""

    below: tuple[str, ...]
    but: tuple[str, ...] = ()

    def take(self, key: str) -> bool:
        """Whether an object of this key is kept in the table."""
        return key.startswith(self.below) and not key.startswith(self.but)

    def may_begin_with(self, prefix: str) -> bool:
        """Whether keys of the table may begin with `prefix`."""
        return any(_related(prefix, one) for one in self.below)

    def are_all_with(self, prefix: str) -> bool:
        """Whether all keys that begin with `prefix` are the table's."""
        return prefix.startswith(self.below) and not any(_related(prefix, one) for one in self.but)


def _related(prefix: str, other: str) -> bool:
    return prefix.startswith(other) or other.startswith(prefix)
