"""Nested columns in YAML: mappings are structs and lists are arrays, as in `Schema.of`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError

from dagster_adjunct.components import AdjunctComponent
from dagster_adjunct.errors import ComponentError, ConfigurationError
from dagster_adjunct.orchestration.code_location.component_source import ATTRIBUTES, Source
from dagster_adjunct.orchestration.code_location.component_translation import Translation
from dagster_adjunct.orchestration.testing import TestApplication, assert_plannable
from dagster_adjunct.orchestration.testing import TestStream as AppStream
from dagster_adjunct.resources.objects.lake import lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.sources import FileSource
from dagster_adjunct.streams import open_system
from tests.orchestration.dagster.test_components import component

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NESTED = "{id: bigint, customer: {id: bigint, zip code: string}, lines: [{sku: string}]}"
SCHEMA = Schema.of(
    id="bigint", customer={"id": "bigint", "zip code": "string"}, lines=[{"sku": "string"}]
)
COMPONENT = """
bounded_datasets:
  orders:
    input: {FileSource: {url: orders, format: jsonl, schema: COLUMNS}}
    key: id
    broadcast: true
applications:
  app:
    local_tables:
      last: {key: id, schema: COLUMNS, partitions: 2}
    steps:
      - input_stream: lake.visits
      - join: {table: orders, by: id}
      - send_to: last
"""


def test_nested_columns_are_those_of_python() -> None:
    application = component(COMPONENT.replace("COLUMNS", NESTED)).application()
    dataset, last = sorted(application.datasets, key=lambda each: each.name, reverse=True)
    assert last.input.schema == SCHEMA
    assert isinstance(dataset.input, FileSource)
    assert dataset.input.schema == SCHEMA
    model = AdjunctComponent.get_model_cls().model_json_schema()
    given = yaml.safe_load(COMPONENT.replace("COLUMNS", NESTED))
    Draft202012Validator(model).validate(given)
    with pytest.raises(ValidationError):
        Draft202012Validator(model).validate(
            yaml.safe_load(COMPONENT.replace("COLUMNS", "{id: bigint, lines: [string, int]}"))
        )


def _columns(columns: dict[str, str]) -> dict[str, str]:
    return columns


def test_columns_of_a_table_get_the_texts_of_their_types() -> None:
    given = {"columns": yaml.safe_load(NESTED)}
    assert Translation(Source()).call(_columns, given, ATTRIBUTES) == SCHEMA.types


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ("{id: bigint, lines: [string, int]}", "lines"),
        ("{id: bigint, lines: []}", "lines"),
        ("{id: bigint, customer: {id: bigit}}", "bigit"),
        ("{id: bigint, customer: {id: 5}}", "id"),
    ],
)
def test_a_mistyped_part_is_refused_by_name(columns: str, named: str) -> None:
    with pytest.raises(ComponentError) as failure:
        component(COMPONENT.replace("COLUMNS", columns)).applications()
    assert named in failure.value.problem


PATHS = """
bounded_datasets:
  customers:
    input: {FileSource: {url: orders, format: jsonl, schema: COLUMNS}}
    key: customer.id
    columns: [id as order_no, customer.zip code as zip]
    partitions: 2
unbounded_datasets:
  newest:
    input: lake.orders
    key: customer.id as customer_id
    order_by: meta.seq
    partitions: 2
applications:
  app:
    steps:
      - input_stream: lake.visits
      - join: {table: customers, by: id}
      - join: {table: newest, by: {id: customer_id}, prefix: newest_}
"""


def test_paths_are_texts_in_yaml() -> None:
    application = component(PATHS.replace("COLUMNS", NESTED)).application()
    customers = application.dataset("customers")
    assert customers.key == ("id",)
    assert customers.columns.names == ("id", "order_no", "zip")
    assert customers.steps_to("zip") == ("customer", "zip code")
    newest = application.dataset("newest")
    assert (newest.key, newest.key_sources) == (("customer_id",), ("customer.id",))


KEYS = """
kafka:
  shop:
    bootstrap_servers: "127.0.0.1:1"
    topics:
      orders:
        KafkaTopic:
          value: {Json: "number INT, customer STRUCT<id: BIGINT>"}
          key: {KeyText: id BIGINT}
          key_paths: customer.id
bounded_datasets:
  customers: {input: lake.customers, key: person.id, partitions: 4}
applications:
  app:
    output_streams:
      lake.out: {key: customer.id, partitions: 4}
    local_tables:
      last: {key: customer.id, schema: {number: int, customer: {id: bigint}}, partitions: 4}
    steps:
      - input_stream: lake.visits
      - send_to: last
      - join: {table: customers, by: {customer.id: id}, select: [name]}
      - send_to: lake.out
"""
VISITS = Schema.of(number="int", customer={"id": "bigint"})
PERSONS = Schema.of(person={"id": "bigint"}, name="string")


@pytest.mark.spark
def test_keys_are_paths_in_yaml_too(spark: SparkSession) -> None:
    app = component(KEYS).application()
    streams = {
        "lake.visits": AppStream(VISITS, key="customer.id", partitions=4),
        "lake.customers": AppStream(PERSONS, key="`person`.id", partitions=4),
    }
    assert assert_plannable(app, streams).exchanges == ()
    topic = open_system(lake_in(InMemoryStore()), "shop").settings.topics["orders"]
    assert topic.key_names == ("customer.id",)
    with TestApplication(app, streams) as tested:
        tested.dataset("customers", [{"person": {"id": 7}, "name": "Ann"}])
        visits = [{"number": no, "customer": {"id": 7 + no % 2}} for no in range(4)]
        tested.input("lake.visits", visits, deleted=[{"customer": {"id": 8}}])
        with pytest.raises(ConfigurationError, match=r"customer\.id"):
            tested.input("lake.visits", [{"customer": {}}])
        result = tested.run(spark)
    assert sorted(result.output("lake.out"), key=repr) == [
        {**visits[0], "name": "Ann"},
        {**visits[2], "name": "Ann"},
    ]
    counted = {"rows": 1, "deleted": 1, "superseded": 3, "duplicate_batches": 0}
    assert result.counters["last"] == counted
