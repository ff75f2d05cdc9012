"""Plans of applications, as values: what was proven, read again from JSON, drawn."""

from __future__ import annotations

from dagster_adjunct.orchestration.planner.plan import ExecutionPlan

__all__ = [
    "ExecutionPlan",
]
