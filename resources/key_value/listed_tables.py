"""What a manager tells of tables: how they are configured, how far they are, and where their segments are."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from dagster_adjunct.resources.errors import MalformedDocumentError
from dagster_adjunct.resources.key_value.addressing import HASH_BITS
from dagster_adjunct.resources.key_value.stored_tables import StoredTable, parsed
from dagster_adjunct.resources.key_value.table_configuration import KeyValueTableConfiguration
from dagster_adjunct.resources.key_value.table_names import TableName


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
        table = parsed(StoredTable, stored, str(name))
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
