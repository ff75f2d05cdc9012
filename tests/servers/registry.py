"""A real schema registry on 127.0.0.1, one a test process: Apicurio in memory, from
`.ci/install-registry.sh`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.servers.ports import free_port
from tests.servers.s3 import ROOT

READY_SECONDS = 240.0


@pytest.fixture(scope="session")
def registry_url() -> Iterator[str]:
    """The address of its interface that is like Confluent's; skipped where it is missing, unless
    CI is set.
    """
    home = ROOT / ".cache/registry"
    jar = next(home.glob("apicurio-registry-app-*-runner.jar"), None)
    if jar is None:
        reason = "no schema registry: run .ci/install-registry.sh (fetches 139 MB)."
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="adjunct-registry-"))
    port = free_port()
    java = [
        "java",
        "-Xmx192m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Xshare:auto",
        "-Dquarkus.http.host=127.0.0.1",
        f"-Dquarkus.http.port={port}",
        "-Dcom.sun.management.jmxremote=false",
    ]
    log = folder / "registry.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*java, "-jar", str(jar)], cwd=folder, stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}/apis/ccompat/v7"
    try:
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    import requests

    deadline = time.monotonic() + READY_SECONDS
    while True:
        with suppress(requests.RequestException):
            if requests.get(f"{url}/subjects", timeout=2).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            pytest.fail(
                f"the schema registry did not start:\n{log.read_text(errors='replace')[-3000:]}"
            )
        time.sleep(0.1)
