"""Compact batches: of the writes of a key in one request, those are merged or left out that nobody
could tell apart.

    puts and deletes    the last one is sent
    updates             one is sent: what they set and remove by the last, what they add by the sum,
                        appends in order
    anything else       sent as it is: gets, puts if absent, and what has conditions, which a table
                        can't have

`CompactLayer` is below the layer that makes requests, so a request has entries of one kind, except
that deletes are puts of None (`as_put`). Other operations on a key between two of its writes are in
another request, and end what is merged.

Each entry keeps its own outcome. Entries that the function is certain to reject are found first
(`find_misfits`), and are not merged. If the store rejects what was merged, which then had no
effect, the entries of the key are sent one after the other, so that each one that is rejected is
named.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from typing import Any, NamedTuple

from dagster_adjunct.resources.errors import PermanentError, TransientError
from dagster_adjunct.resources.tables.functions import TableFunction, is_record_rejected
from dagster_adjunct.resources.tables.metrics import Meter
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Layer,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    RowEntries,
    State,
    to_changes,
)

_EXACT = Context(prec=2000)  # the default rounds sums to 28 digits


def as_put(operation: Operation[Any]) -> Operation[Any]:
    """Return a delete as a put of None, so that it can be in one request with puts; others as
    they are.
    """
    if operation.kind is not OperationKind.DELETE or operation.conditions:
        return operation
    keys = list(operation.entries.keys)
    return replace(operation, kind=OperationKind.PUT, entries=RowEntries(keys, [None] * len(keys)))


def merge_updates(updates: Sequence[Any]) -> Mapping[str, Any] | Changes | None:
    """Return one update that changes a record as these do in turn; None if there is none.

    There is none if they are not mappings or `Changes`, or change a column in several ways: sets
    and removals are one way, sums another, appended values a third. A sum that leaves its column's
    type and comes back is not rejected.
    """
    merging = _Merging()
    are_plain = True
    for update in updates:
        are_plain = are_plain and isinstance(update, Mapping)
        if not isinstance(update, Mapping | Changes) or not merging.take(to_changes(update)):
            return None
    if are_plain:
        return merging.set
    return Changes(merging.set, merging.add, merging.append, tuple(merging.remove))


def _overlaps(names: Collection[str]) -> bool:
    """Whether two of the names may overlap: a column, and a value inside it (`address.city`).

    A dotted name with backticks may be that of a plain column; it is taken to overlap with another.
    """
    for name in names:
        column, _, inside = name.partition(".")
        if inside and (column in names or "`" in name):
            return True
    return False


@dataclass(slots=True)
class _Merging:
    """The changes of the updates that were taken so far."""

    set: dict[str, Any] = field(default_factory=dict)
    add: dict[str, Any] = field(default_factory=dict)
    append: dict[str, list[Any]] = field(default_factory=dict)
    remove: dict[str, None] = field(default_factory=dict)

    def take(self, changes: Changes) -> bool:
        """Add the changes of one more update; return whether they can be merged with the earlier
        ones. After False, this object is of no more use.
        """
        assigned = {*self.set, *self.remove, *changes.set, *changes.remove}
        added = {*self.add, *changes.add}
        appended = {*self.append, *changes.append}
        in_any_way = assigned | added | appended
        is_one_in_several_ways = len(in_any_way) < len(assigned) + len(added) + len(appended)
        sets_and_removes_one = not set(changes.set).isdisjoint(changes.remove)
        if is_one_in_several_ways or sets_and_removes_one:
            return False
        if _overlaps(in_any_way):
            return False
        for name, value in changes.set.items():
            self.remove.pop(name, None)
            self.set[name] = value
        for name in changes.remove:
            self.set.pop(name, None)
            self.remove[name] = None
        for name, values in changes.append.items():
            self.append[name] = [*self.append.get(name, ()), *(values or ())]
        return all(self._add(name, number) for name, number in changes.add.items())

    def _add(self, name: str, number: Any) -> bool:
        """Add a number, or the members of JSON, to what updates add to a column.

        Returns False if the sum is not known here, because the types differ or are no numbers.
        """
        known = self.add.get(name)
        if number is None:
            self.add[name] = known
        elif known is None:
            self.add[name] = number
        elif isinstance(number, Mapping) and isinstance(known, Mapping):
            self.add[name] = {**known, **number}
        elif isinstance(number, Decimal) and isinstance(known, Decimal | int):
            self.add[name] = _EXACT.add(Decimal(known), number)
        elif type(number) is type(known) and isinstance(number, int | float):
            self.add[name] = known + number
        else:
            return False
        return True


@dataclass(frozen=True, slots=True)
class CompactLayer:
    """Merges the writes of a key in one operation, and gives each of them its outcome.
    `function` is the writer's.
    """

    below: Layer
    function: TableFunction | None
    meter: Meter

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Send one entry for each key of puts and updates without conditions; all else as it is."""
        if operation.conditions:
            return await self.below.send(operation)
        if operation.kind is OperationKind.PUT:
            return await self._send_last(operation)
        if operation.kind is OperationKind.UPDATE:
            return await self._send_merged(operation)
        return await self.below.send(operation)

    async def close(self) -> None:
        await self.below.close()

    async def _send_last(self, operation: Operation[Any]) -> Outcomes:
        """Send the last entry of each key; if it is rejected for its content, the one before it,
        and so on.
        """
        groups = group_by_key(operation.entries.keys)
        problems = await self._find_misfits(operation, groups)
        groups_left = without(groups, problems)
        saved = sum(map(len, groups_left))
        is_first = True
        while groups_left:
            last = sorted(places[-1] for places in groups_left)
            saved -= len(last)
            outcomes = await self._send_writes(operation, last, is_first=is_first)
            is_first = False
            failed = {last[at]: problem for at, problem in outcomes.problems.items()}
            problems.update(failed)
            earlier = []
            for places in groups_left:
                problem = failed.get(places[-1])
                if problem is not None and is_record_rejected(problem):
                    earlier.append(places[:-1])
                elif problem is not None:
                    problems.update(dict.fromkeys(places, problem))
            groups_left = [places for places in earlier if places]
        self._count(saved)
        return Outcomes(len(operation), problems=problems)

    async def _send_writes(
        self, operation: Operation[Any], places: Sequence[int], *, is_first: bool
    ) -> Outcomes:
        """Send entries of different keys, as puts and, for those without a value, as deletes.

        `is_first` says that nothing of the operation was sent before (`_send`).
        """
        entries = operation.entries
        if entries.null_value() is None:
            if len(places) < len(operation):
                operation = operation.with_entries(entries.take(places))
            return await self._send(operation, is_first=is_first)
        outcomes = Outcomes(len(places))
        values = entries.values or ()
        # The indices in `places` of the entries of each kind.
        by_kind: dict[OperationKind, list[int]] = {OperationKind.PUT: [], OperationKind.DELETE: []}
        for at, place in enumerate(places):
            kind = OperationKind.DELETE if values[place] is None else OperationKind.PUT
            by_kind[kind].append(at)
        for kind, of_kind in by_kind.items():
            if not of_kind:
                continue
            rows = RowEntries([entries.keys[places[at]] for at in of_kind])
            if kind is OperationKind.PUT:
                rows = replace(rows, values=[values[places[at]] for at in of_kind])
            sent = replace(operation, kind=kind, entries=rows)
            part = await self._send(sent, is_first=is_first)
            outcomes = outcomes.with_retried(of_kind, part)
            is_first = False
        return outcomes

    async def _send_merged(self, operation: Operation[Any]) -> Outcomes:
        """Send one update of each key, or all of a key whose updates can't be merged."""
        entries = operation.entries
        groups = group_by_key(entries.keys)
        if len(groups) == len(entries):  # no key has several updates
            return await self.below.send(operation)
        misfits = await self._find_misfits(operation, groups)
        sent: list[_Sent] = []
        for places in without(groups, misfits):
            sent += _merge_entries(operation, places)
        nothing_was_merged = all(len(merged.places) == 1 for merged in sent)
        if nothing_was_merged:
            return await self.below.send(operation)
        keys = [entries.keys[merged.places[0]] for merged in sent]
        defaults = None
        if entries.defaults is not None:
            defaults = [merged.default for merged in sent]
        rows = RowEntries(keys, [merged.value for merged in sent], defaults)
        outcomes = await self.below.send(operation.with_entries(rows))
        problems = dict(misfits)
        apart = list[int]()  # the entries that are sent again, each on its own
        for at, problem in outcomes.problems.items():
            merged = sent[at]
            if len(merged.places) > 1 and _had_no_effect(problem, merged.value):
                apart += merged.places
            else:
                problems.update(dict.fromkeys(merged.places, problem))
        whole = Outcomes(len(operation), problems=problems, defaults_put=outcomes.defaults_put)
        entries_sent = len(sent) + len(apart)
        self._count(len(operation) - len(misfits) - entries_sent)
        if not apart:
            return whole
        apart.sort()
        return whole.with_retried(
            apart, await self._send(operation.with_entries(entries.take(apart)), is_first=False)
        )

    async def _send(self, operation: Operation[Any], *, is_first: bool) -> Outcomes:
        """Send a request. An error is raised only by the first request of an operation
        (`is_first`), because it says that nothing was sent; later it is the outcome of the
        request's entries.
        """
        try:
            return await self.below.send(operation)
        except Exception as error:
            if is_first:
                raise
            if isinstance(error, TransientError):
                state = State.FAILED
            else:
                state = State.REFUSED
            return Outcomes.all(len(operation), Problem(state, error, of_request=True))

    async def _find_misfits(
        self, operation: Operation[Any], groups: Sequence[Sequence[int]]
    ) -> dict[int, Problem]:
        """The problems of entries that are certain to be rejected, among keys with several
        entries.
        """
        values = operation.entries.values
        assert values is not None
        asked: list[int] = []  # the places of all but deletes
        for places in groups:
            if len(places) > 1:
                asked += [place for place in places if values[place] is not None]
        asked.sort()
        if not asked or self.function is None:
            return {}
        found = await self.function.find_misfits(
            operation.with_entries(operation.entries.take(asked))
        )
        return {asked[at]: problem for at, problem in found.items()}

    def _count(self, saved: int) -> None:
        """Count entries that were done without being sent."""
        if saved > 0:
            self.meter.add("compacted", saved)


