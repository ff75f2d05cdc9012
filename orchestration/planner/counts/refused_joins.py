"""Refuses what can't be proven: all of it at once, with every stream of each conflict and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.spec.stream_facts import SPARK
from dagster_adjunct.orchestration.planner.counts.auto_repartition import mismatch
from dagster_adjunct.orchestration.planner.counts.join_groups import Groups
from dagster_adjunct.orchestration.planner.counts.joins_in_conflict import Conflict, conflicts_of, majority
from dagster_adjunct.orchestration.planner.counts.mends import Mend, mends
from dagster_adjunct.orchestration.planner.counts.sends_that_feed_joins import Needs
from dagster_adjunct.orchestration.planner.refused_operators.refusals import shown
from dagster_adjunct.resources.errors import PartitionCountMismatchError, PlanningError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.spec.planning_values import Flow, Requirement, StreamEdge
    from dagster_adjunct.orchestration.operators.spec.stream_facts import Catalog
    from dagster_adjunct.orchestration.planner.counts.partition_counts import Counts
    from dagster_adjunct.orchestration.planner.known_records.record_flows import Flows

_SHOWN = 20
"""How many streams of a conflict are told by name, and how many conflicts of an application in full."""


def check_co_partitioned(
    app: Application,
    catalog: Catalog,
    needs: Needs,
    flows: Flows,
    groups: Groups,
    counts: Counts,
    edges: Mapping[str, StreamEdge],
) -> None:
    """Raise PlanningError for the joins whose streams don't lie as they have to, all of them in one error.

    It is a PartitionCountMismatchError where counts differ. Equal counts are not enough: the same columns have to
    choose the partition, by the same hash.
    """
    differing = conflicts_of(needs, groups, counts, tuple(edges))
    elsewhere = _lying_elsewhere(app, needs, flows, edges)
    if not differing and not elsewhere:
        return
    ways = mends(app, catalog, needs, flows, groups, counts)
    problems = [(conflict.join, _problem(conflict, counts, edges)) for conflict in differing[:_SHOWN]]
    problems += [(where, problem) for where, problem, _ in elsewhere[:_SHOWN]]
    steps = _steps(app, [at for conflict in differing[:_SHOWN] for at in conflict.at[:_SHOWN]], ways, edges)
    told = {at for conflict in differing for at in conflict.at}
    steps += [step for where, _, step in elsewhere[:_SHOWN] if where not in told]
    auto = "" if app.strict else " Or set auto_repartition=True on the application."
    step = " ".join(dict.fromkeys(steps)) + auto
    operator = problems[0][0]
    left = [conflict.join for conflict in differing[_SHOWN:]] + [where for where, _, _ in elsewhere[_SHOWN:]]
    line, problem = _line(app, operator), problems[0][1]
    if len(problems) > 1:
        lines = [f"{_line(app, where) or app.name}: {problem}" for where, problem in problems]
        more = [f"and {len(left):,} more: {_some(left)}."] if left else []
        joins = len({*(where for where, _ in problems), *left})
        counted = f"{joins:,} joins" if joins > 1 else "1 join"
        problem = "\n- ".join([f"{counted} can't be proven:", *lines, *more])
        line = None
    if differing:
        every = tuple((conflict.join, _counted(conflict, edges)) for conflict in differing)
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


def _line(app: Application, operator: str) -> str | None:
    place = app.operator(operator).declared_at
    return None if place is None else shown(place)


def _counted(conflict: Conflict, edges: Mapping[str, StreamEdge]) -> tuple[tuple[str, int | None], ...]:
    return tuple((edges[node].name, edges[node].partitions) for node in conflict.nodes[:_SHOWN])


def _problem(conflict: Conflict, counts: Counts, edges: Mapping[str, StreamEdge]) -> str:
    sides = [edges[node] for node in conflict.nodes]
    others = f" (and {conflict.joins - 1:,} more joins of its table)" if conflict.joins > 1 else ""
    most = majority(conflict.nodes, counts)
    told = ""
    if most is not None and len(most[1]) < len(sides):
        told = f"; most have {most[0]}: {_some([edges[node].name for node in most[1]])}"
    counted = _some([f"{side.name} has {side.partitions} ({side.count_from})" for side in sides])
    return f"{conflict.join}{others} needs equal partition counts: {counted}{told}."


def _steps(
    app: Application, operators: Sequence[str], ways: Callable[[str], Sequence[Mend]], edges: Mapping[str, StreamEdge]
) -> list[str]:
    """Return what to do at these operators, those where it is the same together."""
    together: dict[str, list[str]] = {}
    for at in dict.fromkeys(operators):
        together.setdefault(_step(app, ways(at), edges), []).append(at)
    return [f"At {_some(places)}: {step}." for step, places in together.items()]


def _step(app: Application, ways: Sequence[Mend], edges: Mapping[str, StreamEdge]) -> str:
    if not ways:
        return "no single change makes them agree; begin with the conflicts before it"
    first, *others = [_way(app, mend, edges) for mend in ways]
    remarks = ["the fewest changes" if ways[0].size is None else "the cheapest by bytes"] if others else []
    remarks += [] if ways[0].tried else ["not tried out, as there are many conflicts"]
    how = f" ({'; '.join(remarks)})" if remarks else ""
    return f"{first}{how}" + (f"; or {'; or '.join(others[:3])}" if others else "")


def _way(app: Application, mend: Mend, edges: Mapping[str, StreamEdge]) -> str:
    parts = [
        f"move {_name(item.stream, edges)} with {_partition_by(item.columns)} before "
        f"{'it' if item.operator == mend.at else item.operator}"
        for item in mend.moved
    ]
    parts += [f"write partition_by(…, partitions={mend.partitions}) at {operator}" for operator in mend.given]
    parts += [
        f"rewrite dataset {name!r} in place (adjunct dataset repartition {name} --partitions {mend.partitions} "
        f"--reason …) and declare it with partitions={mend.partitions}"
        for name in mend.datasets
    ]
    return " and ".join(parts) + ("" if mend.size is None else f", {_bytes(mend.size)} in all")


def _lying_elsewhere(
    app: Application, needs: Needs, flows: Flows, edges: Mapping[str, StreamEdge]
) -> list[tuple[str, str, str]]:
    """Return the operators whose records don't lie by the columns that they have to, why, and what to write."""
    refused = []
    for operator, asked in needs.items():
        for number, (needed, flow) in enumerate(zip(asked, flows.arriving[operator], strict=True)):
            if needed is None or needed.columns is None:
                continue
            why, columns = mismatch(needed, flow), needed.columns
            if why:
                problem = _elsewhere(app, operator, number, needed, flow, edges)
                breaking = _breaking_inputs(flows, needed, flow)
                if breaking:
                    inputs = [
                        f"input {at + 1} of {flow.stream} ({_name(one.stream, edges)})" for at, one, _ in breaking
                    ]
                    said = [f"{name} breaks it: {why}" for name, (_, _, why) in zip(inputs, breaking, strict=True)]
                    why = "; ".join(said)
                    step = f"Write {_partition_by(columns)} before {flow.stream}, on {_some(inputs)}."
                    refused.append((operator, f"{operator}: {problem}: {why}; needed is {_by(columns)}.", step))
                    continue
                step = f"Write {_partition_by(columns)} before {operator}" + (
                    f", on {_name(flow.stream, edges)}." if len(asked) > 1 else "."
                )
                if number == 0:
                    step += _where_it_is(app, operator, needed, flow)
                refused.append((operator, f"{operator}: {problem}: {why}; needed is {_by(columns)}.", step))
    return refused


