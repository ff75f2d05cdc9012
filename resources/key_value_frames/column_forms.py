"""What keys and values of a key-value table are in a DataFrame, by the serializer that they are stored with.

TextSerializer       string
IntegerSerializer    bigint
BytesSerializer      binary
JsonSerializer       string: the JSON
ModelSerializer      string: the model's JSON
AvroSerializer       string: JSON as Avro writes it (of a union, {"type": value})
any other            binary: the bytes that it made
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.key_value.avro_serializer import AvroSerializer
from dagster_adjunct.resources.key_value.json_serializers import JsonSerializer, ModelSerializer
from dagster_adjunct.resources.key_value.serializers import IntegerSerializer, Serializer, TextSerializer


@dataclass(frozen=True, slots=True)
class ColumnForm:
    """A column's Spark type, and what is between its values and stored bytes. Both raise SerializationError."""

    type: str
    from_bytes: Callable[[bytes], Any]
    to_bytes: Callable[[Any], bytes]


def form_of(serializer: Serializer[Any]) -> ColumnForm:
    """Return the form of what this serializer writes."""
    if isinstance(serializer, TextSerializer):
        return ColumnForm("string", serializer.from_bytes, serializer.to_bytes)
    if isinstance(serializer, IntegerSerializer):
        return ColumnForm("bigint", serializer.from_bytes, serializer.to_bytes)
    if isinstance(serializer, JsonSerializer | ModelSerializer):
        text = TextSerializer()
        return ColumnForm(
            "string", text.from_bytes, lambda json: serializer.to_bytes(serializer.from_bytes(text.to_bytes(json)))
        )
    if isinstance(serializer, AvroSerializer):
        return ColumnForm(
            "string",
            lambda stored: serializer.to_json(serializer.from_bytes(stored)),
            lambda json: serializer.to_bytes(serializer.from_json(json)),
        )
    return ColumnForm("binary", bytes, bytes)
