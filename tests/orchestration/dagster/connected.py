"""Runs an application with a session of Spark Connect, in a process of its own: FOLDER URL NAME;
prints a summary.

A process that has used Spark Connect has no other sessions any more.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dagster import DagsterInstance

from dagster_adjunct import SparkResource, build_definitions
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.resources.spark.session import new_session, stop_session
from tests.orchestration.dagster import small, submitted
from tests.orchestration.dagster.lab import FinishedRun


def main(folder: Path, url: str, name: str) -> None:
    apps = {"charges": submitted.app, "refusals": submitted.refusing, "passing": submitted.passing}
    app = apps.get(name) or small.order_totals(folder / "state.sqlite")
    lake = f"{folder}/lake"
    defs = build_definitions(app, lake=lake, spark=SparkResource(master=url, lake=lake))
    with DagsterInstance.ephemeral() as instance:
        job = defs.resolve_job_def(name)
        done = FinishedRun(
            job.execute_in_process(instance=instance, raise_on_error=False), instance
        )
        failures = [event.step_failure_data for event in done.result.get_step_failure_events()]
        reported = [
            data.user_failure_data and data.user_failure_data.description for data in failures
        ]
        print(
            json.dumps(
                {
                    "success": done.success,
                    "failure": reported and reported[0],
                    "log": done.log,
                    "passed": done.passed,
                }
            )
        )


def open_session(url: str) -> None:
    """Print why no session can be opened, or that one was."""
    try:
        stop_session(new_session(master=url, lake_url="s3://bucket/lake"))
        print("opened")
    except ConfigurationError as error:
        print(error.setting, error.problem)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
