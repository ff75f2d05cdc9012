"""Commands that are typed often are quick: they import neither Dagster nor Spark, and start no
JVM.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Lake,
    LakeStreams,
    Schema,
    advance_dataset,
    bounded_dataset,
    open_lake,
)

APP = """
from dagster_adjunct import Application, bounded_dataset
from dagster_adjunct.tables import RemoteTable, SqliteTable

store = SqliteTable("seen.sqlite", "seen", "k", columns={"k": "string", "n": "bigint"}, create=True)
planes = bounded_dataset("planes", input="lake.planes", key="k", partitions=2)
app = Application("shop", engine="auto")
flights = app.input_stream("lake.flights").filter("n > 0 and k is not null").with_columns(twice="n * 2")
flights.join(app.table(planes), on="k", how="left", select=["n as seats"]).update(
    app.table(RemoteTable("seen", key="k", read_function=store, write_function=store)), set={"n": "n"}, if_missing=[]
)
"""
HEAVY = {
    "dagster",
    "dagster_pyspark",
    "pyspark",
    "py4j",
    "pandas",
    "polars",
    "duckdb",
    "boto3",
    "jinja2",
}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    folder = tmp_path_factory.mktemp("quick")
    (folder / "shop_quick.py").write_text(APP)
    lake = open_lake(folder / "lake")
    streams = LakeStreams(lake)
    for name in ("flights", "planes"):
        streams.create(name, schema=Schema.of(k="string", n="bigint"), key=["k"], partitions=2)
        streams.append(name, [{"k": "a", "n": 1}], producer="p", sequence=1, end_of_dataset="v1")
    planes = bounded_dataset("planes", input="lake.planes", key="k", partitions=2)
    advance_dataset(planes, lake=lake, systems={"lake": streams}, spark=IN_PROCESS, by="me")
    loaded(lake, "run", "shop_quick:app", "--master", "none")
    return lake


def loaded(lake: Lake, *arguments: str) -> set[str]:
    """Return the packages that a command has loaded; "a child process" is one of them if it has
    started one.
    """
    code = (
        "import subprocess, sys\nstarted = []\nmake ="
        " subprocess.Popen.__init__\nsubprocess.Popen.__init__ = lambda self, *given, **more:"
        " (started.append(1), make(self, *given, **more))[1]\nfrom"
        " dagster_adjunct.orchestration.cli.main import root\nroot(sys.argv[1:],"
        " standalone_mode=False)\nprint('LOADED', *{name.partition('.')[0] for name in"
        " sys.modules}, *(['child'] if started else []))\n"
    )
    command = [sys.executable, "-c", code, *arguments, "--lake", lake.url]
    done = subprocess.run(
        command, cwd=Path(lake.url).parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("LOADED")[2].split())


@pytest.mark.lengthy
@pytest.mark.parametrize(
    "command",
    [
        ("table", "get", "seen", "a"),
        ("plan", "shop_quick:app"),
        ("dataset", "get", "planes", "a"),
        ("dataset", "list"),
        ("stream", "list"),
        ("stream", "show", "flights"),
        ("checkpoint", "show", "shop"),
    ],
    ids=" ".join,
)
def test_a_quick_command_loads_neither_dagster_nor_spark(
    command: tuple[str, ...], lake: Lake
) -> None:
    found = loaded(lake, *command) & (HEAVY | {"child"})
    # pyarrow imports it for a literal
    assert found - ({"pandas"} if command[0] == "plan" else set()) == set()
