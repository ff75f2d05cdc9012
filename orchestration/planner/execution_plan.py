"""The plan: what the planner proved and decided, as plain immutable data."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from dagster_adjunct.orchestration.operators.planning_values import Exchange, StreamEdge
from dagster_adjunct.orchestration.planner.plan_parts import JoinGroup, PlannedOperator, PlannedTable, Task
from dagster_adjunct.orchestration.planner.plan_text import render
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
    tables: tuple[PlannedTable, ...] = ()

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

    def operator(self, operator_id: str) -> PlannedOperator:
        """Return what is planned for an operator."""
        for operator in self.operators:
            if operator.id == operator_id:
                return operator
        raise PlanningError(f"the plan of {self.application!r} has no operator {operator_id!r}.", "Check the id.")

    def task(self, name: str) -> Task:
        """Return the task of this name, as in "Partition 3"."""
        for task in self.tasks:
            if task.name == name:
                return task
        raise PlanningError(
            f"the plan of {self.application!r} has no task {name!r}; it has {len(self.tasks)}, from 'Partition 0' on.",
            "Check the name.",
        )

    def partitions_at(self, operator_id: str) -> int:
        """Return the partition count of the records that leave an operator."""
        return self.operator(operator_id).partitions

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain JSON values."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def render(self) -> str:
        """Return the plan as plain text for people."""
        return render(
            self.application,
            self.operators,
            self.streams,
            self.join_groups,
            self.exchanges,
            self.tables,
            self.tasks,
            self.notes,
        )


def _plain(value: Any) -> Any:
    if isinstance(value, SystemStreamPartition):
        return str(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
