"""Tables that follow change streams, as assets: bootstrap as a blocking check, lag, freshness."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest
from dagster import AssetKey, DefaultScheduleStatus, FreshnessPolicy

from dagster_adjunct import (
    AdjunctDataset,
    Application,
    LakeStreams,
    application_state,
    build_definitions,
    unbounded_dataset,
)
from dagster_adjunct.assets.declaration.dataset import Presentation
from dagster_adjunct.assets.declaration.policies import ChangeStreamOptions, DeltaCompaction
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.resources.errors import ConfigurationError, DatasetError
from dagster_adjunct.resources.streams.lake.manifest import Retention
from dagster_adjunct.startpoints import MetadataStore, StartpointManager, StartpointOldest
from tests.assets.acting import acting, failing
from tests.orchestration.dagster.lab import APPLES, SCHEMA, FinishedRun, Lab, Row, check_of, key_of
from tests.orchestration.offsets.stored_startpoints import write_startpoint

FULL = DatasetError("the disk is full.", "Make room.")
PRICES = unbounded_dataset("prices", input="lake.prices", key="item", partitions=2, chunk=2)
MORE: list[Row] = [*APPLES, ("c", "Cheese", 3), ("d", "Dates", 4)]
COPY = AssetKey(["lake", "copy"])


def facts(finished: FinishedRun, check: str = "prices bootstrapped") -> dict[str, Any]:
    return {name: value.value for name, value in finished.checks[check].metadata.items()}


def lose_the_front(lab: Lab, stream: str) -> None:
    lab.streams.configure(stream, retention=Retention(max_bytes=1), compaction=None)
    lab.streams.maintain(stream)


@pytest.mark.lengthy
def test_a_bootstrap_passes_its_check_with_what_it_read_and_what_was_decided(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    finished = lab.advance(PRICES)
    assert finished.success
    assert finished.passed == {"prices bootstrapped": True}
    evidence = facts(finished)
    assert (evidence["adjunct/per_cent"], evidence["adjunct/records"]) == (100, 4)
    assert evidence["adjunct/seconds"] >= 0
    assert evidence["adjunct/decision"]["action"] == "bootstrap"
    assert evidence["adjunct/bootstrap"]["missing"] == {}
    assert finished.made["prices"]["adjunct/decision"] == evidence["adjunct/decision"]
    assert "report" in finished.made
    again = facts(lab.advance(PRICES))
    assert "adjunct/records" not in again
    assert again["adjunct/decision"]["action"] == "continue"


@pytest.mark.lengthy
def test_the_progress_of_a_bootstrap_is_in_the_runs_log(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    finished = lab.advance(PRICES)
    lines = [line for line in finished.log.splitlines() if "prices: bootstrap took" in line]
    assert "% (" in lines[0]
    assert "left" in lines[0]
    assert lines[-1].endswith("100% (4 of 4 offsets)")


@pytest.mark.lengthy
def test_a_bootstrap_that_ends_early_fails_its_check_and_blocks_downstream_assets(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    rows = [dict(zip(SCHEMA.names, row, strict=True)) for row in APPLES]
    lab.streams.append(
        "orders", pa.Table.from_pylist(rows, SCHEMA.to_arrow()), producer="lab", sequence=1
    )
    finished = lab.advance(failing(PRICES, 2, FULL))
    assert not finished.success
    assert finished.made == {}
    check = finished.checks["prices bootstrapped"]
    assert (check.passed, check.severity.value, check.blocking) == (False, "ERROR", True)
    evidence = facts(finished)
    assert 0 < evidence["adjunct/per_cent"] < 100
    missing = evidence["adjunct/bootstrap"]["missing"]
    assert sum(missing.values()) == 4 - evidence["adjunct/bootstrap"]["offsets"]
    assert f"{next(iter(missing.values()))} of {next(iter(missing))}" in check.description
    assert "the disk is full" in check.description

    # Whoever runs the outputs without the dataset is held back by the step itself.
    alone = lab.run(lab.definitions(PRICES), COPY)
    assert alone.failure.metadata["error"].value == "NoSealedVersionError"
    assert "its bootstrap is not finished" in alone.failure.description
    assert application_state(lab.lake, "shop").open is None
    assert application_state(lab.lake, "shop").batch == 0

    resumed = lab.advance(PRICES)
    assert resumed.passed == {"prices bootstrapped": True}
    assert facts(resumed)["adjunct/records"] < 4, "what was committed is not read again"
    assert "report" in resumed.made


def test_a_bootstrap_that_never_began_says_so(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    lose_the_front(lab, "prices")
    finished = lab.advance(replace(PRICES))
    assert not finished.success
    assert finished.checks["prices bootstrapped"].description.startswith(
        "The bootstrap has not begun. It ended with: "
    )


@pytest.mark.lengthy
def test_an_error_after_the_bootstrap_is_not_one_of_the_bootstrap(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    lab.advance(PRICES)
    lab.deliver("prices", APPLES, None)
    finished = lab.advance(failing(PRICES, 1, FULL))
    assert not finished.success
    assert finished.checks == {}


@pytest.mark.lengthy
def test_a_table_that_is_served_stale_as_declared_fails_its_check_as_a_warning(lab: Lab) -> None:
    stale = replace(PRICES, following=ChangeStreamOptions(on_lost_offset="serve_stale"))
    lab.deliver("prices", APPLES, None)
    first = lab.advance(stale).made["prices"]["adjunct/version"]
    for _ in range(3):
        lab.deliver("prices", MORE, None)
    lose_the_front(lab, "prices")
    finished = lab.advance(stale)
    assert finished.success, "it is declared that readers go on with it"
    check = finished.checks["prices bootstrapped"]
    assert (check.passed, check.severity.value) == (False, "WARN")
    assert "the oldest in the stream is" in check.description
    assert facts(finished)["adjunct/decision"]["action"] == "serve-stale"
    made = finished.observed["prices"]
    assert made["adjunct/version"] == first
    assert (
        made["adjunct/lost_offsets"]
        == sum(lag["lost"] for lag in made["adjunct/lag"].values())
        == 12
    )
    assert "report" in finished.made


@pytest.mark.lengthy
def test_the_check_alone_is_reported_again_and_nothing_advances(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    lab.advance(PRICES)
    lab.deliver("prices", APPLES, None)
    job = lab.definitions(PRICES).resolve_implicit_global_asset_job_def()
    subset = job.get_subset(
        asset_selection=set(), asset_check_selection={check_of(PRICES, "bootstrapped")}
    )
    finished = FinishedRun(subset.execute_in_process(instance=lab.instance), lab.instance)
    assert finished.passed == {"prices bootstrapped": True}
    assert finished.made == {}
    assert len(StoredVersions(lab.lake, "prices").history()) == 3


@pytest.mark.lengthy
def test_a_table_that_is_not_marked_for_bootstrap_has_no_check(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    finished = lab.advance(replace(PRICES, bootstrap=False))
    assert finished.success
    assert finished.checks == {}
    assert finished.made["prices"]["adjunct/action"] == "applied"


@pytest.mark.lengthy
def test_a_materialisation_says_how_far_the_table_is_behind(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    made = lab.advance(PRICES).made["prices"]
    assert (made["adjunct/lag_records"], made["adjunct/lag_seconds"]) == (0, 0)
    assert made["adjunct/lag"]["lake.prices.0"] == {
        "offsets": 0,
        "records": 0,
        "lost": 0,
        "seconds": 0.0,
    }
    lab.deliver("prices", APPLES, None)
    slow = acting(PRICES, lambda: lab.deliver("prices", MORE, None))
    behind = lab.advance(slow).made["prices"]
    assert behind["adjunct/action"] == "applied"
    assert behind["adjunct/lag_records"] == 4, (
        "what came after the run had looked at the stream's end"
    )


def test_declared_freshness_is_dagsters_freshness_policy() -> None:
    fresh = replace(PRICES, presentation=Presentation(freshness=timedelta(minutes=30)))
    app = Application("shop")
    app.table(fresh)
    app.table(replace(PRICES, name="other"))
    specs = {spec.key: spec for spec in build_definitions(app).resolve_all_asset_specs()}
    assert specs[key_of(fresh)].freshness_policy == FreshnessPolicy.time_window(
        fail_window=timedelta(minutes=30)
    )
    assert specs[AssetKey(["datasets", "other_dataset"])].freshness_policy is None
    short = Application("shop")
    short.table(replace(PRICES, presentation=Presentation(freshness=timedelta(seconds=30))))
    with pytest.raises(ConfigurationError) as caught:
        build_definitions(short)
    assert (caught.value.dataset, caught.value.argument) == ("prices", "freshness")


@pytest.mark.lengthy
def test_each_check_of_the_stream_materializes_a_table_with_a_freshness_policy(lab: Lab) -> None:
    fresh = replace(PRICES, presentation=Presentation(freshness=timedelta(minutes=30)))
    lab.deliver("prices", MORE, None)
    first = lab.advance(fresh).made["prices"]["data version"]
    assert lab.advance(fresh).made["prices"]["data version"] == first
    finished = lab.advance(PRICES)
    assert "prices" not in finished.made
    assert finished.observed["prices"]["adjunct/lag_records"] == 0
    assert "report" in finished.made


def test_a_table_of_one_run_is_displayed_and_not_made(lab: Lab) -> None:
    passing = replace(PRICES, following=ChangeStreamOptions(persistent=False))
    defs = lab.definitions(passing)
    graph = defs.resolve_asset_graph()
    assert not graph.get(key_of(passing)).is_materializable
    assert graph.get(key_of(passing)).parent_keys == {AssetKey(["lake", "prices"])}
    assert key_of(passing) in graph.get(COPY).parent_keys
    assert [job.name for job in defs.jobs or ()] == ["shop", "shop_startpoint"]


def compaction(lab: Lab, *datasets: AdjunctDataset, level: str | None = None) -> FinishedRun:
    config = {"ops": {"compact_shop": {"config": {"level": level}}}} if level else {}
    job = lab.definitions(*datasets).resolve_job_def("shop_compact")
    result = job.execute_in_process(instance=lab.instance, raise_on_error=False, run_config=config)
    return FinishedRun(result, lab.instance)


@pytest.mark.lengthy
def test_the_compaction_job_follows_policies_and_continues_after_a_failing_dataset(
    lab: Lab,
) -> None:
    policy = DeltaCompaction(deltas=2, inside_commit=False)
    prices = replace(PRICES, following=ChangeStreamOptions(compaction=policy))
    other, seldom = (
        replace(prices, name=name, input=f"lake.{name}") for name in ("other", "seldom")
    )
    seldom = replace(seldom, following=ChangeStreamOptions(compaction=replace(policy, deltas=9)))
    for dataset in (prices, other, seldom):
        for _ in range(3):
            lab.deliver(dataset.name, MORE, None)
            lab.advance(dataset)
    version = StoredVersions(lab.lake, "prices").require_current().sealed
    lab.lake.store.delete(f"{version.generations[0].folder}/{version.generations[0].files[0].name}")
    finished = compaction(lab, prices, other, seldom, replace(PRICES, name="absent"))
    assert not finished.success
    assert "dataset 'prices'" in finished.failure.description
    assert finished.observed["other"]["adjunct/compaction"]["generations"] == [3, 1]
    assert len(StoredVersions(lab.lake, "seldom").require_current().sealed.generations) == 3
    assert finished.made == {}
    assert compaction(lab, seldom, level="major").success
    assert len(StoredVersions(lab.lake, "seldom").require_current().sealed.generations) == 1


def test_the_compaction_schedule_is_off_until_somebody_switches_it_on(lab: Lab) -> None:
    schedules = {schedule.name: schedule for schedule in lab.definitions(PRICES).schedules or ()}
    assert schedules["shop_compact_hourly"].default_status is DefaultScheduleStatus.STOPPED
    assert schedules["shop_compact_hourly"].job_name == "shop_compact"
    assert LakeStreams(lab.lake).list_streams() == ["orders"], (
        "loading definitions looks at nothing"
    )


@pytest.mark.lengthy
def test_startpoints_on_its_stream_are_applied_by_its_asset_once(lab: Lab) -> None:
    lab.deliver("prices", MORE, None)
    assert lab.advance(PRICES).success
    startpoints = StartpointManager(MetadataStore(lab.lake), "shop")
    for ssp in lab.streams.partitions("prices"):
        write_startpoint(startpoints, ssp, StartpointOldest(), by="ada", reason="built anew")
    before = StoredVersions(lab.lake, "prices").require_current().version
    finished = lab.advance(PRICES)
    assert finished.success
    assert "built anew (asked for by ada)" in finished.log
    after = StoredVersions(lab.lake, "prices").require_current().version
    assert after != before
    assert (startpoints.read().waiting, startpoints.get_fan_outs()) == ([], {})
    lab.advance(PRICES)
    assert StoredVersions(lab.lake, "prices").require_current().version == after
