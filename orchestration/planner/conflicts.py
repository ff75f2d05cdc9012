"""Refuses what can't be proven: all of it at once, with every stream of each conflict and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.stream_facts import SPARK, TASK_NUMBER, Catalog, stream_size
from dagster_adjunct.orchestration.planner.columns import Arriving, Flows, format_place, trace_flows
from dagster_adjunct.orchestration.planner.partition_counts import (
    EqualCounts,
    Groups,
    Requirements,
    assign_counts,
    dataset_node,
    declared_counts,
    exchange_node,
    find_join_groups,
)
from dagster_adjunct.orchestration.planner.plan import traverse
from dagster_adjunct.resources.errors import PartitionCountMismatchError, PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.operator import Flow, Operator, Requirement, StreamEdge
    from dagster_adjunct.orchestration.planner.partition_counts import Counts

# With `auto_repartition=True`: puts the cheapest exchanges where a join could not be proven without.
#
# A dataset lies in its buckets already, so it is always the stream that moves. One exchange serves all
# later joins that need the same. An intermediate stream whose count is open gets the count that most
# of the branches behind it ask for first, so that the fewest of them need another exchange. Streams that
# are joined with each other move to the count that most of them have.


@dataclass(frozen=True, slots=True)
class InsertedExchange:
    """An exchange before the operator's input of this number (from 0) by `columns`, and why it is needed.

    `stream` is the id that the flow of the records had before; `partitions` None is a count that is open.
    """

    operator: str
    input: int
    stream: str
    columns: tuple[str, ...]
    partitions: int | None
    why: str

    @property
    def node(self) -> str:
        return exchange_node(self.operator, self.input)

    def moved(self, flow: Flow) -> Flow:
        """Return the records behind it."""
        return replace(flow, stream=self.node, partitioned_by=self.columns, partitioner=SPARK, lost_at="")


Insertions = Mapping[tuple[str, int], InsertedExchange]
"""The exchanges by operator and input."""


def plan_repartitioning(app: Application, catalog: Catalog, needs: Requirements) -> Insertions:
    """Return the exchanges that make every join of an application provable."""
    counts = declared_counts(app, catalog)
    for stream, partitions in _preferred_counts(app, trace_flows(app, catalog), needs).items():
        if counts[stream] is None:
            counts[stream] = partitions
    equal = EqualCounts(counts)
    inserted: dict[tuple[str, int], InsertedExchange] = {}

    def decide(operator: Operator, arriving: Arriving) -> Arriving:
        moved = list(arriving)
        asked = [(number, needed) for number, needed in enumerate(needs.get(operator.id, ())) if needed]
        wrong = {number: describe_mismatch(needed, arriving[number]) for number, needed in asked}
        target = next((needed.partitions for _, needed in asked if needed.partitions is not None), None)
        if target is None:
            target = equal.most([arriving[number].stream for number, why in wrong.items() if not why])
        together = []
        for number, needed in asked:
            flow, why = arriving[number], wrong[number]
            if not why:
                why = equal.differs(flow.stream, target)
            if why:
                columns = needed.columns
                if columns is None:
                    assert needed.dataset is not None
                    columns = app.dataset(needed.dataset).partition_by
                item = InsertedExchange(operator.id, number, flow.stream, columns, target, why)
                inserted[operator.id, number] = item
                equal.add(item.node, target)
                moved[number] = item.moved(flow)
            together.append(moved[number].stream)
        equal.join(together, target)
        equal.note(operator.id, [flow.stream for flow in moved])
        return tuple(moved)

    trace_flows(app, catalog, decide)
    return inserted


def apply_insertions(inserted: Insertions) -> Callable[[Operator, Arriving], Arriving]:
    """Return what puts these exchanges before operators."""

    def moved(operator: Operator, arriving: Arriving) -> Arriving:
        insertions = [(inserted.get((operator.id, number)), flow) for number, flow in enumerate(arriving)]
        return tuple(flow if item is None else item.moved(flow) for item, flow in insertions)

    return moved


def describe_mismatch(needed: Requirement, flow: Flow) -> str:
    """Return in words why the stream does not lie as it has to, "" when it does (counts aside)."""
    if flow.partitioner == TASK_NUMBER:
        return "it is broadcast: every task gets all of it"
    if needed.columns is None or (flow.partitioned_by == needed.columns and flow.partitioner == SPARK):
        return ""
    if flow.lost_at:
        return f"{flow.lost_at} leaves open how it is partitioned"
    if not flow.partitioned_by:
        return "it is partitioned by no key"
    return f"it is partitioned by ({', '.join(flow.partitioned_by)}) with {flow.partitioner}"


def _preferred_counts(app: Application, flows: Flows, needs: Requirements) -> dict[str, int]:
    """Return the count that most first joins behind each intermediate stream need; the earliest on a tie."""
    votes: dict[str, Counter[int]] = {}
    met: set[str] = set()  # operators whose records have met a partitioned dataset since their stream began
    for operator in app.operators:
        if operator.begins_stream:
            if operator.spec.role == "intermediate":
                votes[operator.id] = Counter()
            continue
        if not met.isdisjoint(operator.inputs):
            met.add(operator.id)
            continue
        for needed, flow in zip(needs.get(operator.id, ()), flows.arriving[operator.id], strict=False):
            if needed is None or needed.partitions is None:
                continue
            if flow.stream in votes and not describe_mismatch(needed, flow):
                votes[flow.stream][needed.partitions] += 1
            if not needed.feeds:
                met.add(operator.id)
    return {stream: count.most_common(1)[0][0] for stream, count in votes.items() if count}


@dataclass(frozen=True, slots=True)
class Conflict:
    """A join whose streams have different counts. `at` are the operators where they meet: the join itself, sinks to
    its table, or operators that bring streams together before it; `nodes` is all that takes part, those that agree
    and those that feed or read its table included.

    `joins` says how many joins need this, where it is the table that they all read.
    """

    join: str
    at: tuple[str, ...]
    nodes: tuple[str, ...]
    joins: int = 1


def find_conflicts(needs: Requirements, groups: Groups, counts: Counts, streams: Sequence[str]) -> tuple[Conflict, ...]:
    """Return every join that can't be, in the order of definition, each once; `streams` are ids in their order."""
    place = {node: number for number, node in enumerate(streams)}
    reading: dict[str, list[str]] = {}
    feeds: dict[str, str] = {}
    for operator, asked in needs.items():
        for needed in asked:
            if needed is not None and needed.dataset is not None:
                if needed.feeds:
                    feeds[operator] = needed.dataset
                else:
                    reading.setdefault(needed.dataset, []).append(operator)
    relying: dict[str, str] = {}
    for operator, members in groups.items():
        for member in members:
            if member != operator:
                relying.setdefault(member, operator)

    def join_behind(operator: str) -> tuple[str, int]:
        while operator not in needs:
            operator = relying[operator]
        if operator in feeds:
            joins = reading[feeds[operator]]
            return joins[0], len(joins)
        return operator, 1

    at: dict[str, list[str]] = {}
    joins: dict[str, int] = {}
    for operator in counts.conflicts:
        join, number = join_behind(operator)
        at.setdefault(join, []).append(operator)
        joins[join] = max(joins.get(join, 1), number)
    order = {operator: number for number, operator in enumerate(groups)}
    tables = _operators_by_table(needs)
    by_table: dict[tuple[str, ...], tuple[str, ...]] = {}  # joins of one table have the same that take part

    def taking_part(join: str, where: Sequence[str]) -> tuple[str, ...]:
        read = tuple(member for member in groups.get(join, ()) if member in tables)
        if read not in by_table or not read:
            meeting = [operator for table in read for operator in tables[table]]
            involved = _find_involved(dict.fromkeys([join, *where, *meeting]), groups, counts)
            by_table[read] = tuple(sorted(involved, key=lambda node: place[node]))
        return by_table[read]

    return tuple(
        Conflict(join, tuple(where), taking_part(join, where), joins[join])
        for join, where in sorted(at.items(), key=lambda item: order[item[0]])
    )


