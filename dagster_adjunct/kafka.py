"""Kafka as a system of streams: its settings, its topics, and the formats of their records."""

from dagster_adjunct.resources.streams.kafka.avro import Avro as Avro
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings as KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json as Json
from dagster_adjunct.resources.streams.kafka.formats import KeyText as KeyText
from dagster_adjunct.resources.streams.kafka.formats import Raw as Raw
from dagster_adjunct.resources.streams.kafka.formats import Text as Text
from dagster_adjunct.resources.streams.kafka.protobuf import Protobuf as Protobuf
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic as KafkaTopic
from dagster_adjunct.resources.streams.kafka.schema_registry import SchemaRegistry as SchemaRegistry
from dagster_adjunct.resources.streams.kafka.streams import kafka_system as kafka_system
