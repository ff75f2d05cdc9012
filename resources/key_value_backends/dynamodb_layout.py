"""Where an entry of a segment lies in its DynamoDB table, and which items a range of table keys is in.

    item                     hash key "h"                      sort key "s"         other attributes
    entry with a family      "f" | partition | family, UTF-8   0x01 | key           "v" version, "d" value
    entry without a family   "k" | partition                   table key            "v" version, "d" value
    a family of the segment  "d" | partition                   prefix of family     "n" term of its listing
    progress of forgetting   "d" | partition                   0x00                 "n" term, "a" when, "p" place
    gate                     "g" | partition | number          0x00                 "n" term; none where it is sealed
    burnt token              "g" | partition | number          0x01                 "t" the latest token

A partition is four bytes, big-endian. A sort key may not be empty, and the key of an entry may. A gate that is not
there has term 0. Families are listed, since DynamoDB can't tell the hash keys that a table has in an order;
below, the list of families says what terms are for, and how a family without entries is removed.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from dagster_adjunct.resources.backends.dynamodb import resolve_table_key
from dagster_adjunct.resources.backends.dynamodb_connection import Connection, error_code, problem_from_boto_error
from dagster_adjunct.resources.errors import (
    AdjunctError,
    KeyValueTableNotFoundError,
    TableUnavailableError,
    TransientError,
)
from dagster_adjunct.resources.key_value.segment import (
    KeyRange,
    Pause,
    ReplyLostError,
    SegmentChange,
    SegmentLimits,
    TableId,
    family_range,
    pause_blocking,
    run_without_loop,
)
from dagster_adjunct.resources.tables.operation import PerLoop, State

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

T = TypeVar("T")

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.3


class Clients:
    """Makes clients, which have a session in common."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._making = threading.Lock()

    def new(self, label: str, threads: int) -> DynamoDBClient:
        """Return a client for so many threads, whose user closes it."""
        with self._making:
            self._connection = self._connection.with_session(label)
            return self._connection.client(label, threads)


