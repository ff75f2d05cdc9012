"""Partition counts: what is declared, what follows from joins, and what is left to a default.

The rules are SAMZA-1889's. In every join group all counts must be equal. A stream whose count is open
and that is joined with one whose count is known gets that count; this may decide another group, so
it goes on until nothing changes. What is still open then gets the default.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.operator import BROADCAST, PlanContext, StreamEdge
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, Catalog, require_facts
from dagster_adjunct.orchestration.planner.plan import Task
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.streams.system import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.operator import Requirement
    from dagster_adjunct.orchestration.planner.columns import Flows
    from dagster_adjunct.orchestration.planner.conflicts import Insertions


class EqualCounts:
    """Sets of streams with one count each, which may be open still (None)."""

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        self._parent = {node: node for node in counts}
        self._count = dict(counts)
        self._inputs: dict[str, Sequence[str]] = {}

    def add(self, node: str, count: int | None) -> None:
        """Take in another stream."""
        self._parent[node], self._count[node] = node, count

    def note(self, operator: str, streams: Sequence[str]) -> None:
        """Take in that an operator has these streams at its inputs, for one that brings them together."""
        self._inputs[operator] = streams

    def most(self, nodes: Iterable[str]) -> int | None:
        """Return the count that most of these have, the earliest on a tie; None where all are open."""
        known = Counter(count for node in nodes for count in self._counts(node))
        return known.most_common(1)[0][0] if known else None

    def differs(self, node: str, target: int | None) -> str:
        """Return in words what other count a stream has, "" where it has or can get this one."""
        other = sorted(self._counts(node) - {target})
        if target is None or not other:
            return ""
        return f"it has {' and '.join(map(str, other))} partitions"

    def join(self, nodes: Sequence[str], count: int | None) -> None:
        """Hold streams together: whatever one of them gets, the others have."""
        roots = list(dict.fromkeys(self._root(leaf) for node in nodes for leaf in self._leaves(node)))
        for root in roots:
            self._parent[root] = roots[0]
        if roots and count is not None:
            self._count[roots[0]] = count
        for node in nodes:
            if node not in self._parent:  # what brings streams together has their count from here on
                self._parent[node] = roots[0]

    def _counts(self, node: str) -> set[int]:
        known = {self._count[self._root(leaf)] for leaf in self._leaves(node)}
        return {count for count in known if count is not None}

    def _leaves(self, node: str) -> list[str]:
        """Return the streams that are together in `node`, itself where that is one."""
        leaves: dict[str, None] = {}
        waiting, seen = [node], set()
        while waiting:
            node = waiting.pop()
            if node in self._parent:
                leaves[node] = None
            elif node not in seen:
                seen.add(node)
                waiting.extend(self._inputs[node])
        return list(leaves)

    def _root(self, node: str) -> str:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node


# Finds which streams have to have equally many partitions, and because of which operator (SAMZA-1889).
#
# Each operator says what it asks of its inputs; a group is what meets there. A sink to a dataset's table makes one,
# too,
# where some join reads the dataset (`sends_that_feed_joins.py`). A dataset is a member of each group that it is met in,
# with a count of its own, since it is bucketed anew whatever its input has. So streams that take part in a join by way
# of
# a table, or of another join, are held together by what they have in common, and no group repeats the members of
# others.


Groups = dict[str, tuple[str, ...]]
"""Ids of what has to have equal counts, streams first, by the operator that makes them meet."""


def dataset_node(name: str) -> str:
    """Return the id that stands for a dataset among the streams of a join."""
    return f"dataset:{name}"


def exchange_node(operator: str, number: int) -> str:
    """Return the id of the exchange that the planner inserts before an operator's input of this number."""
    return f"exchange:{number}:{operator}"


def find_join_groups(app: Application, needs: Requirements, flows: Flows) -> Groups:
    """Return what has to have equal counts, by the operators that ask for it.

    Where such a group has an operator in it that brings streams together (`agreed`), these are a group as well.
    """
    groups: Groups = {}
    relied_on: set[str] = set()
    for operator in reversed(app.operators):  # so that what brings streams together comes after what relies on it
        arriving = flows.arriving[operator.id]
        members: dict[str, None] = {}
        if operator.id in relied_on and flows.merges_streams(operator):
            members = dict.fromkeys([operator.id, *(flow.stream for flow in arriving)])
        asked = list(zip(needs.get(operator.id, ()), arriving, strict=False))
        members |= dict.fromkeys(flow.stream for needed, flow in asked if needed)
        members |= dict.fromkeys(dataset_node(needed.dataset) for needed, _ in asked if needed and needed.dataset)
        if members:
            relied_on.update(members)
            groups[operator.id] = tuple(members)
    return dict(reversed(groups.items()))


