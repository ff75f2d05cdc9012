"""What one request of writes comes to: which entries pass, and the one change to each key that they make together.

All of it is pure. A store locks the request's keys, reads what it has of them (`Found`), asks `planned`, and writes the
plan, all in one transaction. Entries of one key take effect in their order, each seeing what those before it did.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dagster_adjunct.resources.backends.applied_marks import Applied, check_newest_by
from dagster_adjunct.resources.backends.column_values import Kind
from dagster_adjunct.resources.backends.rows import CheckedChanges, Row, RowCodec
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.tables.arrow_entries import ArrowEntries
from dagster_adjunct.resources.tables.operation import Mark, Operation, OperationKind
from dagster_adjunct.resources.tables.outcomes import Problem, State
from dagster_adjunct.resources.tables.record_not_found import record_not_found


class Entry(NamedTuple):
    """One entry that fits the table. `value`: a whole record, or changes; None for a delete."""

    place: int
    key: Row
    value: Any
    time: Any = None


@dataclass(frozen=True, slots=True)
class Checked:
    """The entries of a request that fit the table, and why the others don't."""

    entries: Sequence[Entry]
    problems: dict[int, Problem]

    @property
    def keys(self) -> list[Row]:
        """The keys of the entries, each once."""
        return list(dict.fromkeys(entry.key for entry in self.entries))


@dataclass(frozen=True, slots=True)
class Found:
    """What the store has: of each key with a record the columns that were asked for; and what was applied to keys."""

    records: Mapping[Row, Mapping[str, Any]] = field(default_factory=dict)
    applied: Mapping[Row, Applied] = field(default_factory=dict)


@dataclass(slots=True)
class Plan:
    """What to write, at most one of the first four for each key.

    `puts` are whole records whatever is there. `begins` are whole records for keys that have none: if another has begun
    one meanwhile, the plan is void and has to be made again. `changes` are for records that are there. `applied` is
    what to keep beside them.
    """

    puts: dict[Row, dict[str, Any]] = field(default_factory=dict)
    begins: dict[Row, dict[str, Any]] = field(default_factory=dict)
    deletes: dict[Row, None] = field(default_factory=dict)
    changes: dict[Row, CheckedChanges] = field(default_factory=dict)
    applied: dict[Row, Applied] = field(default_factory=dict)
    problems: dict[int, Problem] = field(default_factory=dict)
    defaults_put: int = 0

    def groups(self) -> Iterator[Group]:
        """The changes as groups of the same columns."""
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[Row]] = {}
        for key, (sets, _, append) in self.changes.items():
            if sets or append:
                names = (tuple(sorted(sets)), tuple(sorted(append)))
                row = (*(sets[name] for name in names[0]), *(append[name] for name in names[1]), *key)
                groups.setdefault(names, []).append(row)
        return (Group(sets, append, rows) for (sets, append), rows in groups.items())


class Group(NamedTuple):
    """Changes of the same columns: rows of what is set, then of what is appended, then of the key."""

    sets: tuple[str, ...]
    append: tuple[str, ...]
    rows: list[Row]


def checked(codec: RowCodec, operation: Operation[Any]) -> Checked:
    """Check all entries; one that does not fit is a problem of its own."""
    entries, kind = operation.entries, operation.kind
    to_key = codec.keys_by(entries.key_names if isinstance(entries, ArrowEntries) else operation.key)
    value_of: Callable[[Row, Any], Any] = codec.changes if kind is OperationKind.UPDATE else codec.whole
    valued = kind not in (OperationKind.GET, OperationKind.DELETE)
    values: Sequence[Any] = (entries.values if valued else None) or [None] * len(entries)
    newest_by = operation.conditions.newest_by
    check_newest_by(codec, newest_by)
    fit: list[Entry] = []
    problems: dict[int, Problem] = {}
    for place, (key, value) in enumerate(zip(entries.keys, values, strict=True)):
        try:
            row = to_key(key)
            new = value_of(row, value) if valued else None
            time = None if newest_by is None else _time(codec, newest_by, operation, place)
            fit.append(Entry(place, row, new, time))
        except SchemaMismatchError as error:
            problems[place] = Problem(State.REFUSED, error)
    return Checked(fit, problems)