class TableCalls(ABC):
    """Calls for all segments of one table in this process. `pause` waits."""

    pause: Pause

    def __init__(self, table: TableId) -> None:
        self.table = table
        self.label = table_label(table)

    @abstractmethod
    async def call(self, do: Callable[[DynamoDBClient], T]) -> T:
        """Return what `do` returns, called with a client. Errors are boto3's: `meaning` reads them."""

    @abstractmethod
    async def together(self, asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Return what each returns, in their order; they are under way at the same time."""

    @abstractmethod
    async def close(self) -> None:
        """Give back what is open; the next call opens it again."""

    async def read(self, do: Callable[[DynamoDBClient], T]) -> T:
        """Call what changes nothing that anybody sees, or changes it to the same again: it may always be repeated."""
        try:
            return await self.call(do)
        except AdjunctError:
            raise
        except Exception as error:
            raise self.meaning(error, sent=False) from error

    def meaning(self, error: Exception, *, sent: bool) -> Exception:
        """Return the error to raise: `sent` says that the request may have had an effect, if no answer came."""
        return translate_dynamodb_error(error, self.table, sent=sent)


class LoopCalls(TableCalls):
    """Calls from event loops: each of them has a client, and threads that wait."""

    pause = staticmethod(asyncio.sleep)

    def __init__(self, table: TableId, clients: Clients, threads: int) -> None:
        super().__init__(table)
        self._open: PerLoop[_ClientThreads] = PerLoop(
            partial(_ClientThreads, clients, self.label, threads), _ClientThreads.end
        )

    async def call(self, do: Callable[[DynamoDBClient], T]) -> T:
        mine = self._open.here()
        return await asyncio.get_running_loop().run_in_executor(mine.threads, mine.run, do)

    async def together(self, asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        return await asyncio.gather(*asked)

    async def close(self) -> None:
        """Close the running event loop's client, once its requests have ended."""
        mine = self._open.take()
        if mine is not None:
            await asyncio.to_thread(mine.end, wait=True)


class ThreadCalls(TableCalls):
    """Calls that wait in the thread of whoever asks, and never suspend: all threads of a process share a client."""

    pause = staticmethod(pause_blocking)

    def __init__(self, table: TableId, clients: Clients, threads: int) -> None:
        super().__init__(table)
        self._new = partial(_ClientThreads, clients, self.label, threads)
        # And the process that opened it: a child leaves its parent's alone.
        self._mine: tuple[int, _ClientThreads] | None = None
        self._opening = threading.Lock()

    async def call(self, do: Callable[[DynamoDBClient], T]) -> T:
        mine = self._here()
        with mine.places:
            return mine.run(do)

    async def together(self, asked: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        requests = list(asked)
        return [await requests[0]] if len(requests) == 1 else list(self._here().threads.map(run_without_loop, requests))

    async def close(self) -> None:
        """Close the client, once the requests that several threads make for one caller have ended."""
        with self._opening:
            mine, self._mine = self._mine, None
        if mine is not None and mine[0] == os.getpid():
            mine[1].end(wait=True)

    def _here(self) -> _ClientThreads:
        mine = self._mine
        if mine is None or mine[0] != os.getpid():
            with self._opening:
                if self._mine is None or self._mine[0] != os.getpid():
                    self._mine = os.getpid(), self._new()
                mine = self._mine
        return mine[1]


def translate_dynamodb_error(error: Exception, table: TableId, *, sent: bool) -> Exception:
    """Return what an error of boto3 means to whoever asked for a key-value table."""
    if error_code(error) == "ResourceNotFoundException":
        return KeyValueTableNotFoundError(
            f"{table_label(table)} is not there: it was deleted, or the backend looks into another region or account.",
            "Open it again; if it should be there, look at the backend's region and credentials.",
            scope=table.scope,
            table=table.name,
        )
    problem = problem_from_boto_error(error, table_label(table), sent=sent)
    assert isinstance(problem.error, AdjunctError)
    if sent and problem.state is State.UNKNOWN:
        return ReplyLostError(problem.error.problem, problem.error.next_step)
    return problem.error


def table_label(table: TableId) -> str:
    return f"key-value table {table.scope}/{table.name} in DynamoDB"


def pause_before(turn: int) -> float:
    """Return the seconds to wait before a request is sent again, for the `turn`th time, from 1."""
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * float(2 ** min(turn, 10))) * random.random()


class Patience:
    """Seconds in which something is tried again, with growing pauses, from the end of its first try on."""

    def __init__(self, seconds: float, pause: Pause) -> None:
        self._seconds = seconds
        self._until: float | None = None
        self._pause = pause
        self._turn = 0

    async def wait(self) -> bool:
        """Pause before the next try; False says, at once, that the time is over."""
        now = time.monotonic()
        if self._until is None:  # the first try may have had to connect, and to list families
            self._until = now + self._seconds
        if now >= self._until:
            return False
        self._turn += 1
        await self._pause(pause_before(self._turn))
        return True


class _ClientThreads:
    """What one event loop has open, or a process without one."""

    def __init__(self, clients: Clients, label: str, threads: int) -> None:
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="dynamodb-key-values")
        self.places = threading.BoundedSemaphore(threads)
        self._connect = partial(clients.new, label, threads)
        self._opening = threading.Lock()
        self._client: DynamoDBClient | None = None

    def run(self, do: Callable[[DynamoDBClient], T]) -> T:
        client = self._client
        if client is None:
            with self._opening:
                client = self._client = self._client or self._connect()
        return do(client)

    def end(self, *, wait: bool = False) -> None:
        self.threads.shutdown(wait=wait)
        client, self._client = self._client, None
        if client is not None:
            client.close()


GATES = 64  # of a partition: two writes at a time that check the same one may hinder each other
KEY_SCHEMA = {"h": "B", "s": "B"}
_LONGEST_SORT_KEY = 1024
_LONGEST_KEY = _LONGEST_SORT_KEY - 2  # without a family the sort key has two bytes of length
_LARGEST_ITEM = 400 * 1024
_HASH_BESIDES_FAMILY = 5
_NAMES_AND_VERSION = len("hsvd") + 16
_LARGEST_KEYS = _HASH_BESIDES_FAMILY + (_LONGEST_SORT_KEY - 2) + _LONGEST_SORT_KEY

