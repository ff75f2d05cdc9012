"""Arrow is imported where it is first used: also in a thread that ends before another one uses it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
_IN_THREADS = """
import sys, threading
from dagster_adjunct.resources.arrow import pa

def in_thread(act):
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()

assert "pyarrow" not in sys.modules
in_thread(lambda: pa.int8())
in_thread(lambda: pa.array(["x"] * 5000))
print(pa.array([1, 2]).to_pylist())
"""


def test_arrow_can_be_used_first_in_a_thread_that_ends() -> None:
    command = [sys.executable, "-c", _IN_THREADS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[1, 2]\n"), done.stderr


def test_the_release_of_pyarrow_that_crashes_in_threads_is_not_installed() -> None:
    listed = map(Requirement, tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"])
    (pyarrow,) = (one for one in listed if one.name == "pyarrow")
    assert not pyarrow.specifier.contains("25.0.0")
    assert pyarrow.specifier.contains("25.0.1")
