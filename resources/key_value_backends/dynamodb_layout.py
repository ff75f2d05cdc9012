"""Where the entries of a segment are in its DynamoDB table, and how its families are listed.

    item                     hash key "h"                      sort key "s"         other attributes
    entry with a family      "f" | partition | family, UTF-8   0x01 | key           "v" version, "d"
                             value
    entry without a family   "k" | partition                   table key            "v" version, "d"
                             value
    a family of the segment  "d" | partition                   prefix of family     "n" term of its
                             listing
    progress of purging      "d" | partition                   0x00                 "n" term, "a"
                             when, "p" place
    gate                     "g" | partition | number          0x00                 "n" term; none
                             if sealed
    invalidated token        "g" | partition | number          0x01                 "t" the latest
                             token

A partition is four bytes, big-endian. A sort key may not be empty, but the key of an entry may. A
missing gate has the term 0. Families are listed because DynamoDB can't return the hash keys of a
table in order. A family is in the list before it gets its first key, and is removed from it when it
has none.

A writer remembers which families are listed, so that an ordinary put needs no request for that.
What a process remembers can't be recalled, so it holds for a **term**, a number that grows:

- A family is listed at the term that its writer knows: the item's number becomes that one, unless
  it is higher.
- A write passes its gate only if the gate's term is at most the one at which its families were
  listed. A rejected writer learns the newer term, forgets what it remembered, and lists its
  families again.
- To purge families at term t, all gates are first raised to t, and time passes
  (`SETTLING_SECONDS`). After that, whoever finds a family without entries may remove its item, on
  the condition that its number is below t.

No entry is in a family that is not listed: a write of term k has found its family listed at k or
higher. That item can only be removed at a term t > k, by a process that looked into the family when
all gates were at t. By then the write was either applied, and its entry was found or removed again,
or will never be applied. The condition is checked when the item is removed, so it does not matter
how late the request arrives, nor how many purge at a time; an item with a higher number belongs to
writers of a newer term. Changing a key that must have a version needs no listing: its family has an
entry, whose writer has listed it. The time is needed because a Query, unlike a PutItem, does not
wait for a transaction that is being committed: the gate may be free a moment before the entry is
visible.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dagster_adjunct.resources.errors import (
    AdjunctError,
    KeyValueTableNotFoundError,
    TableUnavailableError,
)
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import (
    KeyRange,
    ReplyLostError,
    SegmentChange,
    SegmentLimits,
    TableId,
)
from dagster_adjunct.resources.key_value_backends.per_caller import PerCaller
from dagster_adjunct.resources.table_backends.dynamodb_connection import (
    error_code,
    problem_from_boto_error,
)
from dagster_adjunct.resources.tables.operation import State

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

T = TypeVar("T")

_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.3


class TableCalls:
    """Sends the requests of all segments of one table in this process.

    Each event loop has a client, and up to `threads` threads in which its requests run. The threads
    without a loop share a client, and block. `name` is the table's name in DynamoDB; `connect`
    returns a new client, given a label for errors.
    """

    def __init__(
        self, table: TableId, name: str, connect: Callable[[str], DynamoDBClient], threads: int
    ) -> None:
        self.table = table
        self.name = name
        self.label = table_label(table)
        self._open: PerCaller[_ClientThreads] = PerCaller(
            partial(_ClientThreads, partial(connect, self.label), threads), _ClientThreads.end
        )

    async def call(self, do: Callable[[DynamoDBClient], T]) -> T:
        """Return what `do` returns for the client; an event loop calls it in a thread. Raises
        boto3's errors.
        """
        client_threads = self._open.here()
        return await segment.in_thread(
            lambda: client_threads.threads, partial(client_threads.run, do)
        )

    async def at_once(self, asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Return the results of concurrent coroutines, in their order."""
        return await segment.at_once(lambda: self._open.here().threads, asked)

    async def read(self, do: Callable[[DynamoDBClient], T]) -> T:
        """Return what `do` returns for the client; raise the errors of tables, not boto3's.

        For requests that can be repeated without harm: reads, and changes that have no visible
        effect or the same one again. So a lost answer is an ordinary TableUnavailableError.
        """
        with dynamodb_errors(self.table, sent=False):
            return await self.call(do)

    async def query(
        self, stretch: KeyStretch, attributes: str, limit: int, after: Item | None = None
    ) -> Any:
        """Return DynamoDB's answer with these `attributes` of at most `limit` items of a stretch,
        of those after the item with the key `after`.
        """
        bounds = {":h": stretch.hash_key, ":a": stretch.lowest, ":z": stretch.highest}
        request: dict[str, Any] = {
            "TableName": self.name,
            "KeyConditionExpression": "h = :h AND s BETWEEN :a AND :z",
            "ExpressionAttributeValues": {name: {"B": value} for name, value in bounds.items()},
            "ProjectionExpression": attributes,
            "ConsistentRead": True,
            "Limit": limit,
        }
        if after is not None:
            request["ExclusiveStartKey"] = after
        return await self.read(lambda client: client.query(**request))

    async def close(self) -> None:
        """Close the client, and its threads once their requests have ended; the next call opens
        them again.
        """
        client_threads = self._open.take()
        if client_threads is not None:
            await segment.in_thread(
                partial(segment.threads, "key-value-closing", 4),
                partial(client_threads.end, wait=True),
            )


