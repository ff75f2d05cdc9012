"""Runs that are really stopped, by SIGSTOP, taken over, and continued: what their successors
wrote stays.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.resources.objects.lake import open_lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.tables.table import BlockingTable, RemoteTable
from tests.kept_processes import program, without_kept_processes
from tests.orchestration import stopped_program
from tests.orchestration.stopped_program import RECORDS

KEYS = [*range(RECORDS)]


def send(lake: str, sequence: int, stream: str = "numbers") -> None:
    streams, schema = LakeStreams(open_lake(lake)), Schema.of(**stopped_program.COLUMNS)
    streams.create(stream, schema=schema, key=["id"], partitions=2)
    rows = [{"id": number, "n": sequence * 1000 + number} for number in KEYS]
    streams.append(
        stream, pa.Table.from_pylist(rows, schema.to_arrow()), producer="t", sequence=sequence
    )


APPLICATION = "tests.orchestration.stopped_program:app"


class SentFile:
    """What a sink has sent: the last value of each key counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get_all(self, keys: list[int]) -> dict[int, int]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {int(key): int(n) for key, n in (line.split() for line in lines)}


@dataclass
class Marked:
    """The marks in a table of at least `least`, by id."""

    table: BlockingTable[Any, Any, Any]
    least: int = 0

    def get_all(self, keys: list[int]) -> dict[int, int]:
        found = {}
        for key, row in self.table.get_all(keys).items():
            if row["mark"] >= self.least:
                found[key] = row["mark"]
        return found


def run(environment: Mapping[str, str], *more: str) -> str:
    """Run the application to its end, in a process that may be forked; return what it has
    printed.

    Who computes a run that nobody stops makes no difference; without Spark it is quick, which only
    a sink needs.
    """
    command = [program("adjunct"), "run", APPLICATION, *more]
    quick = {**environment, "ENGINE": "auto"}
    done = subprocess.run(
        command, env=quick, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def server_of(kind: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of a table on a server, which is started; {} for other tables."""
    if kind == "postgres":
        server = request.getfixturevalue("postgres_server")
        where = {"host": "127.0.0.1", "port": server.port, "user": "adjunct", "dbname": "adjunct"}
        return {"connect": where}
    if kind == "redis":
        return {"url": request.getfixturevalue("redis_server").url()}
    if kind == "dynamodb":
        endpoint = request.getfixturevalue("dynamodb").endpoint
        return {"region": "us-east-1", "endpoint_url": endpoint}
    return {}


@contextmanager
def stopped(
    environment: Mapping[str, str],
    table: BlockingTable[Any, Any, Any] | SentFile | Marked,
    log: Path,
) -> Iterator[Any]:
    """Yield a run that was stopped, with all its processes, after it had written some records.

    They are its own: what is kept for others is not stopped with it.
    """
    command = [Path(sys.executable).with_name("adjunct"), "run", APPLICATION]
    with log.open("w") as output:
        first = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + 120
        # Directly after a request: the next one is not under way, as the rate lets it wait.
        while not 20 <= (written := len(table.get_all(KEYS))) < RECORDS:
            assert first.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.002 if written else 0.1)
        os.killpg(first.pid, signal.SIGSTOP)
        yield first
    finally:
        with suppress(ProcessLookupError):
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("kind", "engine", "take_over"),
    [
        ("sqlite", "auto", False),
        ("rows", "auto", True),
        pytest.param("sqlite", "spark", True, marks=[pytest.mark.spark, pytest.mark.slow]),
        pytest.param("rows", "spark", False, marks=[pytest.mark.spark, pytest.mark.long]),
        # What a paused run may send over their connections: test_paused_connections.py
        pytest.param("postgres", "auto", False, marks=[pytest.mark.server, pytest.mark.long]),
        pytest.param("redis", "auto", True, marks=[pytest.mark.server, pytest.mark.long]),
        pytest.param("dynamodb", "auto", False, marks=[pytest.mark.server, pytest.mark.long]),
    ],
)
def test_what_was_written_since_stays_when_a_stopped_run_goes_on(
    kind: str,
    engine: str,
    take_over: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SERVER", json.dumps(server_of(kind, request)))
    lake, log = str(tmp_path / "lake"), tmp_path / "first.log"
    own = {"ADJUNCT_LAKE": lake, "ADJUNCT_RUN_TTL": "3", "TABLE": kind, "ENGINE": engine}
    environment = without_kept_processes(os.environ) | own
    send(lake, 1)
    function = stopped_program.store(kind, lake)
    with BlockingTable(RemoteTable("records", key="id", read_function=function)) as table:
        with stopped(environment, table, log) as first:
            written = len(table.get_all(KEYS))
            reported = run(environment, *(["--take-over"] if take_over else []))
            assert "application setting is taken over from run cli-" in reported
            send(lake, 2)
            run(environment)
            os.killpg(first.pid, signal.SIGCONT)
            assert first.wait(60) != 0, log.read_text()
        assert written < RECORDS
        assert "RunLeaseLostError" in log.read_text() or "was lost" in log.read_text()
        assert table.get_all(KEYS) == {
            number: {"id": number, "n": 2000 + number} for number in KEYS
        }


@pytest.mark.slow
@pytest.mark.spark
def test_a_sink_that_was_stopped_within_a_call_sends_nothing_once_it_goes_on(
    tmp_path: Path,
) -> None:
    lake, log = str(tmp_path / "lake"), tmp_path / "first.log"
    own = {"ADJUNCT_LAKE": lake, "ADJUNCT_RUN_TTL": "3", "TABLE": "sent", "ENGINE": "spark"}
    environment = without_kept_processes(os.environ) | own
    send(lake, 1)
    sent = SentFile(Path(f"{lake}.sent"))
    with stopped(environment, sent, log) as first:
        written = len(sent.get_all(KEYS))
        run(environment, "--take-over")
        send(lake, 2)
        run(environment)
        os.killpg(first.pid, signal.SIGCONT)
        assert first.wait(60) != 0, log.read_text()
    assert written < RECORDS
    assert "RunLeaseLostError" in log.read_text() or "was lost" in log.read_text()
    assert sent.get_all(KEYS) == {number: 2000 + number for number in KEYS}


@pytest.mark.lengthy
def test_a_restatement_that_was_stopped_writes_no_former_result_once_it_goes_on(
    tmp_path: Path,
) -> None:
    lake, log = str(tmp_path / "lake"), tmp_path / "first.log"
    own = {"ADJUNCT_LAKE": lake, "ADJUNCT_RUN_TTL": "3", "TABLE": "restated", "ENGINE": "auto"}
    environment = without_kept_processes(os.environ) | own
    send(lake, 1)
    send(lake, 1, "marks")
    run(environment)
    function = stopped_program.store("restated", lake)
    with BlockingTable(RemoteTable("records", key="id", read_function=function)) as table:
        marked = Marked(table)
        assert marked.get_all(KEYS) == {number: 1000 + number for number in KEYS}
        send(lake, 2, "marks")
        marked.least = 2000
        with stopped(environment, marked, log) as first:
            written = len(marked.get_all(KEYS))
            assert "is taken over from run cli-" in run(environment)
            assert marked.get_all(KEYS) == {number: 2000 + number for number in KEYS}
            send(lake, 3, "marks")
            run(environment)
            os.killpg(first.pid, signal.SIGCONT)
            assert first.wait(60) != 0, log.read_text()
        assert 0 < written < RECORDS
        assert "RunLeaseLostError" in log.read_text() or "was lost" in log.read_text()
        assert marked.get_all(KEYS) == {number: 3000 + number for number in KEYS}
