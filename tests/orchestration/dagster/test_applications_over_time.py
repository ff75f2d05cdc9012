"""An as-of join, a join of streams and windows in runs of the job: they give what plain Python
says of all records.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dagster import DagsterInstance, Definitions

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    build_definitions,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.windows import Count, Sum, Tumbling
from tests.orchestration.dagster.test_runs import made

SCHEMAS = {
    "orders": Schema.of(id="bigint", item="string", at="timestamp", quantity="int"),
    "payments": Schema.of(id="bigint", item="string", at="timestamp", amount="int"),
    "prices": Schema.of(item="string", price="int", since="timestamp"),
}
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
WITHIN, SIZE, DELAY = timedelta(seconds=30), timedelta(seconds=60), timedelta(seconds=600)
END = BEGIN + timedelta(days=1)

prices = unbounded_dataset(
    "prices", input="lake.prices", key="item", partitions=2, history="all", valid_from="since"
)
Row = tuple[Any, ...]


def shop() -> Application:
    app = Application("shop")
    orders = app.input_stream("lake.orders", event_time="at", delay=DELAY)
    payments = app.input_stream("lake.payments", event_time="at", delay=DELAY)
    priced = orders.join(app.table(prices), on="item", how="left", as_of="at", select=["price"])
    priced.send_to(app.output_stream("lake.priced", partitions=2, key="item"))
    paid = orders.join_stream(
        payments,
        on=["item", "id"],
        partition_by="item",
        within=(timedelta(0), WITHIN),
        how="left",
        name="paid",
        prefix="paid_",
    )
    paid.send_to(app.output_stream("lake.paid", partitions=2, key="item"))
    minutes = orders.window(
        Tumbling(SIZE),
        by="item",
        name="minutes",
        aggregates={"orders": Count(), "sold": Sum("quantity")},
    )
    minutes.send_to(app.output_stream("lake.minutes", partitions=2, key="item"))
    return app


def drawn(chosen: random.Random) -> dict[str, list[Row]]:
    """Return records out of order; half of all orders are of one item."""

    def moment() -> datetime:
        return BEGIN + timedelta(seconds=chosen.randrange(500))

    items = [chosen.choice(["hot", chosen.choice("abcdefgh")]) for _ in range(200)]
    orders = [(number, item, moment(), chosen.randrange(9)) for number, item in enumerate(items)]
    paid = [order for order in orders if chosen.random() < 0.6]
    payments = [
        (number, item, at + timedelta(seconds=chosen.randrange(-10, 50)), n)
        for number, item, at, n in paid
    ]
    chosen.shuffle(payments)
    known = [
        (item, chosen.randrange(100), BEGIN + timedelta(seconds=100 * n))
        for n in (1, 2, 3)
        for item in "abcd"
    ]
    return {
        "orders": orders,
        "payments": payments,
        "prices": [*known, ("hot", 7, BEGIN + timedelta(seconds=250))],
    }


def append(lake: Lake, stream: str, sequence: int, rows: Iterable[Row]) -> None:
    schema = SCHEMAS[stream]
    table = pa.Table.from_pylist(
        [dict(zip(schema.names, row, strict=True)) for row in rows], schema.to_arrow()
    )
    LakeStreams(lake).append(stream, table, producer="test", sequence=sequence)


def sent(lake: Lake, stream: str, *names: str) -> Counter[Row]:
    streams = LakeStreams(lake)
    rows = streams.read_arrow(streams.all_ranges(stream)).to_pylist()
    return Counter(tuple(row[name] for name in names) for row in rows)


def run(definitions: Definitions) -> dict[str, dict[str, Any]]:
    with DagsterInstance.ephemeral() as instance:
        result = definitions.resolve_job_def("shop").execute_in_process(
            instance=instance, raise_on_error=False
        )
    assert result.success
    return made(result)


# by the step: test_step_asof_join.py, test_stream_join.py, test_killed_windows.py
@pytest.mark.long
@pytest.mark.spark
def test_runs_of_the_job_give_each_result_once_as_plain_python_has_it(
    tmp_path: Path, spark: Any
) -> None:
    lake, records = open_lake(tmp_path / "lake"), drawn(random.Random(4))
    for name, schema in SCHEMAS.items():
        LakeStreams(lake).create(name, schema=schema, key=["item"], partitions=2)
    append(lake, "prices", 1, records["prices"])
    definitions = build_definitions(shop(), lake=lake.url)
    for sequence, half in enumerate((slice(0, 100), slice(100, None)), 1):
        append(lake, "orders", sequence, records["orders"][half])
        append(lake, "payments", sequence, records["payments"][half])
        if sequence == 1:
            assert run(definitions)["lake/minutes"]["adjunct/batches"] == 1
    # What comes a day later ends all that is open, in both partitions.
    ends = [(-1, item, END, 0) for item in ("hot", *"abcdefgh")]
    append(lake, "orders", 3, ends)
    append(lake, "payments", 3, ends)
    displayed = run(definitions)["lake/minutes"]
    marks = {mark["stream"]: mark["watermark"] for mark in displayed["adjunct/watermarks"]}
    assert marks == {f"lake.{name}": to_json_value(END - DELAY) for name in ("orders", "payments")}
    assert displayed["adjunct/state/shop-minutes/rows"] >= len(ends)

    def price(item: str, at: datetime) -> int | None:
        known = [
            (since, price)
            for name, price, since in records["prices"]
            if name == item and since <= at
        ]
        return max(known)[1] if known else None

    orders = records["orders"]
    assert sent(lake, "priced", "id", "item", "price") == Counter(
        (number, item, price(item, at)) for number, item, at, _ in (*orders, *ends)
    )
    payments = {number: (at, amount) for number, _, at, amount in records["payments"]}
    matched = {
        n: payments[n]
        for n, _, at, _ in orders
        if n in payments and at <= payments[n][0] <= at + WITHIN
    }
    assert 0 < len(matched) < len(payments)
    paid = sent(lake, "paid", "id", "paid_at", "paid_amount")
    assert Counter({row: count for row, count in paid.items() if row[0] >= 0}) == Counter(
        (number, *matched.get(number, (None, None))) for number, *_ in orders
    )
    windows: dict[tuple[str, datetime], list[int]] = {}
    for _, item, at, quantity in orders:
        windows.setdefault((item, at - (at - BEGIN) % SIZE), []).append(quantity)
    assert sent(lake, "minutes", "item", "window_start", "orders", "sold") == Counter(
        (item, start, len(sold), sum(sold)) for (item, start), sold in windows.items()
    )
