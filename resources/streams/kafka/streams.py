"""KafkaStreams: the topics of a Kafka cluster as streams, read in exact ranges of offsets.

Offsets are Kafka's own, as decimal numbers. The end of a partition is its last stable offset: later records belong to
open transactions. A range may have fewer records than offsets because of control records, aborted transactions,
compaction and markers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from dagster_adjunct.resources.common import StoredDocument, check_name
from dagster_adjunct.resources.errors import (
    ConfigurationError,
    InvalidNameError,
    StreamExistsError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.objects.commit_log import decode_body
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.streams.kafka.client import (
    TOPIC_RANGES,
    KafkaAdmin,
    SettingValue,
    TopicDescription,
    check_client_settings,
)
from dagster_adjunct.resources.streams.kafka.consume import TopicRange, count_topic_records, find_offsets_at_time
from dagster_adjunct.resources.streams.kafka.formats import Format, Json, KeyText, Raw
from dagster_adjunct.resources.streams.kafka.produce import KafkaAppends, TopicFacts
from dagster_adjunct.resources.streams.kafka.record_formats import topic_schema
from dagster_adjunct.resources.streams.startpoint import check_timestamp_ms
from dagster_adjunct.resources.streams.system import (
    Epochs,
    NewStreams,
    NumberedOffsets,
    OffsetRange,
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
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


T = TypeVar("T")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@validated
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

    def schema(self) -> Schema:
        """Return the columns of a record: those only in the key, those of the value, then the headers."""
        return topic_schema(self)


@validated
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
            problem = f"Kafka system {self.name!r} has no bootstrap servers."
            step = "Give them as HOST:PORT, separated by commas."
            raise ConfigurationError(problem, step, argument="bootstrap_servers")
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
        problem = f"{name!r} can't be a Kafka topic: expected 1 to 249 letters, digits, '.', '_' or '-'."
        raise ConfigurationError(problem, topic=name)
    return name


_NAMESPACE = "kafka-streams"
_RAW = KafkaTopic()


@dataclass(frozen=True, slots=True)
class ResolvedTopic:
    """A stream's topic and its declaration; `key` are the columns that determine a record's partition."""

    topic: str
    declared: KafkaTopic
    key: tuple[str, ...]


class _CreatedStream(StoredDocument):
    """The stored description of a stream that `create` created."""

    version: Literal[1] = 1
    topic: str
    declaration: StreamDeclaration

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
        there = StreamDeclaration(columns=topic_schema(topic), key=known.key, partitions=partitions)
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

    def _declared(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> StreamDeclaration:
        return build_declaration(StreamDeclaration, self._qualified(stream), schema, tuple(key), partitions)

    def _qualified(self, stream: str) -> str:
        return f"{self._settings.name}.{stream}"

    def _build_created(self, stream: str, declaration: StreamDeclaration) -> _CreatedStream:
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
        step = "Upgrade dagster-adjunct if a newer version wrote it; otherwise restore the lake's metadata."
        return decode_body(_CreatedStream, stored, self._where, f"can't be read (the entry of stream {stream!r})", step)


OffsetBounds = tuple[dict[int, int], dict[int, int]]
_TOMBSTONES_KEPT_MS = "86400000"  # the broker's own default


class KafkaStreams(KafkaAppends, NumberedOffsets):
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
        self._answers: dict[object, object] | None = None  # of a snapshot

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
        declared = facts.declared
        of_records = (facts.key, declared.partitioner, topic_schema(declared), declared.default_offset)
        return StreamInfo(stream, facts.partitions, *of_records, compacted, kept if compacted else None, facts.identity)

    def topic(self, stream: str) -> TopicFacts:
        """Return the stream's topic, with its settings. Raises StreamNotFoundError."""
        facts = self._describe_topic(stream)
        return replace(facts, config=self._ask_once((stream, "config"), lambda: self.admin.config(facts.topic)))

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
            problem = f'stream system {self.name!r} can\'t read epochs="latest": a topic does not store which ranges '
            problem += "were read again, so replaced records can't be found."
            step = "Send the results to a stream of the lake too, or compare headers (adjunct-source, adjunct-epoch)."
            raise ConfigurationError(problem, step, argument="epochs", system=self.name)
        from dagster_adjunct.resources.streams.kafka.source import KafkaReadPlan, records_frame

        spark = resolve_session(spark)
        facts, wanted = self._ranges(ranges)
        stream = f"{self.name}.{facts.stream}"
        return records_frame(spark, KafkaReadPlan(self.settings, facts.declared, stream, tuple(wanted)))

    def snapshot(self, stream: str) -> StreamSystem:
        """Return a view of the streams as they are when it first asks; it asks for all partitions of a stream."""
        view = KafkaStreams(self.lake, self.settings)
        view.admin, view._answers = self.admin, {}
        return view

    def _ask_once(self, question: object, ask: Callable[[], T]) -> T:
        """Return the answer; in a snapshot, that of the first time."""
        if self._answers is None:
            return ask()
        if question not in self._answers:
            self._answers[question] = ask()
        return cast("T", self._answers[question])

    def _validate_creation(
        self, name: str, schema: Schema, key: Sequence[str], partitions: int
    ) -> tuple[ResolvedTopic, TopicDescription | None]:
        """Return the resolved topic of a declared stream, and its description, None if it does not exist."""
        check_name("stream", name)
        known = self._declarations.check(name, schema, key, partitions)
        topic = self.admin.describe(known.topic)
        if topic is not None and topic.partitions != partitions:
            problem = f"stream {name!r} exists with another declaration: topic {known.topic!r} of "
            problem += f"{self.settings.where} has {topic.partitions} partitions, expected {partitions}."
            step = "Declare the partitions that it has, or use another name."
            raise StreamExistsError(problem, step, stream=f"{self.name}.{name}")
        return known, topic

    def _describe_topic(self, stream: str) -> TopicFacts:
        """Return the stream's topic, without its settings."""

        def ask() -> TopicFacts:
            known = self._declarations.of(stream)
            topic = self.admin.describe(known.topic)
            if topic is None:
                raise self._not_found(stream, known)
            return TopicFacts(stream, known.topic, topic.identity, topic.partitions, known.declared, known.key, {})

        return self._ask_once(stream, ask)

    def _not_found(self, stream: str, known: ResolvedTopic) -> StreamNotFoundError:
        there = self.list_streams()
        some = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
        problem = f"there is no stream {stream!r} in {self.settings.where}: it would be topic {known.topic!r}."
        step = f"Declare the stream's topic, create it, or use another stream: {some or 'there are none'}."
        return StreamNotFoundError(problem, step, stream=f"{self.name}.{stream}")

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
        edges: dict[SystemStreamPartition, str] = {}
        for _, of_stream in groupby(sorted(ssps), lambda ssp: ssp.qualified_stream):
            wanted = list(of_stream)
            offsets = edge(self._offsets(self._describe_topic_of(wanted), [ssp.partition for ssp in wanted]))
            edges |= {ssp: str(offsets[ssp.partition]) for ssp in wanted}
        return edges

    def _offsets(self, facts: TopicFacts, partitions: Sequence[int]) -> OffsetBounds:
        """Return the oldest and the upcoming offset of each partition, requested in this order."""
        wanted = partitions if self._answers is None else range(facts.partitions)
        oldest, upcoming = self.admin.oldest, self.admin.upcoming
        return self._ask_once(
            (facts.stream, "offsets"), lambda: (oldest(facts.topic, wanted), upcoming(facts.topic, wanted))
        )

    def _offsets_at_time(self, facts: TopicFacts, partitions: Sequence[int], timestamp_ms: int) -> dict[int, int]:
        wanted = partitions if self._answers is None else range(facts.partitions)

        def ask() -> dict[int, int]:
            # The ends first, so that a record that arrives meanwhile is not skipped.
            ends = self._offsets(facts, wanted)[1]
            since = self.admin.since(facts.topic, wanted, timestamp_ms)
            starts = {p: offset for p, offset in since.items() if 0 <= offset < ends[p]}
            ranges = [self._topic_range(facts, p, start, ends[p]) for p, start in starts.items()]
            return ends | find_offsets_at_time(self.settings, ranges, timestamp_ms)

        return self._ask_once((facts.stream, timestamp_ms), ask)

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


def _is_stream_name(topic: str) -> bool:
    try:
        check_name("stream", topic)
    except InvalidNameError:
        return False
    return True


_openers: dict[str, tuple[KafkaSettings, Callable[[Lake], KafkaStreams]]] = {}


@validated
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
    known, opener = _openers.get(name, (None, None))
    if opener is None or known != settings:
        opener = partial(KafkaStreams, settings=settings)
    register_system(name, opener)
    _openers[name] = settings, opener
    return settings
