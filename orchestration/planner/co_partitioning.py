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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import (
    Flow,
    Operator,
    PlannedStream,
    Requirement,
)
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, TASK_NUMBER, Catalog
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


def plan_repartitioning(app: Application, catalog: Catalog, needs: Requirements) -> Insertions:
    """Return the exchanges by which all joins of an application are co-partitioned; none without
    `auto_repartition`.
    """
    if not app.auto_repartition:
        return {}
    counts = declared_counts(app, catalog)
    for stream, partitions in _preferred_counts(app, trace_flows(app, catalog), needs).items():
        if counts[stream] is None:
            counts[stream] = partitions
    equal = EqualCounts(counts)
    inserted: dict[tuple[str, int], InsertedExchange] = {}

    def decide(operator: Operator, arriving: Arriving) -> Arriving:
        moved = list(arriving)
        requirements = [
            (number, needed) for number, needed in enumerate(needs.get(operator.id, ())) if needed
        ]
        wrong = {
            number: describe_mismatch(needed, arriving[number]) for number, needed in requirements
        }
        target = next(
            (needed.partitions for _, needed in requirements if needed.partitions is not None), None
        )
        if target is None:
            target = equal.most_frequent(
                [arriving[number].stream for number, why in wrong.items() if not why]
            )
        together = []
        for number, needed in requirements:
            flow = arriving[number]
            why = wrong[number]
            if not why:
                why = equal.describe_difference(flow.stream, target)
            if why:
                columns = _required_columns(app, needed)
                item = InsertedExchange(operator.id, number, flow.stream, columns, target, why)
                inserted[operator.id, number] = item
                equal.add(item.node, target)
                moved[number] = item.moved(flow)
            together.append(moved[number].stream)
        equal.join(together, target)
        equal.record_inputs(operator.id, [flow.stream for flow in moved])
        return tuple(moved)

    trace_flows(app, catalog, decide)
    return inserted


def apply_insertions(inserted: Insertions) -> Callable[[Operator, Arriving], Arriving]:
    """Return a function that `trace_flows` takes as `repartition`: it inserts these exchanges."""

    def moved(operator: Operator, arriving: Arriving) -> Arriving:
        insertions = [
            (inserted.get((operator.id, number)), flow) for number, flow in enumerate(arriving)
        ]
        return tuple(flow if item is None else item.moved(flow) for item, flow in insertions)

    return moved


def describe_mismatch(needed: Requirement, flow: Flow) -> str:
    """Return why a flow's partitioning does not meet a requirement, counts aside; "" if it does."""
    if flow.partitioner == TASK_NUMBER:
        return "it is broadcast: every task gets all of it"
    if needed.columns is None or (
        flow.partitioned_by == needed.columns and flow.partitioner == SPARK
    ):
        return ""
    if flow.lost_at:
        return f"its partitioning is unknown after {flow.lost_at}"
    if not flow.partitioned_by:
        return "it is partitioned by no key"
    return f"it is partitioned by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"


def _preferred_counts(app: Application, flows: Flows, needs: Requirements) -> dict[str, int]:
    """Return a partition count for each intermediate stream: the one that most first joins after it
    require.

    On a tie, that is the one required first. Streams before no such join are left out.
    """
    votes: dict[str, Counter[int]] = {}
    joined: set[str] = (
        set()
    )  # operators whose records were joined with a partitioned dataset since their stream began
    for operator in app.operators:
        if operator.spec.role is not None:
            if operator.spec.role == "intermediate":
                votes[operator.id] = Counter()
            continue
        if not joined.isdisjoint(operator.inputs):
            joined.add(operator.id)
            continue
        for needed, flow in zip(
            needs.get(operator.id, ()), flows.arriving[operator.id], strict=False
        ):
            if needed is None or needed.partitions is None:
                continue
            if flow.stream in votes and not describe_mismatch(needed, flow):
                votes[flow.stream][needed.partitions] += 1
            if not needed.feeds:
                joined.add(operator.id)
    return {stream: count.most_common(1)[0][0] for stream, count in votes.items() if count}


