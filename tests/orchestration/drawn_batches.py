"""Drawn applications of what small batches do without Spark: drawn, described to Adjunct, and
computed in plain Python.

All records have the columns of `COLUMNS`, so that any operator may follow any other. Values that a
join or a lookup finds are put into v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    bounded_dataset,
    unbounded_dataset,
)
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.drawn_columns import COLUMNS, Expression, Row, expression

DATASETS: dict[str, AdjunctDataset] = {
    "places": bounded_dataset("places", input="lake.places", key="k", partitions=2),
    "prices": bounded_dataset(
        "prices", input="lake.prices", key=("g", "n"), partitions=2, partition_by="g"
    ),
    "members": unbounded_dataset("members", input="lake.members", key="k", partitions=3),
    "rates": unbounded_dataset("rates", input="lake.rates", key=("g", "n"), partitions=2),
}
KEYS: tuple[tuple[str, ...], ...] = ((), ("k",), ("g", "n"))
"""Of outputs with one, two and three partitions."""
REFUSED = 4
"""The greatest v of a table that refuses some."""
LOOKED_UP = {"known": ("k",), "listed": ("g", "n")}
Key = tuple[Any, ...]
Found = Callable[[str, Key], Mapping[str, Any] | None]
"""Returns the entry or record that a node joins with a key."""
_STEPS = (
    "filter",
    "filter",
    "map",
    "with_columns",
    "merge",
    "partition_by",
    "join",
    "join",
    "lookup",
    "send",
    "table",
)


class Source(NamedTuple):
    """A position in an input."""

    stream: str
    partition: int
    offset: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record on its way: its columns, where it came from, and through which inputs of merges."""

    row: Row
    tombstone: bool
    source: Source
    branch: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """An operator, and what is known of the records after it.

    `streams` are those that hold their positions, `made_of` the one input that they are made of.
    `ordered` says that the records of each k are in the order of one partition. A table that
    `skips` ignores what it has when it is read again; one that `refuses` has dead letters.
    """

    kind: str
    name: str
    inputs: tuple[int, ...]
    made: Mapping[str, Expression] = field(default_factory=dict)
    number: int = 1
    how: Any = "left"
    on: tuple[str, ...] = ()
    target: str = ""
    streams: frozenset[str] = frozenset()
    made_of: str | None = None
    ordered: bool = False
    tombstones: bool = False
    skips: bool = False
    refuses: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """An application: its nodes, inputs first, each after those that it takes records from."""

    nodes: tuple[Node, ...]
    max_batch_records: int

    def of_kind(self, *kinds: str) -> list[Node]:
        return [node for node in self.nodes if node.kind in kinds]

    def has_order(self, node: Node) -> bool:
        """Whether the order of the records of an output is known: that of their positions in the
        inputs.
        """
        return self.nodes[node.inputs[0]].streams <= {"a", "b"}


def draw(chosen: Random) -> Drawn:
    """Return one or two inputs, a few operators, and an output for each of those that nobody
    takes records from.
    """
    nodes: list[Node] = []
    for name in ("a", "b")[: chosen.choice((1, 1, 2))]:
        number, tombstones = chosen.randrange(1, 4), chosen.random() < 0.5
        facts: dict[str, Any] = {
            "streams": frozenset({name}),
            "made_of": f"lake.{name}",
            "ordered": name == "a",
        }
        nodes.append(Node("input", name, (), number=number, tombstones=tombstones, **facts))
    for place in range(chosen.randrange(1, 7)):
        nodes.append(_draw_node(chosen.choice(_STEPS), f"n{place}", nodes, chosen))
    taken = {source for node in nodes for source in node.inputs}
    for leaf in [number for number in range(len(nodes)) if number not in taken]:
        if nodes[leaf].kind not in ("send", "table"):
            nodes.append(
                _made_of(nodes, Node("send", f"out{leaf}", (leaf,), number=chosen.randrange(1, 4)))
            )
    return Drawn(tuple(nodes), chosen.choice((2, 5, 12)))


