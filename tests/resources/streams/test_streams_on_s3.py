"""A stream's whole life on real S3 servers over a socket."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import pyarrow as pa
import pytest

from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy, Retention
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from tests.clocks import Clock, on_clock
from tests.resources.streams.stream_helpers import SCHEMA
from tests.servers.s3 import S3Server

pytestmark = pytest.mark.server


def test_appends_race_and_maintenance_collects_on_s3(
    s3_server: S3Server, records: Callable[..., pa.Table], clock: Clock
) -> None:
    lake = open_lake(s3_server.url(), settings=s3_server.settings)
    streams = LakeStreams(on_clock(lake, clock))
    policies = {
        "retention": Retention(max_bytes=10**6),
        "compaction": CompactionPolicy(min_segments=3),
    }
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

    assert streams.maintain("s", clock.now).merged_segments == 12
    assert streams.read_arrow(streams.all_ranges("s")).equals(before)
    # The store's own clock dates pages and manifests; segments carry the time of their attempt.
    assert streams.maintain("s", clock.forward(hours=3)).deleted_objects >= 12
    assert streams.read_arrow(streams.all_ranges("s")).equals(before)
    assert streams.offset_for_timestamp(SystemStreamPartition("lake", "s", 0), 0) == "0"
