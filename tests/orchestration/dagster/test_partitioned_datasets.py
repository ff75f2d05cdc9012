"""Versions as partitions: materialised and backfilled in order, kept when a later one fails,
never going backwards.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from dagster import (
    AllPartitionMapping,
    AssetKey,
    DailyPartitionsDefinition,
    RunRequest,
    SkipReason,
    StaticPartitionsDefinition,
    TextMetadataValue,
    build_sensor_context,
)

from dagster_adjunct import AdjunctDataset, LakeResource, bounded_dataset
from dagster_adjunct.assets.declaration.dataset import Computation, QuerySource
from dagster_adjunct.assets.declaration.policies import VersionPartitions
from dagster_adjunct.assets.validation.validators import min_rows
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.resources.errors import StoreUnavailableError
from tests.orchestration.dagster.lab import APPLES, SCHEMA, FinishedRun, Lab, key_of, steps_run_by

DAYS = [f"2026-01-{day:02d}" for day in range(1, 6)]
START, END = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"


class Answers:
    """What the query gives for each day: rows, or an error."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.rows: dict[str, list[tuple[str, str, int]]] = {
            day: [*APPLES, ("c", day, 3)] for day in DAYS
        }
        self.asked: list[str] = []

    def read(self, spark: Any, asked: Computation) -> pa.Table:
        self.asked.append(asked.version)
        if asked.version not in self.rows:
            raise StoreUnavailableError(f"nothing answers for {asked.version}.", "Wait.")
        rows = self.rows[asked.version]
        return pa.Table.from_pylist(
            [dict(zip(SCHEMA.names, row, strict=True)) for row in rows], SCHEMA.to_arrow()
        )


ANSWERS = Answers()


def by_day(**more: Any) -> AdjunctDataset:
    return bounded_dataset(
        "items",
        input=QuerySource(ANSWERS.read, SCHEMA),
        key="item",
        partitions=2,
        validators=[min_rows(2)],
        versions=VersionPartitions("day", start=DAYS[0]),
        **more,
    )


ITEMS = by_day()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    ANSWERS.begin()
    monkeypatch.setattr("dagster_adjunct.orchestration.code_location.metadata._RETRY_SECONDS", 0.01)
    return ANSWERS


def build(lab: Lab, day: str, dataset: AdjunctDataset = ITEMS, **options: Any) -> FinishedRun:
    """Materialise one partition, as the UI does."""
    job = lab.definitions(dataset).resolve_job_def("items_versions")
    result = job.execute_in_process(
        instance=lab.instance, partition_key=day, raise_on_error=False, **options
    )
    return FinishedRun(result, lab.instance)


def backfill(lab: Lab, first: str, last: str, dataset: AdjunctDataset = ITEMS) -> FinishedRun:
    """Materialise a range of partitions in one run, as a single-run backfill does."""
    job = lab.definitions(dataset).resolve_job_def("items_versions")
    tags = {START: first, END: last}
    return FinishedRun(
        job.execute_in_process(instance=lab.instance, tags=tags, raise_on_error=False), lab.instance
    )


def reasons(lab: Lab) -> dict[str, str]:
    """Return why partitions are missing, by their observations. The tag of the run says it, too."""
    run = lab.instance.get_runs(limit=1)[0]
    records = lab.instance.fetch_observations(key_of(ITEMS), limit=50).records
    observed = [
        one.event_log_entry.asset_observation for one in records if one.run_id == run.run_id
    ]
    missing = TextMetadataValue("not materialized")
    found = {
        str(one.partition): str(one.metadata["adjunct/reason"].value)
        for one in observed
        if one is not None and one.metadata.get("adjunct/action") == missing
    }
    assert f"{min(found)}: " in run.tags["adjunct/not_materialized"]
    return dict(sorted(found.items()))


def served(lab: Lab) -> str | None:
    return lab.store("items").require_current().sealed.name


def test_materialising_a_partition_builds_its_version(lab: Lab, answers: Answers) -> None:
    finished = build(lab, DAYS[1])
    assert finished.success
    facts = finished.made[f"items/{DAYS[1]}"]
    assert (facts["adjunct/name"], facts["dagster/partition_row_count"]) == (DAYS[1], 3)
    assert facts["data version"] == facts["adjunct/version"] == facts["adjunct/served"]
    assert finished.passed == {"items adjunct_accepted": True, "items min_rows": True}
    assert answers.asked == [DAYS[1]]


