"""Builds and sends the requests of one DynamoDB table, with blocking calls: in batches, or one
entry after another.

Problems of entries are returned, never raised. If DynamoDB throttles a batch, unprocessed puts and
deletes are FAILED, and the caller retries them; unprocessed gets are first requested again a few
times, with growing pauses.

With conditions, an item has attributes besides a record's columns:

    adjunct_time, adjunct_tie    the time of the newest message applied (`newest_by`), and its order
                                 among equal ones
    adjunct_at:SOURCE            the position of the last message applied from a source
                                 (`idempotent`)
    adjunct_deleted              when the record was deleted, in seconds: the item is a tombstone
    adjunct_expires              when DynamoDB may remove the tombstone, in seconds (its
                                 time-to-live attribute)

Every write is one UpdateItem or PutItem whose ConditionExpression contains all conditions.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

from dagster_adjunct.resources.errors import (
    AdjunctError,
    RunLeaseLostError,
    SchemaMismatchError,
    TableUnavailableError,
)
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends.columns import OWN_PREFIX
from dagster_adjunct.resources.table_backends.dynamodb_bookkeeping import (
    FAILED_CONDITION,
    FencedWrites,
    Reason,
    problem_from_reason,
)
from dagster_adjunct.resources.table_backends.dynamodb_connection import (
    checked_sends,
    error_code,
    problem_from_boto_error,
    throttled_problem,
)
from dagster_adjunct.resources.table_backends.dynamodb_items import (
    DELETED,
    AttributeValue,
    EncodedChanges,
    Item,
    ItemCodec,
    KeyItem,
    begin_record,
    change_inside,
    is_default_redundant,
    item_bytes,
)
from dagster_adjunct.resources.table_backends.nested_values import InnerName
from dagster_adjunct.resources.table_backends.write_plan import Entry
from dagster_adjunct.resources.tables.functions import is_retryable, record_not_found_error
from dagster_adjunct.resources.tables.operation import (
    Entries,
    Operation,
    OperationKind,
    Problem,
    State,
)

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient


TIME = f"{OWN_PREFIX}time"
TIE = f"{OWN_PREFIX}tie"
EXPIRES = f"{OWN_PREFIX}expires"
_NO_LONGER_DELETED = (DELETED, EXPIRES)

Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Guard:
    """What the conditions of one entry compare: its time and tie for `newest_by`, its source and
    position.

    `column` is the column `newest_by`. Without that `time` is None; without `idempotent`,
    `position` is None.
    """

    column: str = ""
    time: AttributeValue | None = None
    tie: str = ""
    source: str = ""
    position: str | None = None

    @property
    def attributes(self) -> Item:
        """The attributes that applying the entry stores in the record's item."""
        attributes: Item = {}
        if self.time is not None:
            attributes |= {TIME: self.time, TIE: {"S": self.tie}}
        if self.position is not None:
            attributes[_mark_attribute(self.source)] = {"S": self.position}
        return attributes

    def holds(self, item: Item) -> bool:
        """Whether the conditions hold for this item ({}: there is none), as DynamoDB evaluates
        `_Expression._guarded`.

        Raises SchemaMismatchError if the times of the item and the entry can't be compared.
        """
        if self.position is not None:
            applied = item.get(_mark_attribute(self.source))
            if applied is not None and self.position <= applied["S"]:
                return False
        if self.time is None:
            return True
        # Without the time of a message, the record's own counts, as older than any message of the
        # same time.
        known = item.get(TIME) or item.get(self.column)
        if known is None:
            return True
        tie = ""
        if TIME in item:
            tie = item[TIE]["S"]
        ((tag, value),) = self.time.items()
        if tag not in known:
            raise SchemaMismatchError(
                f"the times of {self.column!r} can't be compared: the record has {known}, the write"
                f" has {self.time}.",
                "Declare the column's type, so that all times have the same one.",
                column=self.column,
            )
        comparable: type = Decimal if tag == "N" else str
        return bool((comparable(value), self.tie) >= (comparable(known[tag]), tie))


def guard_of(operation: Operation[Any], entry: Entry) -> Guard:
    """Return what the conditions of the operation compare for this entry."""
    conditions = operation.conditions
    if not conditions:
        return NO_GUARD
    assert operation.entries.marks is not None  # conditions require marks
    mark = operation.entries.marks[entry.place]
    position = None
    if conditions.idempotent:
        position = mark.position
    if conditions.newest_by is None:
        return Guard(source=mark.source, position=position)
    return Guard(conditions.newest_by, entry.time, mark.tie, mark.source, position)


