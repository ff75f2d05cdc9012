"""`TableBackends`: which backend a table is made in, and which one it lies in."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import AwareDatetime, Field

from dagster_adjunct.resources.common import StoredDocument
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, InvalidNameError
from dagster_adjunct.resources.key_value.segment import (
    KeyValueTableConfiguration,
    SegmentBackend,
    TableId,
    backend_from,
    describe_backend,
)
from dagster_adjunct.resources.objects.commit_log import decode_body
from dagster_adjunct.resources.objects.lake import Lake

# Where a lake's key-value tables lie when nobody says where: in SQLite beside a local lake, else in the lake itself.
#
#     {"lake": "sqlite"}     FOLDER.key-values.sqlite, beside the lake's FOLDER
#     {"lake": "objects"}    objects of the lake; also of a local one that several machines share: SQLite's locks don't
#
# It is stored relative to the lake, so that a lake that is mounted or copied elsewhere never reaches for the tables of
# the one that it was.


_LAKE = "lake"
IN_SQLITE = {_LAKE: "sqlite"}
IN_OBJECTS = {_LAKE: "objects"}


def lake_backends(lake: Lake) -> tuple[dict[str, str], ...]:
    """Return the lake's own backends, relative to it; the first is what tables are made in unless somebody says."""
    is_local = "://" not in lake.store.descriptor.url
    return (IN_SQLITE, IN_OBJECTS) if is_local and not lake.shared else (IN_OBJECTS,)