def find_majority(nodes: Iterable[str], counts: Counts) -> tuple[int, tuple[str, ...]] | None:
    """Return the count that more streams have by themselves than any other, and which; None where there is none."""
    own = [node for node in nodes if node not in counts.inferred]
    most = Counter(counts.partitions[node] for node in own).most_common(2)
    if not most or most[0][1] < 2 or (len(most) > 1 and most[1][1] == most[0][1]):
        return None
    return most[0][0], tuple(node for node in own if counts.partitions[node] == most[0][0])


def _operators_by_table(needs: Requirements) -> dict[str, list[str]]:
    """Return the operators that read a dataset or feed it, by its node."""
    operators_of: dict[str, list[str]] = {}
    for operator, asked in needs.items():
        for name in dict.fromkeys(needed.dataset for needed in asked if needed is not None and needed.dataset):
            operators_of.setdefault(dataset_node(name), []).append(operator)
    return operators_of


def _find_involved(operators: Iterable[str], groups: Groups, counts: Counts) -> list[str]:
    """Return the members of these groups, what was brought together into one, and what inferred counts come from."""
    reached: list[str] = []

    def onward(node: str) -> Iterable[str]:
        source = counts.inferred.get(node)
        return (*groups.get(node, ()), *(() if source is None else (source.source,)))

    traverse((member for operator in operators for member in groups.get(operator, ())), onward, reached.append)
    return [node for node in reached if node not in groups]


