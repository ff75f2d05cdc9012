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
from dagster_adjunct.examples.orders import deliver, pipeline, renamed
from dagster_adjunct.streams import OffsetRange
from dagster_adjunct.tables import BlockingTable, RemoteTable
from tests.doc_blocks import ROOT, PageReader, blocks_of
from tests.kept_processes import without_kept_processes
from tests.orchestration.dagster.test_components import component, facts

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.servers.postgres import PostgresServer

EXAMPLE = ROOT / "examples" / "orders"


# Nested records in PostgreSQL: test_nested_values_in_every_backend.py
@pytest.fixture(
    params=["sqlite", pytest.param("postgres", marks=[pytest.mark.server, pytest.mark.long])]
)
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module, with all that it stores in a folder of this test, or in PostgreSQL."""
    if request.param == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres_server")
        server.execute("DROP TABLE IF EXISTS customers")
        monkeypatch.setenv("ORDERS_POSTGRES", server.dsn())
    monkeypatch.setenv("ADJUNCT_LAKE", str(tmp_path / "lake"))
    monkeypatch.setenv("ORDERS_CATALOGUE", str(tmp_path / "catalogue"))
    monkeypatch.setenv("ORDERS_SQLITE", str(tmp_path / "customers.sqlite"))
    reload_applications()
    return importlib.reload(deliver)


def reload_applications() -> None:
    importlib.reload(pipeline)
    importlib.reload(renamed)


def expected_sales(parts: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the sold products after these parts; after the second one, as `renamed.py` has them."""
    rows = []
    title = "name" if parts == (1,) else "title"
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
                        title: product.get("name", product.get("title")),
                        "category": product.get("category"),
                        "amount": line["price"] * line["quantity"],
                        "city": (customer.get("address") or {}).get("city"),
                        "channel": order["attributes"]["channel"],
                        "is_new": None if tags is None else "new" in tags,
                    }
                )
    if title == "title":
        for row in rows:
            del row["channel"]
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


def run(part: int, spark: SparkSession) -> None:
    """Run the application as it is when a part has come: in a process of its own where Spark's workers need the variables of this
    test.
    """
    module = pipeline if part == 1 else renamed
    if "ORDERS_POSTGRES" not in os.environ:
        run_application(module.app, spark=spark)
        return
    adjunct = Path(sys.executable).with_name("adjunct")
    own = without_kept_processes(os.environ)
    environment = {**own, "ADJUNCT_SPARK_MASTER": "local[2]"}
    command = [adjunct, "run", f"{module.__name__}:app"]
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
    for parts in ((1,), (1, 2)):
        example.deliver(parts[-1])
        run(parts[-1], spark)
        assert in_order(sales()) == in_order(expected_sales(parts))
    expected = expected_customers((1, 2))
    table = RemoteTable("customers", key="id", read_function=pipeline.open_customers())
    with BlockingTable(table) as customers:
        found = {key: dict(customers.get(key)) for key in expected}
    assert {key: {**row, "id": key} for key, row in expected.items()} == found


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.long
def test_the_readme_s_commands_run_as_written(tmp_path: Path) -> None:
    with PageReader(tmp_path, tmp_path / "session.log") as reader:
        for block in blocks_of(EXAMPLE / "README.md"):
            reader.follow(block)
    streams = LakeStreams(open_lake(tmp_path / ".adjunct" / "lake"))
    rows = streams.read_arrow(streams.all_ranges("sold")).to_pylist()
    assert len(rows) == len(expected_sales((1, 2)))
    assert {row["title"] for row in rows} == {row["title"] for row in expected_sales((1, 2))}


def test_the_component_declares_the_application_of_the_python_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORDERS_POSTGRES", "postgresql://127.0.0.1:1/orders")
    monkeypatch.setenv("ORDERS_CATALOGUE", "catalogue")
    reload_applications()
    declared = yaml.safe_load((EXAMPLE / "defs.yaml").read_text(encoding="utf-8"))
    made = component(yaml.safe_dump(declared["attributes"], sort_keys=False)).applications()
    assert facts(made["orders"]) == facts(renamed.app)
