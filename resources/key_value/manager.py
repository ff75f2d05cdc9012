"""`KeyValueTableManager`: creates, lists, updates, seals and deletes key-value tables, in scopes.

    metadata/key-value-tables/all    SCOPE -> StoredScope, SCOPE/TABLE -> StoredTable

A table moves from one state to the next and never back:

    creating -> active -> sealing -> sealed
        `--------`----------`----------`-----> deleting -> (no entry)

Once the state "creating", "sealing" or "deleting" is committed, the transition is decided and will
be completed: the backend does its part after that, and whoever finds such a state lets the backend
do it again.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import AwareDatetime, Field, PositiveInt
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import (
    E,
    KeyValueTableConfiguration,
    SegmentBackend,
    TableId,
)
from dagster_adjunct.resources.key_value.serializers import Serializer
from dagster_adjunct.resources.key_value.table import KeyValueTable
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.objects.commit_log import decode_body
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.validation import validated_methods

# The default backends of a lake, stored relative to it, so that a lake that is copied or mounted
# elsewhere never uses the tables of the original:
#
#     {"lake": "sqlite"}     FOLDER.key-values.sqlite, next to the lake's FOLDER
#     {"lake": "objects"}    objects of the lake. Also for a folder that machines share, because
#                            SQLite's locks don't work there
#
# Settings of a backend follow: {"lake": "sqlite", "busy_timeout": 30.0}. The path of another SQLite
# file in the lake's folder is relative to it: {"lake": "sqlite", "path": "tables/claims.sqlite"}.

_LAKE = "lake"
IN_SQLITE = {_LAKE: "sqlite"}
IN_OBJECTS = {_LAKE: "objects"}


def lake_backends(lake: Lake) -> tuple[dict[str, str], ...]:
    """Return the descriptions of the lake's own backends; tables are created in the first by
    default.
    """
    is_local = "://" not in lake.store.descriptor.url
    if is_local and not lake.shared:
        return (IN_SQLITE, IN_OBJECTS)
    return (IN_OBJECTS,)


def resolve_lake_backend(lake: Lake, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for `backend_from` of a stored backend description.

    A description with "lake" means a backend that belongs to this lake: {"lake": "sqlite"} is the
    SQLite file next to its folder, {"lake": "objects"} the lake's own objects. Raises
    ConfigurationError if this lake has no such backend.
    """
    if _LAKE not in description:
        return dict(description)
    root = lake.store.descriptor.url
    settings = {name: value for name, value in description.items() if name != _LAKE}
    is_sqlite_file = description.items() >= IN_SQLITE.items()
    is_folder = "://" not in root
    if is_sqlite_file and is_folder:
        folder = Path(root).resolve()
        if "path" in settings:
            path = folder / str(settings["path"])
        else:
            path = folder.with_name(f"{folder.name}.key-values.sqlite")
        return {"backend": "sqlite", **settings, "path": str(path)}
    if description.items() >= IN_OBJECTS.items():
        return {"backend": "objects", "url": lake, **settings}
    problem = (
        f"a key-value table of {lake.url} is stored in {dict(description)!r}, which this lake does"
        " not have."
    )
    step = "Open the lake where the table was created, or upgrade dagster-adjunct."
    raise errors.ConfigurationError(problem, step, url=lake.url)


_NAME = re.compile(r"[A-Za-z0-9.-][A-Za-z0-9._-]{0,254}")


