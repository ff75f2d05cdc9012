"""Plans of applications, as values: what was proven, read again from JSON, drawn."""

from dagster_adjunct.orchestration.planner.plan import ExecutionPlan as ExecutionPlan
