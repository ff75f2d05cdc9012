"""Finds which streams have to have equally many partitions, and because of which operator (SAMZA-1889).

Each operator says what it asks of its inputs; a group is what meets there. A sink to a dataset's table makes one, too,
where some join reads the dataset (`sends_that_feed_joins.py`). A dataset is a member of each group that it is met in,
with a count of its own, since it is bucketed anew whatever its input has. So streams that take part in a join by way of
a table, or of another join, are held together by what they have in common, and no group repeats the members of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner.counts.sends_that_feed_joins import Needs
    from dagster_adjunct.orchestration.planner.known_records.record_flows import Flows

Groups = dict[str, tuple[str, ...]]
"""Ids of what has to have equal counts, streams first, by the operator that makes them meet."""


def dataset_node(name: str) -> str:
    """Return the id that stands for a dataset among the streams of a join."""
    return f"dataset:{name}"


def exchange_node(operator: str, number: int) -> str:
    """Return the id of the exchange that the planner inserts before an operator's input of this number."""
    return f"exchange:{number}:{operator}"


def join_groups(app: Application, needs: Needs, flows: Flows) -> Groups:
    """Return what has to have equal counts, by the operators that ask for it.

    Where such a group has an operator in it that brings streams together (`agreed`), these are a group as well.
    """
    groups: Groups = {}
    relied_on: set[str] = set()
    for operator in reversed(app.operators):  # so that what brings streams together comes after what relies on it
        arriving = flows.arriving[operator.id]
        members: dict[str, None] = {}
        if operator.id in relied_on and flows.together(operator):
            members = dict.fromkeys([operator.id, *(flow.stream for flow in arriving)])
        asked = list(zip(needs.get(operator.id, ()), arriving, strict=False))
        members |= dict.fromkeys(flow.stream for needed, flow in asked if needed)
        members |= dict.fromkeys(dataset_node(needed.dataset) for needed, _ in asked if needed and needed.dataset)
        if members:
            relied_on.update(members)
            groups[operator.id] = tuple(members)
    return dict(reversed(groups.items()))
