"""The package, imported from a zip file, as `spark-submit --py-files` and zipped deployments do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("resources", "assets", "orchestration", "examples")

USE_ALL_NAMES = """
import dagster_adjunct, json
from tests.public_names import public_names
print(json.dumps([dagster_adjunct.__file__, len(public_names())]))
"""

PLAN_AND_RUN = """
import json
import pyarrow as pa
from dagster_adjunct import (
    IN_PROCESS, Application, Schema, bounded_dataset, open_lake, plan_application, run_application,
    systems_for,
)

prices = bounded_dataset("prices", input="lake.prices", key="item", partitions=2)
app = Application("shop", engine="auto")
orders = app.input_stream("lake.orders")
priced = orders.join(app.table(prices), on="item").map("item", "quantity * price AS amount")
priced.send_to(app.output_stream("lake.amounts", key="item", partitions=2))

lake = open_lake("lake")
systems = systems_for(app, lake=lake)
streams = systems["lake"]
listed = Schema.of(item="string", price="bigint")
streams.create("prices", schema=listed, key=["item"], partitions=2)
sales = Schema.of(item="string", quantity="bigint")
streams.create("orders", schema=sales, key=["item"], partitions=2)
known = pa.table({"item": ["a", "b"], "price": [10, 20]})
streams.append("prices", known, producer="shop", sequence=1, end_of_dataset="v1")
streams.append(
    "orders", pa.table({"item": ["a", "b"], "quantity": [2, 3]}), producer="shop", sequence=1
)
plan = plan_application(app, systems=systems)
run_application(app, lake=lake, systems=systems, spark=IN_PROCESS, run="first")
found = streams.read_arrow(streams.all_ranges("amounts")).to_pylist()
print(json.dumps([len(plan.operators), sorted([row["item"], row["amount"]] for row in found)]))
"""

FILES_OF_THE_PACKAGE = """
import json
from pathlib import Path
from dagster_adjunct.orchestration.cli.new import create_project
from dagster_adjunct.resources.package_files import package_file
logging = package_file("resources/spark/log4j2.properties")
assert "rootLogger" in logging.read_text()
project = create_project("from-zip")
made = [str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()]
print(json.dumps([str(logging), sorted(made)]))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zip file with this checkout's package."""
    path = tmp_path_factory.mktemp("zip") / "package.zip"
    package = ROOT / "dagster_adjunct"
    files = [file for file in package.iterdir() if file.is_file()]
    for part in PARTS:
        files += [file for file in (package / part).rglob("*") if file.is_file()]
    with zipfile.ZipFile(path, "w") as content:
        for file in files:
            if "__pycache__" not in file.parts:
                content.write(file, file.relative_to(ROOT))
    return path


@pytest.fixture(scope="module")
def printed(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one process has printed that has done all of it: nothing is compiled for the next
    process that imports from the file.
    """
    done = subprocess.run(
        [sys.executable, "-c", USE_ALL_NAMES + PLAN_AND_RUN + FILES_OF_THE_PACKAGE],
        cwd=tmp_path_factory.mktemp("from-zip"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(archive), str(ROOT)))},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.lengthy
def test_all_public_names_can_be_imported_from_a_zip_file(archive: Path, printed: Any) -> None:
    file, names = printed[0]
    assert str(file).startswith(str(archive))
    assert names > 300


@pytest.mark.lengthy
def test_an_application_is_planned_and_run_from_a_zip_file(printed: Any) -> None:
    operators, amounts = printed[1]
    assert operators == 4
    assert amounts == [["a", 20], ["b", 60]]


@pytest.mark.lengthy
def test_a_project_is_made_from_the_templates_in_a_zip_file(archive: Path, printed: Any) -> None:
    logging, made = printed[2]
    assert not str(logging).startswith(str(archive))
    assert {"dagster.yaml", "from_zip/pipeline.py", ".gitignore"} <= set(made)
