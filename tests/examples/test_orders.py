"""The example with nested orders: its stream and its table are what plain Python makes of them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dagster_adjunct import LakeStreams, SystemStreamPartition, open_lake, run_application
from dagster_adjunct.examples.orders import deliver, pipeline
from dagster_adjunct.streams import OffsetRange
from dagster_adjunct.tables import BlockingTable, RemoteTable
from tests.doc_blocks import ROOT
from tests.kept_processes import without_kept_processes
from tests.orchestration.dagster.test_components import component, facts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.postgres import PostgresServer

EXAMPLE = ROOT / "examples" / "orders"


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.server)])
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module, with all that it stores in a folder of this test, or in PostgreSQL."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        server.execute("DROP TABLE IF EXISTS customers")
        monkeypatch.setenv("ORDERS_POSTGRES", server.dsn())
    monkeypatch.setenv("ADJUNCT_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("ORDERS_CATALOGUE", str(tmp_path / "catalogue"))
    monkeypatch.setenv("ORDERS_SQLITE", str(tmp_path / "customers.sqlite"))
    importlib.reload(pipeline)
    return importlib.reload(deliver)


def expected_sales(parts: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for part in parts:
        products = {product["sku"]: product for product in deliver.products(part)}
        for order in deliver.orders(part):
            for line in order["lines"] or []:
                product = products.get(line["sku"], {})
                tags = product.get("tags")
                customer = order["customer"] or {}
                rows.append(
                    {
                        "order": order["order"],
                        "at": order["at"],
                        "sku": line["sku"],
                        "name": product.get("name"),
                        "category": product.get("category"),
                        "amount": line["price"] * line["quantity"],
                        "city": (customer.get("address") or {}).get("city"),
                        "channel": order["attributes"]["channel"],
                        "is_new": None if tags is None else "new" in tags,
                    }
                )
    return rows


def expected_customers(parts: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for part in parts:
        for order in deliver.orders(part):
            if order["customer"] is not None:
                customer = order["customer"]
                before = rows.get(customer["id"], {"orders": 0})
                rows[customer["id"]] = {
                    "address": customer["address"],
                    "last": order["at"],
                    "orders": before["orders"] + 1,
                }
    return rows


def run(spark: SparkSession) -> None:
    """Run the application: in a process of its own where Spark's workers need the variables of this
    test.
    """
    if "ORDERS_POSTGRES" not in os.environ:
        run_application(pipeline.app, spark=spark)
        return
    adjunct = Path(sys.executable).with_name("adjunct")
    own = without_kept_processes(os.environ)
    environment = {**own, "ADJUNCT_SPARK_MASTER": "local[2]"}
    command = [adjunct, "run", "dagster_adjunct.examples.orders.pipeline:app"]
    ended = subprocess.run(command, check=False, env=environment, capture_output=True, timeout=300)
    assert ended.returncode == 0, ended.stderr.decode()


def sales() -> list[dict[str, Any]]:
    streams = LakeStreams(open_lake())
    partitions = [SystemStreamPartition("lake", "sold", number) for number in range(2)]
    ends = streams.upcoming(partitions)
    table = streams.read_arrow({ssp: OffsetRange("0", ends[ssp]) for ssp in partitions})
    return [
        {name: value for name, value in row.items() if not name.startswith("__")}
        for row in table.to_pylist()
    ]


def in_order(rows: list[dict[str, Any]]) -> list[tuple[int, str, Decimal, str]]:
    return sorted(
        (row["order"], row["sku"], row["amount"], json.dumps(row, sort_keys=True, default=str))
        for row in rows
    )


@pytest.mark.spark
def test_orders_are_what_plain_python_makes_of_them(example: Any, spark: SparkSession) -> None:
    rounds = ((1,),) if "ORDERS_POSTGRES" in os.environ else ((1,), (1, 2))
    for parts in rounds:
        example.deliver(parts[-1])
        run(spark)
        assert in_order(sales()) == in_order(expected_sales(parts))
    expected = expected_customers(rounds[-1])
    table = RemoteTable("customers", key="id", read_function=pipeline.store)
    with BlockingTable(table) as customers:
        found = {key: dict(customers.get(key)) for key in expected}
    assert {key: {**row, "id": key} for key, row in expected.items()} == found


def test_the_component_declares_the_application_of_the_python_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORDERS_POSTGRES", "postgresql://127.0.0.1:1/orders")
    monkeypatch.setenv("ORDERS_CATALOGUE", "catalogue")
    importlib.reload(pipeline)
    declared = yaml.safe_load((EXAMPLE / "defs.yaml").read_text(encoding="utf-8"))
    made = component(yaml.safe_dump(declared["attributes"], sort_keys=False)).applications()
    assert facts(made["orders"]) == facts(pipeline.app)
