"""`MemoryTable`: a table in this process's memory, for tests and experiments."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dagster_adjunct.resources.tables.functions import DeclaredFunction, StoreFunction, record_not_found_error
from dagster_adjunct.resources.tables.layers import STORE_CAPABILITIES, Capabilities
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
    to_changes,
)
from dagster_adjunct.resources.validation import validated

Record = Mapping[str, Any]


@dataclass(slots=True)
class _Store:
    """The records of one name and, for keys with conditions, what was applied to them."""

    records: dict[Hashable, dict[str, Any]] = field(default_factory=dict)
    newest: dict[Hashable, tuple[Any, str]] = field(default_factory=dict)
    applied: dict[Hashable, dict[str, str]] = field(default_factory=dict)


_STORES: dict[str, _Store] = {}


@validated
class MemoryTable(DeclaredFunction, StoreFunction[Hashable, Record, Record | Changes]):
    """Records as mappings, kept by `name` while the process lives; supports everything a store can.

    Tables of the same name share their records. Use one event loop at a time: nothing here awaits, so no entry is half
    done.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._store = _STORES.setdefault(name, _Store())

    def __repr__(self) -> str:
        return f"MemoryTable({self.name!r})"

    @property
    def capabilities(self) -> Capabilities:
        return STORE_CAPABILITIES

    def records(self) -> dict[Hashable, dict[str, Any]]:
        """Return all records by their keys."""
        return {key: dict(record) for key, record in self._store.records.items()}

    def fill(self, records: Mapping[Hashable, Record]) -> None:
        """Put records as they are, replacing those of the same keys."""
        self._store.records.update({key: dict(record) for key, record in records.items()})

    def content(self) -> tuple[dict[Hashable, Any], ...]:
        """Return the records and what was applied to them, for `restore`."""
        return self._store.records, self._store.newest, self._store.applied

    def restore(self, content: tuple[dict[Hashable, Any], ...]) -> None:
        """Replace the content with that of another table."""
        self._store.records, self._store.newest, self._store.applied = content

    def clear(self) -> None:
        """Remove all records of this name, and what was applied to them."""
        for kept in (self._store.records, self._store.newest, self._store.applied):
            kept.clear()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        entries, kind = operation.entries, operation.kind
        if kind is OperationKind.GET:
            stored = map(self._store.records.get, entries.keys)
            return Outcomes(operation.count, [None if record is None else record.copy() for record in stored])
        if kind is OperationKind.PUT and not operation.conditions:
            self._store.records.update(zip(entries.keys, map(dict, entries.values or ()), strict=True))
            return Outcomes(operation.count)
        if kind is OperationKind.UPDATE and not operation.conditions:
            return self._update_all(operation)
        problems: dict[int, Problem] = {}
        begun = 0
        for place, key in enumerate(entries.keys):
            if self._was_applied(operation, place, key):
                problems[place] = Problem(State.SKIPPED)
                continue
            late = self._late_changes(operation, place) if self._is_late(operation, place, key) else None
            if late is None:
                began, problem = self._write(operation, place, key)
            else:
                began, problem = 0, self._add_late(key, late)
            begun += began
            if problem is None or (late is not None and not late.repeatable):  # passes even without a record
                self._record_applied(operation, place, key, late=late is not None)
            if problem is not None:
                problems[place] = problem
        return Outcomes(len(entries), problems=problems, defaults_put=begun)

    def _update_all(self, operation: Operation[Any]) -> Outcomes:
        """Apply updates without conditions; plain ones of existing records, which most are, in one go."""
        records, values, problems, begun = self._store.records, operation.entries.values or (), {}, 0
        for place, (key, value) in enumerate(zip(operation.entries.keys, values, strict=True)):
            if type(value) is dict and (record := records.get(key)) is not None:
                record.update(value)
                continue
            began, problem = self._write(operation, place, key)
            begun += began
            if problem is not None:
                problems[place] = problem
        return Outcomes(len(values), problems=problems, defaults_put=begun)

    def _write(self, operation: Operation[Any], place: int, key: Hashable) -> tuple[int, Problem | None]:
        """Apply one entry; return how many defaults that put, and its problem if there is one."""
        records, entries = self._store.records, operation.entries
        if operation.kind is OperationKind.DELETE:
            records.pop(key, None)
            return 0, None
        assert entries.values is not None
        if operation.kind is OperationKind.PUT:
            records[key] = dict(entries.values[place])
            return 0, None
        if operation.kind is OperationKind.PUT_IF_ABSENT:
            if key in records:
                return 0, Problem(State.SKIPPED)
            records[key] = dict(entries.values[place])
            return 0, None
        begun = 0
        if key not in records:
            default = None if entries.defaults is None else entries.defaults[place]
            if default is None:
                return 0, Problem(State.MISSING, record_not_found_error([key], f"memory table {self.name}"))
            records[key], begun = dict(default), 1
        apply_changes(records[key], to_changes(entries.values[place]))
        return begun, None

    @staticmethod
    def _late_changes(operation: Operation[Any], place: int) -> Changes:
        """The part of a late update that is still applied (`Operation.applies_late_changes`)."""
        changes = to_changes((operation.entries.values or ())[place]) if operation.applies_late_changes else Changes()
        numbers = {n: number for n, number in changes.add.items() if not isinstance(number, Mapping | None)}
        return Changes(add=numbers, append={n: values for n, values in changes.append.items() if values})

    def _add_late(self, key: Hashable, changes: Changes) -> Problem | None:
        """Apply late changes to an existing record."""
        if key not in self._store.records or changes.repeatable:
            return Problem(State.SKIPPED)
        apply_changes(self._store.records[key], changes)
        return None

    def _was_applied(self, operation: Operation[Any], place: int, key: Hashable) -> bool:
        if not operation.conditions.idempotent:
            return False
        mark = _mark(operation, place)
        return mark.position <= self._store.applied.get(key, {}).get(mark.source, "")

    def _is_late(self, operation: Operation[Any], place: int, key: Hashable) -> bool:
        conditions, entries = operation.conditions, operation.entries
        if conditions.newest_by is None:
            return False
        assert entries.newest is not None
        known = self._store.newest.get(key) or self._time_of_record(key, conditions.newest_by)
        return known is not None and (entries.newest[place], _mark(operation, place).tie) < known

    def _time_of_record(self, key: Hashable, newest_by: str) -> tuple[Any, str] | None:
        """The time of a record that was put without conditions: older than any message of the same time."""
        time = self._store.records.get(key, {}).get(newest_by)
        return None if time is None else (time, "")

    def _record_applied(self, operation: Operation[Any], place: int, key: Hashable, *, late: bool) -> None:
        conditions, entries = operation.conditions, operation.entries
        if conditions.idempotent:
            mark = _mark(operation, place)
            self._store.applied.setdefault(key, {})[mark.source] = mark.position
        if conditions.newest_by is not None and not late:
            assert entries.newest is not None
            self._store.newest[key] = (entries.newest[place], _mark(operation, place).tie)


def apply_changes(record: dict[str, Any], changes: Changes) -> None:
    """Apply `changes` to `record` in place."""
    record.update(changes.set)
    for name, number in changes.add.items():
        if number is not None:
            members = isinstance(number, Mapping)
            record[name] = {**(record.get(name) or {}), **number} if members else (record.get(name) or 0) + number
    for name, values in changes.append.items():
        if values:
            record[name] = [*(record.get(name) or ()), *values]
    for name in changes.remove:
        record.pop(name, None)


def _mark(operation: Operation[Any], place: int) -> Mark:
    marks = operation.entries.marks
    assert marks is not None  # conditions require marks
    return marks[place]
