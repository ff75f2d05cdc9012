"""`adjunct schema infer`: schemas of files, printed as Python and YAML declare them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
import yaml
from click.testing import CliRunner
from confluent_kafka import Producer

from dagster_adjunct import Schema
from dagster_adjunct.assets.exchange.samples import find_files, infer_from_files
from dagster_adjunct.errors import ConfigurationError, SchemaMismatchError, StreamNotFoundError
from dagster_adjunct.orchestration.cli.main import root
from dagster_adjunct.resources.files.formats import DeclaredFiles

if TYPE_CHECKING:
    from tests.servers.kafka import KafkaServer
    from tests.servers.s3 import S3Server

ORDERS = [
    {"id": 1, "customer": {"id": 7, "zip code": "89073"}, "lines": [{"sku": "a", "price": 2}]},
    {"id": 2, "customer": None, "lines": [{"sku": "b\n", "price": 1.5}], "at": "2026-01-31"},
]
SCHEMA = Schema.of(
    id="bigint",
    customer={"id": "bigint", "zip code": "string"},
    lines=[{"sku": "string", "price": "double"}],
    at="string",
)


@pytest.fixture
def orders(tmp_path: Path) -> str:
    path = tmp_path / "orders.jsonl"
    path.write_text("".join(json.dumps(order) + "\n" for order in ORDERS))
    return str(path)


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(root, ["schema", "infer", *arguments], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.exception
    return result.output


def evaluated(text: str) -> Any:
    names: dict[str, Any] = {"Schema": Schema}
    exec(text, names)
    return names["SCHEMA"]


def test_what_it_prints_is_python_and_yaml_as_they_are(orders: str) -> None:
    text = printed(orders)
    assert evaluated(text) == SCHEMA
    assert "lines[].price: 1 whole number (2), 1 fraction (1.5)" in text
    assert "at: only in 1 of 2 records" in text
    declared = yaml.safe_load(printed(orders, "--yaml"))
    assert Schema.of(declared["schema"]) == SCHEMA
    shown = json.loads(printed(orders, "--rows", "1", "--times", "--json"))
    assert shown["records"] == 1
    assert Schema.from_json(shown["schema"]).names == ("id", "customer", "lines")


def test_columns_of_csv_can_be_read_as_what_is_inferred(tmp_path: Path) -> None:
    path = tmp_path / "readings.csv.gz"
    text = (
        'sensor,value,at,code,"a b"\na,1,2026-01-31T10:00:00Z,007,\nb,1.5,2026-02-01 10:00Z,8,""\n'
    )
    path.write_bytes(gzip.compress(text.encode()))
    inferred = infer_from_files([str(path)], rows=10)
    assert inferred.schema == Schema.of(
        {
            "sensor": "string",
            "value": "double",
            "at": "timestamp",
            "code": "string",
            "a b": "string",
        }
    )
    sampled = find_files([str(path)])[0]
    declared = DeclaredFiles(sampled.tree, "csv", inferred.schema, "file")
    assert sum(table.num_rows for _, table in declared.tables(sampled.file)) == 2
    assert evaluated(printed(str(path))) == inferred.schema


def test_parquet_keeps_the_types_that_it_declares(tmp_path: Path) -> None:
    schema = Schema.of(id="int", lines=[{"price": "decimal(9,2)"}], views="map<string,smallint>")
    rows = [{"id": n, "lines": None, "views": [("a", n)]} for n in range(3)]
    table = pa.Table.from_pylist(rows, schema=schema.to_arrow())
    table = table.append_column("nothing", pa.nulls(3))
    pq.write_table(table, tmp_path / "a.parquet")
    inferred = infer_from_files([str(tmp_path)], rows=10)
    assert inferred.schema == Schema.of({**schema.types, "nothing": "string"})
    assert inferred.unique == ("id",)
    assert [doubt.path for doubt in inferred.doubts] == ["nothing"]
    pq.write_table(table.drop_columns(["id"]), tmp_path / "b.parquet")
    with pytest.raises(SchemaMismatchError):
        infer_from_files([str(tmp_path)], rows=10)


def test_each_file_gives_its_share_of_the_sample(tmp_path: Path) -> None:
    for name in ("a", "b"):
        lines = "".join(f'{{"{name}{n}": 1}}\n' for n in range(3))
        (tmp_path / f"{name}.jsonl").write_text(lines)
    assert infer_from_files([str(tmp_path)], rows=4).schema.names == ("a0", "a1", "b0", "b1")


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.jsonl", '{"a": 1}\n[1]\n', 2),
        ("a.jsonl", '{"a": 1}\n\n{"a": NaN}\n', 3),
        ("a.jsonl", '{"a": 1, "a": 2}\n', 1),
        ("a.json", '[\n{"a": 1}\n]\n', 1),
        ("a.csv", "", 1),
    ],
)
def test_a_line_that_is_no_record_is_named(name: str, text: str, line: int, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SchemaMismatchError) as failure:
        infer_from_files([str(tmp_path / name)], rows=10)
    assert failure.value.line == line


def test_files_that_are_no_sample_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n")
    (tmp_path / "b.csv").write_text("a\n")
    for urls in (["nowhere.csv"], [str(tmp_path)]):
        with pytest.raises(ConfigurationError):
            infer_from_files(urls, rows=10)
    with pytest.raises(SchemaMismatchError):
        infer_from_files([str(tmp_path / "a.jsonl")], rows=10)


@pytest.mark.server
def test_the_schema_of_a_topic_is_that_of_its_newest_records(kafka: KafkaServer) -> None:
    topic = kafka.new_topic(2)
    producer = Producer({"bootstrap.servers": kafka.bootstrap})
    for number, order in enumerate([{"old": True}, *ORDERS, *ORDERS]):
        producer.produce(topic, json.dumps(order), partition=0 if number < 3 else 1)
    producer.produce(topic, None, "7", partition=1)  # a tombstone has no columns
    producer.flush(30)
    assert evaluated(printed(topic, "--kafka", kafka.bootstrap, "--rows", "4")) == SCHEMA
    assert "old" in evaluated(printed(topic, "--kafka", kafka.bootstrap))
    arguments = ["schema", "infer", "no-such-topic", "--kafka", kafka.bootstrap]
    assert isinstance(CliRunner().invoke(root, arguments).exception, StreamNotFoundError)


@pytest.mark.server
def test_the_schema_of_a_topic_is_the_registered_one(registry_url: str) -> None:
    topic = f"orders-{uuid4().hex[:8]}"
    customer = {"type": "record", "name": "C", "fields": [{"name": "id", "type": "long"}]}
    fields = [{"name": "id", "type": "long"}, {"name": "customer", "type": ["null", customer]}]
    schema = json.dumps({"type": "record", "name": "O", "fields": fields})
    url = f"{registry_url}/subjects/{topic}-value/versions"
    requests.post(url, json={"schema": schema}, timeout=10).raise_for_status()
    found = evaluated(printed(topic, "--registry", registry_url))
    assert found == Schema.of(id="bigint", customer={"id": "bigint"})


@pytest.mark.server
@pytest.mark.parametrize("names", [["day/a.jsonl"], ["day"], ["day/"]])
def test_the_schema_of_files_in_s3_is_inferred(
    versitygw: S3Server, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    versitygw.set_in(monkeypatch)
    bucket = versitygw.bucket()
    put = versitygw.client().put_object
    lines = "".join(json.dumps(order) + "\n" for order in ORDERS)
    put(Bucket=bucket, Key="in/day/a.jsonl", Body=lines.encode())
    put(Bucket=bucket, Key="in/day/a.jsonl.old", Body=b"a neighbour")
    if names != ["day/a.jsonl"]:
        versitygw.client().delete_object(Bucket=bucket, Key="in/day/a.jsonl.old")
    assert evaluated(printed(*(f"s3://{bucket}/in/{name}" for name in names))) == SCHEMA
