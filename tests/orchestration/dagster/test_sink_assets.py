"""Functions that records are handed to, in Dagster: an application that writes nothing else has
a job, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance

from dagster_adjunct import Application, SparkResource, build_definitions, open_lake
from tests.orchestration.step_world import StepWorld

NOTIFIED = AssetKey(["sinks", "alert_calls", "notify"])


def notify(records: Any, context: Any) -> None:
    """Do nothing."""


def alerting() -> Application:
    app = Application("alert-calls")
    app.input_stream("lake.alerts").sink(notify)
    return app


def test_a_sink_is_an_output_of_its_application_and_what_it_is_made_of_stands_above() -> None:
    graph = build_definitions(alerting()).resolve_asset_graph()
    assert graph.get(NOTIFIED).parent_keys == {AssetKey(["lake", "alerts"])}
    assert graph.get(NOTIFIED).kinds == {"python"}


def test_one_function_in_two_applications_is_two_assets_and_a_lambda_has_a_name() -> None:
    other = Application("other")
    alerts = other.input_stream("lake.alerts")
    alerts.sink(notify)
    alerts.sink(lambda records, context: None)
    keys = build_definitions(alerting(), other).resolve_asset_graph().get_all_asset_keys()
    sinks = {key.to_user_string() for key in keys if key.path[0] == "sinks"}
    assert sinks == {"sinks/alert_calls/notify", "sinks/other/notify", "sinks/other/_lambda_"}


@pytest.mark.spark
def test_a_run_hands_over_the_records_and_materialises_the_sink(
    tmp_path: Path, spark: Any, instance: DagsterInstance
) -> None:
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, lambda: spark)
    world.stream("alerts", "k", 1, k="string")
    world.send("alerts", ("a",), ("b",))
    definitions = build_definitions(
        alerting(), lake=str(tmp_path / "lake"), spark=SparkResource(lake=str(tmp_path / "lake"))
    )
    assert definitions.resolve_job_def("alert_calls").execute_in_process(instance=instance).success
    made = instance.get_latest_materialization_event(NOTIFIED)
    assert made is not None
    materialization = made.asset_materialization
    assert materialization is not None
    assert materialization.metadata["adjunct/batches"].value == 1