NO_GUARD = Guard()
NOTHING: Mapping[str, AttributeValue] = {}
NO_CHANGES = EncodedChanges()


@dataclass(slots=True)
class _InsideParts:
    """What changes values inside maps: parts of the SET and REMOVE clauses, and conditions."""

    sets: list[str] = field(default_factory=list)
    removes: list[str] = field(default_factory=list)
    clauses: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Expression:
    """Builds the request of one write and its conditions, with a short placeholder for each name
    and value.
    """

    key: KeyItem
    guard: Guard
    names: dict[str, str] = field(default_factory=dict)  # by placeholder
    values: dict[str, AttributeValue] = field(default_factory=dict)  # by placeholder
    _placeholders: dict[str, str] = field(default_factory=dict)  # by name

    def name(self, name: str) -> str:
        """Return the placeholder of a name, the same each time."""
        if name not in self._placeholders:
            short = self._placeholders[name] = f"#{len(self._placeholders):x}"
            self.names[short] = name
        return self._placeholders[name]

    def value(self, value: AttributeValue) -> str:
        """Return a new placeholder for a value."""
        short = f":{len(self.values):x}"
        self.values[short] = value
        return short

    def present(self) -> str:
        """The condition that the key has a record."""
        return (
            f"attribute_exists({self.name(next(iter(self.key)))}) AND"
            f" attribute_not_exists({self.name(DELETED)})"
        )

    def absent(self) -> str:
        """The condition that the key has no record: no item, or a tombstone."""
        return (
            f"(attribute_not_exists({self.name(next(iter(self.key)))}) OR"
            f" attribute_exists({self.name(DELETED)}))"
        )

    def put(self, item: Item) -> Request:
        """Return the PutItem that replaces the whole item by `item` and the guard's attributes."""
        return self._conditional({"Item": {**item, **self.guard.attributes}}, [])

    def update(
        self,
        clauses: Iterable[str],
        columns: Item,
        removes: Iterable[str],
        changes: EncodedChanges = NO_CHANGES,
        merged: Mapping[str, AttributeValue] = NOTHING,
        inside: _InsideParts | None = None,
    ) -> Request:
        """Return the UpdateItem that changes an item if `clauses` and the guard's conditions hold.

        It sets `columns`, the guard's attributes and members of maps (`merged`, by path), removes
        `removes`, and adds and appends what `changes` says. `inside` changes values inside maps.
        """
        inside = inside or _InsideParts()
        sets = [
            f"{self.name(name)} = {self.value(one)}"
            for name, one in {**columns, **self.guard.attributes}.items()
        ]
        sets += [f"{path} = {self.value(value)}" for path, value in merged.items()]
        sets += inside.sets
        if changes.append:
            empty = self.value({"L": []})
            for name, values in changes.append.items():
                short = self.name(name)
                sets.append(
                    f"{short} = list_append(if_not_exists({short}, {empty}), {self.value(values)})"
                )
        adds = [f"{self.name(name)} {self.value(number)}" for name, number in changes.add.items()]
        # Conditions that no sum exceeds its column's type, which DynamoDB does not know.
        room = [
            f"(attribute_not_exists({self.name(name)}) OR"
            f" {self.name(name)} {comparison} {self.value(number)})"
            for name, (comparison, number) in changes.limits.items()
        ]
        removed = [*map(self.name, removes), *inside.removes]
        parts = {"SET": sets, "REMOVE": removed, "ADD": adds}
        words = " ".join(f"{verb} {', '.join(part)}" for verb, part in parts.items() if part)
        request: Request = {"Key": self.key}
        if words:
            request["UpdateExpression"] = words
        return self._conditional(request, [*clauses, *inside.clauses, *room])

    def _conditional(self, request: Request, clauses: Iterable[str]) -> Request:
        """Return the request with these conditions, the guard's, and all placeholders."""
        condition = " AND ".join([*clauses, *self._guarded()])
        if condition:
            request |= {
                "ConditionExpression": condition,
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            }
        if self.names:
            request["ExpressionAttributeNames"] = self.names
        if self.values:
            request["ExpressionAttributeValues"] = self.values
        return request

    def _guarded(self) -> list[str]:
        """The guard's conditions, which `Guard.holds` evaluates, too."""
        clauses = []
        guard = self.guard
        if guard.position is not None:
            mark = self.name(_mark_attribute(guard.source))
            clauses.append(
                f"(attribute_not_exists({mark}) OR {mark} < {self.value({'S': guard.position})})"
            )
        if guard.time is not None:
            known = self.name(TIME)
            tie = self.name(TIE)
            column = self.name(guard.column)
            time = self.value(guard.time)
            own_tie = self.value({"S": guard.tie})
            clauses.append(
                f"({known} < {time} OR ({known} = {time} AND {tie} <= {own_tie}) OR"
                f" (attribute_not_exists({known}) AND (attribute_not_exists({column}) OR"
                f" {column} <= {time})))"
            )
        return clauses


