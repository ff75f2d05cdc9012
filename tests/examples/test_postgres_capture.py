"""A table's changes on a stream: read in order they give the table, whatever interrupts the
capture.
"""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dagster_adjunct import Lake, LakeStreams, SystemStreamPartition, open_lake
from dagster_adjunct.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.examples.postgres_changes.capture import TableCapture
from dagster_adjunct.examples.postgres_changes.slot import Slot
from dagster_adjunct.streams import OffsetRange
from tests.faulty_store import Crash, Fault, FaultyStore
from tests.servers.pgchanges import COLUMNS, SUM, Bank

pytestmark = pytest.mark.server

NAMES = [part.split()[0] for part in COLUMNS.split(", ")]
Position = dict[SystemStreamPartition, str]


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return open_lake(tmp_path / "lake")


def capture_of(bank: Bank, lake: Lake, **more: Any) -> TableCapture:
    return TableCapture(bank.slot, lake, "accounts", COLUMNS, ("id",), **more)


def records(lake: Lake, start: Position | None = None) -> list[dict[str, Any]]:
    streams = LakeStreams(lake)
    ranges = streams.all_ranges("accounts")
    if start is not None:
        ranges = {ssp: OffsetRange(start[ssp], span.end) for ssp, span in ranges.items()}
    return (
        streams.read_arrow(ranges)
        .sort_by([("__partition", "ascending"), ("__offset", "ascending")])
        .to_pylist()
    )


def typed(name: str, value: Any) -> Any:
    """A value as PostgreSQL's driver gives it, from JSON: decimals and times are texts there."""
    read = {"rate": Decimal, "opened": datetime.fromisoformat}.get(name)
    return value if read is None or value is None else read(value)


def replayed(
    records_read: list[dict[str, Any]], table: dict[int, Any] | None = None
) -> list[tuple[Any, ...]]:
    """The table that records make, taken in order of each partition; a tombstone must follow its
    delete.
    """
    rows = dict(table or {})
    before: dict[str, Any] = {}
    for record in records_read:
        if record["value"] is None:
            assert record["__tombstone"]
            assert before["op"] == "d"
            assert before["before"]["id"] == record["id"]
            continue
        assert not record["__tombstone"]
        before = json.loads(record["value"])
        row = before["before"] if before["op"] == "d" else before["after"]
        assert row["id"] == record["id"]
        rows.pop(record["id"], None)
        if before["op"] != "d":
            rows[record["id"]] = tuple(typed(name, row[name]) for name in NAMES)
    return [rows[key] for key in sorted(rows)]


def test_replayed_changes_give_the_table_while_clerks_work(bank: Bank, lake: Lake) -> None:
    capture = capture_of(bank, lake)
    capture.start()
    bank.fill()
    appended = 0
    with bank.clerks() as wait:
        for _ in range(4):
            wait(60)
            appended += capture.read()
    appended += capture.read()
    assert capture.read() == 0
    assert replayed(records(lake)) == bank.rows()
    values = [json.loads(record["value"]) for record in records(lake) if record["value"]]
    assert len(values) == appended
    assert {value["op"] for value in values} == {"c", "u", "d"}
    assert sum(row[2] for row in bank.rows()) == SUM
    assert bank.refused < bank.committed


def test_a_snapshot_and_the_changes_after_it_give_the_table(
    bank: Bank, lake: Lake, tmp_path: Path
) -> None:
    capture = capture_of(bank, lake)
    bank.fill()
    capture.start()
    with bank.clerks() as wait:
        for number in range(3):
            wait(40)
            position = capture.snapshot(tmp_path / str(number))
            rows = pq.read_table(tmp_path / str(number) / "rows.parquet").to_pylist()
            assert sum(row["balance"] for row in rows) == SUM
            wait(40)
    capture.read()
    begin = {row["id"]: tuple(row[name] for name in NAMES) for row in rows}
    after = records(lake, position)
    changed = {record["id"] for record in after}
    expected = {row[0]: row for row in bank.rows()}
    assert changed
    assert {row[0]: row for row in replayed(after)} == {
        key: row for key, row in expected.items() if key in changed
    }
    assert {key: row for key, row in begin.items() if key not in changed} == {
        row[0]: row for row in bank.rows() if row[0] not in changed
    }
    assert after != records(lake)


def test_a_snapshot_can_begin_the_stream(bank: Bank, lake: Lake) -> None:
    capture = capture_of(bank, lake)
    bank.fill()
    capture.start()
    with bank.clerks() as wait:
        wait(20)
        capture.snapshot_into_stream()
        wait(20)
    capture.read()
    assert replayed(records(lake)) == bank.rows()


