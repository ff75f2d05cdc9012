"""Runs an application in a process of its own, and kills that within a batch."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

from dagster_adjunct.orchestration.application.application import Application
from tests.kept_processes import without_kept_processes
from tests.orchestration.step_world import StepWorld


def killed(
    world: StepWorld, app: Application, module: ModuleType, folder: Path, chosen: random.Random
) -> bool:
    """Run `module` over the folder, and kill it some seconds after its first batch was begun;
    False if it had ended.
    """
    log = folder / "killed.log"
    first = world.state(app).batch
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", module.__name__, str(folder)],
            env=without_kept_processes(os.environ),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 240
            while (state := world.state(app)).open is None and state.batch == first:
                assert child.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline
                time.sleep(0.05)
            time.sleep(chosen.uniform(0, 9))
            return child.poll() is None
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
