"""The object store protocol, its descriptor for other processes, and an in-memory store."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast, runtime_checkable
from weakref import WeakValueDictionary

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.threads import REQUESTS_AT_ONCE
from dagster_adjunct.resources.times import Deadline, read_clocks, utc_now

LAKE_DOCUMENT = "_adjunct/lake.json"
PROBE_PREFIX = "_adjunct/probe/"
"""The prefix of the objects that the probe of a new lake writes."""
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,199}")
_KEY_LENGTH = 900
_ENDPOINT = re.compile(r"https?://[^/?#\s]+(/[^?#\s]*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The metadata of an object: `size` in bytes, `modified` in UTC by the store's clock."""

    key: str
    size: int
    etag: str
    modified: datetime


@dataclass(frozen=True, slots=True)
class StoredObject:
    """The bytes of an object and their ETag."""

    data: bytes
    etag: str


@runtime_checkable
class ObjectStore(Protocol):
    """A flat map from keys to immutable bytes, with two conditional writes.

    Keys look like `a/b/c`, are relative to the lake's root, and are validated by `check_key`. The
    promises:

    - A write is atomic, and visible to every read that begins after it returned.
    - Of concurrent `put_if_absent` calls for one key exactly one succeeds. Of concurrent
      `put_if_match` calls with one ETag at most one succeeds, and exactly one if the ETag is
      current.
    - A conditional write that raises `StoreUnavailableError` may have happened: the caller must
      check. After every other error it has not.
    - Equal contents may have equal ETags, so a pointer that is swapped needs a nonce.
    """

    @property
    def url(self) -> str:
        """The URL of the root: `s3://bucket/prefix`, a folder, or `memory://name`."""

    def get(self, key: str) -> StoredObject:
        """Return the whole object. Raises `ObjectNotFoundError`."""

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return up to `length` bytes from `start`; fewer where the object ends. Raises
        `ObjectNotFoundError`.
        """

    def head(self, key: str) -> ObjectInfo | None:
        """Return the object's metadata, or None if it does not exist."""

    def put(self, key: str, data: bytes) -> str:
        """Create or replace the object and return its ETag."""

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Create the object and return its ETag. Raises `ObjectExistsError`."""

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace the object with this ETag and return the new ETag. Raises
        `PreconditionFailedError`.
        """

    def delete(self, key: str) -> None:
        """Delete the object, if it exists."""

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete those of the objects that exist."""
        for key in keys:
            self.delete(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with `prefix` ("" for all), ordered by key."""

    def upload(self, path: Path, key: str) -> str:
        """Create an object of any size from a file and return the ETag. Raises `ObjectExistsError`.

        A file in `staging_dir()` may become the object, so it must not be changed afterwards; the
        caller deletes it. Other files are copied.
        """

    def download(self, key: str, path: Path) -> None:
        """Write the object to a local file, atomically. Raises `ObjectNotFoundError`."""

    def spark_uri(self, key: str) -> str:
        """Return the URI of an object or folder for Spark (Hadoop's `Path`)."""

    def staging_dir(self) -> Path:
        """Return an existing local folder for files that will be uploaded."""

    @property
    def descriptor(self) -> StoreDescriptor:
        """The address and options of this store, with which another process opens it."""

    def __reduce__(self) -> tuple[Callable[[StoreDescriptor], ObjectStore], tuple[StoreDescriptor]]:
        return (open_described, (self.descriptor,))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


@dataclass(frozen=True, slots=True)
class S3Options:
    """Options of an S3 store; the credentials come from boto3's standard chain in each process.

    Sizes in bytes, time-outs in seconds. Without an endpoint, boto3's AWS_ENDPOINT_URL_S3, else
    AWS.
    """

    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    sse: str | None = None
    sse_kms_key_id: str | None = None
    multipart_threshold: int = 64 * 1024 * 1024
    part_size: int = 16 * 1024 * 1024
    connect_timeout: float = 5.0
    read_timeout: float = 60.0
    attempts: int = 6

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint)


@dataclass(frozen=True, slots=True)
class StoreDescriptor(ABC):
    """A store's address and options; picklable, without secrets. Each kind of store has its own."""

    url: str
    s3: S3Options | None = None

    def open(self) -> ObjectStore:
        """Return the described store; one per process, shared by its threads."""
        key = os.getpid(), self
        return _OPENED.get(key) or _OPENED.setdefault(key, self.connect())

    @abstractmethod
    def connect(self) -> ObjectStore:
        """Return a new object for the described store."""


@dataclass(frozen=True, slots=True)
class MemoryDescriptor(StoreDescriptor):
    """The address of a store in the memory of this process."""

    def open(self) -> ObjectStore:
        return self.connect()  # not remembered, so that it can be freed

    def connect(self) -> ObjectStore:
        return InMemoryStore.named(self.url)


def open_described(descriptor: StoreDescriptor) -> ObjectStore:
    """Return the described store. Stores pickle as a call of this."""
    return descriptor.open()