@contextmanager
def dynamodb_errors(table: TableId, *, sent: bool) -> Iterator[None]:
    """Raise errors of boto3 in this context as those of a table; `sent` is that of
    `translate_dynamodb_error`.
    """
    try:
        yield
    except AdjunctError:
        raise
    except Exception as error:
        raise translate_dynamodb_error(error, table, sent=sent) from error


def translate_dynamodb_error(error: Exception, table: TableId, *, sent: bool) -> Exception:
    """Return the table's error for one of boto3.

    `sent`: the request may have been applied. If that is unknown, the error is a `ReplyLostError`.
    Without `sent` it is an ordinary TableUnavailableError, for requests that can be repeated
    without harm.
    """
    if error_code(error) == "ResourceNotFoundException":
        return table.error(
            KeyValueTableNotFoundError,
            "DynamoDB has no such table: it was deleted, or the backend uses another region or"
            " account.",
            "Open it again. If it should exist, check the backend's region and credentials.",
        )
    problem = problem_from_boto_error(error, table_label(table), sent=sent)
    translated = problem.error
    assert isinstance(translated, AdjunctError)
    # An internal error of DynamoDB leaves the outcome unknown also without `sent`.
    is_reply_lost = sent and problem.state is State.UNKNOWN
    if is_reply_lost:
        return ReplyLostError(translated.problem, translated.next_step)
    return translated


def table_label(table: TableId) -> str:
    """Return what errors call the table."""
    return f"key-value table {table} in DynamoDB"


