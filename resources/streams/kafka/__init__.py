"""Kafka as a stream system: exact ranges read by position, without a connector jar."""

from dagster_adjunct.resources.streams.kafka.settings import KafkaSettings, KafkaTopic, kafka_system

__all__ = ["KafkaSettings", "KafkaTopic", "kafka_system"]
