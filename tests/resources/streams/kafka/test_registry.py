"""Schemas by id from a real registry: each message is read as its writer wrote it; what goes
wrong is told apart.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import pickle
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import fastavro
import pytest
import requests

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    SchemaMismatchError,
    StreamUnavailableError,
)
from dagster_adjunct.resources.streams.kafka.avro import Avro
from dagster_adjunct.resources.streams.kafka.protobuf import Protobuf
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry
from tests.resources.streams.kafka.messages import (
    avro_schema,
    descriptor_set,
    message_class,
    read,
    written,
)
from tests.servers.ports import free_port

server = pytest.mark.server

MILLIS = {"type": "long", "logicalType": "timestamp-millis"}
OLD = avro_schema(("tailnum", "string"), ("seats", "int"), ("maker", "string"), ("at", "long"))
NEW = avro_schema(
    ("tailnum", "string"), ("seats", "long"), ("at", MILLIS), ("engines", "int"), engines=2
)
PROTO = """syntax = "proto3"; package air;
message Plane { string tailnum = 1; message Seat { string row = 1; } }
message Flight { string tailnum = 1; }"""


@pytest.fixture
def subject() -> str:
    return f"planes-{uuid4().hex[:8]}-value"


def post(url: str, subject: str, text: str, kind: str = "AVRO", **more: Any) -> int:
    """Register a schema as a producer does, without anything of Adjunct's."""
    registered = {"schema": text, "schemaType": kind, **more}
    answer = requests.post(f"{url}/subjects/{subject}/versions", json=registered, timeout=10)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["id"])


def framed(number: int, schema: str, row: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(schema)), row)
    return struct.pack(">bI", 0, number) + out.getvalue()


@server
def test_each_message_is_read_by_its_writers_schema_and_resolved_to_the_declared_one(
    registry_url: str, subject: str
) -> None:
    old, new = post(registry_url, subject, OLD), post(registry_url, f"{subject}-2", NEW)
    topic = KafkaTopic(value=Avro(NEW, registry=SchemaRegistry(registry_url)))
    assert topic.schema().ddl() == "`tailnum` STRING, `seats` BIGINT, `at` TIMESTAMP, `engines` INT"
    at = dt.datetime(2024, 1, 1, 0, 0, 0, 5000, tzinfo=dt.UTC)
    messages = [
        framed(old, OLD, {"tailnum": "N1", "seats": 3, "maker": "X", "at": 1_704_067_200_005}),
        framed(new, NEW, {"tailnum": "N2", "seats": 2**40, "at": at, "engines": 4}),
        None,
    ]
    assert read(topic, *messages) == [
        {"tailnum": "N1", "seats": 3, "at": at, "engines": 2},  # added fields have their default
        {"tailnum": "N2", "seats": 2**40, "at": at, "engines": 4},
        dict.fromkeys(topic.schema().names),
    ]


@server
def test_an_alias_reads_a_field_that_its_writer_calls_otherwise(
    registry_url: str, subject: str
) -> None:
    writer = avro_schema(("tailnum", "string"), ("__deleted", "string"))
    reader = writer.replace('"name": "__deleted"', '"name": "deleted", "aliases": ["__deleted"]')
    number = post(registry_url, subject, writer)
    topic = KafkaTopic(value=Avro(reader, registry=SchemaRegistry(registry_url)))
    message = framed(number, writer, {"tailnum": "N1", "__deleted": "true"})
    assert read(topic, message) == [{"tailnum": "N1", "deleted": "true"}]


@server
def test_a_schema_that_builds_on_others_is_read_with_them(registry_url: str, subject: str) -> None:
    plane = '{"type":"record","name":"Plane","namespace":"air","fields":[{"name":"seats","type":"int"}]}'
    post(registry_url, f"{subject}-plane", plane)
    text = avro_schema(("tailnum", "string"), ("plane", "air.Plane"))
    references = [{"name": "air.Plane", "subject": f"{subject}-plane", "version": 1}]
    number = post(registry_url, subject, text, references=references)
    whole = avro_schema(("tailnum", "string"), ("plane", json.loads(plane)))
    topic = KafkaTopic(value=Avro(whole, registry=SchemaRegistry(registry_url)))
    message = framed(number, whole, {"tailnum": "N1", "plane": {"seats": 3}})
    assert read(topic, message) == [{"tailnum": "N1", "plane": {"seats": 3}}]


