"""Objects in a key-value table, with the conditional writes of an object store: an ETag is the version of a key.

Objects that are longer than the table takes are written to the object store under a name that nobody else uses, before
the table refers to them. Those that nothing refers to any more go with their objects, else they are collected.
"""

from __future__ import annotations

import heapq
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, groupby, islice
from operator import attrgetter
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import (
    ObjectExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
    TransientError,
)
from dagster_adjunct.resources.key_value.changes_of_keys import Remove
from dagster_adjunct.resources.key_value.key_version import KeyVersion
from dagster_adjunct.resources.key_value_errors import ConditionsNotMetError, KeyValueTableError
from dagster_adjunct.resources.metadata_tables.object_addresses import (
    BESIDE,
    FAMILIES,
    Address,
    address_of,
    depth_of,
    has_families_below,
    key_of,
)
from dagster_adjunct.resources.metadata_tables.stored_values import Elsewhere, StoredValue, parse_value
from dagster_adjunct.resources.metadata_tables.table_answers_as_objects import as_of_a_store
from dagster_adjunct.resources.objects.object_store import ObjectInfo, Stored

if TYPE_CHECKING:
    from dagster_adjunct.resources.key_value.blocking_key_value_table import BlockingKeyValueTable
    from dagster_adjunct.resources.key_value.table_entries import TableEntry
    from dagster_adjunct.resources.metadata_tables.store_clock import StoreClock
    from dagster_adjunct.resources.objects.object_store import ObjectStore

LONG_OBJECTS = f"{BESIDE}long/"
_LONGEST = 512 * 1024
_PAGE = 50
_REMOVED_AT_ONCE = 50


def _depth_and_name(address: Address) -> tuple[int, str]:
    return depth_of(address.family), address.family


