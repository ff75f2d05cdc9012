"""`TableKey` and `TableEntry`: keys and entries of a key-value table as they are read (PDP-39).

Both are tuples, as one of each could be made for every entry that is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.key_version import KeyVersion

K = TypeVar("K")
V = TypeVar("V")
_flat = tuple.__new__


class TableKey(NamedTuple, Generic[K]):
    """A key of a table, its family (None where it has none) and, where it is known, its version."""

    family: str | None
    key: K
    version: KeyVersion | None = None


class _EntryParts(NamedTuple):
    """What is inside a `TableEntry`."""

    family: str | None
    key: Any
    version: Any
    value: Any


class TableEntry(tuple[Any, ...], Generic[K, V]):
    """An entry as it was read: its key with the version, and its value. It is a pair of both.

    Inside it is one flat tuple of family, key, version and value, the version as bytes; `key` and `version` are made
    when they are asked for. To make three objects more of every entry takes as long as to read it.
    """

    __slots__ = ()

    value: V = _EntryParts.value  # which reads the place of a tuple, without a call

    def __new__(cls, key: TableKey[K], value: V) -> TableEntry[K, V]:
        if not isinstance(key, TableKey):
            raise ConfigurationError(
                f"key={key!r:.80} of a TableEntry: expected a TableKey.", "Give one.", argument="key"
            )
        version = key.version
        # Bytes are no version: in a tuple of their own they do not pass for one that was read.
        inside = version.to_bytes() if isinstance(version, KeyVersion) else None if version is None else (version,)
        return _flat(cls, (key.family, key.key, inside, value))

    @property
    def key(self) -> TableKey[K]:
        """The key, its family and the version that the entry had when it was read."""
        family, key, inside, _ = tuple.__iter__(self)
        version = KeyVersion(inside) if type(inside) is bytes else inside and inside[0]
        return _flat(TableKey, (family, key, version))

    @property
    def version(self) -> KeyVersion:
        """The version that the entry had when it was read."""
        version = self.key.version
        assert version is not None
        return version

    def __iter__(self) -> Iterator[Any]:
        return iter((self.key, self.value))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: Any) -> Any:
        return (self.key, self.value)[place]

    def _replace(self, **changes: Any) -> TableEntry[K, V]:
        """Return the entry with another key or value; `replace_all` takes it with the version that it has."""
        return TableEntry(**{"key": self.key, "value": self.value, **changes})

    def __repr__(self) -> str:
        return f"TableEntry(key={self.key!r}, value={self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TableEntry, (self.key, self.value)
