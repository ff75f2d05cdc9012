"""Joins whose sides are not co-partitioned: exchanges that make them so, or an error with ways to
fix them.

With `auto_repartition=True`, the planner inserts exchanges. A dataset is in its buckets already, so
it is always the stream that is repartitioned ("moves"); one exchange serves all later joins with
the same requirement. An intermediate stream without a declared count gets the count that most of
the first joins on the branches after it require. Streams that are joined get the count that most of
them have.

Otherwise one error lists all conflicts, each with fixes, the cheapest first. A fix makes all
partition counts at an operator equal to one of them: it moves a stream before the operator (the
cost is the stream's size), rewrites a dataset in place (the size of its source stream), or changes
the declared count of an intermediate stream (free). An inferred count can be changed where it comes
from. Fixes that leave the conflict, or cause another one, are not proposed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import (
    Flow,
    Operator,
    PlannedStream,
    Requirement,
)
from dagster_adjunct.orchestration.operators.stream_facts import (
    SPARK,
    TASK_NUMBER,
    Catalog,
    Columns,
)
from dagster_adjunct.orchestration.planner.columns import (
    Arriving,
    Flows,
    abbreviate,
    format_place,
    trace_flows,
)
from dagster_adjunct.orchestration.planner.partition_counts import (
    Counts,
    Draft,
    EqualCounts,
    InsertedExchange,
    Insertions,
    Requirements,
    assign_counts,
    dataset_node,
    declared_counts,
    find_join_groups,
)
from dagster_adjunct.resources.errors import PartitionCountMismatchError, PlanningError


def plan_repartitioning(
    app: Application, catalog: Catalog, columns: Mapping[str, Columns], needs: Requirements
) -> Insertions:
    """Return the exchanges that make all joins of an application co-partitioned; {} without
    `auto_repartition`.

    `columns` are those after each operator, `needs` the requirements of operators.
    """
    if not app.auto_repartition:
        return {}
    counts = declared_counts(app, catalog)
    flows = trace_flows(app, catalog, columns)
    for stream, partitions in _preferred_counts(app, flows, needs).items():
        if counts[stream] is None:
            counts[stream] = partitions
    repartitioning = _Repartitioning(app, needs, EqualCounts(counts))
    trace_flows(app, catalog, columns, repartitioning.repartition)  # which collects exchanges
    return repartitioning.inserted


@dataclass(frozen=True, slots=True)
class _Repartitioning:
    """Collects the exchanges that an application needs, operator after operator."""

    app: Application
    needs: Requirements
    equal: EqualCounts
    inserted: dict[tuple[str, int], InsertedExchange] = field(default_factory=dict)

    def repartition(self, operator: Operator, arriving: Arriving) -> Arriving:
        """Insert the exchanges before an operator, and return the flows that then arrive; note
        which streams have equal counts then.
        """
        needs = self.needs.get(operator.id, {})
        target = self._choose_count(needs, arriving)
        moved = list(arriving)
        for number, needed in needs.items():
            flow = arriving[number]
            why = describe_mismatch(needed, flow)
            if not why:
                why = self.equal.describe_difference(flow.stream, target)
            if why:
                columns = _required_columns(self.app, needed)
                item = InsertedExchange(operator.id, number, flow.stream, columns, target, why)
                self.inserted[operator.id, number] = item
                self.equal.add(item.node, target)
                moved[number] = item.moved(flow)
        self.equal.join([moved[number].stream for number in needs], target)
        self.equal.record_inputs(operator.id, [flow.stream for flow in moved])
        return tuple(moved)

    def _choose_count(self, needs: Mapping[int, Requirement], arriving: Arriving) -> int | None:
        """Return the required count, else the one that most well-partitioned inputs have; None if
        their counts are open.
        """
        matching = []
        for number, needed in needs.items():
            if needed.partitions is not None:
                return needed.partitions
            if not describe_mismatch(needed, arriving[number]):
                matching.append(arriving[number].stream)
        return self.equal.most_frequent(matching)


def apply_insertions(inserted: Insertions) -> Callable[[Operator, Arriving], Arriving]:
    """Return a function that `trace_flows` takes as `repartition`: it inserts these exchanges."""

    def repartition(operator: Operator, arriving: Arriving) -> Arriving:
        moved = list(arriving)
        for number, flow in enumerate(arriving):
            if (operator.id, number) in inserted:
                moved[number] = inserted[operator.id, number].moved(flow)
        return tuple(moved)

    return repartition


def describe_mismatch(needed: Requirement, flow: Flow) -> str:
    """Return why a flow's partitioning does not meet a requirement, counts aside; "" if it does."""
    if flow.partitioner == TASK_NUMBER:
        return "it is broadcast: every task gets all of it"
    if needed.columns is None:
        return ""
    if flow.partitioned_by == needed.columns and flow.partitioner == SPARK:
        return ""
    if flow.lost_at:
        return f"its partitioning is unknown after {flow.lost_at}"
    if not flow.partitioned_by:
        return "it is partitioned by no key"
    return f"it is partitioned by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"


