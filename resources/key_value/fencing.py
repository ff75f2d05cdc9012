"""The fence entries of a segment: they let it refuse writes of a run after a later run of its
application has written.

    key      0xff ff ff ff | number, one byte | name of the application     which no entry of a user
             can have
    value    the epoch of the last run that has written, as text

Each request of a run contains one of the fence entries of its application: as a guard if its epoch
is that of the run, else as a change that raises it. So the segment applies the request only if no
later run has raised this entry. A later run does so in each segment with its first write there, and
in all of them before its first output if an earlier run may live (`announce`).

A backend in which requests that check the same entry wait for each other has several entries
(`SegmentLimits.fences`), of which a request contains any one; all are raised together. Requests
without a fence, which are no run's, contain none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    FENCES,
    ConditionsFailed,
    SegmentChange,
    StoredEntry,
)
from dagster_adjunct.resources.key_value.table import OpenTable
from dagster_adjunct.resources.objects.fence import Fence, lease_lost_error


def fence_key(application: str, number: int) -> bytes:
    """Return the table key of a fence entry, after those of all other entries."""
    return FENCES + bytes([number]) + application.encode()


class _KnownFences(NamedTuple):
    """The fence entries of an application in one segment, by number (None: missing), and the epoch
    of the run for which they were read.
    """

    epoch: int
    entries: list[StoredEntry | None]


class TableFences:
    """What this process knows of the fence entries in a table's segments."""

    def __init__(self, table: OpenTable[str, bytes]) -> None:
        self.table = table
        self._known: dict[tuple[int, str], _KnownFences] = {}  # by partition and application

    async def guard(self, partition: int, fence: Fence) -> SegmentChange:
        """Return the change that a request must contain, so that it is refused after a later run
        has written.

        The first call for a partition and run reads the fence entries and, if there are several,
        raises all of them. Raises RunLeaseLostError if a later run has written.
        """
        known = self._known.get((partition, fence.application))
        if known is not None and known.epoch == fence.epoch:
            entries = known.entries
        else:
            entries = await self._read(partition, fence)
            # If there are several, a request would raise only the entry that it contains.
            if len(entries) > 1:
                entries = await self._raise_all(partition, entries, fence)
        return _fence_change(random.randrange(len(entries)), entries, fence)

    def note(self, partition: int, fence: Fence, written: SegmentChange) -> None:
        """Remember the fence entry that a request has written, as it was sent: with its version.
        A guard has written none.
        """
        known = self._known.get((partition, fence.application))
        if known is not None and known.epoch == fence.epoch and not written.is_guard:
            number = written.key[len(FENCES)]
            known.entries[number] = StoredEntry(written.key, written.version, written.value)

    def forget(self, partition: int, fence: Fence) -> None:
        """Forget the fence entries, of which one has changed: the next request reads them again."""
        self._known.pop((partition, fence.application), None)

    async def announce(self, fence: Fence) -> None:
        """Raise all fence entries of the table to the epoch of this run. Raises RunLeaseLostError
        if a later run has raised one.
        """
        await segment.at_once(
            lambda: segment.threads("key-value-fences", 8),
            [self._announce(partition, fence) for partition in range(self.table.partitions)],
        )

    async def _announce(self, partition: int, fence: Fence) -> None:
        """Raise the fence entries of one partition."""
        await self._raise_all(partition, await self._read(partition, fence), fence)

    async def _read(self, partition: int, fence: Fence) -> list[StoredEntry | None]:
        """Return the fence entries of a partition as they are stored now, None for missing ones,
        and remember them.
        """
        keys = [
            fence_key(fence.application, number)
            for number in range(self.table.backend.limits.fences)
        ]
        known = await self.table.segment(partition).get(keys)
        self._known[partition, fence.application] = _KnownFences(fence.epoch, known)
        return known

    async def _raise_all(
        self, partition: int, known: list[StoredEntry | None], fence: Fence
    ) -> list[StoredEntry | None]:
        """Raise all fence entries of a segment to the epoch of the run; return the raised entries.

        `known` are the entries as they were read. Raises TableUnavailableError if others change
        them again and again.
        """
        for _ in range(_ROUNDS):
            checked = [_fence_change(number, known, fence) for number in range(len(known))]
            raised = [change for change in checked if not change.is_guard]
            if not raised:
                return known
            changes, token = segment.with_versions(raised)
            try:
                await self.table.apply(partition, changes, token)
            except ConditionsFailed:
                known = await self._read(partition, fence)
                continue
            for change in changes:
                self.note(partition, fence, change)  # in `known`, too: it is what `_read` remembers
            return known
        label = f"key-value table {self.table.id}"
        problem = (
            f"{label}: others changed its fence of application"
            f" {fence.application!r} {_ROUNDS} times."
        )
        raise TableUnavailableError(
            problem, "Run again: one run of an application works at a time.", table=label
        )


_ROUNDS = 20  # of raising entries that others change meanwhile


def _fence_change(number: int, known: Sequence[StoredEntry | None], fence: Fence) -> SegmentChange:
    """Return the change that checks one of the fence entries, or raises it to the epoch of the run.
    RunLeaseLostError if a later run has raised it.
    """
    entry = known[number]
    epoch = 0
    if entry is not None:
        epoch = int(entry.value or b"0")
    if epoch > fence.epoch:
        problem = f"a run with the later epoch {epoch} has written, after {fence.epoch} of this one"
        raise lease_lost_error(fence.application, fence.run, problem)
    key = fence_key(fence.application, number)
    if entry is not None and epoch == fence.epoch:
        return SegmentChange(key, None, b"", entry.version, is_guard=True)
    return SegmentChange(
        key, str(fence.epoch).encode(), b"", ABSENT if entry is None else entry.version
    )
