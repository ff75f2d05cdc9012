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
    return unbounded_dataset(name, input=f"lake.{name}", key="k", partitions=partitions, broadcast=partitions is None)


def application(**options: object) -> Application:
    return Application("app", **options)  # type: ignore[arg-type]


def exchanges_before(plan: ExecutionPlan, operator_id: str) -> tuple[Exchange, ...]:
    """Return the exchanges that an operator's records go through before it, in order."""
    return tuple(exchange for exchange in plan.exchanges if exchange.operator == operator_id)
