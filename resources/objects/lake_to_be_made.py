"""A store at which no lake is yet: reading finds nothing and leaves nothing, the first write makes the lake."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from dagster_adjunct.resources.errors import ObjectExistsError, StoreUnavailableError
from dagster_adjunct.resources.objects.conditional_write_probe import probe_conditional_writes
from dagster_adjunct.resources.objects.documents import encode
from dagster_adjunct.resources.objects.lake_document import new_lake_document, read_lake_document
from dagster_adjunct.resources.objects.object_store import LAKE_DOCUMENT, ObjectStore, StoreDescriptor

_log = logging.getLogger("adjunct.lake")


def lake_to_be_made(store: ObjectStore) -> ObjectStore:
    """Return the store at which no lake is yet, for whoever writes to it."""
    return cast("ObjectStore", UnmadeLakeStore(store, _make))


class UnmadeLakeStore:
    """`inner`, whose first write is preceded by `make`. What reads passes through, and so does all once it is made."""

    def __init__(self, inner: ObjectStore, make: Callable[[ObjectStore], None]) -> None:
        self._inner = inner
        self._make = make
        self._lock = threading.Lock()
        self._made = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> tuple[Callable[[StoreDescriptor], ObjectStore], tuple[StoreDescriptor]]:
        return (StoreDescriptor.open, (self._inner.descriptor,))

    def put(self, key: str, data: bytes) -> str:
        return self._writing().put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._writing().put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return self._writing().put_if_match(key, data, etag)

    def upload(self, path: Path, key: str) -> str:
        return self._writing().upload(path, key)

    def staging_dir(self) -> Path:
        return self._writing().staging_dir()

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        self._inner.delete_many(keys)

    def _writing(self) -> ObjectStore:
        if not self._made:
            with self._lock:
                if not self._made:
                    self._make(self._inner)
                    self._made = True
        return self._inner


def _make(store: ObjectStore) -> None:
    """Write the lake's document where there is none yet, and say so: a mistyped URL makes a new lake."""
    if _is_made(store):
        return
    probe_conditional_writes(store)
    try:
        store.put_if_absent(LAKE_DOCUMENT, encode(new_lake_document()))
    except (ObjectExistsError, StoreUnavailableError):
        if not _is_made(store):
            raise
        return
    if not store.url.startswith("memory:"):
        _log.warning("A new lake is made at %s.", store.url)


def _is_made(store: ObjectStore) -> bool:
    """Whether the lake is there by now: by another process, or by us with a reply that was lost."""
    return read_lake_document(store) is not None
