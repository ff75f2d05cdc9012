"""With `auto_repartition=True`: puts the cheapest exchanges where a join could not be proven without.

A dataset lies in its buckets already, so it is always the stream that moves. One exchange serves all
later joins that need the same. An intermediate stream whose count is open gets the count that most
of the branches behind it ask for first, so that the fewest of them need another exchange. Streams that
are joined with each other move to the count that most of them have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.stream_facts import SPARK, TASK_NUMBER, Catalog
from dagster_adjunct.orchestration.planner.counts.counts_known_equal import EqualCounts
from dagster_adjunct.orchestration.planner.counts.join_groups import exchange_node
from dagster_adjunct.orchestration.planner.counts.partition_counts import declared_counts
from dagster_adjunct.orchestration.planner.counts.sends_that_feed_joins import Needs
from dagster_adjunct.orchestration.planner.known_records.record_flows import Arriving, Flows, follow

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, Requirement


@dataclass(frozen=True, slots=True)
class Inserted:
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


Insertions = Mapping[tuple[str, int], Inserted]
"""The exchanges by operator and input."""


def repartitioned(app: Application, catalog: Catalog, needs: Needs) -> Insertions:
    """Return the exchanges that make every join of an application provable."""
    counts = declared_counts(app, catalog)
    for stream, partitions in _preferred(app, follow(app, catalog), needs).items():
        if counts[stream] is None:
            counts[stream] = partitions
    equal = EqualCounts(counts)
    inserted: dict[tuple[str, int], Inserted] = {}

    def decide(operator: Operator, arriving: Arriving) -> Arriving:
        moved = list(arriving)
        asked = [(number, needed) for number, needed in enumerate(needs.get(operator.id, ())) if needed]
        wrong = {number: mismatch(needed, arriving[number]) for number, needed in asked}
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
                item = Inserted(operator.id, number, flow.stream, columns, target, why)
                inserted[operator.id, number] = item
                equal.add(item.node, target)
                moved[number] = item.moved(flow)
            together.append(moved[number].stream)
        equal.join(together, target)
        equal.note(operator.id, [flow.stream for flow in moved])
        return tuple(moved)

    follow(app, catalog, decide)
    return inserted


def with_insertions(inserted: Insertions) -> Callable[[Operator, Arriving], Arriving]:
    """Return what puts these exchanges before operators."""

    def moved(operator: Operator, arriving: Arriving) -> Arriving:
        insertions = [(inserted.get((operator.id, number)), flow) for number, flow in enumerate(arriving)]
        return tuple(flow if item is None else item.moved(flow) for item, flow in insertions)

    return moved


def mismatch(needed: Requirement, flow: Flow) -> str:
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


def _preferred(app: Application, flows: Flows, needs: Needs) -> dict[str, int]:
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
            if flow.stream in votes and not mismatch(needed, flow):
                votes[flow.stream][needed.partitions] += 1
            if not needed.feeds:
                met.add(operator.id)
    return {stream: count.most_common(1)[0][0] for stream, count in votes.items() if count}