class _Sent(NamedTuple):
    """An entry to send, which stands for those at `places`."""

    places: Sequence[int]
    value: Any
    default: Any


def group_by_key(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of the entries of each key, in order."""
    groups: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    return list(groups.values())


def without(groups: Sequence[Sequence[int]], left_out: Mapping[int, object]) -> list[list[int]]:
    """Return the groups without the indices in `left_out`; groups that become empty are dropped."""
    kept = [[place for place in places if place not in left_out] for places in groups]
    return [places for places in kept if places]


def _merge_entries(operation: Operation[Any], places: Sequence[int]) -> list[_Sent]:
    """Return what to send for the updates of one key: one entry, or all of them if they can't be
    merged.

    A merged update has the first default: no later one would be used. So they need all to have one,
    or none.
    """
    values = operation.entries.values or ()
    defaults = operation.entries.defaults or [None] * len(operation)
    own_defaults = [defaults[place] for place in places]
    merged = None
    if len(places) > 1 and own_defaults.count(None) in (0, len(own_defaults)):
        merged = merge_updates([values[place] for place in places])
    if merged is None:
        return [_Sent([place], values[place], defaults[place]) for place in places]
    return [_Sent(places, merged, own_defaults[0])]


def _had_no_effect(problem: Problem, update: Any) -> bool:
    """Whether a merged update was rejected for its content, so that its parts can be sent one by
    one.

    An error of a user's function may come after an effect: then only what can be repeated is sent
    again.
    """
    if problem.state is State.MISSING or not is_record_rejected(problem):
        return False
    return isinstance(problem.error, PermanentError) or to_changes(update).repeatable
