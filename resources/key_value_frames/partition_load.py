"""`PartitionLoad`: puts rows, which come in the order of their keys, into one partition of a key-value table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from dagster_adjunct.resources.errors import SchemaMismatchError, TransientError
from dagster_adjunct.resources.key_value.addressing import split_table_key
from dagster_adjunct.resources.key_value.key_version import new_token, version_of
from dagster_adjunct.resources.key_value.repeating import apply_again, pause_in_loop
from dagster_adjunct.resources.key_value.request_parts import in_requests
from dagster_adjunct.resources.key_value.table_segment import SegmentBackend, SegmentChange, TableId, TableSegment

_AT_ONCE = 8  # requests under way


class PartitionLoad:
    """Counts the `rows` that it has taken and the `entries` that it has put. Memory: a batch, and eight requests."""

    def __init__(self, table: TableId, backend: SegmentBackend) -> None:
        self._table, self._backend = table, backend
        self._number: int | None = None
        self.rows = self.entries = 0

    def run(self, batches: Iterator[Any]) -> None:
        """Write all rows, of which the columns are `partition`, `table_key`, `value` and maybe `order`."""
        changes = self._changes(batches)
        first = next(changes, None)
        if first is None or self._number is None:
            return
        segment = self._backend.open(self._table, self._number)
        requests = in_requests(_behind(first, changes), self._backend.limits)
        at_once = _AT_ONCE if self._backend.waits else 1
        with asyncio.Runner() as loop:
            try:
                while parts := list(islice(requests, at_once)):
                    loop.run(self._apply_each(segment, parts))
                    self.entries += sum(map(len, parts))
            finally:
                loop.run(segment.close())

    async def _apply_each(self, segment: TableSegment, parts: list[list[SegmentChange]]) -> None:
        await asyncio.gather(*(self._apply(segment, part) for part in parts))

    async def _apply(self, segment: TableSegment, part: list[SegmentChange]) -> None:
        token, began = new_token(), time.monotonic()
        changes = [change._replace(version=version_of(token, place)) for place, change in enumerate(part)]
        try:
            await segment.apply(changes, token)
        except TransientError as error:
            await apply_again(
                self._table,
                segment,
                changes,
                token,
                first=error,
                began=began,
                horizon=self._backend.horizon,
                pause=pause_in_loop,
            )

    def _changes(self, batches: Iterator[Any]) -> Iterator[SegmentChange]:
        """Yield a put for each key: that of its last row."""
        last: tuple[bytes, bytes, Any] | None = None
        for row in self._rows(batches):
            if last is not None and last[0] == row[0]:
                if row[2] == last[2]:
                    raise self._twice(row)
            elif last is not None:
                yield SegmentChange(last[0], last[1], b"")
            last = row
        if last is not None:
            yield SegmentChange(last[0], last[1], b"")

    def _rows(self, batches: Iterator[Any]) -> Iterator[tuple[bytes, bytes, Any]]:
        for batch in batches:
            if not batch.num_rows:
                continue
            (number,) = batch.column("partition").unique().to_pylist()
            assert self._number in (None, number)  # Spark brought the rows together by it
            self._number = number
            self.rows += batch.num_rows
            orders = batch.column("order").to_pylist() if "order" in batch.schema.names else [None] * batch.num_rows
            yield from zip(
                batch.column("table_key").to_pylist(), batch.column("value").to_pylist(), orders, strict=True
            )

    def _twice(self, row: tuple[bytes, bytes, Any]) -> SchemaMismatchError:
        family, key = split_table_key(row[0])
        of_family = "" if family is None else f" of family {family!r:.60}"
        same = "" if row[2] is None else f" with the same order, {row[2]!r:.60}"
        return SchemaMismatchError(
            f"key-value table {self._table}: the frame has two rows of the key {key!r:.60}{of_family}{same}, and "
            "nothing says which of them is the last.",
            "Name a column that tells with order_by=, or leave one row of each key.",
            table=str(self._table),
        )


def _behind(first: SegmentChange, rest: Iterator[SegmentChange]) -> Iterator[SegmentChange]:
    yield first
    yield from rest
