"""Kafka as a stream system: exact ranges read by position, without a connector jar."""

from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaSettings, KafkaTopic
from dagster_adjunct.resources.streams.kafka.register_kafka import kafka_system

__all__ = ["KafkaSettings", "KafkaTopic", "kafka_system"]
