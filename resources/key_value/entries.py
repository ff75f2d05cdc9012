"""`EntryCoder`: keys and values of one table as its segments hold them, within its limits, and back."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

from dagster_adjunct.resources.common import check_whole_number
from dagster_adjunct.resources.errors import (
    AdjunctError,
    BatchTooLargeError,
    ConditionsNotMetError,
    ConfigurationError,
    FailedCondition,
    KeyTooLongError,
    KeyValueTableError,
    SerializationError,
    ValueTooLongError,
)
from dagster_adjunct.resources.key_value.iterators import PageItems
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    MAX_KEY_BYTES,
    VERSION_BYTES,
    ConditionsFailed,
    Expected,
    KeyValueTableConfiguration,
    KeyVersion,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
    family_prefix,
    make_version,
    partition_of,
    split_table_key,
    split_table_keys,
    table_key,
)
from dagster_adjunct.resources.key_value.serializers import (
    AvroSerializer,
    IntegerSerializer,
    JsonSerializer,
    ModelSerializer,
    Serializer,
    reader_of_many,
)

# What may be done to one key: `Insert`, `Put`, `Replace`, `Remove`. The named methods of a table are made of these.
#
# A batch may also guard keys that it does not write: `MustBeAbsent`, `MustHaveVersion`.


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


# `TableKey` and `TableEntry`: keys and entries of a key-value table as they are read (PDP-39).
#
# Both are tuples, as one of each could be made for every entry that is read.


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
            raise with_table(self.table, error) from None
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
            raise with_table(self.table, error).of_family(_family(prefix)) from None
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
        fits = longest <= self._key_most and longest + len(prefix) <= min(self._limits.table_key, MAX_KEY_BYTES + 2)
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


def with_table(table: TableId, error: KeyValueTableError) -> KeyValueTableError:
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


T = TypeVar("T")


def require_list(table: TableId, name: str, given: Iterable[T]) -> list[T]:
    """Return several values as a list. A text is one value, and refused."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ConfigurationError(
            f"key-value table {table}: {name} is {given!r:.80}: expected several.", "Give a list.", argument=name
        )
    return list(given)


