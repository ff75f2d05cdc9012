"""Partition counts of streams: declared, inferred from joins (SAMZA-1889), or the default; and the
tasks.

The streams that an operator requires to be co-partitioned are its group: its inputs with
requirements and, as members with a count of their own, the datasets that it joins or, if some join
reads them, sends to. So streams that are related through a dataset or another join share a member,
and get equal counts.

All members of a group must have equal counts. A stream is *open* if it declares no count: it gets
the known count of its group, which may decide other groups, until nothing changes. Streams that are
open then get the default.

Task i owns partition i of all inputs and bucket i of all datasets; with a limit of n tasks, task i
owns those whose number modulo n is i.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import (
    BROADCAST,
    Flow,
    PlanContext,
    PlannedStream,
    Requirement,
)
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, Catalog, require_facts
from dagster_adjunct.orchestration.planner.columns import Flows
from dagster_adjunct.orchestration.planner.plan import Task
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.system import SystemStreamPartition


class EqualCounts:
    """Disjoint sets of streams, named by node ids, with one partition count for each set, None
    while it is open.

    The streams that an operator merges may be in different sets until something relies on their
    counts.
    """

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        self._parent = {node: node for node in counts}
        self._count = dict(counts)
        self._merged: dict[str, list[str]] = {}

    def add(self, node: str, count: int | None) -> None:
        """Add a stream as a set of its own."""
        self._parent[node], self._count[node] = node, count

    def record_inputs(self, operator: str, streams: Sequence[str]) -> None:
        """Record the input streams of an operator: if it merges them, its id stands for all of
        them.
        """
        self._merged[operator] = list(
            dict.fromkeys(leaf for stream in streams for leaf in self._leaves(stream))
        )

    def most_frequent(self, nodes: Iterable[str]) -> int | None:
        """Return the most frequent count of these streams, the first one on a tie; None if all
        are open.
        """
        known = Counter(count for node in nodes for count in self._counts(node))
        return known.most_common(1)[0][0] if known else None

    def describe_difference(self, node: str, target: int | None) -> str:
        """Return how many partitions a stream has, in words; "" if that is the target, or open."""
        other = sorted(self._counts(node) - {target})
        if target is None or not other:
            return ""
        return f"it has {' and '.join(map(str, other))} partitions"

    def join(self, nodes: Sequence[str], count: int | None) -> None:
        """Unite the sets of these streams; the new set has the count `count` or, with None, that
        of the first set.
        """
        roots = list(
            dict.fromkeys(self._root(leaf) for node in nodes for leaf in self._leaves(node))
        )
        for root in roots:
            self._parent[root] = roots[0]
        if roots and count is not None:
            self._count[roots[0]] = count
        for node in nodes:
            if (
                node not in self._parent
            ):  # an operator that merges streams counts as one stream from now on
                self._parent[node] = roots[0]

    def _counts(self, node: str) -> set[int]:
        known = {self._count[self._root(leaf)] for leaf in self._leaves(node)}
        return {count for count in known if count is not None}

    def _leaves(self, node: str) -> list[str]:
        """Return the streams that the operator `node` merges, or `node` itself if it is a
        stream.
        """
        return [node] if node in self._parent else self._merged[node]

    def _root(self, node: str) -> str:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node


@dataclass(frozen=True, slots=True)
class InsertedExchange:
    """An exchange by `columns` that the planner inserts before the input number `input` (from 0) of
    an operator.

    `why` is the reason, `stream` the node id of the flow before it; `partitions` is None while the
    count is open.
    """

    operator: str
    input: int
    stream: str
    columns: tuple[str, ...]
    partitions: int | None
    why: str

    @property
    def node(self) -> str:
        """The node id of the stream that begins at the exchange."""
        return f"exchange:{self.input}:{self.operator}"

    def moved(self, flow: Flow) -> Flow:
        """Return the flow after the exchange."""
        return replace(
            flow, stream=self.node, partitioned_by=self.columns, partitioner=SPARK, lost_at=""
        )


Insertions = Mapping[tuple[str, int], InsertedExchange]
"""The inserted exchanges by operator id and number of the input."""


Groups = dict[str, tuple[str, ...]]
"""The node ids, streams before datasets, that need equal counts, by the id of the operator that
requires it.
"""


def dataset_node(name: str) -> str:
    """Return the node id of a dataset. That of a stream is the id of the operator or exchange at
    which it begins.
    """
    return f"dataset:{name}"


def find_join_groups(app: Application, needs: Requirements, flows: Flows) -> Groups:
    """Return the groups of streams and datasets that need equal counts, by operator id.

    If a member is an operator that merges streams (`merge_flows`), this and its inputs are a group,
    too.
    """
    groups: Groups = {}
    relied_on: set[str] = set()
    for operator in reversed(
        app.operators
    ):  # an operator that merges streams comes after those that rely on it
        arriving = flows.arriving[operator.id]
        members: dict[str, None] = {}
        if operator.id in relied_on and flows.merges_streams(operator):
            members = dict.fromkeys([operator.id, *(flow.stream for flow in arriving)])
        required = list(zip(needs.get(operator.id, ()), arriving, strict=False))
        members |= dict.fromkeys(flow.stream for needed, flow in required if needed)
        members |= dict.fromkeys(
            dataset_node(needed.dataset) for needed, _ in required if needed and needed.dataset
        )
        if members:
            relied_on.update(members)
            groups[operator.id] = tuple(members)
    return dict(reversed(groups.items()))


def task_count(partitions: int, limit: int | None) -> int:
    """Return the number of tasks: at most `limit`; with None, one per partition."""
    return partitions if limit is None else min(partitions, limit)


def assign_tasks(streams: tuple[PlannedStream, ...], limit: int | None) -> tuple[Task, ...]:
    """Return at most `limit` tasks, each with its partitions of all inputs and buckets of
    partitioned datasets.

    Without the limit, there are as many as the input, dataset or intermediate stream with most
    partitions has. Every task reads all partitions of broadcast inputs.
    """
    inputs = [stream for stream in streams if stream.role == "input"]
    shared = [stream for stream in streams if stream.role == "broadcast-input"]
    everywhere = tuple(
        _partition(stream, number) for stream in shared for number in range(stream.partitions or 0)
    )
    datasets = [
        stream for stream in streams if stream.dataset is not None and stream.partitions is not None
    ]
    whole = [
        stream for stream in streams if stream.dataset is not None and stream.partitions is None
    ]
    broadcast = (*(stream.name for stream in shared), *(str(stream.dataset) for stream in whole))
    total = max(
        (stream.partitions or 0 for stream in streams if stream.role not in ("output", *BROADCAST)),
        default=0,
    )
    count = task_count(total, limit)
    called = "Partition" if count == total else "Task"
    return tuple(
        Task(
            f"{called} {task}",
            (
                *(
                    _partition(stream, at)
                    for stream in inputs
                    for at in range(task, stream.partitions or 0, count)
                ),
                *everywhere,
            ),
            tuple(
                f"{stream.dataset}.{at}"
                for stream in datasets
                for at in range(task, stream.partitions or 0, count)
            ),
            broadcast,
        )
        for task in range(count)
    )


def _partition(stream: PlannedStream, number: int) -> SystemStreamPartition:
    return SystemStreamPartition(*split_stream_name(stream.name), number)


MAX_DEFAULT_PARTITIONS = 256
"""The largest default partition count, however many partitions the inputs have."""


@dataclass(frozen=True, slots=True)
class Inference:
    """Where an inferred count comes from: the stream or dataset `source`, in the group of the
    operator `join`.
    """

    source: str
    join: str


@dataclass(frozen=True, slots=True)
class Counts:
    """The partition count of each stream, by node id.

    `inferred` has the origin of inferred counts, `conflicts` the ids of operators whose group has
    different counts.
    """

    partitions: dict[str, int]
    inferred: dict[str, Inference]
    conflicts: tuple[str, ...]


def declared_counts(app: Application, catalog: Catalog) -> dict[str, int | None]:
    """Return the declared partition count of each stream and dataset, by node id; None where it
    is open.
    """
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
    """Return the count for streams that have neither a declared nor an inferred one, and where
    it comes from.
    """
    if app.intermediate_partitions is not None:
        return app.intermediate_partitions, "intermediate_partitions of the application"
    divided = [name for name, spec in app.inputs.items() if spec.broadcast is None]
    inputs = {name: require_facts(catalog, name, "the application").partitions for name in divided}
    known = inputs | {name: output.partitions for name, output in app.outputs.items()}
    if not known:
        return 1, "no input or output has a count"
    largest = max(known, key=lambda name: known[name])
    if known[largest] > MAX_DEFAULT_PARTITIONS:
        return (
            MAX_DEFAULT_PARTITIONS,
            f"most of inputs and outputs, {largest}, capped at {MAX_DEFAULT_PARTITIONS}",
        )
    return known[largest], f"most of inputs and outputs, {largest}"


def assign_counts(
    counts: Mapping[str, int | None], groups: Mapping[str, Sequence[str]], default: int
) -> Counts:
    """Return the partition count of each stream and dataset: from `counts`, inferred from groups,
    or the default.

    Members of groups that are not in `counts` are open. Groups are processed in their order, so the
    result is always the same.
    """
    counts = dict.fromkeys(member for members in groups.values() for member in members) | dict(
        counts
    )
    known = {stream: count for stream, count in counts.items() if count is not None}
    inferred: dict[str, Inference] = {}
    containing: dict[str, list[str]] = {}
    for join, members in groups.items():
        for member in members:
            containing.setdefault(member, []).append(join)
    decided: set[str] = set()  # operators whose group members all have a count
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
    differing = (
        join for join, members in groups.items() if len({known[member] for member in members}) > 1
    )
    return Counts(known, inferred, tuple(differing))


def add_broadcast_counts(app: Application, counts: Counts) -> Counts:
    """Add the counts of broadcast streams: they have one partition per task (`assign_tasks`).

    Raises PlanningError if all inputs are broadcast.
    """
    roles = {operator.id: operator.spec.role for operator in app.operators}
    broadcast = [node for node, role in roles.items() if role in BROADCAST]
    if not broadcast:
        return counts
    if all(source.broadcast is not None for source in app.inputs.values()):
        raise PlanningError(
            f"all inputs of application {app.name!r} are broadcast ({', '.join(app.inputs)}), so"
            " the number of tasks is unknown.",
            "Read one input without broadcast=: its partitions are divided among the tasks.",
            application=app.name,
        )
    others = [node for node in counts.partitions if roles.get(node) != "output"]
    tasks = task_count(
        max(counts.partitions[node] for node in others if node not in broadcast), app.tasks
    )
    return replace(counts, partitions={**counts.partitions, **dict.fromkeys(broadcast, tasks)})


def add_merged_counts(app: Application, flows: Flows, counts: Counts) -> Counts:
    """Add the counts of operators that merge streams and that no join relies on: the largest
    count of their inputs.
    """
    partitions = dict(counts.partitions)
    for operator in app.operators:
        if flows.merges_streams(operator) and operator.id not in partitions:
            partitions[operator.id] = max(
                partitions[flow.stream] for flow in flows.arriving[operator.id]
            )
    return replace(counts, partitions=partitions)


Requirements = Mapping[str, tuple[Requirement | None, ...]]
"""The requirements of each operator that has any, by its id; one per input, or None."""


def collect_requirements(app: Application) -> Requirements:
    """Return the requirements of operators, without those of sends to datasets that no operator
    joins.
    """
    required = {operator.id: operator.spec.requirements(app) for operator in app.operators}
    joined = {
        need.dataset
        for needs in required.values()
        for need in needs
        if need is not None and not need.feeds
    }
    kept = {
        operator: tuple(
            None if need and need.feeds and need.dataset not in joined else need for need in needs
        )
        for operator, needs in required.items()
    }
    return {operator: needs for operator, needs in kept.items() if any(needs)}


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan before it is proven; `needs` are the operators' requirements, `streams` the planned
    streams by node id.
    """

    app: Application
    catalog: Catalog
    needs: Requirements
    inserted: Insertions
    flows: Flows
    groups: Groups
    counts: Counts
    streams: Mapping[str, PlannedStream] = field(default_factory=dict)


