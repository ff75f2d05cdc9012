"""Finds, by two walks over the operators, which streams take part in which join (SAMZA-1889).

The first walk connects every sink to a dataset's table with the joins on that table. These
connections are not in the graph, because a sink ends its branch; the second walk, from each stream
to the joins that its records reach, follows them. Side inputs are not operators either: each join
adds its dataset, with the dataset's own count, since a dataset is bucketed anew whatever its input has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from orchestration.graph import Input, Join, SendToTable, traverse
from orchestration.planner.flow import requirement

if TYPE_CHECKING:
    from orchestration.application import Application
    from orchestration.graph import Operator

Groups = dict[str, tuple[str, ...]]


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
    """First walk: return, for each sink to a partitioned dataset, the joins on that dataset."""
    sinks: dict[str, list[str]] = {}
    joins: dict[str, list[str]] = {}

    def note(vertex: str) -> None:
        operator = app.operator(vertex)
        needed = requirement(app, operator)
        if needed is not None:
            kind = joins if isinstance(operator.spec, Join) else sinks
            kind.setdefault(needed.dataset, []).append(vertex)

    roots = [operator.id for operator in app.operators if isinstance(operator.spec, Input)]
    traverse(roots, lambda vertex: following[vertex], note)
    return {sink: joins.get(dataset, []) for dataset, found in sinks.items() for sink in found}


def join_groups(app: Application, inserted: Collection[str] = ()) -> Groups:
    """Second walk: return, for each join with a partitioned dataset, the streams whose counts must agree.

    `inserted` names the operators before which the planner has put an exchange; there an input ends
    and a stream of its own begins. Streams come in the order of definition, the dataset last.
    """
    operators = {operator.id: operator for operator in app.operators}
    following = consumers(operators.values())
    connected = table_connections(app, following)
    wanted = {
        operator.id: needed
        for operator in operators.values()
        if isinstance(operator.spec, Join) and (needed := requirement(app, operator))
    }
    reached: dict[str, list[str]] = {join: [] for join in wanted}

    starts: dict[str, list[str]] = {}
    roots: list[str] = []
    for operator in operators.values():
        if operator.id in inserted:
            # An exchange before a sink serves the sink only; what follows the sink goes on without it.
            sink = isinstance(operator.spec, SendToTable)
            starts[exchange_node(operator.id)] = connected.get(operator.id, []) if sink else [operator.id]
            roots.append(exchange_node(operator.id))
        if operator.begins_stream:
            roots.append(operator.id)

    def onward(vertex: str) -> list[str]:
        if vertex in starts:
            return starts[vertex]
        same = [after for after in following[vertex] if not operators[after].begins_stream]
        same = [after for after in same if after not in inserted or after in connected]
        return same if vertex in inserted else same + connected.get(vertex, [])

    for root in roots:

        def note(vertex: str, root: str = root) -> None:
            if vertex in reached:
                reached[vertex].append(root)

        traverse([root], onward, note)
    return {join: (*streams, dataset_node(wanted[join].dataset)) for join, streams in reached.items()}