class Patience:
    """Limits retries to some seconds after the end of the first attempt, with growing random
    pauses.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self._bound = _FIRST_PAUSE  # of the last pause, in seconds

    async def wait(self) -> bool:
        """Pause before the next attempt; return False, at once, if the time is up."""
        now = time.monotonic()
        if self._until is None:
            # Not before: the first attempt may have had to connect, and to list families.
            self._until = now + self._seconds
        if now >= self._until:
            return False
        self._bound = min(_LONGEST_PAUSE, 2 * self._bound)
        await segment.pause(self._bound * random.random())
        return True


class _ClientThreads:
    """The client, and the threads for its requests, of one event loop or of all threads without
    one.
    """

    def __init__(self, connect: Callable[[], DynamoDBClient], threads: int) -> None:
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="dynamodb-key-values")
        # Limits concurrent requests also for callers without a loop, which send them in their own
        # threads.
        self._slots = threading.BoundedSemaphore(threads)
        self._connect = connect
        self._opening = threading.Lock()
        self._client: DynamoDBClient | None = None

    def run(self, do: Callable[[DynamoDBClient], T]) -> T:
        """Return what `do` returns for the client, which is connected first if need be; wait while
        too many requests are under way.
        """
        client = self._client
        if client is None:
            with self._opening:
                client = self._client = self._client or self._connect()
        with self._slots:
            return do(client)

    def end(self, *, wait: bool = False) -> None:
        """End the threads and close the client; with `wait`, first wait for the requests under
        way.
        """
        self.threads.shutdown(wait=wait)
        client = self._client
        self._client = None
        if client is not None:
            client.close()


GATES = 64  # of a partition: concurrent writes that check the same one may conflict
KEY_SCHEMA = {"h": "B", "s": "B"}
# Sizes in bytes; DynamoDB limits those of sort keys and items.
_LONGEST_SORT_KEY = 1024
_LONGEST_KEY = _LONGEST_SORT_KEY - 2  # without a family the sort key has two bytes of length
_LARGEST_ITEM = 400 * 1024
_HASH_BESIDES_FAMILY = 5  # the kind of the item, and the partition
_NAMES_AND_VERSION = len("hsvd") + 16
_LARGEST_KEYS = _HASH_BESIDES_FAMILY + (_LONGEST_SORT_KEY - 2) + _LONGEST_SORT_KEY

LIMITS = SegmentLimits(
    table_key=_LONGEST_SORT_KEY + _LONGEST_KEY,
    family_prefix=_LONGEST_SORT_KEY,  # it is the sort key of the list of families
    key=_LONGEST_KEY,
    value=_LARGEST_ITEM - _LARGEST_KEYS - _NAMES_AND_VERSION,
    changes=99,  # of the 100 actions of a transaction one checks the gate
    fences=16,
    request=4_000_000,  # of 4 MiB: names, versions and hash keys count too
)

# Table keys begin with the length of their family or, without one, the negated length of the key.
_FIRST_FAMILY = b"\0\1"
_AFTER_FAMILIES = b"\x80\0"
_EMPTY_KEY = b"\0\0"
_ABOVE_ALL = b"\xff" * _LONGEST_SORT_KEY

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyStretch:
    """Consecutive items with one hash key: those with sort keys from `lowest` to `highest`, both
    included.

    The table key of an item is `prefix` and its sort key without the first `cut` bytes.
    """

    hash_key: bytes
    lowest: bytes
    highest: bytes
    prefix: bytes = b""
    cut: int = 0

    def table_key(self, sort_key: bytes) -> bytes:
        """Return the table key of the item with this sort key."""
        return self.prefix + sort_key[self.cut :]


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The keys of the items of one partition."""

    partition: int

    def entry(self, table_key: bytes) -> Item:
        """Return the key of the item that holds an entry."""
        length = int.from_bytes(table_key[:2], "big", signed=True)
        if length <= 0:
            return _item_key(self._hash(b"k"), table_key)
        return _item_key(
            self._hash(b"f") + table_key[2 : 2 + length], b"\1" + table_key[2 + length :]
        )

    def family(self, prefix: bytes) -> Item:
        """Return the key of the item that lists a family."""
        return _item_key(self._hash(b"d"), prefix)

    def progress(self) -> Item:
        """Return the key of the item that records how far the list of families has been purged."""
        return _item_key(self._hash(b"d"), b"\0")

    def gate(self, number: int) -> Item:
        """Return the key of the gate of this number."""
        return _item_key(self._gate_hash(number), b"\0")

    def invalidated(self, number: int) -> Item:
        """Return the key of the item with the latest token that was invalidated at the gate of this
        number.
        """
        return _item_key(self._gate_hash(number), b"\1")

    def in_family(self, prefix: bytes, within: KeyRange) -> KeyStretch:
        """Return the stretch of a family's entries that are in a range, which has at least one
        possible key of the family.
        """
        lowest = b""
        if within.start.startswith(prefix):
            lowest = within.start[len(prefix) :]
        end = within.end
        if end is not None and end.startswith(prefix):
            highest = end[len(prefix) :]
        else:
            highest = _ABOVE_ALL
        hash_key = self._hash(b"f") + prefix[2:]
        return KeyStretch(
            hash_key, _sort_key(b"\1" + lowest), _sort_key(b"\1" + highest), prefix, 1
        )

    def before_families(self, within: KeyRange) -> KeyStretch | None:
        """Return the stretch of the empty key without a family, the smallest table key; None if
        the range lacks it.
        """
        ends_before = within.end is not None and within.end <= _EMPTY_KEY
        if ends_before or within.start > _EMPTY_KEY:
            return None
        return KeyStretch(self._hash(b"k"), _EMPTY_KEY, _EMPTY_KEY)

    def families(self, within: KeyRange) -> KeyStretch | None:
        """Return the stretch of the list with the families that may have keys in a range; None
        if there can be none.
        """
        first = family_prefix_at(within.start) or within.start
        lowest = max(first, _FIRST_FAMILY)
        if within.end is not None:
            highest = min(within.end, _AFTER_FAMILIES)
        else:
            highest = _AFTER_FAMILIES
        if lowest < highest:
            return KeyStretch(self._hash(b"d"), _sort_key(lowest), _sort_key(highest))
        return None

    def after_families(self, within: KeyRange) -> KeyStretch | None:
        """Return the stretch of all other entries without a family in a range; None if there can
        be none.
        """
        lowest = max(within.start, _AFTER_FAMILIES)
        if within.end is not None:
            highest = within.end
        else:
            highest = _ABOVE_ALL
        if lowest < highest:
            return KeyStretch(self._hash(b"k"), _sort_key(lowest), _sort_key(highest))
        return None

    def _hash(self, kind: bytes) -> bytes:
        """Return the hash key of the partition's items of a kind, or its beginning."""
        return kind + self.partition.to_bytes(4, "big")

    def _gate_hash(self, number: int) -> bytes:
        """Return the hash key of a gate."""
        return self._hash(b"g") + bytes([number])


