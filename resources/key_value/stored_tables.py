"""What is stored of a scope and of a key-value table, in the metadata store: where a table lies, and how far it is.

    metadata/key-value-tables/all    SCOPE -> StoredScope, SCOPE/TABLE -> StoredTable

A table goes from one state to the next, never back:

    creating -> active -> sealing -> sealed
        `--------`----------`----------`-----> deleting -> (no entry)

The first commit of a transition is what happened: from there on the table exists, is sealed, is gone. What its backend
has to do for it follows, and is done again by whoever meets a state that somebody left in the middle.
"""

from __future__ import annotations

import secrets
from enum import Enum
from typing import Any, Literal, TypeVar

from pydantic import AwareDatetime, Field

from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_names import TableName
from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.objects.documents import decode_body
from dagster_adjunct.resources.stored_documents import StoredDocument

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


def parsed(document: type[D], value: Any, where: str) -> D:
    """Return a stored entry. Raises MalformedDocumentError."""
    next_step = "Restore the namespace of key-value tables from a backup or an older object version."
    return decode_body(document, value, f"the stored entry of {where}", "can't be read", next_step)
