"""Changes without a request of their own, such as a bulk load's, put together: as many as a backend applies at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dagster_adjunct.resources.key_value.table_segment import SegmentChange, SegmentLimits

_MOST_CHANGES = 1000  # where the backend would take more: a request holds up others that long
_MOST_BYTES = 4 * 1024 * 1024


def in_requests(changes: Iterable[SegmentChange], limits: SegmentLimits) -> Iterator[list[SegmentChange]]:
    """Yield changes of one segment in their order, in parts that are within its limits: each part is one request.

    A change that is too large by itself is a part of its own, which `check_limits` refuses.
    """
    most = _MOST_CHANGES if limits.changes is None else min(_MOST_CHANGES, limits.changes)
    largest = _MOST_BYTES if limits.request is None else min(_MOST_BYTES, limits.request)
    part: list[SegmentChange] = []
    size = 0
    for change in changes:
        own = len(change.key) + len(change.value or b"")
        if part and (len(part) == most or size + own > largest):
            yield part
            part, size = [], 0
        part.append(change)
        size += own
    if part:
        yield part
