"""The stored entries of scopes and tables, and `TableBackends`, which finds the backend of each table.

    metadata/key-value-tables/all    SCOPE -> StoredScope, SCOPE/TABLE -> StoredTable

A table moves from one state to the next and never back:

    creating -> active -> sealing -> sealed
        `--------`----------`----------`-----> deleting -> (no entry)

Committing the first state of a transition decides it: from then on the table exists, is sealed, is deleted. The work of
its backend follows, and whoever finds an unfinished state repeats it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import AwareDatetime, Field

from dagster_adjunct.resources.common import StoredDocument, argument_error
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, InvalidNameError
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import E, KeyValueTableConfiguration, SegmentBackend, TableId
from dagster_adjunct.resources.objects.commit_log import decode_body
from dagster_adjunct.resources.objects.lake import Lake

# The default backends of a lake, stored relative to it, so that a lake that is copied or mounted elsewhere never uses
# the tables of the original:
#
#     {"lake": "sqlite"}     FOLDER.key-values.sqlite, next to the lake's FOLDER
#     {"lake": "objects"}    objects of the lake. Also for a folder that machines share, because SQLite's locks don't
#                            work there


_LAKE = "lake"
IN_SQLITE = {_LAKE: "sqlite"}
IN_OBJECTS = {_LAKE: "objects"}


def lake_backends(lake: Lake) -> tuple[dict[str, str], ...]:
    """Return the descriptions of the lake's own backends; tables are created in the first by default."""
    is_local = "://" not in lake.store.descriptor.url
    return (IN_SQLITE, IN_OBJECTS) if is_local and not lake.shared else (IN_OBJECTS,)


def resolve_lake_backend(lake: Lake, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `backend_from` accepts for a stored description, which may be relative to the lake."""
    if description.keys() != {_LAKE}:
        return dict(description)
    root = lake.store.descriptor.url
    if description == IN_SQLITE and "://" not in root:
        folder = Path(root).resolve()
        return {"backend": "sqlite", "path": str(folder.with_name(f"{folder.name}.key-values.sqlite"))}
    if description == IN_OBJECTS:
        return {"backend": "objects", "url": lake}
    problem = f"a key-value table of {lake.url} is stored in {dict(description)!r}, which this lake does not have."
    step = "Open the lake where the table was created, or upgrade dagster-adjunct."
    raise ConfigurationError(problem, step, url=lake.url)


_NAME = re.compile(r"[A-Za-z0-9.-][A-Za-z0-9._-]{0,254}")


def check_table_name(kind: str, name: str) -> str:
    """Return `name` if it is valid for a scope or a table (`kind` says which): 1 to 255 ASCII letters, digits, `.`, `-`
    and `_`, not starting with `_`."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        problem = (
            f"{kind} name {name!r:.300} is not allowed: expected 1 to 255 letters, digits, '.', '-' or '_', not "
            "starting with '_'."
        )
        raise InvalidNameError(problem, "Rename it.", name=f"{name!s:.300}")
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
    """The state of a table. Those ending in "ing" last until the backend has done the work."""

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
    """A table and the description of its backend. A later table of this name has another `incarnation`."""

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
        return KeyValueTableConfiguration(self.partitions, self.longest_key, self.longest_value)

    def in_state(self, state: TableState) -> StoredTable:
        return self.model_copy(update={"state": state})

    def id(self, name: TableName) -> TableId:
        return TableId(name.scope, name.table, self.incarnation)


def parse_stored_entry(document: type[D], value: Any, where: str) -> D:
    """Return a stored entry. Raises MalformedDocumentError."""
    next_step = "Restore the namespace of key-value tables from a backup or an older object version."
    return decode_body(document, value, f"the stored entry of {where}", "can't be read", next_step)


class TableBackends:
    """The backends of a lake's tables. New tables are created in `given`, or else in the lake's own backend."""

    def __init__(self, lake: Lake, given: SegmentBackend | None) -> None:
        if given is not None and (isinstance(given, type) or not callable(getattr(given, "to_dict", None))):
            raise argument_error(
                f"a manager of key-value tables has the backend {given!r:.80}",
                "an object, or None",
                "Pass one, such as PostgresSegments(dsn_env=…), or leave it out.",
                argument="backend",
            )
        self._lake = lake
        self.given = given
        self._described: dict[str, SegmentBackend] = {}

    def description(self) -> dict[str, Any]:
        """Return the stored description of the backend for new tables, relative to the lake if it is the lake's own."""
        own = lake_backends(self._lake)
        if self.given is None:
            return dict(own[0])
        given = segment.describe_backend(self.given)
        for relative in own:
            is_alike = resolve_lake_backend(self._lake, relative)["backend"] == given["backend"]
            if is_alike and segment.describe_backend(self._from(relative)) == given:
                return dict(relative)
        return given

    def has(self, name: TableName, table: StoredTable) -> bool:
        """Whether a table is in the backend for new tables, whatever other settings its own description has."""
        description = self.description()
        if description == table.backend:
            return True
        ours, theirs = self.given or self._from(description), self._from(table.backend)
        id = table.id(name)
        try:
            return type(theirs) is type(ours) and theirs.location(id, 0) == ours.location(id, 0)
        except AdjunctError as error:
            error.add_note(
                f"{name} is stored in the state {table.state.value!r} with the settings {table.backend}. If they "
                f"never worked, unregister it: adjunct kv delete {name.key} --unregister."
            )
            raise

    def of(self, name: TableName, table: StoredTable) -> SegmentBackend:
        """Return the table's backend: the given one, with its settings, if the table is in it."""
        if self.given is not None and self.has(name, table):
            return self.given
        return self._from(table.backend)

    def _from(self, description: Mapping[str, Any]) -> SegmentBackend:
        """Return the described backend, which all its tables share."""
        key = json.dumps(description, sort_keys=True)
        if key not in self._described:
            return self._described.setdefault(key, segment.backend_from(resolve_lake_backend(self._lake, description)))
        return self._described[key]
