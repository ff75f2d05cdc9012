"""Commands that are typed often are quick: they import neither Dagster nor Spark, and start no
JVM.
"""

from __future__ import annotations

import json
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
from tests.kept_processes import program

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


COMMANDS = [
    ("table", "get", "seen", "a"),
    ("dataset", "get", "planes", "a"),
    ("dataset", "list"),
    ("stream", "list"),
    ("stream", "show", "flights"),
    ("checkpoint", "show", "shop"),
    ("plan", "shop_quick:app"),  # last: it loads more than the others may
]
# In one process, whose start would take most of the time; each command adds to what is loaded.
CODE = """
import json, subprocess, sys

started = []
make = subprocess.Popen.__init__

def counted(self, *given, **more):
    started.append("child")
    make(self, *given, **more)

subprocess.Popen.__init__ = counted
from dagster_adjunct.orchestration.cli.main import root

for command in json.loads(sys.argv[1]):
    root(command, standalone_mode=False)
    loaded = {name.partition(".")[0] for name in sys.modules}
    print("LOADED", json.dumps([*loaded, *started]))
"""


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
    command = ["run", "shop_quick:app", "--master", "none", "--lake", lake.url]
    subprocess.run([program("adjunct"), *command], cwd=folder, capture_output=True, check=True)
    return lake


@pytest.fixture(scope="module")
def loaded(lake: Lake) -> dict[tuple[str, ...], set[str]]:
    """The packages that are loaded after each command; "child" is one of them once a process was
    started.
    """
    commands = json.dumps([[*command, "--lake", lake.url] for command in COMMANDS])
    done = subprocess.run(
        [sys.executable, "-c", CODE, commands],
        cwd=Path(lake.url).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = [set(json.loads(part.partition("\n")[0])) for part in done.stdout.split("LOADED")[1:]]
    return dict(zip(COMMANDS, found, strict=True))


@pytest.mark.lengthy
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_quick_command_loads_neither_dagster_nor_spark(
    command: tuple[str, ...], loaded: dict[tuple[str, ...], set[str]]
) -> None:
    found = loaded[command] & (HEAVY | {"child"})
    # pyarrow imports it for a literal
    assert found - ({"pandas"} if command[0] == "plan" else set()) == set()