def _preferred_counts(app: Application, flows: Flows, needs: Requirements) -> dict[str, int]:
    """Return a partition count for each intermediate stream: the one that most of the first joins
    after it require, on a tie the one that is required first.

    A stream without such a join has no count here.
    """
    votes: Counter[tuple[str, int]] = Counter()
    intermediate: set[str] = set()
    # Operators whose records were joined with a partitioned dataset since their stream began.
    joined: set[str] = set()
    for operator in app.operators:
        if operator.spec.role == "intermediate":
            intermediate.add(operator.id)
        if operator.spec.role is not None:
            continue
        required = needs.get(operator.id, {})
        is_joined = not joined.isdisjoint(operator.inputs)
        if not is_joined:
            votes.update(_iter_well_partitioned(required, flows.arriving[operator.id]))
        if is_joined or _joins_partitioned(required):
            joined.add(operator.id)
    preferred: dict[str, int] = {}
    for (stream, count), _ in votes.most_common():
        if stream in intermediate:
            preferred.setdefault(stream, count)
    return preferred


def _joins_partitioned(required: Mapping[int, Requirement]) -> bool:
    """Whether an operator with these requirements joins a partitioned dataset."""
    return any(needed.partitions is not None and not needed.feeds for needed in required.values())


def _iter_well_partitioned(
    required: Mapping[int, Requirement], arriving: Arriving
) -> Iterator[tuple[str, int]]:
    """Yield the streams whose partitioning meets a requirement, with the count that it requires."""
    for number, needed in required.items():
        flow = arriving[number]
        if needed.partitions is not None and not describe_mismatch(needed, flow):
            yield flow.stream, needed.partitions


@dataclass(frozen=True, slots=True)
class Conflict:
    """An operator, here called the join, whose streams have different partition counts.

    `at` are the ids of the operators where counts differ: the join itself, sends to its dataset, or
    operators that merge streams before it. `nodes` are the ids of all streams that must have the
    same count, also of those whose records are sent to the dataset or joined with it elsewhere.
    `joins` is how many joins need it: more than 1 only where sends to their dataset differ.
    """

    join: str
    at: tuple[str, ...]
    nodes: tuple[str, ...]
    joins: int = 1


