"""What assets show for people: which columns are made of which, what they mean, some rows, and
lines of code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from dagster import AssetKey, TableColumnLineage

from dagster_adjunct import (
    Application,
    LakeStreams,
    Schema,
    UpdateContract,
    bounded_dataset,
    build_definitions,
    update_message,
)
from dagster_adjunct.changes import Projection
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState
from dagster_adjunct.orchestration.code_location.metadata import (
    dataset_columns,
    output_columns,
    trace_sources,
)
from dagster_adjunct.orchestration.operators.stream_facts import LineageNode
from dagster_adjunct.orchestration.planner.planner import plan_application
from dagster_adjunct.orchestration.step.progress import StepReport
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.tables import RemoteTable, SqliteTable
from tests.orchestration.dagster.lab import (
    APPLES,
    NO_SPARK,
    SCHEMA,
    Lab,
    key_of,
    running_lab,
    steps_run_by,
)

ITEMS = bounded_dataset(
    "items",
    input="lake.items",
    key="item",
    partitions=2,
    column_descriptions={"label": "What is on the shelf"},
    sensitive="price",
)
ORDERS, COPY = LineageNode("stream", "lake.orders"), LineageNode("stream", "lake.copy")
STOCK = LineageNode("dataset", "items")


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with running_lab(tmp_path) as lab:
        lab.streams.create("orders", schema=SCHEMA, key=["item"], partitions=2)
        lab.streams.create("items", schema=SCHEMA, key=["item"], partitions=2)
        yield lab


def application(folder: Path) -> Application:
    columns = {"item": "string", "title": "string", "spent": "int"}
    store = SqliteTable(
        path=folder / "t.sqlite", table="state", key="item", columns=columns, create=True
    )
    app = Application("shop")
    (
        app.input_stream("lake.orders")
        .join(app.table(ITEMS), on="item", how="left", select=["label as title", "price as listed"])
        .map(
            "item",
            "title",
            "price - listed as saved",
            "concat('label, ', upper(`label`)) as loud",
            "1 as one",
        )
        .send_to(app.output_stream("lake.copy", partitions=2, key="item"))
        .map(
            *update_message(key="item", update={"spent": "saved + length(',)')"}, default=["title"])
        )
        .send_to(
            app.table(RemoteTable("state", key="item", read_function=store, write_function=store)),
            UpdateContract.UPDATE_WITH_DEFAULTS,
        )
    )
    return app


def test_each_column_of_an_output_names_the_columns_that_it_is_made_of(
    lab: Lab, tmp_path: Path
) -> None:
    app = application(tmp_path)
    made = output_columns(app, plan_application(app, systems={"lake": LakeStreams(lab.lake)}))
    assert made == {
        COPY: {
            "item": ((ORDERS, "item"),),
            "title": ((STOCK, "label"),),
            "saved": ((ORDERS, "price"), (STOCK, "price")),
            "loud": ((ORDERS, "label"),),
            "one": (),
        },
        LineageNode("table", "state"): {
            "item": ((COPY, "item"),),
            "spent": ((COPY, "saved"),),
            "title": ((COPY, "title"),),
        },
    }
    assert trace_sources(made)[LineageNode("table", "state")]["spent"] == (
        (ORDERS, "price"),
        (STOCK, "price"),
    )


def test_what_a_function_returns_is_of_unknown_columns(lab: Lab) -> None:
    app = Application("shop")
    streams = app.input_stream("lake.orders").map(lambda frame: frame)
    streams.send_to(app.output_stream("lake.copy", partitions=1))
    assert (
        output_columns(app, plan_application(app, systems={"lake": LakeStreams(lab.lake)})).get(
            COPY, {}
        )
        == {}
    )


def test_a_datasets_columns_are_those_of_its_input_or_what_its_projection_names() -> None:
    source = LineageNode("stream", "lake.items")
    assert dataset_columns(ITEMS, ["item", "label"], SCHEMA.names) == {
        "item": ((source, "item"),),
        "label": ((source, "label"),),
    }
    shouted = replace(
        ITEMS, extractor=Projection("item STRING, loud STRING", {"loud": "upper(label)"})
    )
    assert dataset_columns(shouted, ["item", "loud"], SCHEMA.names)["loud"] == ((source, "label"),)


def run(lab: Lab, folder: Path, **options: Any) -> dict[str, Any]:
    """Run the application with a batch whose output is there already; the metadata objects by
    asset.
    """
    report = StepReport(1, True, {}, {}, {}, ApplicationState(batch=1))
    lab.deliver("items", APPLES, "v1")
    rows = {"item": ["a"], "title": ["Apple"], "saved": [3], "loud": ["x" * 200], "one": [1]}
    types = [pa.string(), pa.string(), pa.int32(), pa.string(), pa.int32()]
    table = pa.table(rows, pa.schema(list(zip(rows, types, strict=True))))
    lab.streams.create("copy", schema=Schema.from_arrow(table.schema), key=["item"], partitions=2)
    lab.streams.append("copy", table, producer="shop", sequence=1)
    app = application(folder)
    defs = build_definitions(app, lake=lab.lake.url, spark=NO_SPARK, **options)
    with steps_run_by(lambda context: report):
        finished = lab.run(
            defs, key_of(ITEMS), AssetKey(["lake", "copy"]), AssetKey(["tables", "state"])
        )
    materializations = [
        event.step_materialization_data.materialization
        for event in finished.events
        if event.is_step_materialization
    ]
    return {
        materialization.asset_key.path[-1]: materialization.metadata
        for materialization in materializations
    }


@pytest.mark.lengthy
def test_materialisations_have_column_lineage_descriptions_and_masked_rows(
    lab: Lab, tmp_path: Path
) -> None:
    made = run(lab, tmp_path, preview_rows=5)
    lineage = made["copy"]["dagster/column_lineage"].value
    assert isinstance(lineage, TableColumnLineage)
    saved = [
        (dep.asset_key.to_user_string(), dep.column_name) for dep in lineage.deps_by_column["saved"]
    ]
    assert sorted(saved) == [("datasets/items_dataset", "price"), ("lake/orders", "price")]
    assert "one" not in lineage.deps_by_column
    items = made["items_dataset"]
    assert items["dagster/column_lineage"].value.deps_by_column["label"][0].asset_key == AssetKey(
        ["lake", "items"]
    )
    for asset, column in (("items_dataset", "label"), ("copy", "title"), ("state", "title")):
        columns = {
            displayed.name: displayed
            for displayed in made[asset]["dagster/column_schema"].value.columns
        }
        assert columns[column].description == "What is on the shelf", asset
    rows = [record.data for record in items["adjunct/preview"].records]
    assert sorted(rows, key=lambda row: str(row["item"])) == [
        {"item": "a", "label": "Apple", "price": "(masked)"},
        {"item": "b", "label": "Bread", "price": "(masked)"},
    ]
    (record,) = made["copy"]["adjunct/preview"].records
    assert record.data["saved"] == "(masked)", "it is made of a sensitive column"
    assert record.data["one"] == "(masked)", "nobody knows what it is made of"
    assert record.data["title"] == "Apple"
    assert len(str(record.data["loud"])) == 100


@pytest.mark.lengthy
def test_nothing_is_displayed_of_the_data_unless_it_is_asked_for(lab: Lab, tmp_path: Path) -> None:
    made = run(lab, tmp_path)
    assert all("adjunct/preview" not in metadata for metadata in made.values())
    with pytest.raises(ConfigurationError) as caught:
        build_definitions(application(tmp_path), preview_rows=1000)
    assert caught.value.argument == "preview_rows"


def test_assets_lead_to_the_lines_that_declare_them_where_that_is_asked_for(tmp_path: Path) -> None:
    def references(**options: Any) -> dict[str, Any]:
        specs = build_definitions(application(tmp_path), **options).resolve_all_asset_specs()
        return {spec.key.path[-1]: spec.metadata.get("dagster/code_references") for spec in specs}

    assert set(references().values()) == {None}
    linked = references(link_code=True)
    (dataset,), (output,) = (linked[name].code_references for name in ("items_dataset", "copy"))
    assert (dataset.file_path, output.file_path) == (__file__, __file__)
    lines = Path(__file__).read_text().splitlines()
    assert lines[dataset.line_number - 1].startswith("ITEMS = bounded_dataset(")
    assert 'Application("shop")' in lines[output.line_number - 1]


def test_the_place_of_a_declaration_is_no_part_of_it() -> None:
    from dagster_adjunct import bounded_dataset as declare

    one = declare("one", input="lake.one", key="item", broadcast=True)
    two = declare("one", input="lake.one", key="item", broadcast=True)
    assert one.declared_at != two.declared_at
    assert one == two
    assert hash(one) == hash(two)
    assert "test_shown" not in repr(one)
