"""A process that is forked from a kept Python is as one that was started, and ends with the one
that asked for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kept_processes import program

pytestmark = pytest.mark.lengthy  # the kept Python imports for seconds
SAYS = (
    "import os, sys; print(__name__, sys.argv[1:], os.getcwd(), os.environ.get('SAID'),"
    " sys.stdin.read())"
)


@pytest.fixture
def python() -> str:
    path = program("python")
    assert Path(path).parent != Path(sys.executable).parent
    return path


@pytest.mark.lengthy
@pytest.mark.parametrize("form", ["-c", "-m", "file"])
def test_it_has_the_arguments_the_environment_the_folder_and_the_streams_of_who_asks(
    python: str, form: str, tmp_path: Path
) -> None:
    (tmp_path / "says.py").write_text(SAYS, encoding="utf-8")
    asked = {"-c": ["-c", SAYS], "-m": ["-m", "says"], "file": ["says.py"]}[form]
    outputs = [
        subprocess.run(
            [started, *asked, "a", "b"], cwd=tmp_path, env={**os.environ, "SAID": "yes"},
            input="typed", text=True, capture_output=True, check=True,
        ).stdout
        for started in (sys.executable, python)
    ]  # fmt: skip
    assert outputs[0] == outputs[1] == f"__main__ ['a', 'b'] {tmp_path} yes typed\n"


@pytest.mark.parametrize(
    "code", ["pass", "raise SystemExit(7)", "1 / 0", "import os; os.kill(os.getpid(), 9)"]
)
def test_it_ends_as_a_python_of_its_own_would(python: str, code: str) -> None:
    ended = [
        subprocess.run([interpreter, "-c", code], capture_output=True, check=False)
        for interpreter in (sys.executable, python)
    ]
    assert ended[0].returncode == ended[1].returncode
    assert ended[0].stderr.splitlines()[-1:] == ended[1].stderr.splitlines()[-1:]


def test_it_is_killed_with_all_that_it_started_when_who_asked_is(python: str) -> None:
    code = "import os, time; print(os.getpid(), flush=True); child = os.fork(); time.sleep(600)"
    asking = subprocess.Popen(
        [python, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert asking.stdout is not None
    pid = int(asking.stdout.readline())
    os.killpg(asking.pid, signal.SIGKILL)
    asking.wait()
    deadline = time.monotonic() + 240
    while _alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert asking.stdout.read() == "", "the last one that had it open is gone"


def test_a_signal_reaches_it_and_it_may_go_on(python: str) -> None:
    # It looks for the signal again and again: one that came before `signal.pause()` would leave it
    # waiting for another.
    code = """
import signal, time

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append("asked to end"))
print("ready", flush=True)
while not asked:
    time.sleep(0.01)
print(*asked, flush=True)
"""
    asking = subprocess.Popen([python, "-c", code], stdout=subprocess.PIPE, text=True)
    assert asking.stdout is not None
    assert asking.stdout.readline() == "ready\n"
    asking.terminate()
    assert asking.communicate(timeout=240)[0] == "asked to end\n"
    assert asking.returncode == 0


def test_processes_that_it_spawns_are_forked_too_and_talk_with_it(
    python: str, tmp_path: Path
) -> None:
    (tmp_path / "squares.py").write_text(
        """
import multiprocessing, sys

def squares(numbers, answers):
    for number in iter(numbers.get, None):
        answers.put(number * number)
    answers.put("dagster" in sys.modules)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    numbers, answers = context.Queue(), context.Queue()
    process = context.Process(target=squares, args=(numbers, answers))
    process.start()
    for number in (2, 3, None):
        numbers.put(number)
    print([answers.get() for _ in range(3)])
    process.join()
    print(process.exitcode)
""",
        encoding="utf-8",
    )
    done = subprocess.run(
        [python, "squares.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout == "[4, 9, True]\n0\n", done.stderr
    assert done.stderr == ""


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
