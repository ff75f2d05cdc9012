"""The execution planner: from a described application to a proven plan, without Spark and without I/O."""

from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange, StreamEdge
from dagster_adjunct.orchestration.operators.spec.stream_facts import (
    SPARK,
    UNKNOWN,
    Catalog,
    Partitioner,
    StreamFacts,
)
from dagster_adjunct.orchestration.planner.planner import plan
from dagster_adjunct.orchestration.planner.plans.execution_plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.plans.plan_parts import JoinGroup, PlannedOperator, Task

__all__ = [
    "SPARK",
    "UNKNOWN",
    "Catalog",
    "Exchange",
    "ExecutionPlan",
    "JoinGroup",
    "Partitioner",
    "PlannedOperator",
    "StreamEdge",
    "StreamFacts",
    "Task",
    "plan",
]
