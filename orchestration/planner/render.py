"""Plans for people: as text, as a Mermaid flowchart, and the differences between two plans.

A plan as JSON is `ExecutionPlan.to_json` (planner/plan.py).

Operators are numbered in order of definition, so inserting one renumbers those after it. Operators
of two plans are therefore paired by kind, name and summary, and differences use the numbers of the
newer plan. Members of the JSON that only one of the plans has are not compared. Those of a group,
such as `engine`, are compared like those of the plan.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

from dagster_adjunct.orchestration.operators.operator import BROADCAST, Exchange, PlannedStream
from dagster_adjunct.orchestration.planner.planned import (
    FedJoin,
    PlannedAdvance,
    PlannedApplication,
    PlannedOperator,
    Task,
)

Item = Mapping[str, Any]

_TOKEN = re.compile(r"[\w-]+")
_NUMBER = re.compile(r"-\d+(?=-|$)")
# Members of a plan's JSON that are lists: what an item is called in differences, and a template of
# its name.
_ITEMS = {
    "streams": ("stream", "{name} ({place})"),
    "join_groups": ("proven join", "{join}"),
    "exchanges": ("exchange", "at {operator} ({reason})"),
    "tables": ("send to a table", "{table} at {operator}"),
    "output_tables": ("send to an output table", "{table} at {operator}"),
    "fed": ("fed dataset", "{dataset}"),
    "calls": ("call", "of {of} at {operator} ({kind})"),
    "state": ("local table", "{table}"),
    "fed_joins": ("join with what is written here", "{join}"),
    "by_time": ("join by time", "{join}"),
    "waits": ("wait for a dataset", "of {stream} at {join}"),
    "restatements": ("restatement", "of {join}"),
    "needs_spark": ("need of Spark", "at {operator} ({what})"),
    "advances": ("advance of dataset", "{dataset}"),
}
# Members of items that say what is stored now, which is no difference between plans.
_AS_STORED = ("changes", "unchecked", "upstream")
_CHANGE_TEXTS = {
    "summary": "does {new}, did {old}",
    "inputs": "takes the records of {new}, took those of {old}",
    "partitions": "has {new} partitions, had {old}",
    "partitioned_by": "is partitioned by {new}, was by {old}",
    "partitioner": "is partitioned with {new}, was with {old}",
    "count_from": "has its count from {new}, had it from {old}",
    "order": "keeps the order {new}, kept {old}",
    "marks": (
        "marks applied records as {new}, did as {old}: records of an interrupted batch are applied"
        " again, and those that {new} has applied are skipped; name it by marks_as"
    ),
    "streams": "has the streams {new}, had {old}",
    "records": "reads {new} again, read {old}",
    "wait": "lasts {new}, lasted {old}",
    "choice": "has the engine {new}, had {old}",
}


def describe_differences(older: Item, newer: Item) -> tuple[str, ...]:
    """Return the differences between two plan documents (`ExecutionPlan.to_json`), one line
    each.
    """
    pairs = _pair_operators(older.get("operators", ()), newer.get("operators", ()))
    renamed = {}
    for pair in pairs:
        if pair.old is not None and pair.new is not None:
            renamed[pair.old["id"]] = pair.new["id"]
    before = _ungroup(_renumber(older, renamed, older.get("application", "")))
    newer = _ungroup(newer)
    renumbered = {item["id"]: item for item in before.get("operators", ())}
    lines: list[str] = []
    for pair in pairs:
        new = pair.new
        if new is None:
            assert pair.old is not None
            lines.append(f"operator {pair.old['id']} is gone: {pair.old['summary']}")
        elif pair.old is None:
            lines.append(f"operator {new['id']} is new: {new['summary']}")
        else:
            lines += _describe_changes(f"operator {new['id']}", renumbered[new["id"]], new, ("id",))
    for part in _ITEMS:
        if part in before and part in newer:
            lines += _describe_items(part, before[part], newer[part])
    return (*lines, *_describe_other_changes(before, newer))


def _ungroup(plan: Item) -> Item:
    """Return a plan document with the members of its groups instead of the groups."""
    members: dict[str, Any] = {}
    for name, value in plan.items():
        if isinstance(value, Mapping):
            members |= value
        else:
            members[name] = value
    return members


@dataclass(frozen=True, slots=True)
class _Pair:
    """An operator in two plans; None in the one that does not have it."""

    old: Item | None
    new: Item | None


def _pair_operators(older: Sequence[Item], newer: Sequence[Item]) -> list[_Pair]:
    """Return the operators of both plans in pairs whose ids differ at most in the number; first
    those without a partner in the newer plan, then all of the newer plan in its order.

    Operators that also have the same summary find their partners first.
    """
    partners: dict[int, Item] = {}  # the older operator, by the place of the newer one
    unpaired = {item["id"]: item for item in older}
    for signature in (_kind_and_summary, _kind):
        alike: dict[object, list[Item]] = defaultdict(list)
        for old in reversed(unpaired.values()):  # the last one of a list is taken first
            alike[signature(old)].append(old)
        for place, new in enumerate(newer):
            candidates = alike[signature(new)]
            if place not in partners and candidates:
                old = candidates.pop()
                partners[place] = old
                del unpaired[old["id"]]
    pairs = [_Pair(old, None) for old in unpaired.values()]
    for place, new in enumerate(newer):
        pairs.append(_Pair(partners.get(place), new))
    return pairs


def _kind(operator: Item) -> object:
    """Return an operator's id without its number."""
    return _NUMBER.sub("", operator["id"], count=1)