def put_columns(key: KeyItem, columns: Item, others: Iterable[str], guard: Guard) -> Request:
    """Return the UpdateItem that makes `columns` the record, or the tombstone, whatever was there;
    all marks stay.

    Of `others`, the table's columns, it removes those that are not in `columns`.
    """
    removed = []
    for name in (*others, *_NO_LONGER_DELETED):
        if name not in columns and name not in key:
            removed.append(name)
    return _Expression(key, guard).update([], columns, removed)


def begin_item(key: KeyItem, columns: Item, guard: Guard) -> Request:
    """Return the UpdateItem that makes `columns` the record if there is none."""
    expression = _Expression(key, guard)
    return expression.update([expression.absent()], columns, _NO_LONGER_DELETED)


def update_item(
    codec: ItemCodec, key: KeyItem, changes: EncodedChanges, guard: Guard, item: Item
) -> Request:
    """Return the UpdateItem that changes an existing record.

    DynamoDB sets members of a map only if the map exists; if it does not, the request must set a
    whole map. To tell, `item` is what an earlier attempt has found, or {} at first, when all maps
    are assumed to exist. The request's condition fails if that is wrong.
    """
    expression = _Expression(key, guard)
    clauses = [expression.present()]
    merged = {}
    for name, members in changes.merge.items():
        short = expression.name(name)
        is_missing = bool(item) and name not in item
        if is_missing:
            clauses.append(f"attribute_not_exists({short})")
            merged[short] = members
        else:
            clauses.append(f"attribute_type({short}, {expression.value({'S': 'M'})})")
            merged |= {
                f"{short}.{expression.name(member)}": value
                for member, value in members["M"].items()
            }
    inside = _InsideParts()
    by_column: dict[str, list[InnerName]] = {}
    for path in changes.inside:
        by_column.setdefault(path.root, []).append(path)
    for column, paths in by_column.items():
        level = _MapLevel(codec, expression, changes, expression.name(column), depth=0)
        known = item.get(column) if item else _ASSUMED_MAP
        level.change(paths, known, inside)
    return expression.update(
        clauses, changes.set, changes.remove, changes, merged=merged, inside=inside
    )


# Stands for a map whose members are not known, before an attempt has found the item.
_ASSUMED_MAP: AttributeValue = {"M": None}


class _MapLevel(NamedTuple):
    """A map in an item, whose `path` has `depth` steps after the column, and the changes in it."""

    codec: ItemCodec
    expression: _Expression
    changes: EncodedChanges
    path: str
    depth: int

    def change(
        self, paths: Sequence[InnerName], known: AttributeValue | None, parts: _InsideParts
    ) -> None:
        """Add to `parts` what makes the changes at these paths in this map, or creates it.

        `known` is the map as an earlier attempt has found it, None if it was missing. Before the
        first attempt it is `_ASSUMED_MAP`: all maps are assumed to exist. The request's conditions
        fail if that is wrong.
        """
        expression = self.expression
        if known is None or "M" not in known:
            parts.clauses.append(self._absence_condition(known))
            made = known
            for path in paths:
                change = self.changes.inside[path]
                names = path.names[self.depth :]
                made = change_inside(self.codec, made, path, names, change)
            assert made is not None
            parts.sets.append(f"{self.path} = {expression.value(made)}")
            return
        parts.clauses.append(f"attribute_type({self.path}, {expression.value({'S': 'M'})})")
        members = known["M"]
        deeper: dict[str, list[InnerName]] = {}  # by member, the paths that lead into it
        for path in paths:
            name = path.names[self.depth]
            if len(path.names) == self.depth + 1:
                self._change_value(f"{self.path}.{expression.name(name)}", path, parts)
            else:
                deeper.setdefault(name, []).append(path)
        for name, inner in deeper.items():
            found = _ASSUMED_MAP if members is None else members.get(name)
            level = self._replace(path=f"{self.path}.{expression.name(name)}", depth=self.depth + 1)
            level.change(inner, found, parts)

    def _absence_condition(self, known: AttributeValue | None) -> str:
        """The condition that there is still no map: nothing, or a value of the type that was
        found.
        """
        if known is None:
            return f"attribute_not_exists({self.path})"
        (tag,) = known
        return f"attribute_type({self.path}, {self.expression.value({'S': tag})})"

    def _change_value(self, short: str, path: InnerName, parts: _InsideParts) -> None:
        """Add to `parts` what changes the value at `path`, which the request calls `short`."""
        expression = self.expression
        value, adds, limit = self.changes.inside[path]
        if value is None:
            parts.removes.append(short)
        elif adds:
            zero = expression.value({"N": "0"})
            parts.sets.append(
                f"{short} = if_not_exists({short}, {zero}) + {expression.value(value)}"
            )
        else:
            parts.sets.append(f"{short} = {expression.value(value)}")
        if limit is not None:
            comparison, number = limit
            parts.clauses.append(
                f"(attribute_not_exists({short}) OR {short} {comparison}"
                f" {expression.value(number)})"
            )


