"""Each advice that a plan gives about the order of a table, followed, and the table compared with
plain Python.

Scans of tags come from many gates, hours late, in several batches; batches come again, one run
dies, and a startpoint reads all of it again. A tag's records lie in many partitions where the
stream is partitioned by gate.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import pytest

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
from dagster_adjunct.resources.streams.startpoint import StartpointOldest
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from tests.orchestration.scan_tables import scanned
from tests.orchestration.step_world import StepWorld

pytestmark = pytest.mark.spark

COLUMNS = {
    "tag": "string",
    "gate": "string",
    "at": "timestamp",
    "n": "bigint",
    "gates": "array<string>",
    "facts": "json",
}
ALL = {"set": ["gate", "at"], "add": {"n": "1"}, "append": {"gates": "gate"}}
ONCE = {"idempotent": True, "on_replay": "skip"}


def declared(world: StepWorld, name: str, **conditions: Any) -> RemoteTable[Any, Any, Any]:
    store = SqliteTable(world.folder / "tags.sqlite", name, "tag", columns=COLUMNS, create=True)
    return RemoteTable(name, key="tag", write_function=store, **conditions)


def stored(world: StepWorld, name: str) -> dict[str, dict[str, Any]]:
    with sqlite3.connect(world.folder / "tags.sqlite") as connection:
        connection.row_factory = sqlite3.Row
        rows = [dict(row) for row in connection.execute(f'SELECT * FROM "{name}"')]
    for row in rows:
        row.update({part: json.loads(row[part]) for part in ("gates", "facts") if row[part]})
    return {row["tag"]: row for row in rows}


def sent(world: StepWorld, key: str) -> dict[str, list[Mapping[str, Any]]]:
    """Append scans to a stream with this key; return those of each tag, by partition and offset."""
    world.stream("scans", key, 8, gate="string", tag="string", at="timestamp")
    scans = scanned(11, 160)
    for start in range(0, len(scans), 60):
        world.send("scans", *scans[start : start + 60])
    by_tag = defaultdict(list)
    for row in world.streams.read_arrow(world.streams.all_ranges("scans")).to_pylist():
        by_tag[row["tag"]].append(row)
    return by_tag


def whatever_happens(world: StepWorld, app: Application) -> None:
    """Run it over several batches, of which one dies and one comes again, and once more from the
    oldest record on.
    """
    world.killed_when(app, "outputs")
    world.run(app)
    world.again(app)
    Startpoints(app, lake=world.lake).request(
        "lake.scans", StartpointOldest(), by="test", reason="a test"
    )
    world.run(app, run="again")


def test_each_advice_for_a_stream_by_another_key_loses_nothing(step_world: StepWorld) -> None:
    by_tag = sent(step_world, "gate")
    app = Application("by-gate", max_batch_records=120)
    scans = app.input_stream("lake.scans")
    scans.update(
        app.table(declared(step_world, "both", newest_by="at", **ONCE)), if_missing=[], **ALL
    )
    scans.update(
        app.table(declared(step_world, "lists", **ONCE)), append={"gates": "gate"}, if_missing=[]
    )
    scans.map("tag", "gate", "at").send_to(app.table(declared(step_world, "whole", newest_by="at")))
    own = [app.table(declared(step_world, name, newest_by="at")) for name in ("early", "late")]
    early, late = scans.filter("hour(at) < 12"), scans.filter("hour(at) >= 12")
    early.update(own[0], set=["gate", "at"], if_missing=[])
    late.update(own[1], set=["at"], if_missing=[])
    ways = app.table(declared(step_world, "ways", newest_by="at"))
    for part in (late, early):
        part.map("tag", "gate", "at").send_to(ways)
    merged = app.table(declared(step_world, "merged", newest_by="at", **ONCE))
    late.merge(early).update(merged, if_missing=[], **ALL)
    whatever_happens(step_world, app)

    def is_newest(rows: list[Any], record: Mapping[str, Any], *names: str) -> bool:
        newest = max(row["at"] for row in rows)
        at = [row for row in rows if row["at"] == newest]
        return record["at"].startswith(f"{newest:%Y-%m-%dT%H:%M:%S}") and all(
            record[name] in {row[name] for row in at} for name in names
        )

    for name in ("both", "merged"):
        table = stored(step_world, name)
        assert {tag: row["n"] for tag, row in table.items()} == {
            tag: len(rows) for tag, rows in by_tag.items()
        }
        assert {tag: sorted(row["gates"]) for tag, row in table.items()} == gates_in_any_order(
            by_tag
        )
    assert {
        t: sorted(row["gates"]) for t, row in stored(step_world, "lists").items()
    } == gates_in_any_order(by_tag)
    for name in ("both", "merged", "whole", "ways"):
        table = stored(step_world, name)
        assert [
            tag for tag, rows in by_tag.items() if not is_newest(rows, table[tag], "gate")
        ] == []
    for name, hours in (("early", range(12)), ("late", range(12, 24))):
        some = {
            tag: [row for row in rows if row["at"].hour in hours] for tag, rows in by_tag.items()
        }
        table, columns = stored(step_world, name), ("gate",) if name == "early" else ()
        assert table.keys() == {tag for tag, rows in some.items() if rows}
        assert [tag for tag in table if not is_newest(some[tag], table[tag], *columns)] == []


def gates_in_any_order(by_tag: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, list[Any]]:
    return {tag: sorted(row["gate"] for row in rows) for tag, rows in by_tag.items()}


@pytest.mark.long
def test_each_advice_to_partition_by_the_tables_key_loses_nothing(step_world: StepWorld) -> None:
    by_tag = sent(step_world, "tag")
    app = Application("by-tag", max_batch_records=120, strict=True)
    scans = app.input_stream("lake.scans")
    facts = {"facts": "named_struct('gate', gate)"}
    scans.update(
        app.table(declared(step_world, "both", **ONCE)),
        if_missing=[],
        **{**ALL, "add": {"n": "1", **facts}},
    )
    scans.map("tag", "gate", "at").send_to(app.table(declared(step_world, "whole")))
    columns_of_their_own = app.table(declared(step_world, "columns", **ONCE))
    scans.update(columns_of_their_own, add={"n": "1"}, if_missing=[], marks_as="counts")
    scans.update(columns_of_their_own, set=["gate"], if_missing=[], marks_as="gates")
    whatever_happens(step_world, app)

    both, whole, columns = (stored(step_world, name) for name in ("both", "whole", "columns"))
    last = {tag: rows[-1]["gate"] for tag, rows in by_tag.items()}
    for table in (both, whole, columns):
        assert {tag: row["gate"] for tag, row in table.items()} == last
    for table in (both, columns):
        assert {tag: row["n"] for tag, row in table.items()} == {
            tag: len(rows) for tag, rows in by_tag.items()
        }
    assert {tag: row["gates"] for tag, row in both.items()} == {
        tag: [row["gate"] for row in rows] for tag, rows in by_tag.items()
    }
    assert {tag: row["facts"]["gate"] for tag, row in both.items()} == last
