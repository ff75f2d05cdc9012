"""What may be done to one key: `Insert`, `Put`, `Replace`, `Remove`. The named methods of a table are made of these.

A batch may also guard keys that it does not write: `MustBeAbsent`, `MustHaveVersion`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from dagster_adjunct.resources.key_value.key_version import KeyVersion

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Insert(Generic[K, V]):
    """Write a key that must not be there."""

    key: K
    value: V


@dataclass(frozen=True, slots=True)
class Put(Generic[K, V]):
    """Write a key, whether it is there or not."""

    key: K
    value: V


@dataclass(frozen=True, slots=True)
class Replace(Generic[K, V]):
    """Write a key that must have this version."""

    key: K
    value: V
    version: KeyVersion


@dataclass(frozen=True, slots=True)
class Remove(Generic[K]):
    """Remove a key: one that must have this version or, where that is None, whatever is there."""

    key: K
    version: KeyVersion | None = None


@dataclass(frozen=True, slots=True)
class MustBeAbsent(Generic[K]):
    """Write nothing, and let the batch be applied only where there is no such key."""

    key: K


@dataclass(frozen=True, slots=True)
class MustHaveVersion(Generic[K]):
    """Write nothing, and let the batch be applied only where the key has this version."""

    key: K
    version: KeyVersion


TableChange: TypeAlias = Insert[K, V] | Put[K, V] | Replace[K, V] | Remove[K] | MustBeAbsent[K] | MustHaveVersion[K]
