"""Records in a key-value table as a Dagster resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from dagster_adjunct.orchestration.code_location.shared.key_value_table_resource import backend_without_secrets
from dagster_adjunct.resources.backends.table_resources import TableResource
from dagster_adjunct.resources.key_value_rows import KeyValueRows


class KeyValueRowsResource(TableResource):
    """A table whose records lie in a key-value table, as `KeyValueRows` is declared.

    `stored_in` describes the backend where it is made: {"backend": "postgres", "dsn_env": EnvVar("PLANT_DSN")}, for
    example. Kept is the variable's name, and who connects reads it.
    """

    lake: str = Field(description="The lake's URL, or its folder.")
    scope: str
    table: str
    columns: dict[str, str] = Field(description="Types of the columns by name.")
    family: list[str] = Field(default_factory=list, description="The first of the key's columns that make its family.")
    create: bool = False
    partitions: int = Field(default=4, description="How many the table is made with.")
    stored_in: dict[str, Any] | None = Field(default=None, description="Where it is made; no secrets.")

    def __init__(self, **settings: Any) -> None:
        if isinstance(settings.get("family"), str):
            settings["family"] = [settings["family"]]
        if isinstance(settings.get("stored_in"), Mapping):
            settings["stored_in"] = backend_without_secrets(settings["stored_in"])
        super().__init__(**settings)

    def function(self) -> KeyValueRows:
        return KeyValueRows(
            self.lake,
            self.scope,
            self.table,
            self.key,
            columns=self.columns,
            family=self.family,
            create=self.create,
            partitions=self.partitions,
            stored_in=self.stored_in,
        )
