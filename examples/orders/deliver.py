"""Sample data as a shop would send it: python -m dagster_adjunct.examples.orders.deliver 1, and
later 2.

Each part is a catalogue of products as lines of JSON, complete in a folder of its own, and 200
orders. The same part has the same orders whenever it is made; sending it again adds nothing.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

from dagster_adjunct import LakeStreams, open_lake
from dagster_adjunct.examples.orders.pipeline import ORDERS, catalogue

ORDERS_A_PART = 200
MORNING = datetime(2026, 3, 2, 6, tzinfo=UTC)
STREETS = ("Mill Lane", "High Street", None)
CITIES = ("Leeds", "York", "Hull")
CATEGORIES = ({"code": "b", "name": "Books"}, {"code": "t", "name": "Toys"}, None)


def products(part: int) -> Iterator[dict[str, Any]]:
    """Yield the products of a part; part 2 has two more, others in another category, and calls
    names titles.
    """
    title = "name" if part == 1 else "title"
    draw = random.Random(part)
    for number in range(18 + 2 * part):
        yield {
            "sku": f"s{number:02}",
            title: f"Product {number}",
            "category": draw.choice(CATEGORIES),
            "tags": draw.choice([["new"], ["new", "sale"], [], None]),
        }


def orders(part: int) -> Iterator[dict[str, Any]]:
    """Yield the orders of a part in the order of their times."""
    draw = random.Random(-part)
    for number in range(ORDERS_A_PART):
        at = MORNING + timedelta(days=part - 1, minutes=number)
        lines = []
        for _ in range(draw.randrange(4)):
            price = Decimal(draw.randrange(100, 9_000)).scaleb(-2)
            sku = f"s{draw.randrange(22):02}"
            lines.append({"sku": sku, "quantity": draw.randrange(1, 5), "price": price})
        yield {
            "order": part * 1_000 + number,
            "at": at,
            "customer": _draw_customer(draw),
            "lines": lines or None,
            "attributes": {"channel": draw.choice(["web", "shop"]), "note": None},
        }


def _draw_customer(draw: random.Random) -> dict[str, Any] | None:
    if draw.random() < 0.1:
        return None
    address = {"street": draw.choice(STREETS), "city": draw.choice(CITIES)}
    return {"id": f"c{draw.randrange(40):02}", "address": draw.choice([address, None])}


def deliver(part: int) -> None:
    """Write the catalogue of a part, and append its orders to the stream `lake.orders`, which is
    created if it is missing.
    """
    folder = Path(catalogue.input.url) / f"2026-03-0{part}"  # type: ignore[union-attr]
    folder.mkdir(parents=True, exist_ok=True)
    _write_lines(folder / "products.jsonl", products(part))
    (folder / "_SUCCESS").touch()  # last: the version is complete from here on
    streams = LakeStreams(open_lake())
    streams.create("orders", schema=ORDERS, key=["order"], partitions=2, timestamp="at")
    streams.append("orders", list(orders(part)), producer="shop", sequence=part)
    print(f"part {part}: {ORDERS_A_PART} orders, {18 + 2 * part} products")  # noqa: T201


def _write_lines(file: Path, rows: Iterator[dict[str, Any]]) -> None:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    deliver(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
