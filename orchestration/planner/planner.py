"""Plans an application: proves that its joins need no shuffle, finds the counts that are open, and says
which task owns what.

    operators -> flows (columns, and where records lie) -> join groups -> counts -> proof -> plan

It is pure: an application, facts and settings in, a plan or an error out. After SAMZA-1889.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.advance_units import partitions_note
from dagster_adjunct.orchestration.operators.planning_values import Exchange, PlanContext, StreamEdge
from dagster_adjunct.orchestration.planner.auto_repartition import Inserted, repartitioned
from dagster_adjunct.orchestration.planner.co_partitioning import check_co_partitioned, check_counts
from dagster_adjunct.orchestration.planner.execution_plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.join_groups import Groups, join_groups
from dagster_adjunct.orchestration.planner.partition_counts import (
    assign,
    declared_counts,
    default_count,
    with_broadcast,
)
from dagster_adjunct.orchestration.planner.plan_parts import JoinGroup, PlannedOperator, Task
from dagster_adjunct.orchestration.planner.record_flows import Flows, follow
from dagster_adjunct.orchestration.planner.stored_columns import check_stored_columns
from dagster_adjunct.orchestration.planner.stream_edges import stream_edges
from dagster_adjunct.orchestration.planner.table_order import order_notes, planned_tables
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.tables.credits.stated_budgets import budgets_of, check_budgets

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.stream_facts import Catalog


def plan(app: Application, catalog: Catalog) -> ExecutionPlan:
    """Return the plan of an application; `catalog` has the facts of the streams that exist.

    Inputs and the inputs of datasets have to be in the catalog; outputs may be.
    Raises PartitionCountMismatchError when counts can't agree, and PlanningError for anything else that
    can't work: a stream that is not there, a missing or double column, a join that is not co-partitioned.
    """
    if not app.inputs:
        raise PlanningError(
            f"application {app.name!r} has no input stream.",
            'Declare one: app.input_stream("…").',
            application=app.name,
        )
    inserted: dict[str, Inserted] = {}
    if app.auto_repartition:
        flows, inserted = repartitioned(app, catalog)
    else:
        flows = follow(app, catalog)
    check_budgets(budgets_of(app.tables.values()))
    check_stored_columns(app, catalog)
    groups = join_groups(app, inserted)
    default, default_from = default_count(app, catalog)
    open_counts = declared_counts(app, catalog)
    open_counts |= {flows.before(item.operator).stream: item.partitions for item in inserted.values()}
    counts = with_broadcast(app, assign(open_counts, groups, default))
    edges = stream_edges(app, catalog, flows, counts, inserted, default_from)
    check_counts(app, groups, counts, edges, flows)
    check_co_partitioned(app, flows, edges)
    exchanges = _exchanges(app, catalog, flows, counts.partitions, edges, inserted)
    streams = tuple(edges.values())
    tables = planned_tables(app, catalog)
    return ExecutionPlan(
        application=app.name,
        operators=_operators(app, flows, counts.partitions),
        streams=streams,
        join_groups=_groups(app, groups, edges, counts.partitions),
        exchanges=exchanges,
        tasks=tasks(streams),
        notes=(*_notes(app, edges, inserted), *order_notes(tables)),
        tables=tables,
    )


def tasks(streams: tuple[StreamEdge, ...]) -> tuple[Task, ...]:
    """Return tasks 0 to n-1; a task owns its partition of all inputs and partitioned datasets.

    n is the largest count of those and of the intermediate streams. All tasks read all partitions of broadcast inputs.
    """
    inputs = [edge for edge in streams if edge.role == "input"]
    shared = [edge for edge in streams if edge.role == "broadcast-input"]
    everywhere = tuple(_partition(edge, number) for edge in shared for number in range(edge.partitions or 0))
    datasets = [edge for edge in streams if edge.role == "side-input" and edge.partitions is not None]
    whole = [edge for edge in streams if edge.role == "side-input" and edge.partitions is None]
    broadcast = (*(edge.name for edge in shared), *(str(edge.dataset) for edge in whole))
    total = max((edge.partitions or 0 for edge in streams if edge.role not in ("output", "broadcast-input")), default=0)
    return tuple(
        Task(
            f"Partition {number}",
            (*(_partition(edge, number) for edge in inputs if number < (edge.partitions or 0)), *everywhere),
            tuple(f"{edge.dataset}.{number}" for edge in datasets if number < (edge.partitions or 0)),
            broadcast,
        )
        for number in range(total)
    )


def _partition(edge: StreamEdge, number: int) -> SystemStreamPartition:
    return SystemStreamPartition(*split_stream_name(edge.name), number)


def _exchanges(
    app: Application,
    catalog: Catalog,
    flows: Flows,
    counts: dict[str, int],
    edges: dict[str, StreamEdge],
    inserted: dict[str, Inserted],
) -> tuple[Exchange, ...]:
    exchanges: list[Exchange] = []
    for operator in app.operators:
        if operator.id in inserted:
            item = inserted[operator.id]
            exchanges.append(
                Exchange(operator.id, "auto_repartition", item.columns, item.partitions, f"the stream: {item.why}")
            )
        if operator.spec.role == "intermediate":
            edge = edges[operator.id]
            why = f"count: {edge.count_from}"
            exchanges.append(Exchange(operator.id, "partition_by", edge.partitioned_by, counts[operator.id], why))
        if operator.spec.writes is not None:
            flow = flows.before(operator.id)
            context = PlanContext(operator.id, app, catalog)
            before = operator.spec.exchange_before(context, flow, counts[flow.stream])
            exchanges += [] if before is None else [before]
    return tuple(exchanges)


def _operators(app: Application, flows: Flows, counts: dict[str, int]) -> tuple[PlannedOperator, ...]:
    planned = []
    for operator in app.operators:
        flow = flows.after[operator.id]
        planned.append(
            PlannedOperator(
                operator.id, operator.kind, operator.inputs, operator.spec.summary(), counts[flow.stream],
                flow.partitioned_by, flow.columns, operator.spec.reads,
                None if operator.spec.match is None else operator.spec.match.dataset, operator.spec.writes,
            )
        )  # fmt: skip
    return tuple(planned)


def _groups(
    app: Application, groups: Groups, edges: dict[str, StreamEdge], counts: dict[str, int]
) -> tuple[JoinGroup, ...]:
    result = []
    for join, members in groups.items():
        needed = app.operator(join).spec.requirement(app)
        assert needed is not None
        names = tuple(edges[member].name for member in members)
        result.append(JoinGroup(join, needed.dataset, names, needed.partitions, needed.columns or ()))
    return tuple(result)


def _notes(app: Application, edges: dict[str, StreamEdge], inserted: dict[str, Inserted]) -> tuple[str, ...]:
    notes = []
    for item in inserted.values():
        notes.append(
            f"auto_repartition: {edges[item.stream].name} moves before {item.operator} into {item.partitions} "
            f"partitions by ({', '.join(item.columns)}), because {item.why}."
        )
    specs = [operator.spec for operator in app.operators]
    written = {spec.writes for spec in specs if spec.writes is not None}
    if not written:
        notes.append("Nothing is written: no stream ends in send_to().")
    used = written | {spec.match.dataset for spec in specs if spec.match is not None}
    idle = [name for name in app.outputs if name not in written]
    notes += [f"Output stream {name} is declared and nothing is sent to it." for name in idle]
    notes += [f"Dataset {item.name} is declared and not used." for item in app.datasets if item.name not in used]
    notes += [f"Table {name} is declared and not used." for name in app.tables if name not in written]
    notes += [note for note in map(partitions_note, app.datasets) if note]
    return tuple(notes)
