"""`BatchHandler`: which requests a batch becomes, and to whom their outcomes belong. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from dagster_adjunct.resources.tables.batch import BatchProvider
from dagster_adjunct.resources.tables.compact_batches import check_compactable, compacted
from dagster_adjunct.resources.tables.operation import (
    Entries,
    Operation,
    OperationKind,
    RowEntries,
    same_args,
    size_of,
)
from dagster_adjunct.resources.tables.waves import in_waves


@dataclass(slots=True)
class RequestSpan:
    """Entries of a request, from `start` on, that are those of the batch's operation `of` at `places`."""

    of: int
    start: int
    places: Sequence[int]


@dataclass(slots=True)
class Request:
    """One operation for the layer below. `followers` share the outcome of an entry that took their place:
    (the entry's place in the request, operation of the batch, place in it)."""

    operation: Operation[Any]
    spans: list[RequestSpan]
    followers: list[tuple[int, int, int]] = field(default_factory=list)


class BatchHandler:
    """Makes few requests of a batch, none larger than the provider says, in which each key's order is kept."""

    def __init__(self, provider: BatchProvider, *, table: str) -> None:
        self._provider = provider
        self._table = table

    def check(self, operation: Operation[Any]) -> None:
        """Raise ConfigurationError for what such batches can't do."""
        if self._provider.compact:
            check_compactable(self._table, operation)

    def is_one_request(self, operation: Operation[Any]) -> bool:
        """Whether the operation by itself needs nothing done to it; most are like that."""
        provider, count = self._provider, operation.count
        if count > provider.size or (provider.compact and count > 1):
            return False
        if provider.bytes is not None and count > 1 and operation.entries.nbytes > provider.bytes:
            return False
        return not _deletes_among(operation)

    def requests(self, operations: Sequence[Operation[Any]]) -> list[Request]:
        """The requests, in the order in which those that share a key take effect."""
        if not self._provider.compact:
            if len(operations) == 1:
                if not _deletes_among(operations[0]):
                    return list(self._cut(operations[0]))
            elif (one := _concatenated(operations)) is not None:
                return [one]
        return list(self._by_wave(operations))

    def _cut(self, operation: Operation[Any]) -> Iterator[Request]:
        """Requests within the limits, of a batch that is one operation."""
        whole = range(len(operation))
        for start, end in _cuts(operation.entries, self._provider):
            if end - start == len(whole):
                yield Request(operation, [RequestSpan(0, 0, whole)])
            else:
                part = operation.with_entries(operation.entries.part(start, end))
                yield Request(part, [RequestSpan(0, 0, whole[start:end])])

    def _by_wave(self, operations: Sequence[Operation[Any]]) -> Iterator[Request]:
        lanes = _Lanes()
        flat: list[tuple[int, int]] = []
        lane_of: list[int] = []
        keys: list[Hashable] = []
        for number, operation in enumerate(operations):
            lane, entries = lanes.lane(operation), operation.entries
            keys.extend(entries.keys)
            flat.extend((number, place) for place in range(len(entries)))
            if _deletes_among(operation):
                deletes = lanes.lane(replace(operation, kind=OperationKind.DELETE))
                lane_of.extend(deletes if value is None else lane for value in entries.values or ())
            else:
                lane_of.extend([lane] * len(entries))
        followers: dict[int, list[int]] = {}
        kept: Sequence[int] = range(len(keys))
        if self._provider.compact:
            kept, followers = compacted([lanes.operations[lane] for lane in lane_of], keys)
        for lane, wave in in_waves([lane_of[e] for e in kept], [keys[e] for e in kept]):
            members = [kept[place] for place in wave]
            yield from self._wave(
                lanes.operations[lane], operations, [flat[e] for e in members], members, followers, flat
            )

    def _wave(
        self,
        lane: Operation[Any],
        operations: Sequence[Operation[Any]],
        origins: Sequence[tuple[int, int]],
        members: Sequence[int],
        followers: dict[int, list[int]],
        flat: Sequence[tuple[int, int]],
    ) -> Iterator[Request]:
        entries = _picked(operations, origins, lane.kind)
        for start, end in _cuts(entries, self._provider):
            spans: list[RequestSpan] = []
            for place, (of, origin) in enumerate(origins[start:end]):
                if not spans or spans[-1].of != of:
                    spans.append(RequestSpan(of, place, []))
                spans[-1].places.append(origin)  # type: ignore[attr-defined]
            behind = [
                (place, *flat[follower])
                for place, member in enumerate(members[start:end])
                for follower in followers.get(member, ())
            ]
            yield Request(lane.with_entries(entries.part(start, end)), spans, behind)


