"""Iceberg and Delta tables as datasets that YAML declares."""

from __future__ import annotations

from dagster_adjunct import Schema
from dagster_adjunct.exchange import IcebergTable
from dagster_adjunct.sources import DeltaVersions, IcebergVersions
from tests.orchestration.dagster.test_components import component

DECLARED = """
bounded_datasets:
  catalogue:
    input:
      DeltaVersions: {url: products, schema: {sku: string, price: bigint}, take: newest}
    key: sku
    broadcast: true
  releases:
    input:
      IcebergVersions:
        table: {IcebergTable: {identifier: shop.products, catalog: warehouse}}
        schema: {sku: string, price: bigint}
        tags: "v*"
    key: sku
    broadcast: true
applications:
  prices:
    steps:
      - input_stream: {name: lake.orders}
      - join: {table: catalogue, by: sku}
      - join: {table: releases, by: sku, select: []}
"""


def test_states_of_tables_are_declared_in_yaml() -> None:
    (application,) = component(DECLARED).applications().values()
    schema = Schema.of(sku="string", price="bigint")
    assert {dataset.name: dataset.input for dataset in application.datasets} == {
        "catalogue": DeltaVersions("products", schema, take="newest"),
        "releases": IcebergVersions(
            IcebergTable("shop.products", catalog="warehouse"), schema, tags="v*"
        ),
    }
