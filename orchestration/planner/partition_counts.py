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

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import (
    BROADCAST,
    Flow,
    Operator,
    PlanContext,
    PlannedStream,
    Requirement,
    Role,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    SPARK,
    Catalog,
    Columns,
    require_facts,
)
from dagster_adjunct.orchestration.planner.columns import Flows
from dagster_adjunct.orchestration.planner.planned import Task
from dagster_adjunct.resources.errors import PlanningError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.system import SystemStreamPartition


class EqualCounts:
    """Disjoint sets of streams with equal partition counts. Streams are named by node ids. The
    count of a set is None while it is open.

    A node may also be an operator that merges streams. These may be in different sets until an
    operator relies on their counts; from then on the merging node counts as a stream.
    """

    def __init__(self, counts: Mapping[str, int | None]) -> None:
        self._parent = {node: node for node in counts}
        self._count = dict(counts)
        self._merged: dict[str, list[str]] = {}

    def add(self, node: str, count: int | None) -> None:
        """Add a stream as a set of its own."""
        self._parent[node] = node
        self._count[node] = count

    def record_inputs(self, operator: str, streams: Sequence[str]) -> None:
        """Record the input streams of an operator: if it merges them, its id is a node that stands
        for all of them.
        """
        self._merged[operator] = self._all_leaves(streams)

    def most_frequent(self, nodes: Iterable[str]) -> int | None:
        """Return the most frequent count of these streams, the first one on a tie; None if all
        are open.
        """
        known: Counter[int] = Counter()
        for node in nodes:
            known.update(self._counts(node))
        if not known:
            return None
        ((count, _),) = known.most_common(1)
        return count

    def describe_difference(self, node: str, target: int | None) -> str:
        """Return how many partitions a stream has, in words; "" if that is the target, or if one of
        both is open.
        """
        other = sorted(self._counts(node) - {target})
        if target is None or not other:
            return ""
        return f"it has {' and '.join(map(str, other))} partitions"

    def join(self, nodes: Sequence[str], count: int | None) -> None:
        """Unite the sets of these streams. The new set has this count; with None, it keeps that of
        the first set. Nothing is done without streams.
        """
        if not nodes:
            return
        roots = [self._root(leaf) for leaf in self._all_leaves(nodes)]
        for root in roots:
            self._parent[root] = roots[0]
        if count is not None:
            self._count[roots[0]] = count
        for node in nodes:
            self._parent.setdefault(node, roots[0])  # a merging node, which becomes a stream

    def _counts(self, node: str) -> set[int]:
        """Return the known counts of a node; several if it is merged of streams with different
        counts.
        """
        known = {self._count[self._root(leaf)] for leaf in self._leaves(node)}
        return {count for count in known if count is not None}

    def _leaves(self, node: str) -> list[str]:
        """Return the streams that a merging `node` stands for, or [`node`] if it is a stream."""
        return [node] if node in self._parent else self._merged[node]

    def _all_leaves(self, nodes: Iterable[str]) -> list[str]:
        """Return the streams that these nodes are or merge, each once."""
        leaves: dict[str, None] = {}
        for node in nodes:
            leaves |= dict.fromkeys(self._leaves(node))
        return list(leaves)

    def _root(self, node: str) -> str:
        """Return the stream that stands for the set of this one; shortens the chain of parents."""
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
    # An operator that merges streams comes after those that rely on it.
    for operator in reversed(app.operators):
        arriving = flows.arriving[operator.id]
        streams: list[str] = []
        datasets: list[str] = []
        if operator.id in relied_on and flows.merges_streams(operator):
            streams = [operator.id, *(flow.stream for flow in arriving)]
        for number, needed in needs.get(operator.id, {}).items():
            streams.append(arriving[number].stream)
            if needed.dataset is not None:
                datasets.append(dataset_node(needed.dataset))
        members = dict.fromkeys([*streams, *datasets])
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

    With `limit` None, there are as many tasks as the input, dataset or intermediate stream with
    most partitions has partitions. Every task reads all partitions of broadcast inputs.
    """
    by_role: dict[str, list[PlannedStream]] = defaultdict(list)
    total = 0
    buckets: dict[str, int] = {}
    replicated: list[str] = []
    for stream in streams:
        by_role[stream.role].append(stream)
        if stream.role not in ("output", *BROADCAST):
            total = max(total, stream.partitions or 0)
        if stream.dataset is None:
            continue
        if stream.partitions is None:
            replicated.append(stream.dataset)
        else:
            buckets[stream.dataset] = stream.partitions
    shared = by_role["broadcast-input"]
    broadcast = (*(stream.name for stream in shared), *replicated)
    count = task_count(total, limit)
    called = "Partition" if count == total else "Task"
    tasks = []
    for task in range(count):
        owned = _list_buckets(buckets, task, count)
        ssps = _list_partitions(by_role["input"], task, count)
        ssps += _list_partitions(shared, first=0, step=1)  # all of them
        tasks.append(Task(f"{called} {task}", tuple(ssps), tuple(owned), broadcast))
    return tuple(tasks)


def _list_buckets(buckets: Mapping[str, int], first: int, step: int) -> list[str]:
    """Return every `step`-th bucket of each dataset ("planes.3"), from the bucket `first` on;
    `buckets` has how many there are.
    """
    listed = []
    for dataset, count in buckets.items():
        for number in range(first, count, step):
            listed.append(f"{dataset}.{number}")
    return listed


def _list_partitions(
    streams: Sequence[PlannedStream], first: int, step: int
) -> list[SystemStreamPartition]:
    """Return every `step`-th partition of each stream, from the partition `first` on; none of a
    stream whose number of partitions is unknown.
    """
    partitions = []
    for stream in streams:
        system, name = split_stream_name(stream.name)
        for number in range(first, stream.partitions or 0, step):
            partitions.append(SystemStreamPartition(system, name, number))
    return partitions


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
    """Return the declared partition count of each stream and dataset, by node id; None where it is
    open. Datasets that every task reads as a whole are left out.
    """
    counts: dict[str, int | None] = {}
    for operator in app.operators:
        if operator.spec.role is not None:
            context = PlanContext(operator.id, app, catalog)
            counts[operator.id] = operator.spec.declared_count(context).partitions
    for dataset in app.datasets:
        if dataset.partitions is not None:
            counts[dataset_node(dataset.name)] = dataset.partitions
    return counts


@dataclass(frozen=True, slots=True)
class DefaultCount:
    """The count for streams that have neither a declared nor an inferred one, and where it comes
    from, in words.
    """

    count: int
    origin: str


def default_count(app: Application, catalog: Catalog) -> DefaultCount:
    """Return the count for streams that have neither a declared nor an inferred one: that of the
    application, else the largest one of its inputs and outputs up to MAX_DEFAULT_PARTITIONS.
    """
    if app.intermediate_partitions is not None:
        return DefaultCount(
            app.intermediate_partitions, "intermediate_partitions of the application"
        )
    known = {}
    for name, spec in app.inputs.items():
        if spec.role not in BROADCAST:
            known[name] = require_facts(catalog, name, "the application").partitions
    for name, output in app.outputs.items():
        known[name] = output.partitions
    if not known:
        return DefaultCount(1, "no input or output has a count")
    largest = max(known, key=lambda name: known[name])
    origin = f"most of inputs and outputs, {largest}"
    if known[largest] > MAX_DEFAULT_PARTITIONS:
        return DefaultCount(MAX_DEFAULT_PARTITIONS, f"{origin}, capped at {MAX_DEFAULT_PARTITIONS}")
    return DefaultCount(known[largest], origin)


def assign_counts(
    counts: Mapping[str, int | None], groups: Mapping[str, Sequence[str]], default: int
) -> Counts:
    """Return the partition count of each stream and dataset: from `counts`, inferred from groups,
    or the default.

    Members of groups that are not in `counts` are open. Groups are processed in their order, so the
    result is always the same.
    """
    known = {stream: count for stream, count in counts.items() if count is not None}
    inferred = _infer_counts(known, groups)
    nodes = [*counts]
    for members in groups.values():
        nodes += members
    for node in nodes:
        known.setdefault(node, default)
    differing = []
    for join, members in groups.items():
        if len({known[member] for member in members}) > 1:
            differing.append(join)
    return Counts(known, inferred, tuple(differing))


def _infer_counts(
    known: dict[str, int], groups: Mapping[str, Sequence[str]]
) -> dict[str, Inference]:
    """Add the counts to `known` that follow from those in a group, and return where they come
    from.
    """
    inferred: dict[str, Inference] = {}
    containing: dict[str, list[str]] = defaultdict(list)  # by member, the groups that have it
    for join, members in groups.items():
        for member in members:
            containing[member].append(join)
    decided: set[str] = set()  # operators whose group members all have a count
    waiting = deque(groups)
    while waiting:
        join = waiting.popleft()
        if join in decided:
            continue
        members = groups[join]
        source = _find_known(members, known)
        if source is None:
            continue
        decided.add(join)
        for member in members:
            if member not in known:
                known[member] = known[source]
                inferred[member] = Inference(source, join)
                waiting.extend(containing[member])
    return inferred


def _find_known(members: Sequence[str], known: Mapping[str, int]) -> str | None:
    """Return the first member with a known count; None if none has one."""
    for member in members:
        if member in known:
            return member
    return None


def add_broadcast_counts(app: Application, counts: Counts) -> Counts:
    """Add the counts of broadcast streams: they have one partition per task (`assign_tasks`).

    Raises PlanningError if all inputs are broadcast.
    """
    roles = {operator.id: operator.spec.role for operator in app.operators}
    broadcast = [node for node, role in roles.items() if role in BROADCAST]
    if not broadcast:
        return counts
    if all(source.role in BROADCAST for source in app.inputs.values()):
        raise PlanningError(
            f"all inputs of application {app.name!r} are broadcast ({', '.join(app.inputs)}), so"
            " the number of tasks is unknown.",
            "Read one input without broadcast=: its partitions are divided among the tasks.",
            application=app.name,
        )
    divided = []  # the counts of what is divided among the tasks
    for node, count in counts.partitions.items():
        if roles.get(node) not in ("output", *BROADCAST):
            divided.append(count)
    tasks = task_count(max(divided), app.tasks)
    return replace(counts, partitions={**counts.partitions, **dict.fromkeys(broadcast, tasks)})


def add_merged_counts(app: Application, flows: Flows, counts: Counts) -> Counts:
    """Add the counts of operators that merge streams and that no join relies on: the largest
    count of their inputs.
    """
    partitions = dict(counts.partitions)
    for operator in app.operators:
        if flows.merges_streams(operator) and operator.id not in partitions:
            arriving = [flow.stream for flow in flows.arriving[operator.id]]
            partitions[operator.id] = max(partitions[stream] for stream in arriving)
    return replace(counts, partitions=partitions)


Requirements = Mapping[str, Mapping[int, Requirement]]
"""The requirements of each operator that has any, by its id and the number of the input."""


def collect_requirements(app: Application) -> Requirements:
    """Return the requirements of operators, without those of sends to datasets that no operator
    joins.
    """
    required: dict[str, dict[int, Requirement]] = {}
    joined = set()
    for operator in app.operators:
        for number, need in enumerate(operator.spec.requirements(app)):
            if need is None:  # any partitioning of this input will do
                continue
            required.setdefault(operator.id, {})[number] = need
            if not need.feeds:
                joined.add(need.dataset)
    return {name: needs for name, needs in required.items() if _is_relevant(needs, joined)}


def _is_relevant(needs: Mapping[int, Requirement], joined: Collection[str | None]) -> bool:
    """Whether an operator needs more than to send to datasets that none joins."""
    return any(not need.feeds or need.dataset in joined for need in needs.values())


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan before it is proven; `columns` are those after each operator, `needs` the operators'
    requirements, `streams` the planned streams by node id.
    """

    app: Application
    catalog: Catalog
    columns: Mapping[str, Columns]
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
    streams: dict[str, PlannedStream] = {}
    for operator in draft.app.operators:
        for number in range(len(operator.inputs)):
            item = draft.inserted.get((operator.id, number))
            if item is not None:
                streams[item.node] = _plan_inserted(draft, operator, item)
        if operator.spec.role is not None:
            streams[operator.id] = _plan_stream(draft, operator)
    for dataset in draft.app.datasets:
        streams[dataset_node(dataset.name)] = _plan_dataset(draft.catalog, dataset)
    return {
        node: _resolve_count_source(node, stream, streams, draft.counts, default_from)
        for node, stream in streams.items()
    }