def update_or_begin_item(key: KeyItem, changes: EncodedChanges, guard: Guard) -> Request:
    """Return the UpdateItem that changes the record, or creates one from the changes alone
    (`is_default_redundant`).

    Its answer contains the item as it was before.
    """
    removes = [*changes.remove, *_NO_LONGER_DELETED]
    return {
        "ReturnValues": "ALL_OLD",
        **_Expression(key, guard).update([], changes.set, removes, changes),
    }


def keep_mark(key: KeyItem, guard: Guard) -> Request:
    """Return the UpdateItem that stores an entry's mark in a tombstone, and changes nothing else.

    Its condition fails if there is no tombstone, or if the mark is in it already.
    """
    expression = _Expression(key, guard)
    return expression.update([f"attribute_exists({expression.name(DELETED)})"], {}, ())


def tombstone_attributes(now: float, horizon: float | None) -> Item:
    """Return the attributes of a tombstone, besides the key and the guard's.

    `horizon` is for how many seconds it must stay: DynamoDB removes it some time later; with None,
    never.
    """
    attributes = {DELETED: {"N": str(int(now))}}
    if horizon is None:
        return attributes
    return attributes | {EXPIRES: {"N": str(int(now + horizon) + 1)}}


def _mark_attribute(source: str) -> str:
    """Return the attribute with the position of the last message applied from a source."""
    return f"{OWN_PREFIX}at:{source}"


# DynamoDB's limits: keys of a BatchGetItem, requests of a BatchWriteItem, characters of an
# expression
GETS_AT_ONCE = 100
WRITES_AT_ONCE = 25
_LONGEST_EXPRESSION = 4096
_MAX_REPEATS = 5  # of gets, for keys that DynamoDB has left out
_FIRST_PAUSE = 0.05  # seconds, doubled before each repeat
_MAX_CONFLICTS = (
    10  # attempts to update or create a record while other writers create and delete it
)

Problems = dict[int, Problem]


class _ActionRefusedError(Exception):
    """An action of a transaction was rejected, for the reason in `problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem = problem


class _Answer(NamedTuple):
    """Whether a write's condition failed, and the item as it was before; {} if there was none or
    it isn't returned.
    """

    failed: bool
    item: Item

    @property
    def present(self) -> bool:
        """Whether the item was a record, not a tombstone."""
        return bool(self.item) and DELETED not in self.item


class _Written(NamedTuple):
    """What writing an entry did: its problem, if any, and whether it put the entry's default."""

    problem: Problem | None = None
    put_default: bool = False


