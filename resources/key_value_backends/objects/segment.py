"""`ObjectSegments`: key-value tables in a lake's store, S3 or a folder, without a server.

    key-values/{incarnation}/{partition}/CURRENT     the pointer: state, recent changes, runs
    key-values/{incarnation}/{partition}/runs/{id}   sorted, immutable entries

A write is one swap of the pointer, which many requests share.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

from dagster_adjunct.resources.common import check_name, check_whole_number
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value.segment import (
    KeyRange,
    ReplyLostError,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
    TableSegment,
    in_thread,
    result_of,
    threads,
)
from dagster_adjunct.resources.key_value_backends.objects.group_commit import GroupCommit
from dagster_adjunct.resources.key_value_backends.objects.pointer import (
    Levels,
    PointerObject,
    SegmentState,
    Status,
    replace_log,
)
from dagster_adjunct.resources.key_value_backends.objects.segment_core import SegmentCore, SegmentUpkeep, now_in_ms
from dagster_adjunct.resources.key_value_backends.objects.store import BlockCache, RunObjects
from dagster_adjunct.resources.objects.lake import Lake, LakeSettings, lake_in, open_store
from dagster_adjunct.resources.objects.store import S3Options, StoreDescriptor
from dagster_adjunct.resources.validation import validated

_THREADS = partial(threads, "key-values", 32)


class ObjectSegment:
    """A `TableSegment` whose parts are created on first use in each process."""

    def __init__(self, limits: SegmentLimits, core: Callable[[], SegmentCore]) -> None:
        self.limits = limits
        self._make = core
        self._made: _SegmentParts | None = None

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False) -> None:
        await result_of(self._parts().commits.submit(changes, token, repeated))

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        core = self._parts().core
        return await in_thread(_THREADS, lambda: core.get(keys, values=values)) if keys else []

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        core = self._parts().core
        return await in_thread(_THREADS, lambda: core.page(within, limit, values=values))

    async def close(self) -> None:
        """Wait for the upkeep that writes of this process have started. An event loop has no resources of its own."""
        if self._made is not None and self._made.process == os.getpid():
            await in_thread(_THREADS, self._made.upkeep.finish)

    def _parts(self) -> _SegmentParts:
        made = self._made
        if made is None or made.process != os.getpid():
            core = self._make()
            upkeep = SegmentUpkeep(core)
            self._made = made = _SegmentParts(os.getpid(), core, upkeep, GroupCommit(core, upkeep))
        return made


@dataclass(frozen=True, slots=True)
class _SegmentParts:
    process: int
    core: SegmentCore
    upkeep: SegmentUpkeep
    commits: GroupCommit


_MEGABYTE = 1024 * 1024
_AT_ONCE = 16  # segments of a table that are created, sealed or deleted


@validated
class ObjectSegments:
    """Key-value tables as objects of a lake: pass it or its URL, by default that of ADJUNCT_LAKE.

    The ADJUNCT_S3_… variables, or `s3` with the fields of `S3Options`, say how S3 is reached; credentials come from
    boto3's own chain. `cache_bytes` limits the memory for segments that this process reads. Clocks of writers may
    differ by almost half an hour, which is more than S3 itself allows.
    """

    limits = SegmentLimits(value=4 * _MEGABYTE, request=16 * _MEGABYTE)
    waits = True
    horizon = 120.0

    def __init__(
        self,
        url: Lake | str | os.PathLike[str] | None = None,
        *,
        s3: Mapping[str, Any] | None = None,
        cache_bytes: int = 64 * _MEGABYTE,
    ) -> None:
        check_whole_number(
            cache_bytes, f"cache_bytes={cache_bytes!r}", "a whole number from 0 on", argument="cache_bytes", least=0
        )
        if unknown := sorted(set(s3 or {}) - {field.name for field in fields(S3Options)}):
            problem = f"key-value tables in objects have s3 with {', '.join(map(repr, unknown))}, unknown to S3Options."
            raise ConfigurationError(problem, "Pass fields of S3Options.", argument="s3")
        self._given, self._s3 = os.fspath(url) if isinstance(url, os.PathLike) else url, s3
        self._cache_bytes = cache_bytes
        self._cache = BlockCache(cache_bytes)

    @cached_property
    def _lake(self) -> Lake:
        if isinstance(self._given, Lake):
            return self._given
        if self._given is not None and self._s3 is not None:
            store = StoreDescriptor(self._given, S3Options(**self._s3)).open()
        else:
            store = open_store(self._given, LakeSettings())
        return lake_in(store)

    def __reduce__(self) -> tuple[Callable[[Lake, int], ObjectSegments], tuple[Lake, int]]:
        return _make, (self._lake, self._cache_bytes)

    def __repr__(self) -> str:
        return f"ObjectSegments({self._given.url if isinstance(self._given, Lake) else self._given!r})"

    def to_dict(self) -> dict[str, Any]:
        descriptor = self._lake.store.descriptor
        s3 = {} if descriptor.s3 is None else {"s3": asdict(descriptor.s3)}
        return {"url": descriptor.url, **s3, "cache_bytes": self._cache_bytes}

    def create(self, table: TableId, partitions: int) -> None:
        """Write the missing pointers."""

        def create(core: SegmentCore) -> None:
            with suppress(ObjectExistsError):
                core.pointer.store.put_if_absent(core.pointer.key, SegmentState().following(now_in_ms()).to_bytes())

        self._of_each(table, partitions, create)

    def seal(self, table: TableId, partitions: int) -> None:
        """Swap in pointers that reject writes."""

        def seal(core: SegmentCore) -> None:
            if _settle_status(table, core.pointer, Status.SEALED) is Status.DELETED:
                raise core.deleted_error()

        self._of_each(table, partitions, seal)

    def delete(self, table: TableId, partitions: int) -> None:
        """Swap in pointers of deleted segments, which stay, then delete the runs."""

        def delete(core: SegmentCore) -> None:
            with suppress(ObjectNotFoundError):
                _settle_status(table, core.pointer, Status.DELETED)
            store = core.pointer.store
            store.delete_many([item.key for item in store.list(core.objects.key(""))])

        self._of_each(table, partitions, delete)

    def open(self, table: TableId, partition: int) -> TableSegment:
        return ObjectSegment(self.limits, lambda: self._core(table, partition))

    def location(self, table: TableId, partition: int) -> str:
        return f"{self._lake.url}/{_prefix(table, partition)}"

    def _of_each(self, table: TableId, partitions: int, act: Callable[[SegmentCore], None]) -> None:
        """Act on all segments of a table, several at a time."""

        def act_on(partition: int) -> None:
            core = self._core(table, partition)
            with core.translate_errors():
                act(core)

        for _ in threads("key-value-control", _AT_ONCE).map(act_on, range(partitions)):
            pass

    def _core(self, table: TableId, partition: int) -> SegmentCore:
        store, prefix = self._lake.store, _prefix(table, partition)
        return SegmentCore(table, PointerObject(store, f"{prefix}/CURRENT"), RunObjects(store, prefix, self._cache))


def _settle_status(table: TableId, pointer: PointerObject, status: Status) -> Status:
    """Give a segment this status, unless it has this or a later one; return its status."""

    def is_settled(state: SegmentState) -> bool:
        return state.status >= status

    def settled(state: SegmentState) -> SegmentState | None:
        if is_settled(state):
            return None
        after = replace(state.following(now_in_ms()), status=status)
        return replace_log(after, Levels(), b"") if status is Status.DELETED else after

    try:
        swapped = pointer.change(settled, is_in=is_settled)
    except ReplyLostError as error:
        raise TableUnavailableError(error.problem, "Do it again.", table=str(table)) from error
    if swapped is None:
        problem = f"other writers were always first to replace {pointer.key!r} in {pointer.store.url}."
        raise TableUnavailableError(problem, "Do it again.", table=str(table))
    return swapped.snapshot.state.status


def _prefix(table: TableId, partition: int) -> str:
    return f"key-values/{check_name('incarnation', table.incarnation)}/{partition}"


def _make(lake: Lake, cache_bytes: int) -> ObjectSegments:
    return ObjectSegments(lake, cache_bytes=cache_bytes)
