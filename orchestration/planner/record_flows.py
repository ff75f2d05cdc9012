"""Walks the operators once and says of each what its records look like and where they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.operator_spec import Operator
from dagster_adjunct.orchestration.operators.planning_values import Flow, PlanContext, Requirement

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.stream_facts import Catalog

Repartition = Callable[[Operator, Requirement, Flow], Flow]


@dataclass(frozen=True, slots=True)
class Flows:
    """For every operator the records that it works on (`arriving`, one for each input) and those `after` it."""

    arriving: dict[str, tuple[Flow, ...]]
    after: dict[str, Flow]

    def before(self, operator: str) -> Flow:
        """Return the records that an operator of one input works on."""
        (flow,) = self.arriving[operator]
        return flow


def follow(app: Application, catalog: Catalog, repartition: Repartition | None = None) -> Flows:
    """Return the flows of all operators; `repartition` may put an exchange before one.

    Raises PlanningError for a stream that is not there, and for columns that are known to be missing or double.
    """
    flows = Flows({}, {})
    for operator in app.operators:
        arriving = tuple(flows.after[source] for source in operator.inputs)
        needed = operator.spec.requirement(app)
        moved = arriving
        if repartition and needed:
            moved = tuple(repartition(operator, needed, flow) for flow in arriving)
        flows.arriving[operator.id] = moved
        onward = arriving if operator.spec.writes_aside else moved
        flows.after[operator.id] = operator.spec.flow(PlanContext(operator.id, app, catalog), onward)
    return flows
