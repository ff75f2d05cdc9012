"""Topics whose keys are values inside columns, against plain Python."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.records import fit_to_schema, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.avro import Avro
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText
from dagster_adjunct.resources.streams.kafka.record_formats import (
    KafkaTopic,
    create_decoder,
    encode_table,
)
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from dagster_adjunct.resources.streams.system import OffsetRange
from tests.resources.streams.kafka.messages import STREAM, avro_schema, batch_of
from tests.resources.streams.kafka.test_nested_formats import as_avro
from tests.servers.kafka import KafkaServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = list[dict[str, Any]]
ORDERS = Schema.of(no="int", customer={"id": "bigint", "home": {"city": "string"}})
ROWS: Rows = [
    {"no": 1, "customer": {"id": 7, "home": {"city": "Ulm"}}},
    {"no": 2, "customer": {"id": 8, "home": None}},
    {"no": 3, "customer": {"id": None, "home": {"city": "Bonn"}}},
    {"no": 4, "customer": None},
    {"no": 5, "customer": {"id": 7, "home": {"city": "Rom"}}},
]
AVRO_KEY = avro_schema(("id", ["null", "long"]), ("town", ["null", "string"]))
PATHS = ["customer.id", "customer.home.city as town"]
JSON_TOPIC = KafkaTopic(
    value=Json(ORDERS), key=Json("town STRING, id BIGINT"), key_paths=PATHS[::-1]
)
AVRO_TOPIC = KafkaTopic(value=Json(ORDERS), key=Avro(AVRO_KEY), key_paths=PATHS)


def key_of(row: dict[str, Any]) -> dict[str, Any]:
    customer = row["customer"] or {"id": None, "home": None}
    return {"id": customer["id"], "town": customer["home"] and customer["home"]["city"]}


def tombstone(row: dict[str, Any]) -> dict[str, Any]:
    """Return the record that the key alone makes: structs are null where they would be empty."""
    key = key_of(row)
    home = None if key["town"] is None else {"city": key["town"]}
    known = key["id"] is not None or home is not None
    return {"no": None, "customer": {"id": key["id"], "home": home} if known else None}


@pytest.mark.parametrize("topic", [JSON_TOPIC, AVRO_TOPIC], ids=["json", "avro"])
def test_keys_are_written_and_read_under_the_names_of_their_columns(topic: KafkaTopic) -> None:
    assert topic.schema() == ORDERS
    assert set(topic.key_names) == {"customer.id", "customer.home.city"}
    table = fit_to_schema(to_arrow_table(ROWS, "rows", ORDERS), ORDERS, "rows")
    keys = encode_table(table, topic, STREAM).column("__key").to_pylist()
    if topic is JSON_TOPIC:
        assert list(map(json.loads, keys)) == list(map(key_of, ROWS))
    else:
        assert keys == [as_avro(AVRO_KEY, key_of(row)) for row in ROWS]
    records = create_decoder(topic, STREAM)(batch_of([None] * len(ROWS), keys))
    assert records.select(ORDERS.names).to_pylist() == list(map(tombstone, ROWS))


@pytest.mark.parametrize(
    ("paths", "column"),
    [
        ("customer.no", "customer.no"),  # no such field
        ("customer.home.city", "city"),  # no column of the key
        ("customer.home.city as id", "id"),  # another type
        (["customer.id", "customer.id"], "id"),
        ("customer as id", "customer"),
    ],
)
def test_a_path_that_is_no_column_of_the_key_is_refused(paths: Any, column: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        KafkaTopic(value=Json(ORDERS), key=KeyText("id BIGINT"), key_paths=paths)
    assert failure.value.argument == "key_paths"
    with pytest.raises(ConfigurationError):
        KafkaTopic(value=Json(ORDERS), key_paths="customer.id")


@pytest.mark.spark
@pytest.mark.server
def test_a_created_topic_is_keyed_as_by_a_column(
    spark: SparkSession, kafka: KafkaServer, lake: Lake
) -> None:
    """Two paths with the same last step are a key, too: texts have no names."""
    schema = Schema.of(no="int", customer={"id": "bigint"}, shop={"id": "string"})
    rows: Rows = []
    for no in range(12):
        customer = None if no % 5 == 0 else {"id": no % 3}
        rows.append({"no": no, "customer": customer, "shop": {"id": f"s{no % 2}"}})
    flat = [
        {"no": row["no"], "a": row["customer"] and row["customer"]["id"], "b": row["shop"]["id"]}
        for row in rows
    ]
    streams = KafkaStreams(
        lake, KafkaSettings("kafka", kafka.bootstrap, prefix=f"{kafka.new_topic(1)}-")
    )
    options: dict[str, Any] = {"partitions": 3}
    streams.create("paths", schema=schema, key=["customer.id", "shop.id"], **options)
    flat_schema = Schema.of(no="int", a="bigint", b="string")
    streams.create("columns", schema=flat_schema, key=["a", "b"], **options)
    assert streams.info("paths").key == ("customer.id", "shop.id")
    table = fit_to_schema(to_arrow_table(rows, "rows", schema), schema, "rows")
    streams.append("paths", table.slice(0, 6), producer="p", sequence=1)
    streams.append("paths", spark.createDataFrame(table.slice(6)), producer="p", sequence=2)
    streams.append("columns", flat, producer="p", sequence=1)
    deleted = {"no": None, "customer": {"id": 2}, "shop": {"id": "s0"}, "__tombstone": True}
    streams.append("paths", [deleted], producer="p", sequence=3)

    def read(stream: str) -> list[dict[str, Any]]:
        ends = streams.upcoming(streams.partitions(stream))
        frame = streams.read(spark, {ssp: OffsetRange("0", end) for ssp, end in ends.items()})
        return frame.drop("__offset", "__timestamp", "__epoch").toArrow().to_pylist()

    found = read("paths")
    placed = {row["no"]: row.pop("__partition") for row in found}
    assert placed.pop(None) == placed[2]
    assert placed == {row["no"]: row["__partition"] for row in read("columns")}
    kept = sorted((row for row in found if not row.pop("__tombstone")), key=lambda row: row["no"])
    assert kept == rows
    deleted.pop("__tombstone")
    assert [row for row in found if row["no"] is None] == [deleted]
    again = KafkaStreams(lake, streams.settings)  # another process
    again.create("paths", schema=schema, key=["customer.id", "shop.id"], **options)