def _kind_and_summary(operator: Item) -> object:
    """Return an operator's id without its number, and its summary."""
    return (_kind(operator), operator["summary"])


def _renumber(value: Any, renamed: Mapping[str, str], application: str) -> Any:
    """Return a plan's JSON with operator ids replaced (old: new), also within texts and names of
    streams.
    """

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


def _describe_items(part: str, older: Sequence[Item], newer: Sequence[Item]) -> Iterator[str]:
    """Yield a line for each item of a list that is gone, new or different."""
    before = _by_label(part, older)
    after = _by_label(part, newer)
    yield from (f"{label} is gone" for label in before if label not in after)
    for label, item in after.items():
        if label in before:
            yield from _describe_changes(label, before[label], item, _AS_STORED)
        elif item.get("partitions") is None:
            yield f"{label} is new"
        else:
            yield (
                f"{label} is new: {item['partitions']} partitions{_by(item.get('partitioned_by'))}"
            )


def _by_label(part: str, items: Sequence[Item]) -> dict[str, Item]:
    """Return the items of the list `part` by the names that differences have for them."""
    kind, template = _ITEMS[part]
    result: dict[str, Item] = {}
    for item in items:
        is_state = part == "join_groups" and item.get("dataset") is None
        what = "state at" if is_state else kind
        place = item.get("role") if item.get("dataset") is None else item["dataset"]
        name = f"{what} {template.format(**{**item, 'place': place})}"
        label = name
        number = 1
        while label in result:  # for example several exchanges at one operator
            number += 1
            label = f"{name} ({number})"
        result[label] = item
    return result


def _describe_changes(what: str, old: Item, new: Item, without: Sequence[str]) -> Iterator[str]:
    """Yield a line for each member that both items have with different values, except members in
    `without`.
    """
    for name in new:
        if name not in old or name in without:
            continue
        before = _to_lists(old[name])
        after = _to_lists(new[name])
        if before == after:
            continue
        if name == "columns" and isinstance(before, list) and isinstance(after, list):
            yield f"{what}: {_describe_changed_columns(before, after)}"
            continue
        wording = _CHANGE_TEXTS.get(name, f"{name} is {{new}}, was {{old}}")
        yield f"{what} {wording.format(new=_format_value(after), old=_format_value(before))}"


def _describe_changed_columns(before: Sequence[object], after: Sequence[object]) -> str:
    """Return which columns were added and removed, in words."""
    added = [str(column) for column in after if column not in before]
    removed = [str(column) for column in before if column not in after]
    parts = []
    if added:
        parts.append(f"new columns {', '.join(added)}")
    if removed:
        parts.append(f"columns {', '.join(removed)} are gone")
    if not parts:
        return f"the columns are in another order: {_format_value(after)}"
    return "; ".join(parts)


