"""`RoutedStore`: the object store of a lake that keeps its metadata in a key-value table."""

from __future__ import annotations

import heapq
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.file_errors import telling_file_errors
from dagster_adjunct.resources.metadata_tables.object_addresses import BESIDE
from dagster_adjunct.resources.objects.object_store import (
    ObjectInfo,
    ObjectStore,
    RoutedObjects,
    Stored,
    StoreDescriptor,
    check_key,
    check_prefix,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.metadata_tables.key_value_objects import KeyValueObjects
    from dagster_adjunct.resources.metadata_tables.routed_keys import RoutedKeys


class RoutedStore:
    """All objects of `objects`, but those whose keys `routed` takes: they are in `table`, with the same promises.

    What `objects` still has of those (from before it was routed) is not seen. `opened_by` opens the store elsewhere.
    """

    def __init__(
        self,
        objects: ObjectStore,
        routed: RoutedKeys,
        open_table: Callable[[], KeyValueObjects],
        opened_by: RoutedObjects,
    ) -> None:
        self.objects, self.routed = objects, routed
        self._open_table, self._opened_by = open_table, opened_by
        self._table: KeyValueObjects | None = None
        self._opening = threading.Lock()

    @property
    def table(self) -> KeyValueObjects:
        """The objects in the table, which is opened now if it was not needed before."""
        if self._table is None:
            with self._opening:
                if self._table is None:
                    self._table = self._open_table()
        return self._table

    @property
    def url(self) -> str:
        return self.objects.url

    @property
    def descriptor(self) -> StoreDescriptor:
        return replace(self.objects.descriptor, routed=self._opened_by)

    def __reduce__(self) -> tuple[Callable[[StoreDescriptor], ObjectStore], tuple[StoreDescriptor]]:
        return (StoreDescriptor.open, (self.descriptor,))

    def __repr__(self) -> str:
        return f"RoutedStore({self.objects!r})"

    def get(self, key: str) -> Stored:
        return self._of(key).get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if self._in_table(key):
            return self.table.get(key).data[start : start + length]
        return self.objects.get_range(key, start, length)

    def head(self, key: str) -> ObjectInfo | None:
        return self._of(key).head(key)

    def put(self, key: str, data: bytes) -> str:
        return self._of(key).put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._of(key).put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return self._of(key).put_if_match(key, data, etag)

    def delete(self, key: str) -> None:
        self._of(key).delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        sides: dict[bool, list[str]] = {True: [], False: []}
        for key in keys:
            sides[self._in_table(key)].append(key)
        if sides[True]:
            self.table.delete_many(sides[True])
        if sides[False]:
            self.objects.delete_many(sides[False])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        sources: list[Iterator[ObjectInfo]] = []
        if self.routed.may_begin_with(prefix):
            sources.append(item for item in self.table.list(prefix) if self.routed.take(item.key))
        if not self.routed.are_all_with(prefix):
            sources.append(item for item in self.objects.list(prefix) if not self._hidden(item.key))
        return heapq.merge(*sources, key=attrgetter("key"))

    def upload(self, path: Path, key: str) -> str:
        if self._in_table(key):
            return self.table.put_if_absent(key, path.read_bytes())
        return self.objects.upload(path, key)

    def download(self, key: str, path: Path) -> None:
        if not self._in_table(key):
            self.objects.download(key, path)
            return
        data = self.table.get(key).data
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
        with telling_file_errors(path.parent, f"a copy of object {key!r} in {self.url}"):
            try:
                temporary.write_bytes(data)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)

    def spark_uri(self, key: str) -> str:
        if self._in_table(key):
            raise ConfigurationError(
                f"Spark can't read {key!r} of {self.url}: it is kept in a key-value table.",
                "Read it with ObjectStore.get().",
                url=self.url,
                key=key,
            )
        return self.objects.spark_uri(key)

    def staging_dir(self) -> Path:
        return self.objects.staging_dir()

    def _in_table(self, key: str) -> bool:
        return self.routed.take(check_key(key))

    def _of(self, key: str) -> KeyValueObjects | ObjectStore:
        return self.table if self._in_table(key) else self.objects

    def _hidden(self, key: str) -> bool:
        return self.routed.take(key) or key.startswith(BESIDE)
