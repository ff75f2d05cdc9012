"""Finds, by two walks over the operators, which streams take part in which join (SAMZA-1889).

The first walk connects every sink to a dataset's table with the joins on that table. These
connections are not in the graph, because a sink ends its branch; the second walk, from each stream
to the joins that its records reach, follows them. Side inputs are not operators either: each join
adds its dataset, with the dataset's own count, since a dataset is bucketed anew whatever its input has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.operator_spec import Operator

Groups = dict[str, tuple[str, ...]]
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


def exchange_node(operator: str) -> str:
    """Return the id of the exchange that the planner inserts before an operator."""
    return f"exchange:{operator}"


def consumers(operators: Iterable[Operator]) -> dict[str, list[str]]:
    """Return the ids of the operators that take each operator's records, in the order of definition."""
    following: dict[str, list[str]] = {}
    for operator in operators:
        following.setdefault(operator.id, [])
        for source in operator.inputs:
            following[source].append(operator.id)
    return following


def table_connections(app: Application, following: dict[str, list[str]]) -> dict[str, list[str]]:
    """First walk: return the virtual connections, from sinks to partitioned datasets and on to their joins."""
    connected: dict[str, list[str]] = {}

    def note(vertex: str) -> None:
        needed = app.operator(vertex).spec.requirement(app)
        if needed is None:
            return
        # By way of the table, or sinks times joins would have to be followed one by one.
        table = dataset_node(needed.dataset)
        if needed.joins:
            connected.setdefault(table, []).append(vertex)
        else:
            connected[vertex] = [table]

    roots = [operator.id for operator in app.operators if not operator.inputs]
    traverse(roots, lambda vertex: following[vertex], note)
    return connected


def join_groups(app: Application, inserted: Collection[str] = ()) -> Groups:
    """Second walk: return, for each join with a partitioned dataset, the streams whose counts must agree.

    `inserted` names the operators before which the planner has put an exchange; there an input ends
    and a stream of its own begins. Streams come in the order of definition, the dataset last.
    """
    operators = {operator.id: operator for operator in app.operators}
    following = consumers(operators.values())
    onward = _connections(operators, following, table_connections(app, following), inserted)
    wanted = {
        operator.id: needed
        for operator in operators.values()
        if (needed := operator.spec.requirement(app)) and needed.joins
    }
    reached: dict[str, list[str]] = {join: [] for join in wanted}
    for operator in operators.values():
        roots = [exchange_node(operator.id)] if operator.id in inserted else []
        # What every task reads whole asks nobody for a count.
        roots += [operator.id] if operator.begins_stream and operator.spec.role != "broadcast-input" else []
        for root in roots:

            def note(vertex: str, root: str = root) -> None:
                if vertex in reached:
                    reached[vertex].append(root)

            traverse([root], lambda vertex: onward.get(vertex, ()), note)
    return {join: (*streams, dataset_node(wanted[join].dataset)) for join, streams in reached.items()}


def _connections(
    operators: dict[str, Operator],
    following: dict[str, list[str]],
    connected: dict[str, list[str]],
    inserted: Collection[str],
) -> dict[str, list[str]]:
    """Return where records go from each vertex without entering another stream, virtual connections among it."""
    onward = dict(connected)
    for vertex, after in following.items():
        same = [name for name in after if not operators[name].begins_stream]
        same = [name for name in same if name not in inserted or name in connected]
        if vertex not in inserted:
            onward[vertex] = same + connected.get(vertex, [])
        elif vertex in connected:
            # An exchange before a sink serves the sink only; what follows the sink goes on without it.
            onward[vertex], onward[exchange_node(vertex)] = same, connected[vertex]
        else:
            onward[vertex], onward[exchange_node(vertex)] = same, [vertex]
    return onward