def table_key_of(item: Item) -> bytes:
    """Return the table key of the entry in an item."""
    hash_key: bytes = item["h"]["B"]
    sort_key: bytes = item["s"]["B"]
    if hash_key[:1] == b"k":
        return sort_key
    family = hash_key[_HASH_BESIDES_FAMILY:]
    return len(family).to_bytes(2, "big") + family + sort_key[1:]


def key_after_family(prefix: bytes) -> bytes:
    """Return the smallest table key that is greater than all of a family."""
    end = segment.family_range(prefix).end
    assert end is not None  # the length of a family never begins with 0xff
    return end


def family_prefix_at(start: bytes) -> bytes | None:
    """Return the prefix of the family of a table key, which may be a bound of a range; None
    without a family.
    """
    length = int.from_bytes(start[:2], "big", signed=True)
    if length > 0 and len(start) >= 2 + length:
        return start[: 2 + length]
    return None


def _sort_key(bound: bytes) -> bytes:
    """Return the bound of a range as one for a query, truncated to the longest sort key.

    A truncated bound may include an item that is not in the range; the reader drops it.
    """
    return bound[:_LONGEST_SORT_KEY]


def _item_key(hash_key: bytes, sort_key: bytes) -> Item:
    """Return the key of an item as DynamoDB takes it."""
    return {"h": {"B": hash_key}, "s": {"B": sort_key}}


# The list of a segment's families. A family is added before it gets its first key; families without
# entries are purged. Processes that add families also purge, one part of the list after the other:
# for every `PURGE_AFTER` new families they check four times as many. So at most half of the list,
# or some hundred families, have no entries.


PURGE_AFTER = 64  # so many families added by a process, after which it checks a part of the list
# by DynamoDB's clock: by then, transactions that passed a gate before it was raised have ended
SETTLING_SECONDS = 60
FAMILIES_PER_PURGE = 4 * PURGE_AFTER
# Without entries, but listed too recently to be removed: so many raise the gates.
MIN_EMPTY_FAMILIES = PURGE_AFTER // 2
_FAMILIES_KNOWN = 100_000
_PURGE_PATIENCE = 5.0  # seconds for which raising a gate is retried while writes pass it
_log = logging.getLogger("adjunct.key_value")


class _KnownFamilies(NamedTuple):
    """Families that are listed for certain at a term."""

    term: int
    prefixes: set[bytes]


