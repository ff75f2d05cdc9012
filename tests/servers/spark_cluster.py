"""A standalone Spark cluster on loopback, a master and two workers, from the pip package itself."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.java_classes import SHORT_LIVED, archived
from tests.servers.ports import free_port

WORKERS = 2


@pytest.fixture(scope="session")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a master that has two workers of one core and 1 GiB each."""
    folder = tmp_path_factory.mktemp("spark-cluster")
    port = free_port()
    url = f"spark://127.0.0.1:{port}"
    address = ["--host", "127.0.0.1", "--webui-port", "0"]
    with ExitStack() as running:
        master = folder / "master.log"
        running.enter_context(_process([_MASTER, *address, "--port", str(port)], master))
        _wait(lambda: "I have been elected leader" in _text(master), master)
        for number in range(WORKERS):
            resources = ["-c", "1", "-m", "1G", "-d", str(folder / f"worker-{number}"), url]
            running.enter_context(
                _process([_WORKER, *address, *resources], folder / f"worker-{number}.log")
            )
        _wait(lambda: _text(master).count("Registering worker") == WORKERS, master)
        yield url


_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"


@contextmanager
def _process(arguments: list[str], log: Path) -> Iterator[None]:
    from dagster_adjunct.resources.spark.session import check_java

    check_java()
    home = Path(str(find_spec("pyspark").origin)).parent  # type: ignore[union-attr]
    environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"}
    # Executors get what their worker has, and hurry no less than the tests' other JVMs.
    environment["JAVA_TOOL_OPTIONS"] = SHORT_LIVED + archived()
    with log.open("wb") as out:
        command = [str(home / "bin/spark-class"), *arguments]
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL
        )
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(ready: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 240
    while not ready():
        if time.monotonic() > deadline:
            pytest.fail(f"the cluster did not start:\n{_text(log)[-2000:]}")
        time.sleep(0.1)


def _text(log: Path) -> str:
    return log.read_text(errors="replace")
