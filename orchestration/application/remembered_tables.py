"""The declarations of remote tables, kept in the lake so that a table can be opened by its name alone.

Stored are registered backend names and plain settings, never module paths and never secrets.
"""

from __future__ import annotations

from copy import copy
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources import key_value_rows  # noqa: F401 - it makes these tables known by name
from dagster_adjunct.resources.backends import describe, function_from
from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.tables import RemoteTable

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.objects import Commit, CommitLog, Lake

KIND = "table"


def remember_tables(lake: Lake, app: Application, *, by: str) -> None:
    """Store the declarations of the application's tables; those of unregistered backends stay unknown."""
    for table in app.tables.values():
        if not isinstance(table, RemoteTable):
            continue
        try:
            # A copy, as executors get it: with the path of a local file made absolute.
            function = describe(copy(table.read_function or table.write_function))
        except ConfigurationError:
            continue
        body = {"name": table.name, "key": list(table.key), "function": function}

        def decide(current: Commit | None, body: dict[str, Any] = body) -> dict[str, Any] | None:
            return None if current is not None and current.body == body else body

        _log(lake, table.name).transact(decide, by=by)


def open_table(lake: Lake, name: str) -> RemoteTable[Any, Any, Any]:
    """Return the table of this name, for reading; it connects when first used."""
    commit = _log(lake, name).current()
    if commit is None:
        known = sorted({info.key.split("/")[1] for info in lake.store.list("tables/")})
        raise ConfigurationError(
            f"no application of {lake.url} has written a table {name!r}; known are {', '.join(known) or 'none'}.",
            "Check the name; a table is known once an application that writes it has run.",
            table=name,
        )
    try:
        settings = dict(commit.body["function"])
        # Looking a record up must not make a table.
        function = function_from(settings | ({"create": False} if "create" in settings else {}))
        return RemoteTable(commit.body["name"], key=commit.body["key"], read_function=function)
    except (KeyError, TypeError) as error:
        raise MalformedDocumentError(
            f"the declaration of table {name!r} in {commit.manifest_key} can't be read: {error!r}.",
            "Run its application again, which writes it anew.",
            document=commit.manifest_key,
        ) from error


def _log(lake: Lake, name: str) -> CommitLog:
    return lake.commit_log(f"tables/{check_name('table', name)}", KIND)
