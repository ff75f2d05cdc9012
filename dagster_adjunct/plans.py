"""Plans of applications, as values: what the planner has found, to be read, stored as JSON, or
drawn.
"""

from dagster_adjunct.orchestration.planner.plan import ExecutionPlan as ExecutionPlan
