"""Small words for the planner's tests: streams that exist, and datasets bucketed by `k`."""

from __future__ import annotations

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import Exchange
from dagster_adjunct.orchestration.operators.stream_facts import SPARK, StreamFacts
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan


def catalog(*streams: StreamFacts, **partitions: int) -> dict[str, StreamFacts]:
    """Facts by name; `s1=8` is "lake.s1", keyed by k into 8, with Spark's hash."""
    made = [StreamFacts(f"lake.{name}", count, ("k",), SPARK) for name, count in partitions.items()]
    return {facts.name: facts for facts in (*made, *streams)}


def dataset(name: str, partitions: int | None = None) -> AdjunctDataset:
    """A dataset with key k, from "lake.<name>"; broadcast without `partitions`."""
    return unbounded_dataset(
        name, input=f"lake.{name}", key="k", partitions=partitions, broadcast=partitions is None
    )


def application(**options: object) -> Application:
    return Application("app", **options)  # type: ignore[arg-type]


def exchanges_before(plan: ExecutionPlan, operator_id: str) -> tuple[Exchange, ...]:
    """Return the exchanges that an operator's records go through before it, in order."""
    return tuple(exchange for exchange in plan.exchanges if exchange.operator == operator_id)


def streams_of_join(plan: ExecutionPlan, join: str) -> tuple[str, ...]:
    """Return the names of all streams whose records reach a join, in the order of the plan's
    streams.

    Records may pass other joins and tables, but enter no other stream. The source of the joined
    dataset is last.
    """
    operators = {operator.id: operator for operator in plan.operators}
    begins = {
        edge.operator
        for edge in plan.streams
        if edge.operator and edge.count_from != "auto_repartition"
    }
    moved = {
        (exchange.operator, exchange.input)
        for exchange in plan.exchanges
        if exchange.reason == "auto_repartition"
    }
    feeding = {
        group.join: fed.sinks
        for group in plan.join_groups
        for fed in plan.fed
        if fed.dataset == group.dataset
    }
    reached: set[tuple[str | None, bool]] = set()

    def before(vertex: str) -> list[str]:
        if vertex in begins and vertex != join:
            reached.add((vertex, False))
            return []
        here = [
            source
            for number, source in enumerate(operators[vertex].inputs)
            if (vertex, number) not in moved
        ]
        if len(here) < len(operators[vertex].inputs):
            reached.add((vertex, True))
        return here + list(feeding.get(vertex, ()))

    waiting, seen = [join], {join}
    for vertex in waiting:  # which grows
        after = [source for source in before(vertex) if source not in seen]
        seen.update(after)
        waiting += after
    dataset = next((group.dataset for group in plan.join_groups if group.join == join), None)
    return tuple(
        edge.name
        for edge in plan.streams
        if (edge.operator, edge.count_from == "auto_repartition") in reached
        or (edge.dataset is not None and edge.dataset == dataset)
    )
