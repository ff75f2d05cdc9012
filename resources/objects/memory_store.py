"""An object store in memory, for tests and throw-away lakes of one process."""

from __future__ import annotations

import hashlib
import tempfile
import threading
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self
from weakref import WeakValueDictionary

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from dagster_adjunct.resources.objects.object_store import (
    ObjectInfo,
    Stored,
    StoreDescriptor,
    check_key,
    check_prefix,
)
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dagster_adjunct.resources.objects.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    etag: str
    modified: datetime


class InMemoryStore:
    """Objects in a dictionary, with the promises of `ObjectStore`; gone when nothing refers to the store.

    A store is found again by its name while it lives, in the same process: `named` gives a store of a name, of which
    there is never a second. ETags are content hashes, as on S3, so that code that forgets a nonce fails here too.
    """

    _alive: ClassVar[WeakValueDictionary[str, InMemoryStore]] = WeakValueDictionary()
    _naming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._name = uuid.uuid4().hex
        self._objects: dict[str, _Object] = {}
        self._lock = threading.Lock()
        self._staging: tempfile.TemporaryDirectory[str] | None = None
        InMemoryStore._alive[self.url] = self

    @classmethod
    def named(cls, url: str) -> InMemoryStore:
        """Return the living store of this `memory://` URL, or a new one."""
        with cls._naming:
            return cls._alive.get(url) or cls()._called(url.removeprefix("memory://"))

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def descriptor(self) -> StoreDescriptor:
        return StoreDescriptor(self.url)

    def __reduce__(self) -> tuple[Callable[[StoreDescriptor], ObjectStore], tuple[StoreDescriptor]]:
        return (StoreDescriptor.open, (self.descriptor,))

    def __repr__(self) -> str:
        return f"InMemoryStore({self._name!r})"

    def get(self, key: str) -> Stored:
        stored = self._objects.get(check_key(key))
        if stored is None:
            raise ObjectNotFoundError(f"object {key!r} is not in {self.url}.", "Check whether it was deleted.", key=key)
        return Stored(stored.data, stored.etag)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key).data[start : start + length]

    def head(self, key: str) -> ObjectInfo | None:
        stored = self._objects.get(check_key(key))
        return None if stored is None else ObjectInfo(key, len(stored.data), stored.etag, stored.modified)

    def put(self, key: str, data: bytes) -> str:
        with self._lock:
            return self._set(check_key(key), data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        with self._lock:
            if check_key(key) in self._objects:
                raise ObjectExistsError(
                    f"object {key!r} is already in {self.url}.", "Read it, or choose another key.", key=key
                )
            return self._set(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        with self._lock:
            stored = self._objects.get(check_key(key))
            if stored is None or stored.etag != etag:
                raise PreconditionFailedError(
                    f"object {key!r} in {self.url} has ETag {stored.etag if stored else 'none'}, expected {etag}.",
                    "Read it again and decide again.",
                    key=key,
                )
            return self._set(key, data)

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.delete(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            matching = sorted((key, value) for key, value in self._objects.items() if key.startswith(prefix))
        for key, value in matching:
            yield ObjectInfo(key, len(value.data), value.etag, value.modified)

    def upload(self, path: Path, key: str) -> str:
        return self.put_if_absent(key, path.read_bytes())

    def download(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key).data)

    def spark_uri(self, key: str) -> str:
        raise ConfigurationError(
            f"Spark can't read {check_key(key)!r} of {self.url}: it lives in this process only.",
            "Use a folder or s3:// as the lake.",
            url=self.url,
            key=key,
        )

    def staging_dir(self) -> Path:
        if self._staging is None:
            self._staging = tempfile.TemporaryDirectory(prefix="adjunct-memory-")
        return Path(self._staging.name)

    def _called(self, name: str) -> Self:
        del InMemoryStore._alive[self.url]
        self._name = name or self._name
        InMemoryStore._alive[self.url] = self
        return self

    def _set(self, key: str, data: bytes) -> str:
        stored = _Object(bytes(data), hashlib.md5(data, usedforsecurity=False).hexdigest(), utc_now())
        self._objects[key] = stored
        return stored.etag
