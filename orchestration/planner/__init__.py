"""The execution planner: from a described application to a proven plan, without Spark and without I/O."""

from dagster_adjunct.orchestration.planner.catalog import (
    SPARK,
    UNKNOWN,
    Catalog,
    Partitioner,
    PlannerConfig,
    StreamFacts,
)
from dagster_adjunct.orchestration.planner.execution_plan import (
    Exchange,
    ExecutionPlan,
    JoinGroup,
    PlannedOperator,
    StreamEdge,
    Task,
)
from dagster_adjunct.orchestration.planner.planner import plan

__all__ = [
    "SPARK",
    "UNKNOWN",
    "Catalog",
    "Exchange",
    "ExecutionPlan",
    "JoinGroup",
    "Partitioner",
    "PlannedOperator",
    "PlannerConfig",
    "StreamEdge",
    "StreamFacts",
    "Task",
    "plan",
]
