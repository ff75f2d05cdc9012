"""The requests of one DynamoDB table, as a thread sends them: in batches, or one entry after another.

What goes wrong with entries is returned, never raised. A throttled batch is not sent again here: its unprocessed
entries are told as FAILED, and whoever retries waits and sends them again; only a get asks again for what it did not
get, a few times, waiting longer each time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources.backends import dynamodb_expressions as expressions
from dagster_adjunct.resources.backends.dynamodb_connection import code_of, problem_of, throttled
from dagster_adjunct.resources.backends.dynamodb_expressions import NO_GUARD, Guard, Request
from dagster_adjunct.resources.backends.dynamodb_items import (
    DELETED,
    EncodedChanges,
    ItemCodec,
    KeyItem,
    begun,
    comes_to_the_same,
)
from dagster_adjunct.resources.backends.dynamodb_values import AttributeValue, Item
from dagster_adjunct.resources.errors import AdjunctError, SchemaMismatchError, TableUnavailableError
from dagster_adjunct.resources.tables.operation import OperationKind
from dagster_adjunct.resources.tables.outcomes import Problem, State
from dagster_adjunct.resources.tables.record_not_found import record_not_found

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

GETS_AT_ONCE, WRITES_AT_ONCE = 100, 25
_ASKED_AGAIN = 5
_FIRST_PAUSE = 0.05
_TURNS = 10  # between "there is one" and "there is none", while others delete and begin the same record
_LONGEST_EXPRESSION = 4096

Problems = dict[int, Problem]


class PlacedEntry(NamedTuple):
    """One entry of an operation, with its place in it."""

    place: int
    key: Any
    value: Any = None
    default: Any = None
    guard: Callable[[], Guard] | None = None


class _Answer(NamedTuple):
    """Whether a write's condition failed, and the item that it met, {} where there was none or nobody asked."""

    failed: bool
    item: Item

    @property
    def present(self) -> bool:
        return bool(self.item) and DELETED not in self.item