@server
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (b"\1\0\0\0\1abc", "not Avro with a schema id: it begins with 0100000001"),
        (b"\0\0\0", "not Avro with a schema id: it begins with 000000"),
        (b"", "not Avro with a schema id: it begins with nothing"),
        (b"\0\x7f\xff\xff\xff\0", "has no schema 2147483647"),
        (b"PROTOBUF", "of the registry is PROTOBUF, not Avro"),
        (b"TRUNCATED", "not Avro of its schema: it ends too early"),
        (
            b"INCOMPATIBLE",
            "its writer's schema can't be resolved to the declared one: .*int is not string",
        ),
    ],
)
def test_a_message_whose_schema_can_not_be_used_is_refused_or_kept(
    registry_url: str, subject: str, message: bytes, reason: str
) -> None:
    registry = SchemaRegistry(registry_url)
    if message == b"PROTOBUF":
        message = struct.pack(">bI", 0, post(registry_url, subject, PROTO, "PROTOBUF")) + b"\0"
    elif message == b"TRUNCATED":
        message = framed(
            post(registry_url, subject, OLD),
            OLD,
            {"tailnum": "N1", "seats": 3, "maker": "X", "at": 1},
        )[:-2]
    elif message == b"INCOMPATIBLE":
        other = avro_schema(("tailnum", "int"))
        message = framed(post(registry_url, subject, other), other, {"tailnum": 1})
    with pytest.raises(SchemaMismatchError, match=reason):
        read(KafkaTopic(value=Avro(NEW, registry=registry)), message)
    records = read(KafkaTopic(value=Avro(NEW, registry=registry, malformed="bad")), message)
    assert records == [dict.fromkeys(("tailnum", "seats", "at", "engines")) | {"bad": message}]


@server
def test_writing_registers_the_schema_once_and_others_can_read_it(
    registry_url: str, subject: str
) -> None:
    registry = SchemaRegistry(registry_url)
    topic = KafkaTopic(value=Avro(NEW, registry=registry, subject=subject))
    row = {"tailnum": "N1", "seats": 1, "at": dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "engines": 3}
    message = written(topic, row)[0]["__value"]
    magic, number = struct.unpack(">bI", message[:5])
    answer = requests.get(f"{registry_url}/subjects/{subject}/versions/latest", timeout=10).json()
    assert (magic, number) == (0, answer["id"])
    record = fastavro.schemaless_reader(io.BytesIO(message[5:]), json.loads(answer["schema"]), None)
    assert record == row
    assert written(topic, row)[0]["__value"] == message
    assert requests.get(f"{registry_url}/subjects/{subject}/versions", timeout=10).json() == [1]
    assert registry.latest(subject).id == number


@server
def test_a_schema_that_the_registry_refuses_is_not_written_with(
    registry_url: str, subject: str
) -> None:
    post(registry_url, subject, OLD)
    rule = {"compatibility": "BACKWARD"}
    assert (
        requests.put(f"{registry_url}/config/{subject}", json=rule, timeout=10).status_code == 200
    )
    bad = avro_schema(("tailnum", "int"))
    topic = KafkaTopic(value=Avro(bad, registry=SchemaRegistry(registry_url), subject=subject))
    with pytest.raises(SchemaMismatchError, match="rejects the schema"):
        written(topic, {"tailnum": 1})
    with pytest.raises(SchemaMismatchError, match="has no subject 'nothing-value'"):
        SchemaRegistry(registry_url).latest("nothing-value")


@server
@pytest.mark.parametrize("name", ["air.Plane", "air.Flight", "air.Plane.Seat"])
def test_protobuf_with_a_registry_has_the_id_and_the_place_of_its_type(
    registry_url: str, subject: str, name: str
) -> None:
    # The file that the descriptor set has: Plane, then Flight. Indexes are zigzag varints, their
    # count first.
    indexes = {"air.Plane": b"\0", "air.Flight": b"\2\2", "air.Plane.Seat": b"\4\0\0"}[name]
    number = post(registry_url, subject, PROTO, "PROTOBUF")
    declared = Protobuf(
        descriptor_set(), name, registry=SchemaRegistry(registry_url), subject=subject
    )
    field = "row" if name.endswith("Seat") else "tailnum"
    sent = message_class("air.Plane").Seat if name.endswith("Seat") else message_class(name)
    message = struct.pack(">bI", 0, number) + indexes + sent(**{field: "N1"}).SerializeToString()
    topic = KafkaTopic(value=declared)
    row = read(topic, message)[0]
    assert row[field] == "N1"
    if name != "air.Flight":  # whose unset fields are written too, in another form
        assert written(topic, row)[0]["__value"] == message
    other = struct.pack(">bI", 0, number) + b"\2\x0e" + message[5 + len(indexes) :]
    with pytest.raises(
        SchemaMismatchError, match=r"another message type of its file: indexes \[7\]"
    ):
        read(topic, other)
    for cut in (message[:4], message[:5], message[:5] + b"\xff"):
        with pytest.raises(SchemaMismatchError, match=r"with a schema id|indexes can't be read"):
            read(topic, cut)
    avro = post(registry_url, f"{subject}-avro", OLD)
    with pytest.raises(SchemaMismatchError, match="is AVRO, not Protobuf"):
        read(topic, struct.pack(">bI", 0, avro) + b"\0")


