"""A stream's whole life on real S3 servers over a socket."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pyarrow as pa
import pytest

from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.streams.lake import key_index
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams, Policies
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.clocks import Clock, on_clock
from tests.resources.streams.stream_helpers import SCHEMA
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.server


def test_appends_race_and_maintenance_collects_on_s3(
    s3_server: S3Server,
    records: Callable[..., pa.Table],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_index, "FEWEST_RECORDS", 1)
    lake = open_lake(s3_server.url(), settings=s3_server.settings)
    streams = LakeStreams(on_clock(lake, clock))
    policies = Policies(
        retention=Retention(max_bytes=10**6),
        compaction=CompactionPolicy(min_segments=3),
        find_by=["v"],
    )
    streams.create("s", schema=SCHEMA, key=["k"], partitions=2, **policies)

    def append(number: int) -> None:
        own = LakeStreams(on_clock(lake, clock))
        for sequence in range(4):
            for _ in range(2):
                own.append(
                    "s", records((f"k{number}", sequence)), producer=f"p{number}", sequence=sequence
                )

    threads = [Thread(target=append, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = streams.read_arrow(streams.all_ranges("s"))
    rows = sorted((row["k"], row["v"]) for row in before.to_pylist())
    assert rows == [(f"k{number}", sequence) for number in range(3) for sequence in range(4)]

    done = streams.maintain("s", clock.now)
    assert (done.merged_segments, done.indexes) == (12, 1)
    assert streams.read_arrow(streams.all_ranges("s")).equals(before)
    places = streams.find_records(streams.all_ranges("s"), pa.table({"v": [2, 9]}))
    found = streams.read_records("s", places)
    assert found.equals(before.filter(pa.compute.equal(before.column("v"), 2)))
    # The store's own clock dates pages and manifests; segments carry the time of their attempt.
    assert streams.maintain("s", clock.forward(hours=3)).deleted_objects >= 12
    assert streams.read_arrow(streams.all_ranges("s")).equals(before)
    assert streams.offset_for_timestamp(SystemStreamPartition("lake", "s", 0), 0) == "0"
