"""The wheel, installed beside a project that has folders and modules of its own with our
packages' names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("resources", "assets", "orchestration", "examples", "dagster_adjunct")
FILES = ("pyproject.toml", "README.md", "LICENSE")

# What a Dagster project calls its own folders; each would be an ImportError if it took the place of
# one of ours.
PROJECT = {
    "resources.py": "WAREHOUSE = 'ours'\n",
    "assets/__init__.py": "from assets.orders import ORDERS\n",
    "assets/orders.py": (
        """
ORDERS = [(1, "a", 2), (2, "b", 3), (3, "a", 5)]


def in_cents():
    from resources import WAREHOUSE  # of the project, in Spark's tasks

    assert WAREHOUSE == "ours"
    return lambda record: [{"item": record["item"], "cents": record["price"] * 100}]
"""
    ),
    "orchestration/__init__.py": "",
    "orchestration/prices.py": "PRICES = [('a', 10), ('b', 20)]\n",
    "examples.py": "NAME = 'shop'\n",
    "shop.py": (
        """
import json
import sys

import pyarrow as pa

from assets import ORDERS
from dagster_adjunct import (
    Application, Schema, bounded_dataset, open_lake, run_application, session_scope, systems_for
)
from dagster_adjunct.changes import PythonExtractor
from examples import NAME
from orchestration.prices import PRICES

in_cents = PythonExtractor("assets.orders:in_cents", columns="item STRING, cents BIGINT", unchanged=["item"])
prices = bounded_dataset("prices", input="lake.prices", key="item", partitions=2, extractor=in_cents)
app = Application(NAME)
orders = app.input_stream("lake.orders")
orders.join(app.table(prices), on="item").map("item", "quantity * cents AS amount").send_to(
    app.output_stream("lake.amounts", key="item", partitions=2)
)

if __name__ == "__main__":
    lake = open_lake(sys.argv[1])
    systems = systems_for(app, lake=lake)
    streams = systems["lake"]
    streams.create("prices", schema=Schema.of(item="string", price="bigint"), key=["item"], partitions=2)
    sales = Schema.of(id="bigint", item="string", quantity="bigint")
    streams.create("orders", schema=sales, key=["item"], partitions=2)
    known = pa.Table.from_pylist([{"item": item, "price": price} for item, price in PRICES])
    streams.append("prices", known, producer="shop", sequence=1, end_of_dataset="v1")
    sold = pa.Table.from_pylist([{"id": id, "item": item, "quantity": quantity} for id, item, quantity in ORDERS])
    streams.append("orders", sold, producer="shop", sequence=1)
    with session_scope(master=sys.argv[2]) as session:
        run_application(app, lake=lake, systems=systems, spark=session, run="first")
    found = streams.read_arrow(streams.all_ranges("amounts")).to_pylist()
    print(json.dumps(sorted([row["item"], row["amount"]] for row in found)))
"""
    ),
}

EXPECTED = [["a", 2000], ["a", 5000], ["b", 6000]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy, so that no leftover of a build is packed."""
    folder = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        shutil.copytree(
            ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in FILES:
        shutil.copy(ROOT / file, folder / file)
    command = [
        "-m",
        "pip",
        "wheel",
        ".",
        "--no-deps",
        "--no-build-isolation",
        "--quiet",
        "--wheel-dir",
        "dist",
    ]
    subprocess.run([sys.executable, *command], cwd=folder, check=True, capture_output=True)
    return next((folder / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment: the wheel, and the libraries of this one without this
    checkout.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    packages = next((folder / "lib").glob("python3*/site-packages"))
    with zipfile.ZipFile(wheel) as content:  # what pip does for a wheel of pure Python
        content.extractall(packages)
    libraries = {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        str(Path(pytest.__file__).parents[1]),
    }
    (packages / "libraries.pth").write_text("".join(f"{path}\n" for path in sorted(libraries)))
    return folder / "bin/python"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    for name, text in PROJECT.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(python: Path, folder: Path, *arguments: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYSPARK_")
    }
    environment |= {"PYTHONPATH": str(folder), "ADJUNCT_LAKE_SHARED": "true"}
    environment |= {"ADJUNCT_ENGINE": "auto" if "none" in arguments else "spark"}
    done = subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.lengthy
def test_a_wheel_holds_one_package_with_all_that_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        links = [
            info.filename
            for info in content.infolist()
            if (info.external_attr >> 16) & 0o170000 == 0o120000
        ]
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "dagster_adjunct"
    }
    assert links == []
    sources = {
        f"dagster_adjunct/{path.relative_to(ROOT)}"
        for part in PARTS[:4]
        for path in (ROOT / part).rglob("*.py")
    }
    assert sources <= set(names)
    data = (
        "py.typed",
        "resources/spark/log4j2.properties",
        "resources/sql/spark_functions.txt",
        "orchestration/code_location/dagster.yaml",
    )
    assert {f"dagster_adjunct/{name}" for name in data} <= set(names)
    template = [
        path
        for path in (ROOT / "examples/new_project").rglob("*.*")
        if "__pycache__" not in path.parts
    ]
    assert {
        f"dagster_adjunct/{path.relative_to(ROOT)}" for path in template if path.is_file()
    } <= set(names)


@pytest.mark.lengthy
def test_the_package_is_found_where_it_was_installed_next_to_names_of_the_project(
    python: Path, project: Path
) -> None:
    code = (
        "import assets, dagster_adjunct, json, resources; "
        "print(json.dumps([module.__file__ for module in (dagster_adjunct, resources, assets)]))"
    )
    ours, resources, assets = json.loads(run(python, project, "-c", code))
    assert Path(ours).is_relative_to(python.parents[1])
    assert [resources, assets] == [
        str(project / "resources.py"),
        str(project / "assets/__init__.py"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "master",
    [
        "none",
        pytest.param("local[2]", marks=[pytest.mark.long, pytest.mark.spark, pytest.mark.server]),
    ],
)
def test_an_application_of_such_a_project_runs_on_this_machine(
    python: Path, project: Path, tmp_path: Path, master: str
) -> None:
    assert json.loads(run(python, project, "shop.py", str(tmp_path / "lake"), master)) == EXPECTED


@pytest.mark.spark
@pytest.mark.server
@pytest.mark.slow
# another application runs on one in tests/orchestration/dagster/test_submission.py
@pytest.mark.long
def test_an_application_of_such_a_project_runs_on_a_cluster(
    python: Path, project: Path, tmp_path: Path, spark_cluster: str
) -> None:
    assert (
        json.loads(run(python, project, "shop.py", str(tmp_path / "lake"), spark_cluster))
        == EXPECTED
    )