# Which task owns which partitions: the unit that requests for startpoints and broadcast inputs are for.
#
# By default there is a task for each partition number. An application with `tasks=n` has at most n: partition i is of
# task i modulo n, and bucket i of every dataset with it, so that what is joined is of one task in either case.


def task_count(partitions: int, limit: int | None) -> int:
    """Return how many tasks own so many partitions; `limit` None gives each its own."""
    return partitions if limit is None else min(partitions, limit)


def assign_tasks(streams: tuple[StreamEdge, ...], limit: int | None) -> tuple[Task, ...]:
    """Return the tasks, at most `limit` of them; each owns its partitions of all inputs and partitioned datasets.

    Partitions are numbered up to the largest count of those and of the intermediate streams. All tasks read all
    partitions of broadcast inputs.
    """
    inputs = [edge for edge in streams if edge.role == "input"]
    shared = [edge for edge in streams if edge.role == "broadcast-input"]
    everywhere = tuple(_partition(edge, number) for edge in shared for number in range(edge.partitions or 0))
    datasets = [edge for edge in streams if edge.dataset is not None and edge.partitions is not None]
    whole = [edge for edge in streams if edge.dataset is not None and edge.partitions is None]
    broadcast = (*(edge.name for edge in shared), *(str(edge.dataset) for edge in whole))
    total = max((edge.partitions or 0 for edge in streams if edge.role not in ("output", *BROADCAST)), default=0)
    count = task_count(total, limit)
    called = "Partition" if count == total else "Task"
    return tuple(
        Task(
            f"{called} {task}",
            (
                *(_partition(edge, at) for edge in inputs for at in range(task, edge.partitions or 0, count)),
                *everywhere,
            ),
            tuple(f"{edge.dataset}.{at}" for edge in datasets for at in range(task, edge.partitions or 0, count)),
            broadcast,
        )
        for task in range(count)
    )


def _partition(edge: StreamEdge, number: int) -> SystemStreamPartition:
    return SystemStreamPartition(*split_stream_name(edge.name), number)


MAX_DEFAULT_PARTITIONS = 256
"""What nothing decides gets no more partitions than this, however many its inputs have."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Where an inferred count comes from: another member of a join group."""

    source: str
    join: str


@dataclass(frozen=True, slots=True)
class Counts:
    """The count of every stream; `inferred` says of some where it comes from, `conflicts` are the
    groups whose members differ."""

    partitions: dict[str, int]
    inferred: dict[str, Inference]
    conflicts: tuple[str, ...]


def declared_counts(app: Application, catalog: Catalog) -> dict[str, int | None]:
    """Return the count of every stream of an application and of its datasets, None where it is open."""
    counts: dict[str, int | None] = {}
    for operator in app.operators:
        if operator.begins_stream:
            context = PlanContext(operator.id, app, catalog)
            counts[operator.id] = operator.spec.declared_partitions(context)
    for dataset in app.datasets:
        if dataset.partitions is not None:
            counts[dataset_node(dataset.name)] = dataset.partitions
    return counts


def default_count(app: Application, catalog: Catalog) -> tuple[int, str]:
    """Return the count of streams that nothing else decides, and where it comes from."""
    if app.intermediate_partitions is not None:
        return app.intermediate_partitions, "intermediate_partitions of the application"
    divided = [name for name, spec in app.inputs.items() if spec.broadcast is None]
    inputs = {name: require_facts(catalog, name, "the application").partitions for name in divided}
    known = inputs | {name: output.partitions for name, output in app.outputs.items()}
    if not known:
        return 1, "no input or output has a count"
    largest = max(known, key=lambda name: known[name])
    if known[largest] > MAX_DEFAULT_PARTITIONS:
        return MAX_DEFAULT_PARTITIONS, f"most of inputs and outputs, {largest}, capped at {MAX_DEFAULT_PARTITIONS}"
    return known[largest], f"most of inputs and outputs, {largest}"


def assign_counts(counts: Mapping[str, int | None], groups: Mapping[str, Sequence[str]], default: int) -> Counts:
    """Return the count of every stream.

    Members of groups that `counts` does not hold are open. Groups are looked at in their order, so the answer
    does not depend on chance.
    """
    counts = dict.fromkeys(member for members in groups.values() for member in members) | dict(counts)
    known = {stream: count for stream, count in counts.items() if count is not None}
    inferred: dict[str, Inference] = {}
    containing: dict[str, list[str]] = {}
    for join, members in groups.items():
        for member in members:
            containing.setdefault(member, []).append(join)
    decided: set[str] = set()  # groups whose members all have a count
    waiting = deque(groups)
    while waiting:
        join = waiting.popleft()
        if join in decided:
            continue
        source = next((member for member in groups[join] if member in known), None)
        if source is None:
            continue
        decided.add(join)
        for member in groups[join]:
            if member not in known:
                known[member] = known[source]
                inferred[member] = Inference(source, join)
                waiting.extend(other for other in containing[member] if other not in decided)
    for stream in counts:
        known.setdefault(stream, default)
    differing = (join for join, members in groups.items() if len({known[member] for member in members}) > 1)
    return Counts(known, inferred, tuple(differing))


