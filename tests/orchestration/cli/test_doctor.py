"""`adjunct doctor`: what it finds where all is well, what it says where something is not; it
leaves nothing behind.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dagster_adjunct import (
    IN_PROCESS,
    Lake,
    LakeStreams,
    Schema,
    advance_dataset,
    open_lake,
    unbounded_dataset,
)
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, BatchLog
from dagster_adjunct.orchestration.batch_log.run_lease import Claim, RunLease
from dagster_adjunct.orchestration.cli import doctor
from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home
from dagster_adjunct.orchestration.code_location.pools import keeps_slots
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.operators.windows import zone_rules
from tests.orchestration.cli.commands import document, printed
from tests.servers.s3 import ROOT

APP = """
from dagster_adjunct import Application
from dagster_adjunct.tables import RemoteTable, SqliteTable

store = SqliteTable({file!r}, "things", "k", columns={{"k": "string", "n": "bigint"}})
app = Application("shop")
orders = app.input_stream("lake.orders")
things = app.table(RemoteTable("things", key="k", write_function=store))
orders.update(things, add={{"n": "1"}}, if_missing={{"n": "0"}})
orders.send_to(app.output_stream("lake.out", partitions=2, key="k"))
"""


@dataclass
class Project:
    lake: Lake
    folder: Path

    def findings(self, *arguments: str, code: int = 0) -> dict[str, dict[str, str]]:
        found = document(self, "doctor", *arguments, code=code)["findings"]
        return {finding["check"]: finding for finding in found}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """A lake with a stream, and an application that counts its records in a table; no Dagster,
    and no Spark.
    """
    lake = open_lake(tmp_path / "lake")
    LakeStreams(lake).create("orders", schema=Schema.of(k="string"), key=["k"], partitions=3)
    (tmp_path / "shop_doctor.py").write_text(APP.format(file=str(tmp_path / "things.sqlite")))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADJUNCT_SPARK_MASTER", "none")
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    yield Project(lake, tmp_path)
    sys.modules.pop("shop_doctor", None)


def objects(lake: Lake) -> set[str]:
    return {item.key for item in lake.store.list("")}


def test_what_is_well_is_reported_and_nothing_is_left(project: Project) -> None:
    before = objects(project.lake)
    found = project.findings()
    assert {name: finding["state"] for name, finding in found.items()} == {
        "packages": "ok",
        "Java": "skipped",
        "lake": "ok",
        "Spark": "skipped",
        "Dagster": "warning",
    }
    assert project.lake.url in found["lake"]["found"]
    assert "DAGSTER_HOME" in found["Dagster"]["next_step"]
    assert objects(project.lake) == before
    assert "ok       packages: " in printed(project, "doctor")


def test_an_applications_streams_and_tables_are_tried_too(project: Project) -> None:
    found = project.findings("shop_doctor:app", code=1)
    assert [found[name]["state"] for name in ("application", "streams")] == ["ok", "ok"]
    assert "lake.orders (3)" in found["streams"]["found"]
    table = found["table things"]
    assert table["state"] == "failed"
    assert table["next_step"]
    assert not (project.folder / "things.sqlite").exists()
    assert project.findings("shop_doctor:other", code=1)["application"]["state"] == "failed"


def test_a_table_is_asked_for_what_the_application_does_with_it(project: Project) -> None:
    with closing(sqlite3.connect(project.folder / "things.sqlite")) as connection:
        connection.execute(
            "CREATE TABLE things (k TEXT PRIMARY KEY, n INTEGER, town TEXT NOT NULL)"
        )
    table = project.findings("shop_doctor:app", code=1)["table things"]
    assert table["state"] == "failed"
    assert "'town'" in table["found"]


STALE = """
from dagster_adjunct import Application, unbounded_dataset

app = Application("stale")
table = app.table(unbounded_dataset("prices", input="lake.orders", key="k", partitions=3))
app.input_stream("lake.orders").join(table, on="k", how="inner", select=[]).send_to(
    app.output_stream("lake.out", partitions=3, key="k")
)
"""


def test_a_dataset_that_was_built_under_another_declaration_is_reported(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = unbounded_dataset("prices", input="lake.orders", key="k", broadcast=True)
    streams = LakeStreams(project.lake)
    advance_dataset(
        built, lake=project.lake, systems={"lake": streams}, spark=IN_PROCESS, by="test"
    )
    (project.folder / "stale_doctor.py").write_text(STALE)
    found = project.findings("stale_doctor:app")["streams"]
    assert found["state"] == "warning"
    assert "partitions is 3, was broadcast" in found["found"]


SHOP_OF_FILES = """
from dagster_adjunct import Application, Schema, bounded_dataset
from dagster_adjunct.sources import FileSource

