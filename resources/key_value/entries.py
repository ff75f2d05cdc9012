"""`EntryCoder`, which serializes keys and values of a table within its limits, and the changes of
write requests.

`Insert`, `Put`, `Replace` and `Remove` change one key; the named methods of a table are made of
them. In a batch, `MustBeAbsent` and `MustHaveVersion` guard keys that it does not write.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import itemgetter
from typing import Any, Generic, NamedTuple, NoReturn, TypeAlias, TypeVar

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.iterators import PageItems
from dagster_adjunct.resources.key_value.segment import (
    ConditionsFailed,
    KeyValueTableConfiguration,
    KeyVersion,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
)
from dagster_adjunct.resources.key_value.serializers import (
    AvroSerializer,
    IntegerSerializer,
    JsonSerializer,
    ModelSerializer,
    Serializer,
    reader_of_many,
)

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Insert(Generic[K, V]):
    """Write a key that must not exist."""

    key: K
    value: V


@dataclass(frozen=True, slots=True)
class Put(Generic[K, V]):
    """Write a key, whether it exists or not."""

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
    """Remove a key, which must have this version; None removes any version and allows a missing
    key.
    """

    key: K
    version: KeyVersion | None = None


@dataclass(frozen=True, slots=True)
class MustBeAbsent(Generic[K]):
    """Write nothing, and apply the batch only if the key does not exist."""

    key: K


@dataclass(frozen=True, slots=True)
class MustHaveVersion(Generic[K]):
    """Write nothing, and apply the batch only if the key has this version."""

    key: K
    version: KeyVersion


TableChange: TypeAlias = (
    Insert[K, V] | Put[K, V] | Replace[K, V] | Remove[K] | MustBeAbsent[K] | MustHaveVersion[K]
)
_WITH_VALUE = (Insert, Put, Replace)
_GUARDS = (MustBeAbsent, MustHaveVersion)

_new: Any = tuple.__new__  # makes a tuple of its content at half the cost of its constructor


class TableKey(NamedTuple, Generic[K]):
    """A key of a table, its family (None if it has none) and, if known, its version."""

    family: str | None
    key: K
    version: KeyVersion | None = None


class _EntryParts(NamedTuple):
    """The items of the flat tuple that a `TableEntry` is."""

    family: str | None
    key: Any
    version: Any
    value: Any


class TableEntry(tuple[Any, ...], Generic[K, V]):
    """An entry as read: a pair of its `TableKey`, which has the version, and its value.

    It is one flat tuple of family, key, version and value, the version as bytes; `key` and
    `version` are made on access. Making three more objects for every entry would take as long as
    reading it.
    """

    __slots__ = ()

    value: V = _EntryParts.value  # reads the item of a tuple without a call

    def __new__(cls, key: TableKey[K], value: V) -> TableEntry[K, V]:
        if not isinstance(key, TableKey):
            raise argument_error(f"key={key!r:.80} of a TableEntry", "a TableKey", argument="key")
        version = key.version
        # Anything but a KeyVersion is wrapped, because plain bytes are taken for a version that was
        # read.
        if isinstance(version, KeyVersion):
            stored_version = version.to_bytes()
        elif version is None:
            stored_version = None
        else:
            stored_version = (version,)
        members = (key.family, key.key, stored_version, value)
        return _new(cls, members)  # type: ignore[no-any-return]

    @property
    def key(self) -> TableKey[K]:
        """The key, its family, and the version that the entry had when it was read."""
        family, key, stored_version, _ = tuple.__iter__(self)
        if stored_version is None:
            version = None
        elif type(stored_version) is bytes:
            version = KeyVersion(stored_version)
        else:
            (version,) = stored_version
        return _new(TableKey, (family, key, version))  # type: ignore[no-any-return]

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
        """Return the entry with another key or value, for `replace_all`, which expects the
        version that it has.
        """
        return TableEntry(**{"key": self.key, "value": self.value, **changes})

    def __repr__(self) -> str:
        return f"TableEntry(key={self.key!r}, value={self.value!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return TableEntry, (self.key, self.value)


_LENGTH_BYTES = 2  # of a family's, in its prefix
# of a StoredEntry
_KEY = itemgetter(0)
_VERSION = itemgetter(1)
_VALUE = itemgetter(2)


class EntryCoder(Generic[K, V]):
    """Converts keys and values of one table to bytes and back, and finds the partitions of keys.

    Raises KeyTooLongError, ValueTooLongError and SerializationError, which name the table, before
    anything is sent.
    """

    __slots__ = (
        "_decode_keys",
        "_decode_values",
        "_family_most",
        "_key_most",
        "_limits",
        "_value",
        "_value_most",
        "key_serializer",
        "partitions",
        "table",
    )

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
        self._limits = limits
        self.key_serializer = key
        self._value = value
        self._decode_keys = reader_of_many(key)
        self._decode_values = reader_of_many(value)
        if limits.family_prefix is not None:
            self._family_most = limits.family_prefix
        else:
            self._family_most = limits.table_key
        self._key_most: Any = _smallest(
            configuration.longest_key, limits.key, limits.table_key - _LENGTH_BYTES
        )
        self._value_most = _smallest(configuration.longest_value, limits.value)

    def prefix(self, family: str | None) -> bytes:
        """Return the bytes with which the table keys of a family start; b"" without a family."""
        if family is None:
            return b""
        try:
            if type(family) is str:
                prefix = segment.family_prefix(family)
            else:  # without the cache, which holds only texts
                prefix = segment.family_prefix.__wrapped__(family)
        except (AttributeError, UnicodeEncodeError):
            prefix = b""  # rejected below
        if not _LENGTH_BYTES < len(prefix) <= self._family_most:
            self._reject_family(family, prefix)
        return prefix

    def table_key(self, prefix: bytes, key: K) -> bytes:
        """Return the table key of a key; `prefix` is that of its family, b"" without one."""
        try:
            serialized = self.serialize_key(key)
        except errors.KeyValueTableError as error:
            raise error.of_family(_family_of(prefix)) from error.__cause__
        size = len(serialized)
        most = self._limits.table_key - _LENGTH_BYTES
        if prefix:
            whole = size + len(prefix) - _LENGTH_BYTES
        else:
            whole = size
        # If key and family together are too long for any store, that is the error (below).
        if size > self._key_most and whole <= segment.MAX_KEY_BYTES:
            self._too_long(f"the key {key!r:.60} has {size:,} bytes", self._key_most, size, prefix)
        if whole > most:
            self._too_long(
                f"the key {key!r:.60} and its family have {whole:,} bytes", most, whole, prefix
            )
        return segment.table_key(prefix, serialized)

    def table_keys(self, prefix: bytes, keys: Sequence[K]) -> list[bytes]:
        """Return the table keys of these keys, in their order; `prefix` is that of their family,
        b"" without one.
        """
        if prefix:  # all at once, unless one of them is invalid
            try:
                serialized = list(map(self.key_serializer.to_bytes, keys))
                longest = max(map(len, serialized), default=0)
            except Exception:  # noqa: BLE001 - raised again below, with the key that it is about
                serialized = []
                longest = self._limits.table_key
            fits = longest <= self._key_most and longest + len(prefix) <= self._limits.table_key
            if fits and set(map(type, serialized)) <= {bytes}:
                return list(map(prefix.__add__, serialized))
        return [self.table_key(prefix, key) for key in keys]

    def serialize_key(self, key: K) -> bytes:
        """Return the serialized key, without its family."""
        try:
            stored = self.key_serializer.to_bytes(key)
        except Exception as error:
            raise self._failed(
                f"the key {key!r:.60} can't be serialized", error, self.key_serializer
            ) from error
        if type(stored) is bytes:
            return stored
        return self._not_bytes("key", stored, self.key_serializer)

    def value(self, value: V) -> bytes:
        """Return the serialized value."""
        try:
            stored = self._value.to_bytes(value)
        except Exception as error:
            raise self._failed("a value can't be serialized", error, self._value) from error
        if type(stored) is not bytes:
            self._not_bytes("value", stored, self._value)
        if self._value_most is not None and len(stored) > self._value_most:
            raise self.table.error(
                errors.ValueTooLongError,
                f"a value has {len(stored):,} bytes; at most {self._value_most:,} are allowed.",
                "Store it elsewhere, as a file or an object, and its name here.",
                size=len(stored),
            )
        return stored

    def locate(self, family: str | None, key: K) -> tuple[int, bytes]:
        """Return the partition and the table key of a key."""
        prefix = self.prefix(family)
        stored = self.table_key(prefix, key)
        return segment.partition_of(prefix or stored, self.partitions), stored

    def partition(self, prefix: bytes, stored: bytes) -> int:
        """Return the partition of the family with this prefix; if that is b"", of the table key
        `stored`.
        """
        return segment.partition_of(prefix or stored, self.partitions)

    def entry(self, family: str | None, key: K, stored: StoredEntry) -> TableEntry[K, V]:
        """Return a stored entry as callers get it; its family and key are known."""
        value = self._read(stored.key, stored.value)
        return _new(TableEntry, (family, key, stored.version, value))  # type: ignore[no-any-return]

    def entries(
        self, families: Iterable[str | None], keys: Iterable[K], stored: Sequence[StoredEntry]
    ) -> list[TableEntry[K, V]]:
        """Return stored entries as callers get them; their families and keys are known."""
        values = self._values(map(_KEY, stored), list(map(_VALUE, stored)))
        return list(_table_entries(families, keys, map(_VERSION, stored), values))

    def page_keys(self, page: StoredPage) -> PageItems[TableKey[K]]:
        """Return the keys of a page that is not empty."""
        families, keys = self._split(page.keys)
        versions = page.versions
        return PageItems(
            len(keys),
            lambda: map(
                _new, repeat(TableKey), zip(families, keys, map(KeyVersion, versions), strict=False)
            ),
        )

    def page_entries(self, page: StoredPage) -> PageItems[TableEntry[K, V]]:
        """Return the entries of a page that is not empty."""
        families, keys = self._split(page.keys)
        values = self._values(page.keys, page.values)
        return PageItems(len(keys), lambda: _table_entries(families, keys, page.versions, values))

    def _split(self, stored: Sequence[bytes]) -> tuple[Iterable[str | None], list[K]]:
        """Return the families and the keys of stored table keys; SerializationError if they can't
        be read.
        """
        try:
            families, serialized = segment.split_table_keys(stored)
        except (struct.error, UnicodeDecodeError) as error:
            raise self.table.error(
                errors.SerializationError,
                f"one of {len(stored):,} stored keys is not a table key ({error}): something else"
                " wrote it.",
                "Find it in the store, between the last key that was read and the next, and remove"
                " it there.",
            ) from error
        try:
            return families, list(self._decode_keys(serialized))
        except Exception:  # noqa: BLE001 - raised again, with the key that it is about
            return families, list(map(self._read_key, serialized))

    def _values(self, keys: Iterable[bytes], values: Sequence[bytes | None]) -> list[V]:
        """Return the deserialized values; the table keys are for errors."""
        try:
            # None of them is missing: they were requested.
            return list(self._decode_values(values))  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - raised again, with the key that it is about
            return list(map(self._read, keys, values))

    def _read_key(self, serialized: bytes) -> K:
        """Return a deserialized key; SerializationError if it can't be read."""
        try:
            return self.key_serializer.from_bytes(serialized)
        except Exception as error:
            what = f"a stored key, {serialized!r:.60}, can't be read"
            raise self._failed(what, error, self.key_serializer) from error

    def _read(self, key: bytes, value: bytes | None) -> V:
        """Return the deserialized value of a table key; SerializationError if it can't be read."""
        try:
            return self._value.from_bytes(value or b"")
        except Exception as error:
            family, serialized = segment.split_table_key(key)
            of_family = ""
            if family is not None:
                of_family = f" of the family {family!r:.60}"
            what = f"the value of the stored key {serialized!r:.60}{of_family} can't be read"
            failed = self._failed(what, error, self._value)
            if isinstance(failed, errors.KeyValueTableError):
                failed.of_family(family)
            raise failed from error

    def _too_long(self, what: str, most: int, size: int, prefix: bytes) -> NoReturn:
        """Raise KeyTooLongError. `what` says what is too long, with its `size` in bytes, of which
        `most` are allowed; `prefix` is that of its family.
        """
        problem = f"{what}; at most {most:,} are allowed."
        next_step = "Use a shorter one, such as a hash of it."
        raise self.table.error(errors.KeyTooLongError, problem, next_step, size=size).of_family(
            _family_of(prefix)
        )

    def _reject_family(self, family: object, prefix: bytes) -> NoReturn:
        """Raise the error for a family that is too long, empty or no text; `prefix` is what it
        would be.
        """
        if len(prefix) > _LENGTH_BYTES:
            size = len(prefix) - _LENGTH_BYTES
            most = self._family_most - _LENGTH_BYTES
            self._too_long(f"the key family {family!r:.60} has {size:,} bytes", most, size, prefix)
        problem = f"a key family is {family!r:.80}: expected text that UTF-8 can encode, or None."
        step = "Pass at least one character, or None for keys without a family."
        raise self.table.error(
            errors.SerializationError, problem, step, family=family and f"{family!r:.80}"
        )

    def _not_bytes(self, what: str, stored: object, serializer: object) -> NoReturn:
        """Raise the error for a serializer that has returned something else than bytes for a key or
        value.
        """
        raise self.table.error(
            errors.SerializationError,
            f"the serializer returned {type(stored).__name__} for a {what}: expected bytes.",
            "Correct its to_bytes.",
            serializer=type(serializer).__name__,
        )

    def _failed(self, what: str, error: Exception, serializer: object) -> errors.AdjunctError:
        """Return the error, which names the table, for a serializer that has raised `error`.

        `what` says what could not be done. An AdjunctError about something else than key-value
        tables is returned as it is.
        """
        name = type(serializer).__name__
        if isinstance(error, errors.KeyValueTableError):
            about = {"serializer": name} if isinstance(error, errors.SerializationError) else {}
            about |= {"scope": self.table.scope, "table": self.table.name}
            return error.reworded(
                f"key-value table {self.table}: {what}: {error.problem}", error.next_step, **about
            )
        if isinstance(error, errors.AdjunctError):
            return error
        return self.table.error(
            errors.SerializationError,
            f"{what}: {type(error).__name__}: {error}.",
            "Correct the serializer, or pass what it accepts.",
            serializer=name,
        )


