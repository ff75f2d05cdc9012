"""DynamoDB's expressions for each kind of write, with its conditions, and what a failed condition says.

All of it is pure. Beside a record's columns an item has, where a table has conditions:

    adjunct_time, adjunct_tie    the time of the newest message applied (`newest_by`), and what tells equal ones apart
    adjunct_at:SOURCE            the position of the last message applied from a source (`idempotent`)
    adjunct_deleted              when the record was deleted, in seconds: the item is a tombstone
    adjunct_expires              when DynamoDB may forget the tombstone, in seconds (its time-to-live attribute)

Every write is one UpdateItem or PutItem whose ConditionExpression has all that must hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from dagster_adjunct.resources.backends.dynamodb_items import DELETED, OWN_PREFIX, EncodedChanges, KeyItem
from dagster_adjunct.resources.backends.dynamodb_values import AttributeValue, Item, Limit
from dagster_adjunct.resources.errors import SchemaMismatchError

TIME = f"{OWN_PREFIX}time"
TIE = f"{OWN_PREFIX}tie"
EXPIRES = f"{OWN_PREFIX}expires"
_NO_LONGER_DELETED = (DELETED, EXPIRES)

Request = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Guard:
    """The conditions of one entry. `column` is what `newest_by` names; the others are None where not asked for."""

    column: str = ""
    time: AttributeValue | None = None
    tie: str = ""
    source: str = ""
    position: str | None = None

    @property
    def attributes(self) -> Item:
        """What is kept beside the record once the entry is applied."""
        kept: Item = {}
        if self.time is not None:
            kept |= {TIME: self.time, TIE: {"S": self.tie}}
        if self.position is not None:
            kept[_mark_of(self.source)] = {"S": self.position}
        return kept

    def holds(self, item: Item) -> bool:
        """Whether the entry may be applied to this item: the same as `_Expression.guard` says to DynamoDB."""
        if self.position is not None and self.position <= item.get(_mark_of(self.source), {"S": ""})["S"]:
            return False
        if self.time is None:
            return True
        known, tie = (item[TIME], item[TIE]["S"]) if TIME in item else (item.get(self.column), "")
        if known is None:
            return True
        ((tag, value),) = self.time.items()
        if tag not in known:
            raise SchemaMismatchError(
                f"the times of {self.column!r} can't be compared: there is {known}, and {self.time} comes.",
                "Let all times be of one type: declare the column's.",
                column=self.column,
            )
        number = Decimal if tag == "N" else str
        return bool((number(value), self.tie) >= (number(known[tag]), tie))


NO_GUARD = Guard()
NOTHING: Mapping[str, AttributeValue] = {}


@dataclass(slots=True)
class _Expression:
    """Collects clauses, each name and value under a short placeholder of its own."""

    names: dict[str, str] = field(default_factory=dict)
    values: dict[str, AttributeValue] = field(default_factory=dict)
    _known: dict[str, str] = field(default_factory=dict)

    def name(self, name: str) -> str:
        if name not in self._known:
            short = self._known[name] = f"#{len(self._known):x}"
            self.names[short] = name
        return self._known[name]

    def value(self, value: AttributeValue) -> str:
        short = f":{len(self.values):x}"
        self.values[short] = value
        return short

    def guard(self, guard: Guard) -> list[str]:
        clauses = []
        if guard.position is not None:
            mark = self.name(_mark_of(guard.source))
            clauses.append(f"(attribute_not_exists({mark}) OR {mark} < {self.value({'S': guard.position})})")
        if guard.time is not None:
            known, tie, column = self.name(TIME), self.name(TIE), self.name(guard.column)
            time, own_tie = self.value(guard.time), self.value({"S": guard.tie})
            clauses.append(
                f"({known} < {time} OR ({known} = {time} AND {tie} <= {own_tie}) OR "
                f"(attribute_not_exists({known}) AND (attribute_not_exists({column}) OR {column} <= {time})))"
            )
        return clauses

    def present(self, key: KeyItem) -> str:
        return f"attribute_exists({self.name(_first(key))}) AND attribute_not_exists({self.name(DELETED)})"

    def absent(self, key: KeyItem) -> str:
        return f"(attribute_not_exists({self.name(_first(key))}) OR attribute_exists({self.name(DELETED)}))"

    def room(self, limits: Mapping[str, Limit]) -> list[str]:
        """That columns hold no number to which adding would leave their types; DynamoDB does not know these."""
        names = {name: self.name(name) for name in limits}
        return [
            f"(attribute_not_exists({names[name]}) OR {names[name]} {comparison} {self.value(number)})"
            for name, (comparison, number) in limits.items()
        ]

    def set(self, columns: Item) -> list[str]:
        return [f"{self.name(name)} = {self.value(stored)}" for name, stored in columns.items()]

    def request(
        self, clauses: Iterable[str], sets: Iterable[str], removes: Iterable[str], adds: Iterable[str] = ()
    ) -> Request:
        parts = (("SET", sets), ("REMOVE", map(self.name, removes)), ("ADD", adds))
        words = [f"{verb} {text}" for verb, text in ((verb, ", ".join(part)) for verb, part in parts) if text]
        return self.conditional({"UpdateExpression": " ".join(words)} if words else {}, clauses)

    def conditional(self, request: Request, clauses: Iterable[str]) -> Request:
        condition = " AND ".join(clauses)
        if condition:
            request |= {"ConditionExpression": condition, "ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
        if self.names:
            request["ExpressionAttributeNames"] = self.names
        if self.values:
            request["ExpressionAttributeValues"] = self.values
        return request


def put_whole(item: Item, guard: Guard) -> Request:
    """PutItem: make `item`, a record's or a tombstone, the whole item. Marks of sources go with what was there."""
    expression = _Expression()
    return expression.conditional({"Item": {**item, **guard.attributes}}, expression.guard(guard))