@dataclass(frozen=True, slots=True)
class TableRequests:
    """Sends requests to one table. `horizon`: for how many seconds tombstones must stay; None is
    forever.

    `fence` is that of the run that writes, checked before each request. Writes to a fenced table
    are transactions (`fenced`); then only a request whose condition has failed returns the item.
    """

    client: DynamoDBClient
    table: str
    codec: ItemCodec
    consistent: bool
    horizon: float | None = None
    pause: Callable[[float], object] = time.sleep
    fence: Fence | None = None
    fenced: FencedWrites | None = None

    @property
    def label(self) -> str:
        """The table as errors name it."""
        return self.codec.table

    def check(self, *, reads: bool, updates: bool) -> None:
        """Raise if the table may not be read or updated, as far as is asked. Changes nothing."""
        probes = {"S": {"S": "adjunct-check"}, "N": {"N": "0"}, "B": {"B": b"adjunct-check"}}
        key: Any = {name: probes[kind] for name, kind in self.codec.key_types.items()}
        (name, *_) = key
        never = "attribute_exists(#k) AND attribute_not_exists(#k)"
        try:
            if reads:
                self.client.batch_get_item(RequestItems={self.table: {"Keys": [key]}})
            if updates:
                self.client.update_item(
                    TableName=self.table,
                    Key=key,
                    ConditionExpression=never,
                    ExpressionAttributeNames={"#k": name},
                )
        except Exception as error:
            may_update = error_code(error) == "ConditionalCheckFailedException"  # as it must be
            if may_update:
                return
            problem = problem_from_boto_error(error, self.label, sent=False).error
            assert problem is not None
            raise problem from error

    def get(self, entries: Sequence[Entry], records: list[Any]) -> Problems:
        """Get the records of up to 100 entries, and store them in `records` by index; return the
        problems.
        """
        problems: Problems = {}
        places: dict[Any, list[int]] = {}  # by the identity of a key, its entries' indices
        for entry in entries:
            places.setdefault(identity_of(entry.key), []).append(entry.place)
        keys = {identity_of(entry.key): self.codec.key_item(entry.key) for entry in entries}
        asked = list(keys.values())
        problem: Any = None
        for turn in range(_MAX_REPEATS + 1):
            if turn:
                self.pause(_FIRST_PAUSE * 2 ** (turn - 1) * (0.5 + random.random() / 2))
            try:
                answer = self.client.batch_get_item(
                    RequestItems={self.table: {"Keys": asked, "ConsistentRead": self.consistent}}
                )
            except Exception as error:  # noqa: BLE001 - it becomes the outcome
                # `sent=False`, because a get has no effect, whether it is answered or not.
                problem = problem_from_boto_error(error, self.label, sent=False)
                break
            self._decode(_all_of(answer.get("Responses")), places, records, problems)
            left_over: Any = answer.get("UnprocessedKeys") or {}
            asked = [key for part in left_over.values() for key in part["Keys"]]
            if not asked:
                return problems
            problem = throttled_problem(self.label, f"{len(asked)} keys unprocessed")
        for key in asked:
            problems.update(dict.fromkeys(places[identity_of(key.values())], problem))
        return problems

    def _decode(
        self,
        items: Sequence[Item],
        places: Mapping[Any, Sequence[int]],
        records: list[Any],
        problems: Problems,
    ) -> None:
        """Store the records of items in `records` at their keys' `places`, and the problems of
        unreadable ones in `problems`.
        """
        for item in items:
            of_key = places[identity_of(item[name] for name in self.codec.key)]
            try:
                for place in of_key:  # one object each
                    records[place] = self.codec.record(item)
            except AdjunctError as error:
                problems.update(dict.fromkeys(of_key, Problem(State.REFUSED, error)))

    def write_batch(self, kind: OperationKind, entries: Sequence[Entry]) -> Problems:
        """Put or delete up to 25 entries with distinct keys, without conditions; return the
        problems.
        """
        problems: Problems = {}
        places: list[int] = []
        requests: list[Any] = []
        for entry in entries:
            key = self.codec.key_item(entry.key)
            try:
                if kind is OperationKind.PUT:
                    requests.append(
                        {"PutRequest": {"Item": {**self.codec.columns_of(key, entry.value), **key}}}
                    )
                else:
                    requests.append({"DeleteRequest": {"Key": key}})
                places.append(entry.place)
            except AdjunctError as error:
                problems[entry.place] = Problem(State.REFUSED, error)
        self._send_batch(places, requests, problems)
        return problems

    def _send_batch(self, places: list[int], requests: list[Any], problems: Problems) -> None:
        """Send a batch's requests, and add the problems of those that had no effect by their
        entries' `places`.
        """
        if not requests:
            return
        if self.fenced is not None:
            self._send_fenced(self.fenced, places, requests, problems)
            return
        try:
            with checked_sends(self.fence):
                answer = self.client.batch_write_item(RequestItems={self.table: requests})
        except RunLeaseLostError:
            raise
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            problem = problem_from_boto_error(error, self.label)
            is_invalid = error_code(error) == "ValidationException"
            if is_invalid and problem.state is State.REFUSED and len(requests) > 1:
                # One invalid entry makes the whole batch fail: bisect until it is alone.
                self._send_halves(places, requests, problems)
            else:
                problems.update(dict.fromkeys(places, problem))
            return
        unprocessed = _all_of(answer.get("UnprocessedItems"))
        if not unprocessed:
            return
        place_of = dict(zip(map(self._identity_in, requests), places, strict=True))
        left = set(map(self._identity_in, unprocessed))
        if not left <= place_of.keys():
            left = set(place_of)  # the answer names items that were not sent: it may mean any
        problem = throttled_problem(
            self.label, f"{len(unprocessed)} of {len(requests)} items unprocessed"
        )
        problems.update({place_of[one]: problem for one in left})

    def _send_halves(self, places: list[int], requests: list[Any], problems: Problems) -> None:
        """Send both halves of a batch that failed as a whole, one after the other."""
        half = len(requests) // 2
        self._send_batch(places[:half], requests[:half], problems)
        self._send_batch(places[half:], requests[half:], problems)

    def _send_fenced(
        self, fenced: FencedWrites, places: list[int], requests: list[Any], problems: Problems
    ) -> None:
        """Send a batch as transactions: one that DynamoDB cancels, or would find too large, is sent
        again in halves, until a single request is rejected.
        """
        actions = [_action_of(self.table, request) for request in requests]
        reasons: Sequence[Reason] | None = None
        try:
            is_small_enough = sum(map(_request_bytes, requests)) <= _LARGEST_TRANSACTION
            if is_small_enough:
                reasons = fenced.send(actions)
                if reasons is None:  # it was applied
                    return
        except RunLeaseLostError:
            raise
        except Exception as error:  # noqa: BLE001 - it becomes the outcome
            problem = problem_from_boto_error(error, self.label)
            if problem.state is not State.REFUSED or len(requests) == 1:
                problems.update(dict.fromkeys(places, problem))
                return
        if len(requests) > 1:
            self._send_halves(places, requests, problems)
        elif reasons is not None:  # else the request would be too large, which no item is
            problems[places[0]] = self._rejected(reasons[0])

    def _identity_in(self, request: Any) -> Any:
        """The identity of the key that a request of a batch writes."""
        if "PutRequest" in request:
            item = request["PutRequest"]["Item"]
        else:
            item = request["DeleteRequest"]["Key"]
        return identity_of(item[name] for name in self.codec.key)

    def write_in_sequence(
        self, operation: Operation[Any], entries: Sequence[Entry], problems: Problems
    ) -> int:
        """Write the entries of one key, one after the other; return how many of them put a default.

        Problems are added to `problems`. After an entry that can be retried the others are not
        sent: they would overtake it.
        """
        defaults_put = 0
        for done, entry in enumerate(entries):
            try:
                written = self._write(operation, entry)
            except RunLeaseLostError:
                raise
            except _ActionRefusedError as refused:
                written = _Written(refused.problem)
            except Exception as error:  # noqa: BLE001 - it becomes the outcome
                written = _Written(problem_from_boto_error(error, self.label))
            defaults_put += written.put_default
            problem = written.problem
            if problem is None:
                continue
            problems[entry.place] = problem
            if is_retryable(problem):
                problems.update({later.place: problem.unsent for later in entries[done + 1 :]})
                break
        return defaults_put

    def _write(self, operation: Operation[Any], entry: Entry) -> _Written:
        """Write an entry if its conditions hold; raises what boto3 raises."""
        codec = self.codec
        kind = operation.kind
        key = codec.key_item(entry.key)
        guard = guard_of(operation, entry)
        if kind is OperationKind.UPDATE:
            return self._update(key, operation, entry, guard)
        if kind is OperationKind.PUT_IF_ABSENT:
            answer = self._send(begin_item(key, codec.columns_of(key, entry.value), guard))
            return _Written(Problem(State.SKIPPED) if answer.failed else None)
        if kind is OperationKind.DELETE:
            columns = tombstone_attributes(time.time(), self.horizon)
        else:
            columns = codec.columns_of(key, entry.value)
        if codec.is_open:
            # The item has no marks of other sources to keep, because `idempotent` needs declared
            # columns.
            request = _Expression(key, guard).put({**columns, **key})
        else:
            request = put_columns(key, columns, codec.names, guard)
        return _Written(_skipped(self._send(request), guard))

    def _default_of(self, key: KeyItem, entries: Entries[Any], entry: Entry) -> Item | None:
        """Return the item that an update of a missing key begins with; None without a default."""
        given = None
        if entries.defaults is not None:
            given = entries.defaults[entry.place]
        if given is None:
            return None
        return self.codec.columns_of(key, self.codec.whole(entry.key, given))

    def _update(
        self, key: KeyItem, operation: Operation[Any], entry: Entry, guard: Guard
    ) -> _Written:
        """Update the record, or put its default with the changes if there is none; MISSING without
        a default. Of a late update at most what it adds and appends is applied (`_add_late`).
        Raises SchemaMismatchError if the changes do not fit the record.
        """
        codec = self.codec
        changes = codec.encode_changes(entry.value)
        default = self._default_of(key, operation.entries, entry)
        # A transaction does not return the item, which tells whether this request has created it.
        if self.fenced is None and default is not None and is_default_redundant(default, changes):
            return self._update_or_begin(key, changes, guard)
        found: Item = {}
        for _ in range(_MAX_CONFLICTS):
            answer = self._send(update_item(codec, key, changes, guard, found))
            if not answer.failed:
                return _Written()
            if not guard.holds(answer.item):
                return _Written(self._add_late(key, changes, guard, answer))
            found = answer.item
            self._check_changes(key, changes, found)
            if answer.present:
                continue  # maps were assumed where there are none, or vice versa: `found` tells
            if default is None:
                missing = record_not_found_error([operation.entries.keys[entry.place]], self.label)
                return _Written(Problem(State.MISSING, missing))
            columns = begin_record(self.codec, default, changes)
            self.codec.check_size({**columns, **key})
            answer = self._send(begin_item(key, columns, guard))
            if not answer.failed:
                return _Written(put_default=True)
            if not guard.holds(answer.item):
                return _Written(self._add_late(key, changes, guard, answer))
        return _Written(self._conflict(key))

    def _conflict(self, key: KeyItem) -> Problem:
        """The problem of an update that gave up, because the record kept being created and
        deleted.
        """
        error = TableUnavailableError(
            f"{self.label}: other writers created or deleted the record of"
            f" {key} {_MAX_CONFLICTS} times during its update.",
            "The request is retried; if it keeps failing, find out who deletes the record.",
            table=self.label,
        )
        return Problem(State.FAILED, error)

    def _update_or_begin(self, key: KeyItem, changes: EncodedChanges, guard: Guard) -> _Written:
        """Update the record, or create it from the changes, in one request. Raises
        SchemaMismatchError if a sum is too large; a late update is left to `_add_late`.
        """
        answer = self._send(update_or_begin_item(key, changes, guard))
        if not answer.failed:
            return _Written(put_default=not answer.present)
        if guard.holds(answer.item):
            self.codec.check_sums(changes, answer.item)
        return _Written(self._add_late(key, changes, guard, answer))

    def _check_changes(self, key: KeyItem, changes: EncodedChanges, item: Item) -> None:
        """Raise SchemaMismatchError if these changes can't be made to an item."""
        for name in changes.merge:
            if "M" not in item.get(name, {"M": {}}):
                problem = (
                    f"{self.label}: an update adds members to {name!r} of {key}, but"
                    f" {item[name]} is not a map."
                )
                raise SchemaMismatchError(problem, "Set the column instead.", column=name)
        self.codec.check_sums(changes, item)

    def _add_late(
        self, key: KeyItem, changes: EncodedChanges, guard: Guard, answer: _Answer
    ) -> Problem | None:
        """Apply what a late update adds and appends to the newer record that made its condition
        fail.

        If that is a tombstone, only the mark is stored, so that a replay changes nothing if the
        record was created again meanwhile. Returns None if something was added, else SKIPPED. An
        update that is not late, or adds nothing, is SKIPPED and stores no mark.
        """
        late = changes.late
        of_source = Guard(source=guard.source, position=guard.position)
        has_both = guard.position is not None and guard.time is not None
        if not has_both or not (late.add or late.append or late.inside):
            return _skipped(answer, guard)
        if not answer.present and of_source.holds(answer.item):
            answer = self._send(keep_mark(key, of_source))
            if not answer.failed:
                return Problem(State.SKIPPED)
        return self._add_to_newer(key, late, of_source, guard, answer)

    def _add_to_newer(
        self, key: KeyItem, late: EncodedChanges, of_source: Guard, guard: Guard, answer: _Answer
    ) -> Problem | None:
        """Apply the late part of an update to the record in `answer`; skip it if there is none, or
        the mark of the source does not allow it (`of_source`). `answer` is that of the write
        before, whose condition failed or which has stored the mark; `guard` that of the whole
        update.
        """
        for _ in range(_MAX_CONFLICTS):
            if not answer.present or not of_source.holds(answer.item):
                return _skipped(answer, guard)
            answer = self._send(update_item(self.codec, key, late, of_source, answer.item))
            if not answer.failed:
                return None
            # A sum is too large, which `check_sums` raises; or a map was created or removed
            # meanwhile, so it is tried again.
            if answer.present and of_source.holds(answer.item):
                self.codec.check_sums(late, answer.item)
        return self._conflict(key)

    def _send(self, request: Request) -> _Answer:
        """Send one write; a condition that fails is part of the answer, any other failure is
        raised.
        """
        parts = ("UpdateExpression", "ConditionExpression")
        longest = max(len(request.get(part, "")) for part in parts)
        if longest > _LONGEST_EXPRESSION:
            raise SchemaMismatchError(
                f"{self.label}: an expression has {longest:,} characters: expected at most"
                f" {_LONGEST_EXPRESSION:,}.",
                "Combine columns into one of type json, or write fewer columns at once.",
                table=self.label,
            )
        if self.fenced is not None:
            return self._send_in_transaction(self.fenced, request)
        send: Any = self.client.put_item if "Item" in request else self.client.update_item
        try:
            with checked_sends(self.fence):
                answer = send(TableName=self.table, **request)
        except Exception as error:
            if error_code(error) != "ConditionalCheckFailedException":
                raise
            return _Answer(True, getattr(error, "response", {}).get("Item") or {})
        return _Answer(False, answer.get("Attributes") or {})

    def _send_in_transaction(self, fenced: FencedWrites, request: Request) -> _Answer:
        """Send one write that takes effect only while the run's epoch is the newest.

        Raises _ActionRefusedError if it is rejected for another reason than its own condition.
        """
        action = {name: value for name, value in request.items() if name != "ReturnValues"} | {
            "TableName": self.table
        }
        reasons = fenced.send([{"Put" if "Item" in request else "Update": action}])
        if reasons is None:
            return _Answer(False, {})
        (reason,) = reasons
        if reason["Code"] == FAILED_CONDITION:
            return _Answer(True, reason.get("Item") or {})
        raise _ActionRefusedError(self._rejected(reason))

    def _rejected(self, reason: Reason) -> Problem:
        """Return the problem of the only write of a cancelled transaction, for this reason."""
        problem = problem_from_reason(self.label, reason)
        # If the other action, the check of the epoch, is the reason, `FencedWrites.send` raises.
        assert problem is not None
        return problem


