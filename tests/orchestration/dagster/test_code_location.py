"""What loading the code location costs, and what stands in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from dagster import AssetKey, DefaultSensorStatus, Definitions

from dagster_adjunct import Application, Schema, bounded_dataset, build_definitions
from dagster_adjunct.code_location import AdjunctTranslator, AssetSubject
from dagster_adjunct.errors import ConfigurationError
from dagster_adjunct.orchestration.code_location.nodes import NODE_KINDS
from dagster_adjunct.orchestration.operators.stream_facts import Kind
from dagster_adjunct.sources import FileSource, QuerySource
from dagster_adjunct.testing import TestStream, assert_plannable
from tests.orchestration.dagster import small
from tests.servers.s3 import ROOT

HEAVY = ["pyspark", "pandas", "numpy", "pyarrow", "boto3", "botocore", "psycopg", "matplotlib"]
# What runs, ticks, and other stores than those that are declared need.
HEAVY += ["dagster_adjunct.orchestration.step.run", "dagster_adjunct.orchestration.planner.planner"]
HEAVY += [
    "dagster_adjunct.assets.unbounded.advance",
    "dagster_adjunct.resources.table_backends.redis",
]
# Loads as a code server does, with every way to the network shut.
LOAD = f"""
import json, socket, sys
def refuse(*args, **kwargs):
    raise AssertionError(f"loading opened a connection: {{args}}")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
from dagster_adjunct.orchestration.definitions import defs
from dagster import Definitions
Definitions.validate_loadable(defs)
assets = sorted(key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys())
print(json.dumps([assets, [name for name in {HEAVY!r} if name in sys.modules]]))
"""


def loaded(folder: Path, **env: str) -> tuple[list[str], list[str]]:
    """Return the asset keys of dagster_adjunct.orchestration.definitions and the heavy modules
    that came along.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DAGSTER_HOME": "", **env}
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assets, heavy = json.loads(done.stdout.splitlines()[-1])
    return assets, heavy


@pytest.mark.lengthy
def test_loading_the_code_location_imports_nothing_heavy_and_opens_no_lake(tmp_path: Path) -> None:
    assets, heavy = loaded(tmp_path, ADJUNCT_LAKE=str(tmp_path / "lake"))
    assert heavy == []
    assert list(tmp_path.iterdir()) == []
    assert assets == [
        "datasets/aircraft_dataset",
        "datasets/airlines_dataset",
        "datasets/airports_dataset",
        "datasets/last_seen_dataset",
        "datasets/planes_dataset",
        "datasets/weather_dataset",
        "lake/aircraft",
        "lake/airlines",
        "lake/airport_days",
        "lake/airports",
        "lake/disrupted_flights",
        "lake/enriched_flights",
        "lake/flights",
        "lake/flights_instead",
        "lake/flights_of_aircraft",
        "lake/planes",
        "lake/weather",
        "tables/aircraft_state",
        "tables/carrier_desks",
    ]


@pytest.mark.lengthy
def test_loading_an_application_on_an_s3_lake_touches_no_network(tmp_path: Path) -> None:
    assets, heavy = loaded(
        tmp_path,
        ADJUNCT_APP="tests.orchestration.dagster.small:app",
        ADJUNCT_LAKE="s3://nowhere/lake",
    )
    assert heavy == []
    assert "lake/priced" in assets


def test_lineage_runs_from_streams_over_datasets_and_enriched_streams_to_the_table(
    tmp_path: Path,
) -> None:
    graph = build_definitions(small.order_totals(tmp_path / "t.sqlite")).resolve_asset_graph()
    parents = {
        key.to_user_string(): {parent.to_user_string() for parent in graph.get(key).parent_keys}
        for key in graph.get_all_asset_keys()
    }
    assert parents == {
        "lake/orders": set(),
        "lake/items": set(),
        "lake/rates": set(),
        "datasets/items_dataset": {"lake/items"},
        "datasets/rates_dataset": {"lake/rates"},
        "lake/priced": {"lake/orders", "datasets/items_dataset", "datasets/rates_dataset"},
        "tables/item_state": {"lake/priced"},
    }
    made = {key.to_user_string() for key in graph.materializable_asset_keys}
    assert made == set(parents) - {"lake/orders", "lake/items", "lake/rates"}


def test_a_dataset_joined_after_an_output_is_upstream_of_what_follows_only() -> None:
    labels = bounded_dataset("labels", input="lake.labels", key="item", broadcast=True)
    app = Application("late-join")
    sent = app.input_stream("lake.orders").send_to(
        app.output_stream("lake.first", partitions=2, key="item")
    )
    sent.join(app.table(labels), on="item").send_to(
        app.output_stream("lake.second", partitions=2, key="item")
    )
    graph = build_definitions(app).resolve_asset_graph()
    assert graph.get(AssetKey(["lake", "first"])).parent_keys == {AssetKey(["lake", "orders"])}
    assert graph.get(AssetKey(["lake", "second"])).parent_keys == {
        AssetKey(["lake", "first"]),
        AssetKey(["datasets", "labels_dataset"]),
    }


