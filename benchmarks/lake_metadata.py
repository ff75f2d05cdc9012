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
from tests.servers.s3 import serve_versitygw, versitygw_binary

if TYPE_CHECKING:
    from dagster_adjunct import Lake

BATCHES = 100


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
    medians = {name: statistics.median(each) * 1000 for name, each in seconds.items()}
    for name, each in seconds.items():
        tail = sorted(each)[int(len(each) * 0.95)] * 1000
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
            ranges = {each: Range(start=str(self._number), end=str(self._number + 1)) for each in partitions}
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
    from dagster_adjunct import open_lake
    from dagster_adjunct.resources.key_value_backends import PostgresSegments, SqliteSegments
    from dagster_adjunct.upkeep import move_metadata

    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        binary = versitygw_binary()
        if binary is None:
            raise SystemExit("versitygw is not installed: run .ci/install-versitygw.sh.")
        buckets = folder / "buckets"
        buckets.mkdir()
        postgres, s3 = (
            stack.enter_context(running_server("fsync = on")),
            stack.enter_context(serve_versitygw(binary, buckets)),
        )
        stack.enter_context(patch.dict(os.environ, {**s3.env, "METADATA_DSN": postgres.dsn()}))
        lakes = {}
        for kind, url in (("folder", lambda n: str(folder / f"lake-{n}")), ("S3", lambda n: s3.url())):
            for where in ("objects", "SQLite", "PostgreSQL"):
                address = url(where)
                if where != "objects":
                    in_sqlite = SqliteSegments(folder / f"{kind}-metadata.sqlite")
                    backend = in_sqlite if where == "SQLite" else PostgresSegments(dsn_env="METADATA_DSN")
                    move_metadata(open_lake(address), "lake", "metadata", backend=backend)
                lakes[f"{kind}, {where}"] = open_lake(address)
        yield lakes