app = Application("shop")
orders = app.input_stream("lake.orders")
files = FileSource({folder!r}, "csv", Schema.of(k="string", n="int"))
prices = app.table(bounded_dataset("prices", input=files, key="k", partitions=3))
orders.join(prices, on="k").send_to(app.output_stream("lake.out", partitions=3, key="k"))
"""


def test_a_folder_of_files_that_is_not_there_is_reported_by_doctor_plan_and_advance(
    project: Project,
) -> None:
    folder = project.folder / "nowhere"
    (project.folder / "shop_doctor.py").write_text(SHOP_OF_FILES.format(folder=str(folder)))
    found = project.findings("shop_doctor:app")["files of prices"]
    assert found["state"] == "warning"
    assert str(folder) in found["found"]
    assert "no such folder" in found["found"]
    notes = document(project, "plan", "shop_doctor:app")["notes"]
    assert [note for note in notes if str(folder) in note and "does not exist" in note]
    advanced = printed(project, "dataset", "advance", "prices", "shop_doctor:app")
    assert "no such folder" in advanced
    assert "markers" not in advanced
    folder.mkdir()
    assert project.findings("shop_doctor:app")["files of prices"]["state"] == "ok"


def test_the_former_name_of_an_application_fails(project: Project) -> None:
    assert project.findings("shop_doctor:app", code=1)["name"]["state"] == "ok"
    for name in ("shop", "kiosk"):
        with RunLease(project.lake, name, "me", Claim()):
            BatchLog(project.lake, name).commit(
                BatchLog(project.lake, name).read(), ApplicationState(batch=3), by="me"
            )
        if name == "shop":
            rename_application(project.lake, "shop", "stand", reason="better", by="me")
    found = project.findings("shop_doctor:app", code=1)["name"]
    assert found["state"] == "failed"
    assert "'stand'" in found["found"]


@pytest.mark.spark
def test_spark_its_workers_and_its_way_to_the_lake_are_tried(project: Project, spark: Any) -> None:
    found = project.findings("--master", "local[2]")
    assert found["Java"]["state"] == "ok"
    assert found["Spark"]["state"] == "ok", found["Spark"]
    assert "it reads the lake" in found["Spark"]["found"]


@pytest.mark.spark
def test_workers_with_another_package_are_reported(
    project: Project, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "9.9")  # here, and not in the workers
    found = project.findings("--master", "local[2]", code=1)["Spark"]
    assert (found["state"], "9.9" in found["found"], "PYSPARK_PYTHON" in found["next_step"]) == (
        "failed",
        True,
        True,
    )


ZONED = """
from dagster_adjunct import Application
from dagster_adjunct.windows import Count, Tumbling

