"""KafkaStreams: the topics of a Kafka cluster as streams, read in exact ranges of offsets.

Offsets are Kafka's own, as decimal numbers. The end of a partition is its last stable offset: later records belong to
open transactions. A range may have fewer records than offsets because of control records, aborted transactions,
compaction and markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from dagster_adjunct.resources.common import StoredDocument, check_name, first_validation_problem
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    InvalidNameError,
    MalformedDocumentError,
    StreamExistsError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.records import ArrowFrame
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.streams.kafka.client import (
    TOPIC_RANGES,
    KafkaAdmin,
    SettingValue,
    TopicDescription,
    check_client_settings,
)
from dagster_adjunct.resources.streams.kafka.consume import (
    TopicRange,
    count_topic_records,
    find_offsets_at_time,
)
from dagster_adjunct.resources.streams.kafka.formats import Format, Json, KeyText, Raw
from dagster_adjunct.resources.streams.kafka.markers import read_markers
from dagster_adjunct.resources.streams.kafka.record_formats import topic_schema
from dagster_adjunct.resources.streams.startpoint import check_timestamp_ms
from dagster_adjunct.resources.streams.system import (
    AppendResult,
    Epochs,
    Marker,
    NewStreams,
    NumberedOffsets,
    OffsetRange,
    Sources,
    StreamDeclaration,
    StreamInfo,
    StreamSystem,
    SystemStreamPartition,
    build_declaration,
    check_same_declaration,
    missing_partition_error,
    parse_offset,
    register_system,
    require_one_stream,
    wants_latest_epochs,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True, slots=True)
class KafkaTopic:
    """The formats and options of one topic.

    `topic` is its name if the stream has another. `value` and `key` are formats; `headers` names a column for the
    headers as JSON, a list of [name, base64 of the value or null]. `partitioner` is how *all* its producers assign
    keys to partitions. `default_offset` is where a reader without a checkpoint begins. `transactional` makes each of
    Adjunct's appends a transaction.
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
                    f"{name} of a Kafka topic is {value!r}: expected {' or '.join(allowed)}.",
                    argument=name,
                )

    def schema(self) -> Schema:
        """Return the columns of a record: those only in the key, those of the value, then the headers."""
        return topic_schema(self)


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """A Kafka cluster as a system of streams; see `kafka_system`, which creates and registers it."""

    name: str
    bootstrap_servers: str
    client: Mapping[str, SettingValue] = field(default_factory=dict)
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
        check_client_settings(self.client, self.client_factory)
        if self.prefix:
            check_topic_name(self.prefix)
        names: dict[str, str] = {}
        for stream, topic in self.topics.items():
            check_name("stream", stream)
            other = names.setdefault(topic.topic or stream, stream)
            if other != stream:
                raise ConfigurationError(
                    f"streams {other!r} and {stream!r} of Kafka system {self.name!r} are both topic "
                    f"{topic.topic or stream!r}: a topic can only be one stream.",
                    "Leave one of them out.",
                    argument="topics",
                    system=self.name,
                    topic=topic.topic or stream,
                )

    @property
    def where(self) -> str:
        """The name of the cluster in errors."""
        return f"Kafka system {self.name!r} ({self.bootstrap_servers})"


def check_topic_name(name: str) -> str:
    """Return the name if it is a valid topic name. Raises ConfigurationError."""
    if not _TOPIC.fullmatch(name) or name in (".", ".."):
        raise ConfigurationError(
            f"{name!r} can't be a Kafka topic: expected 1 to 249 letters, digits, '.', '_' or '-'.",
            topic=name,
        )
    return name


_NAMESPACE = "kafka-streams"
_RAW = KafkaTopic()


@dataclass(frozen=True, slots=True)
class ResolvedTopic:
    """A stream's topic and its declaration; `key` are the columns that determine a record's partition."""

    topic: str
    declared: KafkaTopic
    key: tuple[str, ...]


class _Declaration(StreamDeclaration):
    """The stored declaration; it has the fields of a lake stream too, which are always None."""

    timestamp: None = None
    retention: None = None
    compaction: None = None


class _CreatedStream(StoredDocument):
    """The stored description of a stream that `create` created."""

    version: Literal[1] = 1
    topic: str
    declaration: _Declaration

    def known(self) -> ResolvedTopic:
        schema, key = self.declaration.schema_, self.declaration.key
        text = KeyText(schema.select(key).ddl()) if key else None
        partitioner: Literal["kafka-murmur2", "unknown"] = "kafka-murmur2" if key else "unknown"
        return ResolvedTopic(self.topic, KafkaTopic(self.topic, Json(schema), text, partitioner), key)


