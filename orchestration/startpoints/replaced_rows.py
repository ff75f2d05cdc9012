"""Refuses to read records again whose rows in an output table could not be replaced.

A repartitioning gives the records of a stream other offsets. Rows that were made before it keep the
old ones in a table with `on_replay="replace"`, so rows that are made of the same records again
would stand beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.intent import Ranges, of_stream
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.planned import PlannedOutputTable
from dagster_adjunct.orchestration.startpoints.positions import StreamSnapshot
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.output_tables.opening import open_output


def check_rows_replaceable(
    app: Application,
    plan: ExecutionPlan,
    streams: Mapping[str, StreamSnapshot],
    ranges: Ranges,
    *,
    writer: str,
) -> None:
    """Raise ConfigurationError if records in these ranges, which are read again, were repartitioned
    since a table got rows of them that it replaces.

    `streams` are the input streams; `writer` is the name by which the tables know the application.
    Looks into a table only if the records are from before a repartitioning.
    """
    rewritten = {}
    for name, stream in streams.items():
        if reads_rewritten(stream, of_stream(ranges, name)):
            rewritten[name] = [f"{writer}@{identity}" for identity in _former_identities(stream)]
    for table in plan.output_tables:
        readers = {name: rewritten[name] for name in table.streams if name in rewritten}
        if readers and table.on_replay == "replace":
            _check_table(app, table, readers)


def _check_table(
    app: Application, table: PlannedOutputTable, readers: Mapping[str, Sequence[str]]
) -> None:
    """Raise ConfigurationError if a table has rows that `readers` have made of records that were
    repartitioned since, by stream.
    """
    opened = open_output(app.output_tables[table.table].table)
    for stream, former in readers.items():
        if opened.has_rows_of(former):
            raise _rows_stay_error(app, table, stream)


def reads_rewritten(stream: StreamSnapshot, ranges: Ranges) -> bool:
    """Return whether ranges of a stream have records from before its last repartitioning."""
    rewritten = stream.info.repartitioned
    if rewritten is None:
        return False
    for ssp, span in ranges.items():
        is_later_partition = ssp.partition >= len(rewritten.continued_at)
        if is_later_partition or stream.system.compare(span.start, span.end) >= 0:
            continue
        if stream.system.compare(span.start, rewritten.continued_at[ssp.partition]) < 0:
            return True
    return False


def _former_identities(stream: StreamSnapshot) -> tuple[str, ...]:
    """Return the identities that a repartitioned stream had before."""
    rewritten = stream.info.repartitioned
    assert rewritten is not None
    return (*rewritten.earlier, rewritten.identity)


def _rows_stay_error(
    app: Application, table: PlannedOutputTable, stream: str
) -> ConfigurationError:
    """Return the error for rows of an output table that can't be replaced."""
    return ConfigurationError(
        f"{table.operator}: output table {table.table} has rows of records that application"
        f" {app.name!r} read of {stream} before that was repartitioned. These records have other"
        " offsets now: rows that are made of them again can't replace those, although the table has"
        ' on_replay="replace", and would stand beside them.',
        "Take the startpoint back, if it was set (adjunct startpoint clear MODULE:APP"
        f" {stream} --reason …). To make all rows again, declare a new table, and set the"
        f" startpoint then (adjunct startpoint set MODULE:APP {stream} --oldest --reason …).",
        application=app.name,
        operator=table.operator,
        table=table.table,
        stream=stream,
    )
