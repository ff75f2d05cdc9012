"""The registry of remote tables in the lake: with it, a table can be opened by its name alone.

It stores names of registered backends and plain settings, never module paths or secrets. For a table in a local file,
it also stores whether the file existed, so that a lost table is not silently recreated empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.lookup_join import AnyTable
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.backends.columns import describe_function, function_from_description
from dagster_adjunct.resources.common import check_name
from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.tables.functions import TableFunction
from dagster_adjunct.resources.tables.table import RemoteTable

KIND = "table"


@contextmanager
def register_tables(lake: Lake, app: Application, *, by: str) -> Iterator[None]:
    """Register the application's remote tables before the block, a run, and record after it which of them exist.

    Tables of unregistered backends are skipped. Raises TableNotFoundError for a table that once existed and no longer
    does: the run would create an empty one.
    """

    def register(*, check: bool) -> None:
        for table in app.tables.values():
            _register(lake, table, by=by, check=check)

    register(check=True)
    try:
        yield
    except BaseException:
        with suppress(errors.AdjunctError):  # the error that ended the run matters more
            register(check=False)
        raise
    register(check=False)


def _register(lake: Lake, table: AnyTable, *, by: str, check: bool) -> None:
    function = table.read_function or table.write_function
    try:
        description = describe_function(function)
    except errors.ConfigurationError:
        return
    exists = function.exists() if isinstance(function, TableFunction) else None
    body = {"name": table.name, "key": list(table.key), "function": description, "was_there": exists is True}
    log = _log(lake, table.name)

    def decide(current: Commit | None) -> dict[str, Any] | None:
        if current is not None and current.body.get("was_there") and exists is False:
            if check:
                raise _missing_table_error(lake, table.name, current.body["function"], description)
            return None  # the table disappeared during the run: the next run reports it
        return None if current is not None and current.body == body else body

    log.transact(decide, by=by)


def _missing_table_error(
    lake: Lake, name: str, before: dict[str, Any], now: dict[str, Any]
) -> errors.TableNotFoundError:
    there, here = (f"{one.get('table')!r} in {one.get('path')}" for one in (before, now))
    anew = f"Or let the next run create it again: adjunct table allow-recreate {name}."
    if here == there:
        problem = (
            f"table {name}: its file or its table is gone ({there}), and applications of {lake.url} have written it. "
            "A new one would be empty."
        )
        return errors.TableNotFoundError(problem, f"Restore it from a copy. {anew}", table=name)
    return errors.TableNotFoundError(
        f"table {name} is declared as {here}, which does not exist, and applications of {lake.url} have written it as "
        f"{there}. A second one would be empty.",
        f"Run in the folder from which the path leads to the first one, declare its absolute path, or move it. {anew}",
        table=name,
    )


def reset_table(lake: Lake, name: str, *, by: str) -> None:
    """Forget that a table existed, so that the next run may create it again; an existing table is left unchanged."""

    def decide(current: Commit | None) -> dict[str, Any]:
        if current is None:
            raise _unknown_table_error(lake, name)
        return {**current.body, "was_there": False}

    _log(lake, name).transact(decide, by=by)


def open_registered_table(lake: Lake, name: str) -> AnyTable:
    """Return the registered table of this name, for reading; it connects when it is first used."""
    commit = _log(lake, name).current()
    if commit is None:
        raise _unknown_table_error(lake, name)
    try:
        settings = dict(commit.body["function"])
        # Looking up a record must not create a table.
        function = function_from_description(settings | ({"create": False} if "create" in settings else {}))
        return RemoteTable(commit.body["name"], key=commit.body["key"], read_function=function)
    except (KeyError, TypeError) as error:
        problem = f"the declaration of table {name!r} in {commit.manifest_key} can't be read: {error!r}."
        step = "Run its application again, which rewrites the declaration."
        raise errors.MalformedDocumentError(problem, step, document=commit.manifest_key) from error


def _unknown_table_error(lake: Lake, name: str) -> errors.ConfigurationError:
    known = sorted({info.key.split("/")[1] for info in lake.store.list("tables/")})
    problem = f"no application of {lake.url} has written a table {name!r}; known are {', '.join(known) or 'none'}."
    step = "Check the name; a table is known once an application that writes it has run."
    return errors.ConfigurationError(problem, step, table=name)


def _log(lake: Lake, name: str) -> CommitLog:
    return lake.commit_log(f"tables/{check_name('table', name)}", KIND)
