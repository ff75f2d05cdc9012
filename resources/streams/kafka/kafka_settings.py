"""What a user declares of a Kafka cluster and its topics: plain values, picklable, without secrets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.streams.kafka.codec import Format
from dagster_adjunct.resources.streams.kafka.raw_format import Raw
from dagster_adjunct.resources.streams.kafka.security import Value, check_client

if TYPE_CHECKING:
    from dagster_adjunct.resources.schemas.schema import Schema

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """How the records of one topic are to be understood.

    `topic` is its name where the stream has another. `value` and `key` are formats; `headers` names a column that
    gets the headers as JSON: a list of [name, base64 of the value or null]. `partitioner` is how *all* of its
    producers give keys to partitions. `default_offset` is where a reader without a checkpoint begins.
    `transactional` makes each of Adjunct's appends one transaction.
    """

    topic: str | None = None
    value: Format = field(default_factory=Raw)
    key: Format | None = None
    partitioner: Literal["kafka-murmur2", "unknown"] = "unknown"
    headers: str | None = None
    default_offset: Literal["oldest", "upcoming"] = "oldest"
    transactional: bool = False

    def __post_init__(self) -> None:
        if self.topic is not None:
            check_topic_name(self.topic)
        for name, value, allowed in (
            ("partitioner", self.partitioner, ("kafka-murmur2", "unknown")),
            ("default_offset", self.default_offset, ("oldest", "upcoming")),
        ):
            if value not in allowed:
                raise ConfigurationError(
                    f"{name} {value!r} of a Kafka topic is none: expected {' or '.join(allowed)}.",
                    "Correct it.",
                    argument=name,
                )

    def schema(self) -> Schema:
        """Return the columns of a record: those of the key that are not also the value's, the value's, the headers."""
        from dagster_adjunct.resources.streams.kafka.record_formats import schema_of

        return schema_of(self)


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """A Kafka cluster as a system of streams; see `kafka_system`, which makes and registers it."""

    name: str
    bootstrap_servers: str
    client: Mapping[str, Value] = field(default_factory=dict)
    client_factory: str | None = None
    topics: Mapping[str, KafkaTopic] = field(default_factory=dict)
    prefix: str = ""

    def __post_init__(self) -> None:
        check_name("system", self.name)
        if not self.bootstrap_servers:
            raise ConfigurationError(
                f"Kafka system {self.name!r} has no bootstrap servers.",
                "Give them as HOST:PORT, separated by commas.",
                argument="bootstrap_servers",
            )
        check_client(self.client, self.client_factory)
        if self.prefix:
            check_topic_name(self.prefix)
        names: dict[str, str] = {}
        for stream, topic in self.topics.items():
            check_name("stream", stream)
            other = names.setdefault(topic.topic or stream, stream)
            if other != stream:
                raise ConfigurationError(
                    f"streams {other!r} and {stream!r} of Kafka system {self.name!r} are both topic "
                    f"{topic.topic or stream!r}: a topic is one stream.",
                    "Leave one of them out.",
                    argument="topics",
                    system=self.name,
                    topic=topic.topic or stream,
                )

    @property
    def where(self) -> str:
        """How errors name the cluster."""
        return f"Kafka system {self.name!r} ({self.bootstrap_servers})"


def check_topic_name(name: str) -> str:
    """Return the name if Kafka can have a topic of it. Raises ConfigurationError."""
    if not _TOPIC.fullmatch(name) or name in (".", ".."):
        raise ConfigurationError(
            f"{name!r} can't be a Kafka topic: expected 1 to 249 letters, digits, '.', '_' or '-'.",
            "Rename it.",
            topic=name,
        )
    return name