def find_conflicts(draft: Draft) -> tuple[Conflict, ...]:
    """Return a conflict for each join whose streams have different counts, in order of definition.

    Where sends to a dataset differ, its first join has the conflict for all joins with it.
    """
    uses = _collect_dataset_uses(draft)
    # By the first join that needs equal counts: the operators where they differ, and how many joins
    # need them.
    at: dict[str, list[str]] = defaultdict(list)
    join_counts: dict[str, int] = {}
    for operator in draft.counts.conflicts:
        affected = uses.joins_behind(operator)
        first = affected[0]
        at[first].append(operator)
        join_counts[first] = max(join_counts.get(first, 1), len(affected))
    place = {node: number for number, node in enumerate(draft.streams)}
    # Joins of the same datasets involve the same streams.
    nodes_by_datasets: dict[tuple[str, ...], tuple[str, ...]] = {}
    conflicts = []
    for join in draft.groups:
        if join not in at:
            continue
        datasets = tuple(member for member in draft.groups[join] if member in uses.users)
        nodes = nodes_by_datasets.get(datasets)
        if not datasets or nodes is None:
            involved = _find_involved(draft, [join, *at[join]], uses, datasets)
            nodes = tuple(sorted(involved, key=lambda node: place[node]))
            nodes_by_datasets[datasets] = nodes
        conflicts.append(Conflict(join, tuple(at[join]), nodes, join_counts[join]))
    return tuple(conflicts)


@dataclass(frozen=True, slots=True)
class _DatasetUses:
    """Which operators use the datasets of an application, by operator ids.

    `sent_to` has the dataset that an operator sends to, `joins` the operators that join a dataset,
    by its name. `users` are the operators that join a dataset or send to it, by its node id.
    `first_relying` has the first operator in whose group a stream is, by the stream's node id: it
    relies on the stream's count.
    """

    needs: Requirements
    sent_to: dict[str, str] = field(default_factory=dict)
    joins: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    users: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    first_relying: dict[str, str] = field(default_factory=dict)

    def add(self, operator: str, needed: Requirement) -> None:
        """Add an operator's use of the dataset in its requirement, if it names one."""
        if needed.dataset is None:
            return
        self.users[dataset_node(needed.dataset)].append(operator)
        if needed.feeds:
            self.sent_to[operator] = needed.dataset
        else:
            self.joins[needed.dataset].append(operator)

    def joins_behind(self, operator: str) -> list[str]:
        """Return the joins for which the streams at an operator must have equal counts: the
        operator itself or, for a send to a dataset, the joins of the dataset.

        For an operator that merges streams, they are those of the first operator that relies on its
        count.
        """
        while operator not in self.needs:  # it merges streams
            operator = self.first_relying[operator]
        if operator in self.sent_to:
            return self.joins[self.sent_to[operator]]
        return [operator]


def _collect_dataset_uses(draft: Draft) -> _DatasetUses:
    """Return which operators of a draft join each dataset, send to it, or rely on the count of a
    stream.
    """
    uses = _DatasetUses(draft.needs)
    for operator, requirements in draft.needs.items():
        for needed in requirements.values():
            uses.add(operator, needed)
    for operator, members in draft.groups.items():
        for member in members:
            if member != operator:  # the group of an operator that merges streams has itself
                uses.first_relying.setdefault(member, operator)
    return uses


def _find_involved(
    draft: Draft, at: Sequence[str], uses: _DatasetUses, datasets: Sequence[str]
) -> set[str]:
    """Return the node ids of the streams and datasets in the groups of the operators `at` and of
    all users of `datasets`, which are node ids.

    A merged stream is replaced by the streams that are merged. A stream with an inferred count
    brings in the stream or dataset from which the count comes.
    """
    operators = dict.fromkeys(at)
    for dataset in datasets:
        operators |= dict.fromkeys(uses.users[dataset])
    waiting: list[str] = []
    for operator in operators:
        waiting += draft.groups.get(operator, ())
    reached: set[str] = set()
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        reached.add(node)
        waiting += draft.groups.get(node, ())
        inference = draft.counts.inferred.get(node)
        if inference is not None:
            waiting.append(inference.source)
    # Of the nodes that were reached, only the operators that merge streams have groups.
    return reached - draft.groups.keys()


@dataclass(frozen=True, slots=True)
class _Majority:
    """The most frequent partition count, and the ids of the streams that have it."""

    count: int
    nodes: tuple[str, ...]