@dataclass(frozen=True, slots=True)
class TableRequests:
    """Sends requests to one table.

    `to_key` makes a key's attributes. `horizon`: seconds after which DynamoDB may forget tombstones.
    """

    client: DynamoDBClient
    label: str
    table: str
    codec: ItemCodec
    to_key: Callable[[Any], KeyItem]
    consistent: bool
    horizon: float | None = None
    pause: Callable[[float], object] = time.sleep
    clock: Callable[[], float] = time.time

    def get(self, entries: Sequence[PlacedEntry], records: list[Any]) -> Problems:
        """Put the records of up to 100 entries into `records`, at their places."""
        problems: Problems = {}
        wanted: dict[Any, list[int]] = {}
        asked: list[KeyItem] = []
        for entry in entries:
            try:
                key = self.to_key(entry.key)
            except AdjunctError as error:
                problems[entry.place] = Problem(State.REFUSED, error)
                continue
            places = wanted.setdefault(_identity(key, key), [])
            if not places:
                asked.append(key)
            places.append(entry.place)
        for turn in range(_ASKED_AGAIN + 1):
            if not asked:
                return problems
            if turn:
                self.pause(_FIRST_PAUSE * 2 ** (turn - 1) * (0.5 + random.random() / 2))
            try:
                answer = self.client.batch_get_item(
                    RequestItems={self.table: {"Keys": asked, "ConsistentRead": self.consistent}}
                )
            except Exception as error:  # noqa: BLE001 - it becomes the outcome
                # A get that got no answer had no effect either.
                problem = problem_of(error, self.label, sent=False)
                return problems | {place: problem for key in asked for place in wanted[_identity(key, key)]}
            for item in answer["Responses"].get(self.table, []):
                self._read(item, wanted, records, problems)
            asked = list(answer.get("UnprocessedKeys", {}).get(self.table, {"Keys": []})["Keys"])  # type: ignore[arg-type]
        left = throttled(self.label, f"{len(asked)} keys unprocessed")
        return problems | {place: left for key in asked for place in wanted[_identity(key, key)]}

    def _read(self, item: Any, wanted: Mapping[Any, Sequence[int]], records: list[Any], problems: Problems) -> None:
        places = wanted[_identity(item, self.codec.key)]
        try:
            for place in places:
                records[place] = self.codec.record(item)
        except AdjunctError as error:
            problems.update(dict.fromkeys(places, Problem(State.REFUSED, error)))

    def write_batch(self, kind: OperationKind, entries: Sequence[PlacedEntry]) -> Problems:
        """Put or delete up to 25 entries, no key twice among them, without conditions."""
        problems: Problems = {}
        places: list[int] = []
        requests: list[Any] = []
        for entry in entries:
            try:
                key = self.to_key(entry.key)
                if kind is OperationKind.PUT:
                    requests.append({"PutRequest": {"Item": self.codec.item(key, entry.value)}})
                else:
                    requests.append({"DeleteRequest": {"Key": key}})
                places.append(entry.place)
            except AdjunctError as error:
                problems[entry.place] = Problem(State.REFUSED, error)
        self._send_batch(places, requests, problems)
        return problems

    def _send_batch(self, places: list[int], requests: list[Any], problems: Problems) -> None:
        if not requests:
            return
        try:
            answer = self.client.batch_write_item(RequestItems={self.table: requests})
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            problem = problem_of(error, self.label)
            if problem.state is State.REFUSED and len(requests) > 1 and code_of(error) == "ValidationException":
                # One bad entry refuses a batch: by halves, until it stands alone.
                half = len(requests) // 2
                self._send_batch(places[:half], requests[:half], problems)
                self._send_batch(places[half:], requests[half:], problems)
            else:
                problems.update(dict.fromkeys(places, problem))
            return
        unprocessed = answer.get("UnprocessedItems", {}).get(self.table, [])
        if unprocessed:
            names = tuple(self.codec.key)
            left = {_identity(_key_in(request), names) for request in unprocessed}
            problem = throttled(self.label, f"{len(unprocessed)} of {len(requests)} items unprocessed")
            for place, request in zip(places, requests, strict=True):
                if _identity(_key_in(request), names) in left:
                    problems[place] = problem

    def write_in_sequence(self, kind: OperationKind, entries: Sequence[PlacedEntry], problems: Problems) -> int:
        """Do the entries of one key one after the other; return how many defaults that put.

        After one that may pass when it is sent again, the others wait for it: FAILED, nothing of them was sent.
        """
        put = 0
        for done, entry in enumerate(entries):
            try:
                began, problem = self._write(kind, entry)
            except AdjunctError as error:
                began, problem = False, Problem(State.REFUSED, error)
            except Exception as error:  # noqa: BLE001 - it becomes the outcome
                began, problem = False, problem_of(error, self.label)
            put += began
            if problem is not None:
                problems[entry.place] = problem
                if problem.may_pass:
                    left = Problem(State.FAILED, problem.error, problem.retry_after)
                    problems.update({later.place: left for later in entries[done + 1 :]})
                    break
        return put

    def _write(self, kind: OperationKind, entry: PlacedEntry) -> tuple[bool, Problem | None]:
        codec = self.codec
        key = self.to_key(entry.key)
        guard = NO_GUARD if entry.guard is None else entry.guard()
        if kind is OperationKind.UPDATE:
            return self._update(key, entry, guard)
        if kind is OperationKind.PUT_IF_ABSENT:
            answer = self._send(expressions.begin(key, codec.columns_of(key, entry.value), guard))
            return False, Problem(State.SKIPPED) if answer.failed else None
        left = expressions.tombstone(self.clock(), self.horizon) if kind is OperationKind.DELETE else {}
        if codec.names is None:
            # No marks of sources are here to keep: they need declared columns.
            whole = {**key, **left} if left else codec.item(key, entry.value)
            request = expressions.put_whole(whole, guard)
        elif left:
            request = expressions.tombstone_columns(key, left, codec.names, guard)
        else:
            request = expressions.put_columns(key, codec.columns_of(key, entry.value), codec.names, guard)
        return False, self._skipped(self._send(request), guard)

    def _update(self, key: KeyItem, entry: PlacedEntry, guard: Guard) -> tuple[bool, Problem | None]:
        changes = self.codec.changes(key, entry.value)
        default = None if entry.default is None else self.codec.columns_of(key, entry.default)
        if default is not None and comes_to_the_same(default, changes):
            answer = self._send(expressions.update_or_begin(key, changes, guard))
            if answer.failed and guard.holds(answer.item):
                self.codec.check_sums(changes, answer.item)
            if answer.failed:
                return False, self._add_late(key, changes, guard, answer)
            return not answer.present, None
        met: Item = {}
        for _ in range(_TURNS):
            answer = self._send(expressions.update(key, changes, guard, met))
            if not answer.failed:
                return False, None
            if not guard.holds(answer.item):
                return False, self._add_late(key, changes, guard, answer)
            met = answer.item
            for name in changes.merge:
                if "M" not in met.get(name, {"M": {}}):
                    raise self._no_members(key, name, met)
            self.codec.check_sums(changes, met)
            if not answer.present and default is None:
                return False, Problem(State.MISSING, record_not_found([entry.key], self.label))
            if not answer.present and default is not None:
                columns = begun(self.codec, default, changes)
                self.codec.check_size({**columns, **key})
                answer = self._send(expressions.begin(key, columns, guard))
                if not answer.failed:
                    return True, None
                if not guard.holds(answer.item):
                    return False, self._add_late(key, changes, guard, answer)
        return False, self._contended(key)

    def _add_late(self, key: KeyItem, changes: EncodedChanges, guard: Guard, answer: _Answer) -> Problem | None:
        """Do what an update that did not pass adds and appends, if it is late and the record is there.

        Where there is none, its mark is kept: nor does it change anything when it comes again and the record has begun.
        """
        late, of_source = changes.late, Guard(source=guard.source, position=guard.position)
        adds_late = guard.position is not None and guard.time is not None and (late.add or late.append)
        if adds_late and not answer.present and of_source.holds(answer.item):
            answer = self._send(expressions.pass_over(key, of_source))
            if not answer.failed:
                return Problem(State.SKIPPED)
        if adds_late and answer.present and of_source.holds(answer.item):
            answer = self._send(expressions.update(key, late, of_source, {}))
            if not answer.failed:
                return None
            if answer.present and of_source.holds(answer.item):
                self.codec.check_sums(late, answer.item)  # what it adds is all that can have been refused
        return self._skipped(answer, guard)

    def _skipped(self, answer: _Answer, guard: Guard) -> Problem | None:
        if not answer.failed:
            return None
        guard.holds(answer.item)  # says where times can't be compared
        return Problem(State.SKIPPED)

    def _send(self, request: Request) -> _Answer:
        words = max(len(request.get(part, "")) for part in ("UpdateExpression", "ConditionExpression"))
        if words > _LONGEST_EXPRESSION:
            raise SchemaMismatchError(
                f"{self.label}: a write names so many columns that its expression has {words:,} characters; DynamoDB "
                f"takes {_LONGEST_EXPRESSION:,}.",
                "Put what belongs together into one column of type json, or write fewer columns at once.",
                table=self.label,
            )
        send: Any = self.client.put_item if "Item" in request else self.client.update_item
        try:
            answer = send(TableName=self.table, **request)
        except Exception as error:
            if code_of(error) != "ConditionalCheckFailedException":
                raise
            return _Answer(True, getattr(error, "response", {}).get("Item") or {})
        return _Answer(False, answer.get("Attributes") or {})

    def _no_members(self, key: KeyItem, name: str, item: Item) -> SchemaMismatchError:
        return SchemaMismatchError(
            f"{self.label}: an update adds members to {name!r} of {key}, which is no map but {item[name]}.",
            "Set the column instead.",
            column=name,
        )

    def _contended(self, key: KeyItem) -> Problem:
        error = TableUnavailableError(
            f"{self.label}: the record of {key} was changed by others {_TURNS} times while it was updated.",
            "It is tried again; find out who deletes and begins it.",
            table=self.label,
        )
        return Problem(State.FAILED, error)


def _key_in(request: Any) -> Item:
    item: Item = request["PutRequest"]["Item"] if "PutRequest" in request else request["DeleteRequest"]["Key"]
    return item


def _identity(item: Item, names: Iterable[str]) -> Any:
    """What is equal for keys that DynamoDB takes for one: a number may be written in several ways."""
    parts = [_part(item[name]) for name in names]
    return parts[0] if len(parts) == 1 else tuple(parts)


def _part(stored: AttributeValue) -> Any:
    text = stored.get("S")
    if text is not None:
        return text
    return Decimal(stored["N"]) if "N" in stored else stored["B"]
