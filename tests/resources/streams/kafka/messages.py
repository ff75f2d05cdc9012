"""Batches of Kafka messages as the source makes them, and formats that the tests of reading and
writing share.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pyarrow as pa

from dagster_adjunct.resources.streams.kafka.record_formats import (
    KafkaTopic,
    create_decoder,
    create_encoder,
)

STREAM = "kafka.flights"
FIRST = 500
Header = tuple[str, bytes | None]
_HEADERS = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
_NOON = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)


def batch_of(
    values: Sequence[bytes | None],
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Sequence[Header]] | None = None,
) -> pa.RecordBatch:
    """Return messages of partition 3, at the offsets from FIRST on."""
    rows = len(values)
    header_lists = [
        [{"name": name, "value": value} for name, value in pairs]
        for pairs in headers or [()] * rows
    ]
    columns = {
        "__partition": pa.array([3] * rows, pa.int32()),
        "__offset": pa.array(range(FIRST, FIRST + rows), pa.int64()),
        "__timestamp": pa.array([_NOON] * rows, pa.timestamp("us", tz="UTC")),
        "__key": pa.array(keys or [None] * rows, pa.binary()),
        "__value": pa.array(values, pa.binary()),
        "__headers": pa.array(header_lists, _HEADERS),
        "__epoch": pa.array([0] * rows, pa.int32()),
    }
    return pa.RecordBatch.from_pydict(columns)


def read(topic: KafkaTopic, *values: bytes | None, **more: Any) -> list[dict[str, Any]]:
    """Return the records of these messages, without META."""
    records = create_decoder(topic, STREAM)(batch_of(values, **more))
    return records.select(topic.schema().names).to_pylist()


def written(
    topic: KafkaTopic, *rows: dict[str, Any], tombstones: Sequence[bool] | None = None
) -> list[dict[str, Any]]:
    """Return the messages of these records: `__key`, `__value`, and `__headers` where they are
    declared.
    """
    batch = pa.RecordBatch.from_pylist(list(rows), schema=topic.schema().to_arrow())
    if tombstones is not None:
        batch = batch.append_column("__tombstone", pa.array(tombstones))
    return create_encoder(topic, STREAM)(batch).to_pylist()


def avro_schema(*fields: tuple[str, Any], **defaults: Any) -> str:
    """Return a record schema; `defaults` are the fields' by name."""
    made = [
        {"name": name, "type": kind} | ({"default": defaults[name]} if name in defaults else {})
        for name, kind in fields
    ]
    return json.dumps({"type": "record", "name": "Flight", "namespace": "air", "fields": made})


def descriptor_set() -> bytes:
    """Return a set with the message air.Flight, as protoc would make it of this file, and with it
    air.Plane:

    syntax = "proto3"; package air; message Plane { string tailnum = 1; message Seat { string row =
    1; } } enum Status { UNKNOWN = 0; LATE = 1; } message Flight { string tailnum = 1; int32 number
    = 2; optional int32 delay = 3; uint64 id = 4; Status status = 5;
      google.protobuf.Timestamp at = 6; google.protobuf.Int64Value weight = 7; Plane plane = 8;
      repeated int64 legs = 9; repeated Plane spare = 10; bytes raw = 11; double lat = 12; bool on =
      13; map<string, int32> seats = 14; sint64 debt = 15; float ratio = 16; uint32 gate = 17; }
    """
    from google.protobuf import descriptor_pb2, timestamp_pb2, wrappers_pb2

    kinds = descriptor_pb2.FieldDescriptorProto
    descriptors = descriptor_pb2.FileDescriptorSet()
    for module in (timestamp_pb2, wrappers_pb2):
        module.DESCRIPTOR.CopyToProto(descriptors.file.add())
    file = descriptors.file.add(
        name="air.proto", package="air", syntax="proto3",
        dependency=["google/protobuf/timestamp.proto", "google/protobuf/wrappers.proto"],
    )  # fmt: skip
    plane = file.message_type.add(name="Plane")
    plane.field.add(name="tailnum", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    seat = plane.nested_type.add(name="Seat")
    seat.field.add(name="row", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    status = file.enum_type.add(name="Status")
    for number, name in enumerate(("UNKNOWN", "LATE")):
        status.value.add(name=name, number=number)
    flight = file.message_type.add(name="Flight")
    entry = flight.nested_type.add(name="SeatsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL)
    entry.field.add(name="value", number=2, type=kinds.TYPE_INT32, label=kinds.LABEL_OPTIONAL)
    flight.oneof_decl.add(name="_delay")
    for number, (name, kind, repeated, of) in enumerate(
        (
            ("tailnum", kinds.TYPE_STRING, False, None),
            ("number", kinds.TYPE_INT32, False, None),
            ("delay", kinds.TYPE_INT32, False, None),
            ("id", kinds.TYPE_UINT64, False, None),
            ("status", kinds.TYPE_ENUM, False, ".air.Status"),
            ("at", kinds.TYPE_MESSAGE, False, ".google.protobuf.Timestamp"),
            ("weight", kinds.TYPE_MESSAGE, False, ".google.protobuf.Int64Value"),
            ("plane", kinds.TYPE_MESSAGE, False, ".air.Plane"),
            ("legs", kinds.TYPE_INT64, True, None),
            ("spare", kinds.TYPE_MESSAGE, True, ".air.Plane"),
            ("raw", kinds.TYPE_BYTES, False, None),
            ("lat", kinds.TYPE_DOUBLE, False, None),
            ("on", kinds.TYPE_BOOL, False, None),
            ("seats", kinds.TYPE_MESSAGE, True, ".air.Flight.SeatsEntry"),
            ("debt", kinds.TYPE_SINT64, False, None),
            ("ratio", kinds.TYPE_FLOAT, False, None),
            ("gate", kinds.TYPE_UINT32, False, None),
        ),
        1,
    ):
        label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
        field = flight.field.add(name=name, number=number, type=kind, label=label)
        if of is not None:
            field.type_name = of
        if name == "delay":
            field.proto3_optional, field.oneof_index = True, 0
    return descriptors.SerializeToString()


@lru_cache
def message_class(name: str) -> Any:
    """Return the class of a message of `descriptor_set`, made by Protobuf alone."""
    from google.protobuf import descriptor_pb2, message_factory

    files = descriptor_pb2.FileDescriptorSet.FromString(descriptor_set()).file
    return message_factory.GetMessages(list(files))[name]
