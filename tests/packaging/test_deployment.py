"""deploy/: the files agree with each other and with the package, and what they start runs a job.

No container engine is needed: the commands of compose.yaml are started by hand, in its order, with
its environment.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from dagster_adjunct import LakeStreams, open_lake
from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home
from dagster_adjunct.resources.objects.lake import LakeSettings
from tests.packaging.composed import (
    DEPLOY,
    SECRETS,
    ByHand,
    compose_secrets,
    image_environment,
    read_compose,
    read_dockerfile,
    started_by_hand,
)
from tests.servers.dagster import DONE
from tests.servers.s3 import ROOT

IMAGE = ("bucket", "storage", "code", "webserver", "daemon")
HOME = "/opt/dagster/home"
# Of values.yaml and its schema in the chart of Dagster 1.13. What is below a * is Kubernetes' or
# Dagster's own.
CHART_KEYS = (Path(__file__).parent / "chart_keys.txt").read_text("utf-8").split()
SETTINGS = {
    "ADJUNCT_LAKE",
    "ADJUNCT_SPARK_MASTER",
    *(f"ADJUNCT_S3_{name}".upper() for name in LakeSettings.model_fields if name != "shared"),
}


def arguments_of(instruction: str) -> list[str]:
    return [rest for name, rest in read_dockerfile() if name == instruction]


def values() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "helm-values.yaml").read_text("utf-8")))


def code_deployment() -> dict[str, Any]:
    (deployment,) = values()["dagster-user-deployments"]["deployments"]
    return dict(deployment)


def test_the_image_copies_what_there_is_and_its_context_has_no_secret() -> None:
    lines = (DEPLOY / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    let_in = [line.removeprefix("!") for line in lines if line.startswith("!")]
    copied = [source for rest in arguments_of("COPY") for source in shlex.split(rest)[:-1]]
    # dist/ is made by the commands of the page.
    assert [
        source for source in copied if source != "dist/" and not (DEPLOY / source).exists()
    ] == []
    assert {source.rstrip("/") for source in copied} == {
        pattern.rstrip("/").split("/")[0] for pattern in let_in
    }
    assert not any(
        fnmatch.fnmatch(name, pattern) for name in (".env", ".env.example") for pattern in let_in
    )


def test_the_image_runs_as_a_user_without_rights_and_installs_what_it_runs() -> None:
    (base,), (command,), (check,) = (arguments_of(name) for name in ("FROM", "CMD", "HEALTHCHECK"))
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    users = [
        match[1]
        for rest in arguments_of("RUN")
        if (match := re.search(r"useradd --uid (\d+)", rest))
    ]
    assert arguments_of("USER")[-1] == "adjunct"
    assert int(users[0]) >= 10_000
    installs = " ".join(arguments_of("RUN"))
    assert re.search(r"openjdk-(\d+)-jre-headless", installs)[1] >= "17"  # type: ignore[index]
    assert json.loads(arguments_of("ENTRYPOINT")[0]) == ["tini", "--"]
    assert " tini " in installs
    assert json.loads(command) == read_compose()["services"]["code"]["command"]
    assert (
        json.loads(check.partition("CMD ")[2])
        == read_compose()["services"]["code"]["healthcheck"]["test"][1:]
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    pinned = {
        line.partition("==")[0]
        for line in (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    }
    (wanted,) = [
        rest.partition("=")[2] for rest in arguments_of("ARG") if rest.startswith("EXTRAS=")
    ]
    assert ".whl)[${EXTRAS}]" in installs
    assert {re.split("[<>=]", requirement)[0] for requirement in extras[wanted]} <= pinned
    (started,) = [json.loads(rest)[2] for rest in arguments_of("RUN") if rest.startswith("[")]
    compile(started, "Dockerfile", "exec")
    assert image_environment()["DAGSTER_HOME"] == HOME


def test_each_service_runs_a_pinned_image_and_a_program_that_is_in_it() -> None:
    services = read_compose()["services"]
    assert {name for name, service in services.items() if "build" in service} == set(IMAGE)
    for service in services.values():
        assert re.search(r":v?\d", service["image"]), service["image"]
    programs = {point.name for point in entry_points(group="console_scripts")} | {"python"}
    for name in IMAGE:
        command = services[name]["command"]
        assert command[0] in programs
        assert all(isinstance(word, str) for word in command)
        modules = [command[at + 1] for at, word in enumerate(command) if word == "-m"]
        assert all((DEPLOY / f"{module.replace('.', '/')}.py").exists() for module in modules)
        files = [word for word in command if word.startswith("/")]
        assert all(word == f"{HOME}/workspace.yaml" for word in files)


def test_services_wait_for_others_whose_health_is_checked() -> None:
    services = read_compose()["services"]
    for service in services.values():
        for other, wanted in service.get("depends_on", {}).items():
            if wanted["condition"] == "service_healthy":
                assert "healthcheck" in services[other]
            else:
                assert (wanted["condition"], services[other]["restart"]) == (
                    "service_completed_successfully",
                    "no",
                )
    ends = {name for name, service in services.items() if service["restart"] == "no"}
    assert {
        name for name, service in services.items() if "healthcheck" in service
    } == services.keys() - ends


def test_secrets_come_from_the_environment_and_only_to_those_that_need_them() -> None:
    example = (DEPLOY / ".env.example").read_text("utf-8").splitlines()
    assert {line for line in example if not line.startswith("#")} == {
        f"{name}=" for name in compose_secrets()
    }
    assert compose_secrets() == set(SECRETS)
    services = read_compose()["services"]
    for name in ("webserver", "daemon", "storage", "postgres"):
        assert not any(
            key.startswith(("AWS_", "ADJUNCT_")) for key in services[name]["environment"]
        )
    assert "DAGSTER_POSTGRES_PASSWORD" not in services["bucket"]["environment"]
    assert not any(key.startswith("AWS_") for key in image_environment())
    with_ports = {
        name: service["ports"] for name, service in services.items() if "ports" in service
    }
    assert with_ports == {"webserver": ["127.0.0.1:3000:3000"]}


def test_settings_of_services_exist() -> None:
    services = read_compose()["services"]
    given = {
        key
        for service in services.values()
        for key in service["environment"]
        if key.startswith("ADJUNCT_")
    }
    given |= {
        entry["name"] for entry in code_deployment()["env"] if entry["name"].startswith("ADJUNCT_")
    }
    assert given <= SETTINGS
    used = set(re.findall(r"env: (\w+)", (DEPLOY / "dagster.yaml").read_text("utf-8")))
    assert used <= services["daemon"]["environment"].keys()
    assert all(
        used <= services[name]["environment"].keys() for name in ("code", "webserver", "storage")
    )


def test_runs_of_one_application_wait_for_each_other_as_in_a_home_that_adjunct_makes(
    tmp_path: Path,
) -> None:
    made = yaml.safe_load((prepare_dagster_home(tmp_path) / "dagster.yaml").read_text("utf-8"))
    deployed = yaml.safe_load((DEPLOY / "dagster.yaml").read_text("utf-8"))
    in_chart = values()
    assert deployed["concurrency"]["pools"] == made["concurrency"]["pools"]
    pools = made["concurrency"]["pools"]
    assert in_chart["concurrency"]["enabled"]
    assert in_chart["concurrency"]["pools"] == {
        "granularity": pools["granularity"],
        "defaultLimit": pools["default_limit"],
    }
    assert deployed["run_monitoring"].items() >= made["run_monitoring"].items()
    monitoring = in_chart["dagsterDaemon"]["runMonitoring"]
    assert monitoring["startTimeoutSeconds"] == made["run_monitoring"]["start_timeout_seconds"]
    assert monitoring["cancelTimeoutSeconds"] == made["run_monitoring"]["cancel_timeout_seconds"]
    assert (
        monitoring["freeSlotsAfterRunEndSeconds"]
        == made["run_monitoring"]["free_slots_after_run_end_seconds"]
    )
    assert not deployed["telemetry"]["enabled"]
    assert not in_chart["telemetry"]["enabled"]


def keys_of(given: Any, before: str = "") -> Iterator[str]:
    """Yield the paths of the values, without the numbers of a list's members."""
    members = (
        given.items()
        if isinstance(given, dict)
        else [("", item) for item in given]
        if given
        else ()
    )
    if not isinstance(given, dict | list) or not members:
        yield before
        return
    for name, below in members:
        path = ".".join(filter(None, [before, name]))
        if isinstance(below, dict | list):
            yield from keys_of(below, path)
        else:
            yield path


