"""`MemoryTable`: a table in this process's memory, for tests and experiments."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagster_adjunct.resources.tables.functions import DeclaredFunction, StoreFunction, record_not_found_error
from dagster_adjunct.resources.tables.layers import STORE_CAPABILITIES, Capabilities
from dagster_adjunct.resources.tables.operation import (
    Changes,
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
        entries, kind, records = operation.entries, operation.kind, self._store.records
        if kind is OperationKind.GET:
            stored = map(records.get, entries.keys)
            return Outcomes(operation.count, [None if record is None else record.copy() for record in stored])
        values: Sequence[Any] = entries.values or [None] * len(entries)
        if kind is OperationKind.PUT and not operation.conditions:
            records.update(zip(entries.keys, map(dict, values), strict=True))
            return Outcomes(operation.count)
        problems: dict[int, Problem] = {}
        begun = 0
        write = self._write_marked if operation.conditions else self._write
        plain = kind is OperationKind.UPDATE and not operation.conditions
        for place, (key, value) in enumerate(zip(entries.keys, values, strict=True)):
            if plain and type(value) is dict and (record := records.get(key)) is not None:  # which most are
                record.update(value)
                continue
            began, problem = write(operation, place, key)
            begun += began
            if problem is not None:
                problems[place] = problem
        return Outcomes(len(entries), problems=problems, defaults_put=begun)

    def _write(self, operation: Operation[Any], place: int, key: Hashable) -> tuple[int, Problem | None]:
        """Apply one entry; return how many defaults that put, and its problem if there is one."""
        records, entries, kind = self._store.records, operation.entries, operation.kind
        if kind is OperationKind.DELETE:
            records.pop(key, None)
            return 0, None
        assert entries.values is not None
        if kind is not OperationKind.UPDATE:
            if kind is OperationKind.PUT_IF_ABSENT and key in records:
                return 0, Problem(State.SKIPPED)
            records[key] = dict(entries.values[place])
            return 0, None
        begun = key not in records
        if begun:
            default = None if entries.defaults is None else entries.defaults[place]
            if default is None:
                return 0, Problem(State.MISSING, record_not_found_error([key], f"memory table {self.name}"))
            records[key] = dict(default)
        apply_changes(records[key], to_changes(entries.values[place]))
        return int(begun), None

    def _write_marked(self, operation: Operation[Any], place: int, key: Hashable) -> tuple[int, Problem | None]:
        """Apply one entry if its conditions hold, and remember it."""
        store, conditions, entries = self._store, operation.conditions, operation.entries
        assert entries.marks is not None  # conditions require marks
        mark, late, time = entries.marks[place], None, None
        if conditions.idempotent and mark.position <= store.applied.get(key, {}).get(mark.source, ""):
            return 0, Problem(State.SKIPPED)
        if conditions.newest_by is not None:
            assert entries.newest is not None
            time = (entries.newest[place], mark.tie)
            # A record that was put without conditions is older than any message of the same time.
            of_record = store.records.get(key, {}).get(conditions.newest_by)
            known = store.newest.get(key) or (None if of_record is None else (of_record, ""))
            if known is not None and time < known:
                late = Changes()
                if operation.applies_late_changes:
                    changes = to_changes((entries.values or ())[place])
                    numbers = {n: number for n, number in changes.add.items() if not isinstance(number, Mapping | None)}
                    late = Changes(add=numbers, append={n: values for n, values in changes.append.items() if values})
        began, problem = 0, None
        if late is None:
            began, problem = self._write(operation, place, key)
        elif late.repeatable or key not in store.records:
            problem = Problem(State.SKIPPED)
        else:
            apply_changes(store.records[key], late)
        if problem is None or (late is not None and not late.repeatable):  # passes even without a record
            if conditions.idempotent:
                store.applied.setdefault(key, {})[mark.source] = mark.position
            if time is not None and late is None:
                store.newest[key] = time
        return began, problem


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
