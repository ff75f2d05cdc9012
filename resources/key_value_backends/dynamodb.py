"""`DynamoDbSegments`: key-value tables in DynamoDB; `DynamoDbSegment` reads and writes one
partition of a table.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from pydantic import PositiveInt
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.errors import (
    AdjunctError,
    TableError,
    TableUnavailableError,
    TransientError,
)
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ConditionsFailed,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    StoredEntry,
    StoredPage,
    TableId,
    TableSegment,
    sealed_table_error,
)
from dagster_adjunct.resources.key_value_backends.dynamodb_layout import (
    GATES,
    KEY_SCHEMA,
    LIMITS,
    FamilyList,
    Item,
    KeyStretch,
    Patience,
    SegmentLayout,
    TableCalls,
    dynamodb_errors,
    family_prefix_at,
    key_after_family,
    table_key_of,
    table_label,
    term_of,
    translate_dynamodb_error,
)
from dagster_adjunct.resources.table_backends.dynamodb import resolve_table_key
from dagster_adjunct.resources.table_backends.dynamodb_connection import (
    Connection,
    error_code,
    throttled_problem,
)
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

KEYS_AT_ONCE = 100
_PATIENCE = 10.0  # seconds in which keys that DynamoDB has left out of a batch are requested again
_FAMILIES_AT_ONCE = 16  # whose entries are read concurrently, for one page
_FAMILIES_LISTED = 200  # by one query of the list of families
_LARGEST_LIMIT = 1_000_000  # items that one query asks for; DynamoDB returns 1 MiB anyway


# Requests of writes and the meaning of their rejections, without I/O.
#
# A write is one transaction. It makes every change under its condition, and checks an item called a
# gate: that the table is not sealed, and that no newer term has begun since this process listed the
# families of the keys, because they may have been removed from the list in it
# (`dynamodb_layout.py`). All tries of a write are identical except for this term and the number in
# their client request token.


_CONDITION_FAILED = "ConditionalCheckFailed"
_CONFLICT = "TransactionConflict"
_THROTTLED = {"ThrottlingError", "ProvisionedThroughputExceeded"}
_KNOWN = {"None", _CONDITION_FAILED, _CONFLICT, *_THROTTLED}


@dataclass(frozen=True, slots=True)
class Cancelled:
    """A transaction without effect, and why.

    `term` is that of the gate if it is newer than the request's: the gate rejects all requests of
    older terms. `current` has the versions of the keys whose conditions fail, by the index of the
    change. `conflict`: another transaction was changing one of the items, so not everything was
    checked. `refused` is DynamoDB's message about a permanent error.
    """

    sealed: bool = False
    term: int | None = None
    current: Mapping[int, bytes | None] | None = None
    conflict: bool = False
    throttled: bool = False
    refused: str | None = None

    @property
    def may_pass(self) -> bool:
        """Whether the same request, sent again, may be applied or be cancelled for a more
        certain reason.
        """
        return (self.conflict or self.throttled) and self.refused is None


def parse_cancellation(response: Mapping[str, Any]) -> Cancelled:
    """Return why DynamoDB cancelled a transaction, from its response."""
    reasons: Sequence[Mapping[str, Any]] = response.get("CancellationReasons") or ()
    codes = [str(reason.get("Code", "None")) for reason in reasons]
    if not codes:
        # Some servers give reasons only in the message. Nothing was applied; the next try may tell
        # more.
        return Cancelled(conflict=True)
    current: dict[int, bytes | None] = {}
    for place, (code, reason) in enumerate(zip(codes[1:], reasons[1:], strict=True)):
        if code == _CONDITION_FAILED:
            item = reason.get("Item")
            current[place] = item["v"]["B"] if item else None
    answered = zip(codes, reasons, strict=True)
    refused = [f"{code}: {why.get('Message')}" for code, why in answered if code not in _KNOWN]
    # If a condition has failed, a conflict at the gate does not matter.
    if current:
        looked_at = codes[1:]
    else:
        looked_at = codes
    term = None
    is_shut = codes[0] == _CONDITION_FAILED
    if is_shut:
        term = term_of(reasons[0].get("Item") or {})
    return Cancelled(
        sealed=is_shut and term is None,  # a closed gate has no term
        term=term,
        current=current or None,
        conflict=_CONFLICT in looked_at,
        throttled=not _THROTTLED.isdisjoint(looked_at),
        refused=next(iter(refused), None),
    )


# Writes: one transaction each, tried until its outcome is known.
#
# Each try has a client request token of its own. For ten minutes after a try was applied, DynamoDB
# answers a copy of it with success and does not apply it again, whatever others have written since.
# So a try whose reply was lost is sent once more. If this copy is cancelled, the first one may
# still arrive: it is certain never to be applied once its token has been used up by another request
# (invalidated), or once the gates have a newer term.


HORIZON = 540.0  # seconds; DynamoDB forgets a token ten minutes after its request has ended
PATIENCE = 5.0  # seconds for which a write is retried here after conflicts with others
_LOST_KNOWN = 1_000  # writes with a lost reply that are remembered before old ones are forgotten


class TransactionAnswer(Enum):
    """DynamoDB's answer to a transaction that it does not cancel."""

    APPLIED = "applied, now or before"
    TOKEN_TAKEN = "another request has its token"
    IN_PROGRESS = "a copy of it is being executed"

    @property
    def may_pass(self) -> bool:
        """Whether the same request, sent again, may be answered otherwise."""
        return self is TransactionAnswer.IN_PROGRESS


