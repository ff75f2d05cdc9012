"""The example over files, Delta and Iceberg: its table is what plain Python makes of what was delivered."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pytest
from pyiceberg.catalog import load_catalog

from dagster_adjunct.examples.purchases import deliver
from tests.doc_blocks import ROOT, PageReader, blocks_of
from tests.kept_processes import program

if TYPE_CHECKING:
    from tests.servers.s3 import S3Server

EXAMPLE = ROOT / "examples" / "purchases"


def expected(parts: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Return the purchases after these parts, each joined with what there was in its part."""
    rows = []
    for part in parts:
        products = {product["sku"]: product for product in deliver.products(part)}
        countries = {account["id"]: account["country"] for account in deliver.accounts(part)}
        for name, events in deliver.files(part):
            for event in events:
                for item in event["items"]:
                    product = products.get(item["sku"], {})
                    price = product.get("price")
                    amount = None if price is None else price * item["quantity"]
                    account = event["account"]["id"]
                    row = (event["id"], name[4:14], account, countries.get(account), item["sku"])
                    row += (product.get("name"), amount)
                    rows.append(row if parts == (1, 2) else (*row, event["channel"]))
    return sorted(rows, key=str)


def purchases_table() -> Any:
    """Return the output table; PyIceberg reads the environment only when it is imported."""
    start = "PYICEBERG_CATALOG__SHOP__"
    settings = {
        name.removeprefix(start).lower(): os.environ[name]
        for name in os.environ
        if name.startswith(start)
    }
    return load_catalog("shop", **settings).load_table("shop.purchases")


def purchases(names: str) -> list[tuple[Any, ...]]:
    """Return columns of the output table as DuckDB reads them."""
    table = purchases_table().scan().to_arrow()
    database = duckdb.connect()
    database.register("purchases", table)
    return sorted(database.execute(f"SELECT {names} FROM purchases").fetchall(), key=str)


def run(*command: str) -> str:
    ended = subprocess.run(
        [program("python"), "-m", *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.server)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(tmp_path / "purchases")
    monkeypatch.setenv("ADJUNCT_LAKE", str(tmp_path / "lake"))
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("versitygw")
        server.set_in(monkeypatch)
        root = f"s3://{server.bucket()}/shop"
    monkeypatch.setenv("PURCHASES", root)
    (tmp_path / "warehouse").mkdir()
    settings = {
        "TYPE": "sql",
        "URI": f"sqlite:///{tmp_path}/catalogue.sqlite",
        "WAREHOUSE": f"file://{tmp_path}/warehouse",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__SHOP__{name}", value)


COLUMNS = "id, CAST(day AS VARCHAR), account, country, sku, name, amount"


@pytest.mark.lengthy
@pytest.mark.usefixtures("place")
def test_purchases_are_what_plain_python_makes_of_them() -> None:
    example = "dagster_adjunct.examples.purchases"
    main = "dagster_adjunct.orchestration.cli.main"
    run(f"{example}.deliver", "1")
    run(main, "run", f"{example}.pipeline:app", "--master", "none")
    assert purchases(f"{COLUMNS}, channel") == expected((1,))
    run(f"{example}.deliver", "2")
    run(main, "run", f"{example}.evolved:app", "--master", "none")
    assert purchases(COLUMNS) == expected((1, 2))
    table = purchases_table()
    assert "channel" not in table.schema().column_names
    days = {row["partition"]["at_day"] for row in table.inspect.partitions().to_pylist()}
    assert len(days) == 2


@pytest.mark.lengthy
@pytest.mark.long
def test_the_readme_s_commands_run_as_written(tmp_path: Path) -> None:
    with PageReader(tmp_path, tmp_path / "session.log") as reader:
        for block in blocks_of(EXAMPLE / "README.md"):
            reader.follow(block)
