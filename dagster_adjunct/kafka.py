"""Kafka as a system of streams: its settings, its topics, and the formats of their records."""

from __future__ import annotations

from dagster_adjunct.resources.streams.kafka.avro import Avro
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText, Raw, Text
from dagster_adjunct.resources.streams.kafka.protobuf import Protobuf
from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry
from dagster_adjunct.resources.streams.kafka.streams import KafkaSettings, KafkaTopic, kafka_system

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
