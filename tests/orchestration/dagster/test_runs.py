"""Runs of the job: what stands in their metadata, what they say when they fail, and when Spark
starts and stops.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, ExecuteInProcessResult

from dagster_adjunct import (
    Application,
    Lake,
    LakeStreams,
    SparkResource,
    build_definitions,
    open_lake,
)
from dagster_adjunct.errors import PermanentError, TransientError
from dagster_adjunct.plans import ExecutionPlan
from dagster_adjunct.resources.errors import NullKeyError
from dagster_adjunct.resources.spark.tasks import find_adjunct_error
from tests.faulty_store import Fault, FaultyStore
from tests.kept_processes import program
from tests.orchestration.dagster import small
from tests.orchestration.dagster.ticking import given_lake
from tests.servers.s3 import ROOT

FIRST = small.orders(0, 20)


class Unwanted(SparkResource):
    """A session that nothing may ask for."""

    @property
    def spark_session(self) -> Any:
        raise AssertionError("a run with nothing to do asked for Spark")


def run(
    lake: Lake, app: Application, spark: SparkResource | None = None, **resources: object
) -> ExecuteInProcessResult:
    defs = build_definitions(app, lake=lake.url, spark=spark)
    with DagsterInstance.ephemeral() as instance:
        job = defs.resolve_job_def(app.name.replace("-", "_"))
        return job.execute_in_process(
            instance=instance, raise_on_error=False, resources=resources or None
        )


def made(result: ExecuteInProcessResult) -> dict[str, dict[str, Any]]:
    """Return the metadata of every asset that was materialised."""
    events = [event for event in result.all_events if event.is_step_materialization]
    return {
        event.materialization.asset_key.to_user_string(): {
            name: value.value for name, value in event.materialization.metadata.items()
        }
        for event in events
    }


def observed(result: ExecuteInProcessResult) -> dict[str, dict[str, Any]]:
    seen = [
        event.asset_observation_data.asset_observation
        for event in result.all_events
        if event.event_type_value == "ASSET_OBSERVATION"
    ]
    return {
        observation.asset_key.to_user_string(): {
            name: value.value for name, value in observation.metadata.items()
        }
        for observation in seen
    }


def failure(result: ExecuteInProcessResult) -> Any:
    (event,) = result.get_step_failure_events()
    return event.step_failure_data.user_failure_data


@pytest.mark.lengthy
def test_a_dataset_without_a_version_is_not_materialized_and_markers_are_named(
    lake: Lake, tmp_path: Path
) -> None:
    small.append(lake, "orders", 1, FIRST)
    small.append(lake, "items", 1, small.ITEMS)
    result = run(lake, small.order_totals(tmp_path / "t.sqlite"), Unwanted())
    assert result.success
    assert set(made(result)) == {"datasets/rates_dataset"}
    waiting = observed(result)["datasets/items_dataset"]
    assert waiting["adjunct/version"] == "none"
    assert waiting["adjunct/waiting"] == ["lake.items.0", "lake.items.1"]
    skipped = [
        event.step_key for event in result.all_events if event.event_type_value == "STEP_SKIPPED"
    ]
    assert skipped == ["order_totals_step"]


@pytest.mark.usefixtures("either_engine")
@pytest.mark.spark
def test_metadata_reports_rows_schemas_versions_offsets_and_counters(
    lake: Lake, tmp_path: Path, spark: Any
) -> None:
    app = small.order_totals(tmp_path / "t.sqlite")
    small.append(lake, "items", 1, small.ITEMS, marker="v1")
    small.append(lake, "rates", 1, small.RATES)
    small.append(lake, "orders", 1, [*FIRST, (99, None, "EUR", 1)])
    result = run(lake, app)
    assert result.success
    spark.range(1).collect()  # the session that this process had before is still there

    items, rates = made(result)["datasets/items_dataset"], made(result)["datasets/rates_dataset"]
    assert items["dagster/row_count"] == len(small.ITEMS)
    assert items["dagster/uri"] == f"{lake.url}/datasets/items"
    assert [(column.name, column.type) for column in items["dagster/column_schema"].columns] == [
        ("item", "string"),
        ("label", "string"),
    ]
    assert items["adjunct/offsets"] == {
        str(ssp): end
        for ssp, end in LakeStreams(lake).upcoming(LakeStreams(lake).partitions("items")).items()
    }
    priced, table = made(result)["lake/priced"], made(result)["tables/item_state"]
    assert small.priced(lake) == small.expected([*FIRST, (99, None, "EUR", 1)])
    assert priced["dagster/row_count"] == priced["adjunct/rows"] == 21
    assert priced["adjunct/batches"] == 1
    assert priced["adjunct/versions"] == {
        "items": [items["adjunct/version"]],
        "rates": [rates["adjunct/version"]],
    }
    assert sum(map(int, priced["adjunct/checkpoint"].values())) == 21
    assert sum(map(int, priced["adjunct/upcoming"].values())) == 21
    assert (
        ExecutionPlan.from_json(priced["adjunct/plan_document"]).operator("join-2-items").looks_up
        == "items"
    )
    assert "join-2-items" in priced["adjunct/plan"]
    assert priced["adjunct/joins"]["join-2-items"] == {"rows": 21, "unmatched": 5}
    assert [column.name for column in priced["dagster/column_schema"].columns][-2:] == [
        "label",
        "rate",
    ]
    assert (table["adjunct/updates"], table["adjunct/null_keys"]) == (20, 1)
    assert table["dagster/table_name"] == "item_state"
    assert table["adjunct/order"].startswith(
        "per key: all records of a key come from one partition"
    )
    assert table["adjunct/after_replay"].startswith("older while it runs, and as before at its end")
    assert len(table["dagster/column_schema"].columns) == 3
    assert observed(result)["lake/orders"]["dagster/row_count"] == 21

    small.append(lake, "rates", 2, [("GBP", 1.2)])
    changed = made(run(lake, app))
    # a delta: rows are not known without a merge
    assert "dagster/row_count" not in changed["datasets/rates_dataset"]
    assert changed["datasets/rates_dataset"]["adjunct/version"] != rates["adjunct/version"]

    again = run(lake, app, Unwanted())
    assert again.success
    quiet = made(again)
    assert quiet["lake/priced"]["adjunct/batches"] == 0
    assert quiet["lake/priced"]["adjunct/totals"]["rows"] == 21
    assert quiet["datasets/items_dataset"]["adjunct/version"] == items["adjunct/version"]


@pytest.mark.usefixtures("either_engine")
@pytest.mark.spark
def test_a_failure_says_what_to_do_and_the_next_run_goes_on_from_the_same_place(
    lake: Lake, tmp_path: Path, spark: Any
) -> None:
    small.append(lake, "items", 1, small.ITEMS, marker="v1")
    small.append(lake, "orders", 1, [*FIRST, (99, None, "EUR", 1)])
    result = run(lake, small.order_totals(tmp_path / "t.sqlite", on_null_key="fail"))
    assert not result.success
    reported = failure(result)
    assert "1 record(s) have no item, the key of table item-state" in reported.description
    assert reported.metadata["error"].value == "NullKeyError"
    assert 'on_null_key="skip"' in reported.metadata["next step"].value
    assert set(made(result)) == {"datasets/items_dataset", "datasets/rates_dataset"}

    mended = run(lake, small.order_totals(tmp_path / "t.sqlite", on_null_key="skip"))
    assert mended.success
    assert made(mended)["lake/priced"]["adjunct/last_batch"] == 1
    assert made(mended)["lake/priced"]["dagster/row_count"] == 21


@pytest.mark.lengthy
def test_a_missing_stream_is_a_failure_that_is_not_retried(tmp_path: Path) -> None:
    result = run(
        open_lake(tmp_path / "lake"), small.order_totals(tmp_path / "t.sqlite"), Unwanted()
    )
    assert not result.success
    failures = [
        event.step_failure_data.user_failure_data for event in result.get_step_failure_events()
    ]
    assert {reported.metadata["error"].value for reported in failures} == {"StreamNotFoundError"}
    assert not [event for event in result.all_events if event.is_step_up_for_retry]


def test_a_transient_failure_is_tried_again_in_the_same_run(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down = Fault("get", 1, "throttle", below="datasets/rates/")
    busy = Lake(FaultyStore(lake.store, [slow_down]), lake.id)
    monkeypatch.setattr("dagster_adjunct.orchestration.code_location.metadata._RETRY_SECONDS", 0.01)
    result = run(
        busy, small.order_totals(tmp_path / "t.sqlite"), Unwanted(), adjunct_lake=given_lake(busy)
    )
    assert result.success
    assert [event.step_key for event in result.all_events if event.is_step_up_for_retry] == [
        "dataset_rates"
    ]
    assert "datasets/rates_dataset" in made(result)


class PythonException(Exception):
    """What pyspark raises when a Python worker failed, by its name and module."""

    __module__ = "pyspark.errors.exceptions.captured"


def test_an_error_of_ours_is_found_in_what_spark_reports() -> None:
    text = (
        "\n  An exception was thrown from the Python worker. Please see the stack trace below.\n"
        'Traceback (most recent call last):\n  File "writer.py", line 3, in write\n'
        "dagster_adjunct.resources.errors.NullKeyError: dataset 'items': a record has no item. "
        "Deliver it with its key.\n"
    )
    error = find_adjunct_error(PythonException(text))
    assert isinstance(error, NullKeyError)
    assert str(error) == "dataset 'items': a record has no item. Deliver it with its key."
    assert find_adjunct_error(PythonException("ValueError: something else")) is None
    assert (
        find_adjunct_error(
            ValueError("dagster_adjunct.resources.errors.NullKeyError: not from Spark")
        )
        is None
    )
    assert issubclass(NullKeyError, PermanentError)
    assert not issubclass(NullKeyError, TransientError)


# Two jobs in a process of its own: how often a session starts, and whether one is left behind.
ONE_SESSION = """
import json, sys
from pathlib import Path
from dagster import DagsterInstance
from dagster_adjunct import build_definitions, open_lake
from tests.faulty_store import Fault, FaultyStore
from tests.orchestration.dagster import small
from tests.orchestration.dagster.ticking import given_lake
import dagster_pyspark, pyspark
folder = Path(sys.argv[1])
starts = []
start = dagster_pyspark.LazyPySparkResource._init_session
def counted(self):
    starts.append(pyspark.SparkContext._active_spark_context is None)
    start(self)