def add_broadcast_counts(app: Application, counts: Counts) -> Counts:
    """Return the counts with those of what is broadcast: one copy for each task; these are made of the most
    partitions of an input, a dataset or an intermediate stream (`task_groups.py`)."""
    roles = {operator.id: operator.spec.role for operator in app.operators}
    broadcast = [node for node, role in roles.items() if role in BROADCAST]
    if not broadcast:
        return counts
    if all(source.broadcast is not None for source in app.inputs.values()):
        raise PlanningError(
            f"all inputs of application {app.name!r} are broadcast ({', '.join(app.inputs)}): nothing says how many "
            "tasks there are.",
            "Read one without broadcast=: its partitions are shared out among the tasks.",
            application=app.name,
        )
    others = [node for node in counts.partitions if roles.get(node) != "output"]
    tasks = task_count(max(counts.partitions[node] for node in others if node not in broadcast), app.tasks)
    return replace(counts, partitions={**counts.partitions, **dict.fromkeys(broadcast, tasks)})


def add_merged_counts(app: Application, flows: Flows, counts: Counts) -> Counts:
    """Return the counts with those of operators that bring streams together and whose count no join needs to know: the
    most of their inputs."""
    partitions = dict(counts.partitions)
    for operator in app.operators:
        if flows.merges_streams(operator) and operator.id not in partitions:
            partitions[operator.id] = max(partitions[flow.stream] for flow in flows.arriving[operator.id])
    return replace(counts, partitions=partitions)


# The connections between sends to a dataset's table and the joins that read it, which no graph of operators has.
#
# A send ends its branch, and a join names its dataset. What both ask of their streams is looked at together: a send to
# a
# dataset that nothing joins asks nothing.


Requirements = Mapping[str, tuple["Requirement | None", ...]]
"""What each operator that asks for anything asks of each of its inputs."""


def collect_requirements(app: Application) -> Requirements:
    """Return what operators ask; a sink to a dataset that nothing joins asks nothing, its own exchange suffices."""
    asked = {operator.id: operator.spec.requirements(app) for operator in app.operators}
    joined = {need.dataset for needs in asked.values() for need in needs if need is not None and not need.feeds}
    kept = {
        operator: tuple(None if need and need.feeds and need.dataset not in joined else need for need in needs)
        for operator, needs in asked.items()
    }
    return {operator: needs for operator, needs in kept.items() if any(needs)}


def build_stream_edges(
    app: Application,
    catalog: Catalog,
    flows: Flows,
    counts: Counts,
    inserted: Insertions,
    default_from: str,
) -> dict[str, StreamEdge]:
    """Return the edges by the ids that counts and groups use: streams as defined, then side inputs."""
    edges: dict[str, StreamEdge] = {}
    for operator in app.operators:
        for number in range(len(operator.inputs)):
            item = inserted.get((operator.id, number))
            if item is not None:
                name = f"{app.name}-before-{operator.id}" + (f"-{number + 1}" if len(operator.inputs) > 1 else "")
                edges[item.node] = StreamEdge(
                    name, "intermediate", counts.partitions[item.node], item.columns, SPARK, "auto_repartition",
                    operator.id,
                )  # fmt: skip
        flow = flows.after[operator.id]
        context = PlanContext(operator.id, app, catalog)
        edge = operator.spec.edge(context, flow, counts.partitions[flow.stream])
        if edge is not None:
            edges[operator.id] = edge
    for dataset in app.datasets:
        if dataset.stream is not None:
            require_facts(catalog, dataset.stream, f"dataset {dataset.name!r}")
        edges[dataset_node(dataset.name)] = StreamEdge(
            dataset.name if dataset.is_local else str(dataset.input),
            "local-table" if dataset.is_local else "side-input", dataset.partitions, dataset.partition_by, SPARK,
            f"dataset {dataset.name}", None, dataset.name,
        )  # fmt: skip
    return {node: _resolve_count_source(node, edge, edges, counts, default_from) for node, edge in edges.items()}


def _resolve_count_source(
    node: str, edge: StreamEdge, edges: Mapping[str, StreamEdge], counts: Counts, default_from: str
) -> StreamEdge:
    if edge.count_from:
        return edge
    reason = default_from
    inference = counts.inferred.get(node)
    if inference is not None:
        at = inference.source
        while at not in edges:  # where streams are brought together, the count comes from one of them
            at = counts.inferred[at].source
        source = edges[at]
        named = f"dataset {source.dataset}" if source.dataset else source.name
        reason = f"inferred from {named} in {inference.join}"
    return replace(edge, count_from=reason)