_LARGEST_TRANSACTION = 3_500_000  # bytes, of 4 MB: names of attributes count too


def _action_of(table: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request of a batch as an action of a transaction."""
    if "PutRequest" in request:
        return {"Put": {"TableName": table, "Item": request["PutRequest"]["Item"]}}
    return {"Delete": {"TableName": table, "Key": request["DeleteRequest"]["Key"]}}


def _request_bytes(request: Mapping[str, Any]) -> int:
    """The size of the item that a request of a batch puts; 0 for a delete."""
    return item_bytes(request.get("PutRequest", {}).get("Item", {}))


def _all_of(by_table: Any) -> list[Any]:
    """What an answer has for the only table that was asked, whether it is named as in the
    request or by its ARN.
    """
    return [one for of_table in (by_table or {}).values() for one in of_table]


def _skipped(answer: _Answer, guard: Guard) -> Problem | None:
    """Return the problem of an entry whose condition failed, None if it held."""
    if not answer.failed:
        return None
    guard.holds(answer.item)  # called because it raises if times can't be compared
    return Problem(State.SKIPPED)


def identity_of(key: Iterable[AttributeValue]) -> Any:
    """Return the same value for keys that are equal in DynamoDB, where 1 and 1.0 are the same
    number.
    """
    return tuple(Decimal(one["N"]) if "N" in one else one.get("S") or one["B"] for one in key)
