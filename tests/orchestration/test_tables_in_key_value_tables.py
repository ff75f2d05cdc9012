"""An application's tables in a key-value table: updates, lookups, the command line and Spark see
the same records.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.table_registry import register_tables
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.resources.key_value.frames import read_key_value_table
from dagster_adjunct.resources.key_value.manager import KeyValueTableManager
from dagster_adjunct.resources.key_value.serializers import JsonSerializer, TextSerializer
from dagster_adjunct.resources.key_value.table import KeyValueTable
from dagster_adjunct.resources.streams.startpoint import StartpointOldest
from dagster_adjunct.resources.table_backends.key_value_rows import KeyValueRows
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.kept_processes import program
from tests.orchestration.scan_tables import COLUMNS, Store, counting, newest, scanned, send
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark


def tags(world: StepWorld) -> KeyValueRows:
    return KeyValueRows(world.lake, "app", "tags", "tag", columns=COLUMNS, create=True)


def entries(world: StepWorld) -> dict[str, tuple[dict[str, object], bytes]]:
    """Return the records and their versions, as a DataFrame of the key-value table has them."""
    table: KeyValueTable[str, object] = KeyValueTableManager(world.lake).open(
        "app", "tags", key=TextSerializer(), value=JsonSerializer()
    )
    rows = read_key_value_table(table, spark=world.spark()).collect()
    return {row.key: (json.loads(row.value), bytes(row.version)) for row in rows}


def test_counts_are_exact_and_a_batch_or_stream_that_comes_again_writes_nothing(
    step_world: StepWorld,
) -> None:
    scans = scanned(1, 300)
    send(step_world, scans)
    app = counting(Store(tags(step_world), lambda _: []), on_replay="skip")
    step_world.run(app)
    there = entries(step_world)
    expected = {tag: 2 * count for tag, count in Counter(tag for _, tag, _ in scans).items()}
    assert {tag: record["scans"] for tag, (record, _) in there.items()} == expected
    step_world.again(app)
    Startpoints(app, lake=step_world.lake).request(
        "lake.scans", StartpointOldest(), by="test", reason="a test"
    )
    assert step_world.run(app, run="run-2").counters["tags"]["skipped"] == 600
    assert entries(step_world) == there


def test_the_newest_is_kept_and_read_by_another_application_and_the_command_line(
    step_world: StepWorld,
) -> None:
    scans = scanned(2, 200)
    send(step_world, scans)
    last = Application("last", max_batch_records=100)
    function = tags(step_world)
    table = RemoteTable(
        "tags", key="tag", read_function=function, write_function=function, newest_by="at"
    )
    last.input_stream("lake.scans").map("tag", "gate", "at").send_to(last.table(table))
    step_world.run(last)
    with register_tables(step_world.lake, last, by="test"):  # as every run does
        pass

    seen = Application("seen")
    out = seen.output_stream("lake.out", partitions=2, key="tag")
    joined = (
        seen.input_stream("lake.scans")
        .map("tag")
        .join(
            seen.table(RemoteTable("tags", key="tag", read_function=function)),
            on="tag",
            select={"at": "timestamp"},
        )
    )
    joined.send_to(out)
    step_world.run(seen)
    assert {row["tag"]: row["at"] for row in step_world.rows("out")} == newest(scans)

    command = [program("adjunct"), "table", "get", "tags", "tag-7"]
    reported = subprocess.run(
        [*command, "--lake", step_world.lake.url, "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert reported.returncode == 0, reported.stderr
    assert newest(scans)["tag-7"].isoformat()[:19] in reported.stdout.replace(" ", "T")
