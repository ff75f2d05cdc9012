"""Real S3 servers on 127.0.0.1, one of each kind a test session: versitygw, and moto's over a
socket.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

from dagster_adjunct.resources.objects.lake import LakeSettings
from tests.servers.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mypy_boto3_s3 import S3Client

ROOT = Path(__file__).resolve().parents[2]
ACCESS_KEY = "adjunct-test"
SECRET_KEY = "adjunct-test-secret-key"
REGION = "us-east-1"


@dataclass(frozen=True)
class S3Server:
    """A running server. `env` is what a process needs to reach it with boto3 and
    `open_lake("s3://…")`.
    """

    name: str
    endpoint: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
            "ADJUNCT_S3_ENDPOINT": self.endpoint,
            "ADJUNCT_S3_REGION": REGION,
            "ADJUNCT_S3_PATH_STYLE": "true",
        }

    def set_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process reach it, until the patch is undone."""
        for variable, value in self.env.items():
            monkeypatch.setenv(variable, value)

    @property
    def settings(self) -> LakeSettings:
        return LakeSettings(endpoint=self.endpoint, region=REGION, path_style=True)

    def warehouse(self) -> dict[str, str]:
        """Return PyIceberg's settings of a catalogue with its files in a bucket of its own."""
        return {
            "warehouse": f"s3://{self.bucket()}/warehouse",
            "s3.endpoint": self.endpoint,
            "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET_KEY,
            "s3.region": REGION,
        }

    def client(self) -> S3Client:
        return _client(self.endpoint)

    def bucket(self) -> str:
        """Return the name of a new, empty bucket."""
        name = f"adjunct-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def url(self) -> str:
        """Return a lake URL in a bucket of its own."""
        return f"s3://{self.bucket()}/a/lake"


@pytest.fixture(scope="session")
def versitygw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """versitygw over a folder; skipped where its binary is missing, unless CI is set."""
    with serve_versitygw(require_versitygw(), tmp_path_factory.mktemp("versitygw")) as server:
        yield server


@contextmanager
def serve_versitygw(binary: Path, folder: Path) -> Iterator[S3Server]:
    """Run versitygw over a folder while the context lasts."""
    port = free_port()
    env = {**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    command = [str(binary), "--port", f"127.0.0.1:{port}", "posix", str(folder)]
    with _running(command, env, folder.parent / "versitygw.log", port):
        yield S3Server("versitygw", f"http://127.0.0.1:{port}")


@dataclass(frozen=True)
class PolicedS3Server:
    """A server that allows users what their policies allow. `server` is what its root reaches it
    with.
    """

    server: S3Server
    iam_endpoint: str

    def user_env(self, name: str, *policies: str) -> dict[str, str]:
        """Make a user with these policies; return what a process needs to reach the server as
        that user.
        """
        import boto3

        iam = boto3.session.Session().client(
            "iam",
            endpoint_url=self.iam_endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
        )
        iam.create_user(UserName=name)
        for number, policy in enumerate(policies):
            iam.put_user_policy(UserName=name, PolicyName=f"policy-{number}", PolicyDocument=policy)
        key = iam.create_access_key(UserName=name)["AccessKey"]
        secret = {
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        }
        return {**self.server.env, **secret}


@pytest.fixture(scope="module")
def policed_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PolicedS3Server]:
    """versitygw with its own IAM service, as `versitygw`."""
    binary, folder = require_versitygw(), tmp_path_factory.mktemp("policed")
    env = {**os.environ, "ROOT_ACCESS_KEY": ACCESS_KEY, "ROOT_SECRET_KEY": SECRET_KEY}
    (folder / "users").mkdir()
    (folder / "data").mkdir()
    # The path of a socket has to be short.
    with tempfile.TemporaryDirectory(prefix="iam-") as short:
        socket, port, iam_port = f"{short}/iam.sock", free_port(), free_port()
        # its root leads to a page elsewhere
        iam = ["--port", f"127.0.0.1:{iam_port}", "--health", "/health"]
        iam += ["iam", "--dir", str(folder / "users"), "--private-ports", socket]
        gateway = [
            "--port",
            f"127.0.0.1:{port}",
            "--iam-standalone-endpoint",
            socket,
            "--iam-cache-disable",
        ]
        with (
            _running([str(binary), *iam], env, folder / "iam.log", iam_port, "/health"),
            _running(
                [str(binary), *gateway, "posix", str(folder / "data")],
                env,
                folder / "versitygw.log",
                port,
            ),
        ):
            yield PolicedS3Server(
                S3Server("versitygw", f"http://127.0.0.1:{port}"), f"http://127.0.0.1:{iam_port}"
            )


@pytest.fixture(scope="session")
def moto_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """moto's server in a process of its own, so that requests cross a real socket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with _running(command, dict(os.environ), tmp_path_factory.mktemp("moto") / "moto.log", port):
        yield S3Server("moto", f"http://127.0.0.1:{port}")


@pytest.fixture(params=["versitygw", pytest.param("moto", marks=pytest.mark.long)])
def s3_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Each of the S3 servers in turn, with its environment set, so that
    `open_lake(server.url())` works.
    """
    name = {"versitygw": "versitygw", "moto": "moto_s3"}[request.param]
    server: S3Server = request.getfixturevalue(name)
    server.set_in(monkeypatch)
    return server


@lru_cache
def _client(endpoint: str) -> S3Client:
    import boto3

    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint,
        region_name=REGION,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
    )


def require_versitygw() -> Path:
    """Return where versitygw is; skip the test where it is missing, unless CI is set."""
    binary = versitygw_binary()
    if binary is None:
        skip_unless_ci(
            "versitygw is not installed: run .ci/install-versitygw.sh (needs Go), or set"
            " ADJUNCT_VERSITYGW."
        )
    return binary


def versitygw_binary() -> Path | None:
    """Return where versitygw is, None if this machine has none."""
    candidates = [
        os.environ.get("ADJUNCT_VERSITYGW"),
        ROOT / ".cache/bin/versitygw",
        shutil.which("versitygw"),
    ]
    go = shutil.which("go")
    if go:
        gopath = subprocess.run(
            [go, "env", "GOPATH"], capture_output=True, text=True, check=False
        ).stdout.strip()
        candidates.append(Path(gopath) / "bin/versitygw")
    return next(
        (Path(binary) for binary in candidates if binary and os.access(binary, os.X_OK)), None
    )


def skip_unless_ci(reason: str) -> NoReturn:
    """Skip the test for this reason; with CI set, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


class _running:
    """A server process that answers on its port; ended, and killed if it does not end, on
    leaving.
    """

    def __init__(
        self, command: list[str], env: dict[str, str], log: Path, port: int, path: str = "/"
    ) -> None:
        self.command, self.env, self.log, self.port, self.path = command, env, log, port, path

    def __enter__(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(self.command, env=self.env, stdout=log, stderr=log)
        deadline = time.monotonic() + 240
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                pytest.fail(
                    f"{self.command[0]} did not"
                    f" start:\n{self.log.read_text(errors='replace')[-2000:]}"
                )
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.path}", timeout=2).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True
