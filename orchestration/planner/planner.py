"""Plans an application: proves that joins need no shuffle, infers partition counts, and assigns partitions to tasks.

    requirements -> flows (columns and partitioning) -> join groups -> counts -> proof -> plan

Planning is pure: an application and the facts of its streams in, a plan or an error out. After SAMZA-1889.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import describe_partitions
from dagster_adjunct.orchestration.operators.operator import Exchange, Operator, PlanContext, StreamEdge
from dagster_adjunct.orchestration.operators.stream_facts import Catalog
from dagster_adjunct.orchestration.planner.columns import (
    Flows,
    check_datasets,
    check_types,
    note_batch_windows,
    note_nondeterministic_results,
    note_unproven_columns,
    note_unproven_datasets,
    trace_flows,
)
from dagster_adjunct.orchestration.planner.conflicts import (
    Insertions,
    apply_insertions,
    check_co_partitioning,
    plan_repartitioning,
)
from dagster_adjunct.orchestration.planner.notes import (
    check_state_names,
    note_marks,
    note_state,
    note_table_order,
    plan_fed_joins,
    plan_joins_by_time,
    plan_state,
    plan_tables,
)
from dagster_adjunct.orchestration.planner.partition_counts import (
    Requirements,
    add_broadcast_counts,
    add_merged_counts,
    assign_counts,
    assign_tasks,
    build_stream_edges,
    collect_requirements,
    dataset_node,
    declared_counts,
    default_count,
    find_join_groups,
)
from dagster_adjunct.orchestration.planner.plan import (
    ExecutionPlan,
    FedDataset,
    JoinGroup,
    PlannedCall,
    PlannedOperator,
)
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.tables.shared_rate import check_budgets, list_budgets


def build_plan(app: Application, catalog: Catalog) -> ExecutionPlan:
    """Return the plan of an application; `catalog` has the facts of the streams that exist.

    Inputs and source streams of datasets must be in the catalog; outputs may be. Raises PartitionCountMismatchError if
    partition counts can't agree, and PlanningError for anything else that can't work: a missing stream, a missing or
    duplicate column, a join that is not co-partitioned.
    """
    if not app.inputs:
        raise PlanningError(
            f"application {app.name!r} has no input stream.",
            'Declare one: app.input_stream("…").',
            application=app.name,
        )
    needs = collect_requirements(app)
    inserted: Insertions = plan_repartitioning(app, catalog, needs) if app.auto_repartition else {}
    flows = trace_flows(app, catalog, apply_insertions(inserted))
    check_budgets(list_budgets(app.tables.values()))
    check_datasets(app, catalog)
    check_state_names(app)
    unproven, types = check_types(app, catalog)
    groups = find_join_groups(app, needs, flows)
    default, default_from = default_count(app, catalog)
    open_counts = declared_counts(app, catalog)
    open_counts |= {item.node: item.partitions for item in inserted.values()}
    counts = add_merged_counts(app, flows, add_broadcast_counts(app, assign_counts(open_counts, groups, default)))
    edges = build_stream_edges(app, catalog, flows, counts, inserted, default_from)
    check_co_partitioning(app, catalog, needs, flows, groups, counts, edges)
    if any(flows.merges_streams(operator) for operator in app.operators):
        # Only now is it known whether the inputs of merged streams have equal counts.
        flows = trace_flows(app, catalog, apply_insertions(inserted), counts.partitions)
    exchanges = _plan_exchanges(app, catalog, flows, counts.partitions, edges, inserted)
    streams = tuple(edges.values())
    tables = plan_tables(app, catalog, types)
    return ExecutionPlan(
        application=app.name,
        operators=_plan_operators(app, flows, counts.partitions),
        streams=streams,
        join_groups=_plan_join_groups(app, needs, flows, edges, counts.partitions),
        exchanges=exchanges,
        tasks=assign_tasks(streams, app.tasks),
        notes=(
            *_collect_notes(app, edges, inserted),
            *note_table_order(tables),
            *note_marks(app),
            *note_nondeterministic_results(app, types),
            *note_batch_windows(app),
            *note_unproven_columns(app, flows),
            *note_unproven_datasets(app, catalog),
            *unproven,
            *note_state(app),
        ),
        tables=tables,
        fed=_plan_fed_datasets(app, needs, flows, edges),
        calls=_plan_calls(app),
        state=plan_state(app),
        fed_joins=plan_fed_joins(app),
        by_time=plan_joins_by_time(app),
    )


def _plan_exchanges(
    app: Application,
    catalog: Catalog,
    flows: Flows,
    counts: dict[str, int],
    edges: dict[str, StreamEdge],
    inserted: Insertions,
) -> tuple[Exchange, ...]:
    exchanges: list[Exchange] = []
    for operator in app.operators:
        for number in range(len(operator.inputs)):
            item = inserted.get((operator.id, number))
            if item is not None:
                why, partitions = f"the stream: {item.why}", counts[item.node]
                exchanges.append(Exchange(operator.id, "auto_repartition", item.columns, partitions, why, number))
        if operator.spec.role == "intermediate":
            edge = edges[operator.id]
            why = f"count: {edge.count_from}"
            exchanges.append(Exchange(operator.id, "partition_by", edge.partitioned_by, counts[operator.id], why))
        if operator.spec.role == "broadcast":
            edge = edges[operator.id]
            why = "every task gets all records"
            exchanges.append(Exchange(operator.id, "broadcast", edge.partitioned_by, counts[operator.id], why))
        if operator.spec.writes is not None:
            flow = flows.before(operator.id)
            context = PlanContext(operator.id, app, catalog)
            before = operator.spec.exchange_before(context, flow, counts[flow.stream])
            exchanges += [] if before is None else [before]
    return tuple(exchanges)


def _plan_operators(app: Application, flows: Flows, counts: dict[str, int]) -> tuple[PlannedOperator, ...]:
    planned = []
    for operator in app.operators:
        flow = flows.after[operator.id]
        planned.append(
            PlannedOperator(
                operator.id, operator.kind, operator.inputs, _summary(app, operator), counts[flow.stream],
                flow.partitioned_by, flow.columns, operator.spec.reads,
                None if operator.spec.match is None else operator.spec.match.node.name, operator.spec.writes,
            )
        )  # fmt: skip
    return tuple(planned)


def _summary(app: Application, operator: Operator) -> str:
    summary, output = operator.spec.summary(), app.outputs.get(operator.spec.writes or "")
    return f"{summary}: {output.description}" if output is not None and output.description else summary


def _plan_join_groups(
    app: Application, needs: Requirements, flows: Flows, edges: Mapping[str, StreamEdge], counts: Mapping[str, int]
) -> tuple[JoinGroup, ...]:
    result = []
    for join, asked in needs.items():
        met = [
            (needed, flow)
            for needed, flow in zip(asked, flows.arriving[join], strict=True)
            if needed is not None and not needed.feeds
        ]
        if not met:
            continue
        nodes = dict.fromkeys(flow.stream for _, flow in met)
        nodes |= {dataset_node(needed.dataset): None for needed, _ in met if needed.dataset}
        names = tuple(_stream_label(node, edges) for node in nodes)
        needed, flow = met[0]
        result.append(JoinGroup(join, needed.dataset, names, counts[flow.stream], needed.columns or ()))
    return tuple(result)


def _plan_fed_datasets(
    app: Application, needs: Requirements, flows: Flows, edges: Mapping[str, StreamEdge]
) -> tuple[FedDataset, ...]:
    """Return the joined datasets that the application feeds, in order of declaration."""
    sinks: dict[str, list[str]] = {}
    streams: dict[str, dict[str, None]] = {}
    for operator, asked in needs.items():
        for needed, flow in zip(asked, flows.arriving[operator], strict=True):
            if needed is not None and needed.feeds and needed.dataset is not None:
                sinks.setdefault(needed.dataset, []).append(operator)
                streams.setdefault(needed.dataset, {})[_stream_label(flow.stream, edges)] = None
    return tuple(
        FedDataset(dataset.name, tuple(streams[dataset.name]), tuple(sinks[dataset.name]), dataset.partitions or 0)
        for dataset in app.datasets
        if dataset.name in sinks
    )


def _stream_label(node: str, edges: Mapping[str, StreamEdge]) -> str:
    """Return the name of a stream, or the id of the operator that merges several."""
    return edges[node].name if node in edges else node


def _plan_calls(app: Application) -> tuple[PlannedCall, ...]:
    called = ((operator.id, operator.spec.call(app)) for operator in app.operators)
    return tuple(
        PlannedCall(operator, call.kind, call.of, call.guarantee, call.recorded) for operator, call in called if call
    )


def _collect_notes(app: Application, edges: Mapping[str, StreamEdge], inserted: Insertions) -> tuple[str, ...]:
    notes = []
    for item in inserted.values():
        notes.append(
            f"auto_repartition: {_stream_label(item.stream, edges)} moves before {item.operator} into "
            f"{edges[item.node].partitions} partitions by ({', '.join(item.columns)}), because {item.why}."
        )
    specs = [operator.spec for operator in app.operators]
    written = {spec.writes for spec in specs if spec.writes is not None}
    if not written:
        notes.append("Nothing is written: no stream ends in send_to().")
    used = written | {spec.match.node.name for spec in specs if spec.match is not None}
    idle = [name for name in app.outputs if name not in written]
    notes += [f"Output stream {name} is declared and nothing is sent to it." for name in idle]
    notes += [f"Dataset {item.name} is declared and not used." for item in app.datasets if item.name not in used]
    notes += [f"Table {name} is declared and not used." for name in app.tables if name not in used]
    notes += [note for note in map(describe_partitions, app.datasets) if note]
    return tuple(notes)