@pytest.mark.lengthy
def test_a_registry_that_is_down_is_a_passing_trouble_and_says_which() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    topic = KafkaTopic(value=Avro(NEW, registry=SchemaRegistry(url), malformed="bad"))
    with pytest.raises(StreamUnavailableError) as caught:  # also where malformed messages are kept
        read(topic, b"\0\0\0\0\1abc")
    assert caught.value.url == url
    with pytest.raises(StreamUnavailableError) as caught:
        written(
            topic,
            {
                "tailnum": "N1",
                "seats": 1,
                "at": dt.datetime(2024, 1, 1, tzinfo=dt.UTC),
                "engines": 3,
            },
        )
    assert caught.value.url == url


@pytest.mark.parametrize(
    ("url", "login"),
    [
        ("registry:8081", None),
        ("http://me:secret@registry", None),
        ("http://registry", "me:secret"),
    ],
)
def test_a_registry_with_a_secret_in_plain_text_is_refused(url: str, login: str | None) -> None:
    with pytest.raises(ConfigurationError) as caught:
        SchemaRegistry(url, login=login)
    assert "secret@" not in str(caught.value)
    assert "me:secret" not in str(caught.value)


def test_the_certificates_of_a_registry_may_be_given_as_a_path() -> None:
    registry = SchemaRegistry("https://registry", ca_location=Path("/etc/authority.pem"))
    assert pickle.loads(pickle.dumps(registry)) == registry


class _Guarded(BaseHTTPRequestHandler):
    """Answers as a registry does, after as many troubles as it was told, to who logs in."""

    troubles: list[int]
    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        status = self.troubles.pop(0) if self.troubles else 200
        if self.headers.get("Authorization") not in ("Basic bWU6cGFzczp3b3Jk", "Bearer a-token"):
            status = 401
        body = json.dumps(
            {"schema": OLD} if status == 200 else {"error_code": status, "message": "no"}
        ).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        """Who may not register a schema may still look up its id."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        forbidden = self.path.endswith("/versions")
        body = json.dumps(
            {"error_code": 40301, "message": "no"} if forbidden else {"id": 258}
        ).encode()
        self.send_response(403 if forbidden else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def guarded(*troubles: int) -> Iterator[tuple[str, list[str]]]:
    """A small server in the registry's place: the real one here knows no logins and has no
    troubles.
    """
    asked: list[str] = []
    handler = type("Guarded", (_Guarded,), {"troubles": list(troubles), "asked": asked})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}", asked
        listening.shutdown()


@pytest.mark.lengthy
def test_writing_needs_no_right_to_register_a_schema_that_is_there() -> None:
    with guarded() as (url, asked):
        topic = KafkaTopic(
            "planes", Avro(avro_schema(("seats", "int")), registry=SchemaRegistry(url))
        )
        assert written(topic, {"seats": 1})[0]["__value"] == b"\0\0\0\1\2\2"
        assert asked == ["/subjects/planes-value"]


@pytest.mark.lengthy
@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"login": "env:REGISTRY_LOGIN"}, "me:pass:word"),
        ({"token": "env:REGISTRY_LOGIN"}, "a-token"),
    ],
)
def test_a_registry_is_logged_in_to_and_asked_once_for_each_schema(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], value: str
) -> None:
    row = {"tailnum": "N1", "seats": 3, "maker": "X", "at": 1}
    monkeypatch.setenv("REGISTRY_LOGIN", value)
    with guarded(503, 429) as (url, asked):
        registry = SchemaRegistry(url, **given)
        topic = KafkaTopic(value=Avro(OLD, registry=registry))
        for _ in range(2):
            assert read(topic, *[framed(7, OLD, row)] * 3) == [row] * 3
        assert asked == ["/schemas/ids/7"] * 3  # two of them came at a bad moment
        assert value.encode() not in pickle.dumps(topic)
        assert value not in repr(topic)
        monkeypatch.setenv("REGISTRY_LOGIN", "me:wrong")
        with pytest.raises(ConfigurationError, match=r"HTTP 401.*login") as caught:
            read(topic, framed(8, OLD, row))
        assert "wrong" not in str(caught.value)
        monkeypatch.delenv("REGISTRY_LOGIN")
        with pytest.raises(ConfigurationError) as caught:
            read(topic, framed(9, OLD, row))
        assert caught.value.setting == "REGISTRY_LOGIN"


@server
def test_a_field_that_its_writer_has_in_another_case_is_not_its_default(
    registry_url: str, subject: str
) -> None:
    writer = avro_schema(("tailnum", "string"), ("Seats", "int"))
    reader = avro_schema(("tailnum", "string"), ("seats", ["null", "int"])).replace(
        "}]}", ', "default": null}]}'
    )
    number = post(registry_url, subject, writer)
    message = framed(number, writer, {"tailnum": "N1", "Seats": 3})
    registry = SchemaRegistry(registry_url)
    with pytest.raises(SchemaMismatchError, match="no field 'seats', but 'Seats'"):
        read(KafkaTopic(value=Avro(reader, registry=registry)), message)
    alias = reader.replace('"name": "seats"', '"name": "seats", "aliases": ["Seats"]')
    assert read(KafkaTopic(value=Avro(alias, registry=registry)), message) == [
        {"tailnum": "N1", "seats": 3}
    ]
