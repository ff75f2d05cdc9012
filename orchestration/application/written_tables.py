"""Which output tables applications have written, as the lake remembers it next to remote tables
(`table_registry.py`): one that is gone, or is another one, is not begun again in silence.

An application is remembered once a batch with rows of it is in the table, and before the batch log
has the end of that batch. So a table that never got rows is never remembered. After a crash in
between, the batch is run again: it is found in the table, or all its rows are written.
"""

from __future__ import annotations

import hashlib
import shlex
from typing import Any

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.output_tables.batches import TableOutput

KIND = "table"
_FORMATS = ("delta:", "iceberg:")


def is_output_table(name: str) -> bool:
    """Whether this is the name of an output table; those of remote tables have no colon."""
    return name.startswith(_FORMATS)


def table_prefix(name: str) -> str:
    """Return where the lake remembers a remote table or an output table. The names of output tables
    have any characters, so that a digest stands for them.
    """
    if is_output_table(name):
        return f"tables/output.{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return f"tables/{check_name('table', name)}"


def table_log(lake: Lake, name: str) -> CommitLog:
    """Return the commit log of a remote table or an output table."""
    return lake.commit_log(table_prefix(name), KIND)


def list_known_tables(lake: Lake) -> list[str]:
    """Return the names of the remote tables and output tables that the lake remembers."""
    names = set()
    for part in {info.key.split("/")[1] for info in lake.store.list("tables/")}:
        current = None
        if "." in part:  # the digest of an output table's name
            current = lake.commit_log(f"tables/{part}", KIND).current()
        names.add(part if current is None else current.body["name"])
    return sorted(names)


def remember_writer(lake: Lake, table: TableOutput, producer: str, *, by: str) -> None:
    """Remember that a table has rows of an application."""

    def decide(current: Commit | None) -> dict[str, Any] | None:
        writers = sorted({*_writers_in(current), producer})
        body = {"name": table.name, "place": table.place, "writers": writers}
        if current is not None and current.body == body:
            return None
        return body

    table_log(lake, table.name).transact(decide, by=by)


def check_not_lost(lake: Lake, table: TableOutput, producer: str) -> None:
    """Raise TableNotFoundError for a table that is gone although applications have written it, and
    TableReplacedError for one that has no trace of this application although it has written it.
    """
    if table.find(producer) is None:
        check_first_batch(lake, table, producer, exists=table.stored_columns() is not None)


def check_first_batch(lake: Lake, table: TableOutput, producer: str, *, exists: bool) -> None:
    """Raise the errors of `check_not_lost` for a table without any batch of this application.
    `exists` is whether there is such a table.
    """
    current = table_log(lake, table.name).current()
    writers = _writers_in(current)
    if current is not None and writers and not exists:
        raise _gone_error(lake, table, writers, current.body["place"])
    if producer in writers:
        raise _replaced_error(lake, table, producer)


def _writers_in(current: Commit | None) -> list[str]:
    """Return the applications that have written a table, by the last commit of its log."""
    return [] if current is None else list(current.body["writers"])


def _gone_error(
    lake: Lake, table: TableOutput, writers: list[str], written_at: str
) -> errors.TableNotFoundError:
    """Return the error for a table that is gone, and was at the place `written_at`."""
    applications = ", ".join(writers)
    if table.place == written_at:
        where = "is gone"
        restore = "Restore it."
    else:
        where = f"does not exist at {table.place}"
        restore = (
            f"Run in the folder from which the path leads to {written_at}, or declare its absolute"
            " path."
        )
    return errors.TableNotFoundError(
        f"output table {table.name} {where}, and has rows of {applications} by {lake.url}. A new"
        " one would have only the rows of the next batch.",
        f"{restore} {_describe_recreation(table.name)}",
        table=table.name,
    )


def _replaced_error(lake: Lake, table: TableOutput, producer: str) -> errors.TableReplacedError:
    """Return the error for a table that has no trace of an application which has written it."""
    return errors.TableReplacedError(
        f"output table {table.name} has no batch of application {producer!r}, which has written it"
        f" by {lake.url}: it was created again, or somebody has removed what it remembers of the"
        " batches.",
        f"Restore the table that was written. {_describe_recreation(table.name)}",
        table=table.name,
        loss="replaced",
    )


def _describe_recreation(name: str) -> str:
    """Return how to go on with a new table, or one that somebody else has created."""
    table = shlex.quote(name)
    return (
        f"Or let the next run create it, or take it as it is: adjunct table allow-recreate {table}."
        " To send the earlier records again, too, before that run: adjunct startpoint set"
        " MODULE:APP STREAM --oldest --reason REASON."
    )
