"""`DynamoDbSegment`: a partition of a key-value table, in the DynamoDB table that all its partitions share."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.dynamodb_connection import error_code, throttled_problem
from dagster_adjunct.resources.errors import AdjunctError, TableError, TableUnavailableError
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ConditionsFailed,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    StoredEntry,
    StoredPage,
    sealed_table_error,
)
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import (
    GATES,
    LIMITS,
    PURGE_AFTER,
    Families,
    Item,
    KeyStretch,
    Patience,
    SegmentLayout,
    TableCalls,
    family_prefix_at,
    key_after_family,
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
            error = throttled_problem(calls.label, f"{len(left)} keys unprocessed").error
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
    begun = family_prefix_at(within.start)
    if begun is not None:
        # Most pages go on in a family, and mostly it has enough for them: the list is not needed.
        yield (layout.in_family(begun, within),)
    listed = layout.families(within if begun is None else KeyRange(key_after_family(begun), within.end))
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


# What is sent to DynamoDB to write to a segment, and what its refusals say. Decisions without any I/O.
#
# A write is one transaction. It checks a gate, which is closed in a sealed table and where families may have been
# removed since this process listed them (`dynamodb_layout.py`), and makes every change under its condition. All tries
# of a write are identical except for that term and the number in their client request token.


_CONDITION_FAILED = "ConditionalCheckFailed"
_CONFLICT = "TransactionConflict"
_THROTTLED = {"ThrottlingError", "ProvisionedThroughputExceeded"}


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A transaction that had no effect, and why.

    `term`: the gate has this one, which is newer than the request's, and no request of an older one passes it any more.
    `current` tells, for the place of each change whose condition fails, the version that its key has. `conflict`:
    others wrote, so that not everything was looked at. `refused`: DynamoDB's words for what it will never take.
    """

    sealed: bool = False
    term: int | None = None
    current: Mapping[int, bytes | None] | None = None
    conflict: bool = False
    throttled: bool = False
    refused: str | None = None

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be applied, or tell more, in a moment."""
        return (self.conflict or self.throttled) and self.refused is None


def write_request(
    layout: SegmentLayout, changes: Sequence[SegmentChange], token: bytes, number: int, term: int
) -> dict[str, Any]:
    """Return the request that makes these changes, whose families are listed at `term`: the `number`th try, from 0."""
    return {
        "ClientRequestToken": _client_token(token, number),
        "TransactItems": [_gate_check(layout, token, term), *(_action(layout, change) for change in changes)],
    }


def token_invalidation_request(layout: SegmentLayout, token: bytes, number: int, term: int) -> dict[str, Any]:
    """Return a harmless request that takes the client request token of a try away from it.

    DynamoDB does one of the two. A copy of the try that is still on its way is refused when this was done: it has the
    token of another request.
    """
    burnt = {**layout.burnt(gate_number(token)), "t": {"B": token}}
    return {
        "ClientRequestToken": _client_token(token, number),
        "TransactItems": [_gate_check(layout, token, term), {"Put": {"TableName": layout.table, "Item": burnt}}],
    }


def gate_number(token: bytes) -> int:
    """Return the gate that a request checks: any will do, since sealing shuts them all."""
    return token[0] % GATES


def parse_cancellation(response: Mapping[str, Any]) -> Cancelled:
    """Return what the answer to a cancelled transaction says."""
    reasons: Sequence[Mapping[str, Any]] = response.get("CancellationReasons") or ()
    codes = [str(reason.get("Code", "None")) for reason in reasons]
    if not codes:
        # Some servers give the reasons in the message alone: nothing was done, and the next try tells more.
        return Cancelled(conflict=True)
    current = {
        place: _version_in(reason.get("Item"))
        for place, (code, reason) in enumerate(zip(codes[1:], reasons[1:], strict=True))
        if code == _CONDITION_FAILED
    }
    known = {"None", _CONDITION_FAILED, _CONFLICT, *_THROTTLED}
    refused = [
        f"{code}: {reason.get('Message')}" for code, reason in zip(codes, reasons, strict=True) if code not in known
    ]
    # That the gate was busy does not matter where a condition failed.
    looked_at = codes[1:] if current else codes
    shut = codes[0] == _CONDITION_FAILED
    term = term_of(reasons[0].get("Item") or {}) if shut else None
    return Cancelled(
        sealed=shut and term is None,
        term=term,
        current=current or None,
        conflict=_CONFLICT in looked_at,
        throttled=any(code in _THROTTLED for code in looked_at),
        refused=refused[0] if refused else None,
    )


def _client_token(token: bytes, number: int) -> str:
    return f"{token.hex()}-{number}"


def term_of(item: Item) -> int | None:
    """Return the term of a gate or of a family in the list; None where it has none."""
    return int(item["n"]["N"]) if "n" in item else None


def _gate_check(layout: SegmentLayout, token: bytes, term: int) -> Item:
    check = {
        "TableName": layout.table,
        "Key": layout.gate(gate_number(token)),
        "ConditionExpression": "attribute_not_exists(h) OR n <= :n",
        "ExpressionAttributeValues": {":n": {"N": str(term)}},
        "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
    }
    return {"ConditionCheck": check}


def _action(layout: SegmentLayout, change: SegmentChange) -> Item:
    key = layout.entry(change.key)
    action: dict[str, Any] = {"TableName": layout.table}
    kind = "ConditionCheck" if change.is_guard else "Delete" if change.value is None else "Put"
    if change.value is None:
        action["Key"] = key
    else:
        action["Item"] = {**key, "v": {"B": change.version}, "d": {"B": change.value}}
    if change.expected is ABSENT:
        action["ConditionExpression"] = "attribute_not_exists(h)"
    elif isinstance(change.expected, bytes):
        action["ConditionExpression"] = "v = :v"
        action["ExpressionAttributeValues"] = {":v": {"B": change.expected}}
    if "ConditionExpression" in action:
        action["ReturnValuesOnConditionCheckFailure"] = "ALL_OLD"
    return {kind: action}


def _version_in(item: Item | None) -> bytes | None:
    return item["v"]["B"] if item else None


# Removes families without entries; `dynamodb_layout.py` says why this is correct whoever writes at the same time.
#
# It is done by those who add families, a part of the list at a time, going round: for every `PURGE_AFTER` new families
# four times as many are looked at. So the list has no more families without entries than with them, or some hundred.


SETTLING_SECONDS = (
    60  # seconds, by DynamoDB's clock, after which no transaction is left that passed a gate before it moved up
)
FAMILIES_PER_PURGE = 4 * PURGE_AFTER
MIN_EMPTY_FAMILIES = PURGE_AFTER // 2  # families without entries for which all gates are moved up
_PURGE_PATIENCE = 5.0  # seconds for which a gate is tried that writes are passing
_log = logging.getLogger("adjunct.key_value")


@dataclass(frozen=True, slots=True)
class Progress:
    """All gates had `term` at `at`, by DynamoDB's clock; the families from `place` on are looked at next."""

    term: int = 0
    at: int = 0
    place: bytes = b""

    @staticmethod
    def of(item: Item) -> Progress:
        return Progress(int(item["n"]["N"]), int(item["a"]["N"]), item["p"]["B"]) if item else Progress()

    def attributes(self) -> Item:
        return {"n": {"N": str(self.term)}, "a": {"N": str(self.at)}, "p": {"B": self.place}}


