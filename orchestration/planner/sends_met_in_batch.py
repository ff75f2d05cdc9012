"""What joins meet of the datasets that the application itself writes: what this batch sends, or those before it.

A local table is written while the batch runs: a join that is defined after a send meets its records in the same batch,
and one that is defined before it, which the send may be made of, meets them in the next. A dataset with a stream takes
its changes in between batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.planner.plans.plan_parts import FedJoin, PlannedState

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application

REPLAY = (
    "A startpoint that goes back sends its records to it again, on top of what it holds: what counts counts them "
    "again. A bounded replay (until) sends it nothing."
)


def fed_joins(app: Application) -> tuple[FedJoin, ...]:
    """Return, for each join with a dataset that the application writes, in which batch it meets what is sent there."""
    first: dict[str, str] = {}
    last: dict[str, str] = {}
    for operator in app.operators:
        if operator.spec.feeds is not None:
            first.setdefault(operator.spec.feeds, operator.id)
            last[operator.spec.feeds] = operator.id
    sent: dict[str, str] = {}
    joins = []
    for operator in app.operators:
        match, feeds = operator.spec.match, operator.spec.feeds
        if match is not None and match.dataset in last:
            met = sent.get(match.dataset) if app.dataset(match.dataset).is_local else None
            if met is None:
                joins.append(FedJoin(operator.id, match.dataset, "next batch", None))
            else:
                whole = met == last[match.dataset]
                joins.append(FedJoin(operator.id, match.dataset, "this batch" if whole else "both", met))
        if feeds is not None:
            sent[feeds] = operator.id
    return tuple(joins)


def planned_state(app: Application) -> tuple[PlannedState, ...]:
    """Return the local tables that the application writes, with where, and what a replay does to each."""
    sends: dict[str, list[str]] = {}
    for operator in app.operators:
        feeds = operator.spec.feeds
        if feeds is not None and app.dataset(feeds).is_owned_by(app.name):
            sends.setdefault(feeds, []).append(operator.id)
    return tuple(PlannedState(table, tuple(operators), REPLAY) for table, operators in sends.items())
