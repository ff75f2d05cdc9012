"""Which topic a stream is, and how its records are understood: as the settings declare, as `create` did, or raw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.stored_documents import StoredDocument, first_problem
from dagster_adjunct.resources.streams.interface.declared_stream import StreamDeclaration, check_equal, declared
from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaSettings, KafkaTopic, check_topic_name
from dagster_adjunct.resources.streams.kafka.record_formats import schema_of

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.schemas.schema import Schema

_NAMESPACE = "kafka-streams"
_RAW = KafkaTopic()


@dataclass(frozen=True, slots=True)
class KnownTopic:
    """A stream's topic, and how it is to be read; `key` are the columns that a record's partition goes by."""

    topic: str
    declared: KafkaTopic
    key: tuple[str, ...]


class _Declaration(StreamDeclaration):
    """As it is stored: what a stream of the lake has more stands there, too, and is never set."""

    timestamp: None = None
    retention: None = None
    compaction: None = None


class _Created(StoredDocument):
    """What is remembered of a stream that `create` made."""

    version: Literal[1] = 1
    topic: str
    declaration: _Declaration

    def known(self) -> KnownTopic:
        from dagster_adjunct.resources.streams.kafka.json_format import Json
        from dagster_adjunct.resources.streams.kafka.raw_format import KeyText

        schema, key = self.declaration.schema_, self.declaration.key
        text = KeyText(schema.select(key).ddl()) if key else None
        partitioner: Literal["kafka-murmur2", "unknown"] = "kafka-murmur2" if key else "unknown"
        return KnownTopic(self.topic, KafkaTopic(self.topic, Json(schema), text, partitioner), key)


class DeclaredTopics:
    """The streams of one system: those of its settings, and those that were created, which the lake remembers."""

    def __init__(self, lake: Lake, settings: KafkaSettings) -> None:
        self._settings = settings
        self._where = f"the Kafka streams of system {settings.name!r} in {lake.url}"
        self._namespace = MetadataStore(lake).namespace(_NAMESPACE, settings.name)
        self._created: dict[str, _Created] = {}

    def of(self, stream: str) -> KnownTopic:
        """Return what is known of a stream, whether there is a topic or not."""
        check_name("stream", stream)
        topic = self._settings.topics.get(stream)
        if topic is not None:
            return KnownTopic(topic.topic or stream, topic, () if topic.key is None else topic.key.columns().names)
        created = self._created.get(stream) or self._read(self._namespace.read(), stream)
        return KnownTopic(stream, _RAW, ()) if created is None else created.known()

    def topics(self) -> dict[str, str]:
        """Return the topic of each stream that was declared or created."""
        created = {stream: self._parsed(stream, stored).topic for stream, stored in self._namespace.read().items()}
        return created | {stream: topic.topic or stream for stream, topic in self._settings.topics.items()}

    def check(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> KnownTopic:
        """Return what a stream would be if it were created so. Raises StreamExistsError for one that is otherwise."""
        wanted = self._declared(stream, schema, key, partitions)
        topic = self._settings.topics.get(stream)
        if topic is None:
            created = self._read(self._namespace.read(), stream)
            if created is not None:
                check_equal(self._qualified(stream), created.declaration, wanted)
            return self._new(stream, wanted).known()
        known = self.of(stream)
        there = _Declaration(columns=schema_of(topic), key=known.key, partitions=partitions)
        check_equal(self._qualified(stream), there, wanted)
        return known

    def remember(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> None:
        """Keep how a stream was created, for other processes; the settings' own need no remembering."""
        if stream in self._settings.topics:
            return
        made = self._new(stream, self._declared(stream, schema, key, partitions))

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], None]:
            there = self._read(snapshot, stream)
            if there is None:
                return {stream: made.model_dump(mode="json")}, None
            check_equal(self._qualified(stream), there.declaration, made.declaration)
            return {}, None

        self._namespace.transact(decide, by="create")
        self._created[stream] = made

    def _declared(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> _Declaration:
        return declared(_Declaration, self._qualified(stream), schema, tuple(key), partitions)

    def _qualified(self, stream: str) -> str:
        return f"{self._settings.name}.{stream}"

    def _new(self, stream: str, declaration: _Declaration) -> _Created:
        topic = check_topic_name(self._settings.prefix + stream)
        others = self._settings.topics.items()
        other = next((name for name, known in others if (known.topic or name) == topic), None)
        if other is not None:
            raise ConfigurationError(
                f"{self._settings.where}: stream {stream!r} would be topic {topic!r}, which is stream {other!r}.",
                f"Use stream {other!r}, or another name.",
                system=self._settings.name,
                stream=self._qualified(stream),
                topic=topic,
            )
        return _Created(topic=topic, declaration=declaration)

    def _read(self, snapshot: NamespaceSnapshot, stream: str) -> _Created | None:
        stored = snapshot.get(stream)
        if stored is None:
            return None
        # What was created never changes.
        return self._created.setdefault(stream, self._parsed(stream, stored))

    def _parsed(self, stream: str, stored: Any) -> _Created:
        try:
            return _Created.model_validate(stored)
        except ValidationError as error:
            raise MalformedDocumentError(
                f"{self._where}: the entry of stream {stream!r} can't be read ({first_problem(error)}).",
                "Upgrade dagster-adjunct if a newer version wrote it; otherwise restore the lake's metadata.",
                stream=self._qualified(stream),
            ) from None
