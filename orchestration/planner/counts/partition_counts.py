"""Partition counts: what is declared, what follows from joins, and what is left to a default.

The rules are SAMZA-1889's. In every join group all counts must be equal. A stream whose count is open
and that is joined with one whose count is known gets that count; this may decide another group, so
it goes on until nothing changes. What is still open then gets the default.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.planning_values import BROADCAST, PlanContext
from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog, facts_of
from dagster_adjunct.orchestration.planner.counts.join_groups import dataset_node
from dagster_adjunct.orchestration.planner.counts.task_groups import task_count
from dagster_adjunct.resources.errors import PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner.known_records.record_flows import Flows

MOST_BY_DEFAULT = 256
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
    inputs = {name: facts_of(catalog, name, "the application").partitions for name in divided}
    known = inputs | {name: output.partitions for name, output in app.outputs.items()}
    if not known:
        return 1, "no input or output has a count"
    largest = max(known, key=lambda name: known[name])
    if known[largest] > MOST_BY_DEFAULT:
        return MOST_BY_DEFAULT, f"most of inputs and outputs, {largest}, capped at {MOST_BY_DEFAULT}"
    return known[largest], f"most of inputs and outputs, {largest}"


def assign(counts: Mapping[str, int | None], groups: Mapping[str, Sequence[str]], default: int) -> Counts:
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


def with_broadcast(app: Application, counts: Counts) -> Counts:
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


def with_merged(app: Application, flows: Flows, counts: Counts) -> Counts:
    """Return the counts with those of operators that bring streams together and whose count no join needs to know: the
    most of their inputs."""
    partitions = dict(counts.partitions)
    for operator in app.operators:
        if flows.together(operator) and operator.id not in partitions:
            partitions[operator.id] = max(partitions[flow.stream] for flow in flows.arriving[operator.id])
    return replace(counts, partitions=partitions)
