"""The services of deploy/compose.yaml, started by hand: their commands, environment and order,
without containers.

Hosts become 127.0.0.1, ports free ones, and folders of the image those of the test. PostgreSQL is
this machine's, with the user and the database that the file gives it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.kept_processes import program
from tests.servers.dagster import READY_SECONDS, DagsterServers, end_processes
from tests.servers.ports import free_port
from tests.servers.postgres import PostgresServer, running_server
from tests.servers.s3 import ROOT, require_versitygw

DEPLOY = ROOT / "deploy"
SECRETS = {
    "POSTGRES_PASSWORD": "of-the/database@test",  # what a URL could not hold as it is
    "S3_ACCESS_KEY": "of-the-s3-server",
    "S3_SECRET_KEY": "a-secret-key-of-the-test",
}
_SECRET = re.compile(r"\$\{(\w+):\?[^}]*\}")
_PORTS = re.compile(r"\b(?:3000|4000|5432|7070)\b")
_OURS = ("adjunct", "python", "dagster", "dagster-webserver", "dagster-daemon")


def read_compose(secrets: Mapping[str, str] = SECRETS) -> dict[str, Any]:
    """Return the file with these secrets in the place of their variables."""
    text = _SECRET.sub(
        lambda found: secrets[found[1]], (DEPLOY / "compose.yaml").read_text("utf-8")
    )
    return dict(yaml.safe_load(text))


def compose_secrets() -> set[str]:
    """Return the names of the secrets that the file requires."""
    return set(_SECRET.findall((DEPLOY / "compose.yaml").read_text("utf-8")))


def read_dockerfile() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments."""
    lines = [
        line
        for line in (DEPLOY / "Dockerfile").read_text("utf-8").splitlines()
        if not line.startswith("#")
    ]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [
        (name, rest)
        for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)
    ]


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets."""
    words = [
        word for name, rest in read_dockerfile() if name == "ENV" for word in shlex.split(rest)
    ]
    return dict(word.split("=", 1) for word in words)


@dataclass
class ByHand:
    """Services as processes of this machine, with their logs in `folder`."""

    folder: Path
    postgres: PostgresServer
    services: dict[str, Any] = field(default_factory=lambda: read_compose()["services"])
    ports: dict[str, int] = field(
        default_factory=lambda: {port: free_port() for port in ("3000", "4000", "7070")}
    )
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    healthy: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.ports["5432"] = self.postgres.port
        self.home, self.logs, self.app = (self.folder / name for name in ("home", "logs", "app"))
        self.places = {
            "/opt/dagster/home": str(self.home),
            "/opt/dagster/logs": str(self.logs),
            "/app": f"{self.app}{os.pathsep}{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "/data": str(self.folder / "data"),
        }
        for folder in (self.home, self.logs, self.folder / "data"):
            folder.mkdir()
        shutil.copytree(DEPLOY / "orders", self.app / "orders")
        shutil.copy(DEPLOY / "dagster.yaml", self.home)
        workspace = yaml.safe_load((DEPLOY / "workspace.yaml").read_text("utf-8"))
        server = workspace["load_from"][0]["grpc_server"]
        server |= {"host": self.here(server["host"]), "port": int(self.here(str(server["port"])))}
        (self.home / "workspace.yaml").write_text(yaml.safe_dump(workspace), encoding="utf-8")

    @property
    def dagster(self) -> DagsterServers:
        """The webserver and the daemon."""
        return DagsterServers(f"http://127.0.0.1:{self.ports['3000']}", self.folder, "orders")

    def here(self, text: str) -> str:
        """Return a word of a command or a setting with the places of this machine."""
        if text in self.services:
            return "127.0.0.1"
        text = _PORTS.sub(lambda found: str(self.ports[found[0]]), text).replace(
            "0.0.0.0", "127.0.0.1"
        )
        text = text.replace("//s3:", "//127.0.0.1:")
        if text.startswith(":"):
            return f"127.0.0.1{text}"
        return next(
            (
                text.replace(there, here)
                for there, here in self.places.items()
                if text.startswith(there)
            ),
            text,
        )

    def environment(self, name: str) -> dict[str, str]:
        """Return the environment of a service: this machine's, without settings of ours, the
        image's, and its own.
        """
        ours = ("ADJUNCT_", "AWS_", "DAGSTER")
        machine = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        given = {
            **(image_environment() if "build" in self.services[name] else {}),
            **self.services[name]["environment"],
        }
        return {**machine, **{key: self.here(str(value)) for key, value in given.items()}}

    def start(self) -> None:
        """Start each service when those that it depends on are as it wants them, and wait until
        all are healthy.
        """
        waiting = dict(self.services)
        while waiting:
            ready = [
                name
                for name, service in waiting.items()
                if not service.get("depends_on", {}).keys() & waiting
            ]
            assert ready, f"services that wait for each other: {sorted(waiting)}"
            for name in ready:
                for other, wanted in waiting.pop(name).get("depends_on", {}).items():
                    if wanted["condition"] == "service_healthy":
                        self.wait_until_healthy(other)
                    else:
                        assert self.processes[other].wait(120) == 0, self._tail()
                self._start(name)
        for name in self.services.keys() - self._that_end():
            self.wait_until_healthy(name)

    def _that_end(self) -> set[str]:
        return {name for name, service in self.services.items() if service["restart"] == "no"}

    def _start(self, name: str) -> None:
        if name == "postgres":  # it runs, and needs what its image makes of its environment
            given = self.environment(name)
            assert "'" not in "".join(
                given[key] for key in ("POSTGRES_USER", "POSTGRES_PASSWORD", "POSTGRES_DB")
            )
            self.postgres.execute(
                f"CREATE ROLE {given['POSTGRES_USER']} LOGIN PASSWORD"
                f" '{given['POSTGRES_PASSWORD']}'"
            )
            self.postgres.execute(
                f"CREATE DATABASE {given['POSTGRES_DB']} OWNER {given['POSTGRES_USER']}"
            )
            self.postgres.require_password(given["POSTGRES_USER"])
            return
        command = [self.here(word) for word in self.services[name]["command"]]
        if name == "s3":  # its image's entry point
            command = [str(require_versitygw()), *command]
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                _as_program(command),
                cwd=self.app,
                env=self.environment(name),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, name: str, *command: str) -> str:
        """Run a command as `docker compose exec` would; return what it printed."""
        done = subprocess.run(
            _as_program(command),
            cwd=self.app,
            env=self.environment(name),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, (
            f"{name}: {command}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        )
        return done.stdout

    def wait_until_healthy(self, name: str) -> None:
        """Wait until the check of a service's health succeeds for the first time."""
        if name in self.healthy:
            return
        kind, *check = [self.here(word) for word in self.services[name]["healthcheck"]["test"]]
        assert kind == "CMD", check
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_healthy(name, check):
            ended = {name for name, process in self.processes.items() if process.poll() is not None}
            assert ended <= self._that_end(), f"{ended} ended\n{self._tail()}"
            assert time.monotonic() < deadline, f"{name} is not healthy: {check}\n{self._tail()}"
            time.sleep(1)  # looking is work, too
        self.healthy.add(name)

    def _is_healthy(self, name: str, check: Sequence[str]) -> bool:
        if check[0] == "wget":  # of the image
            with suppress(OSError):
                return urllib.request.urlopen(check[-1], timeout=5).status == 200
            return False
        if check[0] == "pg_isready":
            check = [
                str(self.postgres.programs / check[0]),
                "-p",
                str(self.postgres.port),
                *check[1:],
            ]
        done = subprocess.run(
            _as_program(check),
            cwd=self.app,
            env=self.environment(name),
            capture_output=True,
            check=False,
            timeout=300,
        )
        return done.returncode == 0

    def _tail(self) -> str:
        return "\n".join(
            f"{log.name}\n{log.read_text('utf-8', 'replace')[-2000:]}"
            for log in self.folder.glob("*.log")
        )


def _as_program(command: Sequence[str]) -> list[str]:
    return [program(command[0]) if command[0] in _OURS else command[0], *command[1:]]


@contextmanager
def started_by_hand(folder: Path) -> Iterator[ByHand]:
    """Start all services, and end them with all that they started."""
    require_versitygw()
    with running_server() as postgres:
        services = ByHand(folder, postgres)
        try:
            services.start()
            yield services
        finally:
            end_processes([*services.processes.values()])
