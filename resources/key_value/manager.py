"""`KeyValueTableManager`: creates, lists, updates, seals and deletes key-value tables, in scopes (PDP-39).

What is known about them is one namespace of the metadata store (`table_backends.py`), in the lake's object store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import datetime
from itertools import islice
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    KeyValueTableError,
    KeyValueTableExistsError,
    KeyValueTableNotFoundError,
    MalformedDocumentError,
    ScopeNotEmptyError,
    ScopeNotFoundError,
    TransientError,
)
from dagster_adjunct.resources.key_value.segment import (
    HASH_BITS,
    KeyValueTableConfiguration,
    PreflightChecks,
    SegmentBackend,
)
from dagster_adjunct.resources.key_value.serializers import Serializer
from dagster_adjunct.resources.key_value.table import KeyValueTable
from dagster_adjunct.resources.key_value.table_backends import (
    StoredScope,
    StoredTable,
    TableBackends,
    TableName,
    TableState,
    check_table_name,
    new_incarnation,
    parse_stored_entry,
)
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.objects.lake import Lake


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """One partition of a table: the keys whose hash is from `first_hash` up to `last_hash` are in it, at `location`."""

    partition: int
    first_hash: int
    last_hash: int
    location: str


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table as it is listed. `state` is creating, active, sealing, sealed or deleting.

    Where its entry can't be read, `problem` says why, and only the names are known.
    """

    scope: str
    name: str
    state: str | None = None
    configuration: KeyValueTableConfiguration | None = None
    backend: str | None = None
    incarnation: str | None = None
    created_at: datetime | None = None
    problem: str | None = None


def table_info(name: TableName, stored: Any) -> TableInfo:
    """Return what is told of a stored entry."""
    try:
        table = parse_stored_entry(StoredTable, stored, str(name))
    except MalformedDocumentError as error:
        return TableInfo(name.scope, name.table, problem=error.problem)
    return TableInfo(
        name.scope,
        name.table,
        table.state.value,
        table.configuration,
        str(table.backend.get("backend") or table.backend.get("lake")),
        table.incarnation,
        table.created_at,
    )


def hash_range(partition: int, partitions: int) -> tuple[int, int]:
    """Return the first and the last hash of a partition: of n equal ranges, as `partition_of` has them."""
    return _first(partition, partitions), _first(partition + 1, partitions) - 1


