"""A table in a real PostgreSQL, changed by clerks all the time, and the dataset that follows it:
the two are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset, unbounded_dataset
from dagster_adjunct.assets.declaration.envelopes import DebeziumEnvelope
from dagster_adjunct.assets.declaration.policies import DeltaCompaction
from dagster_adjunct.assets.declaration.snapshots import ParquetSnapshot
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.examples.postgres_changes.capture import TableCapture
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.assets.conftest import World
from tests.faulty_store import Fault, FaultyStore
from tests.servers.pgchanges import COLUMNS, SUM, Bank

pytestmark = [pytest.mark.server, pytest.mark.spark]

NAMES = [part.split()[0] for part in COLUMNS.split(", ")]
COMPACTED = DeltaCompaction(deltas=2)
ENVELOPE = DebeziumEnvelope(COLUMNS, decimals="string")


def capture_of(bank: Bank, world: World, **more: Any) -> TableCapture:
    return TableCapture(bank.slot, world.lake, "accounts", COLUMNS, ("id",), **more)


def accounts(name: str = "accounts", **more: Any) -> AdjunctDataset:
    return unbounded_dataset(
        name,
        input="lake.accounts",
        key="id",
        partitions=4,
        **{"changes": ENVELOPE, "compaction": COMPACTED, **more},
    )


def plain(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in NAMES)


def expected(bank: Bank) -> dict[int, tuple[Any, ...]]:
    return {row[0]: row for row in bank.rows(", ".join(NAMES))}


def by_spark(world: World, view: VersionReader) -> dict[int, tuple[Any, ...]]:
    columns = [f"unix_micros({name}) AS {name}" if name == "opened" else name for name in NAMES]
    rows = [row.asDict() for row in view.frame(world.spark()).selectExpr(*columns).collect()]
    for row in rows:
        row["opened"] = datetime.fromtimestamp(0, UTC) + timedelta(microseconds=row["opened"])
    by_id = {row["id"]: plain(row) for row in rows}
    assert len(by_id) == len(rows), "a key stands twice in the frame"
    return by_id


def check_equal(world: World, spec: AdjunctDataset, bank: Bank, also: set[int]) -> None:
    """The dataset is the table, row by row: for Spark, and by get, where keys that are gone are
    not there.
    """
    view, table = world.view(spec), expected(bank)
    assert by_spark(world, view) == table
    for key in table.keys() | also:
        row = view.get(key)
        assert (None if row is None else plain(row)) == table.get(key)
    assert sum(row[2] for row in table.values()) == SUM


def check_consistent(world: World, spec: AdjunctDataset) -> None:
    """Spark and readers by key see the same entries in whatever the dataset is made of now."""
    view = world.view(spec)
    frame = by_spark(world, view)
    assert frame == {key: plain(entry) for key, entry in view.items()}
    assert view.rows in (None, len(frame))


def follow_to_the_end(world: World, spec: AdjunctDataset) -> None:
    while world.advance(spec).action != "up-to-date":
        pass


@pytest.mark.long  # tests/examples/test_postgres_capture.py does while clerks work, too
@pytest.mark.parametrize(
    "order_by",
    [
        pytest.param(None, id="by offset", marks=pytest.mark.long),
        pytest.param("source.lsn", id="by log position"),
    ],
)
def test_a_dataset_that_followed_a_busy_table_equals_it(
    order_by: str | None, bank: Bank, sparkling: World
) -> None:
    capture, spec = capture_of(bank, sparkling), accounts(order_by=order_by)
    capture.start()
    bank.fill()
    actions, keys = [], set(expected(bank))
    with bank.clerks() as wait:
        for _ in range(3):
            wait(15)
            capture.read()
            actions.append(sparkling.advance(spec).action)
            check_consistent(sparkling, spec)
            keys |= set(expected(bank))
    assert actions == ["bootstrapped", "applied", "applied"]
    capture.read()
    follow_to_the_end(sparkling, spec)
    assert keys - set(expected(bank)), "no key was ever deleted"
    check_equal(sparkling, spec, bank, keys)


@pytest.mark.long  # tests/examples/test_postgres_capture.py shows it of the example
@pytest.mark.parametrize(
    "order_by",
    [pytest.param(None, id="by offset"), pytest.param("source.lsn", id="by log position")],
)
def test_a_bulk_snapshot_and_the_stream_from_its_position_give_the_table(
    order_by: str | None, bank: Bank, sparkling: World, tmp_path: Path
) -> None:
    capture = capture_of(bank, sparkling)
    bank.fill()  # before the slot: these rows are in no stream
    capture.start()
    keys = set(expected(bank))
    with bank.clerks() as wait:
        wait(40)
        position = capture.snapshot(tmp_path / "export")
        wait(40)
        capture.read()
        spec = accounts(order_by=order_by, initial=ParquetSnapshot(str(tmp_path / "export")))
        report = sparkling.advance(spec)
        assert report.action == "bootstrapped"
        check_consistent(sparkling, spec)
        assert report.counters["loaded"] > 0
        streams = LakeStreams(sparkling.lake)
        after = sum(
            int(end) - int(position[ssp]) for ssp, end in streams.upcoming(position).items()
        )
        assert 0 < report.counters["read"] <= after
        wait(20)
    capture.read()
    follow_to_the_end(sparkling, spec)
    check_equal(sparkling, spec, bank, keys)


def sums(world: World, spec: AdjunctDataset, versions: list[str]) -> list[int]:
    store = StoredVersions(world.lake, spec)
    frames = [store.version(version).frame(world.spark()) for version in versions]
    return [
        frame.selectExpr("coalesce(sum(balance), 0) AS balance").collect()[0].balance
        for frame in frames
    ]


def balance_of_stream(lake: Lake) -> int:
    """What the accounts hold together by the changes that the stream has so far."""
    streams, last = LakeStreams(lake), dict[int, str | None]()
    ends = streams.upcoming(streams.partitions("accounts"))
    ranges = {ssp: OffsetRange("0", end) for ssp, end in ends.items() if end != "0"}
    for record in streams.read_arrow(ranges, columns=["id", "value"]).to_pylist():
        last[record["id"]] = record["value"]
    rows = [json.loads(value)["after"] for value in last.values() if value]
    return sum(row["balance"] for row in rows if row)


@pytest.mark.long  # tests/assets/changes/test_whole_transactions.py shows it without a server
def test_every_commit_holds_whole_transactions(bank: Bank, sparkling: World) -> None:
    """The capture appends three changes at a time; where that cuts a transaction in two, the
    datasets are advanced.
    """
    capture = capture_of(bank, sparkling, most=3, ends="ends")
    bank.fill()
    capture.start()
    capture.snapshot_into_stream()
    whole = accounts(
        "whole",
        changes=DebeziumEnvelope(
            COLUMNS, decimals="string", transactions="lake.ends", collection=bank.table
        ),
    )
    torn = accounts("torn")
    versions: dict[str, list[str]] = {"whole": [], "torn": []}

    def advance() -> None:
        for spec in (whole, torn):
            versions[spec.name] += sparkling.advance(spec).sealed

    def advance_within_a_transaction() -> None:
        if len(versions["torn"]) < 4 and balance_of_stream(sparkling.lake) != SUM:
            advance()

    between = [
        Fault(
            "put_if_match",
            nth,
            "meanwhile",
            advance_within_a_transaction,
            below="streams/accounts/CURRENT",
        )
        for nth in range(1, 2000)
    ]
    advance()
    with bank.clerks() as wait:
        wait(40)
    lake = sparkling.lake
    replace(capture, lake=Lake(FaultyStore(lake.store, between), lake.id)).read()
    advance()
    assert len(versions["whole"]) > 3
    assert sums(sparkling, whole, versions["whole"]) == [SUM] * len(versions["whole"])
    assert set(sums(sparkling, torn, versions["torn"])) > {SUM}, (
        "no append cut a transaction in two: this proves nothing"
    )
    check_equal(sparkling, whole, bank, set())
