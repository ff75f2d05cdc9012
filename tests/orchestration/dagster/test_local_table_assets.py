"""Local tables in Dagster: outputs of their application, with a version of their own, and a
graph without circles.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, TableMetadataValue

from dagster_adjunct import Application, Schema, SparkResource, build_definitions, open_lake
from dagster_adjunct.assets.declaration.dataset import unbounded_dataset
from dagster_adjunct.orchestration.application.lineage import find_outputs
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from tests.orchestration.step_world import StepWorld

COUNTS, OUT = AssetKey(["datasets", "counts_dataset"]), AssetKey(["lake", "out"])


def counting() -> Application:
    app = Application("counting")
    counts = app.local_table(
        "counts",
        key="shop",
        schema=Schema.of(shop="string", visits="bigint"),
        partitions=2,
        column_descriptions={"visits": "so far"},
    )
    visits = app.input_stream("lake.visits").join(counts, on="shop", how="left")
    counted = visits.map("shop", "coalesce(visits, 0L) + 1L as visits")
    counted.send_to(app.output_stream("lake.out", partitions=2, key="shop")).send_to(counts)
    return app


def deps(*apps: Application) -> dict[AssetKey, set[AssetKey]]:
    graph = build_definitions(*apps).resolve_asset_graph()
    return {key: set(graph.get(key).parent_keys) for key in graph.get_all_asset_keys()}


def test_a_local_table_is_an_output_of_its_application_and_nothing_is_made_of_itself() -> None:
    graph = deps(counting())
    visits = AssetKey(["lake", "visits"])
    assert graph == {visits: set(), OUT: {visits}, COUNTS: {OUT}}


def test_an_application_that_only_joins_a_table_shows_it_as_external_or_its_owners() -> None:
    def joining() -> Application:
        app = Application("joining")
        table = app.table(counting().dataset("counts"))
        app.input_stream("lake.other").join(table, on="shop").send_to(
            app.output_stream("lake.more", partitions=2, key="shop")
        )
        return app

    more = AssetKey(["lake", "more"])
    alone, together = deps(joining()), deps(joining(), counting())
    assert (alone[COUNTS], alone[more]) == (set(), {COUNTS, AssetKey(["lake", "other"])})
    assert (together[COUNTS], together[more]) == ({OUT}, alone[more])


def test_a_dataset_that_is_fed_and_joined_makes_no_circle_either() -> None:
    app = Application("feeding")
    fed = app.table(unbounded_dataset("rates", input="lake.rates", key="shop", partitions=2))
    app.input_stream("lake.visits").join(fed, on="shop").send_to(fed)
    (output,) = find_outputs(app)
    assert output == type(output)(
        LineageNode("stream", "lake.rates"), (LineageNode("stream", "lake.visits"),)
    )
    assert build_definitions(app).resolve_asset_graph().get_all_asset_keys()


@pytest.mark.spark
def test_a_run_materializes_the_tables_version_and_observes_an_unchanged_one(
    tmp_path: Path, spark: Any, instance: DagsterInstance
) -> None:
    world = StepWorld(open_lake(tmp_path / "lake"), tmp_path, lambda: spark)
    world.stream("visits", "shop", 2, shop="string")
    world.send("visits", ("a",), ("b",))
    definitions = build_definitions(
        counting(),
        lake=str(tmp_path / "lake"),
        spark=SparkResource(lake=str(tmp_path / "lake")),
        preview_rows=5,
    )
    job = definitions.resolve_job_def("counting")
    assert job.execute_in_process(instance=instance).success
    made = instance.get_latest_materialization_event(COUNTS)
    assert made is not None
    materialization = made.asset_materialization
    assert materialization is not None
    metadata = {name: value.value for name, value in materialization.metadata.items()}
    assert (materialization.tags or {})["dagster/data_version"] == metadata["adjunct/version"]
    assert metadata["adjunct/version"].startswith("v000001-")
    assert (metadata["dagster/row_count"], metadata["adjunct/rows"]) == (2, 2)
    preview = materialization.metadata["adjunct/preview"]
    assert isinstance(preview, TableMetadataValue)
    assert [record.data["visits"] for record in preview.records] == [1, 1]
    (described,) = [c for c in metadata["dagster/column_schema"].columns if c.name == "visits"]
    assert described.description == "so far"
    assert "adjunct/data_version" not in metadata
    assert job.execute_in_process(instance=instance).success
    again = instance.get_latest_materialization_event(COUNTS)
    assert again is not None
    assert again.timestamp == made.timestamp