def check_table_name(kind: str, name: str) -> str:
    """Return `name` if it is valid for a scope or a table (`kind` says which): 1 to 255 ASCII
    letters, digits, `.`, `-` and `_`, not starting with `_`. Raises InvalidNameError.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problem = (
            f"{kind} name {name!r:.300} is not allowed: expected 1 to 255 letters, digits, '.', '-'"
            " or '_', not starting with '_'."
        )
        raise errors.InvalidNameError(problem, "Rename it.", name=f"{name!s:.300}")
    return name


@dataclass(frozen=True, slots=True)
class TableName:
    """The name of a table in its scope."""

    scope: str
    table: str

    @classmethod
    def checked(cls, scope: str, table: str) -> TableName:
        """Return the name. Raises InvalidNameError."""
        return cls(check_table_name("scope", scope), check_table_name("key-value table", table))

    @property
    def key(self) -> str:
        """The key under which the table is stored. A scope is stored under its name."""
        return f"{self.scope}/{self.table}"

    def __str__(self) -> str:
        return f"key-value table {self.key!r}"

    def error(self, kind: type[E], problem: str, next_step: str) -> E:
        """Return an error whose fields name this table."""
        return kind(problem, next_step, scope=self.scope, table=self.table)


D = TypeVar("D", bound=StoredDocument)


class TableState(Enum):
    """The state of a table; in those that end in "ing" the backend still has to do its part."""

    CREATING = "creating"
    ACTIVE = "active"
    SEALING = "sealing"
    SEALED = "sealed"
    DELETING = "deleting"


class StoredScope(StoredDocument):
    """An existing scope."""

    format: Literal[1] = 1
    created_at: AwareDatetime


class StoredTable(StoredDocument):
    """The stored entry of a table. A table that is created again under its name has another
    `incarnation`.
    """

    format: Literal[1] = 1
    state: TableState
    incarnation: str = Field(pattern="^[0-9a-f]{16}$")
    partitions: int = Field(ge=1)
    longest_key: int | None = None
    longest_value: int | None = None
    backend: dict[str, Any]
    created_at: AwareDatetime

    @property
    def configuration(self) -> KeyValueTableConfiguration:
        """The table's partitions and limits."""
        return KeyValueTableConfiguration(self.partitions, self.longest_key, self.longest_value)

    def in_state(self, state: TableState) -> StoredTable:
        """Return the same entry in another state."""
        return self.model_copy(update={"state": state})

    def id(self, name: TableName) -> TableId:
        """Return the table as backends know it."""
        return TableId(name.scope, name.table, self.incarnation)


def parse_stored_entry(document: type[D], value: Any, where: str) -> D:
    """Return a stored entry as an object of its class; `where` names it in errors. Raises
    MalformedDocumentError.
    """
    next_step = (
        "Restore the namespace of key-value tables from a backup or an older object version."
    )
    return decode_body(document, value, f"the stored entry of {where}", "can't be read", next_step)


def _is_same(setting: str, one: Any, other: Any) -> bool:
    """Whether two values of a setting are equal, or paths of the same file or folder, as through
    a link. `one` is None if its backend does not have the setting.
    """
    may_be_path = setting in ("path", "url") and one is not None
    is_url = "://" in f"{one}{other}"
    if not may_be_path or is_url:
        return bool(one == other)
    return Path(one).resolve() == Path(other).resolve()


