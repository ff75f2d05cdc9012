"""Slots of pools that killed runs keep: sensors say what a run waits for, and the daemon frees
them as advised.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import RunOpConcurrency

from dagster_adjunct import Application, open_lake
from dagster_adjunct.orchestration.code_location.definitions import prepare_dagster_home
from tests.orchestration.dagster.lab import NO_SPARK, SCHEMA, Lab
from tests.orchestration.dagster.ticking import HERE, Ticker, job_origin
from tests.servers.dagster import DONE, dagster_servers

POOL = "adjunct/application/shop"


@pytest.fixture
def instance(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[dg.DagsterInstance]:
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text(
        f"concurrency: {{pools: {{default_limit: 1}}}}\n{request.param}"
    )
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


def add_run(instance: dg.DagsterInstance, status: dg.DagsterRunStatus) -> str:
    needed = RunOpConcurrency(
        root_key_counts={}, has_unconstrained_root_nodes=False, all_pools={POOL}
    )
    run = dg.DagsterRun(
        "shop", status=status, remote_job_origin=job_origin(HERE, "shop"), run_op_concurrency=needed
    )
    return instance.add_run(run).run_id


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("instance", "advice"),
    [
        ("", "run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 60}"),
        (
            "run_monitoring: {enabled: true, free_slots_after_run_end_seconds: 1}",
            "The daemon frees it soon.",
        ),
    ],
    indirect=["instance"],
)
def test_a_sensor_says_which_ended_run_keeps_the_slot_and_which_setting_frees_it(
    instance: dg.DagsterInstance, advice: str, tmp_path: Path
) -> None:
    lab = Lab(open_lake(tmp_path / "lake"), instance)
    lab.streams.create("orders", schema=SCHEMA, key=["item"], partitions=1)
    app = Application("shop")
    app.input_stream("lake.orders").send_to(app.output_stream("lake.copy", partitions=1))
    ticker = Ticker(lab.lake, app, instance, "shop_new_records", spark=NO_SPARK)
    killed = add_run(instance, dg.DagsterRunStatus.STARTED)
    instance.event_log_storage.initialize_concurrency_limit_to_default(POOL)
    assert instance.event_log_storage.claim_concurrency_slot(POOL, killed, "shop_step").is_claimed
    assert ticker.skipped() == "A run is already in progress.", "it has its slot by right"
    run = instance.get_run_by_id(killed)
    assert run is not None
    instance.report_run_canceled(run)
    assert ticker.skipped() == "No new records."
    add_run(instance, dg.DagsterRunStatus.QUEUED)
    reported = ticker.skipped()
    assert reported.startswith("A run is already in progress. It waits for the slot that run ")
    assert killed[:8] in reported
    assert advice in reported


DEFINITIONS = """
import os, time
import dagster as dg

@dg.asset(pool="adjunct/application/shop")
def made() -> None:
    with open(os.environ["PIDS"], "a") as file:
        file.write(f"{os.getpid()}\\n")
    if sum(1 for _ in open(os.environ["PIDS"])) == 1:
        time.sleep(3600)

defs = dg.Definitions(
    assets=[made], jobs=[dg.define_asset_job("shop", [made], executor_def=dg.in_process_executor)]
)
"""


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_settings_that_adjunct_writes_free_the_slot_of_a_killed_run(tmp_path: Path) -> None:
    """With the granularity "op", in which Dagster itself never frees it; with "run" there is no
    slot.
    """
    home, project, pids = (
        prepare_dagster_home(tmp_path / "home"),
        tmp_path / "project",
        tmp_path / "pids",
    )
    settings = (home / "dagster.yaml").read_text()
    assert "free_slots_after_run_end_seconds: 60" in settings
    sooner = settings.replace("_end_seconds: 60", "_end_seconds: 1\n  poll_interval_seconds: 2")
    (home / "dagster.yaml").write_text(sooner.replace("granularity: run", "granularity: op"))
    project.mkdir()
    (project / "adjunct.py").write_text(DEFINITIONS)
    (project / "workspace.yaml").write_text(
        "load_from: [{python_module: {module_name: adjunct}}]\n"
    )
    with dagster_servers(home, {"PIDS": str(pids)}, project=project) as servers:
        first = servers.launch("shop")
        servers.until("starting the op", 120, lambda: pids.exists() and pids.read_text())
        os.kill(int(pids.read_text()), signal.SIGKILL)
        # As force-termination does in the UI, which first waits for an answer of the dead process.
        with dg.DagsterInstance.from_config(str(home)) as instance:
            run = instance.get_run_by_id(first)
            assert run is not None
            instance.report_run_canceled(run)
        servers.until("ending the first run", 60, lambda: servers.runs()[first]["status"] in DONE)
        second = servers.launch("shop")
        servers.until("the second run", 180, lambda: servers.runs()[second]["status"] == "SUCCESS")
