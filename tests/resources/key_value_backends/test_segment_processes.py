"""Processes at one table of every backend: what they see is linearisable, and who is killed leaves no half batch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dagster_adjunct.resources.key_value.backend_names import describe_backend
from tests.resources.key_value_backends.linear_history import Observation, contradictions
from tests.resources.key_value_backends.segment_handle import insert, of
from tests.resources.key_value_backends.segment_stores import SHARED_STORES
from tests.resources.key_value_backends.table_worker import FAMILY

ROOT = Path(__file__).parents[3]
KEYS = ["a", "b", "c"]
pytestmark = pytest.mark.parametrize("segment_store", SHARED_STORES, indirect=True)


@pytest.fixture
def begin(segment_store, backend, table):
    """Starts a process with a task; all are gone at the end."""
    begun: list[subprocess.Popen[str]] = []

    def process(**task) -> subprocess.Popen[str]:
        identity = [table.scope, table.name, table.incarnation]
        task |= {"backend": describe_backend(backend), "table": identity, "keys": KEYS}
        command = [sys.executable, "-m", "tests.resources.key_value_backends.table_worker", json.dumps(task)]
        environment = os.environ | dict(segment_store.environment)
        started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        begun.append(started)
        return started

    yield process
    for each in begun:
        each.kill()
        each.communicate()


@pytest.mark.parametrize(
    ("processes", "requests"), [(3, 60), pytest.param(8, 400, marks=[pytest.mark.long, pytest.mark.slow])]
)
def test_what_processes_see_of_a_few_keys_is_linearisable(begin, processes, requests):
    workers = [begin(work="history", seed=seed, requests=requests) for seed in range(processes)]
    told = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * processes
    seen = [Observation(*json.loads(line)) for lines in told for line in lines.splitlines()]
    assert len(seen) == processes * requests
    for key in KEYS:
        of_key = [observation for observation in seen if observation.key == key]
        assert contradictions(of_key) == []
        assert sum(observation.kind == "write" for observation in of_key) > processes


@pytest.mark.parametrize(
    ("writers", "kills"), [(2, 1), pytest.param(4, 12, marks=[pytest.mark.long, pytest.mark.slow])]
)
def test_writers_that_are_killed_leave_no_half_batch(begin, handle, writers, kills):
    keys = [of(key.encode(), FAMILY) for key in KEYS]
    handle.write(*(insert(key, b"0") for key in keys))
    chosen = random.Random(kills)
    begun = 0
    for _ in range(kills):
        at_work = [begin(work="batches", seed=(begun := begun + 1)) for _ in range(writers)]
        for worker in at_work:
            assert worker.stdout.readline().strip() == "1"
        time.sleep(chosen.uniform(0, 0.1))
        for worker in at_work:
            worker.kill()  # SIGKILL, in the middle of whatever it does
            worker.wait()
        versions, values = settled(handle, keys)
        assert len({version[:12] for version in versions}) == 1  # of one request
        assert len(set(values)) == 1
        assert values[0] != b"0"


def settled(handle, keys) -> tuple[list[bytes], list[bytes]]:
    """Return versions and values once nothing that was sent before the kill comes in any more."""
    before = None
    while before != (entries := handle.get(*keys)):
        before = entries
        time.sleep(0.2)
    return [entry.version for entry in entries], [entry.value for entry in entries]
