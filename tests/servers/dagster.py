"""The real dagster-webserver and dagster-daemon over one DAGSTER_HOME, and GraphQL over plain
HTTP.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dagster import DagsterInstance

from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home
from tests.kept_processes import program
from tests.servers.ports import free_port
from tests.servers.s3 import ROOT

T = TypeVar("T")
LOCATION, REPOSITORY = "adjunct", "__repository__"
DONE = ("SUCCESS", "FAILURE", "CANCELED")
READY_SECONDS = 240.0
_READY = (
    "{ workspaceOrError { ... on Workspace { locationEntries { name locationOrLoadError {"
    " __typename } } } } }"
)

_LAUNCH = """mutation($params: ExecutionParams!) { launchPipelineExecution(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message }
  ... on RunConfigValidationInvalid { errors { message } } } }"""
_RUNS = """{ runsOrError { ... on Runs { results {
  runId jobName status creationTime startTime endTime tags { key value } } } } }"""
_START_SENSOR = """mutation($sensor: SensorSelector!) { startSensor(sensorSelector: $sensor) {
  __typename ... on Sensor { sensorState { status } } ... on PythonError { message } } }"""


@dataclass(frozen=True)
class DagsterServers:
    """A running webserver and daemon; `home` is their DAGSTER_HOME, and where their logs are."""

    url: str
    home: Path
    location: str = LOCATION

    @property
    def repository(self) -> dict[str, str]:
        """The repository of the code location, as GraphQL selects it."""
        return {"repositoryName": REPOSITORY, "repositoryLocationName": self.location}

    def graphql(self, query: str, **variables: Any) -> dict[str, Any]:
        """Return the data of a query; errors of GraphQL itself are assertion errors."""
        body = json.dumps({"query": query, "variables": variables}).encode()
        request = urllib.request.Request(
            f"{self.url}/graphql",
            data=body,
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            response: dict[str, Any] = json.loads(answer.read())
        assert not response.get("errors"), response["errors"]
        data: dict[str, Any] = response["data"]
        return data

    def launch(self, job: str, config: Mapping[str, Any] = {}, **selection: Any) -> str:
        """Launch a job as the UI does, with this selection of its assets; return the run's id."""
        params = {
            "mode": "default",
            "executionMetadata": {"tags": []},
            "runConfigData": json.dumps(config),
            "selector": {**self.repository, "jobName": job, **selection},
        }
        launched = self.graphql(_LAUNCH, params=params)["launchPipelineExecution"]
        assert launched["__typename"] == "LaunchRunSuccess", launched
        run_id: str = launched["run"]["runId"]
        return run_id

    def runs(self) -> dict[str, dict[str, Any]]:
        """Return all runs by their ids."""
        return {run["runId"]: run for run in self.graphql(_RUNS)["runsOrError"]["results"]}

    def start_sensor(self, name: str) -> None:
        """Switch a sensor on."""
        started = self.graphql(_START_SENSOR, sensor={**self.repository, "sensorName": name})[
            "startSensor"
        ]
        assert started.get("sensorState", {}).get("status") == "RUNNING", started

    def until(self, what: str, seconds: float, look: Callable[[], T | None]) -> T:
        """Return what `look` finds, asked every second; fail after so many seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            result = look()
            if result:
                return result
            time.sleep(1)
        logs = "\n".join(
            path.read_text(errors="replace")[-2000:] for path in sorted(self.home.glob("*.log"))
        )
        raise AssertionError(f"{what} did not happen within {seconds:.0f} s\n{logs}")


@contextmanager
def dagster_servers(
    home: Path, env: Mapping[str, str], *, project: Path | None = None, location: str = LOCATION
) -> Iterator[DagsterServers]:
    """Start both on workspace.yaml, wait until the code location is loaded, and end both with all
    they started.

    With a `project` they load what its pyproject.toml names, as `dagster dev` does there.
    """
    home = prepare_dagster_home(home)
    _create_storage(home)
    port = free_port()
    environment = {**os.environ, "DAGSTER_HOME": str(home), **env}
    workspace = [] if project else ["-w", "workspace.yaml"]
    commands = {
        "webserver": [program("dagster-webserver"), "-h", "127.0.0.1", "-p", str(port), *workspace],
        "daemon": [program("dagster-daemon"), "run", *workspace],
    }
    processes: list[subprocess.Popen[bytes]] = []
    servers = DagsterServers(f"http://127.0.0.1:{port}", home, location)
    try:
        for name, command in commands.items():
            with (home / f"{name}.log").open("wb") as log:
                options: dict[str, Any] = {
                    "env": environment,
                    "stdout": log,
                    "stderr": log,
                    "start_new_session": True,
                }
                processes.append(subprocess.Popen(command, cwd=project or ROOT, **options))
        servers.until(
            "loading the code location", READY_SECONDS, lambda: _loaded(servers, processes)
        )
        yield servers
    finally:
        end_processes(processes)


def _create_storage(home: Path) -> None:
    """Create the instance's databases before several processes would, at once."""
    with DagsterInstance.from_config(str(home)) as instance:
        instance.get_runs(limit=1)
        instance.get_asset_keys()
        instance.all_instigator_state()


def _loaded(servers: DagsterServers, processes: list[subprocess.Popen[bytes]]) -> bool:
    assert all(process.poll() is None for process in processes), (
        "a server ended; see its log in DAGSTER_HOME"
    )
    try:
        entries = servers.graphql(_READY)["workspaceOrError"]["locationEntries"]
    except (OSError, urllib.error.URLError):
        return False
    kinds = [
        entry["locationOrLoadError"]["__typename"]
        for entry in entries
        if entry["locationOrLoadError"]
    ]
    assert "PythonError" not in kinds, servers.graphql(_LOAD_ERRORS)
    return kinds == ["RepositoryLocation"]


_LOAD_ERRORS = (
    "{ workspaceOrError { ... on Workspace { locationEntries { locationOrLoadError "
    "{ ... on PythonError { message } } } } } }"
)


def end_processes(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the process groups: the servers have code servers and runs as children."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(3)
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