def require_pairs(table: TableId, name: str, given: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of key and value as a list."""
    given_pairs = require_list(table, name, given)
    for pair in given_pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ConfigurationError(
                f"key-value table {table}: {pair!r:.80} is among {name}: expected pairs of key and value.",
                "Give tuples of two; a dictionary has them as its items().",
                argument=name,
            )
    return given_pairs


def check_family(table: TableId, family: str | None) -> None:
    """Raise KeyValueTableError where something that is within one family has none."""
    if family is None:
        raise KeyValueTableError(
            f"key-value table {table}: family is None: batches and iterators are within one family.",
            "Give its name; keys without a family are written one by one, and iterated with the whole table.",
            scope=table.scope,
            table=table.name,
        )


def encode_key_prefix(table: TableId, prefix: str | bytes | None, keys: Serializer[Any]) -> bytes:
    """Return what the bytes of keys are to begin with; a text stands for its UTF-8, where keys are such."""
    if prefix is None or isinstance(prefix, bytes):
        return prefix or b""
    try:
        stored = prefix.encode()
    except (AttributeError, UnicodeEncodeError):
        raise ConfigurationError(
            f"key-value table {table}: prefix is {prefix!r:.80}: expected bytes, or a text that UTF-8 can hold.",
            "Give what the serialised keys begin with.",
            argument="prefix",
        ) from None
    if prefix and isinstance(keys, JsonSerializer | ModelSerializer | AvroSerializer | IntegerSerializer):
        raise ConfigurationError(
            f"key-value table {table}: prefix is the text {prefix!r:.60}, which no key need begin with where "
            f"{type(keys).__name__} writes them: expected bytes.",
            "Give what the serialised keys begin with; a text in JSON begins with a quotation mark.",
            argument="prefix",
        )
    return stored


def resolve_partitions(table: TableId, count: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the partitions to iterate over: those given, else all."""
    if given is None:
        return tuple(range(count))
    chosen = tuple(require_list(table, "partitions", given))
    if not all(type(number) is int and 0 <= number < count for number in chosen) or len({*chosen}) < len(chosen):
        raise ConfigurationError(
            f"key-value table {table} has no such partitions: {list(chosen)!r:.80}.",
            f"Give different numbers from 0 to {count - 1}.",
            argument="partitions",
        )
    return chosen


def validate_page_size(page_size: int) -> int:
    """Return the most items that a page is to have."""
    check_whole_number(page_size, f"page_size={page_size!r}", "a whole number from 1 on", argument="page_size")
    return page_size


@dataclass(frozen=True, slots=True)
class WriteRequest(Generic[K]):
    """Changes of one segment, with the keys as the caller gave them, for what is said of them."""

    family: str | None
    keys: Sequence[K]
    changes: Sequence[SegmentChange]
    token: bytes

    @property
    def versions(self) -> list[KeyVersion | None]:
        """The new versions in the order of the changes, None for what is removed or only guarded."""
        return [None if change.value is None else KeyVersion(change.version) for change in self.changes]


def segment_change(coder: EntryCoder[K, V], prefix: bytes, change: TableChange[K, V], version: bytes) -> SegmentChange:
    """Return a change as its segment takes it."""
    if isinstance(change, Put):
        return SegmentChange(coder.table_key(prefix, change.key), coder.value(change.value), version, ANYTHING)
    if isinstance(change, Insert):
        return SegmentChange(coder.table_key(prefix, change.key), coder.value(change.value), version, ABSENT)
    if isinstance(change, Replace):
        expected: Expected | bytes = version_bytes(coder.table, change.version)
        return SegmentChange(coder.table_key(prefix, change.key), coder.value(change.value), version, expected)
    if isinstance(change, Remove):
        expected = ANYTHING if change.version is None else version_bytes(coder.table, change.version)
        return SegmentChange(coder.table_key(prefix, change.key), None, version, expected)
    if isinstance(change, MustBeAbsent | MustHaveVersion):
        expected = ABSENT if isinstance(change, MustBeAbsent) else version_bytes(coder.table, change.version)
        return SegmentChange(coder.table_key(prefix, change.key), None, version, expected, is_guard=True)
    raise ConfigurationError(
        f"key-value table {coder.table}: {change!r:.80} is no change.",
        "Give Insert, Put, Replace, Remove, MustBeAbsent and MustHaveVersion objects.",
        argument="changes",
    )


def build_batch(
    coder: EntryCoder[K, V], family: str, changes: Iterable[TableChange[K, V]], token: bytes
) -> WriteRequest[K]:
    """Return the request of a batch. Raises KeyValueTableError for a missing family and a key that is there twice."""
    check_family(coder.table, family)
    prefix = coder.prefix(family)
    given = require_list(coder.table, "changes", changes)
    made = [segment_change(coder, prefix, change, make_version(token, place)) for place, change in enumerate(given)]
    if len({change.key for change in made}) != len(made):
        raise _twice(coder.table, family, given, made)
    return WriteRequest(family, [change.key for change in given], made, token)


def check_limits(table: TableId, changes: Sequence[SegmentChange], limits: SegmentLimits) -> None:
    """Raise BatchTooLargeError where a backend does not take so much at once."""
    if limits.changes is not None and len(changes) > limits.changes:
        raise BatchTooLargeError(
            f"key-value table {table}: a batch has {len(changes):,} changes; its backend applies "
            f"{limits.changes:,} at once.",
            "Split it; each part is atomic by itself only.",
            scope=table.scope,
            table=table.name,
            changes=len(changes),
        )
    if limits.request is not None:
        size = sum(len(change.key) + len(change.value or b"") for change in changes)
        if size > limits.request:
            raise BatchTooLargeError(
                f"key-value table {table}: keys and values of a write have {size:,} bytes; its backend applies "
                f"{limits.request:,} at once.",
                "Split it; each part is atomic by itself only.",
                scope=table.scope,
                table=table.name,
                changes=len(changes),
                size=size,
            )


def conditions_error(table: TableId, request: WriteRequest[K], failed: ConditionsFailed) -> ConditionsNotMetError:
    """Return the error that tells each key whose condition does not hold, with the version found."""
    failures = tuple(
        FailedCondition(
            request.family, request.keys[place], _expected(request.changes[place]), _version(failed.found[place])
        )
        for place in sorted(failed.found)
    )
    told = "; ".join(_told(failure) for failure in failures[:5])
    more = f"; and {len(failures) - 5:,} more" if len(failures) > 5 else ""
    family = "" if request.family is None else f" of family {request.family!r:.60}"
    return ConditionsNotMetError(
        f"key-value table {table}: nothing was written, as conditions on keys{family} do not hold: {told}{more}.",
        "Read them again and decide again.",
        scope=table.scope,
        table=table.name,
        failures=failures,
    )


def to_replace(table: TableId, family: str, entry: Any) -> Replace[Any, Any]:
    """Return the change that a `TableEntry`, or (key, value, version), asks `replace_all` for."""
    if isinstance(entry, TableEntry):
        _check_same(table, family, entry.key)
        return Replace(entry.key.key, entry.value, entry.key.version)  # type: ignore[arg-type]  # checked when it is made
    if isinstance(entry, tuple) and len(entry) == 3:
        return Replace(*entry)
    raise ConfigurationError(
        f"key-value table {table}: {entry!r:.80} can't replace anything.",
        "Give TableEntry objects, or tuples of key, value and version.",
        argument="entries",
    )


def to_remove(table: TableId, family: str, key: Any) -> Remove[Any]:
    """Return the change that a key asks `remove_all` for: conditional where it is a `TableKey` with a version."""
    if isinstance(key, TableKey):
        _check_same(table, family, key)
        return Remove(key.key, key.version)
    return Remove(key)


def version_bytes(table: TableId, version: KeyVersion) -> bytes:
    """Return the bytes of a version that a caller gave."""
    is_one = isinstance(version, KeyVersion)
    stored = version.to_bytes() if is_one else version
    # Bytes that no write has given could be taken for no condition at all.
    if not is_one or type(stored) is not bytes or len(stored) != VERSION_BYTES:
        raise KeyValueTableError(
            f"key-value table {table}: {stored!r:.60} is no version of a key: expected a KeyVersion of {VERSION_BYTES} "
            "bytes.",
            "Give the version that a write returned, or that an entry was read with.",
            scope=table.scope,
            table=table.name,
        )
    return stored


def _check_same(table: TableId, family: str | None, key: TableKey[Any]) -> None:
    if key.family != family:
        raise KeyValueTableError(
            f"key-value table {table}: the key {key.key!r:.60} is of family {key.family!r:.60}, in a batch of "
            f"{family!r:.60}.",
            "Write the keys of each family by themselves.",
            scope=table.scope,
            table=table.name,
        )


def _twice(
    table: TableId, family: str, changes: Sequence[TableChange[Any, Any]], made: Sequence[SegmentChange]
) -> KeyValueTableError:
    first: dict[bytes, int] = {}
    place = next(place for place, change in enumerate(made) if first.setdefault(change.key, place) != place)
    return KeyValueTableError(
        f"key-value table {table}: the key {changes[place].key!r:.60} of family {family!r:.60} is in a batch twice, "
        f"at places {first[made[place].key]} and {place}.",
        "Write each key once in a batch.",
        scope=table.scope,
        table=table.name,
    )


def _expected(change: SegmentChange) -> KeyVersion | None:
    return KeyVersion(change.expected) if isinstance(change.expected, bytes) else None


def _version(stored: bytes | None) -> KeyVersion | None:
    return None if stored is None else KeyVersion(stored)


def _told(failure: FailedCondition) -> str:
    expected = f"version {failure.expected}" if failure.expected else "no such key"
    actual = f"version {failure.found}" if failure.found else "no such key"
    return f"{failure.key!r:.60}: expected {expected}, found {actual}"
