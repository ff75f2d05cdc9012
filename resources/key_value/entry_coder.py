"""`EntryCoder`: keys and values of one table as its segments hold them, within its limits, and back."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, Generic, NoReturn, TypeVar

from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.key_value.addressing import (
    LONGEST,
    family_prefix,
    partition_of,
    split_table_key,
    split_table_keys,
    table_key,
)
from dagster_adjunct.resources.key_value.key_version import KeyVersion
from dagster_adjunct.resources.key_value.page_items import PageItems
from dagster_adjunct.resources.key_value.serializers import Serializer, reader_of_many
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_entries import TableEntry, TableKey
from dagster_adjunct.resources.key_value.table_segment import SegmentLimits, StoredEntry, StoredPage, TableId
from dagster_adjunct.resources.key_value_errors import (
    KeyTooLongError,
    KeyValueTableError,
    SerializationError,
    ValueTooLongError,
)

K = TypeVar("K")
V = TypeVar("V")
S = TypeVar("S")
_VERSION, _VALUE = itemgetter(1), itemgetter(2)  # of a StoredEntry
_new: Any = tuple.__new__  # makes a tuple of what is inside it, at half the cost of its constructor


class EntryCoder(Generic[K, V]):
    """Serialises and addresses for one table. Raises KeyTooLongError, ValueTooLongError and SerializationError, which
    name the table, before anything is sent."""

    __slots__ = (
        "_family_most", "_key", "_key_most", "_keys_of", "_limits", "_value", "_value_most", "_values_of",
        "partitions", "table",
    )  # fmt: skip

    def __init__(
        self,
        table: TableId,
        configuration: KeyValueTableConfiguration,
        limits: SegmentLimits,
        key: Serializer[K],
        value: Serializer[V],
    ) -> None:
        self.table = table
        self.partitions = configuration.partitions
        self._key, self._value, self._limits = (
            _serializer(table, "key", key),
            _serializer(table, "value", value),
            limits,
        )
        self._keys_of, self._values_of = reader_of_many(key), reader_of_many(value)
        self._family_most = limits.family_prefix if limits.family_prefix is not None else limits.table_key
        self._key_most = _least(configuration.longest_key, limits.key, limits.table_key)
        self._value_most = _least(configuration.longest_value, limits.value)

    @property
    def key_serializer(self) -> Serializer[K]:
        return self._key

    def prefix(self, family: str | None) -> bytes:
        """Return what the table keys of a family begin with; nothing for None."""
        if family is None:
            return b""
        try:
            prefix = family_prefix(family) if type(family) is str else family_prefix.__wrapped__(family)
        except KeyValueTableError as error:
            raise about(self.table, error) from None
        if len(prefix) > self._family_most:
            size = len(prefix) - 2
            self._too_long(f"the key family {family!r:.60} has {size:,} bytes", self._family_most - 2, size, prefix)
        return prefix

    def table_key(self, prefix: bytes, key: K) -> bytes:
        """Return the table key of a key whose family has this prefix."""
        try:
            serialised = self.serialised(key)
        except KeyValueTableError as error:
            raise error.of_family(_family(prefix)) from error.__cause__
        try:
            stored = table_key(prefix, serialised)
        except KeyValueTableError as error:
            raise about(self.table, error).of_family(_family(prefix)) from None
        size = len(serialised)
        if size > self._key_most:
            self._too_long(f"the key {key!r:.60} has {size:,} bytes", self._key_most, size, prefix)
        size = len(stored) - 2
        if size > self._limits.table_key - 2:
            most = self._limits.table_key - 2
            self._too_long(f"the key {key!r:.60} and its family have {size:,} bytes", most, size, prefix)
        return stored

    def table_keys(self, prefix: bytes, keys: Sequence[K]) -> list[bytes]:
        """Return the table keys of keys that have this prefix."""
        if not prefix:
            return [self.table_key(prefix, key) for key in keys]
        try:
            serialised = list(map(self._key.to_bytes, keys))
            longest = max(map(len, serialised), default=0)
        except Exception:  # noqa: BLE001 - it is raised again, and named, where they are made one by one
            return [self.table_key(prefix, key) for key in keys]
        fits = longest <= self._key_most and longest + len(prefix) <= min(self._limits.table_key, LONGEST + 2)
        if not fits or not set(map(type, serialised)) <= {bytes}:
            return [self.table_key(prefix, key) for key in keys]
        return list(map(prefix.__add__, serialised))

    def serialised(self, key: K) -> bytes:
        """Return a key's bytes without an address."""
        try:
            stored = self._key.to_bytes(key)
        except Exception as error:
            raise self._failed(f"the key {key!r:.60} can't be serialised", error, self._key) from error
        return stored if type(stored) is bytes else self._no_bytes("key", stored, self._key)

    def value(self, value: V) -> bytes:
        """Return a value's bytes."""
        try:
            stored = self._value.to_bytes(value)
        except Exception as error:
            raise self._failed("a value can't be serialised", error, self._value) from error
        if type(stored) is not bytes:
            self._no_bytes("value", stored, self._value)
        if self._value_most is not None and len(stored) > self._value_most:
            raise ValueTooLongError(
                f"key-value table {self.table}: a value has {len(stored):,} bytes; at most "
                f"{self._value_most:,} are taken.",
                "Store it elsewhere, as a file or an object, and its name here.",
                scope=self.table.scope,
                table=self.table.name,
                size=len(stored),
            )
        return stored

    def partition(self, prefix: bytes, stored: bytes) -> int:
        """Return the partition of a table key, or of all that have this prefix."""
        return partition_of(prefix or stored, self.partitions)

    def entry(self, family: str | None, key: K, stored: StoredEntry) -> TableEntry[K, V]:
        """Return what was found of a key that the caller knows."""
        return _new(TableEntry, (family, key, stored.version, self._read(stored.key, stored.value)))  # type: ignore[no-any-return]

    def found_keys(self, page: StoredPage) -> PageItems[TableKey[K]]:
        """Return the keys of what was found, one or more, in the order of table keys."""
        families, keys = self._keys(page.keys)
        return PageItems(len(keys), lambda: _table_keys(families, keys, page.versions))

    def found_entries(self, page: StoredPage) -> PageItems[TableEntry[K, V]]:
        """Return the entries that were found, one or more, in the order of table keys."""
        families, keys = self._keys(page.keys)
        values = self._values(page)
        return PageItems(len(keys), lambda: _table_entries(families, keys, page.versions, values))

    def entries(
        self, families: Iterable[str | None], keys: Iterable[K], stored: Sequence[StoredEntry]
    ) -> list[TableEntry[K, V]]:
        """Return what was found, one or more, of keys that the caller knows."""
        values = map(_VALUE, stored)
        try:
            read: Iterable[V] = list(self._values_of(values))
        except Exception:  # noqa: BLE001 - it is raised again, with the key that it is about
            read = [self._read(entry.key, entry.value) for entry in stored]
        return list(_table_entries(families, keys, map(_VERSION, stored), read))

    def _keys(self, stored: Sequence[bytes]) -> tuple[Iterable[str | None], list[K]]:
        try:
            families, serialised = split_table_keys(stored)
        except (struct.error, UnicodeDecodeError) as error:
            raise SerializationError(
                f"key-value table {self.table}: among {len(stored):,} stored keys one is no table key ({error}): "
                "something else has written it.",
                "Look for it in the store, between the last key that was read and the next, and remove it there.",
                scope=self.table.scope,
                table=self.table.name,
            ) from error
        try:
            return families, list(self._keys_of(serialised))
        except Exception:  # noqa: BLE001 - it is raised again, with the key that it is about
            return families, list(map(self._read_key, serialised))

    def _values(self, page: StoredPage) -> list[V]:
        try:
            return list(self._values_of(page.values))  # type: ignore[arg-type]  # they were asked for
        except Exception:  # noqa: BLE001 - it is raised again, with the key that it is about
            return list(map(self._read, page.keys, page.values))

    def _read_key(self, serialised: bytes) -> K:
        try:
            return self._key.from_bytes(serialised)
        except Exception as error:
            raise self._failed(f"a stored key, {serialised!r:.60}, can't be read", error, self._key) from error

    def _read(self, key: bytes, value: bytes | None) -> V:
        try:
            return self._value.from_bytes(value or b"")
        except Exception as error:
            family, serialised = split_table_key(key)
            of_family = "" if family is None else f" of the family {family!r:.60}"
            what = f"the value of the stored key {serialised!r:.60}{of_family} can't be read"
            failed = self._failed(what, error, self._value)
            raise (failed.of_family(family) if isinstance(failed, KeyValueTableError) else failed) from error

    def _too_long(self, what: str, most: int, size: int, prefix: bytes) -> NoReturn:
        raise KeyTooLongError(
            f"key-value table {self.table}: {what}; at most {most:,} are taken.",
            "Use a shorter one, such as a hash of it.",
            scope=self.table.scope,
            table=self.table.name,
            size=size,
        ).of_family(_family(prefix))

    def _no_bytes(self, what: str, stored: object, serializer: object) -> NoReturn:
        raise SerializationError(
            f"key-value table {self.table}: the serializer made {type(stored).__name__} of a {what}: expected bytes.",
            "Correct its to_bytes.",
            scope=self.table.scope,
            table=self.table.name,
            serializer=type(serializer).__name__,
        )

    def _failed(self, what: str, error: Exception, serializer: object) -> AdjunctError:
        if isinstance(error, KeyValueTableError):
            table = self.table
            problem = f"key-value table {table}: {what}: {error.problem}"
            of = {"serializer": type(serializer).__name__} if isinstance(error, SerializationError) else {}
            return error.reworded(problem, error.next_step, scope=table.scope, table=table.name, **of)
        if isinstance(error, AdjunctError):
            return error
        return SerializationError(
            f"key-value table {self.table}: {what}: {type(error).__name__}: {error}.",
            "Correct the serializer, or give what it takes.",
            scope=self.table.scope,
            table=self.table.name,
            serializer=type(serializer).__name__,
        )


