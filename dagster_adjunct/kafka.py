"""Kafka as a system of streams: its settings, its topics, and the formats of their records."""

from __future__ import annotations

from dagster_adjunct._arguments import guard
from dagster_adjunct.resources.streams.kafka import KafkaSettings, KafkaTopic, kafka_system
from dagster_adjunct.resources.streams.kafka.avro_format import Avro
from dagster_adjunct.resources.streams.kafka.json_format import Json
from dagster_adjunct.resources.streams.kafka.protobuf_format import Protobuf
from dagster_adjunct.resources.streams.kafka.raw_format import KeyText, Raw, Text
from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry

__all__ = [
    "Avro",
    "Json",
    "KafkaSettings",
    "KafkaTopic",
    "KeyText",
    "Protobuf",
    "Raw",
    "SchemaRegistry",
    "Text",
    "kafka_system",
]

guard(globals(), __all__)
