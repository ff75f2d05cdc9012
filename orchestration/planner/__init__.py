"""The execution planner: from a described application to a proven plan, without Spark and without I/O."""

from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange
from dagster_adjunct.orchestration.operators.spec.stream_facts import (
    SPARK,
    StreamFacts,
)
from dagster_adjunct.orchestration.planner.planner import plan
from dagster_adjunct.orchestration.planner.plans.execution_plan import ExecutionPlan
from dagster_adjunct.orchestration.planner.plans.plan_parts import PlannedOperator, Task

__all__ = [
    "SPARK",
    "Exchange",
    "ExecutionPlan",
    "PlannedOperator",
    "StreamFacts",
    "Task",
    "plan",
]