def _first(partition: int, partitions: int) -> int:
    return -(-(partition << HASH_BITS) // partitions)


def ensure_table(manager: KeyValueTableManager, scope: str, table: str, partitions: int) -> None:
    """See to it that a scope and a table of so many partitions are there; limits that it has got since are kept.

    Raises KeyValueTableExistsError where it has another number of partitions, or lies in another backend.
    """
    manager.create_scope(scope)
    wanted = KeyValueTableConfiguration(partitions)
    with suppress(KeyValueTableNotFoundError):
        wanted = replace(manager.get_configuration(scope, table), partitions=partitions)
    manager.create(scope, table, wanted)


def require_scope(snapshot: NamespaceSnapshot, scope: str) -> None:
    """Raise ScopeNotFoundError where there is no such scope."""
    stored = snapshot.get(scope)
    if stored is None:
        raise ScopeNotFoundError(
            f"there is no scope {scope!r} of key-value tables.",
            "Check the name, or create it: create_scope, or adjunct kv scope create.",
            scope=scope,
        )
    parse_stored_entry(StoredScope, stored, f"scope {scope!r} of key-value tables")


def find_stored_table(snapshot: NamespaceSnapshot, table: TableName) -> StoredTable | None:
    """Return a table's entry, None where there is none. Raises MalformedDocumentError."""
    stored = snapshot.get(table.key)
    return None if stored is None else parse_stored_entry(StoredTable, stored, str(table))


def stored_table_json(table: StoredTable | None) -> dict[str, Any] | None:
    """Return an entry as a namespace takes it; None removes it."""
    return None if table is None else table.model_dump(mode="json")


def tables_in_scope(snapshot: NamespaceSnapshot, scope: str, after: str | None) -> Iterator[TableInfo]:
    """Yield the tables of a scope by name, from behind `after` on; also those that can't be read."""
    start = f"{scope}/" if after is None else next_key_after(f"{scope}/{after}")
    for key, stored in snapshot.items(start):
        if not key.startswith(f"{scope}/"):
            return
        yield table_info(TableName(scope, key.partition("/")[2]), stored)


def next_key_after(name: str | None) -> str:
    """Return the first key that comes behind this one; without one, the first of all."""
    return "" if name is None else f"{name}\0"


def validate_limit(limit: int | None) -> int | None:
    """Return how many are to be listed at most, None for all. Raises ConfigurationError."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ConfigurationError(
            f"limit is {limit!r}: expected a whole number from 1 on, or None.", "Change it.", argument="limit"
        )
    return limit


# What becomes of a key-value table's entry when it is created, updated, sealed, deleted: decided, not done.
#
# Each function takes the entry as it is stored (None: there is none) and gives the entry as it is to be. Racing
# managers decide again from what the other one has stored, so exactly one of them is told that it was the one.


UNFINISHED = frozenset({TableState.CREATING, TableState.SEALING, TableState.DELETING})


@dataclass(frozen=True, slots=True)
class TableTransition:
    """`entry` is to be stored (None: nothing is there, and stays so). What it leaves unfinished is then finished.

    `answer` is what the caller is told after that. None: what was there comes first, and then it is decided again.
    """

    answer: bool | None
    entry: StoredTable | None


def decide_create(
    current: StoredTable | None, wanted: StoredTable, name: TableName, same_backend: Callable[[StoredTable], bool]
) -> TableTransition:
    """Make `wanted`, or find that it is there. Raises KeyValueTableExistsError where that is configured otherwise."""
    if current is None:
        return TableTransition(True, wanted)
    if current.state is TableState.DELETING:
        return TableTransition(None, current)
    differences = [
        f"{field.name} {getattr(current, field.name)} (wanted: {getattr(wanted, field.name)})"
        for field in fields(KeyValueTableConfiguration)
        if getattr(current, field.name) != getattr(wanted, field.name)
    ]
    if not same_backend(current):
        differences.append(f"backend {_told(current, wanted)} (wanted: {_told(wanted, current)})")
    if differences:
        raise KeyValueTableExistsError(
            f"{name} exists with another configuration: {', '.join(differences)}.",
            "Take it as it is, update its limits (update), or use another name.",
            scope=name.scope,
            table=name.table,
        )
    return TableTransition(False, current)


def decide_update(
    current: StoredTable | None, configuration: KeyValueTableConfiguration, name: TableName
) -> TableTransition:
    """Give the table these limits; the answer is whether they are others."""
    table = require_stored_table(current, name)
    if table.partitions != configuration.partitions:
        raise KeyValueTableError(
            f"{name} has {table.partitions} partitions: expected the same, found {configuration.partitions}. The "
            "partitions of a table never change, because its keys are hashed to them.",
            "Create a table of another name with them, and copy the entries.",
            scope=name.scope,
            table=name.table,
        )
    after = table.configured(configuration)
    return TableTransition(after != table, after)


def decide_seal(current: StoredTable | None, name: TableName) -> TableTransition:
    """Seal the table; the answer is whether it was open."""
    table = require_stored_table(current, name)
    if table.state is TableState.CREATING:
        return TableTransition(None, table)
    if table.state is TableState.ACTIVE:
        return TableTransition(True, table.in_state(TableState.SEALING))
    return TableTransition(False, table)


def decide_delete(current: StoredTable | None) -> TableTransition:
    """Delete the table, in whatever state; the answer is whether there was one."""
    if current is None or current.state is TableState.DELETING:
        return TableTransition(False, current)
    return TableTransition(True, current.in_state(TableState.DELETING))


def finish_transition(current: StoredTable | None, done: StoredTable) -> StoredTable | None:
    """Return the entry once the backend has done what the state of `done` says; what others did meanwhile stays."""
    if current is None or current.incarnation != done.incarnation or current.state is not done.state:
        return current
    after = {TableState.CREATING: TableState.ACTIVE, TableState.SEALING: TableState.SEALED}
    return current.in_state(after[current.state]) if current.state in after else None


def was_deleted(current: StoredTable | None, table: StoredTable) -> bool:
    """Whether a table was deleted, or is being deleted, going by the entry that has its name now."""
    return current is None or current.incarnation != table.incarnation or current.state is TableState.DELETING


def require_stored_table(current: StoredTable | None, name: TableName) -> StoredTable:
    """Return the entry of a table that is there. Raises KeyValueTableNotFoundError, also for one being deleted."""
    if current is None:
        raise KeyValueTableNotFoundError(
            f"there is no {name}.", "Check the name, or create it.", scope=name.scope, table=name.table
        )
    if current.state is TableState.DELETING:
        raise KeyValueTableNotFoundError(
            f"{name} is being deleted: somebody has begun it, and it has not ended.",
            "Whoever deletes or creates it now ends that, and what it holds is gone.",
            scope=name.scope,
            table=name.table,
        )
    return current


def _told(table: StoredTable, other: StoredTable) -> str:
    """Return the settings of a table's backend that are not those of the other one's; all, where the kind differs."""
    is_alike = table.backend.get("backend") == other.backend.get("backend")
    differing = {
        name: value
        for name, value in table.backend.items()
        if value is not None and not (is_alike and other.backend.get(name) == value)
    }
    return ", ".join(f"{name}={value!r}" for name, value in differing.items()) or "the same without them"


NAMESPACE = "key-value-tables"
_BY = "key-value-table-manager"
_PATIENCE = 30.0  # seconds for which a backend that is out of reach is asked again

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class KeyValueTableManager:
    """The key-value tables of a lake. Safe to use from threads and from many processes; picklable.

    `backend` is where tables are created; without one that is SQLite beside a local lake, and the lake's own objects
    otherwise. Where a table lies is stored with it: everything else finds it whichever backend the manager has.

    Names of scopes and tables are 1 to 255 letters (ASCII), digits, `.`, `-` and `_`, and don't begin with `_`
    (InvalidNameError). A call that dies half way is finished by the next one that meets the table. Methods block.
    Besides what they say, they raise TableUnavailableError and StoreUnavailableError where a store is out of reach
    (the same call may be repeated), and CommitStateUnknownError where it never said whether it happened.
    """

    def __init__(self, lake: Lake, backend: SegmentBackend | None = None) -> None:
        if not isinstance(lake, Lake):
            raise ConfigurationError(
                f"a manager of key-value tables has lake={lake!r:.80}: expected a Lake.",
                f"Give open_lake({lake!r:.80})." if isinstance(lake, str) else "Give what open_lake(…) returns.",
                argument="lake",
            )
        self.lake = lake
        self._backends = TableBackends(lake, backend)
        self._namespace = MetadataStore(lake).namespace(NAMESPACE, "all")

    def __reduce__(self) -> tuple[type[KeyValueTableManager], tuple[Lake, SegmentBackend | None]]:
        return KeyValueTableManager, (self.lake, self._backends.given)

    def __repr__(self) -> str:
        return f"KeyValueTableManager({self.lake.url!r})"

    # -- scopes

    def create_scope(self, scope: str) -> bool:
        """Make a scope; return False where there is one of this name."""
        check_table_name("scope", scope)
        made = StoredScope(created_at=self.lake.now()).model_dump(mode="json")

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], bool]:
            is_new = snapshot.get(scope) is None
            return ({scope: made} if is_new else {}), is_new

        return self._namespace.transact(decide, by=_BY)

    def delete_scope(self, scope: str) -> bool:
        """Delete a scope that has no tables; return False where there is none. Raises ScopeNotEmptyError."""
        check_table_name("scope", scope)

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], bool | list[TableInfo]]:
            if snapshot.get(scope) is None:
                return {}, False
            tables = list(islice(tables_in_scope(snapshot, scope, None), 3))
            return ({}, tables) if tables else ({scope: None}, True)

        answer = self._namespace.transact(decide, by=_BY)
        while isinstance(answer, list):
            left = [table for table in answer if table.state == TableState.DELETING.value]
            if not left:
                raise ScopeNotEmptyError(
                    f"scope {scope!r} holds tables: {', '.join(table.name for table in answer)}"
                    f"{', …' if len(answer) > 2 else ''}.",
                    "Delete them first.",
                    scope=scope,
                )
            for table in left:
                self.delete(scope, table.name)
            answer = self._namespace.transact(decide, by=_BY)
        return answer

    def list_scopes(self, *, after: str | None = None, limit: int | None = None) -> tuple[str, ...]:
        """Return the names of scopes in their order: at most `limit`, those behind `after` alone.

        A listing goes on from the last name that was seen, in any process.
        """
        names = (key for key, _ in self._namespace.read().items(next_key_after(after)) if "/" not in key)
        return tuple(islice(names, validate_limit(limit)))

    # -- tables

    def create(self, scope: str, name: str, configuration: KeyValueTableConfiguration) -> bool:
        """Make a table; return False where it exists with the same configuration, in the same backend.

        Of any number who create one table at once, exactly one is told True. Raises ScopeNotFoundError, and
        KeyValueTableExistsError where it exists with another configuration or in another backend.
        """
        table = TableName.checked(scope, name)
        wanted = StoredTable(
            state=TableState.CREATING,
            incarnation=new_incarnation(),
            partitions=configuration.partitions,
            longest_key=configuration.longest_key,
            longest_value=configuration.longest_value,
            backend=self._backends.description(),
            created_at=self.lake.now(),
        )

        def decide(current: StoredTable | None) -> TableTransition:
            if current is None:  # settings that can't work here are told before anything is stored
                self._backends.of(table, wanted).location(wanted.id(table), 0)
            return decide_create(current, wanted, table, lambda other: self._backends.has(table, other))

        return self._change(table, decide)

    def list(self, scope: str, *, after: str | None = None, limit: int | None = None) -> tuple[TableInfo, ...]:
        """Return the tables of a scope in the order of their names: at most `limit`, those behind `after` alone.

        A listing goes on from the last name that was seen, in any process. Also told are tables whose deletion
        somebody began and did not finish, and those whose entry this release can't read. Raises ScopeNotFoundError.
        """
        check_table_name("scope", scope)
        snapshot = self._namespace.read()
        require_scope(snapshot, scope)
        return tuple(islice(tables_in_scope(snapshot, scope, after), validate_limit(limit)))

    def describe(self, scope: str, name: str) -> TableInfo:
        """Return what is known of a table. Raises ScopeNotFoundError and KeyValueTableNotFoundError."""
        table = TableName.checked(scope, name)
        return table_info(table, self._existing(table).model_dump(mode="json"))

    def get_configuration(self, scope: str, name: str) -> KeyValueTableConfiguration:
        """Return how a table is configured. Raises ScopeNotFoundError and KeyValueTableNotFoundError."""
        return self._existing(TableName.checked(scope, name)).configuration

    def update(self, scope: str, name: str, configuration: KeyValueTableConfiguration) -> bool:
        """Give a table other limits; return False where it has these. Handles that are open keep those they have.

        Raises KeyValueTableError for another number of partitions, ScopeNotFoundError and KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        return self._change(table, lambda current: decide_update(current, configuration, table))

    def seal(self, scope: str, name: str) -> bool:
        """Have all writes to a table refused from now on, for ever; return False where it is sealed already.

        When this returns, no write is applied any more. What the store refuses, to a user without the right, has not
        begun, where it can be asked (`PreflightChecks`). Raises ScopeNotFoundError and KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        return self._end(table, lambda current: decide_seal(current, table))

    def delete(self, scope: str, name: str) -> bool:
        """Delete a table with all that it holds; return False where there is none. Raises ScopeNotFoundError.

        Handles that are open meet KeyValueTableNotFoundError, also after a table of this name is created anew. What the
        store refuses has not begun, as with `seal`.
        """
        return self._end(TableName.checked(scope, name), decide_delete)

    def forget(self, scope: str, name: str) -> bool:
        """Take a table's entry away without asking its backend, which keeps the table; return whether there was one.

        For a backend that is gone for good, or never was, and for an entry that this release can't read. Handles that
        are open go on. Raises ScopeNotFoundError.
        """
        table = TableName.checked(scope, name)

        def changes(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], bool]:
            require_scope(snapshot, scope)
            there = snapshot.get(table.key) is not None
            return ({table.key: None} if there else {}), there

        return self._namespace.transact(changes, by=_BY)

    def open(self, scope: str, name: str, *, key: Serializer[K], value: Serializer[V]) -> KeyValueTable[K, V]:
        """Return a table for reading and writing, whose keys and values are written and read so.

        It holds no connection yet. Raises ScopeNotFoundError and KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        there = self._existing(table)
        if there.state is TableState.CREATING:
            # Whoever creates it may be dead; a handle would not find the table.
            self._finish(table, there)
        return KeyValueTable(there.id(table), there.configuration, self._backends.of(table, there), key, value)

    def segments(self, scope: str, name: str) -> tuple[SegmentInfo, ...]:
        """Return the partitions of a table: which hashes each has, and where it lives.

        Raises ScopeNotFoundError and KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        there = self._existing(table)
        backend = self._backends.of(table, there)
        return tuple(
            SegmentInfo(number, *hash_range(number, there.partitions), backend.location(there.id(table), number))
            for number in range(there.partitions)
        )

    # -- inside

    def _change(self, table: TableName, decide: Callable[[StoredTable | None], TableTransition]) -> bool:
        """Commit what is decided, have the backend do it, and return the answer."""
        while (answer := self._change_once(table, decide)) is None:
            pass
        return answer

    def _end(self, table: TableName, decide: Callable[[StoredTable | None], TableTransition]) -> bool:
        """Do the same for what seals or deletes a table, once the backend was asked whether it may be done.

        Whoever meets a beginning ends it, with rights of their own: what is refused to one user must not have begun.
        """
        while (answer := self._end_once(table, decide)) is None:
            pass
        return answer

    def _change_once(self, table: TableName, decide: Callable[[StoredTable | None], TableTransition]) -> bool | None:
        decision = self._commit(table, decide)
        if decision.entry is not None:
            self._finish(table, decision.entry)
        return decision.answer

    def _end_once(self, table: TableName, decide: Callable[[StoredTable | None], TableTransition]) -> bool | None:
        asked = self._entry(table)
        self._check_may_end(table, asked, decide(asked))
        unasked = TableTransition(None, None)  # others were faster: it is another table, or in another state
        return self._change_once(table, lambda current: decide(current) if current == asked else unasked)

    def _check_may_end(self, name: TableName, asked: StoredTable | None, decision: TableTransition) -> None:
        """Raise what the backend would, if it did what is decided."""
        if asked is None or decision.entry is None or decision.entry.state is asked.state:
            return
        backend = self._backends.of(name, asked)
        if not isinstance(backend, PreflightChecks):
            return
        check = backend.check_may_delete if decision.entry.state is TableState.DELETING else backend.check_may_seal
        try:
            _patiently(lambda: check(asked.id(name), asked.partitions))
        except AdjunctError as error:
            error.add_note(
                f"Nothing was begun: {name} stays in the state {asked.state.value!r}. Where its backend is gone for "
                f"good: forget (adjunct kv delete {name.key} --unregister)."
            )
            raise

    def _commit(self, table: TableName, decide: Callable[[StoredTable | None], TableTransition]) -> TableTransition:
        def changes(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], TableTransition]:
            require_scope(snapshot, table.scope)
            current = find_stored_table(snapshot, table)
            decision = decide(current)
            is_same = decision.entry == current or decision.entry is None
            return ({} if is_same else {table.key: stored_table_json(decision.entry)}), decision

        return self._namespace.transact(changes, by=_BY)

    def _finish(self, name: TableName, table: StoredTable) -> None:
        """Do what the table's state says is to be done, whoever began it, and store that it is done."""
        if table.state not in UNFINISHED:
            return
        backend = self._backends.of(name, table)
        steps = {
            TableState.CREATING: backend.create,
            TableState.SEALING: backend.seal,
            TableState.DELETING: backend.delete,
        }
        try:
            _patiently(lambda: steps[table.state](table.id(name), table.partitions))
        except KeyValueTableNotFoundError:
            # Others may have finished this, and deleted the table, while we were on our way.
            if not was_deleted(find_stored_table(self._namespace.read(), name), table):
                raise
        except AdjunctError as error:
            error.add_note(
                f"{name} stays in the state {table.state.value!r}, and the same call goes on from there. Where its "
                f"backend is gone for good: forget (adjunct kv delete {name.key} --unregister)."
            )
            raise

        def changes(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], StoredTable | None]:
            current = find_stored_table(snapshot, name)
            after = finish_transition(current, table)
            return ({} if after == current else {name.key: stored_table_json(after)}), after

        after = self._namespace.transact(changes, by=_BY)
        if table.state is TableState.CREATING and was_deleted(after, table):
            # It was deleted before we were done, so we may have made it after that.
            _patiently(lambda: backend.delete(table.id(name), table.partitions))

    def _entry(self, table: TableName) -> StoredTable | None:
        snapshot = self._namespace.read()
        require_scope(snapshot, table.scope)
        return find_stored_table(snapshot, table)

    def _existing(self, table: TableName) -> StoredTable:
        return require_stored_table(self._entry(table), table)


def _patiently(step: Callable[[], T]) -> T:
    """Do what may be done again, and is where it fails for a moment."""
    again = Retrying(
        retry=retry_if_exception_type(TransientError),
        wait=wait_random_exponential(multiplier=0.1, max=5),
        stop=stop_after_delay(_PATIENCE),
        reraise=True,
    )
    return again(step)
