"""An application of merged streams, a look-up, a function with results and state, for runs that are
killed.

Orders of two doors are merged; each gets the price that a table has for its shop, and a token that
is another one at each call. What is sold is numbered by shop, and each visitor's last shop is kept
by both doors.
"""

from __future__ import annotations

import sqlite3
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.operators.calls import SinkContext
from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.step_world import StepWorld

DOORS = ("north", "south")
SHOPS = ("pub", "quay", "ritz", "shut")
PRICED = SHOPS[:-1]


def prices(folder: Path) -> RemoteTable[Any, Any, Any]:
    store = SqliteTable(
        folder / "prices.sqlite",
        "prices",
        "shop",
        columns={"shop": "string", "price": "bigint"},
        create=True,
    )
    return RemoteTable("prices", key="shop", read_function=store, write_function=store)


def set_prices(folder: Path, edition: int) -> None:
    """Let the table say other prices than before."""
    with sqlite3.connect(folder / "prices.sqlite") as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS prices (shop TEXT PRIMARY KEY, price BIGINT)"
        )
        rows = [(shop, 100 * edition + number) for number, shop in enumerate(PRICED)]
        connection.executemany("INSERT OR REPLACE INTO prices (shop, price) VALUES (?, ?)", rows)


def token(records: pa.RecordBatch, context: SinkContext) -> pa.Table:
    made = [uuid.uuid4().hex for _ in range(records.num_rows)]
    kept = {name: records[name] for name in ("visitor", "shop", "price")}
    return pa.table({**kept, "token": made})


def one_more(frame: Any) -> Any:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    here = Window.partitionBy("shop").orderBy("__partition", "__offset", "__branch")
    return frame.withColumn("sold", F.coalesce("sold", F.lit(0)) + F.row_number().over(here))


def selling(folder: Path) -> Application:
    app = Application("selling", max_batch_records=12)
    text, number = "string", "bigint"
    sold = app.local_table(
        "sold",
        key="shop",
        schema=Schema.of(shop=text, sold=number, price=number, token=text),
        partitions=3,
    )
    last = app.local_table(
        "last", key="visitor", schema=Schema.of(visitor=text, shop=text), partitions=2
    )
    north, south = (app.input_stream(f"lake.{door}") for door in DOORS)
    north.send_to(last)
    south.send_to(last, deleted="shop = 'shut'")
    both = north.merge(south)
    made = both.join(app.table(prices(folder)), on="shop", how="left", select=["price"]).sink(
        token,
        returns=Schema.of(visitor=text, shop=text, price=number, token=text),
        keeps_partitioning=True,
    )
    made.join(last, on="visitor", how="left", select=["shop as last"]).send_to(
        app.output_stream("lake.seen", partitions=2, key="visitor")
    )
    numbered = (
        made.partition_by("shop")
        .join(sold, on="shop", how="left", select=["sold"])
        .map(one_more, keeps_partitioning=True)
        .send_to(sold)
    )
    numbered.join(
        sold, on="shop", how="left", select=["sold as newest", "token as newest_token"]
    ).send_to(app.output_stream("lake.numbered", partitions=3, key="shop"))
    return app


def batches(world: StepWorld, app: Application) -> Iterator[dict[str, list[tuple[str, str]]]]:
    """Yield what each batch of the log has read of each door, as (visitor, shop) in order."""
    records = {
        door: world.streams.read_arrow(world.streams.all_ranges(door)).to_pylist() for door in DOORS
    }
    done = {
        state.last.intent.batch: state.last.intent
        for _, state in BatchLog(world.lake, app.name).history(None)
        if state.last is not None
    }
    for number in sorted(done):
        spans = {(ssp.stream, ssp.partition): span for ssp, span in done[number].ranges.items()}
        read: dict[str, list[tuple[str, str]]] = {door: [] for door in DOORS}
        for door in DOORS:
            for row in records[door]:
                span = spans.get((door, row["__partition"]))
                if span is not None and int(span.start) <= row["__offset"] < int(span.end):
                    read[door].append((row["visitor"], row["shop"]))
        yield read


def check(world: StepWorld, app: Application, editions: int) -> None:
    """Compare tables and outputs with what plain Python makes of the batches; of prices and
    tokens, that all agree.
    """
    sold: dict[str, int] = {}
    last: dict[str, str] = {}
    seen: list[tuple[Any, ...]] = []
    numbered: list[tuple[Any, ...]] = []
    for read in batches(world, app):
        for door in DOORS:
            for visitor, shop in read[door]:
                last[visitor] = shop
                if (door, shop) == ("south", "shut"):
                    del last[visitor]
        of_all = [visit for door in DOORS for visit in read[door]]
        seen += [(visitor, shop, last.get(visitor)) for visitor, shop in of_all]
        mine = []
        for visitor, shop in of_all:
            sold[shop] = sold.get(shop, 0) + 1
            mine.append((visitor, shop, sold[shop]))
        numbered += [(*sale, sold[sale[1]]) for sale in mine]
    outputs = {name: world.rows(name) for name in ("seen", "numbered")}
    of_seen = [(r["visitor"], r["shop"], r["last"]) for r in outputs["seen"]]
    assert sorted(of_seen, key=str) == sorted(seen, key=str)
    rows = [(r["visitor"], r["shop"], r["sold"], r["newest"]) for r in outputs["numbered"]]
    assert sorted(r[1:] for r in rows) == sorted(r[1:] for r in numbered)
    assert sorted(r[:2] for r in rows) == sorted(r[:2] for r in numbered)
    by_token = {
        name: {r["token"]: (r["visitor"], r["shop"], r["price"]) for r in outputs[name]}
        for name in outputs
    }
    assert by_token["seen"] == by_token["numbered"], (
        "what was looked up and made was recorded, and is the same for both"
    )
    assert len(by_token["seen"]) == len(seen)
    for _, shop, price in by_token["seen"].values():
        assert (price is None) == (shop == "shut")
        assert price is None or (
            price % 100 == PRICED.index(shop) and 1 <= price // 100 <= editions
        )
    with open_dataset(world.lake, "sold") as table:
        entries = dict(table.items())
    assert {key: entry["sold"] for key, entry in entries.items()} == sold
    newest = {r["shop"]: r for r in outputs["numbered"] if r["sold"] == sold[r["shop"]]}
    assert {key: (e["token"], e["price"]) for key, e in entries.items()} == {
        key: (r["token"], r["price"]) for key, r in newest.items()
    }
    for row in outputs["numbered"]:
        if row["sold"] == row["newest"]:
            assert row["token"] == row["newest_token"]
    with open_dataset(world.lake, "last") as table:
        assert {key: entry["shop"] for key, entry in table.items()} == last


def main(folder: str) -> None:
    """Run the application in a session of this process's own."""
    from dagster_adjunct.resources.spark.session import new_session

    world = StepWorld(
        open_lake(Path(folder) / "lake"), Path(folder), lambda: new_session({}, master="local[2]")
    )
    world.run(selling(Path(folder)), run="killed")


if __name__ == "__main__":
    main(*sys.argv[1:])
