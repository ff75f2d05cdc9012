"""The streams of a real broker over a lake in memory, and topics whose content the tests know by
their own account.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dagster_adjunct.resources.objects.lake import Lake, lake_in
from dagster_adjunct.resources.objects.store import InMemoryStore
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic
from dagster_adjunct.resources.streams.kafka.streams import KafkaStreams
from tests.resources.streams.kafka.topic_log import TopicLog
from tests.servers.kafka import KafkaServer

SystemOf = Callable[..., KafkaStreams]
NewLog = Callable[..., TopicLog]


@pytest.fixture
def lake() -> Lake:
    return lake_in(InMemoryStore())


@pytest.fixture
def system_of(kafka: KafkaServer, lake: Lake) -> SystemOf:
    """Make the system `kafka` with these settings."""

    def make(topics: dict[str, KafkaTopic] | None = None, **settings: Any) -> KafkaStreams:
        return KafkaStreams(
            lake, KafkaSettings("kafka", kafka.bootstrap, topics=topics or {}, **settings)
        )

    return make


@pytest.fixture
def system(system_of: SystemOf) -> KafkaStreams:
    return system_of()


@pytest.fixture
def new_log(kafka: KafkaServer) -> NewLog:
    """Make a topic of a name of its own, and keep account of what is in it."""
    return lambda partitions=1, **config: TopicLog(kafka, kafka.new_topic(partitions, **config))