def test_assets_have_kinds_owners_groups_and_what_a_table_declares(tmp_path: Path) -> None:
    graph = build_definitions(small.order_totals(tmp_path / "t.sqlite")).resolve_asset_graph()
    items, priced = (
        graph.get(AssetKey(["datasets", "items_dataset"])),
        graph.get(AssetKey(["lake", "priced"])),
    )
    table = graph.get(AssetKey(["tables", "item_state"]))
    assert (items.group_name, list(items.owners), items.kinds) == (
        "shop",
        ["team:catalog"],
        {"spark", "parquet"},
    )
    assert (priced.group_name, list(priced.owners)) == ("order_totals", ["team:sales"])
    assert (priced.kinds, table.kinds) == ({"stream", "parquet"}, {"sqlite"})
    columns = table.metadata["dagster/column_schema"].value.columns
    assert [(column.name, column.type) for column in columns] == [
        ("item", "string"), ("label", "string"), ("last_order", "bigint"),
    ]  # fmt: skip


class Platform(AdjunctTranslator):
    """Keys, groups and owners as some company has them."""

    def get_asset_key(self, subject: AssetSubject) -> AssetKey:
        return AssetKey(["shop", subject.kind, *subject.name.replace("-", "_").split(".")])

    def get_group_name(self, subject: AssetSubject) -> str:
        return f"{subject.kind}s"

    def get_owners(self, subject: AssetSubject) -> list[str]:
        return ["team:platform"]


def test_a_users_translator_decides_keys_groups_and_owners_everywhere(tmp_path: Path) -> None:
    defs = build_definitions(small.order_totals(tmp_path / "t.sqlite"), translator=Platform())
    graph = defs.resolve_asset_graph()
    assert {key.path[0] for key in graph.get_all_asset_keys()} == {"shop"}
    priced = graph.get(AssetKey(["shop", "stream", "lake", "priced"]))
    assert (priced.group_name, list(priced.owners)) == ("streams", ["team:platform"])
    assert AssetKey(["shop", "dataset", "rates"]) in priced.parent_keys
    selected = defs.resolve_job_def("order_totals").asset_layer.selected_asset_keys
    assert selected == graph.materializable_asset_keys


def test_applications_given_together_share_datasets_and_feed_each_other(tmp_path: Path) -> None:
    labels = Application("labels")
    priced = labels.input_stream("lake.priced").join(labels.table(small.items), on="item")
    priced.send_to(labels.output_stream("lake.labels", partitions=2, key="item"))
    defs = build_definitions(small.order_totals(tmp_path / "t.sqlite"), labels)
    graph = defs.resolve_asset_graph()
    assert graph.get(AssetKey(["lake", "labels"])).parent_keys == {
        AssetKey(["lake", "priced"]),
        AssetKey(["datasets", "items_dataset"]),
    }
    assert graph.get(AssetKey(["lake", "priced"])).is_materializable
    own = defs.resolve_job_def("labels").asset_layer.selected_asset_keys
    assert own == {AssetKey(["lake", "labels"]), AssetKey(["datasets", "items_dataset"])}
    assert sorted(sensor.name for sensor in defs.sensors or ()) == [
        "items_delivered",
        *(
            f"{name}_{what}"
            for name in ("labels", "order_totals")
            for what in ("new_records", "restart", "startpoints")
        ),
    ]


def test_applications_that_share_nothing_merge(tmp_path: Path) -> None:
    other = Application("other")
    other.input_stream("lake.clicks").send_to(other.output_stream("lake.copy", partitions=1))
    merged = Definitions.merge(
        build_definitions(small.order_totals(tmp_path / "t.sqlite")), build_definitions(other)
    )
    Definitions.validate_loadable(merged)
    assert {job.name for job in merged.resolve_all_job_defs()} >= {"order_totals", "other"}


def test_applications_that_read_one_stream_merge_whoever_owns_them() -> None:
    apps = [Application(name, owners=f"team:{name}") for name in ("first", "second")]
    for app in apps:
        app.input_stream("lake.clicks").send_to(
            app.output_stream(f"lake.{app.name}-clicks", partitions=1)
        )
    merged = Definitions.merge(*(build_definitions(app, link_code=True) for app in apps))
    Definitions.validate_loadable(merged)
    clicks = merged.resolve_asset_graph().get(AssetKey(["lake", "clicks"]))
    assert (clicks.group_name, list(clicks.owners)) == ("inputs", [])
    assert clicks.child_keys == {
        AssetKey(["lake", "first_clicks"]),
        AssetKey(["lake", "second_clicks"]),
    }


def test_two_applications_that_write_one_stream_are_refused(tmp_path: Path) -> None:
    twin = small.order_totals(tmp_path / "t.sqlite", name="twin")
    with pytest.raises(
        ConfigurationError, match=r"'order-totals' and 'twin' both write stream 'lake.priced'"
    ):
        build_definitions(small.order_totals(tmp_path / "t.sqlite"), twin)