def _time(codec: RowCodec, newest_by: str, operation: Operation[Any], place: int) -> Any:
    newest = operation.entries.newest
    time = None if newest is None else codec.checked(newest_by, newest[place])
    if time is None:
        raise SchemaMismatchError(
            f"{codec.table}: the entry for key {operation.entries.keys[place]!r} has no {newest_by}, by which the "
            "newest is kept.",
            f"Give every message its {newest_by}, or filter those without one out.",
            column=newest_by,
        )
    return time


def columns_to_read(operation: Operation[Any], entries: Sequence[Entry]) -> tuple[str, ...]:
    """The columns of records that the plan depends on."""
    names: dict[str, None] = {}
    if operation.conditions.newest_by is not None:
        names[operation.conditions.newest_by] = None
    if operation.kind is OperationKind.UPDATE:
        for entry in entries:
            if entry.value.add:
                names.update(dict.fromkeys(entry.value.add))
    return tuple(names)


def must_look(operation: Operation[Any]) -> bool:
    """Whether the plan depends on what the store has."""
    return bool(operation.conditions) or operation.kind in (OperationKind.UPDATE, OperationKind.PUT_IF_ABSENT)


def planned(codec: RowCodec, operation: Operation[Any], asked: Checked, stored: Found) -> Plan:
    """Decide, entry by entry in their order."""
    plan = Plan(problems=dict(asked.problems))
    updates = _Updates(codec, operation)
    steps = {
        OperationKind.PUT: _put,
        OperationKind.PUT_IF_ABSENT: _put_if_absent,
        OperationKind.DELETE: _delete,
        OperationKind.UPDATE: updates.update,
    }
    step = steps[operation.kind]
    conditions, marks = operation.conditions, operation.entries.marks
    for entry in asked.entries:
        if not conditions:
            problem = step(plan, stored, entry)
        else:
            assert marks is not None  # whoever states conditions gives marks
            mark: Mark = marks[entry.place]
            applied = plan.applied.get(entry.key) or _known(operation, stored, entry.key)
            late = applied.is_late(conditions, mark, entry.time)
            if applied.has_had(conditions, mark) or (late and not operation.adds_late):
                plan.problems[entry.place] = Problem(State.SKIPPED)
                continue
            to_do = updates.late(entry) if late else entry
            problem = (updates.add_late if late else step)(plan, stored, to_do)
            # What it would add where there is no record is passed over, and so when it comes again.
            passed_over = late and any(to_do.value) and problem is not None and problem.state is State.SKIPPED
            if problem is None or passed_over:
                applied.remember(conditions, mark, entry.time, late=late)
                plan.applied[entry.key] = applied
        if problem is not None:
            plan.problems[entry.place] = problem
    return plan


def _known(operation: Operation[Any], stored: Found, key: Row) -> Applied:
    """What was applied to the key; a record that was written without conditions is older than messages of its time."""
    applied = stored.applied.get(key) or Applied()
    newest_by = operation.conditions.newest_by
    if newest_by is not None and applied.newest is None:
        time = stored.records.get(key, {}).get(newest_by)
        applied.of_record = None if time is None else (time, "")
    return applied


def _put(plan: Plan, stored: Found, entry: Entry) -> Problem | None:
    plan.puts[entry.key] = entry.value
    return None


def _put_if_absent(plan: Plan, stored: Found, entry: Entry) -> Problem | None:
    if entry.key in stored.records or entry.key in plan.begins:
        return Problem(State.SKIPPED)
    plan.begins[entry.key] = entry.value
    return None


def _delete(plan: Plan, stored: Found, entry: Entry) -> Problem | None:
    plan.deletes[entry.key] = None
    return None