def put_columns(key: KeyItem, columns: Item, others: Iterable[str], guard: Guard) -> Request:
    """UpdateItem: make `columns` the record, where its table may have `others` besides; all marks stay."""
    expression = _Expression()
    clauses = expression.guard(guard)
    sets = expression.set({**columns, **guard.attributes})
    left = [name for name in others if name not in columns and name not in key]
    return {"Key": key, **expression.request(clauses, sets, [*left, *_NO_LONGER_DELETED])}


def begin(key: KeyItem, columns: Item, guard: Guard) -> Request:
    """UpdateItem: make `columns` the record where there is none."""
    expression = _Expression()
    clauses = [expression.absent(key), *expression.guard(guard)]
    sets = expression.set({**columns, **guard.attributes})
    return {"Key": key, **expression.request(clauses, sets, _NO_LONGER_DELETED)}


def update(key: KeyItem, changes: EncodedChanges, guard: Guard, item: Item) -> Request:
    """UpdateItem: change the record where there is one.

    DynamoDB sets members of a map only where there is a map, so a merge has to know it; `item` is what was met before,
    {} at first: then all maps are taken to be there. The condition holds only if it is so.
    """
    expression = _Expression()
    clauses = [expression.present(key), *expression.guard(guard)]
    merged = {}
    for name, members in changes.merge.items():
        short = expression.name(name)
        if item and name not in item:
            clauses.append(f"attribute_not_exists({short})")
            merged[short] = members
        else:
            clauses.append(f"attribute_type({short}, {expression.value({'S': 'M'})})")
            merged |= {f"{short}.{expression.name(member)}": value for member, value in members["M"].items()}
    return {"Key": key, **_changed(expression, clauses, changes, guard, changes.remove, merged)}


def update_or_begin(key: KeyItem, changes: EncodedChanges, guard: Guard) -> Request:
    """UpdateItem: change the record, or begin it with the changes alone. The answer tells what was there before."""
    expression = _Expression()
    clauses = expression.guard(guard)
    removes = [*changes.remove, *_NO_LONGER_DELETED]
    return {"Key": key, "ReturnValues": "ALL_OLD", **_changed(expression, clauses, changes, guard, removes)}


def pass_over(key: KeyItem, guard: Guard) -> Request:
    """UpdateItem: keep the mark of an entry that has nothing to change, where there is no record but a tombstone."""
    expression = _Expression()
    clauses = [f"attribute_exists({expression.name(DELETED)})", *expression.guard(guard)]
    return {"Key": key, **expression.request(clauses, expression.set(guard.attributes), ())}


def tombstone_columns(key: KeyItem, kept: Item, columns: Iterable[str], guard: Guard) -> Request:
    """UpdateItem: take the record's `columns` away; all marks stay."""
    expression = _Expression()
    clauses = expression.guard(guard)
    sets = expression.set({**kept, **guard.attributes})
    return {"Key": key, **expression.request(clauses, sets, [name for name in columns if name not in key])}


def tombstone(now: float, horizon: float | None) -> Item:
    """What a tombstone has; with a horizon, in seconds, DynamoDB forgets it some time after that."""
    kept = {DELETED: {"N": str(int(now))}}
    return kept if horizon is None else kept | {EXPIRES: {"N": str(int(now + horizon) + 1)}}


def _changed(
    expression: _Expression,
    clauses: list[str],
    changes: EncodedChanges,
    guard: Guard,
    removes: Iterable[str],
    merged: Mapping[str, AttributeValue] = NOTHING,
) -> Request:
    sets = expression.set({**changes.set, **guard.attributes})
    sets += [f"{path} = {expression.value(value)}" for path, value in merged.items()]
    if changes.append:
        empty = expression.value({"L": []})
        for name, values in changes.append.items():
            short = expression.name(name)
            sets.append(f"{short} = list_append(if_not_exists({short}, {empty}), {expression.value(values)})")
    adds = [f"{expression.name(name)} {expression.value(number)}" for name, number in changes.add.items()]
    clauses += expression.room(changes.limits)
    return expression.request(clauses, sets, removes, adds)


def _first(key: KeyItem) -> str:
    return next(iter(key))


def _mark_of(source: str) -> str:
    return f"{OWN_PREFIX}at:{source}"
