"""Partition counts of streams: declared, inferred from joins (SAMZA-1889), or the default; and the tasks.

All members of a join group must have equal counts. A stream with an open count gets the known count of its group, which
may decide other groups, until nothing changes. Streams that are still open get the default.

An operator's group is the set of its inputs with requirements. A dataset is a member with a count of its own of each
group that joins it, and a send to it forms a group if some join reads it. So streams that are related through a table
or another join get equal counts through the member that they share.

Task i owns partition i of all inputs and bucket i of all datasets; with a limit of n tasks, task i owns those whose
number modulo n is i.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import BROADCAST, Flow, PlanContext, Requirement, StreamEdge
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, Catalog, require_facts
from dagster_adjunct.orchestration.planner.columns import Flows
from dagster_adjunct.orchestration.planner.plan import Task
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.streams.system import SystemStreamPartition


class EqualCounts:
    """Disjoint sets of streams with one count each, None while it is open."""

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        self._parent = {node: node for node in counts}
        self._count = dict(counts)
        self._merged: dict[str, list[str]] = {}

    def add(self, node: str, count: int | None) -> None:
        """Add a stream."""
        self._parent[node], self._count[node] = node, count

    def note(self, operator: str, streams: Sequence[str]) -> None:
        """Record the input streams of an operator that may merge them."""
        self._merged[operator] = list(dict.fromkeys(leaf for stream in streams for leaf in self._leaves(stream)))

    def most(self, nodes: Iterable[str]) -> int | None:
        """Return the most frequent count, the earliest on a tie; None where all are open."""
        known = Counter(count for node in nodes for count in self._counts(node))
        return known.most_common(1)[0][0] if known else None

    def differs(self, node: str, target: int | None) -> str:
        """Return the text for a stream whose count differs from the target, "" if it has or can get it."""
        other = sorted(self._counts(node) - {target})
        if target is None or not other:
            return ""
        return f"it has {' and '.join(map(str, other))} partitions"

    def join(self, nodes: Sequence[str], count: int | None) -> None:
        """Join streams into one set, with this count unless None."""
        roots = list(dict.fromkeys(self._root(leaf) for node in nodes for leaf in self._leaves(node)))
        for root in roots:
            self._parent[root] = roots[0]
        if roots and count is not None:
            self._count[roots[0]] = count
        for node in nodes:
            if node not in self._parent:  # an operator that merges streams has their count from here on
                self._parent[node] = roots[0]

    def _counts(self, node: str) -> set[int]:
        known = {self._count[self._root(leaf)] for leaf in self._leaves(node)}
        return {count for count in known if count is not None}

    def _leaves(self, node: str) -> list[str]:
        """Return the streams that `node` merges, or itself if it is a stream."""
        return [node] if node in self._parent else self._merged[node]

    def _root(self, node: str) -> str:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node


@dataclass(frozen=True, slots=True)
class InsertedExchange:
    """An exchange by `columns` that the planner inserts before an operator's input (from 0), and why.

    `stream` is the node id of the flow before it; `partitions` is None while the count is open.
    """

    operator: str
    input: int
    stream: str
    columns: tuple[str, ...]
    partitions: int | None
    why: str

    @property
    def node(self) -> str:
        """The id of the exchange among streams."""
        return f"exchange:{self.input}:{self.operator}"

    def moved(self, flow: Flow) -> Flow:
        """Return the flow after the exchange."""
        return replace(flow, stream=self.node, partitioned_by=self.columns, partitioner=SPARK, lost_at="")


Insertions = Mapping[tuple[str, int], InsertedExchange]
"""The exchanges by operator and input."""


Groups = dict[str, tuple[str, ...]]
"""The ids that need equal counts, streams first, by the operator that requires it."""


def dataset_node(name: str) -> str:
    """Return the id of a dataset among the streams of a join."""
    return f"dataset:{name}"


def find_join_groups(app: Application, needs: Requirements, flows: Flows) -> Groups:
    """Return the groups that need equal counts, by operator.

    If a member is an operator that merges streams (`merge_flows`), its inputs are a group, too.
    """
    groups: Groups = {}
    relied_on: set[str] = set()
    for operator in reversed(app.operators):  # visits operators that merge streams after those that rely on them
        arriving = flows.arriving[operator.id]
        members: dict[str, None] = {}
        if operator.id in relied_on and flows.merges_streams(operator):
            members = dict.fromkeys([operator.id, *(flow.stream for flow in arriving)])
        required = list(zip(needs.get(operator.id, ()), arriving, strict=False))
        members |= dict.fromkeys(flow.stream for needed, flow in required if needed)
        members |= dict.fromkeys(dataset_node(needed.dataset) for needed, _ in required if needed and needed.dataset)
        if members:
            relied_on.update(members)
            groups[operator.id] = tuple(members)
    return dict(reversed(groups.items()))


def task_count(partitions: int, limit: int | None) -> int:
    """Return the number of tasks; with `limit` None there is one per partition."""
    return partitions if limit is None else min(partitions, limit)


def assign_tasks(streams: tuple[StreamEdge, ...], limit: int | None) -> tuple[Task, ...]:
    """Return at most `limit` tasks, each with its partitions of all inputs and buckets of partitioned datasets.

    The number of partitions is the largest count of inputs, datasets and intermediate streams. Every task reads all
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
"""The largest default count, however many partitions the inputs have."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Where an inferred count comes from: another member of a join group."""

    source: str
    join: str