@dataclass(frozen=True, slots=True)
class Conflict:
    """An operator, here called the join, whose streams have different partition counts.

    `at` are the ids of the operators where counts differ: the join itself, sends to its dataset, or
    operators that merge streams before it. `nodes` are the ids of all streams that must have its
    count, also of those whose records are sent to its dataset or joined with it elsewhere. `joins`
    is the number of joins with it.
    """

    join: str
    at: tuple[str, ...]
    nodes: tuple[str, ...]
    joins: int = 1


def find_conflicts(draft: Draft) -> tuple[Conflict, ...]:
    """Return a conflict for each join whose streams have different counts, in order of definition.

    Several joins with one dataset have one conflict.
    """
    needs = draft.needs
    groups = draft.groups
    counts = draft.counts
    place = {node: number for number, node in enumerate(draft.streams)}
    feeds: dict[str, str] = {}
    reading: dict[str, list[str]] = defaultdict(
        list
    )  # the operators that join a dataset, by its name
    meeting: dict[str, list[str]] = defaultdict(
        list
    )  # those that join a dataset or send to it, by its node id
    for operator, requirements in needs.items():
        for needed in requirements:
            if needed is not None and needed.dataset is not None:
                if needed.feeds:
                    feeds[operator] = needed.dataset
                else:
                    reading[needed.dataset].append(operator)
        for name in dict.fromkeys(
            needed.dataset for needed in requirements if needed is not None and needed.dataset
        ):
            meeting[dataset_node(name)].append(operator)
    relying: dict[str, str] = {}
    for operator, members in groups.items():
        for member in members:
            if member != operator:
                relying.setdefault(member, operator)

    at: dict[str, list[str]] = defaultdict(list)
    joins: dict[str, int] = {}
    for conflict in counts.conflicts:
        operator = conflict
        while operator not in needs:  # it merges streams: find the join that relies on it
            operator = relying[operator]
        readers = reading[feeds[operator]] if operator in feeds else [operator]
        at[readers[0]].append(conflict)
        joins[readers[0]] = max(joins.get(readers[0], 1), len(readers))

    by_table: dict[
        tuple[str, ...], tuple[str, ...]
    ] = {}  # joins of one table involve the same streams

    def involved(join: str, where: Sequence[str]) -> tuple[str, ...]:
        """Return the node ids of the streams in the join's groups, those merged there, and
        origins of counts.
        """
        read = tuple(member for member in groups.get(join, ()) if member in meeting)
        if read not in by_table or not read:
            operators = dict.fromkeys(
                [join, *where, *(operator for table in read for operator in meeting[table])]
            )
            waiting = [member for operator in operators for member in groups.get(operator, ())]
            reached: dict[str, None] = {}
            for node in waiting:  # which grows
                if node not in reached:
                    reached[node] = None
                    source = counts.inferred.get(node)
                    waiting += [*groups.get(node, ()), *([] if source is None else [source.source])]
            by_table[read] = tuple(
                sorted((node for node in reached if node not in groups), key=place.__getitem__)
            )
        return by_table[read]

    order = {operator: number for number, operator in enumerate(groups)}
    return tuple(
        Conflict(join, tuple(where), involved(join, where), joins[join])
        for join, where in sorted(at.items(), key=lambda item: order[item[0]])
    )


def find_majority(nodes: Iterable[str], counts: Counts) -> tuple[int, tuple[str, ...]] | None:
    """Return the most frequent partition count, leaving out inferred ones, and the node ids that
    have it.

    None if no count is more frequent than all others.
    """
    own = [node for node in nodes if node not in counts.inferred]
    most = Counter(counts.partitions[node] for node in own).most_common(2)
    if not most or most[0][1] < 2 or (len(most) > 1 and most[1][1] == most[0][1]):
        return None
    return most[0][0], tuple(node for node in own if counts.partitions[node] == most[0][0])


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