LIMITS = SegmentLimits(
    table_key=_LONGEST_SORT_KEY + _LONGEST_KEY,
    family_prefix=_LONGEST_SORT_KEY,  # it is the sort key of the list of families
    key=_LONGEST_KEY,
    value=_LARGEST_ITEM - _LARGEST_KEYS - _NAMES_AND_VERSION,
    changes=99,  # of the 100 actions of a transaction one checks the gate
    request=4_000_000,  # of 4 MiB: names, versions and hash keys count too
)

_FIRST_FAMILY, _AFTER_FAMILIES = b"\0\1", b"\x80\0"
_EMPTY_KEY = b"\0\0"
_ABOVE_ALL = b"\xff" * _LONGEST_SORT_KEY

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class KeyStretch:
    """Items of one hash key in the order of their sort keys, `lowest` and `highest` among them.

    A table key is `prefix` and what follows the first `cut` bytes of the sort key.
    """

    hash_key: bytes
    lowest: bytes
    highest: bytes
    prefix: bytes = b""
    cut: int = 0

    def table_key(self, sort_key: bytes) -> bytes:
        return self.prefix + sort_key[self.cut :]


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """The items of one partition in the DynamoDB table `table`."""

    table: str
    partition: int

    def entry(self, table_key: bytes) -> Item:
        """Return the key of the item of an entry."""
        length = int.from_bytes(table_key[:2], "big", signed=True)
        if length <= 0:
            return _item_key(self._hash(b"k"), table_key)
        return _item_key(self._hash(b"f") + table_key[2 : 2 + length], b"\1" + table_key[2 + length :])

    def family(self, prefix: bytes) -> Item:
        """Return the item by which a family is listed."""
        return _item_key(self._hash(b"d"), prefix)

    def progress(self) -> Item:
        """Return the item that says how far those families are forgotten that have no entries."""
        return _item_key(self._hash(b"d"), b"\0")

    def gate(self, number: int) -> Item:
        return _item_key(self._gate_hash(number), b"\0")

    def burnt(self, number: int) -> Item:
        return _item_key(self._gate_hash(number), b"\1")

    def in_family(self, prefix: bytes, within: KeyRange) -> KeyStretch:
        """Return the items of a family that are in a range, which has a key of the family in it."""
        lowest = within.start[len(prefix) :] if within.start.startswith(prefix) else b""
        end = within.end
        highest = end[len(prefix) :] if end is not None and end.startswith(prefix) else _ABOVE_ALL
        hash_key = self._hash(b"f") + prefix[2:]
        return KeyStretch(hash_key, _sort_key(b"\1" + lowest), _sort_key(b"\1" + highest), prefix, 1)

    def before_families(self, within: KeyRange) -> KeyStretch | None:
        """Return where the empty key without a family lies, which comes before all families, if the range has it."""
        if within.start > _EMPTY_KEY or (within.end is not None and within.end <= _EMPTY_KEY):
            return None
        return KeyStretch(self._hash(b"k"), _EMPTY_KEY, _EMPTY_KEY)

    def families(self, within: KeyRange) -> KeyStretch | None:
        """Return the list of the families that have keys in a range."""
        first = family_prefix_at(within.start) or within.start
        lowest = max(first, _FIRST_FAMILY)
        highest = _AFTER_FAMILIES if within.end is None else min(within.end, _AFTER_FAMILIES)
        return KeyStretch(self._hash(b"d"), _sort_key(lowest), _sort_key(highest)) if lowest < highest else None

    def after_families(self, within: KeyRange) -> KeyStretch | None:
        """Return the items without a family that are in a range, but for the empty key."""
        lowest = max(within.start, _AFTER_FAMILIES)
        highest = _ABOVE_ALL if within.end is None else within.end
        return KeyStretch(self._hash(b"k"), _sort_key(lowest), _sort_key(highest)) if lowest < highest else None

    def _hash(self, kind: bytes) -> bytes:
        return kind + self.partition.to_bytes(4, "big")

    def _gate_hash(self, number: int) -> bytes:
        return self._hash(b"g") + bytes([number])


def table_key_of(item: Item) -> bytes:
    """Return the table key of an entry by its item."""
    hash_key: bytes = item["h"]["B"]
    sort_key: bytes = item["s"]["B"]
    if hash_key[:1] == b"k":
        return sort_key
    family = hash_key[_HASH_BESIDES_FAMILY:]
    return len(family).to_bytes(2, "big") + family + sort_key[1:]


