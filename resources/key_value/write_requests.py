"""What one write asks of a segment: decided from its changes, and checked, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.changes_of_keys import (
    Insert,
    MustBeAbsent,
    MustHaveVersion,
    Put,
    Remove,
    Replace,
    TableChange,
)
from dagster_adjunct.resources.key_value.entry_coder import EntryCoder
from dagster_adjunct.resources.key_value.given_arguments import check_family, listed
from dagster_adjunct.resources.key_value.key_version import VERSION_BYTES, KeyVersion, version_of
from dagster_adjunct.resources.key_value.table_entries import TableEntry, TableKey
from dagster_adjunct.resources.key_value.table_segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    Expected,
    SegmentChange,
    SegmentLimits,
    TableId,
)
from dagster_adjunct.resources.key_value_errors import (
    BatchTooLargeError,
    ConditionsNotMetError,
    FailedCondition,
    KeyValueTableError,
)

K = TypeVar("K")
V = TypeVar("V")


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


def batch(coder: EntryCoder[K, V], family: str, changes: Iterable[TableChange[K, V]], token: bytes) -> WriteRequest[K]:
    """Return the request of a batch. Raises KeyValueTableError for a missing family and a key that is there twice."""
    check_family(coder.table, family)
    prefix = coder.prefix(family)
    given = listed(coder.table, "changes", changes)
    made = [segment_change(coder, prefix, change, version_of(token, place)) for place, change in enumerate(given)]
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


def refused(table: TableId, request: WriteRequest[K], failed: ConditionsFailed) -> ConditionsNotMetError:
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


def replacement(table: TableId, family: str, entry: Any) -> Replace[Any, Any]:
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


def removal(table: TableId, family: str, key: Any) -> Remove[Any]:
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
