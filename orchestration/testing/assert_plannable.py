"""Planning in a unit test: no lake, no server, no Spark."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.planner import plan
from dagster_adjunct.orchestration.testing.given_streams import Streams, catalog_of

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner.plans.execution_plan import ExecutionPlan


def assert_plannable(app: Application, streams: Streams) -> ExecutionPlan:
    """Return the plan of an application over these streams, which are named "system.stream".

    Inputs, and the inputs of datasets, have to be given; an output need not exist. It takes milliseconds, and neither
    Spark nor a lake. Raises PlanningError for what a run would refuse before it begins.
    """
    return plan(app, catalog_of(streams))
