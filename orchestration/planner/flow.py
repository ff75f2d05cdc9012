"""Walks the operators once and says of each what its records look like and where they lie.

`Flow` is that knowledge. Where records lie is known by the stream whose partitions they are in (its
count may still be open) and by the columns and hash that chose the partition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.application.graph import (
    Filter,
    Input,
    Join,
    Map,
    PartitionBy,
    SendToStream,
    SendToTable,
)
from dagster_adjunct.orchestration.planner import columns as names
from dagster_adjunct.orchestration.planner.catalog import (
    SPARK,
    TASK_NUMBER,
    UNKNOWN,
    Catalog,
    Partitioner,
    facts_of,
)
from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.application.graph import Operator
    from dagster_adjunct.orchestration.planner.columns import Columns


@dataclass(frozen=True, slots=True)
class Flow:
    """Records between two operators. `stream` is the id of the operator (or inserted exchange) whose
    partitions they are in; `partitioned_by` is () when that is not known, since `lost_at`."""

    stream: str
    columns: Columns
    partitioned_by: tuple[str, ...]
    partitioner: Partitioner
    lost_at: str = ""


@dataclass(frozen=True, slots=True)
class Requirement:
    """What a partitioned dataset asks of the stream that meets it: its count, and the stream's columns
    that stand for the dataset's partition columns (None where only the count matters)."""

    dataset: str
    partitions: int
    columns: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Flows:
    """For every operator its records `before` (what it works on) and `after`."""

    before: dict[str, Flow]
    after: dict[str, Flow]


Repartition = Callable[["Operator", Requirement, Flow], Flow]


def requirement(app: Application, operator: Operator) -> Requirement | None:
    """Return what the operator's dataset asks for; None without one, or with a broadcast one."""
    spec = operator.spec
    if isinstance(spec, Join):
        dataset = app.dataset(spec.dataset)
        if dataset.partitions is None:
            return None
        wanted = tuple(spec.stream_column(column) for column in dataset.partition_by)
        return Requirement(dataset.name, dataset.partitions, wanted)
    if isinstance(spec, SendToTable) and spec.dataset:
        dataset = app.dataset(spec.table)
        return None if dataset.partitions is None else Requirement(dataset.name, dataset.partitions, None)
    return None


def follow(app: Application, catalog: Catalog, repartition: Repartition | None = None) -> Flows:
    """Return the flows of all operators; `repartition` may put an exchange before one.

    Raises PlanningError for a stream that is not there, and for columns that are known to be missing or double.
    """
    flows = Flows({}, {})
    for operator in app.operators:
        if isinstance(operator.spec, Input):
            flow = _of_input(catalog, operator.id, operator.spec)
            flows.before[operator.id] = flows.after[operator.id] = flow
            continue
        arriving = flows.after[operator.inputs[0]]
        needed = requirement(app, operator)
        moved = repartition(operator, needed, arriving) if repartition and needed else arriving
        flows.before[operator.id] = moved
        # A sink to a table hands on the records as they came, whatever it did to write them.
        onward = arriving if isinstance(operator.spec, SendToTable) else moved
        flows.after[operator.id] = _after(app, catalog, operator, onward)
    return flows


def _of_input(catalog: Catalog, operator: str, spec: Input) -> Flow:
    facts = facts_of(catalog, spec.stream, operator)
    if spec.broadcast is None:
        return Flow(operator, facts.columns, facts.key, facts.partitioner if facts.key else UNKNOWN)
    if facts.columns is not None and spec.broadcast.lower() in map(str.lower, facts.columns):
        raise PlanningError(
            f"{operator}: stream {spec.stream} has a column {spec.broadcast!r}, as the number of the task is called.",
            'Call that otherwise: input_stream(…, broadcast="task_number").',
        )
    columns = None if facts.columns is None else (*facts.columns, spec.broadcast)
    return Flow(operator, columns, (spec.broadcast,), TASK_NUMBER)


def output_partitioner(catalog: Catalog, stream: str) -> Partitioner:
    """Return how records of an output stream are (or will be) spread."""
    facts = catalog.get(stream)
    if facts is not None:
        return facts.partitioner
    return SPARK if stream.startswith("lake.") else UNKNOWN


def _after(app: Application, catalog: Catalog, operator: Operator, flow: Flow) -> Flow:
    spec = operator.spec
    if isinstance(spec, Map):
        kept = names.partitioning_after_map(spec, flow.partitioned_by)
        flow = replace(flow, columns=names.after_map(operator.id, spec, flow.columns))
        return flow if kept == flow.partitioned_by or not flow.partitioned_by else _moved(flow, kept, operator.id)
    if isinstance(spec, PartitionBy):
        names.require(operator.id, "the stream", spec.columns, flow.columns, "Name columns that it has.")
        return Flow(operator.id, flow.columns, spec.columns, SPARK)
    if isinstance(spec, Join):
        dataset = app.dataset(spec.dataset)
        stored = names.of_dataset(dataset, catalog)
        return replace(flow, columns=names.after_join(operator.id, spec, dataset, flow.columns, stored))
    if isinstance(spec, SendToStream):
        return _after_output(app, catalog, operator.id, spec, flow)
    if isinstance(spec, SendToTable):
        key = app.dataset(spec.table).key if spec.dataset else app.table_key(spec.table)
        names.require(operator.id, "the stream", key, flow.columns, f"They are the key of table {spec.table}.")
        return flow
    assert isinstance(spec, Filter)
    return flow


def _moved(flow: Flow, kept: tuple[str, ...] | None, operator: str) -> Flow:
    if kept is not None:
        return replace(flow, partitioned_by=kept)
    return replace(flow, partitioned_by=(), partitioner=UNKNOWN, lost_at=operator)


def _after_output(app: Application, catalog: Catalog, operator: str, spec: SendToStream, flow: Flow) -> Flow:
    output = app.outputs[spec.stream]
    names.require(operator, "the stream", output.key, flow.columns, f"They are the key of output {output.name}.")
    facts = catalog.get(output.name)
    if facts is not None and (facts.partitions, facts.key) != (output.partitions, output.key):
        raise PlanningError(
            f"output stream {output.name!r} exists with {facts.partitions} partitions and key "
            f"({', '.join(facts.key)}); it is declared with {output.partitions} and ({', '.join(output.key)}).",
            "Declare it as it is, or choose another name. A lake stream's partitions can be changed: adjunct stream "
            f"repartition {output.name.partition('.')[2]} --partitions {output.partitions} --reason ….",
        )
    partitioner = output_partitioner(catalog, output.name) if output.key else UNKNOWN
    return Flow(operator, flow.columns, output.key, partitioner)
