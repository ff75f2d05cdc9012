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
    """Remember that a table has rows of an application; commits only what is not known yet."""

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
    applications = " and ".join(writers)
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
        f"output table {table.name} {where}, and {applications} of {lake.url} has written rows to"
        " it. A new table would have only the rows of the next batch.",
        f"{restore} Or let the next run create a new one: {_describe_recreation(table.name)}",
        table=table.name,
    )


def _replaced_error(lake: Lake, table: TableOutput, producer: str) -> errors.TableReplacedError:
    """Return the error for a table that has no trace of an application which has written it."""
    return errors.TableReplacedError(
        f"output table {table.name} has no trace of application {producer!r} of {lake.url}, which"
        " has written rows to it: it was created again, or what it remembers of batches was"
        " removed.",
        "Restore the table that was written. Or let the next run write to this one as it is:"
        f" {_describe_recreation(table.name)}",
        table=table.name,
        loss="replaced",
    )


def _describe_recreation(name: str) -> str:
    """Return the commands that let the next run go on with another table, and fill it."""
    return (
        f"adjunct table allow-recreate {shlex.quote(name)} --reason …. Before that run, a"
        " startpoint sends the earlier records again: adjunct startpoint set MODULE:APP STREAM"
        " --oldest --reason …."
    )
