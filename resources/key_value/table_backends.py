"""`TableBackends`: which backend a table is made in, and which one it lies in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.key_value.backend_names import backend_from, describe_backend
from dagster_adjunct.resources.key_value.default_backend import backend_in, own_backends

if TYPE_CHECKING:
    from dagster_adjunct.resources.key_value.stored_tables import StoredTable
    from dagster_adjunct.resources.key_value.table_names import TableName
    from dagster_adjunct.resources.key_value.table_segment import SegmentBackend
    from dagster_adjunct.resources.objects.lake import Lake


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
        own = own_backends(self._lake)
        if self.given is None:
            return dict(own[0])
        given = describe_backend(self.given)
        kinds = {backend_in(self._lake, relative)["backend"]: relative for relative in own}
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
                f"never were right: forget (adjunct kvt delete {name.key} --forget)."
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
            return self._described.setdefault(key, backend_from(backend_in(self._lake, description)))
        return self._described[key]


def _location(backend: SegmentBackend, name: TableName, table: StoredTable) -> str:
    return backend.location(table.id(name), 0)
