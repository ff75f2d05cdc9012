"""Formats of Kafka's messages for any schema, made without Adjunct."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import (
    Array,
    Map,
    Member,
    Struct,
    Type,
    decimal_digits,
    parse_type,
)
from dagster_adjunct.resources.streams.kafka.avro import Avro
from dagster_adjunct.resources.streams.kafka.protobuf import Protobuf

_AVRO: dict[str, Any] = {
    "int": "int",
    "bigint": "long",
    "string": "string",
    "boolean": "boolean",
    "float": "float",
    "double": "double",
    "binary": "bytes",
    "date": {"type": "int", "logicalType": "date"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros"},
}


def _members(schema: Schema) -> tuple[Member, ...]:
    return tuple(Member(field.name, parse_type(field.type)) for field in schema.fields)


def avro_of(schema: Schema) -> Avro:
    """Return the format of Avro records with the columns of the schema, all of which may be null."""
    return Avro(json.dumps(_avro_record(_members(schema), count())))


def _avro_record(members: tuple[Member, ...], numbers: count[int]) -> Any:
    name = f"R{next(numbers)}"
    fields = []
    for member in members:
        fields.append({"name": member.name, "type": _avro_type(member.type, numbers)})
    return {"type": "record", "name": name, "fields": fields}


def _avro_type(type_: Type, numbers: count[int]) -> Any:
    if isinstance(type_, Struct):
        return ["null", _avro_record(type_.members, numbers)]
    if isinstance(type_, Array):
        return ["null", {"type": "array", "items": _avro_type(type_.element, numbers)}]
    if isinstance(type_, Map):
        return ["null", {"type": "map", "values": _avro_type(type_.value, numbers)}]
    digits = decimal_digits(type_.name)
    if digits is None:
        return ["null", _AVRO[type_.name]]
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": digits[0]}
    return ["null", {**decimal, "scale": digits[1]}]


_PROTOBUF = {
    "int": "TYPE_INT32",
    "bigint": "TYPE_INT64",
    "string": "TYPE_STRING",
    "boolean": "TYPE_BOOL",
    "float": "TYPE_FLOAT",
    "double": "TYPE_DOUBLE",
    "binary": "TYPE_BYTES",
}


def protobuf_of(schema: Schema) -> Protobuf:
    """Return the format of Protobuf messages with the columns of the schema; simple ones are
    optional.
    """
    from google.protobuf import descriptor_pb2, timestamp_pb2

    descriptors = descriptor_pb2.FileDescriptorSet()
    timestamp_pb2.DESCRIPTOR.CopyToProto(descriptors.file.add())
    file = descriptors.file.add(
        name="drawn.proto",
        package="drawn",
        syntax="proto3",
        dependency=["google/protobuf/timestamp.proto"],
    )
    _add_message(file, _members(schema), "Drawn")
    return Protobuf(descriptors.SerializeToString(), "drawn.Drawn")


def _add_message(file: Any, members: tuple[Member, ...], name: str) -> None:
    message = file.message_type.add(name=name)
    for number, member in enumerate(members, 1):
        field = message.field.add(name=member.name, number=number, label=_label("OPTIONAL"))
        inner = f"{name}_{number}"
        if isinstance(member.type, Map):
            entry = message.nested_type.add(name=f"{member.name.title().replace('_', '')}Entry")
            entry.options.map_entry = True
            key = entry.field.add(name="key", number=1, label=_label("OPTIONAL"))
            _set_type(file, key, parse_type("string"), inner)
            value = entry.field.add(name="value", number=2, label=_label("OPTIONAL"))
            _set_type(file, value, member.type.value, inner)
            field.label = _label("REPEATED")
            field.type_name = f".drawn.{name}.{entry.name}"
            field.type = field.TYPE_MESSAGE
        elif isinstance(member.type, Array):
            field.label = _label("REPEATED")
            _set_type(file, field, member.type.element, inner)
        else:
            _set_type(file, field, member.type, inner)
            if field.type != field.TYPE_MESSAGE:
                field.proto3_optional = True
    for field in message.field:
        if field.proto3_optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")


def _label(name: str) -> Any:
    from google.protobuf import descriptor_pb2

    return getattr(descriptor_pb2.FieldDescriptorProto, f"LABEL_{name}")


def _set_type(file: Any, field: Any, type_: Type, inner: str) -> None:
    """Declare one value of a field; `inner` names the message of a struct."""
    if isinstance(type_, Struct):
        _add_message(file, type_.members, inner)
        field.type = field.TYPE_MESSAGE
        field.type_name = f".drawn.{inner}"
    elif str(type_) == "timestamp":
        field.type = field.TYPE_MESSAGE
        field.type_name = ".google.protobuf.Timestamp"
    else:
        field.type = getattr(field, _PROTOBUF[str(type_)])
