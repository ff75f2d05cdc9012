"""Writers that are killed in the middle and start again behind where they were leave what plain
Python says.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from dagster_adjunct.resources.tables.table import RemoteTable
from tests.resources.table_backends.killed_writer import sent_by
from tests.resources.table_backends.reached_stores import PROCESSES
from tests.resources.tables.plain_oracle import newest, record_of, totals

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", params=PROCESSES)
def reached(request, tmp_path_factory):
    return request.param(request, tmp_path_factory.mktemp("killed"))


class Writer:
    """The process of one source, which says after each batch that it has been written."""

    def __init__(self, settings: dict, environment: dict[str, str]) -> None:
        self.settings, self.environment = settings, environment
        self.kills = 0
        self.begin()

    def begin(self) -> None:
        command = [
            sys.executable,
            "-m",
            "tests.resources.table_backends.killed_writer",
            json.dumps(self.settings),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | self.environment,
        )

    def until(self, batches: int) -> bool:
        """Wait until so many more batches are written, and let the next begin; whether there may
        be more.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # it has written all
            self.process.stdin.write("\n" * (batches + 1))
            self.process.stdin.flush()
        for _ in range(batches):
            reported = self.process.stdout.readline()
            if reported.strip() == "all":
                assert self.process.wait(30) == 0
                return False
            assert reported, "the writer failed"
        return True

    def kill(self) -> None:
        self.process.kill()  # SIGKILL, in the middle of the next batch
        self.process.wait()
        self.process.stdout.close()
        self.kills += 1


@pytest.mark.lengthy
@pytest.mark.parametrize("kills", [1, pytest.param(8, marks=pytest.mark.long)])
def test_two_writers_that_are_killed_and_start_again_leave_the_tables_exact(
    reached, tmp_path, kills
):
    seed, per_source, random = 41, 200 if kills == 1 else 3000, Random(kills)
    counters, latest = reached.new_name(), reached.new_name()
    tables = {"counters": reached.declared(counters), "newest": reached.declared(latest)}
    sent = sent_by(seed, per_source)
    writers = [
        Writer(
            {
                **tables,
                "seed": seed,
                "per_source": per_source,
                "source": source,
                "checkpoint": str(tmp_path / source),
            },
            dict(reached.environment),
        )
        for source in sent
    ]
    for _ in range(kills):
        for writer in writers:
            assert writer.until(random.randint(3, 20))
        for writer in writers[: None if kills > 1 else 1]:
            writer.kill()
            writer.begin()
    for writer in writers:
        assert not writer.until(1000)
    assert writers[0].kills == kills
    every = [message for own in sent.values() for message in own]
    kept = records(reached, counters, totals(every))
    assert {key: record["total"] for key, record in kept.items()} == totals(every)
    expected = {key: record_of(message) for key, message in newest(every).items()}
    kept = records(reached, latest, expected)
    assert {
        key: {column: record[column] for column in expected[key]} for key, record in kept.items()
    } == expected


def records(reached, name, keys) -> dict:
    store = reached.store(name)

    async def reading():
        async with RemoteTable("exact", key="id", read_function=store) as table:
            return await table.get_all(keys)

    return asyncio.run(reading())