def key_after_family(prefix: bytes) -> bytes:
    """Return the first table key that may come after those of a family."""
    end = family_range(prefix).end
    assert end is not None  # no length begins with 0xff
    return end


def family_prefix_at(start: bytes) -> bytes | None:
    """Return the prefix of the family that a key or bound lies in; None where it is in none."""
    length = int.from_bytes(start[:2], "big", signed=True)
    return start[: 2 + length] if length > 0 and len(start) >= 2 + length else None


def _sort_key(bound: bytes) -> bytes:
    """Return what a bound may be in a query. One that is cut lets in a neighbour, whom the reader drops."""
    return bound[:_LONGEST_SORT_KEY]


def _item_key(hash_key: bytes, sort_key: bytes) -> Item:
    return {"h": {"B": hash_key}, "s": {"B": sort_key}}


# The list of a segment's families: a family is in it before it gets its first key, and leaves it when it has none.
#
# Who writes knows by heart which families are listed, so that an ordinary put costs no request for it. What a process
# knows by heart can't be called back; so it holds for a **term**, a number that grows:
#
# - A family is listed at the term that its writer knows: the item's number becomes that one, unless it is higher.
# - A write passes its gate only where the gate's term is at most the one at which its families were listed. Who is
#   refused so learns the newer term, forgets what it knew by heart, and lists its families again.
# - To forget families at term t, all gates are first moved up to t, and given time (`SETTLING`). Whoever sees a family
#   without an entry after that may delete its place in the list, under the condition that its number is below t.
#
# No entry is in a family that is not listed: a write of term k has seen its family listed at k or higher. That place
# can be deleted only at a term t > k, by somebody who looked into the family when all gates were at t. Then that
# write was either applied before, and its entry was seen or was gone; or it is applied never. The condition is
# checked when the place is deleted, so it does not matter how late the request comes, nor how many forget at a time;
# and a place whose number is higher belongs to those who write at a newer term. A change of a key that must have a
# version needs no listing: its family has an entry, whose writer has listed it.
#
# The time is needed since a Query, unlike a PutItem, does not wait for a transaction that is just being committed: the
# gate may be free again a moment before the entry is seen.


PURGE_AFTER = 64  # families that are new to the list, of a process; then it looks whether some can leave it
_FAMILIES_KNOWN = 100_000


@dataclass(frozen=True, slots=True)
class _Known:
    """What this process knows by heart: families that were listed at this term."""

    term: int
    families: set[bytes] = field(default_factory=set)


class Families:
    """The families of one segment, as this process knows them."""

    def __init__(self, calls: TableCalls, layout: SegmentLayout) -> None:
        self._calls = calls
        self._layout = layout
        self._known = _Known(0)
        self._new = random.randrange(PURGE_AFTER)  # many processes that list a few look as often as one that lists many

    async def listed(self, changes: Sequence[SegmentChange]) -> int:
        """See to it that families are listed before they get a key; return the term at which they are."""
        known = self._known  # another thread may learn of a newer term meanwhile: what is listed here is of this one
        missing = {
            family
            for change in changes
            if change.value is not None
            and not isinstance(change.expected, bytes)
            and (family := family_prefix_at(change.key))
        } - known.families
        if missing:
            places = (partial(_list, self._layout.table, self._layout.family(family), known.term) for family in missing)
            self._new += sum(await self._calls.together(map(self._calls.read, places)))
            if len(known.families) > _FAMILIES_KNOWN:
                known.families.clear()
            known.families.update(missing)
        return known.term

    def learn(self, term: int) -> None:
        """Hear of a gate that has this term."""
        if term > self._known.term:
            self._known = _Known(term)

    def look_is_due(self) -> bool:
        """Whether so many families were added that some may be forgotten; it is said once."""
        if self._new < PURGE_AFTER:
            return False
        self._new = 0
        return True