def _serializer(table: TableId, name: str, given: S) -> S:
    """Return a serializer that is one. Raises ConfigurationError, before a first write stumbles over something else."""
    if isinstance(given, type) or not all(
        callable(getattr(given, method, None)) for method in ("to_bytes", "from_bytes")
    ):
        class_name = given.__name__ if isinstance(given, type) and given.__name__.endswith("Serializer") else ""
        raise ConfigurationError(
            f"key-value table {table}: {name} is {given!r:.80}: expected a serializer, an object.",
            f"Write {class_name}(…)." if class_name else "Give one, such as TextSerializer() or JsonSerializer().",
            argument=name,
        )
    return given


def _table_keys(families: Iterable[str | None], keys: Iterable[K], versions: Iterable[bytes]) -> Iterable[TableKey[K]]:
    return map(_new, repeat(TableKey), zip(families, keys, map(KeyVersion, versions), strict=False))


def _table_entries(
    families: Iterable[str | None], keys: Iterable[K], versions: Iterable[bytes], values: Iterable[V]
) -> Iterable[TableEntry[K, V]]:
    return map(_new, repeat(TableEntry), zip(families, keys, versions, values, strict=False))


def about(table: TableId, error: KeyValueTableError) -> KeyValueTableError:
    """Return an error that does not know its table as one that names it."""
    return error.reworded(
        f"key-value table {table}: {error.problem}", error.next_step, scope=table.scope, table=table.name
    )


def _family(prefix: bytes) -> str | None:
    """Return the family whose table keys begin so; None for the empty prefix of those without one."""
    return prefix[2:].decode() if prefix else None


def _least(first: Any, *others: int | None) -> Any:
    known = [limit for limit in (first, *others) if limit is not None]
    return min(known, default=None)