def test_applications_that_feed_each_other_in_a_circle_are_refused() -> None:
    members = bounded_dataset("members", input="lake.b", key="k", broadcast=True)
    first, second = Application("first"), Application("second")
    first.input_stream("lake.a").send_to(first.output_stream("lake.b", partitions=1))
    read = second.input_stream("lake.c").join(second.table(members), on="k")
    read.send_to(second.output_stream("lake.a", partitions=1))
    build_definitions(first)
    with pytest.raises(ConfigurationError, match="in a circle") as caught:
        build_definitions(first, second)
    links = [
        ("lake/a", "lake/b"),
        ("lake/b", "datasets/members_dataset"),
        ("datasets/members_dataset", "lake/a"),
    ]
    assert all(f"{one} -> {other}" in caught.value.problem for one, other in links)


def test_two_declarations_of_one_dataset_are_refused(tmp_path: Path) -> None:
    other = Application("other")
    items = bounded_dataset("items", input="lake.items", key="item", broadcast=True)
    joined = other.input_stream("lake.clicks").join(other.table(items), on="item")
    joined.send_to(other.output_stream("lake.copy", partitions=1))
    with pytest.raises(ConfigurationError) as caught:
        build_definitions(small.order_totals(tmp_path / "t.sqlite"), other)
    assert caught.value.dataset == "items"


def test_sensors_are_stopped_until_somebody_starts_them(tmp_path: Path) -> None:
    sensors = [*(build_definitions(small.order_totals(tmp_path / "t.sqlite")).sensors or ())]
    assert len(sensors) == 4
    assert {sensor.default_status for sensor in sensors} == {DefaultSensorStatus.STOPPED}


def test_the_folder_of_a_dataset_is_an_external_asset_and_a_query_is_none() -> None:
    schema = Schema.of(item="string", label="string")
    labels = bounded_dataset(
        "labels",
        input=FileSource("s3://bucket/shop-data/läbels", "csv", schema),
        key="item",
        broadcast=True,
    )
    prices = bounded_dataset(
        "prices", input=QuerySource("SELECT …", schema), key="item", broadcast=True
    )
    app = Application("shop")
    orders = app.input_stream("lake.orders").join(app.table(labels), on="item", select=["label"])
    orders.join(app.table(prices), on="item", select=["label as price"]).send_to(
        app.output_stream("lake.priced", partitions=2)
    )
    graph = build_definitions(app).resolve_asset_graph()
    files = AssetKey(["files", "bucket", "shop_data", "l_bels"])
    assert graph.get(AssetKey(["datasets", "labels_dataset"])).parent_keys == {files}
    assert graph.get(AssetKey(["datasets", "prices_dataset"])).parent_keys == set()
    assert graph.get(files).metadata["dagster/uri"] == "s3://bucket/shop-data/läbels"
    assert (graph.get(files).kinds, graph.get(files).is_materializable) == ({"csv"}, False)


def test_two_nodes_with_one_asset_key_and_two_jobs_with_one_name_are_rejected() -> None:
    class OneKey(AdjunctTranslator):
        def get_asset_key(self, subject: AssetSubject) -> AssetKey:
            return AssetKey(["same"])

    def reading(name: str, out: str = "lake.out") -> Application:
        app = Application(name)
        planes = app.table(bounded_dataset("planes", input="lake.planes", key="k", partitions=2))
        app.input_stream("lake.in").join(planes, on="k").send_to(
            app.output_stream(out, partitions=2, key="k")
        )
        return app

    with pytest.raises(
        ConfigurationError,
        match=r"stream 'lake\.in' and stream 'lake\.planes' both have the asset key",
    ):
        build_definitions(reading("a"), translator=OneKey())
    for other in ("a_b", "a-b"):
        with pytest.raises(ConfigurationError) as caught:
            build_definitions(reading("a-b"), reading(other))
        assert caught.value.application == other
    for other in ("a-discard", "a-startpoint"):
        with pytest.raises(
            ConfigurationError, match=f"two jobs have the name '{other.replace('-', '_')}'"
        ):
            build_definitions(reading("a"), reading(other, "lake.other"))
    with pytest.raises(ConfigurationError) as caught:
        build_definitions(reading("output"))
    assert caught.value.application == "output"


def test_every_kind_of_node_says_what_it_is_in_dagster() -> None:
    assert NODE_KINDS.keys() == {*get_args(Kind)}


def test_a_description_of_an_output_stream_is_in_the_plan_and_on_its_asset() -> None:
    app = Application("shop", description="All of the shop")
    orders = app.input_stream("lake.orders")
    orders.send_to(
        app.output_stream("lake.priced", partitions=1, key="k", description="Orders with prices")
    )
    orders.send_to(app.output_stream("lake.other", partitions=1, key="k"))
    plan = assert_plannable(
        app, {"lake.orders": TestStream(Schema.of(k="string"), key="k", partitions=1)}
    )
    assert [operator.summary for operator in plan.operators if operator.writes] == [
        "lake.priced: Orders with prices",
        "lake.other",
    ]
    assert "lake.priced: Orders with prices" in plan.render()
    graph = build_definitions(app).resolve_asset_graph()
    described = {
        key.to_user_string(): graph.get(key).description for key in graph.get_all_asset_keys()
    }
    assert described["lake/priced"] == "Orders with prices"
    assert described["lake/other"] == "All of the shop"