async def purge_families(calls: TableCalls, layout: SegmentLayout) -> None:
    """Look at a part of the list. A write was applied just before: nothing that fails here is an error of it."""
    try:
        await _look(calls, layout)
    except (AdjunctError, KeyError, ValueError) as error:
        _log.warning("%s: families without entries stay in its list for now: %s", calls.label, error)


async def _look(calls: TableCalls, layout: SegmentLayout) -> None:
    answer: Any = await calls.read(partial(_get_progress, layout))
    progress, now = Progress.of(answer.get("Item", {})), _time_of(answer)
    if now < progress.at + SETTLING_SECONDS:
        return
    stretch = layout.families(KeyRange(progress.place))
    if stretch is None:
        raise ValueError(f"item {layout.progress()} has a place that is no family's: {progress.place.hex()}; delete it")
    part = await query(calls, layout.table, stretch, "s, n", FAMILIES_PER_PURGE)
    terms = {item["s"]["B"]: term_of(item) or 0 for item in part["Items"]}
    held = await calls.together(_has_entries(calls, layout, family) for family in terms)
    empty = [family for family, holds in zip(terms, held, strict=True) if not holds]
    gone = [family for family in empty if terms[family] < progress.term]
    await calls.together(calls.read(partial(_delete, layout, family, progress.term)) for family in gone)

    term, at = progress.term, progress.at
    left = [terms[family] for family in empty if terms[family] >= term]
    if len(left) >= MIN_EMPTY_FAMILIES:
        term = max(left) + 1
        at = max(await calls.together(_move_gate(calls, layout, number, term) for number in range(GATES)))
    place = key_after_family(list(terms)[-1]) if part.get("LastEvaluatedKey") else b""
    await calls.read(partial(_put, layout, {**layout.progress(), **Progress(term, at, place).attributes()}))


