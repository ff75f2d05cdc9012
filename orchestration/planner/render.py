"""Plans for people: as text, as a Mermaid flowchart, and the differences between two plans.

Operators are numbered in order of definition, so inserting one renumbers those after it. Differences therefore pair
operators by kind, name and summary, and use the numbers of the newer plan. Members that only one of the two documents
has are not compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dagster_adjunct.orchestration.operators.operator import BROADCAST, Exchange, StreamEdge

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.planner.plan import (
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

Item = Mapping[str, Any]

_TOKEN = re.compile(r"[\w-]+")
_NUMBER = re.compile(r"-\d+(?=-|$)")
_SINGULAR = {
    "exchanges": "exchange",
    "tables": "send to a table",
    "streams": "stream",
    "state": "local table",
    "fed_joins": "join with what is written here",
    "by_time": "join by time",
    "fed": "fed dataset",
    "calls": "call",
}
_CHANGE_TEXTS = {
    "summary": "does {new}, did {old}",
    "inputs": "takes the records of {new}, took those of {old}",
    "partitions": "has {new} partitions, had {old}",
    "partitioned_by": "is partitioned by {new}, was by {old}",
    "partitioner": "is partitioned with {new}, was with {old}",
    "count_from": "has its count from {new}, had it from {old}",
    "order": "keeps the order {new}, kept {old}",
    "marks": "marks applied records as {new}, did as {old}: records of an interrupted batch are applied again, and "
    "those that {new} has applied are skipped; name it by marks_as",
    "streams": "has the streams {new}, had {old}",
}


def describe_differences(older: Item, newer: Item) -> tuple[str, ...]:
    """Return the differences between two plan documents (`ExecutionPlan.to_json`), one line each."""
    pairs = _pair_operators(older.get("operators", ()), newer.get("operators", ()))
    renamed = {old["id"]: new["id"] for old, new in pairs if old is not None and new is not None}
    before = _renumber(older, renamed, older.get("application", ""))
    lines = list(_operators(pairs, before))
    for part, named in _ITEM_NAMES.items():
        if part in before and part in newer:
            lines += _items(part, before[part], newer[part], named)
    lines += _other_changes(before, newer)
    return tuple(lines)


def _pair_operators(older: Sequence[Item], newer: Sequence[Item]) -> list[tuple[Item | None, Item | None]]:
    """Return pairs (old, new) of operators with the same id apart from its number, and None for unpaired ones."""
    paired: dict[int, Item] = {}
    left = {item["id"]: item for item in older}
    for signature in (_same_work, _same_kind):
        waiting: dict[object, list[Item]] = defaultdict(list)
        for item in reversed(left.values()):
            waiting[signature(item)].append(item)
        for number, item in enumerate(newer):
            if number not in paired and waiting[signature(item)]:
                paired[number] = waiting[signature(item)].pop()
                del left[paired[number]["id"]]
    pairs: list[tuple[Item | None, Item | None]] = [(paired.get(number), item) for number, item in enumerate(newer)]
    return [*((item, None) for item in left.values()), *pairs]


def _same_work(item: Item) -> object:
    return _same_kind(item), item["summary"]


def _same_kind(item: Item) -> object:
    return _NUMBER.sub("", item["id"], count=1)


def _renumber(value: Any, renamed: Mapping[str, str], application: str) -> Any:
    """Return a document with operator ids replaced by those of the other plan, also within texts and stream names."""

    def token(match: re.Match[str]) -> str:
        for prefix in ("", f"{application}-", f"{application}-before-"):
            name = match[0].removeprefix(prefix)
            if match[0].startswith(prefix) and name in renamed:
                return prefix + renamed[name]
        return match[0]

    if isinstance(value, str):
        return _TOKEN.sub(token, value)
    if isinstance(value, Mapping):
        return {name: _renumber(item, renamed, application) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_renumber(item, renamed, application) for item in value]
    return value


def _operators(pairs: Sequence[tuple[Item | None, Item | None]], before: Item) -> Iterator[str]:
    there = {item["id"]: item for item in before.get("operators", ())}
    for old, new in pairs:
        if new is None and old is not None:
            yield f"operator {old['id']} is gone: {old['summary']}"
        elif new is not None and old is None:
            yield f"operator {new['id']} is new: {new['summary']}"
        elif new is not None:
            yield from _describe_changes(f"operator {new['id']}", there[new["id"]], new, ("id",))


def _items(part: str, older: Sequence[Item], newer: Sequence[Item], named: Any) -> Iterator[str]:
    before, after = _by_name(older, named), _by_name(newer, named)
    yield from (f"{_singular(part, item)} {name} is gone" for name, item in before.items() if name not in after)
    for name, item in after.items():
        what = f"{_singular(part, item)} {name}"
        if name not in before:
            yield f"{what} is new{_describe_partitions(item)}"
        else:
            yield from _describe_changes(what, before[name], item, ())


def _singular(part: str, item: Item) -> str:
    if part == "join_groups":
        return "proven join" if item.get("dataset") is not None else "state at"
    return _SINGULAR[part]


def _by_name(items: Sequence[Item], named: Any) -> dict[str, Item]:
    result: dict[str, Item] = {}
    for item in items:
        name, number = named(item), 2
        while name in result:  # more than one exchange at an operator, say
            name, number = f"{named(item)} ({number})", number + 1
        result[name] = item
    return result


def _stream(item: Item) -> str:
    return f"{item['name']} ({item['role']})" if item.get("dataset") is None else f"{item['name']} ({item['dataset']})"


def _join(item: Item) -> str:
    return str(item["join"])


def _exchange(item: Item) -> str:
    return f"at {item['operator']} ({item['reason']})"


def _table_item(item: Item) -> str:
    return f"{item['table']} at {item['operator']}"


def _state(item: Item) -> str:
    return str(item["table"])


def _fed(item: Item) -> str:
    return str(item["dataset"])


def _call(item: Item) -> str:
    return f"of {item['of']} at {item['operator']} ({item['kind']})"


_ITEM_NAMES = {
    "streams": _stream,
    "join_groups": _join,
    "exchanges": _exchange,
    "tables": _table_item,
    "fed": _fed,
    "calls": _call,
    "state": _state,
    "fed_joins": _join,
}


def _describe_partitions(item: Item) -> str:
    if item.get("partitions") is None:
        return ""
    by = ", ".join(item.get("partitioned_by") or ())
    return f": {item['partitions']} partitions{f' by {by}' if by else ''}"


def _describe_changes(what: str, old: Item, new: Item, without: Sequence[str]) -> Iterator[str]:
    """Yield a line for each member that both have and that differs."""
    for name in (name for name in new if name in old and name not in without):
        before, after = _plain(old[name]), _plain(new[name])
        if before == after:
            continue
        if name == "columns" and isinstance(before, list) and isinstance(after, list):
            yield f"{what}: {_columns(before, after)}"
            continue
        wording = _CHANGE_TEXTS.get(name, f"{name} is {{new}}, was {{old}}")
        yield f"{what} {wording.format(new=_format_value(after), old=_format_value(before))}"


def _columns(before: list[Any], after: list[Any]) -> str:
    added = [str(name) for name in after if name not in before]
    gone = [str(name) for name in before if name not in after]
    parts = [f"new columns {', '.join(added)}"] if added else []
    parts += [f"columns {', '.join(gone)} are gone"] if gone else []
    return "; ".join(parts) or f"the columns are in another order: {', '.join(map(str, after))}"


def _other_changes(before: Item, newer: Item) -> Iterator[str]:
    told = ("format", "operators", "tasks", "notes", *_ITEM_NAMES)
    yield from _describe_changes("the plan:", before, newer, told)
    for what, there, other in (("is new", newer, before), ("is gone", before, newer)):
        known = set(map(str, other.get("notes", ())))
        yield from (f"note {what}: {note}" for note in there.get("notes", ()) if str(note) not in known)
    old, new = _plain(before.get("tasks", [])), _plain(newer.get("tasks", []))
    if len(old) != len(new):
        yield f"there are {len(new)} tasks, there were {len(old)}"
    elif old != new:
        differing = [after["name"] for one, after in zip(old, new, strict=True) if one != after]
        yield f"tasks own other partitions or datasets: {_first(differing)}"


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _format_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_format_value, value)) or "none"
    return "none" if value is None else str(value)


Shape = Literal["box", "stream", "dataset", "table"]
Colour = Literal["input", "transform", "join", "exchange", "several", "write", "outside"]

LONGEST_LINE = 48
_SHAPES: dict[Shape, tuple[str, str]] = {
    "box": ("[", "]"),
    "stream": ("([", "])"),
    "dataset": ("[(", ")]"),
    "table": ("[[", "]]"),
}
_FILL_AND_STROKE: dict[Colour, tuple[str, str]] = {
    "input": ("#dbeafe", "#2563eb"),
    "transform": ("#f3f4f6", "#6b7280"),
    "join": ("#dcfce7", "#16a34a"),
    "exchange": ("#ffedd5", "#ea580c"),
    "several": ("#e0e7ff", "#4f46e5"),
    "write": ("#fae8ff", "#a21caf"),
    "outside": ("#ffffff", "#57606a"),
}
_PLAIN = frozenset(" .,:()+-=_/")
_TARGET_REASONS = ("output", "remote table", "dataset", "local table")


class _Node(NamedTuple):
    shape: Shape
    colour: Colour
    lines: tuple[str, ...]


class _Link(NamedTuple):
    source: str
    target: str
    exchange: Exchange | None = None


def render_mermaid(
    operators: Sequence[PlannedOperator],
    streams: Sequence[StreamEdge],
    exchanges: Sequence[Exchange],
    tables: Sequence[PlannedTable],
    calls: Sequence[PlannedCall],
) -> str:
    """Return a Mermaid flowchart from top to bottom; links with an exchange are marked."""
    counts = {edge.name: edge for edge in streams if edge.dataset is None}
    datasets = {edge.dataset: edge for edge in streams if edge.dataset is not None}
    remote = {table.table for table in tables}
    before = {(item.operator, item.input): item for item in exchanges if item.reason not in _TARGET_REASONS}
    written = {item.operator: item for item in exchanges if item.reason in _TARGET_REASONS}
    moves = {item.operator for item in exchanges if item.reason in ("partition_by", "broadcast")}
    calling = {call.operator for call in calls if call.kind == "sink"}
    nodes: dict[str, _Node] = {}
    links: list[_Link] = []

    def touched(name: str) -> str:
        key = f"outside {name}"
        if key not in nodes:
            edge = datasets.get(name) or counts.get(name)
            is_stream = name in counts or (name not in datasets and name not in remote and "." in name)
            shape: Shape = "dataset" if name in datasets else "stream" if is_stream else "table"
            nodes[key] = _Node(shape, "outside", (name, _count(edge)) if edge else (name,))
        return key

    for item in operators:
        if item.reads is not None:
            links.append(_Link(touched(item.reads), item.id))
        nodes[item.id] = _operator_node(item, moves, calling)
        for number, source in enumerate(item.inputs):
            links.append(_Link(source, item.id, before.get((item.id, number))))
        if item.looks_up is not None:
            links.append(_Link(touched(item.looks_up), item.id))
        if item.writes is not None:
            links.append(_Link(item.id, touched(item.writes), written.get(item.id)))
    return _flowchart(nodes, links)


def _operator_node(item: PlannedOperator, moves: set[str], calling: set[str]) -> _Node:
    colours: list[tuple[bool, Colour]] = [
        (item.reads is not None, "input"),
        (item.writes is not None or item.id in calling, "write"),
        (item.looks_up is not None, "join"),
        (item.id in moves, "exchange"),
        (len(item.inputs) > 1, "several"),
        (True, "transform"),
    ]
    colour = next(colour for applies, colour in colours if applies)
    summary = " ".join(item.summary.split())
    return _Node("box", colour, (item.id, summary, _partitions(item.partitions) + _by(item.partitioned_by)))


def _count(edge: StreamEdge) -> str:
    if edge.partitions is None:
        return "broadcast"
    if edge.role in BROADCAST:
        return f"{_partitions(edge.partitions)}, read whole by every task"
    return _partitions(edge.partitions) + _by(edge.partitioned_by)


def _partitions(number: int) -> str:
    return f"{number} partition{'' if number == 1 else 's'}"


def _by(columns: Sequence[str] | None) -> str:
    return f" by {', '.join(columns)}" if columns else ""


def _flowchart(nodes: dict[str, _Node], links: Sequence[_Link]) -> str:
    ids = {key: f"n{number}" for number, key in enumerate(nodes)}
    lines = ["flowchart TD"]
    for key, node in nodes.items():
        before, after = _SHAPES[node.shape]
        text = "<br/>".join(_escape(_truncate_label(line)) for line in node.lines)
        lines.append(f'  {ids[key]}{before}"{text}"{after}:::{node.colour}')
    for source, target, moved in links:
        arrow = "-->"
        if moved is not None:
            arrow = f'==>|"{_escape(f"exchange: {moved.partitions}{_by(moved.partitioned_by)}")}"|'
        lines.append(f"  {ids[source]} {arrow} {ids[target]}")
    used = {node.colour for node in nodes.values()}
    for colour, (fill, stroke) in _FILL_AND_STROKE.items():
        if colour in used:
            lines.append(f"  classDef {colour} fill:{fill},stroke:{stroke},color:#1f2328")
    marked = [str(number) for number, link in enumerate(links) if link.exchange is not None]
    if marked:
        lines.append(f"  linkStyle {','.join(marked)} stroke:#ea580c")
    return "\n".join(lines) + "\n"


def _truncate_label(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else line[: LONGEST_LINE - 1] + "…"


def _escape(text: str) -> str:
    """Replace characters with a meaning in Mermaid, Markdown or HTML by numbered entities."""
    return "".join(c if (c.isalnum() or c in _PLAIN) else f"#{ord(c)};" for c in text)


AS_OF_NOTE = (
    "A record later than the dataset's last change of its key is joined with the last known entry. Output that is "
    "written does not change when the dataset learns of an earlier change later; a replay rewrites it."
)
_MAX_DEPTH = 20
"""The maximum depth of nested branches that are indented."""


def render_text(
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
    """Return a plan as text: operators, streams, joins, exchanges, tables, calls, state, tasks and notes."""
    lines = [f"Application {application}", "", "Operators", *_graph_lines(operators), "", "Streams"]
    rows = [("name", "role", "partitions", "by", "partitioner", "count from")]
    for edge in streams:
        count = "broadcast" if edge.partitions is None else str(edge.partitions)
        by = ", ".join(edge.partitioned_by) or "-"
        partitioner = edge.partitioner if edge.partitioned_by else "-"
        rows.append((edge.name, edge.role, count, by, partitioner, edge.count_from))
    lines += _aligned_rows(rows)
    with_datasets = [group for group in join_groups if group.dataset is not None]
    if with_datasets:
        lines += ["", "Joins that need no exchange on the dataset's side", *_join_rows("join", with_datasets)]
        for fed_dataset in fed:
            lines.append(
                f"  {fed_dataset.dataset} ({fed_dataset.partitions}) is fed by {', '.join(fed_dataset.streams)}"
            )
    with_state = [group for group in join_groups if group.dataset is None]
    if with_state:
        lines += ["", "Stream joins and windows, whose state needs no exchange", *_join_rows("at", with_state)]
    if exchanges:
        lines += ["", "Exchanges"]
        lines += _aligned_rows(
            [("at", "reason", "partitions", "by", "why")]
            + [
                (
                    _format_exchange_place(item),
                    item.reason,
                    str(item.partitions),
                    ", ".join(item.partitioned_by) or "-",
                    item.why,
                )
                for item in exchanges
            ]
        )
    if tables:
        lines += ["", "Tables"]
        lines += _aligned_rows(
            [("at", "table", "order", "why"), *((item.operator, item.table, item.order, item.why) for item in tables)]
        )
        lines += [f"  A replay leaves {item.table} {item.replay}." for item in tables]
    if calls:
        lines += ["", "Calls"]
        lines += _aligned_rows(
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
        lines += _aligned_rows(
            [("join", "dataset", "meets it"), *((item.join, item.dataset, _format_meets(item)) for item in fed_joins)]
        )
    if by_time:
        lines += ["", "Joins by the records' own times"]
        lines += _aligned_rows(
            [("join", "as of", "without a time", "before the history", "dataset"), *map(_by_time, by_time)]
        )
        lines.append(f"  {AS_OF_NOTE}")
    lines += ["", "Tasks", *_task_lines(tasks)]
    if notes:
        lines += ["", "Notes", *(f"  - {note}" for note in notes)]
    return "\n".join(lines) + "\n"


def _join_rows(named: str, groups: Sequence[JoinGroup]) -> list[str]:
    rows = [
        (group.join, str(group.partitions), ", ".join(group.partitioned_by), ", ".join(group.streams))
        for group in groups
    ]
    return _aligned_rows([(named, "partitions", "by", "streams"), *rows])


def _graph_lines(operators: Sequence[PlannedOperator]) -> list[str]:
    """Return the graph as lines: chains go down, branches are indented and begin with "+".

    An operator with several inputs is drawn after the last of them.
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
        drawn = min(depth, _MAX_DEPTH)
        deeper = "|  " * (drawn - 1) + "+  " if begins else "|  " * drawn
        missing[operator.id] -= 1
        if missing[operator.id] > 0:
            lines.append(f"  {deeper}-> {operator.id}")
            continue
        by = f" by {', '.join(operator.partitioned_by)}" if operator.partitioned_by else ""
        place = f"[{operator.partitions}{by}]"
        lines.append(f"  {deeper}{operator.id}  {place}  {_truncate_summary(operator.summary)}")
        after = following.get(operator.id, [])
        if len(after) == 1:
            waiting.append((after[0], depth, False))
        else:
            waiting.extend((branch, depth + 1, True) for branch in reversed(after))
    return lines