dagster_pyspark.LazyPySparkResource._init_session = counted
lake = open_lake(folder / "lake")
small.append(lake, "items", 1, small.ITEMS, marker="v1")
small.append(lake, "rates", 1, small.RATES)
small.append(lake, "orders", 1, [(1, None, "EUR", 1)])
found = []
for on_null_key in ("fail", "skip"):
    defs = build_definitions(small.order_totals(folder / "t.sqlite", on_null_key=on_null_key), lake=lake.url)
    with DagsterInstance.ephemeral() as instance:
        job = defs.resolve_job_def("order_totals")
        result = job.execute_in_process(instance=instance, raise_on_error=False)
    found.append([result.success, len(starts), pyspark.SparkContext._active_spark_context is None])
print(json.dumps(found))
"""


@pytest.mark.spark
@pytest.mark.slow
def test_the_ops_of_a_run_share_one_session_which_is_closed_even_after_a_failure(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [program("python"), "-c", ONE_SESSION, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ADJUNCT_SPARK_MASTER": "local[2]"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    failed, mended = json.loads(done.stdout.splitlines()[-1])
    assert failed == [False, 1, True]
    assert mended == [True, 2, True]


def test_no_output_is_materialised_before_the_first_batch(lake: Lake, tmp_path: Path) -> None:
    app = Application("copy")
    app.input_stream("lake.orders").send_to(
        app.output_stream("lake.copy", partitions=2, key="item")
    )
    result = run(lake, app, Unwanted())
    assert result.success
    assert made(result) == {}
    assert AssetKey(["lake", "orders"]).to_user_string() in observed(result)