WRITES = frozenset({"put", "put_if_absent", "put_if_match", "delete", "delete_many", "upload"})


class GuardedStore:
    """The store `inner`, whose methods `guarded` call `guard` first, which may raise. The others
    pass through. Pickles as `inner`.
    """

    def __init__(
        self, inner: ObjectStore, guard: Callable[[], None], guarded: Collection[str]
    ) -> None:
        self._inner = inner
        self._guard = guard
        self._guarded = guarded

    def __getattr__(self, name: str) -> Any:
        # By the dictionary: `self._inner` would call this again while there is none.
        attribute = getattr(self.__dict__["_inner"], name)
        if name not in self._guarded:
            return attribute

        def call(*args: Any, **options: Any) -> Any:
            self._guard()
            return attribute(*args, **options)

        return call

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> tuple[Callable[[StoreDescriptor], ObjectStore], tuple[StoreDescriptor]]:
        return (open_described, (self._inner.descriptor,))


def guard_store(
    store: ObjectStore, guard: Callable[[], None], guarded: Collection[str]
) -> ObjectStore:
    """Return a GuardedStore, which type checkers do not take for a store."""
    return cast("ObjectStore", GuardedStore(store, guard, guarded))


# Keyed by process id too: a forked worker must not share its parent's sockets.
_OPENED: dict[tuple[int, StoreDescriptor], ObjectStore] = {}


