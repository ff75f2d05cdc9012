"""KafkaStreams: the topics of a Kafka cluster as streams, read in exact ranges of offsets.

Offsets are Kafka's own, in decimal digits. The end of a partition is its last stable offset: what comes after belongs
to transactions that are not decided. A range has fewer records than offsets where control records, aborted
transactions, compaction or markers take some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    InvalidNameError,
    StreamExistsError,
    StreamNotFoundError,
)
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.schemas.records import ArrowFrame
from dagster_adjunct.resources.spark.given_session import session_of
from dagster_adjunct.resources.streams.interface.checked_arguments import check_epochs, no_partition, one_stream
from dagster_adjunct.resources.streams.interface.numbered_offsets import NumberedOffsets, parse_offset
from dagster_adjunct.resources.streams.interface.startpoint import check_ms
from dagster_adjunct.resources.streams.interface.stream_system import (
    AppendResult,
    Epochs,
    Marker,
    NewStreams,
    OffsetRange,
    StreamInfo,
    StreamSystem,
)
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.streams.kafka.admin import KafkaAdmin, TopicDescription
from dagster_adjunct.resources.streams.kafka.consume import TopicRange, count_records, first_at
from dagster_adjunct.resources.streams.kafka.declared_topics import DeclaredTopics, KnownTopic
from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaSettings, KafkaTopic
from dagster_adjunct.resources.streams.kafka.offset_texts import TOPIC
from dagster_adjunct.resources.streams.kafka.record_formats import schema_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.schemas.schema import Schema
    from dagster_adjunct.resources.streams.interface.source_ranges import Sources

Edges = tuple[dict[int, int], dict[int, int]]
_TOMBSTONES_KEPT_MS = "86400000"  # the broker's own default


@dataclass(frozen=True, slots=True)
class TopicFacts:
    """A stream's topic as the cluster has it (`identity` is the topic's id), and how its records are understood.

    `config` has the topic's settings by Kafka's names; it is empty where the cluster does not let us see them.
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

    The lake keeps what Kafka can't: how streams that were created here are read. Methods raise
    StreamUnavailableError, which is transient, where brokers do not answer.
    """

    keeps_positions = True
    new_streams = NewStreams(needs_key=True, typed=True)

    def __init__(self, lake: Lake, settings: KafkaSettings) -> None:
        self.name = settings.name
        self.lake = lake
        self.settings = settings
        self.admin = KafkaAdmin(settings)
        self._declarations = DeclaredTopics(lake, settings)

    # -- declaring

    def list_streams(self) -> list[str]:
        """Return all streams that have a topic: those declared or created, and each other topic with a safe name."""
        topics = self._declarations.topics()
        there, taken = set(self.admin.topics()), set(topics.values())
        named = {stream for stream, topic in topics.items() if topic in there}
        return sorted(named | {topic for topic in there - taken if _is_stream_name(topic) and topic not in topics})

    def create(self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int) -> StreamInfo:
        """Create the topic of a stream, or do nothing if it is there and declared equally.

        A stream that the settings do not declare holds JSON, is the topic `prefix` + name, and the lake remembers
        its columns and key for other processes. Replication and all else is the cluster's default.
        Raises StreamExistsError with the differences, and ConfigurationError or SchemaMismatchError.
        """
        known, topic = self._checked(name, schema, key, partitions)
        self._declarations.remember(name, schema, key, partitions)
        if topic is None:
            self.admin.create(known.topic, partitions)
        return self.info(name)

    def check_create(self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int) -> None:
        self._checked(name, schema, key, partitions)

    def info(self, stream: str) -> StreamInfo:
        facts = self.topic(stream)
        policies = {policy.strip() for policy in facts.config.get("cleanup.policy", "").split(",")}
        # A topic that is compacted and cut off by age, too, does not keep the newest record of every key.
        compacted = policies == {"compact"}
        kept = timedelta(milliseconds=int(facts.config.get("delete.retention.ms", _TOMBSTONES_KEPT_MS)))
        return StreamInfo(
            stream,
            facts.partitions,
            facts.key,
            facts.declared.partitioner,
            schema_of(facts.declared),
            facts.declared.default_offset,
            compacted,
            kept if compacted else None,
            facts.identity,
        )

    def topic(self, stream: str) -> TopicFacts:
        """Return the stream's topic, with its settings. Raises StreamNotFoundError."""
        facts = self._located(stream)
        return replace(facts, config=self._config_of(facts))

    def partitions(self, stream: str) -> list[SystemStreamPartition]:
        return [SystemStreamPartition(self.name, stream, p) for p in range(self._located(stream).partitions)]

    # -- offsets

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._edges(ssps, lambda edges: edges[0])

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._edges(ssps, lambda edges: edges[1])

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        """Return the offset of the first record that readers see, in offset order, at or after this time."""
        check_ms("timestamp_ms", timestamp_ms, str(ssp))
        facts = self._topic_with([ssp])
        return str(self._first_at(facts, [ssp.partition], timestamp_ms)[ssp.partition])

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        """Return how many records the ranges hold, by reading them all: `distance` is an upper bound, at no cost."""
        if not ranges:
            return 0
        return count_records(self.settings, self._ranges(ranges)[1])

    # -- reading

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        *,
        epochs: Epochs = "all",
    ) -> DataFrame:
        """Return exactly the records of these ranges of one stream: its columns, then those of RECORD_META.

        The latest results of a replayed output can't be told here: a topic keeps no ranges that were read again, so a
        record of which a replay made nothing more would stay. `epochs="latest"` raises ConfigurationError.
        Offsets may be missing within a range. A task fails with OffsetOutOfRangeError where retention or a topic that
        was created again has taken records since the ranges were checked.
        """
        from dagster_adjunct.resources.streams.kafka.source import KafkaRead, records_frame

        if check_epochs(epochs):
            raise ConfigurationError(
                f'stream system {self.name!r} can\'t read epochs="latest": a topic does not tell which ranges were '
                "read again, and so not of which records a replay has made nothing any more.",
                "Send the results to a stream of the lake, too; or compare headers (adjunct-source, adjunct-epoch).",
                argument="epochs",
                system=self.name,
            )
        spark = session_of(spark)
        facts, wanted = self._ranges(ranges)
        stream = f"{self.name}.{facts.stream}"
        return records_frame(spark, KafkaRead(self.settings, facts.declared, stream, tuple(wanted)))

    def markers(self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None) -> list[Marker]:
        """Return the markers at or after these offsets; the records from there on are read for them."""
        from dagster_adjunct.resources.streams.kafka.marker_records import markers

        return markers(self, stream, since)

    # -- appending

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
        """Add records; see `produce.append`, which says what is promised with and without transactions.

        What a record was made of becomes a header; `sources` are not kept: a topic has no place for ranges.
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
        """Add an end-of-dataset marker to these partitions (default: all) and nothing else."""
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
        from dagster_adjunct.resources.streams.kafka.produce import appended

        return appended(self, stream, producer, sequence)

    def snapshot(self, stream: str) -> StreamSystem:
        """Return the streams with this one as it stands now; each question about it is asked for all its partitions."""
        from dagster_adjunct.resources.streams.kafka.snapshot import KafkaSnapshot

        return KafkaSnapshot(self, stream)

    # -- inside

    def _checked(
        self, name: str, schema: Schema, key: Sequence[str], partitions: int
    ) -> tuple[KnownTopic, TopicDescription | None]:
        """Return what a stream would be if it were created so, and its topic, None where there is none yet."""
        check_name("stream", name)
        known = self._declarations.check(name, schema, key, partitions)
        topic = self.admin.describe(known.topic)
        if topic is not None and topic.partitions != partitions:
            raise _wrong_count(self.settings, name, known.topic, topic.partitions, partitions)
        return known, topic

    def _located(self, stream: str) -> TopicFacts:
        """Return the stream's topic, without its settings."""
        known = self._declarations.of(stream)
        topic = self.admin.describe(known.topic)
        if topic is None:
            raise self._not_found(stream, known)
        return TopicFacts(stream, known.topic, topic.identity, topic.partitions, known.declared, known.key, {})

    def _config_of(self, facts: TopicFacts) -> Mapping[str, str]:
        return self.admin.config(facts.topic)

    def _not_found(self, stream: str, known: KnownTopic) -> StreamNotFoundError:
        there = self.list_streams()
        some = ", ".join(there[:20]) + (f" and {len(there) - 20} more" if len(there) > 20 else "")
        return StreamNotFoundError(
            f"there is no stream {stream!r} in {self.settings.where}: it would be topic {known.topic!r}. There are "
            f"{some or 'none'}.",
            "Check the name and the cluster, declare the stream's topic, or create it first.",
            stream=f"{self.name}.{stream}",
        )

    def _topic_with(self, ssps: Iterable[SystemStreamPartition]) -> TopicFacts:
        """Return the topic of the one stream of these partitions, which all exist."""
        wanted = list(ssps)
        facts = self._located(one_stream(self.name, wanted))
        for ssp in wanted:
            if ssp.partition >= facts.partitions:
                raise no_partition(ssp, facts.partitions)
        return facts

    def _edges(
        self, ssps: Iterable[SystemStreamPartition], edge: Callable[[Edges], dict[int, int]]
    ) -> dict[SystemStreamPartition, str]:
        by_stream: dict[str, list[SystemStreamPartition]] = {}
        for ssp in ssps:
            by_stream.setdefault(ssp.qualified_stream, []).append(ssp)
        edges: dict[SystemStreamPartition, str] = {}
        for wanted in by_stream.values():
            offsets = edge(self._offsets(self._topic_with(wanted), [ssp.partition for ssp in wanted]))
            edges |= {ssp: str(offsets[ssp.partition]) for ssp in wanted}
        return edges

    def _offsets(self, facts: TopicFacts, partitions: Sequence[int]) -> Edges:
        """Return the oldest and the upcoming offset of each partition, asked for in this order."""
        return self.admin.oldest(facts.topic, partitions), self.admin.upcoming(facts.topic, partitions)

    def _first_at(self, facts: TopicFacts, partitions: Sequence[int], timestamp_ms: int) -> dict[int, int]:
        # The ends first: a record that arrives meanwhile is then not skipped.
        ends = self._offsets(facts, partitions)[1]
        since = self.admin.since(facts.topic, partitions, timestamp_ms)
        starts = {p: offset for p, offset in since.items() if 0 <= offset < ends[p]}
        ranges = [self._range(facts, p, start, ends[p]) for p, start in starts.items()]
        return ends | first_at(self.settings, ranges, timestamp_ms)

    def _range(self, facts: TopicFacts, partition: int, start: int, end: int) -> TopicRange:
        return TopicRange(facts.topic, facts.identity, partition, start, end, f"{self.name}.{facts.stream}")

    def _ranges(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> tuple[TopicFacts, list[TopicRange]]:
        """Return the ranges of one stream, checked against what the topic holds now."""
        facts = self._topic_with(ranges)
        oldest, upcoming = self._offsets(facts, [ssp.partition for ssp in ranges])
        wanted = []
        for ssp, given in ranges.items():
            start, end = parse_offset(given.start, str(ssp)), parse_offset(given.end, str(ssp))
            TOPIC.check(ssp, start, end, oldest[ssp.partition], upcoming[ssp.partition])
            wanted.append(self._range(facts, ssp.partition, start, end))
        return facts, wanted


def _wrong_count(settings: KafkaSettings, name: str, topic: str, partitions: int, wanted: int) -> StreamExistsError:
    return StreamExistsError(
        f"stream {name!r} is there and declared otherwise: topic {topic!r} of {settings.where} has {partitions} "
        f"partitions, expected {wanted}.",
        "Declare the partitions that it has, or choose another name.",
        stream=f"{settings.name}.{name}",
    )


def _is_stream_name(topic: str) -> bool:
    try:
        check_name("stream", topic)
    except InvalidNameError:
        return False
    return True