@pytest.mark.lengthy
def test_an_older_partition_never_becomes_current_unless_the_run_asks_for_it(lab: Lab) -> None:
    build(lab, DAYS[3])
    older = build(lab, DAYS[0]).made[f"items/{DAYS[0]}"]
    assert served(lab) == DAYS[3]
    assert older["adjunct/served"] != older["adjunct/version"]
    build(lab, DAYS[1], run_config={"ops": {"dataset_items": {"config": {"make_current": True}}}})
    assert served(lab) == DAYS[1]


@pytest.mark.lengthy
def test_a_backfill_is_one_run_that_builds_its_partitions_in_order(
    lab: Lab, answers: Answers
) -> None:
    finished = backfill(lab, DAYS[0], DAYS[2])
    assert finished.success
    assert answers.asked == DAYS[:3]
    assert list(finished.made) == [f"items/{day}" for day in DAYS[:3]]
    assert len({facts["data version"] for facts in finished.made.values()}) == 3
    assert served(lab) == DAYS[2]
    assert finished.checks["items min_rows"].metadata["adjunct/partitions"].value == DAYS[:3]
    assert "did not yield" not in finished.log


@pytest.mark.lengthy
def test_a_backfill_that_fails_half_way_keeps_what_it_finished(lab: Lab, answers: Answers) -> None:
    del answers.rows[DAYS[2]]
    finished = backfill(lab, DAYS[0], DAYS[4])
    assert not finished.success
    assert lab.instance.get_materialized_partitions(key_of(ITEMS)) == {*DAYS[:2]}
    assert finished.passed == {"items adjunct_accepted": True, "items min_rows": True}
    assert served(lab) == DAYS[1]
    assert reasons(lab) == {
        DAYS[2]: f"nothing answers for {DAYS[2]}.",
        DAYS[3]: f"the run ended at {DAYS[2]}",
        DAYS[4]: f"the run ended at {DAYS[2]}",
    }
    answers.rows[DAYS[2]] = APPLES
    assert backfill(lab, DAYS[0], DAYS[4]).success
    assert lab.instance.get_materialized_partitions(key_of(ITEMS)) == set(DAYS)
    assert len(lab.store("items").versions()) == 5, "what was finished was not built anew"


@pytest.mark.lengthy
def test_a_partition_that_is_rejected_is_not_materialised_and_the_others_are(
    lab: Lab, answers: Answers
) -> None:
    answers.rows[DAYS[1]] = APPLES[:1]
    finished = backfill(lab, DAYS[0], DAYS[2])
    assert finished.success
    assert set(finished.made) == {f"items/{DAYS[0]}", f"items/{DAYS[2]}"}
    assert finished.passed["items min_rows"] is False
    assert finished.checks["items min_rows"].description == f"{DAYS[1]}: 1 row, expected 2 or more"
    assert f"Partition {DAYS[1]} of items is not materialized: its version v000002-" in finished.log
    (why,) = reasons(lab).values()
    assert "is rejected: " in why
    assert served(lab) == DAYS[2]


@pytest.mark.lengthy
def test_a_partition_rebuilt_with_the_same_content_keeps_its_version(
    lab: Lab, answers: Answers
) -> None:
    first = build(lab, DAYS[0]).made[f"items/{DAYS[0]}"]
    again = build(lab, DAYS[0]).made[f"items/{DAYS[0]}"]
    assert (again["adjunct/action"], again["data version"]) == ("unchanged", first["data version"])
    answers.rows[DAYS[0]] = APPLES
    assert build(lab, DAYS[0]).made[f"items/{DAYS[0]}"]["data version"] != first["data version"]


def test_partitions_by_day_begin_at_the_start_and_names_are_in_natural_order() -> None:
    from dagster_adjunct.orchestration.code_location.dataset_assets import dagster_partitions

    assert dagster_partitions(ITEMS) == DailyPartitionsDefinition(start_date=DAYS[0], end_offset=1)
    named = bounded_dataset(
        "n",
        input=ITEMS.input,
        key="item",
        broadcast=True,
        versions=VersionPartitions(names=("v10", "v2")),
    )
    assert dagster_partitions(named) == StaticPartitionsDefinition(["v2", "v10"])


