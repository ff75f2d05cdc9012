"""Reading JSON lines with nested values: by declared files in this process's Spark tasks, against
Spark's own reader with the same schema.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.timing import alternate, show
from dagster_adjunct import Schema, session_scope
from dagster_adjunct.resources.files.formats import DeclaredFiles, read_files_with_spark
from dagster_adjunct.resources.files.tree import LocalTree

FILES = 4
ORDERS = Schema.of(
    id="bigint",
    customer={"id": "bigint", "address": {"city": "string", "zip": "string"}},
    at="timestamp",
    lines=[{"sku": "string", "price": "decimal(10,2)", "count": "int"}],
    attributes="map<string,string>",
)


def run(rounds: int, count: int = 1_000_000) -> None:
    with TemporaryDirectory() as folder, session_scope(master="local[2]") as session:
        spark = session()
        write_orders(Path(folder), count // FILES)
        tree = LocalTree(folder)
        declared = DeclaredFiles(tree, "jsonl", ORDERS, "orders")
        listed = tree.list()

        def ours(_: int) -> None:
            frame = read_files_with_spark(spark, declared, listed).select(*ORDERS.names)
            frame.write.format("noop").mode("overwrite").save()

        def sparks(_: int) -> None:
            frame = spark.read.schema(ORDERS.ddl()).json(folder)
            frame.write.format("noop").mode("overwrite").save()

        print(f"json-lines: {count:,} nested records in {FILES} files, local[2]")
        for warm_up in (ours, sparks):
            warm_up(0)
        measured = alternate(rounds, ours=ours, spark=sparks)
        show(measured, "ours", "spark", "at most 1.2")


def write_orders(folder: Path, count: int) -> None:
    for number in range(FILES):
        chance = random.Random(number)
        with (folder / f"{number}.jsonl").open("w", encoding="utf-8") as file:
            for row in range(count):
                file.write(f"{json.dumps(order(row, chance), ensure_ascii=False)}\n")


def order(number: int, chance: random.Random) -> dict[str, object]:
    lines = []
    for _ in range(chance.randrange(4)):
        price = round(chance.random() * 100, 2)
        sku = f"s{chance.randrange(1000)}"
        lines.append({"sku": sku, "price": price, "count": chance.randrange(9)})
    address = {"city": chance.choice(["Ulm", "Bonn", "Köln"]), "zip": f"{number % 100_000:05d}"}
    return {
        "id": number,
        "customer": {"id": chance.randrange(10**6), "address": address},
        "at": f"2026-01-{1 + number % 28:02d}T09:30:{number % 60:02d}Z",
        "lines": lines,
        "attributes": dict.fromkeys(chance.sample("abcdefgh", 2), f"v{number % 100}"),
    }
