"""The execution planner: from a described application to a proven plan, without Spark and without I/O."""

from orchestration.planner.catalog import SPARK, UNKNOWN, Catalog, Partitioner, PlannerConfig, StreamFacts
from orchestration.planner.execution_plan import (
    Exchange,
    ExecutionPlan,
    JoinGroup,
    PlannedOperator,
    StreamEdge,
    Task,
)
from orchestration.planner.planner import plan

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
