"""A Spark Connect server on loopback, from the pip package itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from dagster_adjunct.resources.spark.session import session_config
from tests.kept_processes import without_kept_processes
from tests.servers.ports import free_port


@dataclass(frozen=True)
class ConnectServer:
    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def connect_server(
    folder: Path, master: str, settings: Mapping[str, str] = {}
) -> Iterator[ConnectServer]:
    """Run a server with this master while the context lasts; skips where its client's packages
    are missing.
    """
    if find_spec("grpc_status") is None:
        reason = "the packages of the extra connect are not installed"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    port = free_port()
    home = Path(str(find_spec("pyspark").origin)).parent  # type: ignore[union-attr]
    conf = session_config(settings, master=master, lake_url="s3://unused/lake")
    conf = {
        name: value
        for name, value in conf.items()
        if not name.startswith(("spark.jars", "spark.hadoop.fs"))
    }
    conf |= {
        "spark.connect.grpc.binding.port": str(port),
        "spark.connect.grpc.binding.address": "127.0.0.1",
    }
    command = [
        str(home / "bin/spark-submit"),
        "--class",
        "org.apache.spark.sql.connect.service.SparkConnectServer",
    ]
    command += [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    log = folder / f"connect-{port}.log"
    environment = {
        **without_kept_processes(os.environ),
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    environment["PYSPARK_PYTHON"] = sys.executable
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "spark-internal"], env=environment, stdout=out, stderr=out
        )
    try:
        deadline = time.monotonic() + 240
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.2)
        yield ConnectServer(f"sc://localhost:{port}", process)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