# Finds what to change where counts can't agree, the cheapest first.
#
# At the operator where different counts meet, all of them have to become one of those that are there. A stream moves
# before it, which costs the bytes that it holds; a dataset is rewritten in place, which costs those of the stream that
# it
# is made from; an intermediate stream whose count was given gets another, which costs nothing. One whose count was
# inferred follows what it was inferred from, where that is changed. A way that would leave the conflict, or make
# another
# one, is not a way.


_MAX_TRIED = 10
_MAX_TRIED_OPERATORS = 20_000
"""Of so many groups at most it is tried out whether a change settles them, and of fewer where more operators than this
would be planned for it; for the others a change is proposed by its size alone, and is not `tried`."""


@dataclass(frozen=True, slots=True)
class MovedInput:
    """The records in `stream`, spread anew by `columns` before the operator's `input` of this number."""

    operator: str
    input: int
    stream: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fix:
    """What makes the counts at the operator `at` equal: `moved` inputs by these columns into `partitions`, `datasets`
    rewritten into as many, `given` partition_by operators with that count. `size` is in bytes, None where not known."""

    at: str
    partitions: int
    moved: tuple[MovedInput, ...]
    datasets: tuple[str, ...]
    given: tuple[str, ...]
    size: int | None
    tried: bool = True

    @property
    def changes(self) -> tuple[bool, int, int, int]:
        """What a way without sizes is chosen by: the fewest changes, the fewest of datasets, the most partitions."""
        return self.size is None, self.size or 0, len(self.moved) + len(self.datasets), len(self.datasets)