class _Lanes:
    """Numbers what may be in one request: the same kind, arguments, conditions and contract."""

    def __init__(self) -> None:
        self.operations: list[Operation[Any]] = []

    def lane(self, operation: Operation[Any]) -> int:
        for number, known in enumerate(self.operations):
            if one_lane(known, operation):
                return number
        self.operations.append(operation)
        return len(self.operations) - 1


def one_lane(one: Operation[Any], other: Operation[Any]) -> bool:
    """Whether the entries of both may be in one request."""
    return (
        one.kind is other.kind
        and one.contract is other.contract
        and one.key == other.key
        and one.conditions == other.conditions
        and one.rerun is other.rerun
        and same_args(one.args, other.args)
    )


def _deletes_among(operation: Operation[Any]) -> bool:
    return operation.kind is OperationKind.PUT and operation.entries.null_value() is not None


def _concatenated(operations: Sequence[Operation[Any]]) -> Request | None:
    """All of the operations as one, where they may be."""
    first = operations[0]
    if any(not one_lane(first, other) for other in operations) or any(map(_deletes_among, operations)):
        return None
    spans, start = [], 0
    for number, operation in enumerate(operations):
        spans.append(RequestSpan(number, start, range(len(operation))))
        start += len(operation)
    return Request(first.with_entries(_joined([operation.entries for operation in operations])), spans)


def _joined(parts: Sequence[Entries[Any]]) -> RowEntries[Any]:
    def column(name: str) -> list[Any] | None:
        columns = [getattr(part, name) for part in parts]
        if all(one is None for one in columns):
            return None
        return [
            value
            for part, one in zip(parts, columns, strict=True)
            for value in (one if one is not None else [None] * len(part))
        ]

    keys = [key for part in parts for key in part.keys]
    return RowEntries(keys, *map(column, ("values", "defaults", "marks", "newest")))


def _picked(
    operations: Sequence[Operation[Any]], origins: Sequence[tuple[int, int]], kind: OperationKind
) -> Entries[Any]:
    """The entries at (operation, place), in this order; those of deletes without their values."""
    of = {number for number, _ in origins}
    if len(of) == 1:
        (only,) = of
        picked = operations[only].entries.take([place for _, place in origins])
    else:
        picked = _joined([operations[number].entries.part(place, place + 1) for number, place in origins])
    if kind is OperationKind.DELETE:
        return RowEntries(picked.keys, None, None, picked.marks, picked.newest)
    return picked


def _cuts(entries: Entries[Any], provider: BatchProvider) -> Iterator[tuple[int, int]]:
    """From where to where each request goes."""
    count, step = len(entries), provider.size
    if provider.bytes is not None and entries.nbytes > provider.bytes:
        if isinstance(entries, RowEntries):
            yield from _cuts_by_bytes(entries, provider)
            return
        step = min(step, max(1, count * provider.bytes // max(1, entries.nbytes)))
    for start in range(0, count, step):
        yield start, min(start + step, count)


def _cuts_by_bytes(entries: RowEntries[Any], provider: BatchProvider) -> Iterator[tuple[int, int]]:
    assert provider.bytes is not None
    columns = [column for column in (entries.keys, entries.values, entries.defaults) if column is not None]
    sizes = [sum(map(size_of, row)) for row in zip(*columns, strict=True)]
    ends = [0, *accumulate(sizes)]
    start = 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or ends[end + 1] - ends[start] > provider.bytes or end - start == provider.size:
            yield start, end
            start = end
