"""Starts `drive.py` as a process of its own and tells what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kept_processes import without_kept_processes

ROOT = Path(__file__).resolve().parents[2]
_MARK = "ADJUNCT_TEST_PROCESS"
LONGEST = 1000


@dataclass(frozen=True)
class Driven:
    """One finished run of the driver."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def result(self) -> dict[str, Any]:
        """What it printed at its end: both reports, whether Spark was started, seconds by stage."""
        assert self.returncode == 0, f"exit code {self.returncode}\n{self.stderr[-4000:]}"
        result: dict[str, Any] = json.loads(self.stdout.splitlines()[-1])
        return result

    def assert_killed_at(self, point: str) -> None:
        assert self.returncode == -signal.SIGKILL, (
            f"was to be killed at {point}, ended with"
            f" {self.returncode}\n{self.stdout[-500:]}\n{self.stderr[-4000:]}"
        )
        assert f"killed at {point}" in self.stdout


def drive(lake: str, state: Path, *options: str, env: Mapping[str, str] | None = None) -> Driven:
    """Run the driver on `lake`, with the table in the SQLite file `state`, to its end or its death.

    Whatever it started is gone when this returns.
    """
    mark = uuid.uuid4().hex
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ADJUNCT_", "AWS_"))
        },
        "ADJUNCT_DEMO_SQLITE": str(state),
        "ADJUNCT_STRICT_PLANS": "1",
        _MARK: mark,
        **(env or {}),
    }
    if "--kill" in options:
        environment = without_kept_processes(environment)
    command = [sys.executable, "-m", "tests.examples.drive", lake, *options]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, start_new_session=True, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=LONGEST)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        _wait_for_the_rest(mark)
    return Driven(process.returncode, stdout, stderr)


def _wait_for_the_rest(mark: str) -> None:
    """Wait until Spark's Python workers, which lead a group of their own, have noticed and left;
    else kill them.
    """
    deadline = time.monotonic() + 15
    while left := _marked(mark):
        if time.monotonic() > deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _marked(mark: str) -> list[int]:
    needle = f"{_MARK}={mark}".encode()
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if needle in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids
