"""The plan: what the planner proved and decided, as plain immutable data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange, StreamEdge
from dagster_adjunct.orchestration.planner.plans.plan_differences import differences
from dagster_adjunct.orchestration.planner.plans.plan_document import document_of, read_document
from dagster_adjunct.orchestration.planner.plans.plan_mermaid import mermaid
from dagster_adjunct.orchestration.planner.plans.plan_parts import (
    FedDataset,
    FedJoin,
    JoinByTime,
    JoinGroup,
    PlannedCall,
    PlannedOperator,
    PlannedState,
    PlannedTable,
    Task,
)
from dagster_adjunct.orchestration.planner.plans.plan_text import render
from dagster_adjunct.orchestration.planner.plans.traverse import traverse
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """A proven application. Equal applications and catalogs give equal plans."""

    application: str
    operators: tuple[PlannedOperator, ...]
    streams: tuple[StreamEdge, ...]
    join_groups: tuple[JoinGroup, ...]
    exchanges: tuple[Exchange, ...]
    tasks: tuple[Task, ...]
    notes: tuple[str, ...]
    tables: tuple[PlannedTable, ...]
    fed: tuple[FedDataset, ...]
    calls: tuple[PlannedCall, ...]
    state: tuple[PlannedState, ...]
    fed_joins: tuple[FedJoin, ...]
    by_time: tuple[JoinByTime, ...]

    def stream(self, name: str) -> StreamEdge:
        """Return the edge of an input, output or intermediate stream, else of a side input."""
        for wanted in (False, True):
            for edge in self.streams:
                if edge.name == name and (edge.dataset is not None) == wanted:
                    return edge
        raise PlanningError(
            f"the plan of {self.application!r} has no stream {name!r}; it has "
            f"{', '.join(edge.name for edge in self.streams)}.",
            "Check the name.",
            stream=name,
        )

    def partitions_by_task(self) -> dict[str, frozenset[SystemStreamPartition]]:
        """Return the input partitions that each task reads, by its name."""
        return {task.name: frozenset(task.ssps) for task in self.tasks}

    def tables_met_after_sends(self) -> frozenset[str]:
        """Return the local tables that a join meets with what the same batch has sent to them before it."""
        return frozenset(join.dataset for join in self.fed_joins if join.last_send is not None)

    def operator(self, operator_id: str) -> PlannedOperator:
        """Return what is planned for an operator."""
        for operator in self.operators:
            if operator.id == operator_id:
                return operator
        raise PlanningError(
            f"the plan of {self.application!r} has no operator {operator_id!r}.",
            "Check the id.",
            application=self.application,
            operator=operator_id,
        )

    def task(self, name: str) -> Task:
        """Return the task of this name, as in "Partition 3", or "Task 3" where tasks own several partitions."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise PlanningError(
            f"the plan of {self.application!r} has no task {name!r}; it has {len(self.tasks)}, from "
            f"{next((task.name for task in self.tasks), None)!r} on.",
            "Check the name.",
            application=self.application,
        )

    def partitions_at(self, operator_id: str) -> int:
        """Return the partition count of the records that leave an operator."""
        return self.operator(operator_id).partitions

    def taking_part(self, join: str) -> tuple[str, ...]:
        """Return the names of all streams whose records reach a join, in the order of the plan's streams: by way of
        other joins and of tables, too, until they enter another stream; then the input of the join's dataset."""
        operators = {operator.id: operator for operator in self.operators}
        begins = {edge.operator for edge in self.streams if edge.operator and edge.count_from != "auto_repartition"}
        moved = {
            (exchange.operator, exchange.input) for exchange in self.exchanges if exchange.reason == "auto_repartition"
        }
        feeding = {
            group.join: fed.sinks for group in self.join_groups for fed in self.fed if fed.dataset == group.dataset
        }
        reached: set[tuple[str | None, bool]] = set()

        def before(vertex: str) -> list[str]:
            if vertex in begins and vertex != join:
                reached.add((vertex, False))
                return []
            here = [source for number, source in enumerate(operators[vertex].inputs) if (vertex, number) not in moved]
            if len(here) < len(operators[vertex].inputs):
                reached.add((vertex, True))
            return here + list(feeding.get(vertex, ()))

        traverse([join], before, lambda vertex: None)
        dataset = next((group.dataset for group in self.join_groups if group.join == join), None)
        return tuple(
            edge.name
            for edge in self.streams
            if (edge.operator, edge.count_from == "auto_repartition") in reached
            or (edge.dataset is not None and edge.dataset == dataset)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, with the number of their format."""
        return document_of(self)

    @classmethod
    def from_json(cls, document: object) -> ExecutionPlan:
        """Return the plan that `to_json` gave.

        Raises MalformedDocumentError for what is none, and for a format of a later version.
        """
        return read_document(cls, document)

    def differences_from(self, older: ExecutionPlan) -> tuple[str, ...]:
        """Return in words, a line each, what is other than in an older plan; operators may have other numbers."""
        return differences(older.to_json(), self.to_json())

    def to_mermaid(self) -> str:
        """Return the plan as a flowchart of Mermaid."""
        return mermaid(self.operators, self.streams, self.exchanges, self.tables, self.calls)

    def render(self) -> str:
        """Return the plan as plain text for people."""
        return render(
            self.application,
            self.operators,
            self.streams,
            self.join_groups,
            self.fed,
            self.exchanges,
            self.tables,
            self.calls,
            self.state,
            self.fed_joins,
            self.by_time,
            self.tasks,
            self.notes,
        )