class TableBackends:
    """The backends of a lake's tables. New ones are created in `given`, or else in the first of
    the lake's own.
    """

    def __init__(self, lake: Lake, given: SegmentBackend | None) -> None:
        self._lake = lake
        self.given = given
        self._described: dict[str, SegmentBackend] = {}  # by their descriptions as JSON

    def description(self) -> dict[str, Any]:
        """Return the description to store with new tables: relative to the lake for its own
        backends and for SQLite files in its folder, else as `given` describes itself.
        """
        own_backends = lake_backends(self._lake)
        if self.given is None:
            return dict(own_backends[0])
        given = segment.describe_backend(self.given)
        for relative in own_backends:
            if resolve_lake_backend(self._lake, relative)["backend"] == given["backend"]:
                ours = segment.describe_backend(self._from(relative))
                settings = {}
                for name, value in given.items():
                    if not _is_same(name, ours.get(name), value):
                        settings[name] = value
                is_elsewhere = bool(settings.keys() & {"path", "url", "s3"})
                if not is_elsewhere:
                    return {**relative, **settings}
        return self._describe_inside(given) or given

    def _describe_inside(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the description, relative to the lake, of an SQLite file in its folder; else
        None.
        """
        root = self._lake.store.descriptor.url
        if "://" in root or given["backend"] != IN_SQLITE[_LAKE]:
            return None
        path = Path(given["path"]).resolve()
        folder = Path(root).resolve()
        if not path.is_relative_to(folder):
            return None
        settings = {}
        for name, value in given.items():
            if name != "backend":
                settings[name] = value
        return {**IN_SQLITE, **settings, "path": path.relative_to(folder).as_posix()}

    def has(self, name: TableName, table: StoredTable) -> bool:
        """Whether the table is in the backend for new tables: at the same location, even with
        other settings.
        """
        description = self.description()
        if description == table.backend:
            return True
        ours = self._from(description)
        theirs = self._from(table.backend)
        id = table.id(name)
        try:
            return type(theirs) is type(ours) and theirs.location(id, 0) == ours.location(id, 0)
        except errors.AdjunctError as error:
            error.add_note(
                f"{name} is stored in the state {table.state.value!r} with the settings"
                f" {table.backend}. If they never worked, unregister it: adjunct kv delete"
                f" {name.key} --unregister."
            )
            raise

    def of(self, name: TableName, table: StoredTable) -> SegmentBackend:
        """Return the table's backend: `given`, with its settings, if the table is in it, or else
        the described one.
        """
        if self.given is not None and self.has(name, table):
            return self.given
        return self._from(table.backend)

    def _from(self, description: Mapping[str, Any]) -> SegmentBackend:
        """Return the backend with this description; calls with equal descriptions return the
        same object.
        """
        key = json.dumps(description, sort_keys=True)
        if key not in self._described:
            return self._described.setdefault(
                key, segment.backend_from(resolve_lake_backend(self._lake, description))
            )
        return self._described[key]


@dataclass(frozen=True, slots=True)
class SegmentInfo:
    """A partition of a table: it has the keys whose hashes are from `first_hash` to `last_hash`,
    at `location`.
    """

    partition: int
    first_hash: int
    last_hash: int
    location: str


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table in a listing; if its entry can't be read, only the names are known, and `problem`
    says why.
    """

    scope: str
    name: str
    state: str | None = None  # creating, active, sealing, sealed or deleting
    configuration: KeyValueTableConfiguration | None = None
    backend: str | None = None
    incarnation: str | None = None
    created_at: datetime | None = None
    problem: str | None = None


def table_info(name: TableName, stored: Any) -> TableInfo:
    """Return the `TableInfo` of a stored entry; if that can't be read, one with a `problem`."""
    try:
        table = parse_stored_entry(StoredTable, stored, str(name))
    except errors.MalformedDocumentError as error:
        return TableInfo(name.scope, name.table, problem=error.problem)
    backend = str(table.backend.get("backend") or table.backend.get("lake"))
    return TableInfo(
        name.scope,
        name.table,
        table.state.value,
        table.configuration,
        backend,
        table.incarnation,
        table.created_at,
    )


def hash_range(partition: int, partitions: int) -> tuple[int, int]:
    """Return the first and the last hash of a partition, consistent with `partition_of`."""

    def first_hash(number: int) -> int:
        return -(-(number << segment.HASH_BITS) // partitions)  # rounded up

    return first_hash(partition), first_hash(partition + 1) - 1


def ensure_table(manager: KeyValueTableManager, scope: str, table: str, partitions: int) -> None:
    """Create a scope and a table with this number of partitions unless they exist; an existing
    table keeps its limits.

    Raises KeyValueTableExistsError if it has another number of partitions or another backend.
    """
    manager.create_scope(scope)
    wanted = KeyValueTableConfiguration(partitions)
    with suppress(errors.KeyValueTableNotFoundError):
        wanted = replace(manager.get_configuration(scope, table), partitions=partitions)
    manager.create(scope, table, wanted)


def require_scope(snapshot: NamespaceSnapshot, scope: str) -> None:
    """Raise ScopeNotFoundError if the scope does not exist."""
    stored = snapshot.get(scope)
    if stored is None:
        step = f"Check the name, or create it: create_scope, or adjunct kv scope create {scope}."
        raise errors.ScopeNotFoundError(
            f"there is no scope {scope!r} of key-value tables.", step, scope=scope
        )
    parse_stored_entry(StoredScope, stored, f"scope {scope!r} of key-value tables")


def find_stored_table(snapshot: NamespaceSnapshot, table: TableName) -> StoredTable | None:
    """Return a table's entry, None if there is none. Raises MalformedDocumentError."""
    stored = snapshot.get(table.key)
    if stored is None:
        return None
    return parse_stored_entry(StoredTable, stored, str(table))


def tables_in_scope(
    snapshot: NamespaceSnapshot, scope: str, after: str | None
) -> Iterator[TableInfo]:
    """Yield the tables of a scope by name, those after `after`, including unreadable ones."""
    prefix = f"{scope}/"
    for key, stored in snapshot.items(prefix if after is None else f"{prefix}{after}\0"):
        if not key.startswith(prefix):
            return
        yield table_info(TableName(scope, key.removeprefix(prefix)), stored)


# Transitions of a table's entry, as pure decisions: each takes the stored entry (None if there is
# none) and returns the one to store. Racing managers decide again from what the winner has stored,
# so exactly one gets the answer True.


UNFINISHED = frozenset({TableState.CREATING, TableState.SEALING, TableState.DELETING})


@dataclass(frozen=True, slots=True)
class TableTransition:
    """What to do with a table's entry: store `entry`, and have its backend do its part if the entry
    is in an unfinished state.

    If `entry` is None, or equal to the stored one, nothing is stored. The caller gets `answer`
    after that. Without an answer (None), the decision is made again.
    """

    answer: bool | None
    entry: StoredTable | None


def decide_create(
    current: StoredTable | None,
    wanted: StoredTable,
    name: TableName,
    same_backend: Callable[[StoredTable], bool],
) -> TableTransition:
    """Decide how to create `wanted`; the answer is whether it is new, None while a deletion must be
    finished first.

    Raises KeyValueTableExistsError for another configuration.
    """
    if current is None:
        return TableTransition(True, wanted)
    if current.state is TableState.DELETING:
        return TableTransition(None, current)
    differences = []
    for field in fields(KeyValueTableConfiguration):
        if getattr(current, field.name) != getattr(wanted, field.name):
            differences.append(
                f"{field.name} {getattr(current, field.name)} (wanted:"
                f" {getattr(wanted, field.name)})"
            )
    if not same_backend(current):
        found = _differing_settings(current, wanted)
        ours = _differing_settings(wanted, current)
        differences.append(f"backend {found} (wanted: {ours})")
    if differences:
        problem = f"{name} exists with another configuration: {', '.join(differences)}."
        next_step = "Use it as it is, update its limits (update), or choose another name."
        raise name.error(errors.KeyValueTableExistsError, problem, next_step)
    return TableTransition(False, current)


def decide_update(
    current: StoredTable | None, configuration: KeyValueTableConfiguration, name: TableName
) -> TableTransition:
    """Decide how to change the table's limits; the answer is whether they were different. Raises
    KeyValueTableError for another number of partitions.
    """
    table = require_stored_table(current, name)
    if table.partitions != configuration.partitions:
        raise name.error(
            errors.KeyValueTableError,
            f"{name} has {table.partitions} partitions: expected the same, found"
            f" {configuration.partitions}. They can't be changed, because keys are assigned to them"
            " by hash.",
            "Create another table with this number of partitions, and copy the entries.",
        )
    after = table.model_copy(update=asdict(configuration))
    return TableTransition(after != table, after)


def decide_seal(current: StoredTable | None, name: TableName) -> TableTransition:
    """Decide how to seal the table; the answer is whether it was open. Its creation is finished
    first.
    """
    table = require_stored_table(current, name)
    if table.state is TableState.CREATING:
        return TableTransition(None, table)
    if table.state is TableState.ACTIVE:
        return TableTransition(True, table.in_state(TableState.SEALING))
    return TableTransition(False, table)


def decide_delete(current: StoredTable | None) -> TableTransition:
    """Decide how to delete the table, in any state; the answer is whether there was one (not yet
    being deleted).
    """
    if current is None or current.state is TableState.DELETING:
        return TableTransition(False, current)
    return TableTransition(True, current.in_state(TableState.DELETING))


def finish_transition(current: StoredTable | None, done: StoredTable) -> StoredTable | None:
    """Return the entry to store after the backend has done its part for `done`.

    It is None if the table is deleted then. It is `current` if another manager has replaced the
    entry meanwhile.
    """
    is_same_table = current is not None and current.incarnation == done.incarnation
    if current is None or not is_same_table or current.state is not done.state:
        return current
    next_states = {TableState.CREATING: TableState.ACTIVE, TableState.SEALING: TableState.SEALED}
    if current.state in next_states:
        return current.in_state(next_states[current.state])
    return None  # it was deleting, and is deleted


def was_deleted(current: StoredTable | None, table: StoredTable) -> bool:
    """Whether `table` was or is being deleted, given the `current` entry of its name."""
    return (
        current is None
        or current.incarnation != table.incarnation
        or current.state is TableState.DELETING
    )


def require_stored_table(current: StoredTable | None, name: TableName) -> StoredTable:
    """Return the entry of an existing table. Raises KeyValueTableNotFoundError, also for one
    that is being deleted.
    """
    if current is None:
        raise name.error(
            errors.KeyValueTableNotFoundError,
            f"there is no {name}.",
            "Check the name, or create it.",
        )
    if current.state is TableState.DELETING:
        raise name.error(
            errors.KeyValueTableNotFoundError,
            f"{name} is being deleted: the deletion has not finished yet.",
            "Delete or create the table again, which finishes the deletion. Its entries are lost.",
        )
    return current


def _differing_settings(table: StoredTable, other: StoredTable) -> str:
    """Return, for messages, a table's backend settings that differ from the other's; all if the
    other has another kind of backend.
    """
    is_alike = table.backend.get("backend") == other.backend.get("backend")
    differing = {}
    for name, value in table.backend.items():
        if value is not None and not (is_alike and other.backend.get(name) == value):
            differing[name] = value
    return (
        ", ".join(f"{name}={value!r}" for name, value in differing.items())
        or "the same without them"
    )


NAMESPACE = "key-value-tables"
_BY = "key-value-table-manager"
_PATIENCE = 30.0  # seconds for which an unreachable backend is retried

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


@validated_methods
class KeyValueTableManager:
    """The key-value tables of a lake. Safe to use from threads and from many processes; picklable.

    Tables are created in `backend`, by default in SQLite next to a local lake and in the objects of
    any other lake. The backend is stored with each table, so everything else finds it whichever
    backend the manager has.

    Names of scopes and tables are 1 to 255 ASCII letters, digits, `.`, `-` and `_`, and don't start
    with `_` (InvalidNameError). A call that dies halfway is finished by the next one that finds the
    table. Methods block. Besides the errors that they name, they raise TableUnavailableError and
    StoreUnavailableError if a store is unreachable (the same call may be repeated), and
    CommitStateUnknownError if a commit's outcome is unknown.
    """

    def __init__(self, lake: Lake, backend: SegmentBackend | None = None) -> None:
        self.lake = lake
        self._backends = TableBackends(lake, backend)
        self._namespace = MetadataStore(lake).namespace(NAMESPACE, "all")

    def __reduce__(self) -> tuple[type[KeyValueTableManager], tuple[Lake, SegmentBackend | None]]:
        return KeyValueTableManager, (self.lake, self._backends.given)

    def __repr__(self) -> str:
        return f"KeyValueTableManager({self.lake.url!r})"

    def create_scope(self, scope: str) -> bool:
        """Create a scope; return False if it exists."""
        check_table_name("scope", scope)
        created = StoredScope(created_at=self.lake.now()).model_dump(mode="json")

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], bool]:
            """Return what to write, and whether the scope is new."""
            if snapshot.get(scope) is None:
                return {scope: created}, True
            return {}, False

        return self._namespace.transact(decide, by=_BY)

    def delete_scope(self, scope: str) -> bool:
        """Delete a scope without tables; return False if it does not exist. Raises
        ScopeNotEmptyError. Deletions of its tables that have not finished are finished.
        """
        check_table_name("scope", scope)

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], bool | list[TableInfo]]:
            """Return what to write, and whether the scope is deleted, or some tables in it."""
            if snapshot.get(scope) is None:
                return {}, False
            tables = list(islice(tables_in_scope(snapshot, scope, None), 3))
            if tables:
                return ({}, tables)
            return ({scope: None}, True)

        while isinstance(answer := self._namespace.transact(decide, by=_BY), list):
            unfinished = []  # deletions, which are finished here
            for table in answer:
                if table.state == TableState.DELETING.value:
                    unfinished.append(table.name)
            if not unfinished:
                names = ", ".join(table.name for table in answer) + (
                    ", …" if len(answer) > 2 else ""
                )
                raise errors.ScopeNotEmptyError(
                    f"scope {scope!r} holds tables: {names}.", "Delete them first.", scope=scope
                )
            for name in unfinished:
                self.delete(scope, name)
        return answer

    def list_scopes(
        self, *, after: str | None = None, limit: PositiveInt | None = None
    ) -> tuple[str, ...]:
        """Return at most `limit` names of scopes, in order, those after `after`.

        To continue a listing, in any process, pass the last name that it returned.
        """
        start = ""
        if after is not None:
            start = f"{after}\0"
        names = (key for key, _ in self._namespace.read().items(start) if "/" not in key)
        return tuple(islice(names, limit))

    def create(self, scope: str, name: str, configuration: KeyValueTableConfiguration) -> bool:
        """Create a table; return False if it exists with the same configuration, in the same
        backend.

        Of concurrent callers exactly one gets True. Raises ScopeNotFoundError, and
        KeyValueTableExistsError if the table exists with another configuration or in another
        backend.
        """
        table = TableName.checked(scope, name)
        wanted = StoredTable(
            state=TableState.CREATING,
            incarnation=secrets.token_hex(8),
            **asdict(configuration),
            backend=self._backends.description(),
            created_at=self.lake.now(),
        )

        def decide(current: StoredTable | None) -> TableTransition:
            """Return the transition, after checking the backend's settings for a new table."""
            if current is None:  # settings that can't work here fail before anything is stored
                self._backends.of(table, wanted).location(wanted.id(table), 0)
            return decide_create(
                current, wanted, table, lambda other: self._backends.has(table, other)
            )

        return self._change(table, decide)

    def list(
        self, scope: str, *, after: str | None = None, limit: PositiveInt | None = None
    ) -> tuple[TableInfo, ...]:
        """Return at most `limit` tables of a scope by name, those after `after`.

        To continue a listing, in any process, pass the last name that it returned. Tables whose
        deletion has not finished, and those whose entry this release can't read, are included.
        Raises ScopeNotFoundError.
        """
        check_table_name("scope", scope)
        snapshot = self._namespace.read()
        require_scope(snapshot, scope)
        return tuple(islice(tables_in_scope(snapshot, scope, after), limit))

    def describe(self, scope: str, name: str) -> TableInfo:
        """Return the description of a table. Raises ScopeNotFoundError and
        KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        return table_info(table, self._existing(table).model_dump(mode="json"))

    def get_configuration(self, scope: str, name: str) -> KeyValueTableConfiguration:
        """Return a table's configuration. Raises ScopeNotFoundError and
        KeyValueTableNotFoundError.
        """
        return self._existing(TableName.checked(scope, name)).configuration

    def update(self, scope: str, name: str, configuration: KeyValueTableConfiguration) -> bool:
        """Change a table's limits; return False if it has them already. Open handles keep the
        limits they have.

        Raises KeyValueTableError for another number of partitions, ScopeNotFoundError and
        KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        return self._change(table, lambda current: decide_update(current, configuration, table))

    def seal(self, scope: str, name: str) -> bool:
        """Make a table read-only for ever; return False if it is sealed already.

        Once this returns, no write is applied any more. If the backend can be asked beforehand
        (`PreflightChecks`) and the store rejects the seal, for example for missing rights, the
        table stays open. Raises ScopeNotFoundError and KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        return self._change(table, lambda current: decide_seal(current, table), preflight=True)

    def delete(self, scope: str, name: str) -> bool:
        """Delete a table with its entries; return False if it does not exist. Raises
        ScopeNotFoundError.

        Open handles get KeyValueTableNotFoundError, also once a table of this name is created
        again. A store that rejects the deletion is handled as by `seal`.
        """
        return self._change(TableName.checked(scope, name), decide_delete, preflight=True)

    def unregister(self, scope: str, name: str) -> bool:
        """Remove a table's entry without asking its backend, which keeps the table; return whether
        there was one.

        For a backend that is lost or never worked, and for an entry that this release can't read.
        Open handles continue to work. Raises ScopeNotFoundError.
        """
        table = TableName.checked(scope, name)

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], bool]:
            """Return what to write, and whether there is an entry."""
            require_scope(snapshot, scope)
            if snapshot.get(table.key) is None:
                return {}, False
            return {table.key: None}, True

        return self._namespace.transact(decide, by=_BY)

    def open(
        self, scope: str, name: str, *, key: Serializer[K], value: Serializer[V]
    ) -> KeyValueTable[K, V]:
        """Return a table for reading and writing with these serializers.

        It connects on first use. Raises ScopeNotFoundError and KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        stored = self._existing(table)
        if stored.state is TableState.CREATING:
            self._finish(table, stored)  # its creator may have died before the backend created it
        return KeyValueTable(
            stored.id(table), stored.configuration, self._backends.of(table, stored), key, value
        )

    def segments(self, scope: str, name: str) -> tuple[SegmentInfo, ...]:
        """Return the partitions of a table, each with the range of its hashes and its location.

        Raises ScopeNotFoundError and KeyValueTableNotFoundError.
        """
        table = TableName.checked(scope, name)
        stored = self._existing(table)
        backend = self._backends.of(table, stored)
        id = stored.id(table)
        return tuple(
            SegmentInfo(
                number, *hash_range(number, stored.partitions), backend.location(id, number)
            )
            for number in range(stored.partitions)
        )

    def _change(
        self,
        table: TableName,
        decide: Callable[[StoredTable | None], TableTransition],
        *,
        preflight: bool = False,
    ) -> bool:
        """Commit the transition that `decide` returns, have the backend do its part, and return the
        answer.

        With `preflight`, the backend is first asked whether the store allows it. A transition that
        the store rejects must not begin, because other managers, with other rights, would try to
        complete it.
        """
        while True:
            expected = None
            if preflight:
                expected = self._preflight(table, decide)

            def commit(
                snapshot: NamespaceSnapshot, expected: StoredTable | None = expected
            ) -> tuple[dict[str, Any], TableTransition]:
                """Return what to write, and the transition that it begins."""
                require_scope(snapshot, table.scope)
                current = find_stored_table(snapshot, table)
                if preflight and current != expected:
                    return {}, TableTransition(None, None)  # it has changed since it was checked
                decision = decide(current)
                if decision.entry is None or decision.entry == current:
                    return {}, decision
                return {table.key: decision.entry.model_dump(mode="json")}, decision

            decision = self._namespace.transact(commit, by=_BY)
            if decision.entry is not None:
                self._finish(table, decision.entry)
            if decision.answer is not None:
                return decision.answer

    def _preflight(
        self, name: TableName, decide: Callable[[StoredTable | None], TableTransition]
    ) -> StoredTable | None:
        """Return the current entry, None if there is none. Raises what the backend would raise for
        the transition that `decide` returns.
        """
        current = self._entry(name)
        after = decide(current).entry
        if current is None or after is None or after.state is current.state:
            return current  # no state changes, so the backend has nothing to do
        backend = self._backends.of(name, current)
        if isinstance(backend, segment.PreflightChecks):
            if after.state is TableState.DELETING:
                check = backend.check_may_delete
            else:
                check = backend.check_may_seal
            try:
                _retrying()(lambda: check(current.id(name), current.partitions))
            except errors.AdjunctError as error:
                error.add_note(
                    f"Nothing was started: {name} stays in the state {current.state.value!r}. If"
                    " its backend is lost for good, unregister it: adjunct kv delete"
                    f" {name.key} --unregister."
                )
                raise
        return current

    def _finish(self, name: TableName, table: StoredTable) -> None:
        """Have the backend do its part of an unfinished transition, whoever began it, and store
        that it is done.
        """
        if table.state not in UNFINISHED:
            return
        backend = self._backends.of(name, table)
        id = table.id(name)
        steps = {
            TableState.CREATING: backend.create,
            TableState.SEALING: backend.seal,
            TableState.DELETING: backend.delete,
        }
        try:
            _retrying()(steps[table.state], id, table.partitions)
        except errors.KeyValueTableNotFoundError:
            # Another manager may have finished this, and then deleted the table.
            if not was_deleted(find_stored_table(self._namespace.read(), name), table):
                raise
        except errors.AdjunctError as error:
            error.add_note(
                f"{name} stays in the state {table.state.value!r}, and the same call continues from"
                " there. If its backend is lost for good, unregister it: adjunct kv delete"
                f" {name.key} --unregister."
            )
            raise

        def commit(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], StoredTable | None]:
            """Return what to write, and the entry after it."""
            current = find_stored_table(snapshot, name)
            after = finish_transition(current, table)
            changes = {name.key: None if after is None else after.model_dump(mode="json")}
            return ({} if after == current else changes), after

        after = self._namespace.transact(commit, by=_BY)
        if table.state is TableState.CREATING and was_deleted(after, table):
            # The backend may have created it after it was deleted.
            _retrying()(backend.delete, id, table.partitions)

    def _entry(self, table: TableName) -> StoredTable | None:
        """Return the stored entry of a table, None if there is none. Raises ScopeNotFoundError."""
        snapshot = self._namespace.read()
        require_scope(snapshot, table.scope)
        return find_stored_table(snapshot, table)

    def _existing(self, table: TableName) -> StoredTable:
        """Return the stored entry of a table. Raises ScopeNotFoundError and
        KeyValueTableNotFoundError.
        """
        return require_stored_table(self._entry(table), table)


def _may_pass_soon(error: BaseException) -> bool:
    """Whether a backend's error may go away without anybody's action."""
    return isinstance(error, errors.TransientError) and not errors.needs_action(error)


def _retrying() -> Retrying:
    """Return what repeats a call of a backend while it is unreachable, for up to _PATIENCE
    seconds.
    """
    return Retrying(
        retry=retry_if_exception(_may_pass_soon),
        wait=wait_random_exponential(multiplier=0.1, max=5),
        stop=stop_after_delay(_PATIENCE),
        reraise=True,
    )
