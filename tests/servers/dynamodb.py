"""DynamoDB Local on 127.0.0.1, one a test process, its jars from `.ci/install-dynamodb.sh`.

Its own launcher listens on every interface. So the JVM is started with the gateway that pyspark
ships, and the server is put together through that: the pieces are the launcher's, the address is
ours. The JVM ends with this process.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.servers.ports import free_port
from tests.servers.s3 import ROOT

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient

_JAVA = ("-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_LOCAL = "com.amazonaws.services.dynamodbv2.local.server"
REGION = "us-east-1"


@dataclass
class DynamoDbServer:
    """A server; `folder` keeps its data over a stop, without one it is in memory and gone with
    it.
    """

    port: int
    folder: Path | None = None
    _running: Any = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to reach it with boto3."""
        return {
            "AWS_ACCESS_KEY_ID": "adjuncttest",
            "AWS_SECRET_ACCESS_KEY": "adjunct-test-secret-key",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_DYNAMODB": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> DynamoDBClient:
        """Return a client of the test's own."""
        client: DynamoDBClient = self.session()["session"].client(
            "dynamodb", endpoint_url=self.endpoint
        )
        return client

    def session(self) -> dict[str, Any]:
        """Where the server is and who asks, as a table in this process takes it."""
        return {"session": self._session, "endpoint_url": self.endpoint}

    @cached_property
    def _session(self) -> Any:
        """One for all tests: each would read the model of the service anew."""
        import boto3

        return boto3.session.Session(
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
            region_name=REGION,
        )

    def start(self) -> None:
        """Start the server, on its folder if it has one."""
        from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

        port, token, process = launch_gateway(
            classpath=f"{_jars()}/*",
            jarpath=str(_gateway_jar()),
            javaopts=[*_JAVA, f"-Dsqlite4java.library.path={_jars()}"],
            die_on_exit=True,
            enable_auth=True,
            return_proc=True,
        )
        gateway = JavaGateway(
            gateway_parameters=GatewayParameters(port=port, auth_token=token, auto_convert=True)
        )
        java = gateway.jvm
        local: Any = java
        for part in _LOCAL.split("."):
            local = getattr(local, part)
        path = None if self.folder is None else str(self.folder)
        requests = local.LocalDynamoDBRequestHandler(0, self.folder is None, path, True, False)
        server = java.org.eclipse.jetty.server.Server(
            java.java.net.InetSocketAddress("127.0.0.1", self.port)
        )
        server.setHandler(local.LocalDynamoDBServerHandler(requests, "*"))
        server.start()
        self.port = server.getConnectors()[0].getLocalPort()
        self._running = gateway, process

    def stop(self) -> None:
        """End it at once."""
        if self._running is not None:
            gateway, process = self._running
            self._running = None
            process.kill()
            process.wait()
            process.stdin.close()
            gateway.close()


@pytest.fixture(scope="session")
def dynamodb_server() -> Iterator[DynamoDbServer]:
    """A server in memory; skipped where its jars are missing, unless CI is set."""
    with start_dynamodb() as server:
        yield server


@pytest.fixture(scope="session")
def dynamodb_on_disk() -> Iterator[DynamoDbServer]:
    """A server that may be stopped and started: it keeps its data."""
    with start_dynamodb(on_disk=True) as server:
        yield server


@pytest.fixture
def dynamodb(dynamodb_server: DynamoDbServer, monkeypatch: pytest.MonkeyPatch) -> DynamoDbServer:
    """The server, which this process reaches by boto3's own environment."""
    for name, value in dynamodb_server.env.items():
        monkeypatch.setenv(name, value)
    return dynamodb_server


@contextmanager
def start_dynamodb(*, on_disk: bool = False) -> Iterator[DynamoDbServer]:
    """Run a server while the context lasts; one on disk keeps its data when it is stopped and
    started.
    """
    check_jars()
    # It waits for the disk after every write; what it has to outlive is its own end, not the
    # machine's.
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="adjunct-dynamodb-", dir=memory)) if on_disk else None
    # One that is started again needs its port again; another one takes a port that nobody else can
    # take meanwhile.
    server = DynamoDbServer(free_port() if on_disk else 0, folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def new_name(prefix: str = "t") -> str:
    """Return the name of a table that no other test has."""
    return f"{prefix}_{uuid.uuid4().hex[:10]}"


def check_jars() -> None:
    """Skip the test where the server's jars are missing; in CI, fail it."""
    if any(_jars().glob("DynamoDBLocal-*.jar")):
        return
    reason = (
        "no DynamoDB Local: run .ci/install-dynamodb.sh (fetches 51 MB of jars), or set"
        " ADJUNCT_DYNAMODB_JARS."
    )
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def _jars() -> Path:
    return Path(os.environ.get("ADJUNCT_DYNAMODB_JARS") or ROOT / ".cache/dynamodb")


def _gateway_jar() -> Path:
    import pyspark

    return next((Path(pyspark.__file__).parent / "jars").glob("py4j-*.jar"))
