"""Kafka as a stream system: exact ranges read by position, without a connector jar."""