def _find_majority(nodes: Iterable[str], counts: Counts) -> _Majority | None:
    """Return the most frequent partition count, leaving out inferred ones.

    None if only one stream has it, or if another count is as frequent.
    """
    by_count: dict[int, list[str]] = {}
    for node in nodes:
        if node not in counts.inferred:
            by_count.setdefault(counts.partitions[node], []).append(node)
    most = max(map(len, by_count.values()), default=0)
    leading = [count for count, having in by_count.items() if len(having) == most]
    if most < 2 or len(leading) > 1:
        return None
    (count,) = leading
    return _Majority(count, tuple(by_count[count]))


_MAX_TRIED = 10
_MAX_TRIED_OPERATORS = 20_000
"""Trying a fix plans the application again. Fixes are tried at no more than `_MAX_TRIED` operators,
and at fewer if that would plan more operators than this. Further fixes are proposed untried."""


@dataclass(frozen=True, slots=True)
class Fix:
    """Changes that make all partition counts at the operator `at` equal to `partitions`.

    Exchanges are inserted for `moved` inputs, `datasets` are rewritten, and the partition_by
    operators `given` get that count. `size` is the cost in bytes, None if unknown. `tried` says
    whether the conflict was verified to be solved.
    """

    at: str
    partitions: int
    moved: tuple[InsertedExchange, ...]
    datasets: tuple[str, ...]
    given: tuple[str, ...]
    size: int | None
    tried: bool = True

    @property
    def cost(self) -> tuple[bool, int, int, int]:
        """The key by which fixes are sorted: size if known, number of exchanges and datasets,
        number of datasets.
        """
        return (
            self.size is None,
            self.size or 0,
            len(self.moved) + len(self.datasets),
            len(self.datasets),
        )


@dataclass(frozen=True, slots=True)
class _ArrivingInput:
    """The input `number` (from 0) of an operator: what it needs there, and the flow that arrives.

    An operator that merges streams needs nothing but equal counts: None.
    """

    operator: str
    number: int
    needed: Requirement | None
    flow: Flow

    @property
    def is_mispartitioned(self) -> bool:
        """Whether columns or hash of the flow are others than needed."""
        return self.needed is not None and describe_mismatch(self.needed, self.flow) != ""

    def find_dataset_unlike(self, partitions: int) -> str | None:
        """Return the needed dataset if it has another number of partitions, else None."""
        if self.needed is None or self.needed.partitions == partitions:
            return None
        return self.needed.dataset


