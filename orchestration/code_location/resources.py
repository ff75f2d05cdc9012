"""Dagster resources: the lake, and key-value tables whose secrets stay in environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
from pydantic import Field, PrivateAttr

from dagster_adjunct.resources import key_value_backends as _registered  # noqa: F401
from dagster_adjunct.resources.backends.resources import TableResource, resolve_variable
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager, ensure_table
from dagster_adjunct.resources.key_value.segment import backend_from
from dagster_adjunct.resources.key_value.serializers import Serializer, serializer_named
from dagster_adjunct.resources.key_value.table import BlockingKeyValueTable, KeyValueTable
from dagster_adjunct.resources.key_value_rows.rows import KeyValueRows
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.validation import validated


@validated
class KeyValueTableResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """A key-value table of a lake, for the bodies of assets and ops: `with states.blocking() as table: …`.

    With `partitions` the table and its scope are created if they do not exist; without it, the table must exist.
    `backend` chooses where it is created, for example {"backend": "postgres", "dsn_env": EnvVar("PLANT_DSN")}. Only
    the variable's name is stored. Nothing is opened while a code location is loaded.
    """

    scope: str
    table: str
    lake: str | None = Field(default=None, description="The lake's URL. Default: ADJUNCT_LAKE, else .adjunct/lake.")
    partitions: int | None = Field(
        default=None, description="Create the table with this many partitions if it does not exist."
    )
    backend: dict[str, Any] | None = Field(default=None, description="Backend where it is created, without secrets.")
    key: str = Field(default="text", description="Type of the keys: text, json, int or bytes.")
    value: str = Field(default="json", description="Type of the values: text, json, int or bytes.")

    def __init__(self, **settings: Any) -> None:
        # Not in a validator, because Dagster sets the fields again to the original values.
        if isinstance(settings.get("backend"), Mapping):
            settings["backend"] = backend_without_secrets(settings["backend"])
        for name in ("key", "value"):
            if isinstance(settings.get(name), str):
                serializer_named(settings[name])
        super().__init__(**settings)

    def manager(self) -> KeyValueTableManager:
        """Return the manager of the lake's key-value tables."""
        lake = open_lake(self.lake, create=self.partitions is not None)
        return KeyValueTableManager(lake, None if self.backend is None else backend_from(self.backend))

    def open(
        self, *, key: Serializer[Any] | None = None, value: Serializer[Any] | None = None
    ) -> KeyValueTable[Any, Any]:
        """Return the table for async code; `key` and `value` override the declared serializers."""
        manager = self.manager()
        if self.partitions is not None:
            ensure_table(manager, self.scope, self.table, self.partitions)
        return manager.open(
            self.scope, self.table, key=key or serializer_named(self.key), value=value or serializer_named(self.value)
        )

    def blocking(
        self, *, key: Serializer[Any] | None = None, value: Serializer[Any] | None = None
    ) -> BlockingKeyValueTable[Any, Any]:
        """Return the table for use in a `with` block of an asset or op."""
        return BlockingKeyValueTable(self.open(key=key, value=value))


def backend_without_secrets(backend: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the `EnvVar`s in a backend's description with the names of their variables.

    Raises ConfigurationError for other values of `*_env` settings.
    """
    shown = dict(backend)
    for name, value in backend.items():
        if name.endswith("_env") and value is not None:
            several = isinstance(value, list | tuple)
            names = [resolve_variable(f"backend[{name!r}]", one) for one in (value if several else [value])]
            shown[name] = names if several else names[0]
    return shown


@validated
class KeyValueRowsResource(TableResource):
    """A remote table whose records are stored in a key-value table (`KeyValueRows`).

    `stored_in` describes the backend where it is created, for example
    {"backend": "postgres", "dsn_env": EnvVar("PLANT_DSN")}. Only the variable's name is stored.
    """

    lake: str = Field(description="The lake's URL, or its folder.")
    scope: str
    table: str
    columns: dict[str, str] = Field(description="Types of the columns by name.")
    family: list[str] = Field(default_factory=list, description="The leading key columns that form the family.")
    create: bool = False
    partitions: int = Field(default=4, description="Number of partitions that the table is created with.")
    stored_in: dict[str, Any] | None = Field(default=None, description="Backend where it is created, without secrets.")

    store = KeyValueRows

    def __init__(self, **settings: Any) -> None:
        if isinstance(settings.get("family"), str):
            settings["family"] = [settings["family"]]
        if isinstance(settings.get("stored_in"), Mapping):
            settings["stored_in"] = backend_without_secrets(settings["stored_in"])
        super().__init__(**settings)


@validated
class LakeResource(dg.ConfigurableResource):  # type: ignore[type-arg]
    """The lake with its streams, datasets and batch logs. Without a URL: `ADJUNCT_LAKE`, else `.adjunct/lake`.

    Nothing is opened before `open` is called, so loading a code location needs no network.
    """

    url: str | None = Field(default=None, description="s3://bucket/prefix or a folder.")

    _lake: Any = PrivateAttr(default=None)

    def open(self) -> Lake:
        """Return the lake; the first call opens it and probes the store."""
        if self._lake is None:
            self._lake = open_lake(self.url)
        lake: Lake = self._lake
        return lake