def _plan_dataset(catalog: Catalog, dataset: AdjunctDataset) -> PlannedStream:
    """Return the side input that a dataset is. Raises PlanningError if its stream is missing."""
    if dataset.stream is not None:
        require_facts(catalog, dataset.stream, f"dataset {dataset.name!r}")
    role: Role
    if dataset.is_local:
        name = dataset.name
        role = "local-table"
    else:
        name = str(dataset.input)
        role = "side-input"
    return PlannedStream(
        name,
        role,
        partitions=dataset.partitions,
        partitioned_by=dataset.partition_by,
        partitioner=SPARK,
        count_from=f"dataset {dataset.name}",
        dataset=dataset.name,
    )


def _plan_inserted(draft: Draft, operator: Operator, item: InsertedExchange) -> PlannedStream:
    """Return the stream that begins at an exchange before an operator."""
    name = f"{draft.app.name}-before-{operator.id}"
    if len(operator.inputs) > 1:
        name = f"{name}-{item.input + 1}"
    return PlannedStream(
        name,
        "intermediate",
        partitions=draft.counts.partitions[item.node],
        partitioned_by=item.columns,
        partitioner=SPARK,
        count_from="auto_repartition",
        operator=operator.id,
    )


def _plan_stream(draft: Draft, operator: Operator) -> PlannedStream:
    """Return the stream that an operator with a role reads, writes or begins."""
    spec = operator.spec
    assert spec.role is not None
    context = PlanContext(operator.id, draft.app, draft.catalog)
    origin = spec.declared_count(context).declared_in
    name = spec.reads or spec.writes or f"{draft.app.name}-{operator.id}"
    if spec.role == "broadcast-input" and spec.reads:
        # These are the partitions of the stream itself. The flow has one partition for each task,
        # which reads all of the stream.
        facts = require_facts(draft.catalog, spec.reads, operator.id)
        return PlannedStream(
            name,
            spec.role,
            partitions=facts.partitions,
            partitioned_by=facts.key,
            partitioner=facts.partitioner,
            count_from=origin,
            operator=operator.id,
        )
    flow = draft.flows.after[operator.id]
    return PlannedStream(
        name,
        spec.role,
        partitions=draft.counts.partitions[flow.stream],
        partitioned_by=flow.partitioned_by,
        partitioner=flow.partitioner,
        count_from=origin,
        operator=operator.id,
    )


def _resolve_count_source(
    node: str,
    stream: PlannedStream,
    streams: Mapping[str, PlannedStream],
    counts: Counts,
    default_from: str,
) -> PlannedStream:
    """Return the planned stream `node` with where its count comes from: as it was declared,
    inferred from another stream or dataset, or `default_from`.
    """
    if stream.count_from:
        return stream
    inference = counts.inferred.get(node)
    if inference is None:
        return replace(stream, count_from=default_from)
    at = inference.source
    while at not in streams:  # the count of merged streams comes from one of them
        at = counts.inferred[at].source
    source = streams[at]
    named = f"dataset {source.dataset}" if source.dataset else source.name
    return replace(stream, count_from=f"inferred from {named} in {inference.join}")
