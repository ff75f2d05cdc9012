"""A batch's intent and commit where a lake's metadata are among its objects, against a key-value table.

Lakes are in a folder and on versitygw over a socket. Each batch is the intent and the close of `BatchLog`, as a run
makes them: each reads nothing and swaps the pointer once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING
from unittest.mock import patch

from tests.servers.postgres import running_server
from tests.servers.s3 import S3Server, serve_versitygw, versitygw_binary
from tests.servers.tcp_proxy import TcpProxy

if TYPE_CHECKING:
    from dagster_adjunct import Lake
    from dagster_adjunct.resources.key_value.table_segment import SegmentBackend

BATCHES = 50
S3_AWAY, POSTGRES_AWAY = 0.02, 0.001  # seconds that a request waits on its way


def run(rounds: int) -> None:
    print(f"metadata: intent and commit of a batch, one application, {BATCHES} batches a turn")
    with ExitStack() as stack:
        lakes = stack.enter_context(_lakes())
        logs = {name: _Batches(lake) for name, lake in lakes.items()}
        seconds: dict[str, list[float]] = {name: [] for name in logs}
        for number in range(rounds + 1):  # the first one warms up
            for name, batches in logs.items():
                took = batches.make(BATCHES)
                seconds[name] += took if number else []
    medians = {name: statistics.median(durations) * 1000 for name, durations in seconds.items()}
    for name, durations in seconds.items():
        tail = sorted(durations)[int(len(durations) * 0.95)] * 1000
        ratio = medians[name] / medians[f"{name.split(', ')[0]}, objects"]
        print(f"  {name}: {medians[name]:.1f} ms a batch (95%: {tail:.1f} ms), {ratio:.2f} of objects")
    print()


class _Batches:
    """Makes batches of an application, without a gap."""

    def __init__(self, lake: Lake) -> None:
        from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog

        self._log = BatchLog(lake, "app")
        self._logged = self._log.read()
        self._number = 0

    def make(self, count: int) -> list[float]:
        """Return the seconds of each."""
        from dagster_adjunct import SystemStreamPartition
        from dagster_adjunct.orchestration.batchlog.batch_log import ClosedBatch, Intent, Range

        partitions = [SystemStreamPartition("lake", "flights", number) for number in range(16)]
        took = []
        for _ in range(count):
            self._number += 1
            now = datetime.now(UTC)
            ranges = {partition: Range(start=str(self._number), end=str(self._number + 1)) for partition in partitions}
            intent = Intent(batch=self._number, run="run", clock=now, ranges=ranges, versions={"planes": "v1"})
            closed = ClosedBatch(
                intent=intent, closed_at=now, records=16, counters={"out": {"rows": 16}}, seconds={"work": 1.0}
            )
            began = time.perf_counter()
            self._logged = self._log.open(self._logged, intent)
            self._logged = self._log.close(self._logged, closed)
            took.append(time.perf_counter() - began)
        return took


@contextmanager
def _lakes() -> Iterator[dict[str, Lake]]:
    """Yield the lakes: in a folder, on S3 here, and on S3 at a distance, with PostgreSQL at another."""
    from dagster_adjunct.resources.key_value_backends import PostgresSegments, SqliteSegments

    binary = versitygw_binary()
    if binary is None:
        raise SystemExit("versitygw is not installed: run .ci/install-versitygw.sh.")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        buckets = folder / "buckets"
        buckets.mkdir()
        postgres = stack.enter_context(running_server("fsync = on"))
        s3 = stack.enter_context(serve_versitygw(binary, buckets))
        far_s3 = stack.enter_context(TcpProxy(int(s3.endpoint.rpartition(":")[2])).running())
        far_postgres = stack.enter_context(TcpProxy(postgres.port).running())
        far_s3.delay, far_postgres.delay = S3_AWAY, POSTGRES_AWAY
        there = S3Server(s3.name, f"http://127.0.0.1:{far_s3.port}")
        dsns = {"HERE": postgres.dsn(), "THERE": postgres.dsn().replace(str(postgres.port), str(far_postgres.port))}
        stack.enter_context(patch.dict(os.environ, dsns))
        here = PostgresSegments(dsn_env="HERE")
        yield {
            "folder, objects": _lake(str(folder / "objects")),
            "folder, SQLite": _lake(str(folder / "sqlite"), SqliteSegments(folder / "folder.sqlite")),
            "folder, PostgreSQL": _lake(str(folder / "postgres"), here),
            "S3, objects": _on(s3),
            "S3, SQLite": _on(s3, SqliteSegments(folder / "s3.sqlite")),
            "S3, PostgreSQL": _on(s3, here),
            f"S3 {S3_AWAY * 1000:.0f} ms away, objects": _on(there),
            f"S3 {S3_AWAY * 1000:.0f} ms away, PostgreSQL {POSTGRES_AWAY * 1000:.0f} ms": _on(
                there, PostgresSegments(dsn_env="THERE")
            ),
        }


def _on(server: S3Server, backend: SegmentBackend | None = None) -> Lake:
    with patch.dict(os.environ, server.env):
        return _lake(server.url(), backend)


def _lake(url: str, backend: SegmentBackend | None = None) -> Lake:
    from dagster_adjunct import open_lake
    from dagster_adjunct.upkeep import move_metadata

    if backend is not None:
        move_metadata(open_lake(url), "lake", "metadata", backend=backend)
    lake = open_lake(url)
    lake.store.put("applications/_names/app", b"")
    return lake
