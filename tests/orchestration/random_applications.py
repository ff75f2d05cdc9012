"""Random small applications of many operators, as values: described to Adjunct, and interpreted in
plain Python.

All records have the columns k (text or null), g (text) and v (a number of 0 or more), so that any
operator may follow any other. Whatever an operator adds it takes away again.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.declaration.dataset import bounded_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.message_stream import MessageStream
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import StepWorld

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Record = tuple[str | None, str, int]
INPUTS = {"a": ("k", 2), "b": ("g", 3)}
FACTORS = {"k0": 100, "k2": 300, "K4": 500}
NAMES = {"g0": 7, "G1": 9, "g2": 0}
RECORD = Schema.of(k="string", g="string", v="bigint")
MEMBERS = bounded_dataset("members", input="lake.members", key="k", partitions=2)
PLACES = bounded_dataset("places", input="lake.places", key="g", broadcast=True)
KINDS = (
    "filter",
    "map",
    "map function",
    "select",
    "with_columns",
    "rekey",
    "elements",
    "flat_map function",
    "merge",
    "partition_by",
    "partition_by expression",
    "broadcast",
    "left join",
    "inner join",
    "join function",
    "send_to",
)


@dataclass(frozen=True, slots=True)
class Node:
    """An operator: what it is, the nodes that it takes records from, and a small number that it
    uses.
    """

    kind: str
    inputs: tuple[int, ...]
    number: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in order, inputs first; those at the end are written: to streams `outputs`, and one
    to a table.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, int], ...]
    counted: int

    @property
    def tasks(self) -> int:
        moved = (node.number for node in self.nodes if node.kind.startswith("partition_by"))
        return max(2, *(count for _, count in INPUTS.values()), *moved)


def random_graph(seed: int, operators: int) -> Graph:
    """Return two inputs, so many operators behind them, and a sink for each that nobody else
    takes records from.
    """
    chosen = random.Random(seed)
    nodes = [Node("input", (), 0, name) for name in INPUTS]
    for place in range(operators):
        once = {
            node.kind
            for node in nodes
            if node.kind in ("broadcast", "flat_map function", "elements")
        }
        kind = chosen.choice([kind for kind in KINDS if kind not in once])
        recent = range(max(0, len(nodes) - 4), len(nodes))
        inputs = tuple(chosen.choice(recent) for _ in range(2 if kind == "merge" else 1))
        nodes.append(Node(kind, inputs, chosen.randrange(1, 5), f"n{place}"))
    taken = {source for node in nodes for source in node.inputs}
    leaves = [number for number in range(len(nodes)) if number not in taken]
    while len(leaves) > 2:
        nodes.append(Node("merge", (leaves.pop(0), leaves.pop(0))))
        leaves.append(len(nodes) - 1)
    return Graph(tuple(nodes), tuple((f"out-{leaf}", leaf) for leaf in leaves), leaves[-1])


# -- in plain Python


def interpreted(
    graph: Graph, inputs: dict[str, list[Record]]
) -> tuple[dict[str, list[Record]], dict[str, list[int]]]:
    """Return what comes to each stream and, by key, what the table has counted and summed."""
    made: list[list[Record]] = []
    streams: dict[str, list[Record]] = {}
    for node in graph.nodes:
        before = [record for source in node.inputs for record in made[source]]
        after = (
            inputs[node.name] if node.kind == "input" else list(_after(node, before, graph.tasks))
        )
        if node.kind == "send_to":
            streams[node.name] = after
        made.append(after)
    streams |= {name: made[leaf] for name, leaf in graph.outputs}
    counted: dict[str, list[int]] = {}
    for k, _, v in made[graph.counted]:
        if k is not None:
            row = counted.setdefault(k, [0, 0])
            row[0], row[1] = row[0] + 1, row[1] + v
    return streams, counted


def _after(node: Node, before: list[Record], tasks: int) -> Iterator[Record]:
    c = node.number
    for k, g, v in before:
        match node.kind:
            case "filter":
                yield from [(k, g, v)] if v % (c + 1) != 1 else []
            case "map":
                yield k, g.upper(), v + c
            case "map function":
                yield k, g, v + 2 * c
            case "with_columns":
                yield k, g, v * 2 + c
            case "rekey":
                yield (None if k is None else f"{k}-{g}"), g, v
            case "elements":
                yield from ((k, g, v + x) for x in range(3) if x < v % 4)
            case "flat_map function":
                yield from [(k, g, v), (k, f"{g}!", v + 1)] if v % 5 != c else []
            case "broadcast":
                yield from ((k, g, v * 10 + task) for task in range(tasks))
            case "left join":
                yield k, g, v + FACTORS.get(k or "", 0)
            case "inner join":
                yield from [(k, g, v + FACTORS[k])] if k in FACTORS else []
            case "join function":
                yield from [] if NAMES.get(g) == 0 else [(k, g, v + NAMES.get(g, c))]
            case _:
                yield k, g, v


# -- described


def described(graph: Graph, world: StepWorld) -> Application:
    """Return the application; small batches, so that it takes several."""
    app = Application("random", max_batch_records=25, auto_repartition=True)
    streams: list[MessageStream] = []
    tables = {dataset.name: app.table(dataset) for dataset in (MEMBERS, PLACES)}
    for node in graph.nodes:
        sources = [streams[source] for source in node.inputs]
        streams.append(
            app.input_stream(f"lake.{node.name}")
            if node.kind == "input"
            else _add(app, tables, node, sources)
        )
    for name, leaf in graph.outputs:
        key = (None, "k", "g")[leaf % 3]
        streams[leaf].send_to(app.output_stream(f"lake.{name}", partitions=1 + leaf % 3, key=key))
    table = app.table(counting_table(world))
    streams[graph.counted].update(
        table, add={"n": "1", "total": "v"}, if_missing=[], on_null_key="skip"
    )
    return app


def _add(
    app: Application, tables: dict[str, Any], node: Node, sources: list[MessageStream]
) -> MessageStream:
    stream, c = sources[0], node.number
    match node.kind:
        case "filter":
            return stream.filter(f"v % {c + 1} <> 1")
        case "map":
            return stream.map("k", "upper(g) as g", f"v + {c} as v")
        case "map function":
            return stream.map(_added(2 * c), keeps_partitioning=True)
        case "select":
            return stream.select("v", "k as k", "g")
        case "with_columns":
            return stream.with_columns(v=f"v * 2 + {c}")
        case "rekey":
            return stream.with_columns(k="concat(k, '-', g)")
        case "elements":
            return stream.flat_map(
                "transform(filter(array(0, 1, 2), x -> x < v % 4), x -> v + x) as v"
            )
        case "flat_map function":
            return stream.flat_map(_copied(c), schema=RECORD, keeps_partitioning=False)
        case "merge":
            return stream.merge(*sources[1:])
        case "partition_by":
            return stream.partition_by("g", partitions=c)
        case "partition_by expression":
            return stream.partition_by("upper(g) as h", partitions=c).select("k", "g", "v")
        case "broadcast":
            return stream.broadcast().map("k", "g", "v * 10 + task as v")
        case "left join" | "inner join":
            how: Any = node.kind.split()[0]
            joined = stream.join(
                tables["members"], on="k", how=how, select=["factor"], name=node.name
            )
            return joined.map("k", "g", "v + coalesce(factor, 0) as v")
        case "join function":
            schema = Schema.of(more="bigint")
            joined = stream.join(
                tables["places"],
                on="g",
                how="left",
                function=_named(c),
                schema=schema,
                name=node.name,
            )
            return joined.with_columns(v="v + more").select("k", "g", "v")
        case "send_to":
            return stream.send_to(app.output_stream(f"lake.{node.name}", partitions=c, key="g"))
    raise AssertionError(node.kind)


def _added(number: int) -> Callable[[DataFrame], DataFrame]:
    return lambda frame: frame.withColumn("v", frame["v"] + number)


def _copied(number: int) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    def copies(record: dict[str, Any]) -> list[dict[str, Any]]:
        changed = {"g": record["g"] + "!", "v": record["v"] + 1, "k": record["k"]}
        return [] if record["v"] % 5 == number else [record, changed]

    return copies


def _named(number: int) -> Callable[[dict[str, Any], dict[str, Any] | None], dict[str, Any] | None]:
    def more(record: dict[str, Any], place: dict[str, Any] | None) -> dict[str, Any] | None:
        value = number if place is None else place["more"]
        return {"more": value} if value else None

    return more


def counting_table(world: StepWorld) -> RemoteTable[Any, Any, Any]:
    columns = {"k": "string", "n": "bigint", "total": "bigint"}
    store = SqliteTable(
        world.folder / "counted.sqlite", "counted", "k", columns=columns, create=True
    )
    return RemoteTable(
        "counted", key="k", read_function=store, write_function=store, idempotent=True
    )


def declare(world: StepWorld) -> None:
    """Make the inputs, and the datasets with their one version."""
    for name, (key, partitions) in INPUTS.items():
        world.stream(name, key, partitions, k="string", g="string", v="bigint")
    world.stream("members", "k", 2, k="string", factor="bigint")
    world.stream("places", "g", 1, g="string", more="bigint")
    world.send("members", *FACTORS.items(), version="v1")
    world.send("places", *NAMES.items(), version="v1")


def records(chosen: random.Random, count: int) -> list[Record]:
    return [
        (
            chosen.choice([None, "k0", "k1", "k2", "k3"]),
            f"g{chosen.randrange(4)}",
            chosen.randrange(40),
        )
        for _ in range(count)
    ]


def differing(rows: list[dict[str, Any]], expected: list[Record]) -> dict[Record, int]:
    """Return of which records there are more (or fewer, below 0) than expected."""
    difference = Counter((row["k"], row["g"], row["v"]) for row in rows)
    difference.subtract(Counter(expected))
    return {record: count for record, count in difference.items() if count}


def main(folder: str, seed: str, operators: str) -> None:
    """Run the graph in a session of this process's own."""
    from dagster_adjunct.resources.spark.session import new_session

    world = StepWorld(
        open_lake(Path(folder) / "lake"), Path(folder), lambda: new_session({}, master="local[2]")
    )
    world.run(described(random_graph(int(seed), int(operators)), world), run="killed")


if __name__ == "__main__":
    main(*sys.argv[1:])