def _describe_other_changes(before: Item, newer: Item) -> Iterator[str]:
    """Yield a line for each difference in notes, tasks, and members that are no lists."""
    compared_apart = ("format", "operators", "tasks", "notes", *_ITEMS)
    yield from _describe_changes("the plan:", before, newer, compared_apart)
    old_notes = dict.fromkeys(map(str, before.get("notes", ())))
    new_notes = dict.fromkeys(map(str, newer.get("notes", ())))
    yield from (f"note is new: {note}" for note in new_notes if note not in old_notes)
    yield from (f"note is gone: {note}" for note in old_notes if note not in new_notes)
    old = _to_lists(before.get("tasks", []))
    new = _to_lists(newer.get("tasks", []))
    if len(old) != len(new):
        yield f"there are {len(new)} tasks, there were {len(old)}"
    elif old != new:
        pairs = zip(old, new, strict=True)
        names = [after["name"] for task_before, after in pairs if task_before != after]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"tasks own other partitions or datasets: {', '.join(names[:3])}{more}"


def _to_lists(value: Any) -> Any:
    """Return the value with lists for tuples, as JSON has them."""
    if isinstance(value, list | tuple):
        return [_to_lists(item) for item in value]
    return value


def _format_value(value: Any) -> str:
    """Return a value of a plan as text for differences."""
    if value is None or value == []:
        return "none"
    if isinstance(value, list):
        return ", ".join(_format_value(item) for item in value)
    if isinstance(value, Mapping):  # an item inside one: the input of a restatement, for example
        return "; ".join(f"{name} {_format_value(each)}" for name, each in value.items())
    return str(value)


