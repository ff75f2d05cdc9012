"""An object store that fails on plan: what a network does to a program, in tests that need no
network.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from dagster_adjunct.resources.errors import (
    ObjectExistsError,
    PreconditionFailedError,
    StoreUnavailableError,
)
from tests.rounds import rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from dagster_adjunct.resources.objects.store import (
        ObjectInfo,
        ObjectStore,
        StoreDescriptor,
        StoredObject,
    )

T = TypeVar("T")

FaultKind = Literal[
    "lost-after",
    "lost-before",
    "409",
    "412",
    "throttle",
    "crash-before",
    "crash-after",
    "meanwhile",
]
WRITES = frozenset({"put", "put_if_absent", "put_if_match", "upload", "delete", "delete_many"})


class Crash(BaseException):
    """The process "died" at this request; the store answers no request of it any more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the `nth` (from 1) request of this kind, or with `request` "*" of any;
    `below` has only requests count whose key begins so.

    lost-after: done, but the reply is lost. lost-before: not done, no reply. 409, 412, throttle:
    refused. crash-before, crash-after: the process ends there. meanwhile: `action` runs first (a
    competitor), then the request goes on.
    """

    request: str
    nth: int
    kind: FaultKind
    action: Callable[[], object] | None = None
    below: str = ""

    def is_of(self, request: str, key: str) -> bool:
        """Whether a request is one of those that are counted."""
        return self.request in ("*", request) and key.startswith(self.below)


def deaths(requests: Sequence[tuple[str, str]]) -> list[int]:
    """Return the requests (from 1) before which a process may die so that what it leaves behind
    differs.

    These are the writes: who dies before a read leaves what it leaves before the write that
    follows, or at the end. Of them it is every other one up to the last; with all rounds they are
    all requests.
    """
    writes = [nth for nth, (made, _) in enumerate(requests, 1) if made in WRITES]
    return rounds(writes[::-2][::-1], [*range(1, len(requests) + 1)])


class FaultyStore:
    """`inner` with the faults of `plan`; `requests` lists (request, key) of all that were made.

    As on a real S3 store whose own repeats are spent, an unknown outcome is
    `StoreUnavailableError`. Its descriptor is that of `inner`: other processes meet no faults.
    """

    def __init__(self, inner: ObjectStore, plan: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self.plan = tuple(plan)
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._crashed = False

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def descriptor(self) -> StoreDescriptor:
        return self.inner.descriptor

    def get(self, key: str) -> StoredObject:
        return self._do("get", key, lambda: self.inner.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._do("get_range", key, lambda: self.inner.get_range(key, start, length))

    def head(self, key: str) -> ObjectInfo | None:
        return self._do("head", key, lambda: self.inner.head(key))

    def put(self, key: str, data: bytes) -> str:
        return self._do("put", key, lambda: self.inner.put(key, data))

    def put_if_absent(self, key: str, data: bytes) -> str:
        return self._do("put_if_absent", key, lambda: self.inner.put_if_absent(key, data))

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        return self._do("put_if_match", key, lambda: self.inner.put_if_match(key, data, etag))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self.inner.delete(key))

    def delete_many(self, keys: Iterable[str]) -> None:
        listed = [*keys]
        self._do("delete_many", ",".join(listed), lambda: self.inner.delete_many(listed))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._do("list", prefix, lambda: self.inner.list(prefix))

    def upload(self, path: Path, key: str) -> str:
        return self._do("upload", key, lambda: self.inner.upload(path, key))

    def download(self, key: str, path: Path) -> None:
        self._do("download", key, lambda: self.inner.download(key, path))

    def spark_uri(self, key: str) -> str:
        return self.inner.spark_uri(key)

    def staging_dir(self) -> Path:
        return self.inner.staging_dir()

    def _do(self, request: str, key: str, act: Callable[[], T]) -> T:
        faults = self._faults_now(request, key)
        for fault in faults:
            if fault.kind == "meanwhile" and fault.action is not None:
                fault.action()
            _refuse(fault, request, key)
            if fault.kind == "crash-before":
                self._crashed = True
                raise Crash(f"{request} {key}")
        result = act()
        for fault in faults:
            if fault.kind == "crash-after":
                self._crashed = True
                raise Crash(f"{request} {key}")
            if fault.kind == "lost-after":
                raise StoreUnavailableError(
                    f"{request} of {key!r} got no answer.", "Run it again.", key=key
                )
        return result

    def _faults_now(self, request: str, key: str) -> Sequence[Fault]:
        with self._lock:
            if self._crashed:
                raise Crash(f"{request} {key} after the crash")
            self.requests.append((request, key))
            matched = [fault for fault in self.plan if fault.is_of(request, key)]
            return [
                fault
                for fault in matched
                if sum(fault.is_of(*made) for made in self.requests) == fault.nth
            ]


def _refuse(fault: Fault, request: str, key: str) -> None:
    if fault.kind in ("lost-before", "409", "throttle"):
        raise StoreUnavailableError(
            f"{request} of {key!r} failed ({fault.kind}).", "Run it again.", key=key
        )
    if fault.kind == "412":
        error = (
            ObjectExistsError if request in ("put_if_absent", "upload") else PreconditionFailedError
        )
        raise error(f"{request} of {key!r} was answered 412.", "Read it again.")