class LastAdvance(Slot):
    """A slot whose reader dies when it has moved it on."""

    def advance(self, connection: Any, end: int) -> None:
        super().advance(connection, end)
        raise Crash


@pytest.mark.parametrize(
    "point",
    [
        *("after the append", "after the advance"),
        *(
            pytest.param(point, marks=pytest.mark.long)
            for point in ("before the append", "after the ends")
        ),
    ],
)
def test_a_capture_that_is_killed_goes_on_without_loss_or_repetition(
    point: str, bank: Bank, lake: Lake
) -> None:
    capture = capture_of(bank, lake, most=20, ends="ends")
    capture.start()
    bank.fill()
    for number in range(3):
        with bank.clerks(seed=number) as wait:
            wait(25)
        most, nth = [(20, 1), (20, 2), (10_000, 1)][number]  # the last one dies at its only append
        fault = {
            "before the append": Fault(
                "put_if_match", nth, "crash-before", below="streams/accounts/CURRENT"
            ),
            "after the append": Fault(
                "put_if_match", nth, "crash-after", below="streams/accounts/CURRENT"
            ),
            "after the ends": Fault(
                "put_if_match", nth, "crash-after", below="streams/ends/CURRENT"
            ),
        }.get(point)
        dying = replace(
            capture,
            most=most,
            lake=Lake(FaultyStore(lake.store, [fault] if fault else []), lake.id),
        )
        if point == "after the advance":
            dying = replace(dying, slot=LastAdvance(bank.slot.dsn, bank.slot.table, bank.slot.name))
        with pytest.raises(Crash):
            dying.read()
    capture.read()
    assert replayed(records(lake)) == bank.rows()
    changes = [json.loads(record["value"]) for record in records(lake) if record["value"]]
    reported = [(one["transaction"]["id"], one["transaction"]["total_order"]) for one in changes]
    assert len(set(reported)) == len(reported)
    streams = LakeStreams(lake)
    boundaries = [
        json.loads(value)
        for value in streams.read_arrow(streams.all_ranges("ends")).column("value").to_pylist()
    ]
    ends = [one for one in boundaries if one["status"] == "END"]
    assert [one["status"] for one in boundaries] == ["BEGIN", "END"] * len(ends)
    assert {one["id"]: one["event_count"] for one in ends} == {
        id_: sum(1 for reported_id, _ in reported if reported_id == id_) for id_, _ in reported
    }
    assert len({one["id"] for one in ends}) == len(ends)


def test_an_update_of_the_key_deletes_the_old_one_and_creates_the_new_one(
    bank: Bank, lake: Lake
) -> None:
    capture = capture_of(bank, lake)
    capture.start()
    bank.server.execute(f"INSERT INTO {bank.table} (id, owner, balance) VALUES (1, 'a', 5)")
    bank.server.execute(f"UPDATE {bank.table} SET id = 2, balance = 6")
    capture.read()
    events = [json.loads(record["value"]) for record in records(lake) if record["value"]]
    reported = [
        (e["op"], (e["before"] or {}).get("id"), (e["after"] or {}).get("id")) for e in events
    ]
    assert sorted(reported, key=str) == [("c", None, 1), ("c", None, 2), ("d", 1, None)]
    assert {e["transaction"]["total_order"] for e in events} == {1, 2}
    assert [record["id"] for record in records(lake) if record["__tombstone"]] == [1]


def test_without_full_replica_identity_a_long_value_that_was_left_alone_is_refused(
    bank: Bank, lake: Lake
) -> None:
    bank.server.execute(f"ALTER TABLE {bank.table} REPLICA IDENTITY DEFAULT")
    bank.server.execute(f"ALTER TABLE {bank.table} ALTER note SET STORAGE EXTERNAL")
    capture = capture_of(bank, lake)
    capture.start()
    insert = (
        f"INSERT INTO {bank.table} (id, owner, balance, note) VALUES (1, 'a', 5, repeat('x', 9000))"
    )
    bank.server.execute(insert)
    assert capture.read() == 1
    bank.server.execute(f"UPDATE {bank.table} SET balance = 6")
    with pytest.raises(MalformedDocumentError, match="REPLICA IDENTITY FULL"):
        capture.read()


def test_two_captures_of_one_slot_do_not_run_at_once(bank: Bank, lake: Lake) -> None:
    capture = capture_of(bank, lake)
    capture.start()
    with bank.slot.reading(), pytest.raises(ConfigurationError, match="read by another process"):
        capture.read()
