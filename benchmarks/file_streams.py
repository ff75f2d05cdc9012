"""Files as a stream: how long a look takes that finds 100 new files next to 100,000 old ones in a
local folder, and how many requests it sends to S3 where names grow.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.timing import module
from dagster_adjunct import Schema, open_lake
from dagster_adjunct.resources.file_streams.folder import FolderStreams, file_stream

OLD = 100_000
NEW = 100
FOLDER_GOAL = "at most 2 s"
S3_GOAL = "at most 10 besides one GET of each file"


def run(rounds: int, old: int = OLD) -> None:
    """Print seconds of a look in a folder, and its requests to S3."""
    print(f"file-streams: a look that finds {NEW} new files next to {old:,} old ones")
    with TemporaryDirectory() as folder:
        _run_in_folder(Path(folder), rounds, old)
    _run_on_s3(min(old, 5_000))


def _run_in_folder(folder: Path, rounds: int, old: int) -> None:
    seconds = []
    processor = []
    landing = folder / "landing"
    _write_files(landing, 0, old)
    began = time.perf_counter()
    _look(folder)
    print(f"  first look at {old:,} files: {time.perf_counter() - began:.2f} s")
    for number in range(rounds):
        _write_files(landing, old + number * NEW, NEW)
        # In a new process: nothing is cached.
        took = folder / "took"
        module("benchmarks.file_streams", str(folder), str(took))
        wall, processing = map(float, took.read_text().split())
        seconds.append(wall)
        processor.append(processing)
    found = ", ".join(f"{one:.2f}" for one in seconds)
    print(
        f"  folder, all files listed: {median(seconds):.2f} s ({found}; goal: {FOLDER_GOAL}),"
        f" {median(processor):.2f} s of a processor"
    )


def _write_files(landing: Path, first: int, count: int) -> None:
    for number in range(first, first + count):
        path = landing / f"{number // 1_000:06}" / f"{number:09}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{"n": {number}}}\n')


def _look(folder: Path) -> int:
    """Look at the files in a folder once; return how many records there are now."""
    file_stream("landing", str(folder / "landing"), format="jsonl", schema=Schema.of(n="bigint"))
    return FolderStreams(open_lake(folder / "lake")).admit("landing").next


def _run_on_s3(old: int) -> None:
    from tests.servers.s3 import serve_versitygw, versitygw_binary

    binary = versitygw_binary()
    if binary is None:
        print("  S3: left out, versitygw is not installed")
        return
    with TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        data.mkdir()
        with serve_versitygw(binary, data) as server, patch.dict(os.environ, server.env):
            bucket = server.bucket()
            client = server.client()

            def put(first: int, count: int) -> None:
                for number in range(first, first + count):
                    body = f'{{"n": {number}}}\n'.encode()
                    client.put_object(Bucket=bucket, Key=f"in/{number:09}.jsonl", Body=body)

            file_stream(
                "growing",
                f"s3://{bucket}/in",
                format="jsonl",
                schema=Schema.of(n="bigint"),
                listing="after-last",
            )
            streams = FolderStreams(open_lake(f"s3://{bucket}/lake", settings=server.settings))
            put(0, old)
            streams.admit("growing")
            put(old, NEW)
            with _counted_requests() as counts:
                found = streams.admit("growing").next
            assert found == old + NEW, found
            reads = min(counts["GetObject"], NEW)
            others = sum(counts.values()) - reads
            print(
                f"  S3, names grow: {others} requests, and {reads} GETs of files (goal: {S3_GOAL})"
            )
            print(f"    {dict(counts)}")


class _counted_requests:
    """Counts the requests of boto3 in this process, by operation, within the context."""

    def __enter__(self) -> Counter[str]:
        from botocore.endpoint import Endpoint

        counts: Counter[str] = Counter()
        send = Endpoint.make_request

        def counted(endpoint: Any, operation: Any, request: Any) -> Any:
            counts[operation.name] += 1
            return send(endpoint, operation, request)

        self._patch = patch.object(Endpoint, "make_request", counted)
        self._patch.start()
        return counts

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


if __name__ == "__main__":
    import sys

    began, processing = time.perf_counter(), time.process_time()
    _look(Path(sys.argv[1]))
    took = (time.perf_counter() - began, time.process_time() - processing)
    Path(sys.argv[2]).write_text(" ".join(map(str, took)))
