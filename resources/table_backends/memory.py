"""`MemoryTable`: a table in this process's memory, for tests and experiments."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.table_backends.nested_values import InnerName, parse_inner_name
from dagster_adjunct.resources.table_backends.write_plan import (
    Applied,
    CheckedChanges,
    Entry,
    Record,
    Row,
    RowCodec,
    StoredState,
    ValidEntries,
    assign,
    plan_writes,
)
from dagster_adjunct.resources.tables.functions import DeclaredFunction, StoreFunction
from dagster_adjunct.resources.tables.operation import (
    STORE_CAPABILITIES,
    Capabilities,
    Changes,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
    to_changes,
)
from dagster_adjunct.resources.validation import validated


@dataclass(slots=True)
class _Store:
    """The records of one name and, for keys written with conditions, what was applied to them."""

    records: dict[Any, dict[str, Any]] = field(default_factory=dict)
    applied: dict[Any, Applied] = field(default_factory=dict)


_STORES: dict[str, _Store] = {}


class _Removed:
    """Marks a column as removed until the record is stored. It is false, as null is, so `value
    or …` works.
    """

    def __bool__(self) -> bool:
        return False


_REMOVED = _Removed()


class _AnyRecords(RowCodec):
    """A codec that checks nothing: records may have any columns and values. It has no columns.

    What an update calls `a.b` is the value at this path, unless the record has such a column.
    """

    def __init__(self, table: str, store: _Store) -> None:
        self.table = table
        self._store = store

    def whole(self, key: Row, record: Record) -> dict[str, Any]:
        return dict(record)

    def changes(self, key: Row, update: Record | Changes) -> CheckedChanges:
        """Return the changes of an update, in which names of parts of columns are paths."""
        changes = to_changes(update)
        added = {}
        for name, number in changes.add.items():
            if number is not None:
                added[self._as_path(key, name)] = number
        removed = {}
        for name in changes.remove:
            column_or_path = self._as_path(key, name)
            is_path = isinstance(column_or_path, InnerName)
            removed[column_or_path] = None if is_path else _REMOVED
        sets = {self._as_path(key, name): value for name, value in changes.set.items()}
        return CheckedChanges(
            {**sets, **removed},
            added,
            {name: list(values) for name, values in changes.append.items() if values},
        )

    def _as_path(self, key: Any, name: str) -> str:
        """Return a name in an update as an `InnerName` if it is a path, unless the record has a
        column of this name. Raises SchemaMismatchError if the path leads through no struct.
        """
        record = self._store.records.get(key) or {}
        if name in record:
            return name
        path = parse_inner_name(name)
        if path is None:
            return name
        value: Any = record.get(path.root)
        for step in path.names:
            if value is None:
                break
            if not isinstance(value, Mapping):
                problem = f"{self.table}: an update changes {name!r}, a part of {value!r:.100}."
                raise SchemaMismatchError(problem, "Set the whole column.", column=name)
            value = value.get(step)
        self.has_inner = True  # from now on, plans look for paths
        return path

    def sum(self, name: str, old: Any, number: Any) -> Any:
        """The value after adding a number to `old`, or the members of a mapping."""
        if isinstance(number, Mapping):
            return {**(old or {}), **number}
        return (old or 0) + number


def _no_value(key: Any, value: Any) -> None:
    """The value of a delete, whose entries have none."""
    return None


@validated
class MemoryTable(DeclaredFunction, StoreFunction[Hashable, Record, Record | Changes]):
    """Records as mappings, kept by `name` while the process lives; supports everything a store can.

    Tables of the same name share their records. Use one event loop at a time: a request is atomic
    there, because it never awaits.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._store = _STORES.setdefault(name, _Store())
        self._rules = _AnyRecords(f"memory table {name}", self._store)

    def __repr__(self) -> str:
        return f"MemoryTable({self.name!r})"

    @property
    def capabilities(self) -> Capabilities:
        return STORE_CAPABILITIES

    def records(self) -> dict[Hashable, dict[str, Any]]:
        """Return all records by their keys."""
        return {key: dict(record) for key, record in self._store.records.items()}

    def fill(self, records: Mapping[Hashable, Record]) -> None:
        """Put records directly, without the table's layers and conditions, replacing those of
        the same keys.
        """
        self._store.records.update({key: dict(record) for key, record in records.items()})

    def content(self) -> tuple[dict[Hashable, Any], ...]:
        """Return the records and what was applied to them, for `restore`."""
        return self._store.records, self._store.applied

    def restore(self, content: tuple[dict[Hashable, Any], ...]) -> None:
        """Replace the content with what `content` has returned, which is not copied."""
        self._store.records, self._store.applied = content

    def clear(self) -> None:
        """Remove all records of this name, and what was applied to them."""
        self._store.records.clear()
        self._store.applied.clear()

    async def send(self, operation: Operation[Any]) -> Outcomes:
        """Read copies of records; write plainly where nothing has to be checked."""
        keys = operation.entries.keys
        kind = operation.kind
        records = self._store.records
        if kind is OperationKind.GET:
            stored = map(records.get, keys)
            copies = [None if record is None else record.copy() for record in stored]
            return Outcomes(operation.count, copies)
        values: Sequence[Any] = operation.entries.values or [None] * len(keys)
        if operation.conditions or not self._write_plainly(kind, keys, values):
            return self._write(operation, values)
        return Outcomes(operation.count)

    def _write_plainly(
        self, kind: OperationKind, keys: Sequence[Hashable], values: Sequence[Any]
    ) -> bool:
        """Execute a write that needs no plan, as most do not; return False, without a change, if
        it needs one.
        """
        records = self._store.records
        if kind is OperationKind.PUT:
            records.update(zip(keys, map(dict, values), strict=True))
        elif kind is OperationKind.DELETE:
            for key in keys:
                records.pop(key, None)
        elif kind is OperationKind.UPDATE:
            return self._update_plainly(keys, values)
        else:
            return False
        return True

    def _update_plainly(self, keys: Sequence[Hashable], values: Sequence[Any]) -> bool:
        """Set columns of records that are all there; return False, without a change, if the updates
        do anything else.
        """
        records = self._store.records
        if set(map(type, values)) != {dict} or not records.keys() >= set(keys):
            return False
        if any("." in name for name in set[str]().union(*values)):  # values inside columns
            return False
        for key, value in zip(keys, values, strict=True):
            records[key].update(value)
        return True

    def _write(self, operation: Operation[Any], values: Sequence[Any]) -> Outcomes:
        """Write an operation as stores do, by a plan."""
        store = self._store
        rules = self._rules
        state = StoredState(store.records, store.applied)
        plan = plan_writes(rules, operation, self._check_values(operation, values), state)
        for key in plan.deletes:
            store.records.pop(key, None)
        written = {**plan.puts, **plan.begins}
        for key, changes in plan.changes.items():
            record = written[key] = dict(store.records[key])
            assign(rules, changes.set, record, is_record=True)
            for name, more in changes.append.items():
                record[name] = [*(record.get(name) or ()), *more]
        for key, record in written.items():
            store.records[key] = {
                name: value for name, value in record.items() if value is not _REMOVED
            }
        store.applied.update(plan.applied)
        return Outcomes(len(operation), problems=plan.problems, defaults_put=plan.defaults_put)

    def _check_values(self, operation: Operation[Any], values: Sequence[Any]) -> ValidEntries:
        """Check the values that an operation writes, by its kind; a value that does not fit the
        table is a problem of its entry.
        """
        entries = operation.entries
        kind = operation.kind
        rules = self._rules
        check_value: Callable[..., Any]
        if kind is OperationKind.UPDATE:
            check_value = rules.changes
        elif kind is OperationKind.DELETE:
            check_value = _no_value
        else:
            check_value = rules.whole
        newest: Sequence[Any]
        if operation.conditions.newest_by is None:
            newest = [None] * len(entries)
        else:
            newest = entries.newest or ()
        valid = []
        problems = {}
        rows = zip(entries.keys, values, newest, strict=True)
        for place, (key, value, time) in enumerate(rows):
            try:
                valid.append(Entry(place, key, check_value(key, value), time))
            except SchemaMismatchError as error:
                problems[place] = Problem(State.REFUSED, error)
        return ValidEntries(valid, problems)
