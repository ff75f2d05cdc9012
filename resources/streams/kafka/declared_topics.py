"""The topics of a Kafka system's streams: those that its settings declare, and created ones, stored in the lake."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from dagster_adjunct.resources.common import StoredDocument, check_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.objects.commit_log import decode_body
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.kafka.client import KafkaSettings
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText
from dagster_adjunct.resources.streams.kafka.record_formats import KafkaTopic, check_topic_name
from dagster_adjunct.resources.streams.system import StreamDeclaration, build_declaration, check_same_declaration

_NAMESPACE = "kafka-streams"


class _CreatedStream(StoredDocument):
    """The stored description of a stream that `create` created."""

    version: Literal[1] = 1
    topic: str
    declaration: StreamDeclaration

    def known(self) -> KafkaTopic:
        schema, key = self.declaration.columns, self.declaration.key
        if not key:
            return KafkaTopic(self.topic, Json(schema))
        return KafkaTopic(self.topic, Json(schema), KeyText(schema.select(key).ddl()), "kafka-murmur2")


class DeclaredTopics:
    """The streams of one system: those of its settings, and created ones, which are stored in the lake."""

    def __init__(self, lake: Lake, settings: KafkaSettings) -> None:
        self._settings = settings
        self._where = f"the Kafka streams of system {settings.name!r} in {lake.url}"
        self._namespace = MetadataStore(lake).namespace(_NAMESPACE, settings.name)
        self._created: dict[str, _CreatedStream] = {}

    def of(self, stream: str) -> KafkaTopic:
        """Return the declaration of a stream's topic, whether it exists or not."""
        check_name("stream", stream)
        topic = self._settings.topics.get(stream)
        if topic is not None:
            return topic
        created = self._created.get(stream) or self._find_created(self._namespace.read(), stream)
        return KafkaTopic() if created is None else created.known()

    def topics(self) -> dict[str, str]:
        """Return the topic of each stream that was declared or created."""
        created = {
            stream: self._parse_created(stream, stored).topic for stream, stored in self._namespace.read().items()
        }
        return created | {stream: topic.name_for(stream) for stream, topic in self._settings.topics.items()}

    def check(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> KafkaTopic:
        """Return the topic of a stream with this declaration. Raises StreamExistsError if it exists with another."""
        wanted = self._declared(stream, schema, key, partitions)
        topic = self._settings.topics.get(stream)
        if topic is None:
            created = self._find_created(self._namespace.read(), stream)
            if created is not None:
                check_same_declaration(self._qualified(stream), created.declaration, wanted)
            return self._build_created(stream, wanted).known()
        there = StreamDeclaration(columns=topic.schema(), key=topic.key_names, partitions=partitions)
        check_same_declaration(self._qualified(stream), there, wanted)
        return topic

    def remember(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> None:
        """Store the declaration of a created stream for other processes, unless the settings declare it."""
        if stream in self._settings.topics:
            return
        made = self._build_created(stream, self._declared(stream, schema, key, partitions))

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], None]:
            there = self._find_created(snapshot, stream)
            if there is None:
                return {stream: made.model_dump(mode="json")}, None
            check_same_declaration(self._qualified(stream), there.declaration, made.declaration)
            return {}, None

        self._namespace.transact(decide, by="create")
        self._created[stream] = made

    def _declared(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> StreamDeclaration:
        return build_declaration(StreamDeclaration, self._qualified(stream), schema, tuple(key), partitions)

    def _qualified(self, stream: str) -> str:
        return f"{self._settings.name}.{stream}"

    def _build_created(self, stream: str, declaration: StreamDeclaration) -> _CreatedStream:
        topic = check_topic_name(self._settings.prefix + stream)
        others = self._settings.topics.items()
        other = next((name for name, known in others if known.name_for(name) == topic), None)
        if other is not None:
            raise ConfigurationError(
                f"{self._settings.where}: stream {stream!r} would be topic {topic!r}, which is stream {other!r}.",
                f"Use stream {other!r}, or another name.",
                system=self._settings.name,
                stream=self._qualified(stream),
                topic=topic,
            )
        return _CreatedStream(topic=topic, declaration=declaration)

    def _find_created(self, snapshot: NamespaceSnapshot, stream: str) -> _CreatedStream | None:
        stored = snapshot.get(stream)
        if stored is None:
            return None
        # Stored declarations never change.
        return self._created.setdefault(stream, self._parse_created(stream, stored))

    def _parse_created(self, stream: str, stored: Any) -> _CreatedStream:
        step = "Upgrade dagster-adjunct if a newer version wrote it; otherwise restore the lake's metadata."
        return decode_body(_CreatedStream, stored, self._where, f"can't be read (the entry of stream {stream!r})", step)
