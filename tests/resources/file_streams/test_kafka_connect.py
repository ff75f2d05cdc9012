"""Files as Kafka Connect's S3 sink lays them out: `topics/TOPIC/partition=N/TOPIC+N+OFFSET.json`."""

from __future__ import annotations

import gzip
import json

import pytest

from dagster_adjunct.resources.file_streams.folder import FolderStreams, file_stream
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.resources.file_streams.landing import CLICKS, Landing


def records_of(system: FolderStreams) -> list[tuple[int, int]]:
    """Return the new and the old records, as their partition and offset in Kafka."""
    system.admit("clicks")
    span = OffsetRange("0", system.upcoming([CLICKS])[CLICKS])
    rows = system.read_arrow({CLICKS: span}).to_pylist()
    return [(row["partition"], row["at"]) for row in rows]


@pytest.mark.server
@pytest.mark.parametrize("compressed", [False, True])
def test_the_files_of_the_sink_are_read_once_with_their_partition(
    either: Landing, lake: Lake, compressed: bool
) -> None:
    flush = 3

    def flushed(partition: int, start: int) -> None:
        """Write the file of `flush` records, as the sink does."""
        records = [json.dumps({"at": start + n}) + "\n" for n in range(flush)]
        data = "".join(records).encode()
        name = f"partition={partition}/clicks+{partition}+{start:010}.json"
        if compressed:
            data = gzip.compress(data, mtime=0)
            name += ".gz"
        either.put(name, data)

    url = f"{either.url}/topics/clicks"
    put = either.put
    either.put = lambda name, data: put(f"topics/clicks/{name}", data)  # type: ignore[method-assign]
    file_stream(
        "clicks",
        url,
        format="jsonl",
        schema="partition int, at bigint",
        path_columns=["partition"],
        pattern="clicks+*.json*",
    )
    system = FolderStreams(lake)
    put("topics/other/partition=0/other+0+0000000000.json", b'{"no": 1}\n')
    flushed(0, 0)
    flushed(1, 0)
    first = records_of(system)
    assert sorted(first) == [(p, at) for p in range(2) for at in range(flush)]
    flushed(0, 3)
    flushed(1, 3)
    flushed(10, 0)
    again = records_of(system)
    assert again[: len(first)] == first, "what was admitted keeps its offsets"
    assert len(again) == 5 * flush
    for partition in (0, 1, 10):
        own = [at for p, at in again if p == partition]
        assert own == sorted(own), "records of a partition stay in order"


@pytest.mark.server
def test_a_file_that_a_restarted_worker_writes_again_is_nothing_new_on_s3(
    s3_landing: Landing, lake: Lake
) -> None:
    file_stream(
        "clicks",
        s3_landing.url,
        format="jsonl",
        schema="partition int, at bigint",
        path_columns=["partition"],
    )
    system = FolderStreams(lake)
    for _ in range(2):
        s3_landing.put("partition=0/clicks+0+0000000000.json", b'{"at": 0}\n{"at": 1}\n')
        assert records_of(system) == [(0, 0), (0, 1)]