def make_fix_finder(
    app: Application, catalog: Catalog, needs: Requirements, flows: Flows, groups: Groups, counts: Counts
) -> Callable[[str], tuple[Fix, ...]]:
    """Return what gives the ways to mend one of the groups in conflict, the cheapest first."""
    before = set(counts.conflicts)
    tried = set(counts.conflicts[: min(_MAX_TRIED, max(1, _MAX_TRIED_OPERATORS // len(app.operators)))])
    changes = _FixBuilder(app, needs, flows, counts, _Sizes(app, catalog))

    def settles(mend: Fix) -> bool:
        if mend.at not in tried:
            return True
        inserted = {
            (item.operator, item.input): InsertedExchange(
                item.operator, item.input, item.stream, item.columns, mend.partitions, ""
            )
            for item in mend.moved
        }
        declared = declared_counts(app, catalog) | dict.fromkeys(
            (*map(dataset_node, mend.datasets), *mend.given, *(item.node for item in inserted.values())),
            mend.partitions,
        )
        moved = trace_flows(app, catalog, apply_insertions(inserted), earlier=flows) if inserted else flows
        left = set(assign_counts(declared, find_join_groups(app, needs, moved), 1).conflicts)
        return mend.at not in left and left <= before

    def ways(at: str) -> tuple[Fix, ...]:
        targets = dict.fromkeys(counts.partitions[node] for node in groups[at])
        # What a count was inferred from has other joins, too: a change there is proposed only where it is tried out.
        where = (False, True) if at in tried else (False,)
        mended = (changes.mend(at, target, at_sources=at_sources) for target in targets for at_sources in where)
        possible = [mend for mend in dict.fromkeys(mended) if settles(mend)]
        known = all(mend.size is not None for mend in possible)  # sizes of some say nothing
        possible = [replace(mend, size=mend.size if known else None, tried=at in tried) for mend in possible]
        return tuple(sorted(possible, key=lambda mend: (mend.changes, -mend.partitions)))

    return ways


@dataclass(frozen=True, slots=True)
class _FixBuilder:
    """What has to change so that all counts at an operator are equal."""

    app: Application
    needs: Requirements
    flows: Flows
    counts: Counts
    held: _Sizes

    def mend(self, at: str, target: int, *, at_sources: bool) -> Fix:
        """Return what makes all counts at an operator the target: there, or `at_sources` of what is inferred."""
        moved: list[MovedInput] = []
        datasets: dict[str, int | None] = {}
        given: dict[str, int | None] = {}
        places, seen = [at], {at}
        for place in places:  # which grows
            for number, needed, flow in self._asked(place):
                dataset = None if needed is None else needed.dataset
                if dataset is not None and needed is not None and needed.partitions != target:
                    datasets[dataset] = self.held.dataset(dataset)
                wrong = "" if needed is None else describe_mismatch(needed, flow)
                if self.counts.partitions[flow.stream] == target and not wrong:
                    continue
                if flow.stream in self.held.given and not wrong:
                    given[flow.stream] = 0
                    continue
                source = self.counts.inferred.get(flow.stream)
                if at_sources and source is not None and not wrong:
                    if source.join not in seen:
                        seen.add(source.join)
                        places.append(source.join)
                    continue
                moved.append(MovedInput(place, number, flow.stream, self._columns(place, needed, flow)))
        sizes = [*(self.held.stream(item.stream) for item in moved), *datasets.values(), *given.values()]
        known = [size for size in sizes if size is not None]
        size = sum(known) if len(known) == len(sizes) else None
        return Fix(at, target, tuple(moved), tuple(datasets), tuple(given), size)

    def _asked(self, operator: str) -> Iterator[tuple[int, Requirement | None, Flow]]:
        """Yield the inputs that have to agree at an operator, with their numbers and what is asked of them."""
        arriving = self.flows.arriving[operator]
        asked = self.needs.get(operator, (None,) * len(arriving))
        for number, (needed, flow) in enumerate(zip(asked, arriving, strict=True)):
            if needed is not None or operator not in self.needs:
                yield number, needed, flow

    def _columns(self, operator: str, needed: Requirement | None, flow: Flow) -> tuple[str, ...]:
        if needed is None:  # several inputs lie alike, or one moves to where another lies
            return next(
                (one.partitioned_by for one in (flow, *self.flows.arriving[operator]) if one.partitioned_by), ()
            )
        if needed.columns is not None:
            return needed.columns
        assert needed.dataset is not None
        return self.app.dataset(needed.dataset).partition_by


class _Sizes:
    """How many bytes streams and datasets hold, and which streams have been given a count with partition_by."""

    def __init__(self, app: Application, catalog: Catalog) -> None:
        self._app, self._catalog = app, catalog
        self._sizes: dict[str, int | None] = {}
        self._read: Mapping[str, frozenset[str]] = {}
        counts = declared_counts(app, catalog)
        self.given = {
            operator.id
            for operator in app.operators
            if operator.spec.role == "intermediate" and counts[operator.id] is not None
        }

    def dataset(self, name: str) -> int | None:
        stream = self._app.dataset(name).stream
        return None if stream is None else self._of(stream)

    def stream(self, node: str) -> int | None:
        """Return what the inputs hold that the records here come from, each once."""
        if not self._read:
            read: dict[str, frozenset[str]] = {}
            for operator in self._app.operators:
                own = () if operator.spec.reads is None else (operator.spec.reads,)
                sources = [read[source] for source in operator.inputs]
                read[operator.id] = sources[0] if len(sources) == 1 else frozenset(own).union(*sources)
            self._read = read
        sizes = [self._of(stream) for stream in self._read[node]]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def _of(self, stream: str) -> int | None:
        if stream not in self._sizes:
            self._sizes[stream] = stream_size(self._catalog, stream)
        return self._sizes[stream]


_MAX_LISTED = 20
"""How many streams of a conflict are told by name, and how many conflicts of an application in full."""


def check_co_partitioning(
    app: Application,
    catalog: Catalog,
    needs: Requirements,
    flows: Flows,
    groups: Groups,
    counts: Counts,
    edges: Mapping[str, StreamEdge],
) -> None:
    """Raise PlanningError for the joins whose streams don't lie as they have to, all of them in one error.

    It is a PartitionCountMismatchError where counts differ. Equal counts are not enough: the same columns have to
    choose the partition, by the same hash.
    """
    differing = find_conflicts(needs, groups, counts, tuple(edges))
    elsewhere = _find_mispartitioned(app, needs, flows, edges)
    if not differing and not elsewhere:
        return
    ways = make_fix_finder(app, catalog, needs, flows, groups, counts)
    problems = [(conflict.join, _describe_conflict(conflict, counts, edges)) for conflict in differing[:_MAX_LISTED]]
    problems += [(where, problem) for where, problem, _ in elsewhere[:_MAX_LISTED]]
    steps = _group_fixes(
        app, [at for conflict in differing[:_MAX_LISTED] for at in conflict.at[:_MAX_LISTED]], ways, edges
    )
    told = {at for conflict in differing for at in conflict.at}
    steps += [step for where, _, step in elsewhere[:_MAX_LISTED] if where not in told]
    auto = "" if app.strict else " Or set auto_repartition=True on the application."
    step = " ".join(dict.fromkeys(steps)) + auto
    operator = problems[0][0]
    left = [conflict.join for conflict in differing[_MAX_LISTED:]] + [where for where, _, _ in elsewhere[_MAX_LISTED:]]
    line, problem = _declared_line(app, operator), problems[0][1]
    if len(problems) > 1:
        lines = [f"{_declared_line(app, where) or app.name}: {problem}" for where, problem in problems]
        more = [f"and {len(left):,} more: {_abbreviate(left)}."] if left else []
        joins = len({*(where for where, _ in problems), *left})
        counted = f"{joins:,} joins" if joins > 1 else "1 join"
        problem = "\n- ".join([f"{counted} can't be proven:", *lines, *more])
        line = None
    if differing:
        every = tuple((conflict.join, _partition_counts(conflict, edges)) for conflict in differing)
        raise PartitionCountMismatchError(
            problem,
            step,
            application=app.name,
            operator=operator,
            declared_at=line,
            counts=every[0][1],
            conflicts=every,
        )
    dataset = next((needed.dataset for needed in needs[operator] if needed and needed.dataset), None)
    raise PlanningError(problem, step, application=app.name, operator=operator, declared_at=line, dataset=dataset)


def _declared_line(app: Application, operator: str) -> str | None:
    place = app.operator(operator).declared_at
    return None if place is None else format_place(place)


def _partition_counts(conflict: Conflict, edges: Mapping[str, StreamEdge]) -> tuple[tuple[str, int | None], ...]:
    return tuple((edges[node].name, edges[node].partitions) for node in conflict.nodes[:_MAX_LISTED])


def _describe_conflict(conflict: Conflict, counts: Counts, edges: Mapping[str, StreamEdge]) -> str:
    sides = [edges[node] for node in conflict.nodes]
    others = f" (and {conflict.joins - 1:,} more joins of its table)" if conflict.joins > 1 else ""
    most = find_majority(conflict.nodes, counts)
    told = ""
    if most is not None and len(most[1]) < len(sides):
        told = f"; most have {most[0]}: {_abbreviate([edges[node].name for node in most[1]])}"
    counted = _abbreviate([f"{side.name} has {side.partitions} ({side.count_from})" for side in sides])
    return f"{conflict.join}{others} needs equal partition counts: {counted}{told}."


def _group_fixes(
    app: Application, operators: Sequence[str], ways: Callable[[str], Sequence[Fix]], edges: Mapping[str, StreamEdge]
) -> list[str]:
    """Return what to do at these operators, those where it is the same together."""
    together: dict[str, list[str]] = {}
    for at in dict.fromkeys(operators):
        together.setdefault(_describe_fixes(app, ways(at), edges), []).append(at)
    return [f"At {_abbreviate(places)}: {step}." for step, places in together.items()]


def _describe_fixes(app: Application, ways: Sequence[Fix], edges: Mapping[str, StreamEdge]) -> str:
    if not ways:
        return "no single change makes them agree; begin with the conflicts before it"
    first, *others = [_describe_fix(app, mend, edges) for mend in ways]
    remarks = ["the fewest changes" if ways[0].size is None else "the cheapest by bytes"] if others else []
    remarks += [] if ways[0].tried else ["not tried out, as there are many conflicts"]
    how = f" ({'; '.join(remarks)})" if remarks else ""
    return f"{first}{how}" + (f"; or {'; or '.join(others[:3])}" if others else "")


def _describe_fix(app: Application, mend: Fix, edges: Mapping[str, StreamEdge]) -> str:
    parts = [
        f"move {_stream_label(item.stream, edges)} with {_partition_by(item.columns)} before "
        f"{'it' if item.operator == mend.at else item.operator}"
        for item in mend.moved
    ]
    parts += [f"write partition_by(…, partitions={mend.partitions}) at {operator}" for operator in mend.given]
    parts += [
        f"rewrite dataset {name!r} in place (adjunct dataset repartition {name} --partitions {mend.partitions} "
        f"--reason …) and declare it with partitions={mend.partitions}"
        for name in mend.datasets
    ]
    return " and ".join(parts) + ("" if mend.size is None else f", {_format_bytes(mend.size)} in all")


def _find_mispartitioned(
    app: Application, needs: Requirements, flows: Flows, edges: Mapping[str, StreamEdge]
) -> list[tuple[str, str, str]]:
    """Return the operators whose records don't lie by the columns that they have to, why, and what to write."""
    refused = []
    for operator, asked in needs.items():
        for number, (needed, flow) in enumerate(zip(asked, flows.arriving[operator], strict=True)):
            if needed is None or needed.columns is None:
                continue
            why, columns = describe_mismatch(needed, flow), needed.columns
            if why:
                problem = _describe_mispartitioned(app, operator, number, needed, flow, edges)
                breaking = _breaking_inputs(flows, needed, flow)
                if breaking:
                    inputs = [
                        f"input {at + 1} of {flow.stream} ({_stream_label(one.stream, edges)})"
                        for at, one, _ in breaking
                    ]
                    said = [f"{name} breaks it: {why}" for name, (_, _, why) in zip(inputs, breaking, strict=True)]
                    why = "; ".join(said)
                    step = f"Write {_partition_by(columns)} before {flow.stream}, on {_abbreviate(inputs)}."
                    refused.append((operator, f"{operator}: {problem}: {why}; needed is {_by_columns(columns)}.", step))
                    continue
                step = f"Write {_partition_by(columns)} before {operator}" + (
                    f", on {_stream_label(flow.stream, edges)}." if len(asked) > 1 else "."
                )
                if number == 0:
                    step += _suggest_partition_by(app, operator, needed, flow)
                refused.append((operator, f"{operator}: {problem}: {why}; needed is {_by_columns(columns)}.", step))
    return refused


def _breaking_inputs(flows: Flows, needed: Requirement, flow: Flow) -> list[tuple[int, Flow, str]]:
    """Return which inputs of a merge keep its records from lying as they have to, each with why.

    None where it is all of them, or where it is not the merge that breaks it.
    """
    arriving = flows.arriving.get(flow.stream, ())
    wrong = [(at, one, why) for at, one in enumerate(arriving) if (why := describe_mismatch(needed, one))]
    return wrong if len(wrong) < len(arriving) else []


def _suggest_partition_by(app: Application, operator: str, needed: Requirement, flow: Flow) -> str:
    """Return what may be said for records that lie by some columns of the key, to an operator that can go by these."""
    by = flow.partitioned_by
    if not by or flow.partitioner != SPARK or not set(by) < set(needed.columns or ()):
        return ""
    if not app.operator(operator).spec.takes_partition_by:
        return ""
    given = f'"{by[0]}"' if len(by) == 1 else str(list(by)).replace("'", '"')
    return f" Or give {operator} partition_by={given}, so that all its records may lie as they do."


def _describe_mispartitioned(
    app: Application, operator: str, number: int, needed: Requirement, flow: Flow, edges: Mapping[str, StreamEdge]
) -> str:
    name = _stream_label(flow.stream, edges)
    what = f"stream {name}" if flow.stream in edges else name
    if needed.dataset is None:
        return f"input {number + 1} ({name}) does not lie as the operator needs it"
    dataset = app.dataset(needed.dataset)
    lies = f"which is partitioned by {_by_columns(dataset.partition_by)}"
    return f"{what} does not lie as dataset {dataset.name} does, {lies}"


def _by_columns(columns: Iterable[str]) -> str:
    return f"({', '.join(columns)}) with {SPARK}"


def _abbreviate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MAX_LISTED])
    return shown if len(names) <= _MAX_LISTED else f"{shown} and {len(names) - _MAX_LISTED:,} more"


def _stream_label(node: str, edges: Mapping[str, StreamEdge]) -> str:
    return edges[node].name if node in edges else f"what {node} brings together"


def _format_bytes(size: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size = round(size / 1000)
    return f"{size:,.0f} GB"


def _partition_by(columns: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{name}"' for name in columns)
    return f".partition_by({quoted})"