class FixFinder:
    """Finds the fixes for operators at which partition counts differ."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        most = max(1, _MAX_TRIED_OPERATORS // len(draft.app.operators))
        # The operators at which fixes are tried.
        self._tried = set(draft.counts.conflicts[: min(_MAX_TRIED, most)])
        self._declared = declared_counts(draft.app, draft.catalog)
        # The intermediate streams that declare a count, which can be changed there.
        self._given = set()
        for operator in draft.app.operators:
            if operator.spec.role == "intermediate" and self._declared[operator.id] is not None:
                self._given.add(operator.id)
        self._size = cache(draft.catalog.size_of)

    def find(self, at: str) -> tuple[Fix, ...]:
        """Return the fixes for the counts at the operator `at`, the cheapest first."""
        targets = dict.fromkeys(
            self._draft.counts.partitions[node] for node in self._draft.groups[at]
        )
        # Other joins depend on the origin of an inferred count, too: a change there is proposed
        # only if it was tried.
        is_tried = at in self._tried
        fixes: dict[Fix, None] = {}
        for target in targets:
            fixes[self._build(at, target, at_sources=False)] = None
            if is_tried:
                fixes[self._build(at, target, at_sources=True)] = None
        possible = [replace(fix, tried=is_tried) for fix in fixes if self._solves(fix)]
        if any(fix.size is None for fix in possible):  # then sizes can't be compared
            possible = [replace(fix, size=None) for fix in possible]
        return tuple(sorted(possible, key=lambda fix: (fix.cost, -fix.partitions)))

    def _solves(self, fix: Fix) -> bool:
        """Whether a fix solves its conflict and causes no other; True for a fix that is not to
        be tried.
        """
        if fix.at not in self._tried:
            return True
        draft = self._draft
        flows = draft.flows
        if fix.moved:
            inserted = {(item.operator, item.input): item for item in fix.moved}
            flows = trace_flows(
                draft.app, draft.catalog, draft.columns, apply_insertions(inserted), earlier=flows
            )
        groups = find_join_groups(draft.app, draft.needs, flows)
        changed = [*map(dataset_node, fix.datasets), *fix.given]
        changed += [item.node for item in fix.moved]
        counts = self._declared | dict.fromkeys(changed, fix.partitions)
        # The default is for streams that are in no group, or in one without a known count.
        conflicts_left = set(assign_counts(counts, groups, default=1).conflicts)
        return fix.at not in conflicts_left and conflicts_left <= set(draft.counts.conflicts)

    def _build(self, at: str, target: int, *, at_sources: bool) -> Fix:
        """Return the changes that make all counts at an operator the target.

        With `at_sources`, an inferred count is changed at the join from which it comes, else before
        this operator.
        """
        moved: list[InsertedExchange] = []
        datasets: dict[str, None] = {}
        given: dict[str, None] = {}
        seen = {at}
        waiting = [at]
        while waiting:
            for arriving in self._equal_inputs(waiting.pop(0)):
                rewritten = arriving.find_dataset_unlike(target)
                if rewritten is not None:
                    datasets[rewritten] = None
                stream = arriving.flow.stream
                inference = self._draft.counts.inferred.get(stream)
                if arriving.is_mispartitioned:
                    moved.append(self._move(arriving, target))
                elif self._draft.counts.partitions[stream] == target:
                    continue
                elif stream in self._given:
                    given[stream] = None
                elif inference is None or not at_sources:
                    moved.append(self._move(arriving, target))
                elif inference.join not in seen:
                    seen.add(inference.join)
                    waiting.append(inference.join)
        size = self._add_sizes(moved, datasets)
        return Fix(at, target, tuple(moved), tuple(datasets), tuple(given), size)

    def _equal_inputs(self, operator: str) -> Iterator[_ArrivingInput]:
        """Yield the inputs of an operator whose counts have to be equal: those with requirements
        or, of an operator that merges streams, which has none, all.
        """
        needs = self._draft.needs.get(operator, {})
        for number, flow in enumerate(self._draft.flows.arriving[operator]):
            if number in needs or not needs:
                yield _ArrivingInput(operator, number, needs.get(number), flow)

    def _move(self, arriving: _ArrivingInput, partitions: int) -> InsertedExchange:
        """Return the exchange that gives an input what it needs, in this many partitions."""
        columns = self._columns(arriving)
        stream = arriving.flow.stream
        return InsertedExchange(arriving.operator, arriving.number, stream, columns, partitions, "")

    def _add_sizes(self, moved: Sequence[InsertedExchange], datasets: Iterable[str]) -> int | None:
        """Return the size of all that is moved or rewritten; None if one is unknown."""
        streams: list[str | None] = [self._draft.app.dataset(name).stream for name in datasets]
        for item in moved:
            streams += self._read_streams[item.stream]
        total = 0
        for stream in streams:
            size = None if stream is None else self._size(stream)
            if size is None:
                return None
            total += size
        return total

    def _columns(self, arriving: _ArrivingInput) -> tuple[str, ...]:
        """Return the columns by which an input must be partitioned; () if nothing says so."""
        if arriving.needed is not None:
            return _required_columns(self._draft.app, arriving.needed)
        # All merged inputs need the same partitioning.
        for flow in (arriving.flow, *self._draft.flows.arriving[arriving.operator]):
            if flow.partitioned_by:
                return flow.partitioned_by
        return ()

    @cached_property
    def _read_streams(self) -> dict[str, frozenset[str]]:
        """The names of the input streams that the records after each operator come from, by its
        id.
        """
        read: dict[str, frozenset[str]] = {}
        for operator in self._draft.app.operators:
            if len(operator.inputs) == 1:
                read[operator.id] = read[operator.inputs[0]]
                continue
            streams = set()
            if operator.spec.reads is not None:
                streams.add(operator.spec.reads)
            for source in operator.inputs:
                streams |= read[source]
            read[operator.id] = frozenset(streams)
        return read


def _required_columns(app: Application, needed: Requirement) -> tuple[str, ...]:
    """Return the columns by which a requirement wants records partitioned: its own, else those of
    its dataset.
    """
    if needed.columns is not None:
        return needed.columns
    assert needed.dataset is not None
    return app.dataset(needed.dataset).partition_by


_MAX_LISTED = 20
"""How many streams of a conflict, and how many conflicts, the error lists at most."""


def check_co_partitioning(draft: Draft) -> None:
    """Raise one PlanningError for all joins whose streams are not co-partitioned.

    It is a PartitionCountMismatchError if partition counts differ. Partitioning columns and hash
    must be equal, too.
    """
    app = draft.app
    differing = find_conflicts(draft)
    mispartitioned = _find_mispartitioned(draft)
    if not differing and not mispartitioned:
        return
    problems = []
    for conflict in differing[:_MAX_LISTED]:
        problems.append(_Problem(conflict.join, _describe_conflict(conflict, draft)))
    for each in mispartitioned[:_MAX_LISTED]:
        problems.append(_Problem(each.operator, each.problem))
    unlisted = [conflict.join for conflict in differing[_MAX_LISTED:]]
    unlisted += [each.operator for each in mispartitioned[_MAX_LISTED:]]
    operator = problems[0].operator
    if len(problems) > 1:
        problem = _list_problems(app, problems, unlisted)
        line = None  # the text has one for each problem
    else:
        problem = problems[0].text
        line = format_place(app.operator(operator).declared_at)
    step = _describe_steps(draft, differing, mispartitioned)
    about: dict[str, Any] = {"application": app.name, "operator": operator, "declared_at": line}
    if differing:
        # Each join with the counts of its streams, by name.
        conflicts = tuple((conflict.join, _list_counts(conflict, draft)) for conflict in differing)
        _, counts = conflicts[0]
        raise PartitionCountMismatchError(
            problem, step, **about, counts=counts, conflicts=conflicts
        )
    for needed in draft.needs[operator].values():
        if needed.dataset is not None:
            about.setdefault("dataset", needed.dataset)
    raise PlanningError(problem, step, **about)


@dataclass(frozen=True, slots=True)
class _Problem:
    """Why the streams of an operator are not proven to be co-partitioned."""

    operator: str
    text: str


def _list_problems(app: Application, problems: Sequence[_Problem], unlisted: Sequence[str]) -> str:
    """Return a text with a line for each problem; `unlisted` are the operators of problems that are
    not listed.
    """
    joins = len({*unlisted, *(problem.operator for problem in problems)})
    counted = f"{joins:,} joins" if joins > 1 else "1 join"
    lines = [f"{counted} can't be proven:"]
    for problem in problems:
        place = format_place(app.operator(problem.operator).declared_at) or app.name
        lines.append(f"{place}: {problem.text}")
    if unlisted:
        lines.append(f"and {len(unlisted):,} more: {abbreviate(unlisted)}.")
    return "\n- ".join(lines)


def _describe_steps(
    draft: Draft, differing: Sequence[Conflict], mispartitioned: Sequence[_Mispartitioned]
) -> str:
    """Return the next step of the error: the fixes of all conflicts, and of other inputs."""
    finder = FixFinder(draft)
    places: dict[str, None] = {}
    for conflict in differing[:_MAX_LISTED]:
        places |= dict.fromkeys(conflict.at[:_MAX_LISTED])
    operators_by_fixes: dict[str, list[str]] = {}
    for at in places:
        fixes = _describe_fixes(finder.find(at), draft.streams)
        operators_by_fixes.setdefault(fixes, []).append(at)
    steps = []
    for fixes, operators in operators_by_fixes.items():
        steps.append(f"At {abbreviate(operators)}: {fixes}.")
    in_conflict: set[str] = set()
    for conflict in differing:
        in_conflict.update(conflict.at)
    for each in mispartitioned[:_MAX_LISTED]:
        if each.operator not in in_conflict:
            steps.append(each.step)
    if not draft.app.strict:
        steps.append("Or set auto_repartition=True on the application.")
    return " ".join(dict.fromkeys(steps))


def _list_counts(conflict: Conflict, draft: Draft) -> tuple[tuple[str, int | None], ...]:
    """Return the names of a conflict's streams with their partition counts, the first ones."""
    sides = [draft.streams[node] for node in conflict.nodes[:_MAX_LISTED]]
    return tuple((side.name, side.partitions) for side in sides)