async def _has_entries(calls: TableCalls, layout: SegmentLayout, family: bytes) -> bool:
    answer = await query(calls, layout.table, layout.in_family(family, KeyRange()), "s", 1)
    return bool(answer["Items"])


async def _move_gate(calls: TableCalls, layout: SegmentLayout, number: int, term: int) -> int:
    """Let a gate pass nothing of an older term, as one of a newer term, or of a sealed table, does; return when."""
    patience = Patience(_PURGE_PATIENCE, calls.pause)
    while True:
        try:
            return await calls.read(partial(_raise_gate, layout, number, term))
        except TableUnavailableError:
            if not await patience.wait():
                raise


def _raise_gate(layout: SegmentLayout, number: int, term: int, client: DynamoDBClient) -> int:
    request: dict[str, Any] = {
        "TableName": layout.table,
        "Item": {**layout.gate(number), "n": {"N": str(term)}},
        "ConditionExpression": "attribute_not_exists(h) OR n < :n",
        "ExpressionAttributeValues": {":n": {"N": str(term)}},
    }
    try:
        return _time_of(client.put_item(**request))
    except Exception as error:
        if error_code(error) != "ConditionalCheckFailedException":
            raise
        return _time_of(getattr(error, "response", {}))


def _get_progress(layout: SegmentLayout, client: DynamoDBClient) -> Any:
    return client.get_item(TableName=layout.table, Key=layout.progress(), ConsistentRead=True)


def _put(layout: SegmentLayout, item: Item, client: DynamoDBClient) -> None:
    client.put_item(TableName=layout.table, Item=item)


def _delete(layout: SegmentLayout, family: bytes, term: int, client: DynamoDBClient) -> None:
    """Take a family without entries out of the list, unless somebody has listed it at this term or a later one."""
    try:
        client.delete_item(
            TableName=layout.table,
            Key=layout.family(family),
            ConditionExpression="attribute_not_exists(n) OR n < :n",
            ExpressionAttributeValues={":n": {"N": str(term)}},
        )
    except Exception as error:
        if error_code(error) != "ConditionalCheckFailedException":
            raise


def _time_of(answer: Mapping[str, Any]) -> int:
    """Return the seconds at which DynamoDB answered, by its own clock."""
    return int(parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp())


