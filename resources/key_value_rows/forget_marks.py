"""Removes old marks from the records of a key-value table, and old tombstones altogether."""

from __future__ import annotations

import json
from collections.abc import Sequence

from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.key_version import new_token, version_of
from dagster_adjunct.resources.key_value.request_parts import in_requests
from dagster_adjunct.resources.key_value.table_segment import ConditionsFailed, SegmentChange, StoredEntry
from dagster_adjunct.resources.key_value_rows.open_table import OpenPartition, OpenTable
from dagster_adjunct.resources.key_value_rows.row_documents import APPLIED, AT, NEWEST, is_deleted
from dagster_adjunct.resources.key_value_rows.row_values_in_json import compact

_PAGE = 500  # entries


async def forget_marks(table: OpenTable, before: float) -> int:
    """Forget what was applied before that time (seconds since 1970); return of how many keys.

    A record that others write meanwhile keeps its marks.
    """
    forgotten = 0
    for partition in table.partitions:
        left: KeyRange | None = KeyRange()
        while left is not None:
            page = await partition.segment.page(left, _PAGE, values=True)
            left = left.after(page.keys[-1]) if page else None
            changes = [change for entry in page.entries() if (change := _without_marks(entry, before)) is not None]
            for part in in_requests(changes, partition.limits):
                forgotten += await _apply(partition, part)
    return forgotten


async def _apply(partition: OpenPartition, changes: Sequence[SegmentChange]) -> int:
    """Apply the changes whose keys nobody has written meanwhile; return how many these are."""
    while changes:
        token = new_token()
        request = [change._replace(version=version_of(token, place)) for place, change in enumerate(changes)]
        try:
            await partition.apply(request, token)
            break
        except ConditionsFailed as late:
            changes = [change for place, change in enumerate(changes) if place not in late.found]
    return len(changes)


def _without_marks(entry: StoredEntry, before: float) -> SegmentChange | None:
    """Return what makes an entry forget; None where it has no marks, or younger ones, or is no record at all."""
    try:
        document = json.loads(entry.value or b"")
    except ValueError:
        return None
    at = document.get(AT) if isinstance(document, dict) else None
    if not isinstance(at, int | float) or at >= before:
        return None
    if is_deleted(document):
        return SegmentChange(entry.key, None, b"", entry.version)
    rest = {name: value for name, value in document.items() if name not in (AT, NEWEST, APPLIED)}
    return SegmentChange(entry.key, compact(rest).encode(), b"", entry.version)
