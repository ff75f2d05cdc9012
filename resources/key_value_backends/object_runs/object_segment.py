"""`ObjectSegment`: a segment in an object store for async code; what blocks is done by threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.table_segment import SegmentChange, SegmentLimits, StoredEntry
from dagster_adjunct.resources.key_value_backends.object_runs.group_commit import GroupCommit
from dagster_adjunct.resources.key_value_backends.object_runs.process_threads import threads
from dagster_adjunct.resources.key_value_backends.object_runs.segment_core import SegmentCore
from dagster_adjunct.resources.key_value_backends.object_runs.segment_upkeep import SegmentUpkeep

T = TypeVar("T")


class ObjectSegment:
    """A `TableSegment`. Its parts are made when it is first used, in each process anew."""

    waits = True

    def __init__(self, limits: SegmentLimits, core: Callable[[], SegmentCore]) -> None:
        self.limits = limits
        self._make = core
        self._made: tuple[int, SegmentCore, GroupCommit] | None = None

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False) -> None:
        _, _, commits = self._parts()
        await asyncio.wrap_future(commits.submit(changes, token, repeated))

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        _, core, _ = self._parts()
        return await _aside(lambda: core.get(keys, values=values)) if keys else []

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> list[StoredEntry]:
        _, core, _ = self._parts()
        return await _aside(lambda: core.page(within, limit, values=values))

    async def close(self) -> None:
        """There is nothing that an event loop holds."""

    def _parts(self) -> tuple[int, SegmentCore, GroupCommit]:
        made = self._made
        if made is None or made[0] != os.getpid():
            core = self._make()
            self._made = made = (os.getpid(), core, GroupCommit(core, SegmentUpkeep(core)))
        return made


async def _aside(work: Callable[[], T]) -> T:
    return await asyncio.wrap_future(threads("key-values", 32).submit(work))
