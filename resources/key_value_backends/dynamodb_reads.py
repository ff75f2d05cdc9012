"""Reads of a segment in DynamoDB, all of them consistent: by keys, and of a range in the order of table keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.dynamodb_connection import throttled
from dagster_adjunct.resources.key_value.addressing import KeyRange
from dagster_adjunct.resources.key_value.table_segment import StoredEntry, StoredPage
from dagster_adjunct.resources.key_value_backends.dynamodb_calls import Patience, TableCalls
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import (
    Item,
    KeyStretch,
    SegmentLayout,
    behind_family,
    family_at,
    table_key_of,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

KEYS_AT_ONCE = 100
_PATIENCE = 10.0  # seconds in which what DynamoDB did not give of a batch is asked for again
_FAMILIES_AT_ONCE = 16
_FAMILIES_LISTED = 200
_LARGEST_LIMIT = 1_000_000


async def read_keys(
    calls: TableCalls, layout: SegmentLayout, keys: Sequence[bytes], *, values: bool
) -> list[StoredEntry | None]:
    """Return the entries of these keys, in their order, None for what is missing."""
    if len(keys) == 1:
        asked: dict[str, Any] = {"Key": layout.entry(keys[0]), "ConsistentRead": True}
        if not values:
            asked["ProjectionExpression"] = "v"
        answer: Any = await calls.read(lambda client: client.get_item(TableName=layout.table, **asked))
        item = answer.get("Item")
        return [None if item is None else _entry(keys[0], item, values)]
    distinct = list(dict.fromkeys(keys))
    parts = [distinct[start : start + KEYS_AT_ONCE] for start in range(0, len(distinct), KEYS_AT_ONCE)]
    entries: dict[bytes, StoredEntry] = {}
    await calls.together(_read_batch(calls, layout, part, values, entries) for part in parts)
    return [entries.get(key) for key in keys]


async def _read_batch(
    calls: TableCalls, layout: SegmentLayout, keys: Sequence[bytes], values: bool, into: dict[bytes, StoredEntry]
) -> None:
    """Put the entries of up to 100 keys into `into`.

    What DynamoDB has no capacity for it leaves out: it is asked for again, ever more slowly.
    """
    patience = Patience(_PATIENCE, calls.pause)
    left: Any = list(map(layout.entry, keys))
    attributes = "s, v, d" if values else "s, v"
    by_sort_key: dict[bytes, bytes] | None = None
    if len({item["h"]["B"] for item in left}) == 1:
        # boto3 takes its time for every attribute, and this one is known.
        by_sort_key = {item["s"]["B"]: key for item, key in zip(left, keys, strict=True)}
    else:
        attributes = f"h, {attributes}"
    while True:
        asked = {"Keys": left, "ConsistentRead": True, "ProjectionExpression": attributes}
        request: Any = {layout.table: asked}
        answer: Any = await calls.read(partial(_batch_get, request))
        for item in answer["Responses"].get(layout.table, ()):
            key = table_key_of(item) if by_sort_key is None else by_sort_key[item["s"]["B"]]
            into[key] = _entry(key, item, values)
        left = answer.get("UnprocessedKeys", {}).get(layout.table, {}).get("Keys")
        if not left:
            return
        if not await patience.wait():
            error = throttled(calls.label, f"{len(left)} keys unprocessed").error
            assert error is not None
            raise error


def _batch_get(request: Any, client: DynamoDBClient) -> Any:
    return client.batch_get_item(RequestItems=request)


async def read_range(
    calls: TableCalls, layout: SegmentLayout, within: KeyRange, limit: int, *, values: bool
) -> StoredPage:
    """Return the first entries of a range, at most `limit`."""
    if within.end is not None and within.start >= within.end:
        return StoredPage(is_last=True)
    read: list[StoredEntry] = []
    async for stretches in _stretches(calls, layout, within):
        left = limit - len(read)
        parts = await calls.together(
            _read_stretch(calls, layout.table, part, within, left, values) for part in stretches
        )
        for entries, whole in parts:
            read += entries
            if len(read) >= limit or not whole:
                return StoredPage.of(read[:limit])
    return StoredPage.of(read, is_last=True)


async def _stretches(calls: TableCalls, layout: SegmentLayout, within: KeyRange) -> AsyncIterator[Sequence[KeyStretch]]:
    """Give where the entries of a range lie, in their order; what is given together is best read together.

    The more families a page has gone through, the smaller they are, and the more of them are read at a time.
    """
    before = layout.before_families(within)
    if before is not None:
        yield (before,)
    begun = family_at(within.start)
    if begun is not None:
        # Most pages go on in a family, and mostly it has enough for them: the list is not needed.
        yield (layout.in_family(begun, within),)
    listed = layout.families(within if begun is None else KeyRange(behind_family(begun), within.end))
    together, after = 1, None
    while listed is not None:
        answer = await query(calls, layout.table, listed, "s", _FAMILIES_LISTED, after)
        families = [layout.in_family(item["s"]["B"], within) for item in answer["Items"]]
        while families:
            yield families[:together]
            families = families[together:]
            together = min(_FAMILIES_AT_ONCE, together * 2)
        after = answer.get("LastEvaluatedKey")
        if after is None:
            break
    last = layout.after_families(within)
    if last is not None:
        yield (last,)


async def _read_stretch(
    calls: TableCalls, table: str, stretch: KeyStretch, within: KeyRange, limit: int, values: bool
) -> tuple[list[StoredEntry], bool]:
    """Return the first entries of a stretch, and whether that is all that it has.

    DynamoDB ends a page after 1 MiB; then that is a page here too, unless nothing of it is in the range.
    """
    entries: list[StoredEntry] = []
    attributes = "s, v, d" if values else "s, v"
    after: Item | None = None
    while True:
        asked = min(limit - len(entries), _LARGEST_LIMIT)
        answer = await query(calls, table, stretch, attributes, asked, after)
        items = answer["Items"]
        keys = [stretch.table_key(item["s"]["B"]) for item in items]
        entries += [
            StoredEntry(key, item["v"]["B"], item["d"]["B"] if values else None)
            for key, item in zip(keys, items, strict=True)
            if key >= within.start and (within.end is None or key < within.end)
        ]
        after = answer.get("LastEvaluatedKey")
        if after is None:
            return entries, True
        if len(entries) >= limit or (entries and len(items) < asked):
            return entries, False


async def query(
    calls: TableCalls, table: str, stretch: KeyStretch, attributes: str, limit: int, after: Item | None = None
) -> Any:
    """Return DynamoDB's answer: at most `limit` items of a stretch, with these attributes."""
    bounds = {":h": stretch.hash_key, ":a": stretch.lowest, ":z": stretch.highest}
    request: dict[str, Any] = {
        "TableName": table,
        "KeyConditionExpression": "h = :h AND s BETWEEN :a AND :z",
        "ExpressionAttributeValues": {name: {"B": value} for name, value in bounds.items()},
        "ProjectionExpression": attributes,
        "ConsistentRead": True,
        "Limit": limit,
    }
    if after is not None:
        request["ExclusiveStartKey"] = after
    return await calls.read(lambda client: client.query(**request))


def _entry(key: bytes, item: Item, values: bool) -> StoredEntry:
    return StoredEntry(key, item["v"]["B"], item["d"]["B"] if values else None)
