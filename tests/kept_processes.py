"""Spark JVMs and a Python that outlive the process that asked for one: the next one takes over what
is warm already.

Pages, examples and runs start some fifty processes that ask Spark for a JVM, and each would spend
most of its time on loading, verifying and interpreting what the JVM before it had just compiled.
PySpark starts its JVM by `$SPARK_HOME/bin/spark-submit`, so a Spark home with another
`spark-submit` (spark_submit.py) serves all of them, and nothing of ours knows of it. What asks for
packages or for a cluster, or comes while all are lent, gets a JVM of its own, as without this
module.

Each of these processes, and the one that Spark forks its workers from, would also import a second's
worth of modules. The Python and the commands in `programs()` are forked from a Python that has
imported them (python_server.py).

A group of processes that is killed to see what its death leaves behind has neither: what it started
has to die with it (`without_kept_processes`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_SUBMIT = Path(__file__).with_name("spark_submit.py")
_CLIENT = Path(__file__).with_name("python_client.py")
_COMMANDS = ("adjunct", "create-dagster", "dagster", "dagster-daemon", "dagster-webserver", "dg")
_WORKERS = "PYSPARK_PYTHON"
_HOME = "SPARK_HOME"
_REAL = "KEPT_JVMS_SPARK_HOME"  # of a process that is served so: where Spark really is


@pytest.fixture(scope="session", autouse=True)
def kept_for_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with kept_processes(tmp_path_factory.mktemp("kept")):
        yield


def programs() -> list[Path]:
    """Return the folders of this environment's programs, that of those that are forked first."""
    python = os.environ.get(_WORKERS)
    kept = [Path(python).parent] if python and _REAL in os.environ else []
    return [*kept, Path(sys.executable).parent]


def program(name: str) -> str:
    """Return how to start a program of this environment: forked, where it can be."""
    return next(str(folder / name) for folder in programs() if (folder / name).exists())


@contextmanager
def kept_processes(folder: Path) -> Iterator[None]:
    """Serve every process that is started meanwhile from what is kept in `folder` for as long as
    this lasts.
    """
    from pyspark.find_spark_home import _find_spark_home

    real = Path(os.environ.get(_REAL) or _find_spark_home())
    home = folder / "spark"
    (home / "bin").mkdir(parents=True)
    for entry in real.iterdir():
        if entry.name != "bin":
            (home / entry.name).symlink_to(entry)
    for entry in (real / "bin").iterdir():
        if entry.name != "spark-submit":
            (home / "bin" / entry.name).symlink_to(entry)
    # Without what is looked for on the way to a package: it has to be quick, and needs none.
    python = (
        f'exec "{Path(sys.executable).resolve()}" -ISE "{_CLIENT}" "{folder}" "{sys.executable}"'
    )
    (folder / "bin").mkdir()
    _script(folder / "bin" / "python", f'{python} "$@"')
    for command in _COMMANDS:
        _script(
            folder / "bin" / command, f'{python} "{Path(sys.executable).with_name(command)}" "$@"'
        )
    _script(home / "bin" / "spark-submit", f'{python} "{_SUBMIT}" "{folder}" "$@"')
    # What the process that comes first sets for itself is not for those that come after it.
    ours = ("ADJUNCT_", "AWS_", "DAGSTER")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    (folder / "environment.json").write_text(json.dumps(inherited), encoding="utf-8")
    # All that is kept ends with this: it is read there, and only this process holds the other end.
    os.mkfifo(folder / "lifeline")
    lifeline = os.open(folder / "lifeline", os.O_RDWR | os.O_CLOEXEC)
    before = {name: os.environ.pop(name) for name in (_HOME, _REAL, _WORKERS) if name in os.environ}
    os.environ |= {_HOME: str(home), _REAL: str(real), _WORKERS: str(folder / "bin" / "python")}
    try:
        yield
    finally:
        os.close(lifeline)
        for name in (_HOME, _REAL, _WORKERS):
            os.environ.pop(name, None)
        os.environ |= before
        for jvm in folder.glob("*.jvm"):
            with suppress(ProcessLookupError):
                os.kill(json.loads(jvm.read_text("utf-8"))["pid"], signal.SIGTERM)


def without_kept_processes(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which each process has a JVM and workers of its own, which end
    with it.
    """
    return {
        name: value for name, value in environment.items() if name not in (_HOME, _REAL, _WORKERS)
    }


def _script(file: Path, command: str) -> None:
    file.write_text(f"#!/bin/sh\n{command}\n", encoding="utf-8")
    file.chmod(0o755)