app = Application("takings")
sales = app.input_stream("lake.sales", event_time="at")
days = sales.window(Tumbling(days=1, zone="America/New_York"), by="k", name="days", aggregates={"n": Count()})
days.send_to(app.output_stream("lake.days", partitions=1, key="k"))
"""


@pytest.mark.spark
def test_rules_of_time_zones_are_compared(
    project: Project, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    LakeStreams(project.lake).create(
        "sales", schema=Schema.of(k="string", at="timestamp"), key=["k"], partitions=3
    )
    (project.folder / "shop_doctor.py").write_text(ZONED)
    found = project.findings("shop_doctor:app")["time zones"]
    assert found["state"] == "skipped"
    found = project.findings("shop_doctor:app", "--master", "local[2]")["time zones"]
    assert (found["state"], "America/New_York" in found["found"]) == ("ok", True)
    zone_rules._differences.clear()
    changes = zone_rules.clock_changes
    monkeypatch.setattr(zone_rules, "clock_changes", lambda zone: changes("America/Chicago"))
    found = project.findings("shop_doctor:app", "--master", "local[2]", code=1)["time zones"]
    zone_rules._differences.clear()
    assert (found["state"], "PYTHONTZPATH" in found["next_step"]) == ("failed", True)


def test_a_wrong_java_is_reported_and_spark_is_not_tried(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(project.folder))
    found = project.findings("--master", "local[2]", code=1)
    assert (found["Java"]["state"], found["Spark"]["state"]) == ("failed", "skipped")
    assert "JAVA_HOME" in found["Java"]["found"]


def test_a_store_that_is_not_reached_is_reported(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "ENDPOINT": "http://127.0.0.1:9",
        "ATTEMPTS": "1",
        "REGION": "us-east-1",
        "CONNECT_TIMEOUT": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(f"ADJUNCT_S3_{name}", value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    findings = list(doctor.examine("shop_doctor:app", None, "s3://bucket/lake"))
    found = {finding.check: finding for finding in findings}
    assert found["lake"].state == "failed"
    assert found["lake"].next_step
    assert found["streams"].state == "skipped"


def test_a_lake_that_is_not_there_is_not_created(project: Project) -> None:
    folder = project.folder / "elsewhere"
    (finding,) = (
        found for found in doctor.examine(None, None, str(folder)) if found.check == "lake"
    )
    assert (finding.state, "the first write creates it" in finding.found) == ("ok", True)
    assert not folder.exists()


def test_packages_that_do_not_fit_are_named(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = ["pyarrow>=99", "nothing-like-it>=1", 'not-there-either; extra == "more"', "click>=8"]
    monkeypatch.setattr(doctor, "requires", lambda name: needed)
    found = project.findings(code=1)["packages"]
    assert found["state"] == "failed"
    assert "expected >=99" in found["found"]
    assert "nothing-like-it is missing" in found["found"]
    assert "not-there-either" not in found["found"]


def beat(instance: dg.DagsterInstance) -> None:
    """Store that a daemon runs now."""
    from dagster._daemon.types import DaemonHeartbeat  # the whole daemon is imported for it

    instance.add_daemon_heartbeat(DaemonHeartbeat(doctor.time.time(), "SENSOR", "id"))


def test_dagsters_instance_and_daemon_are_looked_at(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = project.folder / "home"
    home.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    found = project.findings()["Dagster"]
    assert (found["state"], "daemon does not run" in found["found"]) == ("warning", True)
    with dg.DagsterInstance.get() as instance:
        beat(instance)
    assert project.findings()["Dagster"]["state"] == "ok"
    monkeypatch.setenv("DAGSTER_HOME", str(home / "nowhere"))
    assert project.findings(code=1)["Dagster"]["state"] == "failed"


FREED = "run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 30}"


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ("concurrency: {pools: {default_limit: 1}}", "warning"),
        ("concurrency: {pools: {granularity: op, default_limit: 1}}", "warning"),
        ("concurrency: {default_op_concurrency_limit: 1}", "warning"),
        ("concurrency: {pools: {default_limit: 1}}\nrun_monitoring: {enabled: true}", "warning"),
        (
            f"concurrency: {{pools: {{default_limit: 1}}}}\n{FREED.replace('true', 'false')}",
            "warning",
        ),
        (f"concurrency: {{pools: {{default_limit: 1}}}}\n{FREED}", "ok"),
        ("concurrency: {pools: {granularity: run, default_limit: 1}}", "ok"),
        ("", "ok"),
    ],
)
def test_pools_whose_slots_stay_with_killed_runs_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, state: str
) -> None:
    (tmp_path / "dagster.yaml").write_text(settings)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance:
        beat(instance)
    found = doctor.run_check("Dagster", doctor.check_dagster)
    assert found.state == state
    advised = (
        "free_slots_after_run_end_seconds" in found.next_step
        and "granularity: run" in found.next_step
    )
    assert advised == (state == "warning")


@pytest.mark.lengthy
@pytest.mark.parametrize("named", ["adjunct", "own"])
def test_a_limit_of_one_pool_is_enough_for_the_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    with dg.DagsterInstance.get() as instance:
        instance.event_log_storage.set_concurrency_slots(f"{named}/application/shop", 1)
        beat(instance)
    assert doctor.run_check("Dagster", doctor.check_dagster).state == "warning"


@pytest.mark.parametrize("template", ["adjunct", "deploy"])
def test_the_settings_that_adjunct_writes_let_no_killed_run_keep_a_slot(
    template: str, tmp_path: Path
) -> None:
    text = (prepare_dagster_home(tmp_path) / "dagster.yaml").read_text()
    if template == "deploy":
        written = (ROOT / "deploy" / "dagster.yaml").read_text()
        text = written[written.index("\nconcurrency:") : written.index("\n# Sensors look")]
    for granularity in ("run", "op"):
        changed = text.replace("granularity: run", f"granularity: {granularity}")
        assert f"granularity: {granularity}" in changed
        (tmp_path / "dagster.yaml").write_text(changed)
        with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
            assert not keeps_slots(instance)