class _Updates:
    def __init__(self, codec: RowCodec, operation: Operation[Any]) -> None:
        self._codec = codec
        self._defaults = operation.entries.defaults
        self._given: Sequence[Hashable] = operation.entries.keys

    def update(self, plan: Plan, stored: Found, entry: Entry) -> Problem | None:
        """Change the record that is there or was begun; begin it where there is a default."""
        changes: CheckedChanges = entry.value
        try:
            if entry.key in stored.records:
                known = plan.changes.get(entry.key)
                if known is None:
                    known = CheckedChanges({}, {}, {})
                _apply(self._codec, changes, known.set, stored.records[entry.key], known.append)
                plan.changes[entry.key] = known
                return None
            record = plan.begins.get(entry.key)
            if record is not None:
                _apply(self._codec, changes, record, record)
                return None
            default = None if self._defaults is None else self._defaults[entry.place]
            if default is None:
                return Problem(State.MISSING, record_not_found([self._given[entry.place]], self._codec.table))
            record = self._codec.whole(entry.key, default)
            _apply(self._codec, changes, record, record)
        except SchemaMismatchError as error:
            return Problem(State.REFUSED, error)
        plan.begins[entry.key] = record
        plan.defaults_put += 1
        return None

    def late(self, entry: Entry) -> Entry:
        """Return what of an update is done to a record that is newer (`Operation.adds_late`)."""
        numbers = {n: value for n, value in entry.value.add.items() if self._codec.columns[n].kind is not Kind.JSON}
        return entry._replace(value=CheckedChanges({}, numbers, entry.value.append))

    def add_late(self, plan: Plan, stored: Found, entry: Entry) -> Problem | None:
        """Do what is late to a record that is there."""
        if not any(entry.value) or (entry.key not in stored.records and entry.key not in plan.begins):
            return Problem(State.SKIPPED)
        return self.update(plan, stored, entry)


def _apply(
    codec: RowCodec,
    changes: CheckedChanges,
    new: dict[str, Any],
    old: Mapping[str, Any],
    appended: dict[str, list[Any]] | None = None,
) -> None:
    """Bring the changes into `new`, all or none. `appended`: what the store itself puts at the end of lists."""
    if changes.add:
        sums = {
            name: codec.sum(name, new[name] if name in new else old.get(name), number)
            for name, number in changes.add.items()
        }
        new.update(sums)
    if changes.set:
        new.update(changes.set)
        if appended:
            for name in changes.set:
                appended.pop(name, None)
    for name, values in changes.append.items():
        if appended is None or name in new:
            new[name] = [*(new.get(name) or ()), *values]
        else:
            appended[name] = [*appended.get(name, ()), *values]


class Halving:
    """Finds out which entries a store refuses, where it says no more than that a request as a whole was refused.

    A refused part is sent again as two halves, in order. What follows a part that failed and may be sent again is not
    sent at all: it would overtake it.
    """

    def __init__(self, asked: Checked) -> None:
        self.problems: dict[int, Problem] = dict(asked.problems)
        self.defaults_put = 0
        self._parts = [asked.entries] if asked.entries else []

    def next(self) -> Checked | None:
        """What to send next; None when all is done."""
        return Checked(self._parts[0], {}) if self._parts else None

    def done(self, plan: Plan) -> None:
        """The part took effect."""
        self._parts.pop(0)
        self.problems |= plan.problems
        self.defaults_put += plan.defaults_put

    def failed(self, problem: Problem, *, by_data: bool) -> None:
        """The part had no effect, or nobody knows. `by_data`: the store refused some of its entries."""
        part = self._parts.pop(0)
        if by_data and len(part) > 1:
            middle = len(part) // 2
            self._parts[:0] = [part[:middle], part[middle:]]
            return
        self.problems.update({entry.place: problem for entry in part})
        if not by_data:
            unsent = problem if problem.state is not State.UNKNOWN else Problem(State.FAILED, problem.error)
            self.problems.update({entry.place: unsent for rest in self._parts for entry in rest})
            self._parts = []
