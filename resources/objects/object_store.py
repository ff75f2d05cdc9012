"""What Adjunct asks of an object store, as one protocol, and how a store travels to other processes."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError
from dagster_adjunct.resources.file_errors import telling_file_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager
    from datetime import datetime
    from pathlib import Path

LAKE_DOCUMENT = "_adjunct/lake.json"
PROBES = "_adjunct/probe/"
"""Where the probe of a new lake writes, before anything else is written to the lake."""
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]{0,199}")
_KEY_LENGTH = 900
_ENDPOINT = re.compile(r"https?://[^/?#\s]+(/[^?#\s]*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """The facts about one object. `size` in bytes, `modified` by the store's clock, in UTC."""

    key: str
    size: int
    etag: str
    modified: datetime


@dataclass(frozen=True, slots=True)
class Stored:
    """The bytes of an object and the ETag that these bytes had."""

    data: bytes
    etag: str


@runtime_checkable
class ObjectStore(Protocol):
    """A flat map from keys to immutable bytes, with two conditional writes that race safely.

    Keys are `a/b/c`, relative to the lake's root, and checked by `check_key`. The promises:

    - A write is seen whole or not at all, and by every read that begins after it returned.
    - Of any number of concurrent `put_if_absent` on one key exactly one returns; of any number of
      concurrent `put_if_match` with one ETag at most one returns, and exactly one if the ETag is current.
    - A conditional write that raises `StoreUnavailableError` may have happened: the caller must look.
      Every other error says that it has not.
    - Equal contents may have equal ETags, so whoever swaps a pointer puts a nonce into it.
    """

    @property
    def url(self) -> str:
        """Where the root is: `s3://bucket/prefix`, a folder, `memory://name`."""
        ...

    def get(self, key: str) -> Stored:
        """Return the whole object. Raises `ObjectNotFoundError`."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return up to `length` bytes from `start`; fewer where the object ends. Raises `ObjectNotFoundError`."""
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Return the object's facts, or None if there is none."""
        ...

    def put(self, key: str, data: bytes) -> str:
        """Write, replacing what is there, and return the ETag."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> str:
        """Create and return the ETag. Raises `ObjectExistsError`."""
        ...

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace the object that has this ETag; return the new one. Raises `PreconditionFailedError`."""
        ...

    def delete(self, key: str) -> None:
        """Delete; an object that is not there is no error."""
        ...

    def delete_many(self, keys: Iterable[str]) -> None:
        """Delete all; those that are not there are no error."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield what begins with `prefix` ("" is everything), in order of the keys."""
        ...

    def upload(self, path: Path, key: str) -> str:
        """Create an object of any size from a file and return the ETag. Raises `ObjectExistsError`.

        A file in `staging_dir()` must not be written to afterwards (it may have become the object);
        the caller deletes it. Any other file stays the caller's.
        """
        ...

    def download(self, key: str, path: Path) -> None:
        """Write the object to a local file, which appears whole. Raises `ObjectNotFoundError`."""
        ...

    def spark_uri(self, key: str) -> str:
        """Return what Spark opens (an object, or a folder of them), as Hadoop's `Path` takes it."""
        ...

    def staging_dir(self) -> Path:
        """Return the local folder where files for `upload` are written cheapest; it exists."""
        ...

    @property
    def descriptor(self) -> StoreDescriptor:
        """What another process needs to open the same store: small, picklable, without secrets."""
        ...


@dataclass(frozen=True, slots=True)
class S3Options:
    """How to reach S3, without credentials: these come from boto3's standard chain in each process.

    Sizes in bytes, time-outs in seconds. An endpoint of None is AWS (or boto3's own AWS_ENDPOINT_URL_S3).
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
class StoreDescriptor:
    """A store's address and options, picklable and free of secrets."""

    url: str
    s3: S3Options | None = None

    def open(self) -> ObjectStore:
        """Return the store that this describes; one per process, shared by its threads."""
        if self.url.startswith("memory://"):
            from dagster_adjunct.resources.objects.memory_store import InMemoryStore

            return InMemoryStore.named(self.url)
        cached = _OPENED.get((os.getpid(), self))
        if cached is None:
            cached = _OPENED.setdefault((os.getpid(), self), self._open())
        return cached

    def _open(self) -> ObjectStore:
        if self.url.startswith("s3://"):
            from dagster_adjunct.resources.objects.s3_store import S3Store

            return S3Store(self.url, self.s3 or S3Options())
        if "://" in self.url:
            raise ConfigurationError(
                f"store {self.url!r} has an unknown scheme: expected s3://BUCKET/PREFIX, a folder or memory://NAME.",
                "Write the lake's URL in one of these forms.",
                argument="url",
            )
        from dagster_adjunct.resources.objects.local_store import LocalStore

        return LocalStore(self.url)


# Keyed by process id as well: a forked worker must not share its parent's sockets.
_OPENED: dict[tuple[int, StoreDescriptor], ObjectStore] = {}


def check_key(key: str) -> str:
    """Return `key` if it is safe as an S3 key, as a path below a folder and inside a URI."""
    segments = key.split("/") if isinstance(key, str) else []
    if not segments or len(key) > _KEY_LENGTH or not all(_SEGMENT.fullmatch(segment) for segment in segments):
        raise InvalidNameError(
            f"object key {key!r} is not safe: expected segments of letters, digits and '_.=+@-' joined by '/', "
            f"none beginning with a dot or longer than 200 characters, {_KEY_LENGTH} in all.",
            "Build keys from checked names.",
            name=f"{key!s:.300}",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix` if it is empty or the beginning of a safe key; it may end in "/"."""
    if prefix:
        check_key(prefix.removesuffix("/"))
    return prefix


def telling_of_staged(store: ObjectStore, path: Path, what: str) -> AbstractContextManager[None]:
    """Raise what the file system says of a file that is to be uploaded as `telling_file_errors` does.

    The place is the store where the file lies in it, else the folder of temporary files.
    """
    place = store.url if str(path).startswith(f"{store.url}/") else path.parent
    return telling_file_errors(place, what)


def time_of_store(store: ObjectStore, key: str) -> datetime:
    """Return the time by the store's clock: that of an object written just now, under this key."""
    store.put(key, uuid.uuid4().hex.encode())
    written = store.head(key)
    assert written is not None
    return written.modified


def check_endpoint(endpoint: str | None) -> None:
    """Refuse what is no plain URL of an S3 server; errors, Spark's settings and its UI would show a login."""
    if not endpoint:
        return
    if "@" in endpoint:
        raise ConfigurationError(
            "the URL of the S3 endpoint holds a login, which S3 does not use and logs would show.",
            "Write it like https://s3.example.com:9000; credentials belong to boto3's own chain (AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, …).",
            argument="endpoint",
        )
    if not _ENDPOINT.fullmatch(endpoint):
        raise ConfigurationError(
            f"the S3 endpoint {endpoint.partition('?')[0]!r} is no URL of a server: expected http:// or https://, "
            "a host and maybe a port.",
            "Write it like https://s3.example.com:9000 (ADJUNCT_S3_ENDPOINT, else AWS_ENDPOINT_URL_S3).",
            argument="endpoint",
        )
