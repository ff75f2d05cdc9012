"""Streams of tables in a component's YAML: the same as in Python."""

from __future__ import annotations

import inspect
from datetime import timedelta

import pytest

from dagster_adjunct import FileRetention, delta_stream, iceberg_stream
from dagster_adjunct.errors import ComponentError
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.orchestration.code_location.component_forms import (
    DeltaStreamForm,
    IcebergStreamForm,
    keys_of,
)
from dagster_adjunct.resources.file_streams import streams as declared
from tests.orchestration.dagster.test_components import component

RIGHT = """
iceberg_streams:
  events:
    table: {IcebergTable: {identifier: raw.events, catalog: lab}}
    schema: {id: bigint, note: string}
    key: [id]
    start: oldest
    on_delete: ignore
delta_streams:
  orders:
    url: s3://landing/orders
    schema: {id: bigint}
    retention: {FileRetention: {max_age: 7d}}
applications:
  copy: {steps: [{input_stream: iceberg.events}]}
  other: {steps: [{input_stream: delta.orders}]}
"""


@pytest.fixture(autouse=True)
def _nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(declared, "_declared", {})


def test_yaml_declares_what_python_does() -> None:
    component(RIGHT).applications()
    events = declared._declared["iceberg"].pop("events")
    orders = declared._declared["delta"].pop("orders")
    iceberg_stream(
        "events",
        IcebergTable("raw.events", "lab"),
        schema="id bigint, note string",
        key=["id"],
        start="oldest",
        on_delete="ignore",
    )
    delta_stream(
        "orders",
        "s3://landing/orders",
        schema="id bigint",
        retention=FileRetention(max_age=timedelta(days=7)),
    )
    assert events == declared._declared["iceberg"]["events"]
    assert orders == declared._declared["delta"]["orders"]


@pytest.mark.parametrize(
    ("form", "function"), [(IcebergStreamForm, iceberg_stream), (DeltaStreamForm, delta_stream)]
)
def test_yaml_has_all_options_of_python(form: type, function: object) -> None:
    assert keys_of(form) == [*inspect.signature(function).parameters][1:]  # type: ignore[arg-type]


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ComponentError, match="on_delete"):
        component(RIGHT.replace("ignore", "shrug")).applications()