@pytest.mark.lengthy
def test_a_partitioned_dataset_is_in_the_applications_graph_but_not_in_its_job(lab: Lab) -> None:
    defs = lab.definitions(ITEMS)
    job = defs.resolve_job_def("shop")
    assert job.asset_layer.selected_asset_keys == {AssetKey(["lake", "copy"])}
    graph = defs.resolve_asset_graph()
    report = AssetKey("report")
    assert key_of(ITEMS) in graph.get(report).parent_keys
    assert isinstance(graph.get_partition_mapping(report, key_of(ITEMS)), AllPartitionMapping)
    assert "items_new_versions" not in {sensor.name for sensor in defs.sensors or ()}, (
        "a query is asked for versions"
    )
    build(lab, DAYS[0])
    assert lab.run(defs, AssetKey(["lake", "copy"])).success


# -- names that come as they come, on a stream

ON_STREAM = bounded_dataset(
    "items", input="lake.items", key="item", partitions=2, versions=VersionPartitions()
)


def tick(lab: Lab, cursor: str | None = None) -> tuple[RunRequest | SkipReason, str | None]:
    """Return what the sensor answers, and what it remembers."""
    defs = lab.definitions(ON_STREAM)
    sensor = next(
        candidate for candidate in defs.sensors or () if candidate.name == "items_new_versions"
    )
    with build_sensor_context(
        instance=lab.instance,
        cursor=cursor,
        resources={"adjunct_lake": LakeResource(url=lab.lake.url)},
    ) as context:
        answer = sensor(context)  # type: ignore[operator]
        assert isinstance(answer, RunRequest | SkipReason)
        return answer, context.cursor


@pytest.mark.lengthy
def test_versions_on_a_stream_become_partitions_as_they_are_delivered(lab: Lab) -> None:
    nothing, _ = tick(lab)
    assert isinstance(nothing, SkipReason)
    assert str(nothing.skip_message).startswith("No new version; ")
    lab.deliver("items", APPLES, None)
    waiting, _ = tick(lab)
    assert isinstance(waiting, SkipReason)
    assert "lake.items.0" in str(waiting.skip_message)
    lab.deliver("items", [("c", "Cheese", 3)], "v9")
    lab.deliver("items", APPLES, "v10")

    request, cursor = tick(lab)
    assert isinstance(request, RunRequest)
    assert request.partition_key == "v9"
    again, _ = tick(lab, cursor)
    assert isinstance(again, SkipReason)

    finished = build(lab, "v9", ON_STREAM)
    assert set(finished.made) == {"items/v9", "items/v10"}, (
        "what the stream holds is published in its order"
    )
    assert lab.instance.get_dynamic_partitions("adjunct/items") == ["v9", "v10"]
    assert served(lab) == "v10"
    idle, _ = tick(lab, cursor)
    assert isinstance(idle, SkipReason)


@pytest.mark.lengthy
def test_the_applications_job_says_loudly_which_delivered_version_it_leaves_out(lab: Lab) -> None:
    ran = StepReport(1, True, {}, {}, {}, ApplicationState(batch=1))
    defs = lab.definitions(ON_STREAM)
    lab.instance.add_dynamic_partitions("adjunct/items", ["v1"])
    lab.deliver("items", APPLES, "v1")
    build(lab, "v1", ON_STREAM)
    with steps_run_by(lambda context: ran):
        quiet = FinishedRun(
            defs.resolve_job_def("shop").execute_in_process(instance=lab.instance), lab.instance
        )
    assert quiet.made["copy"]["adjunct/left_out"] == {
        "items": "the next one waits for lake.items.0, lake.items.1"
    }
    assert "leaves it out" not in quiet.log
    lab.deliver("items", [*APPLES, ("c", "Cheese", 3)], "v2")
    with steps_run_by(lambda context: ran):
        finished = FinishedRun(
            defs.resolve_job_def("shop").execute_in_process(instance=lab.instance), lab.instance
        )
    assert (
        "30 Version v2 of items is delivered, but this run does not build it. Dataset items has its"
        " versions" in finished.log
    )
    assert (
        "Launch the Dagster job items_versions for them, or switch on the sensor items_new_versions"
        in finished.log
    )
    assert finished.observed["copy"]["adjunct/left_out"] == {"items": "version v2 is delivered"}
    assert "items_versions" in str(defs.resolve_job_def("shop").description)


def test_a_partition_that_is_not_delivered_is_not_materialised_and_the_log_says_so(
    lab: Lab,
) -> None:
    lab.deliver("items", APPLES, None)
    lab.instance.add_dynamic_partitions("adjunct/items", ["v1"])
    finished = build(lab, "v1", ON_STREAM)
    assert finished.success
    assert finished.made == {}
    assert (
        "Partition v1 of items is not materialized: it is not completely delivered yet"
        in finished.log
    )