# Writes to a segment in DynamoDB: one transaction each, tried until it is known what became of it.
#
# Each try has a client request token of its own. DynamoDB answers a repeated try that was applied with the same
# success for ten minutes, whatever others wrote since. So a try whose reply was lost is sent once more. If that is
# cancelled, the first copy may still be on its way: its token is burnt, and only then is the try known never to be
# applied. It is known too where gates have a newer term than the try.


HORIZON = 540.0  # seconds; DynamoDB forgets a token ten minutes after its request has ended
PATIENCE = 5.0  # seconds in which a write that meets other writers is tried again here
_LOST_KNOWN = 1_000


class TransactionAnswer(Enum):
    """What DynamoDB says to a transaction that it does not cancel."""

    APPLIED = "applied, now or before"
    TOKEN_TAKEN = "another request has its token"
    UNDER_WAY = "a copy of it is being worked on"


@dataclass(frozen=True, slots=True)
class LastTry:
    """Of a write whose reply was lost: the last try's number and term. `over`: it is known never to be applied."""

    number: int
    term: int
    when: float
    over: bool = False


class SegmentWrites:
    """The writes of one segment in this process."""

    def __init__(self, calls: TableCalls, layout: SegmentLayout, patience: float = PATIENCE) -> None:
        self._calls = calls
        self._layout = layout
        self._patience = patience
        self._families = Families(calls, layout)
        self._lost: dict[bytes, LastTry] = {}  # by token
        self._remembering = threading.Lock()

    async def apply(self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool) -> None:
        """Do what `TableSegment.apply` says."""
        if not repeated:
            await self._try(changes, token, 0)
        elif not await self._settle(changes, token):
            await self._try(changes, token, self._lost[token].number + 1)
            self._forget(token)
        if self._families.look_is_due():
            await purge_families(self._calls, self._layout)

    async def _try(self, changes: Sequence[SegmentChange], token: bytes, number: int) -> None:
        """Apply the changes; nothing of the tries from `number` on was sent yet, or all that was sent is over."""
        patience = Patience(self._patience, self._calls.pause)
        term = await self._families.listed(changes)
        while True:
            try:
                answer = await self._send(write_request(self._layout, changes, token, number, term))
            except ReplyLostError:
                self._remember(token, number, term)
                raise
            if answer is TransactionAnswer.APPLIED:
                return
            if isinstance(answer, Cancelled):
                self._check(answer)
            if not await patience.wait():
                if answer is TransactionAnswer.UNDER_WAY:
                    self._remember(token, number, term)
                    raise ReplyLostError(
                        f"{self._calls.label}: a copy of a write is being worked on for {self._patience:g} s.",
                        "It is asked about again.",
                    )
                raise self._contended()
            if answer is not TransactionAnswer.UNDER_WAY:
                # This one is over. A server that remembered cancelled ones too would cancel it for ever.
                number += 1
                term = await self._families.listed(changes)

    async def _settle(self, changes: Sequence[SegmentChange], token: bytes) -> bool:
        """Find out whether a write whose reply was lost was applied; after False its last try never will be."""
        last = self._lost.get(token)
        if last is not None and last.over:
            return False
        try:
            if last is None:  # another handle has sent it: at which term is not known here
                term = await self._families.listed(changes)
                applied = await self._was_applied(changes, token, 0, term, sent_here=False)
            else:
                applied = await self._was_applied(changes, token, last.number, last.term, sent_here=True)
        except TableUnavailableError as error:
            # Of this call nothing happened; of the one before it nothing is known yet.
            raise ReplyLostError(error.problem, error.next_step) from error
        if applied:
            self._forget(token)
        return applied

    async def _was_applied(
        self, changes: Sequence[SegmentChange], token: bytes, number: int, term: int, *, sent_here: bool
    ) -> bool:
        """Find out what became of a try whose reply was lost: True, or False where it never will be applied.

        Raises `ConditionsFailed` and the like where it never will be and a new try is no use, `ReplyLostError` or
        TableUnavailableError where it could not be found out.
        """
        patience = Patience(self._patience, self._calls.pause)
        taken = False
        while True:
            answer = await self._send(write_request(self._layout, changes, token, number, term))
            if not isinstance(answer, Cancelled):
                if answer is TransactionAnswer.TOKEN_TAKEN and not sent_here:
                    raise self._sent_elsewhere()
                if answer is TransactionAnswer.APPLIED:
                    return True
                if answer is TransactionAnswer.TOKEN_TAKEN:  # it was burnt before
                    self._remember(token, number, term, over=True)
                    return False
            elif answer.sealed:
                raise sealed_table_error(self._calls.table, self._calls.label)
            elif answer.term is not None:
                # No gate passes any copy of it any more.
                self._families.learn(answer.term)
                if not sent_here:
                    raise self._sent_elsewhere()
                self._remember(token, number, term, over=True)
                return False
            elif not answer.may_pass:
                burnt = await self._send(token_invalidation_request(self._layout, token, number, term))
                if burnt is TransactionAnswer.APPLIED or (taken and burnt is TransactionAnswer.TOKEN_TAKEN):
                    self._remember(token, number, term, over=True)
                    self._check(answer)
                    return False
                if burnt is TransactionAnswer.TOKEN_TAKEN:
                    # The first copy came meanwhile. What became of it is what DynamoDB says to another copy.
                    taken = True
                    continue
            if not await patience.wait():
                raise self._contended()

    async def _send(self, request: dict[str, Any]) -> TransactionAnswer | Cancelled:
        try:
            await self._calls.call(lambda client: client.transact_write_items(**request))
        except AdjunctError:
            raise
        except Exception as error:
            code = error_code(error)
            if code == "TransactionCanceledException":
                return parse_cancellation(getattr(error, "response", {}))
            if code == "TransactionInProgressException":
                return TransactionAnswer.UNDER_WAY
            if code == "IdempotentParameterMismatchException":
                return TransactionAnswer.TOKEN_TAKEN
            raise self._calls.meaning(error, sent=True) from error
        return TransactionAnswer.APPLIED

    def _remember(self, token: bytes, number: int, term: int, *, over: bool = False) -> None:
        now = time.monotonic()
        with self._remembering:  # threads may share a table
            if len(self._lost) >= _LOST_KNOWN:
                for old in [old for old, last in self._lost.items() if last.when < now - HORIZON]:
                    del self._lost[old]
            self._lost[token] = LastTry(number, term, now, over)

    def _forget(self, token: bytes) -> None:
        with self._remembering:
            self._lost.pop(token, None)

    def _check(self, cancelled: Cancelled) -> None:
        """Raise what a cancelled transaction has to say, unless it may be applied when it is tried again at once."""
        if cancelled.sealed:
            raise sealed_table_error(self._calls.table, self._calls.label)
        label = self._calls.label
        if cancelled.refused is not None:
            raise TableError(f"{label}: a write is refused ({cancelled.refused}).", "Correct it.", table=label)
        if cancelled.term is not None:
            self._families.learn(cancelled.term)
            return
        if cancelled.current is not None and not cancelled.conflict:
            raise ConditionsFailed(cancelled.current)
        if cancelled.throttled:
            error = throttled_problem(label, "a transaction was throttled").error
            assert error is not None
            raise error

    def _contended(self) -> TableUnavailableError:
        label = self._calls.label
        return TableUnavailableError(
            f"{label}: a write met others that write the same keys, again and again for {self._patience:g} s.",
            "It is tried again; if that goes on, let fewer write the same keys at a time.",
            table=label,
        )

    def _sent_elsewhere(self) -> ReplyLostError:
        return ReplyLostError(
            f"{self._calls.label}: a write was sent over another handle, and families were forgotten since.",
            "Read its keys, or ask over the handle that has sent it.",
        )


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