def _list(table: str, place: Item, term: int, client: DynamoDBClient) -> bool:
    """List a family at a term or above; return whether it was not in the list."""
    try:
        answer = client.put_item(
            TableName=table,
            Item={**place, "n": {"N": str(term)}},
            ConditionExpression="attribute_not_exists(n) OR n < :n",
            ExpressionAttributeValues={":n": {"N": str(term)}},
            ReturnValues="ALL_OLD",
        )
    except Exception as error:
        if error_code(error) == "ConditionalCheckFailedException":
            return False
        raise
    return "Attributes" not in answer


_LONGEST_NAME = 255
_CREATING_SECONDS = 10.0  # for a server that is at a loss; then up to a minute for the table
_SEALING_SECONDS = 60.0
_DELETING_SECONDS = 300.0


def physical_name(prefix: str, table: TableId) -> str:
    """Return the name of a table in DynamoDB: the incarnation makes it its own, the rest is for people, and cut."""
    room = _LONGEST_NAME - len(prefix) - len(table.incarnation) - 2
    scope = table.scope[: max(room // 2, room - len(table.name))]
    return f"{prefix}{scope}-{table.name[: room - len(scope)]}-{table.incarnation}"


class PhysicalTables:
    """Tables by their physical names, reached by these clients, so many requests at a time."""

    def __init__(self, clients: Clients, threads: int) -> None:
        self._clients = clients
        self._threads = threads

    def create(self, table: TableId, name: str) -> None:
        """Make a table, paid by request, and wait until it takes requests."""
        tags = {"adjunct:scope": table.scope, "adjunct:table": table.name}
        with self._client(table) as client:

            def make() -> None:
                try:
                    resolve_table_key(client, table_label(table), name, KEY_SCHEMA, create=True, tags=tags)
                except AdjunctError:
                    raise
                except Exception as error:
                    raise translate_dynamodb_error(error, table, sent=False) from error

            _retrying(_CREATING_SECONDS)(make)

    def seal(self, table: TableId, name: str, partitions: int) -> None:
        """Shut all gates. A gate that a write is just passing is shut after it, and no write passes it then."""
        gates = [
            SegmentLayout(name, partition).gate(number) for partition in range(partitions) for number in range(GATES)
        ]
        with self._client(table) as client, ThreadPoolExecutor(self._threads) as threads:

            def shut(gate: dict[str, Any]) -> None:
                try:
                    client.put_item(TableName=name, Item=gate)
                except Exception as error:
                    raise translate_dynamodb_error(error, table, sent=True) from error

            def shut_for_certain(gate: dict[str, Any]) -> None:
                _retrying(_SEALING_SECONDS)(shut, gate)

            try:
                list(threads.map(shut_for_certain, gates))
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def delete(self, table: TableId, name: str) -> None:
        """Delete a table and wait until it is gone: while it is being deleted it may still take writes."""
        with self._client(table) as client:

            def see_it_gone() -> None:
                try:
                    client.delete_table(TableName=name)
                except Exception as error:
                    if error_code(error) == "ResourceNotFoundException":
                        return
                    if error_code(error) != "ResourceInUseException":  # it is being made, or deleted
                        raise translate_dynamodb_error(error, table, sent=False) from error
                raise TableUnavailableError(
                    f"{table_label(table)} is not deleted after {_DELETING_SECONDS:.0f} s.",
                    f"Try again; look at the table {name} in AWS.",
                    table=table_label(table),
                )

            _retrying(_DELETING_SECONDS, longest_pause=2.0)(see_it_gone)

    @contextmanager
    def _client(self, table: TableId) -> Iterator[DynamoDBClient]:
        client = self._clients.new(table_label(table), self._threads)
        try:
            yield client
        finally:
            client.close()


def _retrying(seconds: float, longest_pause: float = 0.5) -> Retrying:
    return Retrying(
        retry=retry_if_exception(_may_pass),
        wait=wait_random_exponential(multiplier=0.01, max=longest_pause),
        stop=stop_after_delay(seconds),
        reraise=True,
    )


def _may_pass(error: BaseException) -> bool:
    """Whether a server that is there may answer otherwise in a moment."""
    from botocore.exceptions import ConnectTimeoutError, EndpointConnectionError

    unreached = isinstance(error.__cause__, EndpointConnectionError | ConnectTimeoutError)
    return isinstance(error, TransientError) and not unreached
