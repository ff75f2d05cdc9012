"""Spark JVMs that outlive the process that asked for one: the next process takes over a JVM that is warm already.

Pages, examples and runs start some fifty processes that ask Spark for a JVM, and each would spend most of its time on
loading, verifying and interpreting what the JVM before it had just compiled. PySpark starts its JVM by
`$SPARK_HOME/bin/spark-submit`, so a Spark home with another `spark-submit` (spark_submit.py) serves all of them, and
nothing of ours knows of it.

What asks for packages or for a cluster, or comes while all are lent, gets a JVM of its own, as without this module. So
does a group of processes that is killed to see what its death leaves behind: its JVM has to die with it
(`without_kept_jvms`).
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
_HOME = "SPARK_HOME"
_REAL = "KEPT_JVMS_SPARK_HOME"  # of a process that is served so: where Spark really is


@pytest.fixture(scope="session", autouse=True)
def kept_for_this_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with kept_jvms(tmp_path_factory.mktemp("jvms")):
        yield


@contextmanager
def kept_jvms(folder: Path) -> Iterator[None]:
    """Serve every process that is started meanwhile from JVMs that are kept in `folder` for as long as this lasts."""
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
    submit = home / "bin" / "spark-submit"
    submit.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{_SUBMIT}" "{folder}" "$@"\n', "utf-8")
    submit.chmod(0o755)
    # What the process that comes first sets for itself is not for those that come after it.
    ours = ("ADJUNCT_", "AWS_", "DAGSTER")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    (folder / "environment.json").write_text(json.dumps(inherited), encoding="utf-8")
    # A JVM ends with its standard input: it reads from here, and only this process holds the other end.
    os.mkfifo(folder / "lifeline")
    lifeline = os.open(folder / "lifeline", os.O_RDWR | os.O_CLOEXEC)
    before = os.environ.get(_HOME)
    os.environ |= {_HOME: str(home), _REAL: str(real)}
    try:
        yield
    finally:
        os.close(lifeline)
        os.environ.pop(_REAL)
        os.environ.pop(_HOME)
        if before is not None:
            os.environ[_HOME] = before
        for jvm in folder.glob("*.jvm"):
            with suppress(ProcessLookupError):
                os.kill(json.loads(jvm.read_text("utf-8"))["pid"], signal.SIGTERM)


def without_kept_jvms(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which each process has a JVM of its own, which ends with it."""
    return {name: value for name, value in environment.items() if name not in (_HOME, _REAL)}
