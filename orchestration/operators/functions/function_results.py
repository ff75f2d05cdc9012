"""Where the results of a function of the user's lie, of which only the columns are declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.arguments import called
from dagster_adjunct.orchestration.operators.columns.known_columns import require
from dagster_adjunct.orchestration.operators.spec.stream_facts import UNKNOWN

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow
    from dagster_adjunct.resources.schemas.schema import Schema


def flow_of_results(
    operator: str, flow: Flow, function: Callable[..., object], schema: Schema, *, keeps_partitioning: bool
) -> Flow:
    """Return the flow behind a function that makes records of `schema`: where they lie is known by promise only.

    Raises PlanningError where it is promised of columns that the results don't have.
    """
    made = replace(flow, columns=schema.names)
    if not flow.partitioned_by:
        return made
    if not keeps_partitioning:
        return replace(made, partitioned_by=(), partitioner=UNKNOWN, lost_at=operator)
    side = f"what {called(function)} returns with keeps_partitioning=True"
    next_step = f"The records are partitioned by {', '.join(flow.partitioned_by)}: return these, too."
    require(operator, side, flow.partitioned_by, made.columns, next_step)
    return made