class KeyValueObjects:
    """The objects of some keys, in `table`, whose keys are text and whose values are bytes. `beside` has long ones.

    Keys are checked by the caller. For any number of threads and processes.
    """

    def __init__(
        self,
        table: BlockingKeyValueTable[str, bytes],
        beside: ObjectStore,
        clock: StoreClock,
        *,
        longest: int | None = None,
    ) -> None:
        self._table, self._beside, self._clock = table, beside, clock
        self._longest = min(longest or _LONGEST, _LONGEST)
        self._families: set[str] = set()

    @as_of_a_store()
    def get(self, key: str) -> Stored:
        """Return the whole object. Raises ObjectNotFoundError."""
        while True:
            entry = self._entry(key)
            if entry is None:
                raise ObjectNotFoundError(
                    f"object {key!r} is not in {self._where()}.", "Check whether it was deleted.", key=key
                )
            data = self._value(key, entry).data
            if isinstance(data, bytes):
                return Stored(data, str(entry.version))
            try:
                return Stored(self._beside.get(data.key).data, str(entry.version))
            except ObjectNotFoundError:
                again = self._entry(key)
                if again is not None and again.version == entry.version:
                    raise

    @as_of_a_store()
    def head(self, key: str) -> ObjectInfo | None:
        """Return the object's facts, or None if there is none."""
        entry = self._entry(key)
        return None if entry is None else self._info(key, entry)

    @as_of_a_store()
    def put(self, key: str, data: bytes) -> str:
        """Write, replacing what is there, and return the ETag."""
        address, value = self._to_write(key, data)
        return str(self._table.put(address.key, value.to_bytes(), family=address.family))

    @as_of_a_store()
    def put_if_absent(self, key: str, data: bytes) -> str:
        """Create and return the ETag. Raises ObjectExistsError."""
        address, value = self._to_write(key, data)
        try:
            return str(self._table.put_if_absent(address.key, value.to_bytes(), family=address.family))
        except ConditionsNotMetError:
            self._not_used(value)
            raise ObjectExistsError(
                f"object {key!r} is already in {self._where()}.", "Read it, or choose another key.", key=key
            ) from None

    @as_of_a_store()
    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace the object that has this ETag; return the new one. Raises PreconditionFailedError."""
        try:
            version = KeyVersion.from_bytes(bytes.fromhex(etag))
        except (ValueError, KeyValueTableError):
            raise self._other_version(key, "another", etag) from None
        address, value = self._to_write(key, data)
        try:
            return str(self._table.replace(address.key, value.to_bytes(), version, family=address.family))
        except ConditionsNotMetError as error:
            self._not_used(value)
            raise self._other_version(key, error.failures[0].found or "none", etag) from None

    def delete(self, key: str) -> None:
        """Delete; an object that is not there is no error."""
        self.delete_many([key])

    @as_of_a_store()
    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete all; those that are not there are no error."""
        addresses = sorted({address_of(key) for key in keys})
        for family, members in groupby(addresses, attrgetter("family")):
            while some := [address.key for address in islice(members, _REMOVED_AT_ONCE)]:
                entries = self._table.get_all(some, family=family)
                there = [entry for entry in entries if entry is not None]
                self._table.apply([Remove(entry.key.key) for entry in there], family=family)
                long = (self._value(key_of(family, entry.key.key), entry).data for entry in there)
                self._beside.delete_many([data.key for data in long if isinstance(data, Elsewhere)])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield what begins with `prefix` ("" is everything), in order of the keys."""
        above = address_of(prefix)
        addresses = [above]
        if has_families_below(prefix):
            addresses += [Address(family, "") for family in self._names(prefix) if family != above.family]
        # Of two families of equal depth all keys of one are before those of the other: few pages are open at once.
        by_depth = groupby(sorted(addresses, key=_depth_and_name), key=lambda address: depth_of(address.family))
        runs = [chain.from_iterable(map(self._of_family, [*members])) for _, members in by_depth]
        return heapq.merge(*runs, key=attrgetter("key"))

    def long_objects(self) -> set[str]:
        """Return the keys of the long objects in the object store that are in use."""
        used = set()
        for family in self._names(""):
            for entry in self._entries(Address(family, "")):
                data = self._value(key_of(family, entry.key.key), entry).data
                if isinstance(data, Elsewhere):
                    used.add(data.key)
        return used

    def close(self) -> None:
        """Give back connections; a later call opens them again."""
        self._table.close()

    def _entry(self, key: str) -> TableEntry[str, bytes] | None:
        address = address_of(key)
        return self._table.get(address.key, family=address.family)

    def _to_write(self, key: str, data: bytes) -> tuple[Address, StoredValue]:
        """Return where an object goes and what is written there: a long one is in the object store then."""
        address = address_of(key)
        if address.family not in self._families:
            # Before anything is in it, or listing would not find it.
            if self._table.get(address.family, family=FAMILIES) is None:
                with suppress(ConditionsNotMetError):
                    self._table.put_if_absent(address.family, b"", family=FAMILIES)
            self._families.add(address.family)
        modified = self._clock.now()
        if len(data) <= self._longest:
            return address, StoredValue(modified, bytes(data))
        long = Elsewhere(f"{LONG_OBJECTS}{uuid.uuid4().hex}", len(data))
        self._beside.put_if_absent(long.key, data)
        return address, StoredValue(modified, long)

    def _not_used(self, value: StoredValue) -> None:
        if isinstance(value.data, Elsewhere):
            with suppress(TransientError):  # what is left is collected
                self._beside.delete(value.data.key)

    def _of_family(self, address: Address) -> Iterator[ObjectInfo]:
        for entry in self._entries(address):
            yield self._info(key_of(address.family, entry.key.key), entry)

    def _entries(self, address: Address) -> Iterator[TableEntry[str, bytes]]:
        prefix = address.key or None
        with as_of_a_store():
            for page in self._table.entries(address.family, prefix=prefix, page_size=_PAGE):
                yield from page.items

    def _names(self, prefix: str) -> Iterator[str]:
        with as_of_a_store():
            for page in self._table.keys(FAMILIES, prefix=prefix or None, page_size=_PAGE):
                yield from (item.key for item in page.items)

    def _info(self, key: str, entry: TableEntry[str, bytes]) -> ObjectInfo:
        value = self._value(key, entry)
        return ObjectInfo(key, value.size, str(entry.version), value.modified)

    def _value(self, key: str, entry: TableEntry[str, bytes]) -> StoredValue:
        return parse_value(entry.value, f"object {key!r} in {self._where()}")

    def _other_version(self, key: str, actual: object, etag: str) -> PreconditionFailedError:
        return PreconditionFailedError(
            f"object {key!r} in {self._where()} has ETag {actual}, expected {etag}.",
            "Read it again and decide again.",
            key=key,
        )

    def _where(self) -> str:
        table = self._table.table.id
        return f"{self._beside.url} (key-value table {table.scope}/{table.name})"
