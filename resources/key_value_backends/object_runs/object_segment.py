"""`ObjectSegment`: a segment in an object store for async code; what blocks is done by threads."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.table_segment import SegmentChange, SegmentLimits, StoredEntry, StoredPage
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
        self._made: _SegmentParts | None = None

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False) -> None:
        await asyncio.wrap_future(self._parts().commits.submit(changes, token, repeated))

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        core = self._parts().core
        return await _aside(lambda: core.get(keys, values=values)) if keys else []

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        core = self._parts().core
        return await _aside(lambda: core.page(within, limit, values=values))

    async def close(self) -> None:
        """Wait for the upkeep that writes of this process have begun. An event loop holds nothing."""
        if self._made is not None and self._made.process == os.getpid():
            await _aside(self._made.upkeep.finish)

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


async def _aside(work: Callable[[], T]) -> T:
    return await asyncio.wrap_future(threads("key-values", 32).submit(work))