@dataclass(frozen=True, slots=True)
class LastTry:
    """The last try of a write whose reply was lost, and `when` that was noticed (monotonic
    seconds).

    `number` counts the tries from 0; the families were listed at `term`. `over`: it is certain
    never to be applied.
    """

    number: int
    term: int
    when: float
    over: bool = False


class _StretchPart(NamedTuple):
    """Entries from the beginning of a stretch, and whether these are all of it that were wanted."""

    entries: list[StoredEntry]
    is_whole: bool


class DynamoDbSegment:
    """A partition of a key-value table, in the DynamoDB table that all its partitions share.

    Several keys are read at different moments. The segments of a table share `calls`: closing one
    segment closes the client of all of them for the running event loop or, without one, for all
    such threads.
    """

    def __init__(self, calls: TableCalls, layout: SegmentLayout) -> None:
        self._calls = calls
        self._layout = layout
        self._families = FamilyList(calls, layout)
        self._lost: dict[bytes, LastTry] = {}  # by token
        self._remembering = threading.Lock()

    def __repr__(self) -> str:
        return f"DynamoDbSegment({self._calls.name!r}, partition={self._layout.partition})"

    async def apply(
        self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False
    ) -> None:
        """Apply the changes; a repeated request first finds out what the earlier ones did. Then
        purge a part of the list of families if that is due.
        """
        with self._report_foreign_items():
            number: int | None = 0
            if repeated:
                number = await self._settle(changes, token)
            if number is not None:
                await self._try(changes, token, number)
                self._forget(token)
            await self._families.purge_if_due()

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        """Return the entries of the keys, None for missing ones: of one key by GetItem, of more
        keys by concurrent batches.
        """
        with self._report_foreign_items():
            if len(keys) == 1:
                asked: dict[str, Any] = {"Key": self._layout.entry(keys[0]), "ConsistentRead": True}
                if not values:
                    asked["ProjectionExpression"] = "v"
                answer: Any = await self._calls.read(
                    lambda client: client.get_item(TableName=self._calls.name, **asked)
                )
                item = answer.get("Item")
                return [None if item is None else _entry(keys[0], item, values)]
            distinct = list(dict.fromkeys(keys))
            parts = [
                distinct[start : start + KEYS_AT_ONCE]
                for start in range(0, len(distinct), KEYS_AT_ONCE)
            ]
            entries: dict[bytes, StoredEntry] = {}
            await self._calls.at_once(self._read_batch(part, values, entries) for part in parts)
            return [entries.get(key) for key in keys]

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        """Return entries of the range in order: several stretches of it are read at once."""
        if within.is_empty:
            return StoredPage(is_last=True)
        read: list[StoredEntry] = []
        with self._report_foreign_items():
            async for stretches in self._stretches(within):
                left = limit - len(read)
                parts = await self._calls.at_once(
                    self._read_stretch(stretch, within, left, values) for stretch in stretches
                )
                for part in parts:
                    read += part.entries
                    if len(read) >= limit or not part.is_whole:
                        return StoredPage.of(read[:limit])
        return StoredPage.of(read, is_last=True)

    async def close(self) -> None:
        await self._calls.close()

    @contextmanager
    def _report_foreign_items(self) -> Iterator[None]:
        """Raise TableError for items that lack attributes, because something else wrote them."""
        try:
            yield
        except KeyError as error:
            raise TableError(
                f"{self._calls.label}, table {self._calls.name}: an item has no {error}: something"
                " else wrote it.",
                "Find items whose v and d are not both binary, and correct or delete them.",
                table=self._calls.label,
            ) from error

    async def _read_batch(
        self, keys: Sequence[bytes], values: bool, into: dict[bytes, StoredEntry]
    ) -> None:
        """Add the entries of up to 100 keys to `into`.

        Keys that DynamoDB leaves out for lack of capacity are requested again, with growing pauses.
        Raises TableUnavailableError if that takes too long.
        """
        calls = self._calls
        patience = Patience(_PATIENCE)
        left: Any = list(map(self._layout.entry, keys))
        attributes = "s, v"
        if values:
            attributes = "s, v, d"
        if len({item["h"]["B"] for item in left}) == 1:
            # All items have the same hash key, so it is not requested: boto3 spends time on every
            # attribute.
            by_sort_key = {item["s"]["B"]: key for item, key in zip(left, keys, strict=True)}
            key_of: Callable[[Any], bytes] = lambda item: by_sort_key[item["s"]["B"]]  # noqa: E731
        else:
            key_of = table_key_of
            attributes = f"h, {attributes}"
        while True:
            request: Any = {
                calls.name: {
                    "Keys": left,
                    "ConsistentRead": True,
                    "ProjectionExpression": attributes,
                }
            }
            answer: Any = await calls.read(partial(_get_items, request))
            for item in answer["Responses"].get(calls.name, ()):
                key = key_of(item)
                into[key] = _entry(key, item, values)
            left = answer.get("UnprocessedKeys", {}).get(calls.name, {}).get("Keys")
            if not left:
                return
            if not await patience.wait():
                error = throttled_problem(calls.label, f"{len(left)} keys unprocessed").error
                assert error is not None
                raise error

    async def _stretches(self, within: KeyRange) -> AsyncIterator[Sequence[KeyStretch]]:
        """Yield the stretches of items that have a range's entries, in key order, in groups to read
        at once.

        The groups grow: if a page has needed several families already, its families are small.
        """
        layout = self._layout
        before = layout.before_families(within)
        if before is not None:
            yield (before,)
        begun = family_prefix_at(within.start)
        if begun is not None:
            # Most pages begin in a family with enough entries for the page, so the list of families
            # is not read.
            yield (layout.in_family(begun, within),)
        family_list = layout.families(
            within if begun is None else KeyRange(key_after_family(begun), within.end)
        )
        group_size = 1
        after = None
        while family_list is not None:
            answer = await self._calls.query(family_list, "s", _FAMILIES_LISTED, after)
            families = [layout.in_family(item["s"]["B"], within) for item in answer["Items"]]
            while families:
                yield families[:group_size]
                families = families[group_size:]
                group_size = min(_FAMILIES_AT_ONCE, group_size * 2)
            after = answer.get("LastEvaluatedKey")
            if after is None:
                break
        last = layout.after_families(within)
        if last is not None:
            yield (last,)

    async def _read_stretch(
        self, stretch: KeyStretch, within: KeyRange, limit: int, values: bool
    ) -> _StretchPart:
        """Return up to `limit` entries of a stretch that are in the range.

        DynamoDB ends a page of its own after 1 MiB. Then this returns too, unless that page has no
        entry in the range.
        """
        entries: list[StoredEntry] = []
        after: Item | None = None
        while True:
            asked = min(limit - len(entries), _LARGEST_LIMIT)
            answer = await self._calls.query(stretch, "s, v, d" if values else "s, v", asked, after)
            items = answer["Items"]
            keys = [stretch.table_key(item["s"]["B"]) for item in items]
            entries += [
                _entry(key, item, values)
                for key, item in zip(keys, items, strict=True)
                if key >= within.start and (within.end is None or key < within.end)
            ]
            after = answer.get("LastEvaluatedKey")
            if after is None:
                return _StretchPart(entries, is_whole=True)
            was_cut = bool(entries) and len(items) < asked
            if was_cut or len(entries) >= limit:
                return _StretchPart(entries, is_whole=False)

    async def _try(self, changes: Sequence[SegmentChange], token: bytes, number: int) -> None:
        """Apply the changes, in tries that are numbered from `number` on.

        No try with one of these numbers was sent before, and earlier ones are certain never to be
        applied. Raises ReplyLostError if the outcome is unknown, TableUnavailableError after
        conflicts, and what `_raise_unless_passing` raises.
        """
        patience = Patience(PATIENCE)
        term = await self._families.ensure_listed(changes)
        while True:
            try:
                answer = await self._send(token, number, term, *map(self._action, changes))
            except ReplyLostError:
                self._remember(token, number, term)
                raise
            if answer is TransactionAnswer.APPLIED:
                return
            if answer is TransactionAnswer.IN_PROGRESS:
                # The same try again: the answer to it will tell the outcome of the copy.
                if not await patience.wait():
                    self._remember(token, number, term)
                    raise self._still_in_progress()
                continue
            if isinstance(answer, Cancelled):
                self._raise_unless_passing(answer)
            if not await patience.wait():
                raise self._contended()
            # The next try gets a new number: the number of this try is taken by another request
            # (TOKEN_TAKEN), or a server that remembers cancelled tries would cancel it for ever.
            number += 1
            term = await self._families.ensure_listed(changes)

    async def _settle(self, changes: Sequence[SegmentChange], token: bytes) -> int | None:
        """Return the number of the next try of a write whose reply was lost; None if the write was
        applied.

        If a number is returned, it is certain that no earlier try will be applied any more. Raises
        ReplyLostError if the outcome is still unknown.
        """
        last = self._lost.get(token)
        number = 0
        if last is not None:
            number = last.number
            if last.over:
                return number + 1
        try:
            if last is None:  # another handle has sent it, at an unknown term
                term = await self._families.ensure_listed(changes)
                applied = await self._was_applied(changes, token, number, term, sent_here=False)
            else:
                applied = await self._was_applied(changes, token, number, last.term, sent_here=True)
        except TableUnavailableError as error:
            # This call has done nothing; the outcome of the earlier one is still unknown.
            raise ReplyLostError(error.problem, error.next_step) from error
        if applied:
            self._forget(token)
            return None
        return number + 1

    async def _was_applied(
        self,
        changes: Sequence[SegmentChange],
        token: bytes,
        number: int,
        term: int,
        *,
        sent_here: bool,
    ) -> bool:
        """Return whether a try whose reply was lost was applied; after False it is certain never to
        be applied. `sent_here`: this object has sent the try, so its `number` and `term` are right.

        Raises `ConditionsFailed` and the like if it is certain never to be applied and a new try
        would fail as well, and `ReplyLostError` or TableUnavailableError if its outcome could not
        be determined.
        """
        patience = Patience(PATIENCE)
        # The answers to the request that uses up the token which say that the try can't be applied.
        ends: list[TransactionAnswer | Cancelled] = [TransactionAnswer.APPLIED]
        while True:
            answer = await self._send(token, number, term, *map(self._action, changes))
            if answer is TransactionAnswer.APPLIED:
                return True
            if self._ends_copies(answer, sent_here=sent_here):
                self._remember(token, number, term, over=True)
                return False
            if not answer.may_pass:
                assert isinstance(answer, Cancelled)
                # Use up the token by a harmless request. DynamoDB applies only one of the requests
                # with a token: once it has applied this one, it rejects late copies of the try.
                item = {**self._layout.invalidated(_gate_number(token)), "t": {"B": token}}
                put = {"Put": {"TableName": self._calls.name, "Item": item}}
                invalidated = await self._send(token, number, term, put)
                if invalidated in ends:
                    self._remember(token, number, term, over=True)
                    self._raise_unless_passing(answer)
                    return False
                if invalidated is TransactionAnswer.TOKEN_TAKEN:
                    # The try has used its token meanwhile. DynamoDB's answer to another copy tells
                    # its outcome; if that is cancelled again, another request has used the token.
                    ends.append(invalidated)
                    continue
            if not await patience.wait():
                raise self._contended()

    def _ends_copies(self, answer: TransactionAnswer | Cancelled, *, sent_here: bool) -> bool:
        """Return whether the answer to a copy of a try says that no copy can be applied any more.
        Learns the gate's term if it is newer.

        Raises KeyValueTableSealedError for a sealed table, and ReplyLostError if the try was sent
        through another handle: an earlier one may have been applied.
        """
        is_over = answer is TransactionAnswer.TOKEN_TAKEN  # it was invalidated before
        if isinstance(answer, Cancelled):
            if answer.sealed:
                raise sealed_table_error(self._calls.table, self._calls.label)
            if answer.term is not None:
                # The gates reject all copies of the try from now on.
                self._families.learn(answer.term)
                is_over = True
        if is_over and not sent_here:
            raise self._sent_elsewhere()
        return is_over

    async def _send(
        self, token: bytes, number: int, term: int, *actions: Item
    ) -> TransactionAnswer | Cancelled:
        """Send try `number`, from 0, of a write; its families were listed at `term`. Raises
        ReplyLostError without an answer.
        """
        check = {
            "TableName": self._calls.name,
            "Key": self._layout.gate(_gate_number(token)),
            "ConditionExpression": "attribute_not_exists(h) OR n <= :n",
            "ExpressionAttributeValues": {":n": {"N": str(term)}},
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }
        request: dict[str, Any] = {
            "ClientRequestToken": f"{token.hex()}-{number}",
            "TransactItems": [{"ConditionCheck": check}, *actions],
        }
        try:
            await self._calls.call(lambda client: client.transact_write_items(**request))
        except AdjunctError:
            raise
        except Exception as error:
            code = error_code(error)
            if code == "TransactionCanceledException":
                return parse_cancellation(getattr(error, "response", {}))
            if code == "TransactionInProgressException":
                return TransactionAnswer.IN_PROGRESS
            if code == "IdempotentParameterMismatchException":
                return TransactionAnswer.TOKEN_TAKEN
            raise translate_dynamodb_error(error, self._calls.table, sent=True) from error
        return TransactionAnswer.APPLIED

    def _remember(self, token: bytes, number: int, term: int, *, over: bool = False) -> None:
        """Remember the last try of a write whose reply was lost; old ones are forgotten if there
        are many.
        """
        now = time.monotonic()
        with self._remembering:  # threads may share a table
            if len(self._lost) >= _LOST_KNOWN:
                for old in [old for old, last in self._lost.items() if last.when < now - HORIZON]:
                    del self._lost[old]
            self._lost[token] = LastTry(number, term, now, over)

    def _forget(self, token: bytes) -> None:
        """Forget the last try of a write, whose outcome is known."""
        with self._remembering:
            self._lost.pop(token, None)

    def _raise_unless_passing(self, cancelled: Cancelled) -> None:
        """Raise the error of a cancelled transaction, unless the next try may succeed at once.

        It may after a conflict, or at a newer term, which is learned.
        """
        if cancelled.sealed:
            raise sealed_table_error(self._calls.table, self._calls.label)
        label = self._calls.label
        if cancelled.refused is not None:
            raise TableError(f"{label}: a write is rejected ({cancelled.refused}).", table=label)
        if cancelled.term is not None:
            self._families.learn(cancelled.term)
            return
        if cancelled.current is not None and not cancelled.conflict:
            raise ConditionsFailed(cancelled.current)
        if cancelled.throttled:
            error = throttled_problem(label, "a transaction was throttled").error
            assert error is not None
            raise error

    def _still_in_progress(self) -> ReplyLostError:
        """Return the error for a write of which DynamoDB was executing a copy all the time."""
        problem = (
            f"{self._calls.label}: it still works on an earlier copy of a write after"
            f" {PATIENCE:g} s."
        )
        return ReplyLostError(problem, "Whether it took effect is looked up.")

    def _contended(self) -> TableUnavailableError:
        """Return the error for a write that conflicted with others all the time."""
        label = self._calls.label
        problem = f"{label}: a write conflicted with others of the same keys for {PATIENCE:g} s."
        step = "It is retried. If that continues, have fewer writers of the same keys."
        return TableUnavailableError(problem, step, table=label)

    def _sent_elsewhere(self) -> ReplyLostError:
        """Return the error for a write whose earlier tries are not known here, so that they may
        have been applied.
        """
        problem = (
            f"{self._calls.label}: a write was sent through another handle, and families were"
            " purged since."
        )
        return ReplyLostError(
            problem, "Read its keys, or repeat it through the handle that sent it."
        )

    def _action(self, change: SegmentChange) -> Item:
        """Return the action of a transaction that makes a change under its condition."""
        key = self._layout.entry(change.key)
        action: dict[str, Any] = {"TableName": self._calls.name}
        if change.is_guard:
            kind = "ConditionCheck"
        elif change.value is None:
            kind = "Delete"
        else:
            kind = "Put"
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