def _breaking_inputs(flows: Flows, needed: Requirement, flow: Flow) -> list[tuple[int, Flow, str]]:
    """Return which inputs of a merge keep its records from lying as they have to, each with why.

    None where it is all of them, or where it is not the merge that breaks it.
    """
    arriving = flows.arriving.get(flow.stream, ())
    wrong = [(at, one, why) for at, one in enumerate(arriving) if (why := mismatch(needed, one))]
    return wrong if len(wrong) < len(arriving) else []


def _where_it_is(app: Application, operator: str, needed: Requirement, flow: Flow) -> str:
    """Return what may be said for records that lie by some columns of the key, to an operator that can go by these."""
    by = flow.partitioned_by
    if not by or flow.partitioner != SPARK or not set(by) < set(needed.columns or ()):
        return ""
    if not app.operator(operator).spec.takes_partition_by:
        return ""
    given = f'"{by[0]}"' if len(by) == 1 else str(list(by)).replace("'", '"')
    return f" Or give {operator} partition_by={given}, so that all its records may lie as they do."


def _elsewhere(
    app: Application, operator: str, number: int, needed: Requirement, flow: Flow, edges: Mapping[str, StreamEdge]
) -> str:
    name = _name(flow.stream, edges)
    what = f"stream {name}" if flow.stream in edges else name
    if needed.dataset is None:
        return f"input {number + 1} ({name}) does not lie as the operator needs it"
    dataset = app.dataset(needed.dataset)
    lies = f"which is partitioned by {_by(dataset.partition_by)}"
    return f"{what} does not lie as dataset {dataset.name} does, {lies}"


def _by(columns: Iterable[str]) -> str:
    return f"({', '.join(columns)}) with {SPARK}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN:,} more"


def _name(node: str, edges: Mapping[str, StreamEdge]) -> str:
    return edges[node].name if node in edges else f"what {node} brings together"


def _bytes(size: int) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size = round(size / 1000)
    return f"{size:,.0f} GB"


def _partition_by(columns: tuple[str, ...]) -> str:
    quoted = ", ".join(f'"{name}"' for name in columns)
    return f".partition_by({quoted})"
