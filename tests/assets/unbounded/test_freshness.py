"""How far a table is behind its stream, and when that is too far for its readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.declaration.policies import ChangeStreamOptions
from dagster_adjunct.assets.sources.entries import offsets_to_json
from dagster_adjunct.assets.unbounded.progress import StreamPosition, bootstrap_progress
from dagster_adjunct.resources.errors import DatasetError, StaleDatasetError
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.assets.conftest import World
from tests.assets.unbounded.following_plain import (
    COLUMNS,
    NAME,
    Table,
    keys_of,
    partition,
    table_in,
)
from tests.clocks import on_clock
from tests.faulty_store import Crash

NOW = datetime.now(UTC).replace(microsecond=0)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)


def send_at(table: Table, moment: datetime, **rows: int) -> None:
    """Append rows as if it were that time."""
    columns = {"k": pa.array([*rows], pa.string()), "n": pa.array([*rows.values()], pa.int32())}
    LakeStreams(on_clock(table.world.lake, lambda: moment)).append(
        NAME,
        pa.table(columns, COLUMNS.to_arrow()),
        producer="test",
        sequence=table.world._next(NAME),
    )


def confirmed(table: Table, moment: datetime) -> None:
    """Commit that the table was caught up at that time."""
    commit, manifest = table.store.read()
    assert manifest is not None
    table.store.log.commit(commit, manifest.after(confirmed_at=moment), by="test")


def lag(table: Table, number: int = 0, now: datetime = NOW):
    return StreamPosition.of({"lake": table.streams}, table.manifest).lags(now)[partition(number)]


def stale(
    systems: Mapping[str, Any], table: Table, limit: timedelta, now: datetime
) -> list[SystemStreamPartition]:
    return StreamPosition.of(systems, table.manifest).stale_partitions(limit, now)


def test_a_table_that_has_read_all_is_not_behind_however_long_its_stream_is_idle(
    world: World,
) -> None:
    table = table_in(world, partitions=1)
    table.send(a=1, b=2)
    table.advance()
    for later in (timedelta(0), 7 * DAY):
        behind = lag(table, now=NOW + later)
        assert (behind.offsets, behind.records, behind.lost, behind.seconds) == (0, 0, 0, 0.0)
        assert stale({"lake": table.streams}, table, MINUTE, NOW + later) == []


def test_the_lag_is_reported_by_partition_in_offsets_records_and_time(world: World) -> None:
    table = table_in(world, partitions=2)
    table.advance()
    confirmed(table, NOW - 7 * DAY)
    mine = keys_of(world, 1, 2)
    send_at(table, NOW - 2 * HOUR, **{mine[0]: 1, mine[1]: 2})
    send_at(table, NOW - HOUR, **{mine[2]: 3})
    assert lag(table, 0).offsets == 0
    behind = lag(table, 1)
    assert (behind.offset, behind.end, behind.offsets, behind.records, behind.lost) == (
        "0",
        "3",
        3,
        3,
        0,
    )
    assert 7200 <= behind.seconds <= 7200 * 1.1, (
        "the age of the oldest unread record, to within a tenth"
    )
    assert behind.to_json() == {
        "offsets": 3,
        "records": 3,
        "lost": 0,
        "seconds": round(behind.seconds, 1),
    }


def test_the_lag_in_time_is_at_most_that_since_the_table_was_caught_up(world: World) -> None:
    table = table_in(world, partitions=1)
    table.advance()
    confirmed(table, NOW - timedelta(seconds=30))
    send_at(table, NOW - HOUR, a=1)
    assert lag(table).seconds == 30
    confirmed(table, NOW - HOUR)
    send_at(table, NOW, b=1)
    assert 3600 <= lag(table).seconds <= 3600 * 1.1


def test_changes_that_retention_has_dropped_are_reported_as_lost(world: World) -> None:
    table = table_in(world, partitions=1)
    table.advance()
    table.send(a=1, b=2)
    table.send(c=3)
    table.drop_the_front()
    behind = lag(table, now=datetime.now(UTC))
    assert (behind.offsets, behind.records, behind.lost) == (3, 1, 2)
    later = datetime.now(UTC) + HOUR
    with pytest.raises(StaleDatasetError, match="of which retention has deleted 2"):
        StreamPosition.of({"lake": table.streams}, table.manifest).raise_if_stale(
            table.spec.name, MINUTE, later
        )


def test_a_table_is_stale_where_something_older_than_allowed_is_unread(world: World) -> None:
    table = table_in(world, partitions=2)
    table.advance()
    confirmed(table, NOW - DAY)
    ours, theirs = keys_of(world, 0, 2), keys_of(world, 1, 2)
    send_at(table, NOW - 10 * MINUTE, **{ours[0]: 1, ours[1]: 2, theirs[0]: 3})
    systems = {"lake": table.streams}
    assert stale(systems, table, 11 * MINUTE, NOW) == []
    StreamPosition.of(systems, table.manifest).raise_if_stale(table.spec.name, 11 * MINUTE, NOW)
    StreamPosition.of(systems, table.manifest).raise_if_stale(table.spec.name, timedelta.max, NOW)
    assert stale(systems, table, 9 * MINUTE, NOW) == [partition(0), partition(1)]
    with pytest.raises(StaleDatasetError) as caught:
        StreamPosition.of(systems, table.manifest).raise_if_stale(table.spec.name, 9 * MINUTE, NOW)
    error = caught.value
    assert (
        "dataset 'accounts' is stale: 2 offsets of lake.accounts.0 are not in it, the oldest about"
        " 0:10:" in str(error)
    )
    assert (
        "at most 0:09:00 is allowed (1 more of its partitions are too old as well)" in error.problem
    )
    assert "adjunct dataset advance accounts MODULE:APP" in error.next_step
    table.advance()
    StreamPosition.of(systems, table.manifest).raise_if_stale(table.spec.name, 9 * MINUTE, NOW)


def test_what_a_stale_table_lacks_is_reported_by_the_look_that_found_it_stale(world: World) -> None:
    table = table_in(world, partitions=1)
    table.advance()
    confirmed(table, NOW - DAY)
    send_at(table, NOW - HOUR, a=1)

    class GrowsAsItIsLookedAt:
        def __getattr__(self, name: str) -> Any:
            return getattr(table.streams, name)

        def snapshot(self, stream: str) -> Any:
            seen = table.streams.snapshot(stream)
            assert seen.upcoming([partition(0)])  # it is as it is looked at first
            send_at(table, NOW, b=2)
            return seen

    growing: Any = {"lake": GrowsAsItIsLookedAt()}
    with pytest.raises(StaleDatasetError, match=r"1 offsets of lake\.accounts\.0 are not in it"):
        StreamPosition.of(growing, table.manifest).raise_if_stale(table.spec.name, MINUTE, NOW)


def test_a_partition_that_was_added_has_been_read_to_nowhere(world: World) -> None:
    table = table_in(world, partitions=2)
    table.shape.partitions = 1
    table.advance()
    table.shape.partitions = None
    send_at(table, NOW - HOUR, **dict.fromkeys(keys_of(world, 1, 2), 1))
    assert lag(table, 1).offsets == 3
    assert stale({"lake": table.streams}, table, MINUTE, NOW) == [partition(1)]


def test_while_a_table_is_rebuilt_the_lag_is_that_of_the_one_served(world: World) -> None:
    table = table_in(world, partitions=1, chunk=1)
    table.send(a=1)
    table.send(b=2)
    table.advance()

    def crash() -> None:
        raise Crash("between chunks")

    with pytest.raises(Crash):
        table.advance(rebuild="a test", spark=crash)
    manifest = table.manifest
    assert manifest.bootstrap is not None
    assert manifest.bootstrap.state == "running"
    assert offsets_to_json({partition(0): "0"}) == manifest.offsets
    assert lag(table).offsets == 0
    progress = bootstrap_progress(
        {"lake": table.streams}, manifest, manifest.bootstrap.started_at + MINUTE
    )
    assert (progress.per_cent, progress.read, progress.total, progress.seconds) == (0, 0, 2, 60.0)
    assert progress.summary() == "0% of 2 offsets; to read: 2 of lake.accounts.0"
    table.advance()
    done = bootstrap_progress({"lake": table.streams}, table.manifest, NOW)
    assert (done.state, done.per_cent, dict(done.missing)) == ("done", 100, {})


def test_a_system_that_is_not_given_is_named(world: World) -> None:
    table = table_in(world, partitions=1)
    table.advance()
    with pytest.raises(DatasetError, match="systems has no stream system 'lake': it has kafka"):
        StreamPosition.of({"kafka": table.streams}, table.manifest)


def test_a_table_that_was_never_caught_up_does_not_say_how_long_ago(world: World) -> None:
    table = table_in(world, partitions=1)
    spec = replace(table.spec, following=ChangeStreamOptions(chunk=1))
    table.send(a=1)
    table.send(b=2)

    def crash() -> None:
        raise Crash("at the first chunk")

    with pytest.raises(Crash):
        table.advance(spec=spec, spark=crash)
    assert (lag(table).offsets, lag(table).seconds) == (2, None)
