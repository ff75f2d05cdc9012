"""`TableKey` and `TableEntry`: keys and entries of a key-value table as they are read (PDP-39).

Named tuples, as one of each is made for every entry that is read.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from dagster_adjunct.resources.key_value.key_version import KeyVersion

K = TypeVar("K")
V = TypeVar("V")


class TableKey(NamedTuple, Generic[K]):
    """A key of a table, its family (None where it has none) and, where it is known, its version."""

    family: str | None
    key: K
    version: KeyVersion | None = None


class TableEntry(NamedTuple, Generic[K, V]):
    """An entry as it was read: its key with the version, and its value."""

    key: TableKey[K]
    value: V

    @property
    def version(self) -> KeyVersion:
        """The version that the entry had when it was read."""
        version = self.key.version
        assert version is not None
        return version