def _entry(key: bytes, item: Item, values: bool) -> StoredEntry:
    """Return the entry in an item; without `values`, its value is None."""
    return StoredEntry(key, item["v"]["B"], item["d"]["B"] if values else None)


def _gate_number(token: bytes) -> int:
    """Return the number of the gate that the request with this token checks, chosen to spread
    the load.
    """
    return token[0] % GATES


_LONGEST_NAME = 255
_CREATING_SECONDS = 10.0  # for a server in trouble; the table itself may take a minute
_SEALING_SECONDS = 60.0
_DELETING_SECONDS = 300.0
_LABEL = "key-value tables in DynamoDB"
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{0,64}")


@validated
class DynamoDbSegments:
    """Key-value tables as DynamoDB tables, billed per request, whose names start with `prefix`.

    Every write is a transaction, which costs twice as much as a plain write, plus a check whether
    the table is sealed. Each event loop sends up to `threads` requests of a table at a time; so do
    all threads without a loop, together.

    Region, endpoint and credentials come from boto3's own chain unless they are passed.
    `credentials_env` names the environment variables with the access key's id, the secret and,
    optionally, the session token.
    """

    limits = LIMITS
    waits = True
    horizon = HORIZON

    def __init__(
        self,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        profile: str | None = None,
        credentials_env: Sequence[str] | None = None,
        prefix: str = "adjunct-",
        threads: PositiveInt = 16,
        connect_timeout: float = 3.0,
        read_timeout: float = 15.0,
    ) -> None:
        if isinstance(credentials_env, str):
            credentials_env = (credentials_env,)
        variables = None if credentials_env is None else tuple(credentials_env)
        self.connection = Connection(
            region, endpoint_url, profile, variables, connect_timeout, read_timeout
        )
        self.connection.check(_LABEL)
        if not _PREFIX.fullmatch(prefix):
            found = f"{_LABEL} have prefix={prefix!r}"
            expected = "at most 64 letters, digits, '-', '_' or '.'"
            raise argument_error(found, expected, argument="prefix")
        self.prefix = prefix
        self.threads = threads
        self._calls: WeakValueDictionary[TableId, TableCalls] = WeakValueDictionary()
        self._opening = threading.Lock()
        self._connecting = threading.Lock()

    def __repr__(self) -> str:
        where = self.connection.endpoint_url or self.connection.region or "by boto3's configuration"
        return f"DynamoDbSegments({where}, prefix={self.prefix!r})"

    def to_dict(self) -> dict[str, Any]:
        names = (
            "region",
            "endpoint_url",
            "profile",
            "credentials_env",
            "connect_timeout",
            "read_timeout",
        )
        settings = {name: getattr(self.connection, name) for name in names}
        if settings["credentials_env"] is not None:
            settings["credentials_env"] = list(settings["credentials_env"])
        return {**settings, "prefix": self.prefix, "threads": self.threads}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(DynamoDbSegments, **self.to_dict()), ()

    def create(self, table: TableId, partitions: int) -> None:
        """Create a table, billed per request, and wait until it accepts requests."""
        name = self._name(table)
        tags = {"adjunct:scope": table.scope, "adjunct:table": table.name}

        def create(client: DynamoDBClient) -> None:
            with dynamodb_errors(table, sent=False):
                resolve_table_key(
                    client, table_label(table), name, KEY_SCHEMA, create=True, tags=tags
                )

        with self._client(table) as client:
            _retrying(_CREATING_SECONDS)(create, client)

    def seal(self, table: TableId, partitions: int) -> None:
        """Close all gates, so that no later write passes one.

        A gate that a write is just passing is closed right after that write.
        """
        name = self._name(table)
        gates = [
            SegmentLayout(at).gate(number) for at in range(partitions) for number in range(GATES)
        ]
        with self._client(table) as client, ThreadPoolExecutor(self.threads) as threads:

            def close(gate: dict[str, Any]) -> None:
                with dynamodb_errors(table, sent=True):
                    client.put_item(TableName=name, Item=gate)

            try:
                list(threads.map(lambda gate: _retrying(_SEALING_SECONDS)(close, gate), gates))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def delete(self, table: TableId, partitions: int) -> None:
        """Delete a table and wait until it is gone, because it may accept writes until then."""
        name = self._name(table)
        label = table_label(table)

        def delete(client: DynamoDBClient) -> None:
            """Return if the table is gone; else delete it, and raise the error to be retried."""
            with dynamodb_errors(table, sent=False):
                try:
                    client.delete_table(TableName=name)
                except Exception as error:
                    if error_code(error) == "ResourceNotFoundException":
                        return  # it is gone
                    is_created_or_deleted_now = error_code(error) == "ResourceInUseException"
                    if not is_created_or_deleted_now:
                        raise
            problem = f"{label} is not deleted after {_DELETING_SECONDS:.0f} s."
            raise TableUnavailableError(
                problem, f"Try again, and check the table {name} in AWS.", table=label
            )

        with self._client(table) as client:
            _retrying(_DELETING_SECONDS, longest_pause=2.0)(delete, client)

    def open(self, table: TableId, partition: int) -> TableSegment:
        """Return a partition of the table; all partitions of a table share connections and
        threads.
        """
        with self._opening:
            calls = self._calls.get(table)
            if calls is None:
                calls = self._calls[table] = TableCalls(
                    table, self._name(table), self._connect, self.threads
                )
        return DynamoDbSegment(calls, SegmentLayout(partition))

    def location(self, table: TableId, partition: int) -> str:
        where = self.connection.endpoint_url or self.connection.region or "of boto3's configuration"
        return f"DynamoDB {where}, table {self._name(table)}, partition {partition}"

    @contextmanager
    def _client(self, table: TableId) -> Iterator[DynamoDBClient]:
        """Lend a client of its own for a `with` block."""
        client = self._connect(table_label(table))
        try:
            yield client
        finally:
            client.close()

    def _connect(self, label: str) -> DynamoDBClient:
        """Return a new client, which any thread may use and the caller closes; `label` is for
        errors.
        """
        with self._connecting:
            self.connection = self.connection.with_session(label)
            return self.connection.client(label, self.threads)

    def _name(self, table: TableId) -> str:
        """Return the name of a table in DynamoDB.

        Its incarnation makes the name unique; scope and table name, truncated, are for people.
        """
        room = _LONGEST_NAME - len(self.prefix) - len(table.incarnation) - 2
        scope = table.scope[: max(room // 2, room - len(table.name))]
        return f"{self.prefix}{scope}-{table.name[: room - len(scope)]}-{table.incarnation}"


def _retrying(seconds: float, longest_pause: float = 0.5) -> Retrying:
    """Return what repeats a request for so many seconds while the server may answer it
    otherwise.
    """
    return Retrying(
        retry=retry_if_exception(_may_pass),
        wait=wait_random_exponential(multiplier=0.01, max=longest_pause),
        stop=stop_after_delay(seconds),
        reraise=True,
    )


def _may_pass(error: BaseException) -> bool:
    """Whether the server was reached, and may answer the same request otherwise in a moment."""
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

    unreached = isinstance(error.__cause__, EndpointConnectionError | ConnectTimeoutError)
    return isinstance(error, TransientError) and not unreached


def _get_items(request: dict[str, Any], client: Any) -> Any:
    """Send a BatchGetItem with these keys."""
    return client.batch_get_item(RequestItems=request)