def resolve_lake_backend(lake: Lake, description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `backend_from` takes for a stored description; objects of the lake are reached as the lake is."""
    if description.keys() != {_LAKE}:
        return dict(description)
    root = lake.store.descriptor.url
    if description == IN_SQLITE and "://" not in root:
        folder = Path(root).resolve()
        return {"backend": "sqlite", "path": str(folder.with_name(f"{folder.name}.key-values.sqlite"))}
    if description == IN_OBJECTS:
        return {"backend": "objects", "url": lake}
    raise ConfigurationError(
        f"a key-value table of {lake.url} lies in {dict(description)!r}, which this lake does not have.",
        "Open the lake where the table was made, or upgrade dagster-adjunct.",
        url=lake.url,
    )


LONGEST_NAME = 255
_NAME = re.compile(rf"[A-Za-z0-9.-][A-Za-z0-9._-]{{0,{LONGEST_NAME - 1}}}")


def check_table_name(kind: str, name: str) -> str:
    """Return `name` if a scope or a table may have it; `kind` says in the error which of them it names.

    That is: 1 to 255 letters (of ASCII), digits, `.`, `-` and `_`, the first of them no `_`.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidNameError(
            f"{kind} name {name!r:.300} is not allowed: expected 1 to {LONGEST_NAME} letters, digits, '.', '-' or '_', "
            "not beginning with '_'.",
            "Rename it.",
            name=f"{name!s:.300}",
        )
    return name


@dataclass(frozen=True, slots=True)
class TableName:
    """The name of a table in its scope, as errors tell it."""

    scope: str
    table: str

    @classmethod
    def checked(cls, scope: str, table: str) -> TableName:
        """Return the name. Raises InvalidNameError."""
        return cls(check_table_name("scope", scope), check_table_name("key-value table", table))

    @property
    def key(self) -> str:
        """Under which the table is stored; a scope is stored under its name."""
        return f"{self.scope}/{self.table}"

    def __str__(self) -> str:
        return f"key-value table {self.key!r}"


# What is stored of a scope and of a key-value table, in the metadata store: where a table lies, and how far it is.
#
#     metadata/key-value-tables/all    SCOPE -> StoredScope, SCOPE/TABLE -> StoredTable
#
# A table goes from one state to the next, never back:
#
#     creating -> active -> sealing -> sealed
#         `--------`----------`----------`-----> deleting -> (no entry)
#
# The first commit of a transition is what happened: from there on the table exists, is sealed, is gone. What its
# backend has to do for it follows, and is done again by whoever meets a state that somebody left in the middle.


D = TypeVar("D", bound=StoredDocument)


class TableState(Enum):
    """How far a table is. Those ending in "ing" are left as soon as the backend has done what they say."""

    CREATING = "creating"
    ACTIVE = "active"
    SEALING = "sealing"
    SEALED = "sealed"
    DELETING = "deleting"


class StoredScope(StoredDocument):
    """A scope: that it is there."""

    format: Literal[1] = 1
    created_at: AwareDatetime


class StoredTable(StoredDocument):
    """A table. `incarnation` is its own: a later table of this name has another. `backend` is described in words."""

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
        """Return the same table in another state."""
        return self.model_copy(update={"state": state})

    def configured(self, configuration: KeyValueTableConfiguration) -> StoredTable:
        """Return the same table with other limits."""
        limits = {"longest_key": configuration.longest_key, "longest_value": configuration.longest_value}
        return self.model_copy(update=limits)

    def id(self, name: TableName) -> TableId:
        return TableId(name.scope, name.table, self.incarnation)


def new_incarnation() -> str:
    """Return what no other table has."""
    return secrets.token_hex(8)


def parse_stored_entry(document: type[D], value: Any, where: str) -> D:
    """Return a stored entry. Raises MalformedDocumentError."""
    next_step = "Restore the namespace of key-value tables from a backup or an older object version."
    return decode_body(document, value, f"the stored entry of {where}", "can't be read", next_step)


class TableBackends:
    """The backends of a lake's tables. Tables are made in `given`, or where that is None in the lake's own."""

    def __init__(self, lake: Lake, given: SegmentBackend | None) -> None:
        if given is not None and (isinstance(given, type) or not callable(getattr(given, "to_dict", None))):
            raise ConfigurationError(
                f"a manager of key-value tables has the backend {given!r:.80}: expected an object, or None.",
                "Give one, such as PostgresSegments(dsn_env=…), or leave it out.",
                argument="backend",
            )
        self._lake = lake
        self.given = given
        self._described: dict[str, SegmentBackend] = {}

    def description(self) -> dict[str, Any]:
        """Return what is stored of the backend that tables are made in: relative to the lake where it is its own."""
        own = lake_backends(self._lake)
        if self.given is None:
            return dict(own[0])
        given = describe_backend(self.given)
        kinds = {resolve_lake_backend(self._lake, relative)["backend"]: relative for relative in own}
        relative = kinds.get(given["backend"])
        is_own = relative is not None and describe_backend(self._from(relative)) == given
        return dict(relative) if relative is not None and is_own else given

    def has(self, name: TableName, table: StoredTable) -> bool:
        """Whether a table lies in the backend that tables are made in, with whatever settings."""
        description = self.description()
        if description == table.backend:
            return True
        ours, there = self.given or self._from(description), self._from(table.backend)
        try:
            return type(there) is type(ours) and _location(there, name, table) == _location(ours, name, table)
        except AdjunctError as error:
            error.add_note(
                f"{name} is stored in the state {table.state.value!r} with the settings {table.backend}. Where they "
                f"never were right: forget (adjunct kv delete {name.key} --unregister)."
            )
            raise

    def of(self, name: TableName, table: StoredTable) -> SegmentBackend:
        """Return the table's backend: the one that was given, with its settings, where the table lies in it."""
        if self.given is not None and self.has(name, table):
            return self.given
        return self._from(table.backend)

    def _from(self, description: Mapping[str, Any]) -> SegmentBackend:
        """Return the backend that is described; there is one, which all its tables share."""
        key = json.dumps(description, sort_keys=True)
        if key not in self._described:
            return self._described.setdefault(key, backend_from(resolve_lake_backend(self._lake, description)))
        return self._described[key]


def _location(backend: SegmentBackend, name: TableName, table: StoredTable) -> str:
    return backend.location(table.id(name), 0)
