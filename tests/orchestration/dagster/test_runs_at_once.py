"""A run of Dagster's meets another run of its application. Without Spark: there is nothing to
read.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from dagster import DagsterInstance, DagsterRun, ExecuteInProcessResult

from dagster_adjunct import Application, Lake, build_definitions
from dagster_adjunct.orchestration.batch_log.run_lease import (
    Claim,
    Holder,
    Process,
    RunLease,
    describe_runner,
)


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run that takes over wait for ten seconds at most."""
    monkeypatch.setenv("ADJUNCT_RUN_TTL", "10")


def run(
    lake: Lake, instance: DagsterInstance, config: Mapping[str, Any] = {}
) -> ExecuteInProcessResult:
    app = Application("copy")
    app.input_stream("lake.orders").send_to(
        app.output_stream("lake.copy", partitions=2, key="item")
    )
    job = build_definitions(app, lake=lake.url).resolve_job_def("copy")
    run_config = {"ops": {"copy_step": {"config": dict(config)}}}
    return job.execute_in_process(run_config=run_config, instance=instance, raise_on_error=False)


@pytest.mark.lengthy
def test_a_second_run_fails_and_says_who_runs_and_takes_over_when_asked(
    lake: Lake, instance: DagsterInstance
) -> None:
    with RunLease(lake, "copy", "by-hand", Claim()):
        (refused,) = [
            event
            for event in run(lake, instance, {"wait_seconds": 0}).all_events
            if event.is_step_failure
        ]
        failure = refused.step_failure_data.user_failure_data
        assert failure is not None
        assert "'copy' is being run by run by-hand on host" in str(failure.description)
        assert failure.metadata["permanent"].value is False
        assert run(lake, instance, {"take_over": True}).success
    assert describe_runner(lake, "copy") == ""
    assert run(lake, instance, {"wait_seconds": 0}).success


@pytest.mark.lengthy
def test_what_a_run_held_that_dagster_has_ended_is_taken_when_it_can_not_write(
    lake: Lake, instance: DagsterInstance
) -> None:
    lost = DagsterRun("copy")
    elsewhere = Process(host="gone", pid=7, boot="b", namespace="n", started="1")
    by = {"run": lost.run_id, "dagster": lost.run_id, "process": elsewhere}
    by["since"] = datetime.now(UTC)
    holder = Holder.model_validate({"id": "x", "by": by, "epoch": 1, "ttl": 8.0})
    lake.store.put("applications/copy/run.json", holder.model_dump_json().encode())
    instance.add_run(lost)
    assert not run(lake, instance, {"wait_seconds": 0}).success, "it may be alive, elsewhere"
    instance.report_run_failed(lost)
    assert run(lake, instance, {"wait_seconds": 0}).success