def build_planned_streams(draft: Draft, default_from: str) -> dict[str, PlannedStream]:
    """Return the planned streams by node id: streams in order of definition, then side inputs.

    `default_from` says where default counts come from.
    """
    app = draft.app
    catalog = draft.catalog
    counts = draft.counts
    streams: dict[str, PlannedStream] = {}
    for operator in app.operators:
        for number in range(len(operator.inputs)):
            item = draft.inserted.get((operator.id, number))
            if item is not None:
                name = f"{app.name}-before-{operator.id}" + (
                    f"-{number + 1}" if len(operator.inputs) > 1 else ""
                )
                streams[item.node] = PlannedStream(
                    name,
                    "intermediate",
                    counts.partitions[item.node],
                    item.columns,
                    SPARK,
                    "auto_repartition",
                    operator.id,
                )
        spec = operator.spec
        flow = draft.flows.after[operator.id]
        if spec.role is not None:
            count = counts.partitions[flow.stream]
            by = flow.partitioned_by
            partitioner = flow.partitioner
            _, origin = spec.declared_count(PlanContext(operator.id, app, catalog))
            if (
                spec.role == "broadcast-input" and spec.reads
            ):  # the flow describes the tasks' copies
                facts = require_facts(catalog, spec.reads, operator.id)
                count = facts.partitions
                by = facts.key
                partitioner = facts.partitioner
            name = spec.reads or spec.writes or f"{app.name}-{operator.id}"
            streams[operator.id] = PlannedStream(
                name, spec.role, count, by, partitioner, origin, operator.id
            )
    for dataset in app.datasets:
        if dataset.stream is not None:
            require_facts(catalog, dataset.stream, f"dataset {dataset.name!r}")
        streams[dataset_node(dataset.name)] = PlannedStream(
            dataset.name if dataset.is_local else str(dataset.input),
            "local-table" if dataset.is_local else "side-input",
            dataset.partitions,
            dataset.partition_by,
            SPARK,
            f"dataset {dataset.name}",
            None,
            dataset.name,
        )
    return {
        node: _resolve_count_source(node, stream, streams, counts, default_from)
        for node, stream in streams.items()
    }


def _resolve_count_source(
    node: str,
    stream: PlannedStream,
    streams: Mapping[str, PlannedStream],
    counts: Counts,
    default_from: str,
) -> PlannedStream:
    if stream.count_from:
        return stream
    reason = default_from
    inference = counts.inferred.get(node)
    if inference is not None:
        at = inference.source
        while at not in streams:  # the count of merged streams comes from one of them
            at = counts.inferred[at].source
        source = streams[at]
        named = f"dataset {source.dataset}" if source.dataset else source.name
        reason = f"inferred from {named} in {inference.join}"
    return replace(stream, count_from=reason)