LONGEST_LINE = 48
# Of the nodes of a flowchart: the brackets that give their shape, and the colours of fill and
# stroke.
_BRACKETS = {
    "box": ("[", "]"),
    "stream": ("([", "])"),
    "dataset": ("[(", ")]"),
    "table": ("[[", "]]"),
}
_COLOURS = {
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


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a flowchart: the names of its shape and colour, and its lines of text."""

    shape: str
    colour: str
    lines: tuple[str, ...]

    def format(self, node_id: str) -> str:
        """Return the line that declares the node in Mermaid."""
        opened, closed = _BRACKETS[self.shape]
        text = "<br/>".join(_escape(_truncate(line, LONGEST_LINE)) for line in self.lines)
        return f'  {node_id}{opened}"{text}"{closed}:::{self.colour}'


@dataclass(frozen=True, slots=True)
class _Link:
    """A link between two nodes, named by their keys, with the exchange on it."""

    source: str
    target: str
    exchange: Exchange | None = None

    def format(self, ids: Mapping[str, str]) -> str:
        """Return the line that declares the link in Mermaid."""
        arrow = "-->"
        if self.exchange is not None:
            by = _by(self.exchange.partitioned_by)
            arrow = f'==>|"{_escape(f"exchange: {self.exchange.partitions}{by}")}"|'
        return f"  {ids[self.source]} {arrow} {ids[self.target]}"


def render_mermaid(plan: PlannedApplication) -> str:
    """Return a Mermaid flowchart from top to bottom; the links with an exchange are thick and
    say so.
    """
    nodes = _draw_nodes(plan)
    links = _draw_links(plan)
    ids = {key: f"n{number}" for number, key in enumerate(nodes)}
    chart = ["flowchart TD"]
    chart += [node.format(ids[key]) for key, node in nodes.items()]
    chart += [link.format(ids) for link in links]
    used = {node.colour for node in nodes.values()}
    for colour, (fill, stroke) in _COLOURS.items():
        if colour in used:
            chart.append(f"  classDef {colour} fill:{fill},stroke:{stroke},color:#1f2328")
    marked = [str(number) for number, link in enumerate(links) if link.exchange is not None]
    if marked:
        chart.append(f"  linkStyle {','.join(marked)} stroke:#ea580c")
    return "\n".join(chart) + "\n"


def _draw_nodes(plan: PlannedApplication) -> dict[str, _Node]:
    """Return the operators, and what they read, join and write, by the keys of their nodes."""
    # By operator, the `special` of `_choose_colour`.
    special = {call.operator: "write" for call in plan.calls if call.kind == "sink"}
    for exchange in plan.exchanges:
        if exchange.reason in ("partition_by", "broadcast"):
            special.setdefault(exchange.operator, "exchange")
    known = _draw_known(plan)
    nodes: dict[str, _Node] = {}
    for item in plan.operators:
        if item.reads is not None:
            nodes.setdefault(_outside(item.reads), _draw_outside(item.reads, known))
        partitions = _partitions(item.partitions) + _by(item.partitioned_by)
        label = (item.id, " ".join(item.summary.split()), partitions)
        nodes[item.id] = _Node("box", _choose_colour(item, special.get(item.id)), label)
        for name in (item.looks_up, item.writes):
            if name is not None:
                nodes.setdefault(_outside(name), _draw_outside(name, known))
    return nodes


def _choose_colour(item: PlannedOperator, special: str | None) -> str:
    """Return the name of an operator's colour in `_COLOURS`.

    `special` is "write" if it calls a user's function as a sink, "exchange" if it repartitions or
    broadcasts its records, else None.
    """
    if item.reads is not None:
        return "input"
    if item.writes is not None or special == "write":
        return "write"
    if item.looks_up is not None:
        return "join"
    if special is not None:
        return special
    if len(item.inputs) > 1:
        return "several"
    return "transform"


def _outside(name: str) -> str:
    """Return the key of the node of a stream, dataset or table."""
    return f"outside {name}"


def _draw_known(plan: PlannedApplication) -> dict[str, _Node]:
    """Return the nodes of the planned tables, streams and datasets, by name."""
    known = {}
    for send in plan.tables:
        known[send.table] = _Node("table", "outside", (send.table,))
    for output in plan.output_tables:
        known[output.table] = _Node("table", "outside", (output.table,))
    # A dataset comes last, and replaces a stream of the same name.
    for stream in sorted(plan.streams, key=lambda stream: stream.dataset is not None):
        shape = "stream" if stream.dataset is None else "dataset"
        name = stream.dataset or stream.name
        known[name] = _Node(shape, "outside", (name, _describe_count(stream)))
    return known


def _draw_outside(name: str, known: Mapping[str, _Node]) -> _Node:
    """Return the node of a stream, dataset, table or function. If the plan does not list it, the
    node has no partitions.
    """
    if name in known:
        return known[name]
    shape = "table"
    if "." in name:  # as SYSTEM.STREAM; tables that are only read, and functions, have no dot
        shape = "stream"
    return _Node(shape, "outside", (name,))


def _draw_links(plan: PlannedApplication) -> list[_Link]:
    """Return the links between operators, and from and to what they read, join and write."""
    arriving: dict[tuple[str, int], Exchange] = {}  # by operator and number of its input
    written: dict[str, Exchange] = {}
    for exchange in plan.exchanges:
        if exchange.reason in _TARGET_REASONS:
            written[exchange.operator] = exchange
        else:
            arriving[exchange.operator, exchange.input] = exchange
    links: list[_Link] = []
    for item in plan.operators:
        if item.reads is not None:
            links.append(_Link(_outside(item.reads), item.id))
        for number, source in enumerate(item.inputs):
            links.append(_Link(source, item.id, arriving.get((item.id, number))))
        if item.looks_up is not None:
            links.append(_Link(_outside(item.looks_up), item.id))
        if item.writes is not None:
            links.append(_Link(item.id, _outside(item.writes), written.get(item.id)))
    return links


def _describe_count(stream: PlannedStream) -> str:
    """Return the partitions of a stream in words."""
    if stream.partitions is None:
        return "broadcast"
    if stream.role in BROADCAST:
        return f"{_partitions(stream.partitions)}, read whole by every task"
    return _partitions(stream.partitions) + _by(stream.partitioned_by)


def _partitions(number: int) -> str:
    """Return a number of partitions in words: "1 partition"."""
    return f"{number} partition{'' if number == 1 else 's'}"


def _by(columns: Sequence[str] | None) -> str:
    """Return " by COLUMNS"; "" without columns."""
    return f" by {', '.join(columns)}" if columns else ""


def _truncate(line: str, length: int) -> str:
    """Return the line, shortened to this length."""
    if len(line) <= length:
        return line
    return line[: length - 1] + "…"


def _escape(text: str) -> str:
    """Return the text with characters that mean something in Mermaid, Markdown or HTML as
    numbered entities.
    """
    return "".join(c if (c.isalnum() or c in _PLAIN) else f"#{ord(c)};" for c in text)


AS_OF_NOTE = (
    "A record later than the dataset's last change of its key is joined with the last known entry."
)
STAYS_NOTE = (
    "that is written does not change when the dataset learns of an earlier change later; a replay"
    " writes it again, to an output stream as further records."
)
_WITHOUT_ENTRY = {
    "null": "nothing",
    "oldest": "the oldest entry",
    "error": "fails the batch",
    "fail": "fails the batch",
}
_MAX_DEPTH = 20
"""How deep nested branches are indented at most."""


_Table: TypeAlias = dict[str, str | Callable[[Any], object]]
"""The columns of a text table of items: {title: the item's member to show, or a function of the
item}.
"""


def render_text(plan: PlannedApplication) -> str:
    """Return a plan as text: operators, streams, joins, exchanges, tables, calls, state, tasks
    and notes.
    """
    joins = [group for group in plan.join_groups if group.dataset is not None]
    states = [group for group in plan.join_groups if group.dataset is None]
    fed = []
    if joins:
        for one in plan.fed:
            fed.append(f"  {one.dataset} ({one.partitions}) is fed by {', '.join(one.streams)}")
    replays = [f"  A replay leaves {item.table} {item.replay}." for item in plan.tables]
    written = [
        f"  local table {item.table}, written at {', '.join(item.sends)}. {item.replay}"
        for item in plan.state
    ]
    lines = [
        f"Application {plan.application}",
        *_section("Operators", _draw_graph(plan.operators)),
        *_section("Streams", _table(_STREAMS, plan.streams)),
        *_section(
            "Joins that need no exchange on the dataset's side",
            _table({"join": "join", **_GROUPS}, joins) + fed,
        ),
        *_section(
            "Operators with state, which needs no exchange",
            _table({"at": "join", **_GROUPS}, states),
        ),
        *_section("Exchanges", _table(_EXCHANGES, plan.exchanges)),
        *_section("Tables", _table(_TABLES, plan.tables) + replays),
        *_section("Output tables", _list_output_tables(plan)),
        *_section("Calls", _table(_CALLS, plan.calls)),
        *_section("State", written),
        *_section(
            "Joins with what the application itself writes", _table(_FED_JOINS, plan.fed_joins)
        ),
    ]
    if plan.by_time:
        rows = _table(_BY_TIME, plan.by_time)
        lines += _section("Joins by the records' own times", [*rows, *_note_as_of(plan)])
    lines += _section("Waits for datasets", _table(_WAITS, plan.late_data.waits))
    lines += _section("Results that follow later changes of datasets", _list_restated(plan))
    lines += ["", "Tasks", *_describe_tasks(plan.tasks)]
    lines += _describe_engine(plan)
    lines += _section("Notes", [f"  - {note}" for note in (*plan.notes, *plan.stored_notes)])
    return "\n".join(lines) + "\n"


def _list_output_tables(plan: PlannedApplication) -> list[str]:
    """Return lines about the output tables, with changes of columns if the plan was compared."""
    lines = _table(_OUTPUT_TABLES, plan.output_tables)
    for item in plan.output_tables:
        name = f"{item.table} at {item.operator}"
        if item.changes:
            lines.append(f"  The next commit to {name}: {'; '.join(item.changes)}.")
        elif item.changes is not None:
            lines.append(f"  The next commit to {name} changes no columns.")
        if item.unchecked:
            lines.append(f"  NOT COMPARED with the records: {name}. {item.unchecked}")
        if item.upstream:
            lines.append(
                f"  A replay of {' or '.join(item.upstream)} replaces no rows of {name}: it sends"
                " new records, whose rows come next to the earlier ones. Replay it into a new"
                " stream and table."
            )
    return lines


def _note_as_of(plan: PlannedApplication) -> list[str]:
    """Return lines about the output of joins by time if their datasets learn of earlier changes
    later; joins whose results are restated have lines of their own.
    """
    restating = [one.join for one in plan.late_data.restatements]
    stays = [one.join for one in plan.by_time if one.join not in restating]
    lines = [f"  {AS_OF_NOTE}"]
    if stays:
        whose = "" if not restating else f" of {', '.join(stays)}"
        lines.append(f"  Output{whose} {STAYS_NOTE}")
    return lines


def _list_restated(plan: PlannedApplication) -> list[str]:
    """Return lines about the joins whose results follow later changes of their datasets."""
    lines = []
    for restated in plan.late_data.restatements:
        for each in restated.inputs:
            how = "an index of" if each.indexed else "reading"
            found = f"by {how} {', '.join(each.keys)}"
            if each.time is not None:
                found += f", within the changed times of {each.time}"
            lines.append(
                f"  {restated.join}: {restated.records} in {each.stream}, found {found}, when"
                f" {restated.dataset} changes"
            )
        lines += [f"    it {cost}" for cost in restated.costs]
        lines += [f"    {effect}" for effect in restated.effects]
    return lines


def _section(title: str, lines: Sequence[str]) -> list[str]:
    """Return lines under a title; nothing if there are none."""
    return ["", title, *lines] if lines else []


def _table(columns: _Table, items: Sequence[Any]) -> list[str]:
    """Return a table of items with a header; nothing if there are none."""
    if not items:
        return []
    rows = [list(columns)]
    for item in items:
        cells = []
        for member in columns.values():
            value = member(item) if callable(member) else getattr(item, member)
            cells.append(_cell(value))
        rows.append(cells)
    return _align(rows)


def _describe_engine(plan: PlannedApplication) -> list[str]:
    """Return lines about what needs Spark; nothing for the engine spark."""
    engine = plan.engine
    if engine.choice != "auto":
        return []
    advances = [_describe_advance(advance) for advance in engine.advances]
    if not engine.needs_spark:
        without = "  Small batches are computed without Spark."
        return _section("Engine", [without, *advances])
    needs = [f"  - {need.operator}: {need.what}" for need in engine.needs_spark]
    return _section("Engine: all batches need Spark", needs + advances)


def _describe_advance(advance: PlannedAdvance) -> str:
    """Return a line about how a dataset is advanced."""
    dataset = advance.dataset
    if advance.needs_spark:
        needs = "; ".join((*advance.needs_spark, *advance.uses_spark))
        return f"  Dataset {dataset} is advanced with Spark, because of {needs}."
    if advance.uses_spark:
        return (
            f"  Dataset {dataset} is advanced with Spark unless the master is none, because of"
            f" {'; '.join(advance.uses_spark)}."
        )
    return f"  Dataset {dataset}: few records are advanced without Spark."


def _cell(value: object) -> str:
    """Return a value of a plan as text. None is shown as "broadcast": only those datasets have
    no partition count.
    """
    if isinstance(value, tuple):
        return ", ".join(value) or "-"
    if value is None:
        return "broadcast"
    return str(value)


def _describe_input(exchange: Exchange) -> str:
    """Return the operator of an exchange, with the input if it is not the first."""
    if exchange.input:
        return f"{exchange.operator}, input {exchange.input + 1}"
    return exchange.operator


def _describe_seen(join: FedJoin) -> str:
    """Return in which batch a join sees what the application sends to its dataset."""
    if join.sees != "both":
        return join.sees
    return f"this batch, up to {join.last_send}; later sends in the next batch"


_GROUPS: _Table = {"partitions": "partitions", "by": "partitioned_by", "streams": "streams"}
_STREAMS: _Table = {
    "name": "name",
    "role": "role",
    "partitions": "partitions",
    "by": "partitioned_by",
    "partitioner": lambda stream: stream.partitioner if stream.partitioned_by else "-",
    "count from": "count_from",
}
_EXCHANGES: _Table = {
    "at": _describe_input,
    "reason": "reason",
    "partitions": "partitions",
    "by": "partitioned_by",
    "why": "why",
}
_TABLES: _Table = {"at": "operator", "table": "table", "order": "order", "why": "why"}
_OUTPUT_TABLES: _Table = {
    "at": "operator",
    "table": "table",
    "on replay": "on_replay",
    "effect": "replay",
}
_CALLS: _Table = {"at": "operator", "what": "kind", "of": "of", "guarantee": "guarantee"}
_FED_JOINS: _Table = {"join": "join", "dataset": "dataset", "sees it in": _describe_seen}
_BY_TIME: _Table = {
    "join": "join",
    "as of": "as_of",
    "without a time": lambda item: _WITHOUT_ENTRY[item.on_null_time],
    "before the history": lambda item: _WITHOUT_ENTRY[item.before_history],
    "dataset": lambda item: f"{item.dataset}: {item.known}",
}
_WAITS: _Table = {
    "input": "stream",
    "join": "join",
    "waits until": lambda item: f"{item.dataset} knows {item.time}, by {item.known_by}",
    "how long": "wait",
}


def _draw_graph(operators: Sequence[PlannedOperator]) -> list[str]:
    """Return the graph as lines of text: chains go down, branches are indented and begin with "+".

    An operator with several inputs is drawn after the last of them; after the others, "-> ID"
    refers to it.
    """
    following: dict[str, list[PlannedOperator]] = defaultdict(list)
    for operator in operators:
        for source in operator.inputs:
            following[source].append(operator)
    lines: list[str] = []
    missing = {operator.id: len(operator.inputs) for operator in operators}  # inputs to draw
    waiting = []
    for operator in reversed(operators):
        if not operator.inputs:
            waiting.append(_Drawn(operator, 0, begins_branch=False))
    while waiting:  # a stack: its last operator is drawn next
        drawn = waiting.pop()
        operator = drawn.operator
        missing[operator.id] -= 1
        has_further_inputs = missing[operator.id] > 0
        if has_further_inputs:
            lines.append(f"  {drawn.indent}-> {operator.id}")
            continue
        summary = _truncate(" ".join(operator.summary.split()), 80)
        lines.append(
            f"  {drawn.indent}{operator.id}  [{operator.partitions}{_by(operator.partitioned_by)}] "
            f" {summary}"
        )
        after = following[operator.id]
        has_branches = len(after) > 1
        depth = drawn.depth + 1 if has_branches else drawn.depth
        for each in reversed(after):
            waiting.append(_Drawn(each, depth, begins_branch=has_branches))
    return lines


@dataclass(frozen=True, slots=True)
class _Drawn:
    """An operator in a drawn graph, and how deep it is in branches."""

    operator: PlannedOperator
    depth: int
    begins_branch: bool

    @property
    def indent(self) -> str:
        """What stands before the operator in its line."""
        depth = min(self.depth, _MAX_DEPTH)
        if self.begins_branch:
            return "|  " * (depth - 1) + "+  "
        return "|  " * depth


def _describe_tasks(tasks: Sequence[Task]) -> list[str]:
    """Return lines about the tasks: one for consecutive tasks that own partitions or buckets of
    the same things.
    """
    lines: list[str] = []
    if tasks and tasks[0].name.startswith("Task"):  # else each is "Partition i" (assign_tasks)
        lines.append(f"  task i modulo {len(tasks)} owns partition i, and bucket i of each dataset")
    last = -1
    for owned, alike in groupby(tasks, _describe_owned):
        first, *others = alike
        last += 1 + len(others)
        name = f"{first.name} to {last}" if others else first.name
        lines.append(f"  {name}: {owned}")
    return lines


def _describe_owned(task: Task) -> str:
    """Return the names of the inputs and of the datasets of which a task owns partitions or
    buckets.
    """
    streams = dict.fromkeys(ssp.qualified_stream for ssp in task.ssps)
    buckets = dict.fromkeys(bucket.rpartition(".")[0] for bucket in task.buckets)
    parts = [f"input {name}" for name in streams if name not in task.broadcast]
    parts += [f"dataset {name}" for name in buckets]
    if task.broadcast:
        parts.append(f"all of {', '.join(task.broadcast)}")
    return "; ".join(parts) or "intermediate records only"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of cells as lines of aligned columns; the last column is not padded."""
    *aligned, last = zip(*rows, strict=True)
    columns = []
    for cells in aligned:
        width = max(map(len, cells))
        columns.append([cell.ljust(width) for cell in cells])
    return [f"  {'  '.join(row)}".rstrip() for row in zip(*columns, last, strict=True)]
