"""`FencedStore`: the store of a lake as a run writes to it, which sends nothing once the run's
lease is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.objects.store import ObjectStore, StoreDescriptor, open_described


class FencedStore:
    """The store `inner`, whose writes raise RunLeaseLostError once the lease of the run is lost.
    Reads pass through.

    What a run has sent before stays without effect, too: it commits by compare-and-swap, or under
    names of its own. That also holds for files that its tasks upload, so it pickles as `inner`.
    """

    def __init__(self, inner: ObjectStore, fence: Fence) -> None:
        self._inner = inner
        self._fence = fence

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def __repr__(self) -> str:
        return repr(self._inner)

    def __reduce__(self) -> tuple[Callable[[StoreDescriptor], ObjectStore], tuple[StoreDescriptor]]:
        return (open_described, (self._inner.descriptor,))

    def put(self, key: str, data: bytes) -> str:
        self._fence.check()
        return self._inner.put(key, data)

    def put_if_absent(self, key: str, data: bytes) -> str:
        self._fence.check()
        return self._inner.put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        self._fence.check()
        return self._inner.put_if_match(key, data, etag)

    def delete(self, key: str) -> None:
        self._fence.check()
        self._inner.delete(key)

    def delete_many(self, keys: Iterable[str]) -> None:
        self._fence.check()
        self._inner.delete_many(keys)

    def upload(self, path: Path, key: str) -> str:
        self._fence.check()
        return self._inner.upload(path, key)
