"""Walks the operators once and says of each what its records look like and where they lie."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, PlanContext
from dagster_adjunct.orchestration.planner.refused_operators.refusals import Refusals
from dagster_adjunct.orchestration.planner.refused_operators.windows_in_sql import check_windows
from dagster_adjunct.resources.sql.checking import check_of_one_record

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog

Arriving = tuple[Flow, ...]
"""The records of each input of an operator."""
Repartition = Callable[[Operator, Arriving], Arriving]


@dataclass(frozen=True, slots=True)
class Flows:
    """For every operator the records that it works on (`arriving`, one for each input) and those `after` it."""

    arriving: dict[str, Arriving]
    after: dict[str, Flow]

    def before(self, operator: str) -> Flow:
        """Return the records that an operator of one input works on."""
        (flow,) = self.arriving[operator]
        return flow

    def together(self, operator: Operator) -> bool:
        """Whether the operator brings streams together that have partitions of their own."""
        return operator.spec.role is None and self.after[operator.id].stream == operator.id


def follow(
    app: Application,
    catalog: Catalog,
    repartition: Repartition | None = None,
    counts: Mapping[str, int] | None = None,
    *,
    earlier: Flows | None = None,
) -> Flows:
    """Return the flows of all operators; `repartition` may put exchanges before one, `counts` are those decided.

    `earlier` are the flows of the same application and counts: where the same arrives as there, nothing is worked out
    again.
    Raises PlanningError for a stream that is not there, and for columns that are known to be missing or double.
    """
    flows, refusals = Flows({}, {}), Refusals()
    for operator in app.operators:
        if refusals.stop(operator):
            continue
        with refusals.of(operator):
            arriving = tuple(flows.after[source] for source in operator.inputs)
            moved = arriving if repartition is None else repartition(operator, arriving)
            flows.arriving[operator.id] = moved
            if earlier is not None and moved == arriving and moved == earlier.arriving[operator.id]:
                flows.after[operator.id] = earlier.after[operator.id]
                continue
            for text in operator.spec.sql:
                check_of_one_record(operator.id, text)
            onward = arriving if operator.spec.writes_aside else moved
            flows.after[operator.id] = operator.spec.flow(PlanContext(operator.id, app, catalog, counts), onward)
            check_windows(operator, onward)
    refusals.tell()
    return flows