@dataclass(frozen=True, slots=True)
class Counts:
    """The count of every stream; `inferred` has the origin of inferred ones, `conflicts` the groups that differ."""

    partitions: dict[str, int]
    inferred: dict[str, Inference]
    conflicts: tuple[str, ...]


def declared_counts(app: Application, catalog: Catalog) -> dict[str, int | None]:
    """Return the declared count of every stream and dataset of an application, None where it is open."""
    counts: dict[str, int | None] = {}
    for operator in app.operators:
        if operator.spec.role is not None:
            context = PlanContext(operator.id, app, catalog)
            counts[operator.id], _ = operator.spec.declared_count(context)
    for dataset in app.datasets:
        if dataset.partitions is not None:
            counts[dataset_node(dataset.name)] = dataset.partitions
    return counts


def default_count(app: Application, catalog: Catalog) -> tuple[int, str]:
    """Return the count of streams that is neither declared nor inferred, and its origin."""
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
    """Return the count of every stream: from `counts`, inferred from groups, or the default.

    Members of groups that are not in `counts` are open. Groups are processed in order, so the result is deterministic.
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
    """Return the counts with those of broadcast streams, which have one copy per task (`assign_tasks`)."""
    roles = {operator.id: operator.spec.role for operator in app.operators}
    broadcast = [node for node, role in roles.items() if role in BROADCAST]
    if not broadcast:
        return counts
    if all(source.broadcast is not None for source in app.inputs.values()):
        raise PlanningError(
            f"all inputs of application {app.name!r} are broadcast ({', '.join(app.inputs)}), so the number of "
            "tasks is unknown.",
            "Read one input without broadcast=: its partitions are divided among the tasks.",
            application=app.name,
        )
    others = [node for node in counts.partitions if roles.get(node) != "output"]
    tasks = task_count(max(counts.partitions[node] for node in others if node not in broadcast), app.tasks)
    return replace(counts, partitions={**counts.partitions, **dict.fromkeys(broadcast, tasks)})


def add_merged_counts(app: Application, flows: Flows, counts: Counts) -> Counts:
    """Return the counts with those of merging operators that no join relies on: the largest count of their inputs."""
    partitions = dict(counts.partitions)
    for operator in app.operators:
        if flows.merges_streams(operator) and operator.id not in partitions:
            partitions[operator.id] = max(partitions[flow.stream] for flow in flows.arriving[operator.id])
    return replace(counts, partitions=partitions)


Requirements = Mapping[str, tuple[Requirement | None, ...]]
"""The requirements of each operator that has any, one per input."""


def collect_requirements(app: Application) -> Requirements:
    """Return the requirements of operators; a send to a dataset that nothing joins has none."""
    required = {operator.id: operator.spec.requirements(app) for operator in app.operators}
    joined = {need.dataset for needs in required.values() for need in needs if need is not None and not need.feeds}
    kept = {
        operator: tuple(None if need and need.feeds and need.dataset not in joined else need for need in needs)
        for operator, needs in required.items()
    }
    return {operator: needs for operator, needs in kept.items() if any(needs)}


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan before it is proven: what operators need, inserted exchanges, flows, groups, counts and stream edges."""

    app: Application
    catalog: Catalog
    needs: Requirements
    inserted: Insertions
    flows: Flows
    groups: Groups
    counts: Counts
    edges: Mapping[str, StreamEdge] = field(default_factory=dict)


def build_stream_edges(draft: Draft, default_from: str) -> dict[str, StreamEdge]:
    """Return the stream edges by node id: streams in order of definition, then side inputs."""
    app, catalog, counts = draft.app, draft.catalog, draft.counts
    edges: dict[str, StreamEdge] = {}
    for operator in app.operators:
        for number in range(len(operator.inputs)):
            item = draft.inserted.get((operator.id, number))
            if item is not None:
                name = f"{app.name}-before-{operator.id}" + (f"-{number + 1}" if len(operator.inputs) > 1 else "")
                edges[item.node] = StreamEdge(
                    name, "intermediate", counts.partitions[item.node], item.columns, SPARK, "auto_repartition",
                    operator.id,
                )  # fmt: skip
        spec, flow = operator.spec, draft.flows.after[operator.id]
        if spec.role is not None:
            count, by, partitioner = counts.partitions[flow.stream], flow.partitioned_by, flow.partitioner
            _, origin = spec.declared_count(PlanContext(operator.id, app, catalog))
            if spec.role == "broadcast-input" and spec.reads:  # the flow describes the copies that tasks get of it
                facts = require_facts(catalog, spec.reads, operator.id)
                count, by, partitioner = facts.partitions, facts.key, facts.partitioner
            name = spec.reads or spec.writes or f"{app.name}-{operator.id}"
            edges[operator.id] = StreamEdge(name, spec.role, count, by, partitioner, origin, operator.id)
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
        while at not in edges:  # the count of merged streams comes from one of them
            at = counts.inferred[at].source
        source = edges[at]
        named = f"dataset {source.dataset}" if source.dataset else source.name
        reason = f"inferred from {named} in {inference.join}"
    return replace(edge, count_from=reason)