def check_key(key: str) -> str:
    """Return `key` if it is safe as an S3 key, as a relative path, and in a URI. Raises
    InvalidNameError.
    """
    is_safe = False
    if isinstance(key, str) and len(key) <= _KEY_LENGTH:
        is_safe = all(_SEGMENT.fullmatch(segment) for segment in key.split("/"))
    if not is_safe:
        problem = (
            f"object key {key!r} is not safe: expected segments of letters, digits and '_.=+@-'"
            " joined by '/', none beginning with a dot or longer than 200 characters,"
            f" {_KEY_LENGTH} in all."
        )
        raise errors.InvalidNameError(
            problem, "Build keys from checked names.", name=f"{key!s:.300}"
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty or a safe key, optionally with a final "/". Raises
    InvalidNameError.
    """
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def staged_file_errors(store: ObjectStore, path: Path, what: str) -> AbstractContextManager[None]:
    """Return a context manager that translates errors of writing a local file for upload.

    They name the store if the file is in the store's folder, else the file's own folder.
    """
    if str(path).startswith(f"{store.url}/"):
        return errors.translate_file_errors(store.url, what)
    return errors.translate_file_errors(path.parent, what)


def read_store_clock(store: ObjectStore, key: str) -> datetime:
    """Return the time by the store's clock: writes an object under `key` and returns its
    modification time.
    """
    store.put(key, uuid.uuid4().hex.encode())
    written = store.head(key)
    assert written is not None
    return written.modified


# Retention holds: small objects that prevent the deletion of something (a dataset version, files of
# a stream). What they contain, and who looks for them before deleting, differs by what they hold.

_RECENT_HOLD = timedelta(hours=1)
_FRESH_LISTING = 600.0


def holder_prefix(prefix: str, holder: str) -> str:
    """Return the beginning of the keys of a holder's holds below `prefix`. The holder's name may
    be any text.
    """
    return f"{prefix}{hashlib.sha256(holder.encode()).hexdigest()[:16]}-"


def delete_holds(
    store: ObjectStore, prefix: str, *, keep: Callable[[], Collection[str]] | None = None
) -> tuple[str, ...]:
    """Delete a holder's holds, and return the names of the deleted ones.

    `prefix` is that of `holder_prefix`. `keep` returns the names of holds that stay; the newest
    hold and those written up to an hour before it stay then, too: another process may just have
    written one that `keep` does not know yet. It is called once the holds are listed, so that it
    knows what was held before. If the process was stopped meanwhile, nothing is deleted: the next
    call does it.
    """
    listed = Deadline(read_clocks(), _FRESH_LISTING)
    holds = _list_holds(store, prefix)
    if keep is None or not holds:
        released = list(holds)
    else:
        limit = max(item.modified for item in holds.values()) - _RECENT_HOLD
        old = [name for name, item in holds.items() if item.modified < limit]
        needed = keep() if old else ()
        released = [name for name in old if name not in needed]
        if listed.has_passed():
            return ()
    store.delete_many(holds[name].key for name in released)
    return tuple(released)


def _list_holds(store: ObjectStore, prefix: str) -> dict[str, ObjectInfo]:
    """Return a holder's holds by name; `prefix` is that of `holder_prefix`."""
    return {
        item.key.removeprefix(prefix).removesuffix(".json"): item
        for item in store.list(prefix)
        if item.key.endswith(".json")
    }


def requests_at_once(store: ObjectStore) -> int:
    """Return how many requests to make at once: one to a folder, which answers sooner than a
    thread starts.
    """
    if "://" in store.url:
        return REQUESTS_AT_ONCE
    return 1


def check_endpoint(endpoint: str | None) -> None:
    """Raise ConfigurationError unless `endpoint` is empty or a plain URL of a server, without a
    login.
    """
    if not endpoint:
        return
    if "@" in endpoint:
        problem = (
            "the URL of the S3 endpoint contains a login, which S3 does not use and logs would"
            " show."
        )
        step = (
            "Write it like https://s3.example.com:9000, and give credentials by boto3's own chain"
            " (AWS_PROFILE, …)."
        )
        raise errors.ConfigurationError(problem, step, argument="endpoint")
    if not _ENDPOINT.fullmatch(endpoint):
        problem = (
            f"the S3 endpoint {endpoint.partition('?')[0]!r} is not the http or https URL of a"
            " server."
        )
        step = (
            "Write it like https://s3.example.com:9000 (ADJUNCT_S3_ENDPOINT, else"
            " AWS_ENDPOINT_URL_S3)."
        )
        raise errors.ConfigurationError(problem, step, argument="endpoint")


def object_missing_error(url: str, key: str) -> errors.ObjectNotFoundError:
    """Return the error of a request for an object that does not exist."""
    problem = f"object {key!r} is not in {url}."
    return errors.ObjectNotFoundError(
        problem, "Check the URL, and whether it was deleted.", key=key
    )


def object_exists_error(url: str, key: str) -> errors.ObjectExistsError:
    """Return the error of creating an object that exists."""
    return errors.ObjectExistsError(
        f"object {key!r} already exists in {url}.", "Read it, or use another key.", key=key
    )


def etag_error(
    url: str, key: str, found: ObjectInfo | None, expected: str
) -> errors.PreconditionFailedError:
    """Return the error of `put_if_match` for an object that has another ETag, or is missing."""
    problem = (
        f"object {key!r} in {url} has ETag {found.etag if found else 'none'}, expected {expected}."
    )
    return errors.PreconditionFailedError(problem, "Read it again, then retry.", key=key)


class InMemoryStore(ObjectStore):
    """Objects in a dictionary, with the promises of `ObjectStore`; freed with the last reference to
    the store.

    While it exists, `named` returns it by its name in the same process. ETags are content hashes,
    as on S3, so that code that lacks a nonce fails here too.
    """

    _alive: ClassVar[WeakValueDictionary[str, InMemoryStore]] = WeakValueDictionary()
    _naming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str = "") -> None:
        self._name = name or uuid.uuid4().hex
        self._objects: dict[str, tuple[bytes, ObjectInfo]] = {}  # by key, bytes and metadata
        self._lock = threading.Lock()
        self._staging: tempfile.TemporaryDirectory[str] | None = None
        InMemoryStore._alive[self.url] = self

    @classmethod
    def named(cls, url: str) -> InMemoryStore:
        """Return the existing store of this `memory://` URL, or a new one."""
        with cls._naming:
            return cls._alive.get(url) or cls(url.removeprefix("memory://"))

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def descriptor(self) -> StoreDescriptor:
        return MemoryDescriptor(self.url)

    def get(self, key: str) -> StoredObject:
        stored = self._objects.get(check_key(key))
        if stored is None:
            raise object_missing_error(self.url, key)
        data, info = stored
        return StoredObject(data, info.etag)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.get(key).data[start : start + length]

    def head(self, key: str) -> ObjectInfo | None:
        stored = self._objects.get(check_key(key))
        if stored is None:
            return None
        _, info = stored
        return info

    def put(self, key: str, data: bytes) -> str:
        with self._lock:
            return self._set(check_key(key), data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        with self._lock:
            if check_key(key) in self._objects:
                raise object_exists_error(self.url, key)
            return self._set(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        with self._lock:
            found = self.head(key)
            if found is None or found.etag != etag:
                raise etag_error(self.url, key, found, etag)
            return self._set(key, data)

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(check_key(key), None)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            found = []
            for key, (_, info) in sorted(self._objects.items()):
                if key.startswith(prefix):
                    found.append(info)
        yield from found

    def upload(self, path: Path, key: str) -> str:
        return self.put_if_absent(key, path.read_bytes())

    def download(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key).data)

    def spark_uri(self, key: str) -> str:
        problem = (
            f"Spark can't read {check_key(key)!r} of {self.url}: it is in this process's memory."
        )
        raise errors.ConfigurationError(
            problem, "Use a folder or s3:// as the lake.", url=self.url, key=key
        )

    def staging_dir(self) -> Path:
        with self._lock:
            if self._staging is None:
                self._staging = tempfile.TemporaryDirectory(prefix="adjunct-memory-")
            return Path(self._staging.name)

    def _set(self, key: str, data: bytes) -> str:
        """Store an object and return its ETag, while the lock is held."""
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self._objects[key] = bytes(data), ObjectInfo(key, len(data), etag, utc_now())
        return etag