def _draw_node(kind: str, name: str, nodes: Sequence[Node], chosen: Random) -> Node:
    inputs = tuple(
        chosen.randrange(len(nodes))
        for _ in range(chosen.choice((2, 2, 3)) if kind == "merge" else 1)
    )
    node = _made_of(
        nodes,
        Node(
            kind, name, inputs, number=chosen.randrange(1, 4), how=chosen.choice(("left", "inner"))
        ),
    )
    names = chosen.sample(list(COLUMNS), chosen.randrange(1, 4))
    match kind:
        case "filter":
            return replace(node, made={"": expression("boolean", chosen)})
        case "map" | "with_columns":
            made = {each: expression(COLUMNS[each], chosen) for each in names}
            return replace(node, made=made, ordered=node.ordered and "k" not in made)
        case "partition_by":
            return replace(node, on=chosen.choice((("k",), ("g",), ("g", "n"), ("t",))))
        case "join" | "lookup":
            target = chosen.choice(list(DATASETS if kind == "join" else LOOKED_UP))
            size = len(DATASETS[target].key if kind == "join" else LOOKED_UP[target])
            return replace(node, target=target, on=(chosen.choice("kg"), "n")[:size])
        case "table" if node.tombstones and not node.ordered:
            return replace(node, kind="filter", made={"": expression("boolean", chosen)})
        case "table":
            skips = (
                node.made_of is not None and node.streams <= {"a", "b"} and chosen.random() < 0.3
            )
            node = replace(node, on=("k", "n")[: chosen.choice((1, 1, 2))], skips=skips)
            if node.ordered and chosen.random() < 0.4:
                return replace(node, how="put", refuses=chosen.random() < 0.5)
            total = expression("int", chosen)
            made = {
                "total": Expression(f"coalesce({total.text}, 0)", lambda row: total.value(row) or 0)
            }
            if node.ordered:
                made["g"] = expression("string", chosen)
            return replace(node, made=made, how="update")
    return node


def _made_of(nodes: Sequence[Node], node: Node) -> Node:
    """Return the node with what is known of its records."""
    before = [nodes[number] for number in node.inputs]
    streams = frozenset().union(*(each.streams for each in before))
    made_of = before[0].made_of if len(streams) == 1 else None
    return replace(
        node,
        streams=frozenset({node.name}) if node.kind == "send" else streams,
        made_of=made_of,
        ordered=before[0].ordered and len(before) == 1 and made_of is not None,
        tombstones=any(each.tombstones for each in before),
    )


# -- described


def described(drawn: Drawn, tables: Mapping[str, RemoteTable[Any, Any, Any]]) -> Application:
    """Return the application; `tables` are those of its lookups and tables, by node."""
    app = Application(
        "drawn", max_batch_records=drawn.max_batch_records, auto_repartition=True, engine="auto"
    )
    joined = {
        name: app.table(DATASETS[name])
        for name in dict.fromkeys(node.target for node in drawn.of_kind("join"))
    }
    streams: list[MessageStream] = []
    for node in drawn.nodes:
        if node.kind == "input":
            streams.append(app.input_stream(f"lake.{node.name}", default_offset="oldest"))
            continue
        stream, *others = [streams[source] for source in node.inputs]
        match node.kind:
            case "filter":
                after = stream.filter(node.made[""].text)
            case "map" if node.number == 3:
                kept = [name for name in COLUMNS if name not in node.made]
                after = stream.map(
                    "*", *[f"{made.text} as new_{name}" for name, made in node.made.items()]
                )
                after = after.select(*[f"new_{name} as {name}" for name in node.made], *kept)
            case "map":
                texts = {name: f"{made.text} as {name}" for name, made in node.made.items()}
                after = stream.map(
                    *[texts.get(name, name) for name in sorted(COLUMNS, reverse=node.number > 1)]
                )
            case "with_columns":
                after = stream.with_columns(**{name: made.text for name, made in node.made.items()})
            case "merge":
                after = stream.merge(*others)
            case "partition_by":
                after = stream.partition_by(*node.on, partitions=node.number)
            case "join" | "lookup":
                key = DATASETS[node.target].key if node.kind == "join" else LOOKED_UP[node.target]
                table: Any = (
                    joined[node.target] if node.kind == "join" else app.table(tables[node.name])
                )
                on = dict(zip(node.on, key, strict=True))
                after = stream.join(table, on=on, how=node.how, select=["x"], name=node.name)
                after = after.select("k", "g", "n", "coalesce(x, v) as v", "t")
            case "send":
                key = KEYS[node.number - 1]
                after = stream.send_to(
                    app.output_stream(f"lake.{node.name}", partitions=node.number, key=key or None)
                )
            case "table" if node.how == "put":
                letters = (
                    app.output_stream(f"lake.{node.name}-letters", partitions=1)
                    if node.refuses
                    else None
                )
                at_most = 1000 if node.refuses else None
                table = app.table(tables[node.name])
                after = stream.send_to(
                    table, on_null_key="skip", dead_letters=letters, at_most=at_most
                )
            case _:
                after = stream.update(
                    app.table(tables[node.name]),
                    set={"g": node.made["g"].text} if "g" in node.made else None,
                    add={"total": node.made["total"].text, "times": "1"},
                    if_missing={"total": "100", "g": "'new'"} if node.number == 1 else [],
                    on_null_key="skip",
                )
        streams.append(after)
    return app


