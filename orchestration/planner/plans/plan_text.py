"""Draws a plan as plain text, for `adjunct plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.operators.spec.planning_values import Exchange, StreamEdge
    from dagster_adjunct.orchestration.planner.plans.plan_parts import (
        FedDataset,
        FedJoin,
        JoinByTime,
        JoinGroup,
        PlannedCall,
        PlannedOperator,
        PlannedState,
        PlannedTable,
        Task,
    )

AHEAD = (
    "A record that is later than anything its dataset has heard of its key meets the last entry known. What is written "
    "stays as it is when the dataset learns of an earlier change later; a replay writes it anew."
)
_DEEPEST = 20
"""How many branches of branches are drawn with an indentation of their own."""


def render(
    application: str,
    operators: Sequence[PlannedOperator],
    streams: Sequence[StreamEdge],
    join_groups: Sequence[JoinGroup],
    fed: Sequence[FedDataset],
    exchanges: Sequence[Exchange],
    tables: Sequence[PlannedTable],
    calls: Sequence[PlannedCall],
    state: Sequence[PlannedState],
    fed_joins: Sequence[FedJoin],
    by_time: Sequence[JoinByTime],
    tasks: Sequence[Task],
    notes: Sequence[str],
) -> str:
    """Return a plan as lines: the graph, streams, joins and what feeds them, exchanges, tables, state, tasks, notes."""
    lines = [f"Application {application}", "", "Operators", *_graph(operators), "", "Streams"]
    rows = [("name", "role", "partitions", "by", "partitioner", "count from")]
    for edge in streams:
        count = "broadcast" if edge.partitions is None else str(edge.partitions)
        by = ", ".join(edge.partitioned_by) or "-"
        partitioner = edge.partitioner if edge.partitioned_by else "-"
        rows.append((edge.name, edge.role, count, by, partitioner, edge.count_from))
    lines += _table(rows)
    with_datasets = [group for group in join_groups if group.dataset is not None]
    if with_datasets:
        lines += ["", "Joins that need no exchange on the dataset's side", *_meeting("join", with_datasets)]
        for fed_dataset in fed:
            lines.append(
                f"  {fed_dataset.dataset} ({fed_dataset.partitions}) is fed by {', '.join(fed_dataset.streams)}"
            )
    with_state = [group for group in join_groups if group.dataset is None]
    if with_state:
        lines += ["", "Streams that meet and windows, whose state needs no exchange", *_meeting("at", with_state)]
    if exchanges:
        lines += ["", "Exchanges"]
        lines += _table(
            [("at", "reason", "partitions", "by", "why")]
            + [
                (_at(item), item.reason, str(item.partitions), ", ".join(item.partitioned_by) or "-", item.why)
                for item in exchanges
            ]
        )
    if tables:
        lines += ["", "Tables"]
        lines += _table(
            [("at", "table", "order", "why"), *((item.operator, item.table, item.order, item.why) for item in tables)]
        )
        lines += [f"  A replay leaves {item.table} {item.replay}." for item in tables]
    if calls:
        lines += ["", "Calls"]
        lines += _table(
            [
                ("at", "what", "of", "guarantee"),
                *((item.operator, item.kind, item.of, item.guarantee) for item in calls),
            ]
        )
    if state:
        lines += ["", "State"]
        lines += [f"  local table {item.table}, written at {', '.join(item.sends)}. {item.replay}" for item in state]
    if fed_joins:
        lines += ["", "Joins with what the application itself writes"]
        lines += _table(
            [("join", "dataset", "meets it"), *((item.join, item.dataset, _met(item)) for item in fed_joins)]
        )
    if by_time:
        lines += ["", "Joins by the records' own times"]
        lines += _table([("join", "as of", "without a time", "before the history", "dataset"), *map(_by_time, by_time)])
        lines.append(f"  {AHEAD}")
    lines += ["", "Tasks", *_tasks(tasks)]
    if notes:
        lines += ["", "Notes", *(f"  - {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _meeting(named: str, groups: Sequence[JoinGroup]) -> list[str]:
    rows = [
        (group.join, str(group.partitions), ", ".join(group.partitioned_by), ", ".join(group.streams))
        for group in groups
    ]
    return _table([(named, "partitions", "by", "streams"), *rows])


def _graph(operators: Sequence[PlannedOperator]) -> list[str]:
    """Chains go straight down; a branch is drawn deeper, and begins with +. What has several inputs is drawn behind the
    last of them.
    """
    following: dict[str, list[PlannedOperator]] = {}
    for operator in operators:
        for source in operator.inputs:
            following.setdefault(source, []).append(operator)
    lines: list[str] = []
    missing = {operator.id: len(operator.inputs) for operator in operators}
    waiting = [(operator, 0, False) for operator in reversed(operators) if not operator.inputs]
    while waiting:
        operator, depth, begins = waiting.pop()
        drawn = min(depth, _DEEPEST)
        deeper = "|  " * (drawn - 1) + "+  " if begins else "|  " * drawn
        missing[operator.id] -= 1
        if missing[operator.id] > 0:
            lines.append(f"  {deeper}-> {operator.id}")
            continue
        by = f" by {', '.join(operator.partitioned_by)}" if operator.partitioned_by else ""
        place = f"[{operator.partitions}{by}]"
        lines.append(f"  {deeper}{operator.id}  {place}  {_short(operator.summary)}")
        after = following.get(operator.id, [])
        if len(after) == 1:
            waiting.append((after[0], depth, False))
        else:
            waiting.extend((branch, depth + 1, True) for branch in reversed(after))
    return lines


def _tasks(tasks: Sequence[Task]) -> list[str]:
    """Tasks that own partitions of the same streams are shown as one line."""
    lines: list[str] = []
    if tasks and tasks[0].name.startswith("Task"):
        lines.append(f"  partition i, and bucket i of a dataset, is of task i modulo {len(tasks)}")
    start = 0
    for end in range(1, len(tasks) + 1):
        if end < len(tasks) and _owned(tasks[end]) == _owned(tasks[start]):
            continue
        first, last = start, end - 1
        start = end
        name = tasks[first].name if first == last else f"{tasks[first].name} to {last}"
        inputs, buckets = _owned(tasks[first])
        parts = [f"input {name}" for name in inputs] + [f"dataset {name}" for name in buckets]
        if tasks[first].broadcast:
            parts.append(f"all of {', '.join(tasks[first].broadcast)}")
        lines.append(f"  {name}: {'; '.join(parts) or 'intermediate records only'}")
    return lines


def _owned(task: Task) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (
        tuple(
            dict.fromkeys(name for name in (ssp.qualified_stream for ssp in task.ssps) if name not in task.broadcast)
        ),
        tuple(dict.fromkeys(bucket.rpartition(".")[0] for bucket in task.buckets)),
    )


def _met(item: FedJoin) -> str:
    if item.meets == "both":
        return f"this batch, up to {item.last_send}; what is sent after it in the next batch"
    return item.meets


def _by_time(item: JoinByTime) -> tuple[str, ...]:
    words = {"null": "nothing", "oldest": "the oldest entry", "error": "fails the batch", "fail": "fails the batch"}
    early, timeless = words[item.before_history], words[item.on_null_time]
    return item.join, item.as_of, timeless, early, f"{item.dataset}: {item.known}"


def _at(exchange: Exchange) -> str:
    return exchange.operator if not exchange.input else f"{exchange.operator}, input {exchange.input + 1}"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    *aligned, last = zip(*rows, strict=True)
    columns = []
    for cells in aligned:
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    return [f"  {'  '.join(row)}".rstrip() for row in zip(*columns, last, strict=True)]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"
