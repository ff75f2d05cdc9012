"""The sends to Iceberg and Delta tables, and what the next commit would make of each table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import OutputTable
from dagster_adjunct.orchestration.application.written_tables import check_not_lost
from dagster_adjunct.orchestration.operators.columns import is_own
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.orchestration.operators.stream_facts import Columns
from dagster_adjunct.orchestration.planner.notes import trace_records_read_again
from dagster_adjunct.orchestration.planner.planned import PlannedOutputTable
from dagster_adjunct.resources.errors import (
    AdjunctError,
    PermanentError,
    PlanningError,
    StreamNotFoundError,
    TableNotFoundError,
    TransientError,
)
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.output_tables.batches import OutputColumns
from dagster_adjunct.resources.output_tables.opening import open_output
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import is_storable
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import LAKE, StreamSystem

_REPLAYS = {
    "append": "rows of records that are read again come again with a higher __epoch, and the"
    " earlier ones stay",
    "replace": "rows of records that are read again replace the earlier ones",
}


def plan_output_tables(app: Application) -> tuple[PlannedOutputTable, ...]:
    """Return the sends to output tables; nothing is compared with what is stored."""
    again = trace_records_read_again(app)
    planned = []
    for operator, output in _list_sends(app):
        streams = tuple(sorted(again[operator.id].streams))
        replay = _REPLAYS[output.on_replay]
        planned.append(
            PlannedOutputTable(operator.id, output.name, output.on_replay, replay, streams)
        )
    return tuple(planned)


def find_upstream_writers(
    planned: Sequence[PlannedOutputTable], systems: Mapping[str, StreamSystem]
) -> tuple[PlannedOutputTable, ...]:
    """Return the sends to output tables in which results replace rows, with the applications that
    have written their streams in the lake.
    """
    lake = systems.get(LAKE)
    if not isinstance(lake, LakeStreams):
        return tuple(planned)
    found = []
    for item in planned:
        upstream: list[str] = []
        if item.on_replay == "replace":
            for stream in item.streams:
                upstream += _list_writers(lake, stream)
        found.append(replace(item, upstream=tuple(upstream)))
    return tuple(found)


def _list_writers(lake: LakeStreams, stream: str) -> list[str]:
    """Return texts that name the applications which have written a stream; [] if it is not in the
    lake, or does not exist.
    """
    system, name = split_stream_name(stream)
    if system != LAKE:
        return []
    try:
        read = lake.state(name).state.read
    except StreamNotFoundError:  # the plan itself says so
        return []
    applications = {reader.partition("@")[0] for reader in read}
    return [f"application {application} ({stream})" for application in sorted(applications)]


def compare_output_table(
    app: Application, planned: PlannedOutputTable, columns: Columns, lake: Lake, producer: str
) -> PlannedOutputTable:
    """Return a send with what its next commit would create or change, or why that is not known.

    `columns` are those of the records, and `producer` is how the table knows the application.
    Raises PlanningError if the table can't take the records, or is lost (`check_not_lost`).
    """
    output = app.output_tables[planned.table]
    opened = open_output(output.table)
    try:
        stored = opened.stored_columns()
        check_not_lost(lake, opened, producer)
    except TableNotFoundError as error:
        raise _planning_error(planned, error) from error
    except AdjunctError as error:
        return replace(planned, unchecked=f"{error.problem} {error.next_step}")
    unknown = _describe_unknown(columns)
    if unknown and stored is not None:
        return replace(planned, unchecked=unknown)
    if unknown:  # there is no such table yet
        return replace(planned, changes=("the table is created",), unchecked=unknown)
    try:
        sent = OutputColumns(_to_schema(columns), output.hidden, output.changes)
        return replace(planned, changes=tuple(opened.check(sent, producer)))
    except TransientError as error:
        return replace(planned, unchecked=f"{error.problem} {error.next_step}")
    except PermanentError as error:
        raise _planning_error(planned, error) from error


def _planning_error(planned: PlannedOutputTable, error: AdjunctError) -> PlanningError:
    """Return the error for a table that does not take a send."""
    problem = f"{planned.operator}: {error.problem}"
    return PlanningError(problem, error.next_step, operator=planned.operator, table=planned.table)


def _list_sends(app: Application) -> Iterator[tuple[Operator, OutputTable]]:
    """Yield the operators that send to output tables, each with its table."""
    for operator in app.operators:
        output = app.output_tables.get(operator.spec.writes or "")
        if output is not None:
            yield operator, output


def _describe_unknown(columns: Columns) -> str:
    """Return why the records can't be compared with a table yet; "" if they can."""
    missing = "The columns of the records"
    if columns.complete:
        unknown = [name for name in filter(is_own, columns.known) if not _is_typed(columns, name)]
        if not unknown:
            return ""
        missing = f"The types of {', '.join(unknown)}"
    return (
        f"{missing} are known only once a batch is computed. The first run compares them before"
        " its first batch. To compare without a run: adjunct plan MODULE:APP --verify."
    )


def _is_typed(columns: Columns, name: str) -> bool:
    """Whether the type of a column is known, as one that a table can store."""
    kind = columns.known[name].type
    return columns.typed and kind is not None and is_storable(kind)


def _to_schema(columns: Columns) -> Schema:
    """Return the schema of the columns, whose types are known, without the hidden ones."""
    fields = []
    for name, facts in columns.known.items():
        if is_own(name):
            assert facts.type is not None
            fields.append(Field(name, facts.type))
    return Schema(tuple(fields))