# -- in plain Python


@dataclass
class Left:
    """What batches leave: the records sent to each stream, in order, and the records of each
    table by key.
    """

    sent: dict[str, list[Record]] = field(default_factory=dict)
    tables: dict[str, dict[Key, Row]] = field(default_factory=dict)
    marks: dict[tuple[str, Key, int], tuple[int, int]] = field(default_factory=dict)
    counted: dict[str, list[int]] = field(default_factory=dict)
    refused: dict[tuple[str, Key, int], list[bool]] = field(default_factory=dict)
    batch: int = 0

    def compute(self, drawn: Drawn, records: Mapping[str, Sequence[Record]], found: Found) -> None:
        """Add what a batch of these records leaves."""
        made: list[list[Record]] = []
        self.batch += 1
        for node in drawn.nodes:
            if node.kind == "input":
                made.append(list(records[node.name]))
                continue
            before = [made[source] for source in node.inputs]
            if node.kind == "merge":
                before = [
                    [replace(record, branch=f"{number}/{record.branch}") for record in each]
                    for number, each in enumerate(before)
                ]
            arriving = sorted((record for each in before for record in each), key=_place)
            after = list(self._after(node, arriving, found))
            if node.kind == "send":
                self.sent.setdefault(node.name, []).extend(after)
            made.append(after)

    def _after(self, node: Node, arriving: Sequence[Record], found: Found) -> Iterator[Record]:
        counted = self.counted.setdefault(node.name, [0, 0])
        for record in arriving:
            row = record.row
            match node.kind:
                case "filter":
                    if node.made[""].value(row) is True:
                        yield record
                case "map" | "with_columns":
                    yield replace(
                        record,
                        row=row | {name: made.value(row) for name, made in node.made.items()},
                    )
                case "join" | "lookup":
                    key = tuple(row[name] for name in node.on)
                    entry = None if None in key else found(node.name, key)
                    counted[0], counted[1] = counted[0] + 1, counted[1] + (entry is None)
                    if entry is not None or node.how == "left":
                        x = None if entry is None else entry["x"]
                        yield replace(record, row=row | {"v": row["v"] if x is None else x})
                case "table":
                    self._write(node, record)
                    yield record
                case _:
                    yield record

    def _write(self, node: Node, record: Record) -> None:
        table, key = (
            self.tables.setdefault(node.name, {}),
            tuple(record.row[name] for name in node.on),
        )
        if None in key:
            return
        mark = node.name, key, record.source.partition
        batch, offset = self.marks.get(mark, (0, -1))
        if node.skips and batch < self.batch and record.source.offset <= offset:
            return
        v = record.row["v"]
        refused = node.refuses and not record.tombstone and v is not None and v > REFUSED
        self.refused.setdefault((node.name, key, self.batch), []).append(refused)
        if refused:
            return
        self.marks[mark] = self.batch, record.source.offset
        if record.tombstone:
            table.pop(key, None)
        elif node.how == "put":
            table[key] = {name: record.row[name] for name in COLUMNS if name not in node.on}
        else:
            begun = {"g": "new", "total": 100} if node.number == 1 else {"g": None, "total": 0}
            stored = table.setdefault(key, {**begun, "times": 0})
            stored["total"] += node.made["total"].value(record.row)
            stored["times"] += 1
            stored |= {"g": node.made["g"].value(record.row)} if "g" in node.made else {}


def _place(record: Record) -> tuple[int, int, str]:
    return record.source.partition, record.source.offset, record.branch