def test_values_are_those_of_dagsters_chart() -> None:
    def known(key: str) -> bool:
        return any(
            fnmatch.fnmatchcase(key, pattern) or key == pattern.removesuffix(".*")
            for pattern in CHART_KEYS
        )

    assert [key for key in keys_of(values()) if not known(key)] == []
    chart = re.findall(r"--version (\S+)", (DEPLOY / "helm-values.yaml").read_text("utf-8"))
    assert {f"dagster=={version}" for version in chart} <= set(
        (ROOT / "requirements.txt").read_text("utf-8").split()
    )


def test_the_chart_runs_the_same_image_in_the_same_way() -> None:
    code, deployment = read_compose()["services"]["code"], code_deployment()
    assert code["command"][-2:] == deployment["dagsterApiGrpcArgs"]
    assert str(deployment["port"]) in code["command"]
    assert (
        f"{deployment['image']['repository'].split('/')[-1]}:{deployment['image']['tag']}"
        == code["image"]
    )
    assert deployment["securityContext"]["runAsNonRoot"]
    assert f"--uid {deployment['securityContext']['runAsUser']} " in " ".join(arguments_of("RUN"))
    launcher = values()["runLauncher"]["config"]["k8sRunLauncher"]
    assert launcher["runK8sConfig"]["containerConfig"]["env"] == deployment["env"]
    assert launcher["securityContext"] == deployment["securityContext"]
    # Else runs would get the account of the code location, which may not write the lake.
    assert not deployment["includeConfigInLaunchedRuns"]["enabled"]
    accounts = [manifest["metadata"]["name"] for manifest in values()["extraManifests"]]
    assert accounts == [launcher["runK8sConfig"]["podSpecConfig"]["serviceAccountName"]]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    with started_by_hand(tmp_path_factory.mktemp("deployed")) as services:
        yield services


