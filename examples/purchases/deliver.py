"""Sample data, written as others would write it, without Adjunct:
python -m dagster_adjunct.examples.purchases.deliver 1, and later 2.

The second part has new prices, moved and closed accounts, events without their channel, and a file
of the day before that comes late.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa  # noqa: TID253
from deltalake import write_deltalake
from pyiceberg.catalog import load_catalog

from dagster_adjunct.examples.purchases.declare import ROOT

MORNING = datetime(2026, 3, 2, 6, tzinfo=UTC)
COUNTRIES = ("at", "de", "fr")
PRODUCT = pa.schema([("sku", pa.string()), ("name", pa.string()), ("price", pa.decimal128(10, 2))])
ACCOUNT = pa.schema([("id", pa.string()), ("country", pa.string())])


def products(part: int) -> list[dict[str, Any]]:
    """Return the products of a part; each has another price in part 2, and two are new."""
    rows = []
    for number in range(8 + 2 * part):
        price = Decimal(100 + 25 * number + part).scaleb(-1).quantize(Decimal("0.01"))
        rows.append({"sku": f"s{number:02}", "name": f"Product {number}", "price": price})
    return rows


def accounts(part: int) -> list[dict[str, Any]]:
    """Return the accounts after a part: in part 2 the first has moved, the second is closed, and
    one is new.
    """
    rows = [{"id": f"a{n}", "country": COUNTRIES[n % 3]} for n in range(10 + part)]
    if part == 2:
        rows[0]["country"] = "it"
        del rows[1]
    return rows


def files(part: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the names of the files of a part, with their events."""
    first = MORNING + timedelta(days=part - 1)
    yield f"day={first:%F}/0001.jsonl", list(_events(part, 1, first))
    yield f"day={first:%F}/0002.jsonl", list(_events(part, 2, first + timedelta(hours=1)))
    if part == 2:
        yield f"day={MORNING:%F}/late.jsonl", list(_events(part, 3, MORNING + timedelta(hours=2)))


def _events(part: int, number: int, start: datetime) -> Iterator[dict[str, Any]]:
    draw = random.Random(10 * part + number)
    for each in range(40):
        at = start + timedelta(minutes=each)
        items = []
        for _ in range(draw.randrange(3)):
            items.append({"sku": f"s{draw.randrange(13):02}", "quantity": draw.randrange(1, 4)})
        event = {
            "id": f"{part}-{number}-{each}",
            "at": f"{at:%FT%TZ}",
            "account": {"id": f"a{draw.randrange(13)}", "device": draw.choice(["phone", None])},
            "items": items,
        }
        if part == 1:
            event["channel"] = draw.choice(["web", "shop"])
        yield event


def deliver(part: int) -> None:
    """Write a part; the products and the accounts first."""
    write_deltalake(
        f"{ROOT}/products",
        pa.Table.from_pylist(products(part), PRODUCT),
        mode="overwrite",
        storage_options=_delta_options(),
    )
    catalog = load_catalog("shop")
    catalog.create_namespace_if_not_exists("shop")
    table = catalog.create_table_if_not_exists("shop.accounts", ACCOUNT)
    table.overwrite(pa.Table.from_pylist(accounts(part), ACCOUNT))
    for name, events in files(part):
        _write(f"events/{name}", "".join(f"{json.dumps(event)}\n" for event in events))


def _delta_options() -> dict[str, str]:
    """Return the options of delta-rs for the S3 server that the lake is configured for."""
    endpoint = os.environ.get("ADJUNCT_S3_ENDPOINT")
    if endpoint is None:
        return {}
    return {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}


def _write(name: str, text: str) -> None:
    """Write a file: in a folder under a name that no reader takes before it is complete."""
    if ROOT.startswith("s3://"):
        bucket, _, prefix = ROOT.removeprefix("s3://").partition("/")
        client = boto3.client("s3", endpoint_url=os.environ.get("ADJUNCT_S3_ENDPOINT"))
        client.put_object(Bucket=bucket, Key=f"{prefix}/{name}", Body=text.encode())
        return
    path = Path(ROOT) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.tmp")
    unfinished.write_text(text)
    unfinished.rename(path)


if __name__ == "__main__":
    deliver(int(sys.argv[1]))