def _task_lines(tasks: Sequence[Task]) -> list[str]:
    """Return the tasks as lines, one for consecutive tasks that own partitions of the same streams."""
    lines: list[str] = []
    if tasks and tasks[0].name.startswith("Task"):
        lines.append(f"  task i modulo {len(tasks)} owns partition i, and bucket i of each dataset")
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


def _format_meets(item: FedJoin) -> str:
    if item.meets == "both":
        return f"this batch, up to {item.last_send}; later sends in the next batch"
    return item.meets


def _by_time(item: JoinByTime) -> tuple[str, ...]:
    words = {"null": "nothing", "oldest": "the oldest entry", "error": "fails the batch", "fail": "fails the batch"}
    early, timeless = words[item.before_history], words[item.on_null_time]
    return item.join, item.as_of, timeless, early, f"{item.dataset}: {item.known}"


def _format_exchange_place(exchange: Exchange) -> str:
    return exchange.operator if not exchange.input else f"{exchange.operator}, input {exchange.input + 1}"


def _aligned_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    *aligned, last = zip(*rows, strict=True)
    columns = []
    for cells in aligned:
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    return [f"  {'  '.join(row)}".rstrip() for row in zip(*columns, last, strict=True)]


def _truncate_summary(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 80 else line[:79] + "…"
