"""Applications that follow the changes of a dataset, in YAML and in Dagster's graph."""

from __future__ import annotations

import pytest
from dagster import AssetKey

from dagster_adjunct import Application, bounded_dataset, build_definitions
from dagster_adjunct.errors import ComponentError
from tests.orchestration.dagster.test_components import component, facts

FOLLOWING = """
bounded_datasets:
  planes: {input: lake.planes, key: tailnum, partitions: 2}
applications:
  mirror:
    output_streams: {lake.copied: {partitions: 2, key: tailnum}, lake.images: {partitions: 1}}
    steps:
      - input_changes: planes
      - send_to: lake.copied
      - input_changes: {dataset: planes, images: true, default_offset: upcoming}
      - send_to: lake.images
"""
PLANES = bounded_dataset("planes", input="lake.planes", key="tailnum", partitions=2)


def mirror() -> Application:
    app = Application("mirror")
    copied = app.output_stream("lake.copied", partitions=2, key="tailnum")
    app.input_changes(PLANES).send_to(copied)
    images = app.input_changes(PLANES, images=True, default_offset="upcoming")
    images.send_to(app.output_stream("lake.images", partitions=1))
    return app


def test_yaml_follows_a_dataset_by_its_name() -> None:
    assert facts(component(FOLLOWING).applications()["mirror"]) == facts(mirror())
    with pytest.raises(ComponentError):
        component(
            FOLLOWING.replace("input_changes: planes", "input_changes: trains")
        ).applications()


def test_the_graph_shows_the_dataset_before_its_changes() -> None:
    joins = Application("joins")
    joins.input_stream("lake.flights").join(joins.table(PLANES), on="tailnum").send_to(
        joins.output_stream("lake.joined", partitions=2, key="tailnum")
    )
    graph = build_definitions(mirror(), joins).resolve_asset_graph()
    changes = graph.get(AssetKey(["changes", "planes"]))
    assert changes.parent_keys == {AssetKey(["datasets", "planes_dataset"])}
    assert graph.get(AssetKey(["lake", "copied"])).parent_keys == {changes.key}
