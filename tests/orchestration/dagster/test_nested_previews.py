"""Nested columns in Dagster: schemas as text, previews as JSON, and inputs of users' assets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dagster_adjunct import Lake, LakeStreams, advance_dataset, bounded_dataset, open_lake
from dagster_adjunct.orchestration.code_location.metadata import (
    MASKED,
    column_schema,
    dataset_preview,
    stream_preview,
)
from dagster_adjunct.orchestration.code_location.resources import _FORMS
from dagster_adjunct.resources.schemas.records import to_arrow_table
from dagster_adjunct.resources.spark.in_process import IN_PROCESS
from tests.assets.nested_orders import ORDERS, ROWS, by_key
from tests.orchestration.cli.test_nested_output import EXPECTED


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    lake = open_lake(tmp_path / "lake")
    streams = LakeStreams(lake)
    streams.create("orders", schema=ORDERS, key=["k"], partitions=1)
    streams.append("orders", ROWS, producer="t", sequence=1, end_of_dataset="v1")
    return lake


def check_preview(metadata: dict[str, Any], hidden: set[str]) -> None:
    """Compare a preview with the first 100 characters of each value's JSON."""
    expected = []
    for row in EXPECTED:
        cells: dict[str, Any] = {"k": row["k"]}
        for name in ORDERS.names[1:]:
            text = json.dumps(row[name], ensure_ascii=False)
            cells[name] = None if row[name] is None else text
            if len(text) > 100:
                cells[name] = f"{text[:99]}…"
            if name in hidden:
                cells[name] = MASKED
        expected.append(cells)
    assert [record.data for record in metadata["adjunct/preview"].records] == expected


def test_previews_have_nested_values_as_json_and_hide_sensitive_ones(lake: Lake) -> None:
    spec = bounded_dataset(
        "orders", input="lake.orders", key="k", partitions=1, sensitive=["customer"]
    )
    report = advance_dataset(spec, lake=lake, spark=IN_PROCESS)
    assert report.version is not None
    check_preview(dataset_preview(lake, spec, report.version, 10), {"customer"})
    systems = {"lake": LakeStreams(lake)}
    check_preview(stream_preview(systems, "lake.orders", 10, lambda names: {"notes"}), {"notes"})


def test_the_schema_names_nested_types() -> None:
    shown = column_schema(ORDERS, {"Customer": "who pays"}).value
    assert {column.name: column.type for column in shown.columns} == ORDERS.types
    assert [column.description for column in shown.columns if column.description] == ["who pays"]


FORMS = {
    "builtins.list": list,
    "pandas.DataFrame": lambda frame: frame.to_dict("records"),
    "polars.DataFrame": pl.DataFrame.to_dicts,
    "duckdb.DuckDBPyRelation": lambda found: [
        dict(zip(found.columns, row, strict=True)) for row in found.fetchall()
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_inputs_of_assets_have_the_nested_values_in_every_form(form: str) -> None:
    given = _FORMS[form](to_arrow_table(ROWS, "rows", ORDERS))
    assert by_key(FORMS[form](given)) == ROWS