def _table_entries(
    families: Iterable[str | None],
    keys: Iterable[K],
    versions: Iterable[bytes],
    values: Iterable[V],
) -> Iterable[TableEntry[K, V]]:
    """Make entries of their parts, without a Python call for each."""
    return map(_new, repeat(TableEntry), zip(families, keys, versions, values, strict=False))


def _family_of(prefix: bytes) -> str | None:
    """Return the family with this prefix; None for an empty one."""
    if prefix:
        return prefix[2:].decode()
    return None


def _smallest(*limits: int | None) -> int | None:
    """Return the smallest limit, None if none is set."""
    return min((limit for limit in limits if limit is not None), default=None)


T = TypeVar("T")


def require_list(table: TableId, name: str, given: Iterable[T]) -> list[T]:
    """Return a caller's list of values. Raises ConfigurationError for text, bytes and what is
    not iterable.
    """
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise argument_error(
            f"key-value table {table}: {name} is {given!r:.80}", "a list", argument=name
        )
    return list(given)


def require_pairs(table: TableId, entries: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return a caller's list of (key, value) tuples. Raises ConfigurationError for anything
    else.
    """
    pairs = require_list(table, "entries", entries)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise argument_error(
                f"key-value table {table}: {pair!r:.80} is among entries",
                "pairs of key and value",
                "Pass tuples of two, such as the items() of a dictionary.",
                argument="entries",
            )
    return pairs


def check_family(table: TableId, family: str | None) -> None:
    """Raise KeyValueTableError if the family of a batch or iterator is None."""
    if family is None:
        raise table.error(
            errors.KeyValueTableError,
            "family is None: batches and iterators are within one family.",
            "Pass its name; keys without a family are written one by one, and iterated with the"
            " whole table.",
        )


def encode_key_prefix(table: TableId, prefix: str | bytes | None, keys: Serializer[Any]) -> bytes:
    """Return the bytes with which keys must start; text is encoded as UTF-8.

    Raises ConfigurationError for text where keys are serialized as JSON, Avro or integers, and so
    don't start with it.
    """
    if prefix is None or isinstance(prefix, bytes):
        return prefix or b""
    try:
        stored = prefix.encode()
    except (AttributeError, UnicodeEncodeError):
        found = f"key-value table {table}: prefix is {prefix!r:.80}"
        expected = "bytes, or text that UTF-8 can encode"
        raise argument_error(
            found, expected, "Pass the start of serialized keys.", argument="prefix"
        ) from None
    if prefix and isinstance(
        keys, JsonSerializer | ModelSerializer | AvroSerializer | IntegerSerializer
    ):
        raise argument_error(
            f"key-value table {table}: prefix is the text {prefix!r:.60}, but keys are written by "
            f"{type(keys).__name__}",
            "bytes",
            "Pass the start of serialized keys; text in JSON starts with a quotation mark.",
            argument="prefix",
        )
    return stored


def resolve_partitions(table: TableId, count: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Return the partitions to iterate over: all, or the given ones. Raises ConfigurationError
    for wrong numbers.
    """
    if given is None:
        return tuple(range(count))
    chosen = tuple(require_list(table, "partitions", given))
    exist = all(type(number) is int and 0 <= number < count for number in chosen)
    if not exist or len({*chosen}) < len(chosen):
        found = f"key-value table {table}: partitions is {list(chosen)!r:.80}"
        raise argument_error(
            found, f"different numbers from 0 to {count - 1}", argument="partitions"
        )
    return chosen


@dataclass(frozen=True, slots=True)
class WriteRequest(Generic[K]):
    """A request to one segment: its changes and, for errors, the keys as the caller passed them."""

    family: str | None
    keys: Sequence[K]
    changes: Sequence[SegmentChange]
    token: bytes

    @property
    def versions(self) -> list[KeyVersion | None]:
        """The new versions in the order of the changes, None for removed and guarded keys."""
        return [
            None if change.value is None else KeyVersion(change.version) for change in self.changes
        ]


def segment_change(
    coder: EntryCoder[K, V], prefix: bytes, change: TableChange[K, V], version: bytes
) -> SegmentChange:
    """Return a caller's change in the form that segments accept, with the new `version` of its key.
    Raises ConfigurationError for other objects than changes.
    """
    is_guard = isinstance(change, _GUARDS)
    if not is_guard and not isinstance(change, (*_WITH_VALUE, Remove)):
        raise argument_error(
            f"key-value table {coder.table}: {change!r:.80} is among changes",
            "Insert, Put, Replace, Remove, MustBeAbsent and MustHaveVersion objects",
            argument="changes",
        )
    key = coder.table_key(prefix, change.key)
    removes_any = isinstance(change, Remove) and change.version is None
    if isinstance(change, Insert | MustBeAbsent):
        expected: Any = segment.ABSENT
    elif removes_any or isinstance(change, Put):
        expected = segment.ANYTHING
    else:
        expected = version_bytes(coder.table, change.version)  # type: ignore[arg-type]
    value = None
    if isinstance(change, _WITH_VALUE):
        value = coder.value(change.value)
    return SegmentChange(key, value, version, expected, is_guard)


def build_batch(
    coder: EntryCoder[K, V], family: str, changes: Iterable[TableChange[K, V]], token: bytes
) -> WriteRequest[K]:
    """Return the request of a batch. Raises KeyValueTableError for a missing family and a
    repeated key.
    """
    check_family(coder.table, family)
    prefix = coder.prefix(family)
    given = require_list(coder.table, "changes", changes)
    encoded = [
        segment_change(coder, prefix, change, segment.make_version(token, place))
        for place, change in enumerate(given)
    ]
    keys = [change.key for change in given]
    if len({change.key for change in encoded}) != len(encoded):
        raise _repeated_key_error(coder.table, family, keys, encoded)
    return WriteRequest(family, keys, encoded, token)


def _repeated_key_error(
    table: TableId, family: str, keys: Sequence[Any], changes: Sequence[SegmentChange]
) -> errors.KeyValueTableError:
    """Return the error for a batch of these keys, of which two are the same once serialized."""
    first: dict[bytes, int] = {}  # by serialized key, its first index
    place = 0  # in the end the index of the first key that occurs a second time
    while first.setdefault(changes[place].key, place) == place:
        place += 1
    return table.error(
        errors.KeyValueTableError,
        f"the key {keys[place]!r:.60} of family {family!r:.60} is twice in a batch, at"
        f" indexes {first[changes[place].key]} and {place}.",
        "Write each key once in a batch.",
    )


def check_limits(table: TableId, changes: Sequence[SegmentChange], limits: SegmentLimits) -> None:
    """Raise BatchTooLargeError if the backend does not accept so much at once."""
    size = 0  # not needed without a limit
    if limits.request is not None:
        size = sum(len(change.key) + len(change.value or b"") for change in changes)
    too_many = limits.changes is not None and len(changes) > limits.changes
    if too_many:
        problem = (
            f"a batch has {len(changes):,} changes; its backend applies at most"
            f" {limits.changes:,} at once."
        )
    elif limits.request is not None and size > limits.request:
        problem = (
            f"a write has {size:,} bytes of keys and values; its backend applies at most"
            f" {limits.request:,}."
        )
    else:
        return
    about = {"changes": len(changes), "size": None if too_many else size}
    raise table.error(
        errors.BatchTooLargeError,
        problem,
        "Split it into several writes. Each of them is atomic, but not all together.",
        **about,
    )


_MOST_LISTED = 5
"""How many conditions that do not hold an error lists."""


def conditions_error(
    table: TableId, request: WriteRequest[K], failed: ConditionsFailed
) -> errors.ConditionsNotMetError:
    """Return the error with each key whose condition does not hold, and the version found."""
    failures = _list_failed_conditions(request, failed)
    described = "; ".join(
        f"{failure.key!r:.60}: expected {_describe_version(failure.expected)}, found"
        f" {_describe_version(failure.found)}"
        for failure in failures[:_MOST_LISTED]
    )
    more = ""
    if len(failures) > _MOST_LISTED:
        more = f"; and {len(failures) - _MOST_LISTED:,} more"
    family = ""
    if request.family is not None:
        family = f" of family {request.family!r:.60}"
    return table.error(
        errors.ConditionsNotMetError,
        f"nothing was written, because conditions on keys{family} do not hold: {described}{more}.",
        "Read the keys again and decide again.",
        failures=tuple(failures),
    )


def _list_failed_conditions(
    request: WriteRequest[K], failed: ConditionsFailed
) -> list[errors.FailedCondition]:
    """Return the conditions of a request that do not hold, in the order of its changes."""
    failures = []
    for place, found in sorted(failed.found.items()):
        expected = request.changes[place].expected
        wanted = None  # expected ABSENT: no condition fails that expects ANYTHING
        if isinstance(expected, bytes):
            wanted = KeyVersion(expected)
        current = None
        if found is not None:
            current = KeyVersion(found)
        key = request.keys[place]
        failures.append(errors.FailedCondition(request.family, key, wanted, current))
    return failures


def _describe_version(version: Any) -> str:
    """Return a version for errors; None is a missing key."""
    if version:
        return f"version {version}"
    return "no such key"


def to_replace(table: TableId, family: str, entry: Any) -> Replace[Any, Any]:
    """Return the change that `replace_all` makes for a `TableEntry`, or (key, value, version).
    Raises ConfigurationError for other objects, KeyValueTableError for another family.
    """
    if isinstance(entry, TableEntry):
        _check_same_family(table, family, entry.key)
        # A missing version is rejected when it is encoded.
        return Replace(entry.key.key, entry.value, entry.key.version)  # type: ignore[arg-type]
    if isinstance(entry, tuple) and len(entry) == 3:
        return Replace(*entry)
    expected = "TableEntry objects, or tuples of key, value and version"
    raise argument_error(
        f"key-value table {table}: {entry!r:.80} is among entries", expected, argument="entries"
    )


def to_remove(table: TableId, family: str, key: Any) -> Remove[Any]:
    """Return the change that `remove_all` makes for a key: conditional for a `TableKey` with a
    version. Raises KeyValueTableError for another family.
    """
    if isinstance(key, TableKey):
        _check_same_family(table, family, key)
        return Remove(key.key, key.version)
    return Remove(key)


def version_bytes(table: TableId, version: KeyVersion) -> bytes:
    """Return the bytes of a version that a caller passed. Raises KeyValueTableError for anything
    else.
    """
    is_version = isinstance(version, KeyVersion)
    stored: Any = version.to_bytes() if is_version else version
    # A segment might take other bytes for "no condition".
    if not is_version or type(stored) is not bytes or len(stored) != segment.VERSION_BYTES:
        raise table.error(
            errors.KeyValueTableError,
            f"{stored!r:.60} is not a version of a key: expected a KeyVersion of"
            f" {segment.VERSION_BYTES} bytes.",
            "Pass the version that a write returned, or that an entry was read with.",
        )
    return stored


def _check_same_family(table: TableId, family: str | None, key: TableKey[Any]) -> None:
    """Raise KeyValueTableError for a key of another family than its batch."""
    if key.family != family:
        raise table.error(
            errors.KeyValueTableError,
            f"the key {key.key!r:.60} is of family {key.family!r:.60}, in a batch of"
            f" {family!r:.60}.",
            "Write the keys of each family separately.",
        )
