"""`DynamoDbSegment`: a partition of a key-value table, in the DynamoDB table that all its partitions share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dagster_adjunct.resources.errors import TableError
from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.table_segment import SegmentChange, StoredEntry, StoredPage
from dagster_adjunct.resources.key_value_backends.dynamodb_calls import TableCalls
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import LIMITS, SegmentLayout
from dagster_adjunct.resources.key_value_backends.dynamodb_reads import read_keys, read_range
from dagster_adjunct.resources.key_value_backends.dynamodb_writes import PATIENCE, SegmentWrites


class DynamoDbSegment:
    """What `TableSegment` says. Several keys are not read at one moment: DynamoDB reads each as it is then.

    `calls` is shared by the segments of the table: closing one closes them all for the running event loop.
    """

    limits = LIMITS
    waits = True

    def __init__(self, calls: TableCalls, layout: SegmentLayout, patience: float = PATIENCE) -> None:
        self._calls = calls
        self._layout = layout
        self._writes = SegmentWrites(calls, layout, patience)

    def __repr__(self) -> str:
        return f"DynamoDbSegment({self._layout.table!r}, partition={self._layout.partition})"

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False) -> None:
        with self._as_written():
            await self._writes.apply(changes, token, repeated=repeated)

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        with self._as_written():
            return await read_keys(self._calls, self._layout, keys, values=values) if keys else []

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        with self._as_written():
            return await read_range(self._calls, self._layout, within, limit, values=values)

    async def close(self) -> None:
        await self._calls.close()

    @contextmanager
    def _as_written(self) -> Iterator[None]:
        """What an item lacks, or has in another type, was not written here: tell that, and of which table."""
        try:
            yield
        except KeyError as error:
            raise TableError(
                f"{self._calls.label}, table {self._layout.table}: an item has no {error}, as every entry has: "
                "something else has written it.",
                "Look for items whose v and d are not both binary, and correct or delete them.",
                table=self._calls.label,
            ) from error
