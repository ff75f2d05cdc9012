"""What commands do is in Dagster, as the events of its own runs; a missing home or a failing
storage ends none.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from click.testing import CliRunner, Result
from dagster._core.instance import DagsterInstance

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    Schema,
    VersionPartitions,
    bounded_dataset,
    build_definitions,
    open_lake,
)
from dagster_adjunct.orchestration.cli.dagster_events import NO_HOME, find_dagster_home
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.orchestration.code_location import runless
from dagster_adjunct.orchestration.maintenance.rename import rename_application
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.resources.table_backends.sqlite import SqliteTable
from dagster_adjunct.resources.tables.table import RemoteTable
from dagster_adjunct.validators import min_rows
from tests.kept_processes import program
from tests.orchestration.dagster.lab import NO_SPARK
from tests.servers.dagster import dagster_servers

SCHEMA = Schema.of(item="string", price="int")
REFERENCE = f"{__name__}:shop"
items = bounded_dataset(
    "items", input="lake.items", key="item", partitions=2, validators=[min_rows(1)]
)
daily = bounded_dataset(
    "daily",
    input="lake.daily",
    key="item",
    broadcast=True,
    versions=VersionPartitions("day", start="2026-01-01"),
)
shop = Application("shop", engine="auto")
shop.input_stream("lake.orders", default_offset="oldest").join(
    shop.table(items), on="item", how="left", select=["price as list_price"]
).send_to(shop.output_stream("lake.priced", partitions=1))
shop.table(daily)


def append(lake: Lake, stream: str, number: int, marker: str | None = None) -> None:
    streams = LakeStreams(lake)
    streams.create(stream, schema=SCHEMA, key=["item"], partitions=2)
    rows = pa.Table.from_pylist([{"item": f"i{number}", "price": number}], SCHEMA.to_arrow())
    streams.append(stream, rows, producer="test", sequence=number, end_of_dataset=marker)


def make_lake(folder: Path) -> Lake:
    lake = open_lake(folder)
    append(lake, "items", 1, "v1")
    append(lake, "daily", 1, "2026-01-02")
    append(lake, "orders", 1)
    return lake


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return make_lake(tmp_path / "lake")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    monkeypatch.setenv("DAGSTER_HOME", str(folder))
    return folder


def command(lake: Lake, *arguments: str) -> Result:
    return CliRunner().invoke(root, [*arguments, "--lake", lake.url, "--master", "none"])


def events(instance: DagsterInstance, kind: dg.DagsterEventType) -> list[Any]:
    """Return what was stored of a kind, oldest first."""
    records = instance.get_event_records(dg.EventRecordsFilter(kind), limit=100, ascending=True)
    found = [record.event_log_entry.dagster_event for record in records]
    return [event.event_specific_data for event in found if event is not None]


def materialized(instance: DagsterInstance) -> dict[str, set[str]]:
    """Return the keys of the metadata of each materialization, by asset and partition."""
    made = [
        data.materialization for data in events(instance, dg.DagsterEventType.ASSET_MATERIALIZATION)
    ]
    return {
        f"{one.asset_key.to_user_string()} {one.partition or ''}".strip(): set(one.metadata)
        for one in made
    }


def checked(instance: DagsterInstance) -> dict[str, bool]:
    found = events(instance, dg.DagsterEventType.ASSET_CHECK_EVALUATION)
    return {f"{one.asset_key.to_user_string()} {one.check_name}": one.passed for one in found}


@pytest.mark.lengthy
def test_a_command_stores_what_a_run_in_dagster_stores(
    lake: Lake, home: Path, tmp_path: Path
) -> None:
    result = command(lake, "run", REFERENCE)
    assert result.exit_code == 0, result.output
    other = make_lake(tmp_path / "other")
    defs = build_definitions(shop, lake=other.url, spark=NO_SPARK)
    with DagsterInstance.get() as reported, DagsterInstance.ephemeral() as ran:
        builds = defs.resolve_job_def("daily_versions")
        assert builds.execute_in_process(instance=ran, partition_key="2026-01-02").success
        assert defs.resolve_job_def("shop").execute_in_process(instance=ran).success
        by_command, by_run = materialized(reported), materialized(ran)
        # A dataset's seconds are those of the stages that it went through.
        for made in (by_command, by_run):
            for names in made.values():
                names -= {name for name in names if name.startswith("adjunct/seconds/")}
        assert by_command == by_run
        checks = checked(reported)
        assert checks == checked(ran)
        assert set(checks) == {
            "datasets/daily_dataset adjunct_accepted",
            "datasets/items_dataset adjunct_accepted",
            "datasets/items_dataset min_rows",
            "lake/priced match_rate_items",
        }
        assert reported.get_runs() == []


def counting(name: str) -> Application:
    """Return an application that adds up orders in a table with marks."""
    app = Application(name, engine="auto")
    store = SqliteTable(
        Path(os.environ["COUNTS"]), "counts", "item", columns={"item": "string", "n": "int"},
        create=True,
    )  # fmt: skip
    table = RemoteTable(
        "counts", key="item", read_function=store, write_function=store, idempotent=True
    )
    orders = app.input_stream("lake.orders", default_offset="oldest")
    orders.update(app.table(table), add={"n": "price"}, if_missing=[])
    return app


def planned_marks(instance: DagsterInstance, asset: str) -> str | None:
    """Return the name of the marks in the plan that was stored last with an asset."""
    known = instance.get_latest_materialization_event(dg.AssetKey(asset.split("/")))
    assert known is not None
    assert known.asset_materialization is not None
    document = known.asset_materialization.metadata["adjunct/plan_document"].value
    (table,) = ExecutionPlan.from_json(document).tables
    return table.marks


@pytest.mark.lengthy
def test_plans_in_dagster_name_the_marks_of_a_renamed_application_as_tables_do(
    lake: Lake, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COUNTS", str(tmp_path / "counts.sqlite"))
    monkeypatch.setattr(f"{__name__}.sums", counting("sums"), raising=False)
    assert command(lake, "run", f"{__name__}:sums").exit_code == 0
    rename_application(lake, "sums", "totals", by="a test", reason="to see")
    append(lake, "orders", 2)
    monkeypatch.setattr(f"{__name__}.totals", counting("totals"), raising=False)
    result = command(lake, "run", f"{__name__}:totals")
    assert result.exit_code == 0, result.output
    with DagsterInstance.get() as reported, DagsterInstance.ephemeral() as ran:
        assert planned_marks(reported, "tables/counts") == "sums"
        append(lake, "orders", 3)
        defs = build_definitions(counting("totals"), lake=lake.url, spark=NO_SPARK)
        assert defs.resolve_job_def("totals").execute_in_process(instance=ran).success
        assert planned_marks(ran, "tables/counts") == "sums"
    with closing(sqlite3.connect(tmp_path / "counts.sqlite")) as connection:
        (marks,) = connection.execute(
            "SELECT group_concat(applied) FROM counts__adjunct"
        ).fetchone()
    assert "sums/" in marks
    assert "totals/" not in marks


@pytest.mark.lengthy
def test_a_command_that_finds_nothing_new_stores_observations_only(lake: Lake, home: Path) -> None:
    command(lake, "run", REFERENCE)
    with DagsterInstance.get() as instance:
        before = len(events(instance, dg.DagsterEventType.ASSET_MATERIALIZATION))
        assert command(lake, "run", REFERENCE).exit_code == 0
        assert len(events(instance, dg.DagsterEventType.ASSET_MATERIALIZATION)) == before
        observed = events(instance, dg.DagsterEventType.ASSET_OBSERVATION)
        keys = [one.asset_observation.asset_key.to_user_string() for one in observed]
        assert {"lake/priced", "datasets/items_dataset", "lake/orders"} <= set(keys)
        append(lake, "orders", 2)
        command(lake, "run", REFERENCE)
        known = instance.get_latest_materialization_event(dg.AssetKey(["lake", "priced"]))
        assert known is not None
        assert known.asset_materialization is not None
        assert known.asset_materialization.metadata["adjunct/rows"].value == 1


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("dataset", "asset"),
    [("items", "datasets/items_dataset"), ("daily", "datasets/daily_dataset 2026-01-02")],
)
def test_advancing_a_dataset_by_hand_is_reported(
    lake: Lake, home: Path, dataset: str, asset: str
) -> None:
    result = command(lake, "dataset", "advance", dataset, REFERENCE)
    assert result.exit_code == 0, result.output
    with DagsterInstance.get() as instance:
        assert set(materialized(instance)) == {asset}


@pytest.mark.lengthy
def test_datasets_that_were_published_are_reported_though_the_step_fails(
    lake: Lake, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("no more memory")

    monkeypatch.setattr("dagster_adjunct.orchestration.step.run.run_steps", _after_advancing(fail))
    assert command(lake, "run", REFERENCE).exit_code != 0
    with DagsterInstance.get() as instance:
        assert set(materialized(instance)) == {
            "datasets/items_dataset",
            "datasets/daily_dataset 2026-01-02",
        }


def _after_advancing(fail: Callable[..., None]) -> Callable[..., None]:
    def run(following: object, begin: Callable[[], object]) -> None:
        begin()
        fail()

    return run


@pytest.mark.lengthy
def test_a_run_that_stays_reports_as_it_goes(
    lake: Lake, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runless, "_REPORT_SECONDS", 0.0)
    seen: list[int] = []
    report = runless.RunlessReporter._report_step

    def at_the_end(self: runless.RunlessReporter, step: Any) -> None:
        with DagsterInstance.get() as instance:
            seen.append(len(events(instance, dg.DagsterEventType.ASSET_MATERIALIZATION)))
        report(self, step)

    monkeypatch.setattr(runless.RunlessReporter, "_report_step", at_the_end)
    assert command(lake, "run", REFERENCE, "--follow", "1s").exit_code == 0
    assert seen == [3], "both datasets and the output were reported before the end"


@pytest.mark.lengthy
def test_without_a_home_one_line_says_so_and_dagster_is_not_imported(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    script = (
        "import sys\nfrom dagster_adjunct.orchestration.cli.main import root\ncode = root(['run',"
        f" {REFERENCE.replace(__name__, 'only_app')!r}, '--master', 'none', '--lake',"
        f" {lake.url!r}], standalone_mode=False)\nprint('dagster' in sys.modules, code)\n"
    )
    (tmp_path / "only_app.py").write_text(
        "from dagster_adjunct import Application\nshop = Application('shop', engine='auto')\n"
        "shop.input_stream('lake.orders').send_to(shop.output_stream('lake.copy', partitions=1))\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stderr.count(NO_HOME) == 1
    assert ran.stdout.splitlines()[-1].startswith("False ")


@pytest.mark.parametrize("place", [".adjunct/dagster", "."])
def test_the_home_of_a_project_is_found(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    assert find_dagster_home() is None
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / place / "dagster.yaml").touch()
    assert find_dagster_home() == (tmp_path / place).resolve()
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "given"))
    assert find_dagster_home() == tmp_path / "given"


@pytest.mark.lengthy
@pytest.mark.parametrize("settings", ["nonsense: [", "storage: {sqlite: {base_dir: /dev/null/x}}"])
def test_an_instance_that_can_not_be_opened_fails_no_command(
    lake: Lake, home: Path, settings: str, caplog: pytest.LogCaptureFixture
) -> None:
    (home / "dagster.yaml").write_text(settings)
    assert command(lake, "run", REFERENCE).exit_code == 0
    reported = [
        record.getMessage() for record in caplog.records if record.name == "adjunct.dagster"
    ]
    assert len(reported) == 1
    assert reported[0].startswith("Dagster ")


@pytest.mark.lengthy
def test_a_storage_that_fails_in_between_is_reported_once_and_fails_no_command(
    lake: Lake, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(instance: DagsterInstance, event: object) -> None:
        raise OSError("database is locked")

    monkeypatch.setattr(DagsterInstance, "report_runless_asset_event", fail)
    assert command(lake, "run", REFERENCE).exit_code == 0
    (reported,) = [
        record.getMessage() for record in caplog.records if record.name == "adjunct.dagster"
    ]
    assert "OSError: database is locked" in reported
    assert str(home) in reported


@pytest.mark.lengthy
def test_a_process_of_a_run_in_dagster_reports_nothing_itself(
    lake: Lake, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGSTER_PIPES_CONTEXT", "eJx")
    assert command(lake, "dataset", "advance", "items", REFERENCE).exit_code == 0
    with DagsterInstance.get() as instance:
        assert materialized(instance) == {}


def test_a_document_stays_one_document(lake: Lake, home: Path) -> None:
    result = command(lake, "dataset", "advance", "items", REFERENCE, "--json")
    assert json.loads(result.stdout)[0]["dataset"] == "items"


NODES = (
    "{ assetNodes { assetKey { path } assetMaterializations(limit: 1) { runId }"
    " isMaterializable } }"
)


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_webserver_shows_what_a_project_has_run_by_hand(tmp_path: Path) -> None:
    adjunct, python = program("adjunct"), str(Path(program("adjunct")).with_name("python"))
    env = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"}
    env["ADJUNCT_SPARK_MASTER"] = "none"
    for arguments, folder in (
        ([adjunct, "new", "my-orders"], tmp_path),
        ([python, "-m", "my_orders.deliver"], tmp_path / "my-orders"),
        ([adjunct, "run", "my_orders.pipeline:app"], tmp_path / "my-orders"),
    ):
        subprocess.run(arguments, cwd=folder, env=env, check=True, capture_output=True)
    project = tmp_path / "my-orders"
    with dagster_servers(project, env, project=project, location="my_orders") as servers:
        nodes = servers.graphql(NODES)["assetNodes"]
        assert servers.runs() == {}
    made = {"/".join(node["assetKey"]["path"]): node["assetMaterializations"] for node in nodes}
    never = [key for key, found in made.items() if not found]
    assert not [
        node
        for node in nodes
        if node["isMaterializable"] and "/".join(node["assetKey"]["path"]) in never
    ]
    assert len(made) > len(never)
