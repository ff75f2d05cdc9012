"""Registers a Kafka cluster as a system of streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.streams.interface.registered_systems import register_system
from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaSettings, KafkaTopic
from dagster_adjunct.resources.streams.kafka.security import Value

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.kafka.kafka_streams import KafkaStreams


@dataclass(frozen=True, slots=True)
class _Opener:
    """Gives the streams of a cluster, for the registry of systems."""

    settings: KafkaSettings

    def __call__(self, lake: Lake) -> KafkaStreams:
        from dagster_adjunct.resources.streams.kafka.kafka_streams import KafkaStreams

        return KafkaStreams(lake, self.settings)


_openers: dict[str, _Opener] = {}


def kafka_system(
    name: str,
    *,
    bootstrap_servers: str,
    client: Mapping[str, Value] | None = None,
    client_factory: str | None = None,
    topics: Mapping[str, KafkaTopic] | None = None,
    prefix: str = "",
) -> KafkaSettings:
    """Register a Kafka cluster as the stream system `name`, so that its streams are `NAME.STREAM`; return its settings.

    `client` has librdkafka settings, which are passed through; secrets stand as "env:NAME". `client_factory`
    ("module:function") returns more of them in each process, such as token callbacks. `topics` declares streams; any
    other name is the topic of that name, with raw keys and values. A stream that Adjunct creates is the topic
    `prefix` + name. The same call may come again. Raises ConfigurationError.
    """
    settings = KafkaSettings(name, bootstrap_servers, dict(client or {}), client_factory, dict(topics or {}), prefix)
    opener = _openers.get(name)
    if opener is None or opener.settings != settings:
        opener = _Opener(settings)
    register_system(name, opener)
    _openers[name] = opener
    return settings