def _describe_conflict(conflict: Conflict, draft: Draft) -> str:
    """Return the problem of a conflict: the counts that its streams have, and which one most
    have.
    """
    streams = draft.streams
    sides = [streams[node] for node in conflict.nodes]
    others = ""
    if conflict.joins > 1:
        others = f" (and {conflict.joins - 1:,} more joins of its table)"
    majority = _find_majority(conflict.nodes, draft.counts)
    most_have = ""
    if majority is not None and len(majority.nodes) < len(sides):
        names = [streams[node].name for node in majority.nodes]
        most_have = f"; most have {majority.count}: {abbreviate(names)}"
    counted = abbreviate(
        [f"{side.name} has {side.partitions} ({side.count_from})" for side in sides]
    )
    return f"{conflict.join}{others} needs equal partition counts: {counted}{most_have}."


def _describe_fixes(fixes: Sequence[Fix], streams: Mapping[str, PlannedStream]) -> str:
    """Return the fixes for one operator in words: the cheapest first, and at most three others."""
    if not fixes:
        return "no single change makes them equal; fix the conflicts before it first"
    first, *others = [_describe_fix(fix, streams) for fix in fixes]
    remarks = []
    if others:
        remarks.append("the fewest changes" if fixes[0].size is None else "the cheapest by bytes")
    if not fixes[0].tried:
        remarks.append("not verified, because there are many conflicts")
    if remarks:
        first += f" ({'; '.join(remarks)})"
    return "; or ".join([first, *others[:3]])