class DeclaredTopics:
    """The streams of one system: those of its settings, and created ones, which are stored in the lake."""

    def __init__(self, lake: Lake, settings: KafkaSettings) -> None:
        self._settings = settings
        self._where = f"the Kafka streams of system {settings.name!r} in {lake.url}"
        self._namespace = MetadataStore(lake).namespace(_NAMESPACE, settings.name)
        self._created: dict[str, _CreatedStream] = {}

    def of(self, stream: str) -> ResolvedTopic:
        """Return the topic of a stream, whether it exists or not."""
        check_name("stream", stream)
        topic = self._settings.topics.get(stream)
        if topic is not None:
            return ResolvedTopic(topic.topic or stream, topic, () if topic.key is None else topic.key.columns().names)
        created = self._created.get(stream) or self._find_created(self._namespace.read(), stream)
        return ResolvedTopic(stream, _RAW, ()) if created is None else created.known()

    def topics(self) -> dict[str, str]:
        """Return the topic of each stream that was declared or created."""
        created = {
            stream: self._parse_created(stream, stored).topic for stream, stored in self._namespace.read().items()
        }
        return created | {stream: topic.topic or stream for stream, topic in self._settings.topics.items()}

    def check(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> ResolvedTopic:
        """Return the topic of a stream with this declaration. Raises StreamExistsError if it exists with another."""
        wanted = self._declared(stream, schema, key, partitions)
        topic = self._settings.topics.get(stream)
        if topic is None:
            created = self._find_created(self._namespace.read(), stream)
            if created is not None:
                check_same_declaration(self._qualified(stream), created.declaration, wanted)
            return self._build_created(stream, wanted).known()
        known = self.of(stream)
        there = _Declaration(columns=topic_schema(topic), key=known.key, partitions=partitions)
        check_same_declaration(self._qualified(stream), there, wanted)
        return known

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

    def _declared(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> _Declaration:
        return build_declaration(_Declaration, self._qualified(stream), schema, tuple(key), partitions)

    def _qualified(self, stream: str) -> str:
        return f"{self._settings.name}.{stream}"

    def _build_created(self, stream: str, declaration: _Declaration) -> _CreatedStream:
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
        return _CreatedStream(topic=topic, declaration=declaration)

    def _find_created(self, snapshot: NamespaceSnapshot, stream: str) -> _CreatedStream | None:
        stored = snapshot.get(stream)
        if stored is None:
            return None
        # Stored declarations never change.
        return self._created.setdefault(stream, self._parse_created(stream, stored))

    def _parse_created(self, stream: str, stored: Any) -> _CreatedStream:
        try:
            return _CreatedStream.model_validate(stored)
        except ValidationError as error:
            raise MalformedDocumentError(
                f"{self._where}: the entry of stream {stream!r} can't be read ({first_validation_problem(error)}).",
                "Upgrade dagster-adjunct if a newer version wrote it; otherwise restore the lake's metadata.",
                stream=self._qualified(stream),
            ) from None


OffsetBounds = tuple[dict[int, int], dict[int, int]]
_TOMBSTONES_KEPT_MS = "86400000"  # the broker's own default


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A stream's topic in the cluster (`identity` is the topic's id), and its declaration.

    `config` are the topic's settings by Kafka's names; it is empty if we are not authorized to read them.
    """

    stream: str
    topic: str
    identity: str
    partitions: int
    declared: KafkaTopic
    key: tuple[str, ...]
    config: Mapping[str, str]


class KafkaStreams(NumberedOffsets):
    """The streams of one Kafka cluster, under the name of its settings. Safe to use from threads.

    The lake stores the declarations of streams that were created here. Methods raise StreamUnavailableError, which is
    transient, if brokers do not answer.
    """

    keeps_positions = True
    new_streams = NewStreams(needs_key=True, typed=True)

    def __init__(self, lake: Lake, settings: KafkaSettings) -> None:
        self.name = settings.name
        self.lake = lake
        self.settings = settings
        self.admin = KafkaAdmin(settings)
        self._declarations = DeclaredTopics(lake, settings)

    def list_streams(self) -> list[str]:
        """Return all streams with a topic: declared and created ones, and every other topic with a valid name."""
        topics = self._declarations.topics()
        there, taken = set(self.admin.topics()), set(topics.values())
        named = {stream for stream, topic in topics.items() if topic in there}
        return sorted(named | {topic for topic in there - taken if _is_stream_name(topic) and topic not in topics})

    def create(self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int) -> StreamInfo:
        """Create the topic of a stream, or do nothing if it exists with this declaration.

        A stream that the settings do not declare is the topic `prefix` + name and contains JSON; its columns and key
        are stored in the lake for other processes. Replication and other settings are the cluster's defaults.
        Raises StreamExistsError with the differences, and ConfigurationError or SchemaMismatchError.
        """
        known, topic = self._validate_creation(name, schema, key, partitions)
        self._declarations.remember(name, schema, key, partitions)
        if topic is None:
            self.admin.create(known.topic, partitions)
        return self.info(name)

    def check_create(self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int) -> None:
        self._validate_creation(name, schema, key, partitions)

    def info(self, stream: str) -> StreamInfo:
        facts = self.topic(stream)
        policies = {policy.strip() for policy in facts.config.get("cleanup.policy", "").split(",")}
        # A topic with compact,delete does not keep the newest record of every key.
        compacted = policies == {"compact"}
        kept = timedelta(milliseconds=int(facts.config.get("delete.retention.ms", _TOMBSTONES_KEPT_MS)))
        return StreamInfo(
            stream,
            facts.partitions,
            facts.key,
            facts.declared.partitioner,
            topic_schema(facts.declared),
            facts.declared.default_offset,
            compacted,
            kept if compacted else None,
            facts.identity,
        )

    def topic(self, stream: str) -> TopicFacts:
        """Return the stream's topic, with its settings. Raises StreamNotFoundError."""
        facts = self._describe_topic(stream)
        return replace(facts, config=self._config_of(facts))

    def partitions(self, stream: str) -> list[SystemStreamPartition]:
        return [SystemStreamPartition(self.name, stream, p) for p in range(self._describe_topic(stream).partitions)]

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._edges(ssps, lambda edges: edges[0])

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._edges(ssps, lambda edges: edges[1])

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        """Return the offset of the first record that readers see, in offset order, at or after this time."""
        check_timestamp_ms("timestamp_ms", timestamp_ms, str(ssp))
        facts = self._describe_topic_of([ssp])
        return str(self._offsets_at_time(facts, [ssp.partition], timestamp_ms)[ssp.partition])

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        """Return the number of records in the ranges, by reading them all; `distance` is a cheap upper bound."""
        if not ranges:
            return 0
        return count_topic_records(self.settings, self._ranges(ranges)[1])

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        *,
        epochs: Epochs = "all",
    ) -> DataFrame:
        """Return exactly the records of these ranges of one stream: its columns, then those of RECORD_META.

        `epochs="latest"` raises ConfigurationError: a topic does not store which ranges were read again, so records
        for which a replay produced nothing could not be left out.
        Offsets may be missing within a range. A task fails with OffsetOutOfRangeError if records have been removed by
        retention, or by recreating the topic, since the ranges were checked.
        """
        if wants_latest_epochs(epochs):
            raise ConfigurationError(
                f'stream system {self.name!r} can\'t read epochs="latest": a topic does not store which ranges were '
                "read again, so replaced records can't be found.",
                "Send the results to a stream of the lake too, or compare headers (adjunct-source, adjunct-epoch).",
                argument="epochs",
                system=self.name,
            )
        from dagster_adjunct.resources.streams.kafka.source import KafkaReadPlan, records_frame

        spark = resolve_session(spark)
        facts, wanted = self._ranges(ranges)
        stream = f"{self.name}.{facts.stream}"
        return records_frame(spark, KafkaReadPlan(self.settings, facts.declared, stream, tuple(wanted)))

    def markers(self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None) -> list[Marker]:
        """Return the markers at or after these offsets, by reading all records from there on."""
        return read_markers(self, stream, since)

    def append(
        self,
        stream: str,
        data: DataFrame | ArrowFrame | Sequence[Mapping[str, Any]],
        *,
        producer: str,
        sequence: int,
        end_of_dataset: str | None = None,
        order_by: Sequence[str] = (),
        partitioned: bool = False,
        consumed: Mapping[SystemStreamPartition, str] | None = None,
        sources: Sources | None = None,
        valid_from: datetime | None = None,
    ) -> AppendResult:
        """Append records; see `produce.append` for the guarantees with and without transactions.

        Source positions of records become headers. `sources` are not stored.
        """
        from dagster_adjunct.resources.streams.kafka.produce import append

        return append(
            self,
            stream,
            data,
            producer=producer,
            sequence=sequence,
            end_of_dataset=end_of_dataset,
            order_by=order_by,
            partitioned=partitioned,
            consumed=consumed,
            valid_from=valid_from,
        )

    def append_markers(
        self,
        stream: str,
        version: str,
        *,
        producer: str,
        sequence: int,
        partitions: Sequence[int] | None = None,
        rows: Mapping[int, int] | None = None,
        checksum: str | None = None,
        valid_from: datetime | None = None,
    ) -> AppendResult:
        """Append only an end-of-dataset marker to these partitions (default: all)."""
        from dagster_adjunct.resources.streams.kafka.produce import append_markers

        return append_markers(
            self,
            stream,
            version,
            producer=producer,
            sequence=sequence,
            partitions=partitions,
            rows=rows,
            checksum=checksum,
            valid_from=valid_from,
        )

    def appended(self, stream: str, producer: str, sequence: int) -> AppendResult | None:
        from dagster_adjunct.resources.streams.kafka.produce import find_append

        return find_append(self, stream, producer, sequence)

    def snapshot(self, stream: str) -> StreamSystem:
        """Return a view of the streams with this one as it is now; questions about it ask for all its partitions."""
        return KafkaSnapshot(self, stream)

    def _validate_creation(
        self, name: str, schema: Schema, key: Sequence[str], partitions: int
    ) -> tuple[ResolvedTopic, TopicDescription | None]:
        """Return the resolved topic of a declared stream, and its description, None if it does not exist."""
        check_name("stream", name)
        known = self._declarations.check(name, schema, key, partitions)
        topic = self.admin.describe(known.topic)
        if topic is not None and topic.partitions != partitions:
            raise _partition_count_error(self.settings, name, known.topic, topic.partitions, partitions)
        return known, topic

    def _describe_topic(self, stream: str) -> TopicFacts:
        """Return the stream's topic, without its settings."""
        known = self._declarations.of(stream)
        topic = self.admin.describe(known.topic)
        if topic is None:
            raise self._not_found(stream, known)
        return TopicFacts(stream, known.topic, topic.identity, topic.partitions, known.declared, known.key, {})

    def _config_of(self, facts: TopicFacts) -> Mapping[str, str]:
        return self.admin.config(facts.topic)

    def _not_found(self, stream: str, known: ResolvedTopic) -> StreamNotFoundError:
        there = self.list_streams()
        some = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
        return StreamNotFoundError(
            f"there is no stream {stream!r} in {self.settings.where}: it would be topic {known.topic!r}. Streams: "
            f"{some or 'none'}.",
            "Check the name and the cluster, declare the stream's topic, or create it first.",
            stream=f"{self.name}.{stream}",
        )

    def _describe_topic_of(self, ssps: Iterable[SystemStreamPartition]) -> TopicFacts:
        """Return the topic of the one stream of these partitions, which must exist."""
        wanted = list(ssps)
        facts = self._describe_topic(require_one_stream(self.name, wanted))
        for ssp in wanted:
            if ssp.partition >= facts.partitions:
                raise missing_partition_error(ssp, facts.partitions)
        return facts

    def _edges(
        self, ssps: Iterable[SystemStreamPartition], edge: Callable[[OffsetBounds], dict[int, int]]
    ) -> dict[SystemStreamPartition, str]:
        by_stream: dict[str, list[SystemStreamPartition]] = {}
        for ssp in ssps:
            by_stream.setdefault(ssp.qualified_stream, []).append(ssp)
        edges: dict[SystemStreamPartition, str] = {}
        for wanted in by_stream.values():
            offsets = edge(self._offsets(self._describe_topic_of(wanted), [ssp.partition for ssp in wanted]))
            edges |= {ssp: str(offsets[ssp.partition]) for ssp in wanted}
        return edges

    def _offsets(self, facts: TopicFacts, partitions: Sequence[int]) -> OffsetBounds:
        """Return the oldest and the upcoming offset of each partition, requested in this order."""
        return self.admin.oldest(facts.topic, partitions), self.admin.upcoming(facts.topic, partitions)

    def _offsets_at_time(self, facts: TopicFacts, partitions: Sequence[int], timestamp_ms: int) -> dict[int, int]:
        # The ends first, so that a record that arrives meanwhile is not skipped.
        ends = self._offsets(facts, partitions)[1]
        since = self.admin.since(facts.topic, partitions, timestamp_ms)
        starts = {p: offset for p, offset in since.items() if 0 <= offset < ends[p]}
        ranges = [self._topic_range(facts, p, start, ends[p]) for p, start in starts.items()]
        return ends | find_offsets_at_time(self.settings, ranges, timestamp_ms)

    def _topic_range(self, facts: TopicFacts, partition: int, start: int, end: int) -> TopicRange:
        return TopicRange(facts.topic, facts.identity, partition, start, end, f"{self.name}.{facts.stream}")

    def _ranges(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> tuple[TopicFacts, list[TopicRange]]:
        """Return the ranges of one stream, validated against the topic's current offsets."""
        facts = self._describe_topic_of(ranges)
        oldest, upcoming = self._offsets(facts, [ssp.partition for ssp in ranges])
        wanted = []
        for ssp, given in ranges.items():
            start, end = parse_offset(given.start, str(ssp)), parse_offset(given.end, str(ssp))
            TOPIC_RANGES.check(ssp, start, end, oldest[ssp.partition], upcoming[ssp.partition])
            wanted.append(self._topic_range(facts, ssp.partition, start, end))
        return facts, wanted


def _partition_count_error(
    settings: KafkaSettings, name: str, topic: str, partitions: int, wanted: int
) -> StreamExistsError:
    return StreamExistsError(
        f"stream {name!r} exists with another declaration: topic {topic!r} of {settings.where} has {partitions} "
        f"partitions, expected {wanted}.",
        "Declare the partitions that it has, or use another name.",
        stream=f"{settings.name}.{name}",
    )


def _is_stream_name(topic: str) -> bool:
    try:
        check_name("stream", topic)
    except InvalidNameError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Opener:
    """The factory of a cluster's streams, for the registry of systems."""

    settings: KafkaSettings

    def __call__(self, lake: Lake) -> KafkaStreams:
        return KafkaStreams(lake, self.settings)


_openers: dict[str, _Opener] = {}


def kafka_system(
    name: str,
    *,
    bootstrap_servers: str,
    client: Mapping[str, SettingValue] | None = None,
    client_factory: str | None = None,
    topics: Mapping[str, KafkaTopic] | None = None,
    prefix: str = "",
) -> KafkaSettings:
    """Register a Kafka cluster as the stream system `name`, so that its streams are `NAME.STREAM`; return its settings.

    `client` are librdkafka settings, with secrets as "env:NAME". `client_factory` ("module:function") returns more of
    them in each process, such as token callbacks. `topics` declares streams; any other name is the topic of that name,
    with raw keys and values. A stream that Adjunct creates is the topic `prefix` + name. The same call may be
    repeated. Raises ConfigurationError.
    """
    settings = KafkaSettings(name, bootstrap_servers, dict(client or {}), client_factory, dict(topics or {}), prefix)
    opener = _openers.get(name)
    if opener is None or opener.settings != settings:
        opener = _Opener(settings)
    register_system(name, opener)
    _openers[name] = opener
    return settings


class KafkaSnapshot(KafkaStreams):
    """The streams of a cluster, of which one is read once: its topic, settings and offsets are cached."""

    def __init__(self, streams: KafkaStreams, stream: str) -> None:
        super().__init__(streams.lake, streams.settings)
        self.admin = streams.admin
        self._stream = stream
        self._facts: TopicFacts | None = None
        self._config: Mapping[str, str] | None = None
        self._edges_seen: OffsetBounds | None = None
        self._times: dict[int, dict[int, int]] = {}

    def _describe_topic(self, stream: str) -> TopicFacts:
        if stream != self._stream:
            return super()._describe_topic(stream)
        if self._facts is None:
            self._facts = super()._describe_topic(stream)
        return self._facts

    def _config_of(self, facts: TopicFacts) -> Mapping[str, str]:
        if facts.stream != self._stream:
            return super()._config_of(facts)
        if self._config is None:
            self._config = super()._config_of(facts)
        return self._config

    def _offsets(self, facts: TopicFacts, partitions: Sequence[int]) -> OffsetBounds:
        if facts.stream != self._stream:
            return super()._offsets(facts, partitions)
        if self._edges_seen is None:
            self._edges_seen = super()._offsets(facts, range(facts.partitions))
        return self._edges_seen

    def _offsets_at_time(self, facts: TopicFacts, partitions: Sequence[int], timestamp_ms: int) -> dict[int, int]:
        if facts.stream != self._stream:
            return super()._offsets_at_time(facts, partitions, timestamp_ms)
        if timestamp_ms not in self._times:
            self._times[timestamp_ms] = super()._offsets_at_time(facts, range(facts.partitions), timestamp_ms)
        return self._times[timestamp_ms]