class FamilyList:
    """The list of a segment's families in DynamoDB, and what this process knows of it: families
    listed at one term.
    """

    def __init__(self, calls: TableCalls, layout: SegmentLayout) -> None:
        self._calls = calls
        self._layout = layout
        self._known = _KnownFamilies(0, set())
        # How many families were added since the last purge. It starts at random, so that many
        # processes that add a few each purge as often as one that adds many.
        self._new = random.randrange(PURGE_AFTER)

    async def ensure_listed(self, changes: Sequence[SegmentChange]) -> int:
        """List the families to which these changes may add a key; return the term at which they
        are listed.
        """
        # Used to the end, even if another thread learns a newer term meanwhile.
        known = self._known
        term = known.term
        missing = set()
        for change in changes:
            may_insert = change.value is not None and not isinstance(change.expected, bytes)
            family = family_prefix_at(change.key)
            if may_insert and family and family not in known.prefixes:
                missing.add(family)
        if missing:
            items = ({**self._layout.family(family), "n": {"N": str(term)}} for family in missing)
            added = await self._calls.at_once(
                self._calls.read(
                    partial(self._change_item, "put_item", term, Item=item, ReturnValues="ALL_OLD")
                )
                for item in items
            )
            self._new += sum(answer is not None and "Attributes" not in answer for answer in added)
            if len(known.prefixes) > _FAMILIES_KNOWN:
                known.prefixes.clear()
            known.prefixes.update(missing)
        return term

    def learn(self, term: int) -> None:
        """Remember that a gate has this term. If it is newer, forget which families are listed."""
        if term > self._known.term:
            self._known = _KnownFamilies(term, set())

    async def purge_if_due(self) -> None:
        """Purge a part of the list if enough families were added since the last time.

        Errors are only logged, because they are not of the write that was just applied.
        """
        if self._new < PURGE_AFTER:
            return
        self._new = 0
        try:
            await self.purge()
        except (AdjunctError, KeyError, ValueError) as error:
            _log.warning(
                "%s: families without entries stay in its list for now: %s",
                self._calls.label,
                error,
            )

    async def purge(self) -> None:
        """Remove families without entries from the next part of the list.

        If many of them were listed at the present term or a newer one, so that they can't be
        removed yet, raise all gates to a newer term: then a later purge removes them.
        """
        calls = self._calls
        layout = self._layout
        answer: Any = await calls.read(
            lambda client: client.get_item(
                TableName=calls.name, Key=layout.progress(), ConsistentRead=True
            )
        )
        item = answer.get("Item") or {"n": {"N": "0"}, "a": {"N": "0"}, "p": {"B": b""}}
        # All gates had at least this term at the time `at`, by DynamoDB's clock. The next part
        # begins at `place`.
        term = int(item["n"]["N"])
        at = int(item["a"]["N"])
        place = item["p"]["B"]
        if _time_of(answer) < at + SETTLING_SECONDS:
            return
        stretch = layout.families(KeyRange(place))
        if stretch is None:
            raise ValueError(
                f"item {layout.progress()} has a place outside every family: {place.hex()};"
                " delete it"
            )
        part = await calls.query(stretch, "s, n", FAMILIES_PER_PURGE)
        terms = {item["s"]["B"]: term_of(item) or 0 for item in part["Items"]}
        answers = await calls.at_once(
            calls.query(layout.in_family(family, KeyRange()), "s", 1) for family in terms
        )
        removable = []
        newer_terms = []  # of empty families that can't be removed yet
        for (family, listed_at), entries in zip(terms.items(), answers, strict=True):
            if entries["Items"]:
                continue
            if listed_at < term:
                removable.append(family)
            else:
                newer_terms.append(listed_at)
        await calls.at_once(
            # Does nothing if another process has listed the family at this term or a newer one.
            calls.read(partial(self._change_item, "delete_item", term, Key=layout.family(family)))
            for family in removable
        )
        if len(newer_terms) >= MIN_EMPTY_FAMILIES:
            term = max(newer_terms) + 1
            at = max(await calls.at_once(self._raise_gate(number, term) for number in range(GATES)))
        place = b""
        if part.get("LastEvaluatedKey"):
            place = key_after_family(list(terms)[-1])
        progress = {
            **layout.progress(),
            "n": {"N": str(term)},
            "a": {"N": str(at)},
            "p": {"B": place},
        }
        await calls.read(lambda client: client.put_item(TableName=calls.name, Item=progress))

    async def _raise_gate(self, number: int, term: int) -> int:
        """Make a gate reject writes of terms before `term`; return the time, in seconds, by
        DynamoDB's clock.

        Does not change a gate that has a newer term, or is closed because the table is sealed.
        """
        patience = Patience(_PURGE_PATIENCE)

        def put(client: DynamoDBClient) -> int:
            """Put the gate, unless its condition fails; return the time of the answer."""
            try:
                answer: Any = client.put_item(
                    TableName=self._calls.name,
                    Item={**self._layout.gate(number), "n": {"N": str(term)}},
                    ConditionExpression="attribute_not_exists(h) OR n < :n",
                    ExpressionAttributeValues={":n": {"N": str(term)}},
                )
            except Exception as error:
                if error_code(error) != "ConditionalCheckFailedException":
                    raise
                answer = getattr(error, "response", {})
            return _time_of(answer)

        while True:
            try:
                return await self._calls.read(put)
            except TableUnavailableError:
                if not await patience.wait():
                    raise

    def _change_item(
        self, request: str, term: int, client: DynamoDBClient, **arguments: Any
    ) -> Any:
        """Put or delete the item of a family (`request` names the client's method); return the
        answer.

        None if the family is listed at `term` or a newer one, so that nothing was changed.
        """
        try:
            return getattr(client, request)(
                TableName=self._calls.name,
                ConditionExpression="attribute_not_exists(n) OR n < :n",
                ExpressionAttributeValues={":n": {"N": str(term)}},
                **arguments,
            )
        except Exception as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            return None


def term_of(item: Item) -> int | None:
    """Return the term in the item of a gate or of a listed family; None for a closed gate."""
    if "n" in item:
        return int(item["n"]["N"])
    return None


def _time_of(answer: Mapping[str, Any]) -> int:
    """Return the time of DynamoDB's answer by its own clock, in seconds since 1970."""
    return int(parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp())