def _describe_fix(fix: Fix, streams: Mapping[str, PlannedStream]) -> str:
    """Return what to do for a fix, with the bytes that all of it moves if they are known."""
    parts = []
    for item in fix.moved:
        place = "it" if item.operator == fix.at else item.operator
        stream = _stream_label(item.stream, streams)
        parts.append(f"move {stream} with {_partition_by(item.columns)} before {place}")
    for operator in fix.given:
        parts.append(f"write partition_by(…, partitions={fix.partitions}) at {operator}")
    for name in fix.datasets:
        parts.append(
            f"rewrite dataset {name!r} in place (adjunct dataset repartition {name} --partitions"
            f" {fix.partitions} --reason …) and declare it with partitions={fix.partitions}"
        )
    text = " and ".join(parts)
    if fix.size is None:
        return text
    return f"{text}, {format_bytes(fix.size)} in all"


@dataclass(frozen=True, slots=True)
class _Mispartitioned:
    """An operator with an input that is not partitioned as it needs, the problem and the next
    step.
    """

    operator: str
    problem: str
    step: str


def _find_mispartitioned(draft: Draft) -> list[_Mispartitioned]:
    """Return each input that is not partitioned by the required columns and hash."""
    found = []
    for operator, requirements in draft.needs.items():
        for number, needed in requirements.items():
            flow = draft.flows.arriving[operator][number]
            why = describe_mismatch(needed, flow)
            if why and needed.columns is not None:
                arriving = _ArrivingInput(operator, number, needed, flow)
                found.append(_explain_mispartitioned(draft, arriving, needed, needed.columns, why))
    return found


