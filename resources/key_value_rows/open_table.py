"""`OpenTable`: an open key-value table as its records are read and written: places of keys, limits, partitions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from dagster_adjunct.resources.key_value.entry_coder import EntryCoder
from dagster_adjunct.resources.key_value.repeating import apply_again, pause_in_loop
from dagster_adjunct.resources.key_value.serializers import BytesSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_segment import (
    ReplyLostError,
    SegmentBackend,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    TableId,
    TableSegment,
)
from dagster_adjunct.resources.key_value.write_requests import check_limits


@dataclass(frozen=True, slots=True)
class OpenPartition:
    """One partition. What failed and certainly did nothing is raised: the remote table's own policy repeats it."""

    table: TableId
    segment: TableSegment
    limits: SegmentLimits
    horizon: float

    async def get(self, keys: Sequence[bytes]) -> list[StoredEntry | None]:
        """Return the entries of these keys."""
        return await self.segment.get(keys)

    async def apply(self, changes: Sequence[SegmentChange], token: bytes) -> None:
        """Apply all or nothing. Raises ConditionsFailed; OutcomeUnknownError where a reply was lost for good."""
        check_limits(self.table, changes, self.limits)
        began = time.monotonic()
        try:
            await self.segment.apply(changes, token)
        except ReplyLostError as lost:
            await apply_again(
                self.table,
                self.segment,
                changes,
                token,
                first=lost,
                began=began,
                horizon=self.horizon,
                pause=pause_in_loop,
            )


class OpenTable:
    """All partitions of a table."""

    def __init__(self, table: TableId, configuration: KeyValueTableConfiguration, backend: SegmentBackend) -> None:
        self._coder = EntryCoder(table, configuration, backend.limits, TextSerializer(), BytesSerializer())
        self.partitions = tuple(
            OpenPartition(table, backend.open(table, number), backend.limits, backend.horizon)
            for number in range(configuration.partitions)
        )

    def place(self, family: str | None, key: str) -> tuple[int, bytes]:
        """Return the partition and the table key. Raises KeyTooLongError and SerializationError."""
        prefix = self._coder.prefix(family)
        stored = self._coder.table_key(prefix, key)
        return self._coder.partition(prefix, stored), stored

    def checked(self, document: bytes) -> bytes:
        """Return a value that the table takes. Raises ValueTooLongError."""
        return self._coder.value(document)

    async def close(self) -> None:
        """Give back what the running event loop holds."""
        for partition in self.partitions:
            await partition.segment.close()
