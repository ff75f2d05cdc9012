"""Finds which streams have to have equally many partitions, and because of which operator (SAMZA-1889).

Each operator says what it asks of its inputs; a group is what meets there. A sink to a dataset's table makes one, too,
where some join reads the dataset: that connection is not in the graph, because a sink ends its branch. A dataset is a
member of each group that it is met in, with a count of its own, since it is bucketed anew whatever its input has. So
streams that take part in a join by way of a table, or of another join, are held together by what they have in common,
and no group repeats the members of others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.planning_values import Requirement
    from dagster_adjunct.orchestration.planner.record_flows import Flows

Needs = Mapping[str, tuple["Requirement | None", ...]]
"""What each operator that asks for anything asks of each of its inputs."""
Groups = dict[str, tuple[str, ...]]
"""Ids of what has to have equal counts, streams first, by the operator that makes them meet."""
V = TypeVar("V", bound=Hashable)


def traverse(roots: Iterable[V], next_vertices: Callable[[V], Iterable[V]], visit: Callable[[V], object]) -> None:
    """Visit every vertex that can be reached from `roots`, once each, parents first.

    It is depth first and in the order given by `next_vertices`, which may add connections that the
    graph itself lacks. Cycles end where they meet themselves; depth is not limited by Python's stack.
    """
    seen: set[V] = set()
    for root in roots:
        stack = [root]
        while stack:
            vertex = stack.pop()
            if vertex in seen:
                continue
            seen.add(vertex)
            visit(vertex)
            stack.extend(reversed(list(next_vertices(vertex))))


def dataset_node(name: str) -> str:
    """Return the id that stands for a dataset among the streams of a join."""
    return f"dataset:{name}"


def exchange_node(operator: str, number: int) -> str:
    """Return the id of the exchange that the planner inserts before an operator's input of this number."""
    return f"exchange:{number}:{operator}"


def needs_of(app: Application) -> Needs:
    """Return what operators ask; a sink to a dataset that nothing joins asks nothing, its own exchange suffices."""
    asked = {operator.id: operator.spec.requirements(app) for operator in app.operators}
    joined = {one.dataset for needs in asked.values() for one in needs if one is not None and not one.feeds}
    needs = {
        operator: tuple(None if one and one.feeds and one.dataset not in joined else one for one in each)
        for operator, each in asked.items()
    }
    return {operator: each for operator, each in needs.items() if any(each)}


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