def _explain_mispartitioned(
    draft: Draft, arriving: _ArrivingInput, needed: Requirement, columns: tuple[str, ...], why: str
) -> _Mispartitioned:
    """Return the problem and the next step for an input that is not partitioned by the needed
    `columns`, which is `why`.
    """
    operator = arriving.operator
    flow = arriving.flow
    label = _stream_label(flow.stream, draft.streams)
    if needed.dataset is None:
        problem = f"input {arriving.number + 1} ({label}) is not partitioned as the operator needs"
    else:
        stream = f"stream {label}" if flow.stream in draft.streams else label
        problem = (
            f"{stream} is not partitioned like dataset {needed.dataset}, which is partitioned by"
            f" {_by_columns(draft.app.dataset(needed.dataset).partition_by)}"
        )
    partition_by = _partition_by(columns)
    breaking = _find_breaking_inputs(draft, needed, flow)
    if breaking:
        why = "; ".join(f"{each} breaks it: {wrong}" for each, wrong in breaking.items())
        step = f"Write {partition_by} before {flow.stream}, on {abbreviate([*breaking])}."
    else:
        has_several = len(draft.flows.arriving[operator]) > 1
        place = f", on {label}" if has_several else ""
        step = f"Write {partition_by} before {operator}{place}."
        if arriving.number == 0:
            step += _suggest_partition_by(draft.app, operator, needed, flow)
    problem = f"{operator}: {problem}: {why}; needed is {_by_columns(columns)}."
    return _Mispartitioned(operator, problem, step)


def _find_breaking_inputs(draft: Draft, needed: Requirement, flow: Flow) -> dict[str, str]:
    """Return why inputs of the operator that merged this flow are not partitioned as required, by
    input.

    Empty if no operator merged it, or if none or all of the inputs are partitioned wrongly.
    """
    merged = draft.flows.arriving.get(flow.stream, ())
    breaking = {}
    for number, part in enumerate(merged):
        wrong = describe_mismatch(needed, part)
        if wrong:
            label = _stream_label(part.stream, draft.streams)
            breaking[f"input {number + 1} of {flow.stream} ({label})"] = wrong
    if len(breaking) == len(merged):
        return {}
    return breaking


def _suggest_partition_by(app: Application, operator: str, needed: Requirement, flow: Flow) -> str:
    """Return the advice to use `partition_by=` if records are partitioned by a part of the
    operator's key, else "".
    """
    by = flow.partitioned_by
    is_part_of_key = set(by) < set(needed.columns or ())
    if not by or flow.partitioner != SPARK or not is_part_of_key:
        return ""
    if not app.operator(operator).spec.takes_partition_by:
        return ""
    argument = f'"{by[0]}"' if len(by) == 1 else str(list(by)).replace("'", '"')
    return (
        f" Or give {operator} partition_by={argument}, which is how its records are partitioned"
        " already."
    )


def _by_columns(columns: Iterable[str]) -> str:
    """Return a partitioning by columns in words."""
    return f"({', '.join(columns)}) with {SPARK}"


def _stream_label(node: str, streams: Mapping[str, PlannedStream]) -> str:
    """Return the name of the stream with this node id; of merged streams, what merges them."""
    if node in streams:
        return streams[node].name
    return f"the output of {node}"


def format_bytes(size: int) -> str:
    """Return a size in words: "12 MB"."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size = round(size / 1000)
    return f"{size:,.0f} GB"


def _partition_by(columns: tuple[str, ...]) -> str:
    """Return the call that partitions records by these columns."""
    quoted = ", ".join(f'"{name}"' for name in columns)
    return f".partition_by({quoted})"