class FixFinder:
    """Finds the fixes for operators at which partition counts differ."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        app = draft.app
        conflicts = draft.counts.conflicts
        self._tried = set(
            conflicts[: min(_MAX_TRIED, max(1, _MAX_TRIED_OPERATORS // len(app.operators)))]
        )
        self._declared = declared_counts(app, draft.catalog)
        intermediate = [
            operator.id for operator in app.operators if operator.spec.role == "intermediate"
        ]
        self._given = {
            operator for operator in intermediate if self._declared[operator] is not None
        }
        self._size = cache(draft.catalog.size_of)

    def find(self, at: str) -> tuple[Fix, ...]:
        """Return the fixes for the counts at the operator `at`, the cheapest first."""
        targets = dict.fromkeys(
            self._draft.counts.partitions[node] for node in self._draft.groups[at]
        )
        # Other joins depend on the origin of an inferred count, too: a change there is proposed
        # only if it was tried.
        where = (False, True) if at in self._tried else (False,)
        fixes = dict.fromkeys(
            self._build(at, target, at_sources=sources) for target in targets for sources in where
        )
        possible = [fix for fix in fixes if self._solves(fix)]
        known = all(fix.size is not None for fix in possible)  # otherwise sizes can't be compared
        possible = [
            replace(fix, size=fix.size if known else None, tried=at in self._tried)
            for fix in possible
        ]
        return tuple(sorted(possible, key=lambda fix: (fix.cost, -fix.partitions)))

    def _solves(self, fix: Fix) -> bool:
        """Whether a fix solves its conflict and causes no other; True for a fix that is not to
        be tried.
        """
        if fix.at not in self._tried:
            return True
        inserted = {(item.operator, item.input): item for item in fix.moved}
        changed = (*map(dataset_node, fix.datasets), *fix.given, *(item.node for item in fix.moved))
        draft = self._draft
        flows = self._draft.flows
        if inserted:
            flows = trace_flows(draft.app, draft.catalog, apply_insertions(inserted), earlier=flows)
        groups = find_join_groups(draft.app, draft.needs, flows)
        left = set(
            assign_counts(
                self._declared | dict.fromkeys(changed, fix.partitions), groups, 1
            ).conflicts
        )
        return fix.at not in left and left <= set(draft.counts.conflicts)

    def _build(self, at: str, target: int, *, at_sources: bool) -> Fix:
        """Return the changes that make all counts at an operator the target.

        With `at_sources`, an inferred count is changed at the join from which it comes, else before
        this operator.
        """
        draft = self._draft
        counts = self._draft.counts
        moved: list[InsertedExchange] = []
        datasets: dict[str, int | None] = {}
        given: dict[str, None] = {}
        places = [at]
        seen = {at}
        for place in places:  # which grows
            arriving = draft.flows.arriving[place]
            requirements = draft.needs.get(place, (None,) * len(arriving))
            for number, (needed, flow) in enumerate(zip(requirements, arriving, strict=True)):
                if needed is None and place in draft.needs:
                    continue  # the count of this input need not be equal
                if (
                    needed is not None
                    and needed.dataset is not None
                    and needed.partitions != target
                ):
                    stream = draft.app.dataset(needed.dataset).stream
                    datasets[needed.dataset] = None if stream is None else self._size(stream)
                wrong = "" if needed is None else describe_mismatch(needed, flow)
                source = counts.inferred.get(flow.stream)
                if counts.partitions[flow.stream] == target and not wrong:
                    continue
                if flow.stream in self._given and not wrong:
                    given[flow.stream] = None
                elif at_sources and source is not None and not wrong:
                    if source.join not in seen:
                        seen.add(source.join)
                        places.append(source.join)
                else:
                    columns = self._columns(place, needed, flow)
                    moved.append(InsertedExchange(place, number, flow.stream, columns, target, ""))
        read = self._read_streams if moved else {}
        sizes = [
            *(self._size(stream) for item in moved for stream in read[item.stream]),
            *datasets.values(),
        ]
        known = [size for size in sizes if size is not None]
        size = sum(known) if len(known) == len(sizes) else None
        return Fix(at, target, tuple(moved), tuple(datasets), tuple(given), size)

    def _columns(self, operator: str, needed: Requirement | None, flow: Flow) -> tuple[str, ...]:
        if needed is not None:
            return _required_columns(self._draft.app, needed)
        flows = (
            flow,
            *self._draft.flows.arriving[operator],
        )  # all merged inputs need the same partitioning
        return next((one.partitioned_by for one in flows if one.partitioned_by), ())

    @cached_property
    def _read_streams(self) -> dict[str, frozenset[str]]:
        """The names of the input streams that the records after each operator come from, by its
        id.
        """
        read: dict[str, frozenset[str]] = {}
        for operator in self._draft.app.operators:
            own = () if operator.spec.reads is None else (operator.spec.reads,)
            sources = [read[source] for source in operator.inputs]
            read[operator.id] = sources[0] if len(sources) == 1 else frozenset(own).union(*sources)
        return read


def _required_columns(app: Application, needed: Requirement) -> tuple[str, ...]:
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
    counts = draft.counts
    streams = draft.streams
    differing = find_conflicts(draft)
    elsewhere = _find_mispartitioned(draft)
    if not differing and not elsewhere:
        return
    problems = [
        (conflict.join, _describe_conflict(conflict, counts, streams))
        for conflict in differing[:_MAX_LISTED]
    ]
    problems += [(where, problem) for where, problem, _ in elsewhere[:_MAX_LISTED]]
    finder = FixFinder(draft)
    same: dict[str, list[str]] = {}  # operators by what to do there
    for at in dict.fromkeys(
        at for conflict in differing[:_MAX_LISTED] for at in conflict.at[:_MAX_LISTED]
    ):
        same.setdefault(_describe_fixes(finder.find(at), streams), []).append(at)
    steps = [f"At {abbreviate(places)}: {step}." for step, places in same.items()]
    in_conflict = {at for conflict in differing for at in conflict.at}
    steps += [step for where, _, step in elsewhere[:_MAX_LISTED] if where not in in_conflict]
    auto = "" if app.strict else " Or set auto_repartition=True on the application."
    step = " ".join(dict.fromkeys(steps)) + auto
    operator = problems[0][0]
    left = [conflict.join for conflict in differing[_MAX_LISTED:]] + [
        where for where, _, _ in elsewhere[_MAX_LISTED:]
    ]
    line = format_place(app.operator(operator).declared_at)
    problem = problems[0][1]
    if len(problems) > 1:
        lines = [
            f"{format_place(app.operator(where).declared_at) or app.name}: {problem}"
            for where, problem in problems
        ]
        more = [f"and {len(left):,} more: {abbreviate(left)}."] if left else []
        joins = len({*(where for where, _ in problems), *left})
        counted = f"{joins:,} joins" if joins > 1 else "1 join"
        problem = "\n- ".join([f"{counted} can't be proven:", *lines, *more])
        line = None
    about: dict[str, Any] = {"application": app.name, "operator": operator, "declared_at": line}
    if differing:
        every = tuple(
            (
                conflict.join,
                tuple(
                    (streams[node].name, streams[node].partitions)
                    for node in conflict.nodes[:_MAX_LISTED]
                ),
            )
            for conflict in differing
        )
        raise PartitionCountMismatchError(
            problem, step, **about, counts=every[0][1], conflicts=every
        )
    dataset = next(
        (needed.dataset for needed in draft.needs[operator] if needed and needed.dataset), None
    )
    raise PlanningError(problem, step, **about, dataset=dataset)


def _describe_conflict(
    conflict: Conflict, counts: Counts, streams: Mapping[str, PlannedStream]
) -> str:
    sides = [streams[node] for node in conflict.nodes]
    others = f" (and {conflict.joins - 1:,} more joins of its table)" if conflict.joins > 1 else ""
    most = find_majority(conflict.nodes, counts)
    majority = ""
    if most is not None and len(most[1]) < len(sides):
        majority = f"; most have {most[0]}: {abbreviate([streams[node].name for node in most[1]])}"
    counted = abbreviate(
        [f"{side.name} has {side.partitions} ({side.count_from})" for side in sides]
    )
    return f"{conflict.join}{others} needs equal partition counts: {counted}{majority}."


def _describe_fixes(fixes: Sequence[Fix], streams: Mapping[str, PlannedStream]) -> str:
    if not fixes:
        return "no single change makes them equal; fix the conflicts before it first"
    first, *others = [_describe_fix(fix, streams) for fix in fixes]
    if others:
        remarks = ["the fewest changes" if fixes[0].size is None else "the cheapest by bytes"]
    else:
        remarks = []
    remarks += [] if fixes[0].tried else ["not verified, because there are many conflicts"]
    how = f" ({'; '.join(remarks)})" if remarks else ""
    return f"{first}{how}" + (f"; or {'; or '.join(others[:3])}" if others else "")


def _describe_fix(fix: Fix, streams: Mapping[str, PlannedStream]) -> str:
    parts = [
        f"move {_stream_label(item.stream, streams)} with {_partition_by(item.columns)} before "
        f"{'it' if item.operator == fix.at else item.operator}"
        for item in fix.moved
    ]
    parts += [
        f"write partition_by(…, partitions={fix.partitions}) at {operator}"
        for operator in fix.given
    ]
    parts += [
        f"rewrite dataset {name!r} in place (adjunct dataset repartition {name} --partitions"
        f" {fix.partitions} --reason …) and declare it with partitions={fix.partitions}"
        for name in fix.datasets
    ]
    return " and ".join(parts) + ("" if fix.size is None else f", {_format_bytes(fix.size)} in all")


def _find_mispartitioned(draft: Draft) -> list[tuple[str, str, str]]:
    """Return (operator, problem, next step) for each input that is not partitioned by the
    required columns and hash.
    """
    app = draft.app
    flows = draft.flows
    streams = draft.streams
    found = []
    for operator, requirements in draft.needs.items():
        for number, (needed, flow) in enumerate(
            zip(requirements, flows.arriving[operator], strict=True)
        ):
            if (
                needed is None
                or needed.columns is None
                or not (why := describe_mismatch(needed, flow))
            ):
                continue
            name = _stream_label(flow.stream, streams)
            problem = f"input {number + 1} ({name}) is not partitioned as the operator needs"
            if needed.dataset is not None:
                by = _by_columns(app.dataset(needed.dataset).partition_by)
                stream = f"stream {name}" if flow.stream in streams else name
                problem = (
                    f"{stream} is not partitioned like dataset {needed.dataset}, which is"
                    f" partitioned by {by}"
                )
            merged = flows.arriving.get(flow.stream, ())
            breaking = [
                (at, one, wrong)
                for at, one in enumerate(merged)
                if (wrong := describe_mismatch(needed, one))
            ]
            if (
                0 < len(breaking) < len(merged)
            ):  # it merges streams, of which some are partitioned as required
                inputs = {
                    f"input {at + 1} of {flow.stream} ({_stream_label(one.stream, streams)})": wrong
                    for at, one, wrong in breaking
                }
                why = "; ".join(f"{each} breaks it: {wrong}" for each, wrong in inputs.items())
                step = (
                    f"Write {_partition_by(needed.columns)} before {flow.stream}, on"
                    f" {abbreviate([*inputs])}."
                )
            else:
                step = f"Write {_partition_by(needed.columns)} before {operator}"
                step += f", on {name}." if len(requirements) > 1 else "."
                step += _suggest_partition_by(app, operator, needed, flow) if number == 0 else ""
            found.append(
                (
                    operator,
                    f"{operator}: {problem}: {why}; needed is {_by_columns(needed.columns)}.",
                    step,
                )
            )
    return found


def _suggest_partition_by(app: Application, operator: str, needed: Requirement, flow: Flow) -> str:
    """Return the advice to use `partition_by=` if records are partitioned by a part of the
    operator's key, else "".
    """
    by = flow.partitioned_by
    if not by or flow.partitioner != SPARK or not set(by) < set(needed.columns or ()):
        return ""
    if not app.operator(operator).spec.takes_partition_by:
        return ""
    given = f'"{by[0]}"' if len(by) == 1 else str(list(by)).replace("'", '"')
    return (
        f" Or give {operator} partition_by={given}, which is how its records are partitioned"
        " already."
    )


def _by_columns(columns: Iterable[str]) -> str:
    return f"({', '.join(columns)}) with {SPARK}"


def _stream_label(node: str, streams: Mapping[str, PlannedStream]) -> str:
    return streams[node].name if node in streams else f"the output of {node}"


def _format_bytes(size: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size = round(size / 1000)
    return f"{size:,.0f} GB"


def _partition_by(columns: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{name}"' for name in columns)
    return f".partition_by({quoted})"