@pytest.mark.server
@pytest.mark.slow
def test_a_job_launched_in_the_webserver_succeeds_on_the_lake(
    deployed: ByHand, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        deployed.run("code", "python", "-m", "orders.deliver")
        == "2 products, 2 customers, 3 orders\n"
    )
    run_id = deployed.dagster.launch("orders")

    def ended() -> str | None:
        status: str = deployed.dagster.runs()[run_id]["status"]
        return status if status in DONE else None

    assert deployed.dagster.until("the end of the run", 120, ended) == "SUCCESS"

    for name, value in deployed.environment("code").items():
        if name.startswith(("AWS_", "ADJUNCT_")):
            monkeypatch.setenv(name, value)
    streams = LakeStreams(open_lake())
    assert streams.lake.url == "s3://company-lake/adjunct"
    priced = streams.read_arrow(
        streams.all_ranges("priced-orders"), columns=["order_id", "amount", "town"]
    ).to_pylist()
    assert sorted((row["order_id"], row["amount"], row["town"]) for row in priced) == [
        (1, 1.5, "Leeds"),
        (2, 2.0, "York"),
        (3, None, "Leeds"),
    ]
    spent = deployed.run("code", "adjunct", "table", "get", "spending", "ann", "--json")
    assert json.loads(spent)["record"]["spent"] == 1.5
    stored = deployed.postgres.dsn(dbname="dagster")
    import psycopg

    with psycopg.connect(stored) as connection:
        assert connection.execute("SELECT run_id, status FROM runs").fetchall() == [
            (run_id, "SUCCESS")
        ]
    assert not {path.name for path in deployed.home.iterdir()} & {"history", "schedules", "storage"}
    assert [path for path in deployed.logs.rglob(f"{run_id}/**/*.err") if path.stat().st_size] != []


@pytest.mark.server
@pytest.mark.slow
def test_no_secret_is_in_what_the_processes_wrote(deployed: ByHand) -> None:
    written = [
        path
        for path in deployed.folder.rglob("*")
        if path.suffix in (".log", ".out", ".err", ".yaml")
    ]
    assert len(written) > len(IMAGE)
    for path in written:
        text = path.read_text("utf-8", "replace")
        assert not any(
            secret in text for name, secret in SECRETS.items() if name != "S3_ACCESS_KEY"
        ), path
