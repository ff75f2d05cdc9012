"""KafkaStreams: the topics of a Kafka cluster as streams, read in exact ranges of offsets.

Offsets are Kafka's own, as decimal numbers. The end of a partition is its last stable offset: later
records belong to open transactions. A range may have fewer records than offsets because of control
records, aborted transactions, compaction and markers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import check_choice
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.metadata import MetadataStore, NamespaceSnapshot
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.commit_log import decode_body
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.column_changes import NO_CHANGES, ColumnChanges
from dagster_adjunct.resources.schemas.paths import require_value
from dagster_adjunct.resources.schemas.records import ArrowFrame, to_arrow_table
from dagster_adjunct.resources.schemas.schema import Field, Schema
from dagster_adjunct.resources.schemas.types import write_name
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.streams import append_checks, system
from dagster_adjunct.resources.streams.declaration import (
    StreamDeclaration,
    build_declaration,
    check_same_declaration,
)
from dagster_adjunct.resources.streams.kafka import consume, produce
from dagster_adjunct.resources.streams.kafka.client import (
    KafkaAdmin,
    KafkaSettings,
    SettingValue,
    TopicFacts,
)
from dagster_adjunct.resources.streams.kafka.consume import MarkerHeader, TopicRange
from dagster_adjunct.resources.streams.kafka.formats import Json, KeyText
from dagster_adjunct.resources.streams.kafka.produce import SendResult, TaskAppend
from dagster_adjunct.resources.streams.kafka.record_formats import (
    KafkaTopic,
    check_topic_name,
    encode_table,
)
from dagster_adjunct.resources.streams.startpoint import check_timestamp_ms
from dagster_adjunct.resources.streams.system import (
    AppendOptions,
    AppendResult,
    Epochs,
    LogCompaction,
    Marker,
    NewStreams,
    NumberedOffsets,
    OffsetRange,
    StreamCapabilities,
    StreamInfo,
    StreamSystem,
    StreamWriter,
    SystemStreamPartition,
)
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")
_VISIBLE_SECONDS = 10.0
_LOOK_SECONDS = 0.02
_LAST = " (the last stable offset)"
_TOMBSTONES_KEPT_MS = "86400000"  # the broker's own default
_NAMESPACE = "kafka-streams"


class OffsetBounds(NamedTuple):
    """The oldest and the upcoming offsets of a topic's partitions, by partition."""

    oldest: dict[int, int]
    upcoming: dict[int, int]


class _CreatedStream(StoredDocument):
    """The stored topic and declaration of a stream that `KafkaStreams.create` created."""

    version: Literal[1] = 1
    topic: str
    declaration: StreamDeclaration

    def to_topic(self) -> KafkaTopic:
        """Return the topic's declaration, as the settings would have it."""
        schema = self.declaration.columns
        if not self.declaration.key:
            return KafkaTopic(self.topic, Json(schema))
        fields = []
        paths = []
        for name in self.declaration.key:
            fields.append(Field(name, require_value(name, schema.types, "the stream").type))
            if name not in schema:
                paths.append(f"{name} as {write_name(name)}")
        key = KeyText(Schema(tuple(fields)).ddl())
        return KafkaTopic(self.topic, Json(schema), key, "kafka-murmur2", key_paths=paths)


class DeclaredTopics:
    """The declarations of one system's streams: those in its settings, and those of created
    streams, in the lake.
    """

    def __init__(self, lake: Lake, settings: KafkaSettings) -> None:
        self._settings = settings
        self._where = f"the Kafka streams of system {settings.name!r} in {lake.url}"
        self._namespace = MetadataStore(lake).namespace(_NAMESPACE, settings.name)
        self._created: dict[str, _CreatedStream] = {}

    def of(self, stream: str) -> KafkaTopic:
        """Return the declaration of a stream's topic, which may not exist in Kafka; of raw bytes
        if there is none.
        """
        check_name("stream", stream)
        topic = self._settings.topics.get(stream)
        if topic is not None:
            return topic
        created = self._created.get(stream) or self._find_created(self._namespace.read(), stream)
        if created is None:
            return KafkaTopic()
        return created.to_topic()

    def topics(self) -> dict[str, str]:
        """Return the topic names of the streams that were declared or created, by stream."""
        names = {}
        for stream, stored in self._namespace.read().items():
            names[stream] = self._parse_created(stream, stored).topic
        for stream, topic in self._settings.topics.items():
            names[stream] = topic.name_for(stream)
        return names

    def check(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> KafkaTopic:
        """Return the topic declaration of a stream that is to have these columns, key and
        partitions.

        Raises StreamExistsError if another one is declared or was created, and ConfigurationError
        as `_build_created`.
        """
        wanted = self._declared(stream, schema, key, partitions)
        topic = self._settings.topics.get(stream)
        if topic is not None:
            earlier = StreamDeclaration(
                columns=topic.schema(), key=topic.key_names, partitions=partitions
            )
        else:
            created = self._find_created(self._namespace.read(), stream)
            if created is not None:
                earlier = created.declaration
            else:
                earlier = wanted  # the stream is new, so that nothing differs
        check_same_declaration(self._qualified(stream), earlier, wanted)
        return topic or self._build_created(stream, wanted).to_topic()

    def remember(self, stream: str, schema: Schema, key: Sequence[str], partitions: int) -> None:
        """Store the declaration of a created stream for other processes, unless the settings
        declare it.
        """
        if stream in self._settings.topics:
            return
        created = self._build_created(stream, self._declared(stream, schema, key, partitions))

        def decide(snapshot: NamespaceSnapshot) -> tuple[dict[str, Any], None]:
            """Return what to store, if no other process has, and no result."""
            stored = self._find_created(snapshot, stream)
            if stored is None:
                return {stream: created.model_dump(mode="json")}, None
            check_same_declaration(self._qualified(stream), stored.declaration, created.declaration)
            return {}, None

        self._namespace.transact(decide, by="create")
        self._created[stream] = created

    def _declared(
        self, stream: str, schema: Schema, key: Sequence[str], partitions: int
    ) -> StreamDeclaration:
        """Return the declaration of a stream with these columns, key and partitions, checked."""
        return build_declaration(
            StreamDeclaration, self._qualified(stream), schema, tuple(key), partitions
        )

    def _qualified(self, stream: str) -> str:
        """Return the stream's full name, "kafka.flights"."""
        return f"{self._settings.name}.{stream}"

    def _build_created(self, stream: str, declaration: StreamDeclaration) -> _CreatedStream:
        """Return what is stored of a stream that is to be created. Raises ConfigurationError if its
        topic is another stream.
        """
        topic = check_topic_name(self._settings.prefix + stream)
        for other, known in self._settings.topics.items():
            if known.name_for(other) == topic:
                raise errors.ConfigurationError(
                    f"{self._settings.where}: stream {stream!r} would be topic {topic!r}, which is"
                    f" stream {other!r}.",
                    f"Use stream {other!r}, or another name.",
                    system=self._settings.name,
                    stream=self._qualified(stream),
                    topic=topic,
                )
        return _CreatedStream(topic=topic, declaration=declaration)

    def _find_created(self, snapshot: NamespaceSnapshot, stream: str) -> _CreatedStream | None:
        """Return what is stored of a created stream, None if it was not created here."""
        stored = snapshot.get(stream)
        if stored is None:
            return None
        # Kept in memory, since a stored declaration never changes.
        return self._created.setdefault(stream, self._parse_created(stream, stored))

    def _parse_created(self, stream: str, stored: Any) -> _CreatedStream:
        """Return what is stored of a stream. Raises MalformedDocumentError."""
        step = (
            "Upgrade dagster-adjunct if a newer version wrote it; otherwise restore the lake's"
            " metadata."
        )
        return decode_body(
            _CreatedStream,
            stored,
            self._where,
            f"can't be read (the entry of stream {stream!r})",
            step,
        )


class _CheckedTopic(NamedTuple):
    """The name of a topic that may be a stream's, and whether it exists."""

    name: str
    exists: bool


class KafkaStreams(NumberedOffsets, StreamWriter):
    """The streams of one Kafka cluster, as the system of the name in its settings. Threads may
    share it.

    The lake stores the declarations of streams that were created here. Methods raise
    StreamUnavailableError, which is transient, if brokers do not answer.
    """

    capabilities = StreamCapabilities(
        finds_times=True, keeps_positions=True, new_streams=NewStreams(needs_key=True, typed=True)
    )

    def __init__(self, lake: Lake, settings: KafkaSettings) -> None:
        self.name = settings.name
        self.lake = lake
        self.settings = settings
        self.admin = KafkaAdmin(settings)
        self._declarations = DeclaredTopics(lake, settings)
        # Set in a snapshot: the answers that it has had.
        self._answers: dict[object, object] | None = None
        self._keys_checked_for = ""

    def list_streams(self) -> list[str]:
        """Return all streams that have a topic: declared and created ones, and topics whose name
        can be a stream's.
        """
        topics = self._declarations.topics()
        there = set(self.admin.topics())
        names = {stream for stream, topic in topics.items() if topic in there}
        # A topic is no stream of its own name if it is another stream, or if a declared stream has
        # that name.
        for topic in there.difference(topics.values(), topics):
            if _is_stream_name(topic):
                names.add(topic)
        return sorted(names)

    def create(
        self,
        name: str,
        *,
        schema: Schema,
        key: Sequence[str] = (),
        partitions: int,
        changes: ColumnChanges = NO_CHANGES,
    ) -> StreamInfo:
        """Create the topic of a stream, or do nothing if it exists with this declaration.

        A stream that the settings do not declare is the topic `prefix` + name and contains JSON;
        its columns and key are stored in the lake for other processes. Replication and other
        settings are the cluster's defaults. Raises StreamExistsError with the differences, and
        ConfigurationError or SchemaMismatchError.
        """
        self._refuse_changes(changes)
        topic = self._validate_creation(name, schema, key, partitions)
        self._declarations.remember(name, schema, key, partitions)
        if not topic.exists:
            self.admin.create(topic.name, partitions)
        return self.info(name)

    def check_create(
        self,
        name: str,
        *,
        schema: Schema,
        key: Sequence[str] = (),
        partitions: int,
        changes: ColumnChanges = NO_CHANGES,
    ) -> None:
        self._refuse_changes(changes)
        self._validate_creation(name, schema, key, partitions)

    def _refuse_changes(self, changes: ColumnChanges) -> None:
        """Raise ConfigurationError for renames and removals, which a topic can't follow."""
        if changes:
            step = "Leave renamed= and drop= out, or send to a stream of the lake."
            raise self._unable("rename or drop columns of a topic", step)

    def info(self, stream: str) -> StreamInfo:
        facts = self.topic(stream)
        policies = {policy.strip() for policy in facts.config.get("cleanup.policy", "").split(",")}
        compaction = None
        # With cleanup.policy=compact,delete a topic does not keep the newest record of every key.
        if policies == {"compact"}:
            tombstones_kept_ms = int(facts.config.get("delete.retention.ms", _TOMBSTONES_KEPT_MS))
            compaction = LogCompaction(timedelta(milliseconds=tombstones_kept_ms))
        declared = facts.declared
        return StreamInfo(
            stream,
            facts.partitions,
            declared.key_names,
            declared.partitioner,
            declared.schema(),
            declared.default_offset,
            compaction,
            facts.identity,
        )

    def topic(self, stream: str) -> TopicFacts:
        """Return the stream's topic, including its `config`. Raises StreamNotFoundError."""
        facts = self._describe_topic(stream)
        return replace(
            facts, config=self._ask_once((stream, "config"), lambda: self.admin.config(facts.topic))
        )

    def partitions(self, stream: str) -> list[SystemStreamPartition]:
        return [
            SystemStreamPartition(self.name, stream, p)
            for p in range(self._describe_topic(stream).partitions)
        ]

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._select_offsets(ssps, lambda bounds: bounds.oldest)

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._select_offsets(ssps, lambda bounds: bounds.upcoming)

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        """Return the offset of the first record, in offset order, that readers see and is at or
        after this time.
        """
        check_timestamp_ms("timestamp_ms", timestamp_ms, str(ssp))
        facts = self._describe_topic_of([ssp])
        return str(self._offsets_at_time(facts, [ssp.partition], timestamp_ms)[ssp.partition])

    def records_between(self, ranges: Mapping[SystemStreamPartition, OffsetRange]) -> int:
        """Return the number of records in the ranges, by reading them all; `distance` is a cheap
        upper bound.
        """
        if not ranges:
            return 0
        count = 0
        for _, messages in consume.read_ranges(*self._ranges(ranges)):
            for message in messages:
                if not consume.is_marker(message.headers()):
                    count += 1
        return count

    def read(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        *,
        epochs: Epochs = "all",
    ) -> DataFrame:
        """Return exactly the records of these ranges of one stream: its columns, then those of
        RECORD_META.

        `epochs="latest"` raises ConfigurationError: a topic does not store which ranges were read
        again, so records for which a replay produced nothing could not be left out. Offsets may be
        missing within a range. A task fails with OffsetOutOfRangeError if records have been removed
        by retention, or by recreating the topic, since the ranges were checked.
        """
        check_choice(epochs, f"epochs={epochs!r}", ("all", "latest"), argument="epochs")
        if epochs == "latest":
            problem = (
                f'stream system {self.name!r} can\'t read epochs="latest": a topic does not store'
                " which ranges were read again, so replaced records can't be found."
            )
            step = (
                "Send the results to a stream of the lake too, or compare headers (adjunct-source,"
                " adjunct-source-id, adjunct-epoch)."
            )
            raise errors.ConfigurationError(problem, step, argument="epochs", system=self.name)
        from dagster_adjunct.resources.streams.kafka.source import records_frame

        spark = resolve_session(spark)
        return records_frame(spark, *self._ranges(ranges))

    @property
    def longest_request(self) -> float:
        """For how many seconds a record that was sent may be under way."""
        return produce.delivery_seconds(self.settings)

    def append(
        self,
        stream: str,
        data: DataFrame | ArrowFrame | Sequence[Mapping[str, Any]],
        *,
        producer: str,
        sequence: int,
        end_of_dataset: str | None = None,
        valid_from: datetime | None = None,
        options: AppendOptions = AppendOptions(),
    ) -> AppendResult:
        """Append records to a topic: a Spark frame by its tasks, anything else by this process, in
        its order.

        `data` has the stream's columns and may have `__tombstone`, `__timestamp` (stored in ms;
        null is now) and `__epoch`. One task sends the records of a key, ordered by
        `options.order_by`, to the partition that Kafka's Java client chooses for the key; records
        without key go to any. `end_of_dataset` ends a version: every partition gets a marker;
        `valid_from` (with a time zone) is when the version becomes valid. Source positions of
        records become headers; `options.sources` are not stored. Several tasks may have read one
        partition, so `options.partitioned` has no effect. Without transactions, nothing more is
        sent once the lease of `options.fence` is lost.

        Without transactions this is at least once. With transactions it is exactly once per
        producer and sequence, and `options.consumed` of input from the same cluster is committed
        with the records for the consumer group `producer`. Sequences of a producer must
        increase.

        The result's ranges of offsets may include records of other producers. Raises
        SchemaMismatchError, PermanentError for a record that Kafka rejects, ProducerConflictError,
        CommitConflictError, and StreamUnavailableError, after which the same call may be repeated.
        """
        append_checks.check_append(producer, sequence, end_of_dataset, valid_from)
        facts = self.topic(stream)
        markers: dict[int, bytes] = {}
        if end_of_dataset is not None:
            header = MarkerHeader(
                version=end_of_dataset, partitions=facts.partitions, valid_from=valid_from
            )
            markers = dict.fromkeys(range(facts.partitions), header.encode())
        append = replace(
            self._task_append(facts, producer, sequence, markers, options.consumed or {}),
            fence=options.fence,
        )
        before = self.admin.upcoming(facts.topic, range(facts.partitions))
        name = str(facts)
        if hasattr(data, "mapInArrow"):
            return self._await_result(
                append,
                produce.send_frame(cast("DataFrame", data), append, options.order_by),
                before,
            )
        append_checks.check_table_options(name, options)
        declared = facts.declared
        table = to_arrow_table(data, name, declared.schema(), declared.key_names)
        table = encode_table(table, declared, name)
        sent = produce.produce_batches(append, table.to_batches())
        return self._await_result(append, sent, before)

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
        """Append only an end-of-dataset marker to these partitions (default: all).

        `rows` is the version's number of records in each partition, for validation; `valid_from`
        (with a time zone) is when the version becomes valid.
        """
        check_name("version", version)
        append_checks.check_append(producer, sequence, version, valid_from)
        facts = self.topic(stream)
        chosen = range(facts.partitions) if partitions is None else sorted(set(partitions))
        append_checks.check_marker_partitions(str(facts), version, chosen, facts.partitions, rows)
        same: Any = {
            "version": version,
            "checksum": checksum,
            "valid_from": valid_from,
            "partitions": facts.partitions,
        }
        counts: Mapping[int, int] = rows or {}
        markers = {p: MarkerHeader(**same, rows=counts.get(p)).encode() for p in chosen}
        append = self._task_append(facts, producer, sequence, markers, {})
        before = self.admin.upcoming(facts.topic, range(facts.partitions))
        return self._await_result(append, produce.produce_batches(append, []), before)

    def appended(self, stream: str, producer: str, sequence: int) -> AppendResult | None:
        """Return the result of an earlier append, or None; always None for a topic without
        transactions.

        A transaction that a crash left open does not count; the producer's next append aborts it.
        Raises ProducerConflictError for a sequence before the last.
        """
        append_checks.check_producer(producer, sequence)
        facts = self.topic(stream)
        if not facts.declared.transactional:
            return None
        marks = produce.read_marks(facts, producer)
        if 0 not in marks:  # where each append leaves one
            return None
        last = marks[0].mark
        if last.sequence < sequence:
            return None
        if last.sequence > sequence:
            raise append_checks.stale_sequence_error(str(facts), producer, sequence, last.sequence)
        return produce.result_from_spans(produce.spans_from_marks(marks, sequence), duplicate=True)

    def markers(
        self, stream: str, since: Mapping[SystemStreamPartition, str] | None = None
    ) -> list[Marker]:
        """Return the markers at or after these offsets, in order; None: all of the stream.

        Reads all records from there on. An offset that retention has passed counts as the oldest. A
        malformed marker is replaced by one that follows it without records in between; otherwise
        raises MalformedDocumentError.
        """
        facts = self.topic(stream)
        starts = {}
        if since is None:
            starts = dict.fromkeys(range(facts.partitions), 0)
        else:
            for ssp, offset in since.items():
                if ssp.qualified_stream == str(facts):  # others say nothing of this stream
                    starts[ssp.partition] = system.parse_offset(offset, str(ssp))
        oldest = self.admin.oldest(facts.topic, starts)
        upcoming = self.admin.upcoming(facts.topic, starts)
        ranges = []
        for p, at in sorted(starts.items()):
            ranges.append(TopicRange(p, max(at, oldest[p]), upcoming[p]))
        found = _find_markers(facts, ranges)
        return sorted(found, key=lambda marker: (marker.ssp.partition, int(marker.offset)))

    def _task_append(
        self,
        facts: TopicFacts,
        producer: str,
        sequence: int,
        markers: Mapping[int, bytes],
        consumed: Mapping[SystemStreamPartition, str],
    ) -> TaskAppend:
        """Return what tasks need to know of an append. Raises ConfigurationError for markers in a
        compacted topic.
        """
        if markers and "compact" in facts.config.get("cleanup.policy", ""):
            problem = (
                f"{facts} can't have end-of-dataset markers: topic {facts.topic!r} is compacted"
                " (cleanup.policy), which only accepts records with a key."
            )
            step = "Deliver versions through a topic that is not compacted."
            raise errors.ConfigurationError(problem, step, stream=str(facts), topic=facts.topic)
        ours = {}  # of this cluster, whose transactions can commit them
        for ssp, offset in consumed.items():
            if ssp.system == self.name:
                ours[ssp] = offset
        offsets: tuple[tuple[str, int, int], ...] = ()
        if facts.declared.transactional:
            topics = {
                name: self._describe_topic(name).topic for name in {ssp.stream for ssp in ours}
            }
            offsets = tuple(
                (topics[ssp.stream], ssp.partition, int(offset)) for ssp, offset in ours.items()
            )
        return TaskAppend(facts, producer, sequence, tuple(sorted(markers.items())), offsets)

    def _await_result(
        self, append: TaskAppend, sent: SendResult, before: Mapping[int, int]
    ) -> AppendResult:
        """Return the result of an append, once readers see it; partitions without records have
        empty ranges.

        `before` are the partitions' ends before the append, used where a broker did not return
        offsets. Partitions that were added since are not in it, and may have records already.
        """
        spans = sent.spans
        if sent.duplicate:
            return produce.result_from_spans(spans, duplicate=True)
        target = append.target
        deadline = time.monotonic() + _VISIBLE_SECONDS
        ends = dict.fromkeys(range(target.partitions), 0)
        for span in spans:
            ends[span.partition] = max(span.next or 0, ends.get(span.partition, 0))
        after = self.admin.upcoming(target.topic, ends)
        # Wait only up to the deadline: another producer's open transaction may hide our records for
        # longer.
        while any(after[p] < end for p, end in ends.items()) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
            after = self.admin.upcoming(target.topic, ends)
        known = []
        for span in spans:
            if span.first is None or span.next is None:
                first = before.get(span.partition, 0)
                known.append(replace(span, first=first, next=after[span.partition]))
            else:
                known.append(span)
        result = produce.result_from_spans(known, duplicate=False)
        empty = {}
        for p, offset in after.items():
            if p not in result.first:
                empty[p] = str(offset)
        return replace(result, first={**result.first, **empty}, next={**result.next, **empty})

    def snapshot(self, stream: str) -> StreamSystem:
        """Return a view of the streams that requests each answer only once, for all partitions
        of a stream.
        """
        return self._view(answers={})

    def checking_keys(self, dataset: str) -> StreamSystem:
        """Return a view whose reads raise KeyOrderError for a record that is not in the
        partition of its key.
        """
        # The view of a snapshot is a snapshot, too, but without its answers: the topics among these
        # do not say that keys are checked.
        return self._view(answers=None if self._answers is None else {}, keys_checked_for=dataset)

    def _view(
        self, *, answers: dict[object, object] | None, keys_checked_for: str = ""
    ) -> KafkaStreams:
        """Return the same streams with other options; `answers`, unless None, collects those of a
        snapshot.
        """
        view = KafkaStreams(self.lake, self.settings)
        view.admin = self.admin
        view._answers = answers
        view._keys_checked_for = keys_checked_for
        return view

    def _ask_once(self, question: object, ask: Callable[[], T]) -> T:
        """Return `ask()`; in a snapshot, its answer when this `question` was first asked."""
        if self._answers is None:
            return ask()
        if question not in self._answers:
            self._answers[question] = ask()
        return cast("T", self._answers[question])

    def _validate_creation(
        self, name: str, schema: Schema, key: Sequence[str], partitions: int
    ) -> _CheckedTopic:
        """Return the topic for a stream that is to be created.

        Raises StreamExistsError if the stream exists with another declaration.
        """
        check_name("stream", name)
        topic = self._declarations.check(name, schema, key, partitions).name_for(name)
        described = self.admin.describe(topic)
        if described is not None and described.partitions != partitions:
            problem = (
                f"stream {name!r} exists with another declaration: topic {topic!r} of"
                f" {self.settings.where} has {described.partitions} partitions, expected"
                f" {partitions}."
            )
            step = "Declare the partitions that it has, or use another name."
            raise errors.StreamExistsError(problem, step, stream=f"{self.name}.{name}")
        return _CheckedTopic(topic, exists=described is not None)

    def _describe_topic(self, stream: str) -> TopicFacts:
        """Return the stream's topic, without its `config`. Raises StreamNotFoundError."""

        def ask() -> TopicFacts:
            declared = self._declarations.of(stream)
            topic = declared.name_for(stream)
            described = self.admin.describe(topic)
            if described is None:
                raise self._not_found(stream, topic)
            # Tasks do not need the declarations of other streams.
            settings = replace(self.settings, topics={})
            return TopicFacts(
                settings,
                stream,
                topic,
                described.id,
                described.partitions,
                declared,
                keys_checked_for=self._keys_checked_for,
            )

        return self._ask_once(stream, ask)

    def _not_found(self, stream: str, topic: str) -> errors.StreamNotFoundError:
        """Return the error for a stream that has no topic."""
        there = self.list_streams()
        some = ", ".join(there[:20]) or "there are none"
        if len(there) > 20:
            some += f" and {len(there) - 20} more"
        problem = (
            f"there is no stream {stream!r} in {self.settings.where}: it would be topic {topic!r}."
        )
        step = f"Declare the stream's topic, create it, or use another stream: {some}."
        return errors.StreamNotFoundError(problem, step, stream=f"{self.name}.{stream}")

    def _describe_topic_of(self, ssps: Iterable[SystemStreamPartition]) -> TopicFacts:
        """Return the topic of these partitions, which must all exist and be of one stream."""
        wanted = list(ssps)
        facts = self._describe_topic(system.require_one_stream(self.name, wanted))
        for ssp in wanted:
            system.check_partition(ssp, facts.partitions)
        return facts

    def _select_offsets(
        self,
        ssps: Iterable[SystemStreamPartition],
        select: Callable[[OffsetBounds], dict[int, int]],
    ) -> dict[SystemStreamPartition, str]:
        """Return the oldest or upcoming offsets of these partitions, of any streams; `select`
        chooses which.
        """
        result: dict[SystemStreamPartition, str] = {}
        for _, of_stream in groupby(sorted(ssps), lambda ssp: ssp.qualified_stream):
            wanted = list(of_stream)
            offsets = select(
                self._offsets(self._describe_topic_of(wanted), [ssp.partition for ssp in wanted])
            )
            result |= {ssp: str(offsets[ssp.partition]) for ssp in wanted}
        return result

    def _offsets(self, facts: TopicFacts, partitions: Sequence[int]) -> OffsetBounds:
        """Return the offsets of these partitions, in a snapshot of all; the oldest are requested
        first.
        """
        if self._answers is None:
            wanted = partitions
        else:  # the answer is kept for all questions
            wanted = range(facts.partitions)

        def ask() -> OffsetBounds:
            oldest = self.admin.oldest(facts.topic, wanted)
            return OffsetBounds(oldest, self.admin.upcoming(facts.topic, wanted))

        return self._ask_once((facts.stream, "offsets"), ask)

    def _offsets_at_time(
        self, facts: TopicFacts, partitions: Sequence[int], timestamp_ms: int
    ) -> dict[int, int]:
        """Return the offset of each partition's first record at or after a time (ms since the
        epoch), in a snapshot for all partitions.
        """
        if self._answers is None:
            wanted = partitions
        else:  # the answer is kept for all questions
            wanted = range(facts.partitions)

        def ask() -> dict[int, int]:
            # The ends first, so that a record that arrives meanwhile is not skipped.
            ends = self._offsets(facts, wanted).upcoming
            since = self.admin.since(facts.topic, wanted, timestamp_ms)
            starts = {}
            for p, offset in since.items():
                if 0 <= offset < ends[p]:
                    starts[p] = offset
            ranges = [TopicRange(p, start, ends[p]) for p, start in starts.items()]
            # Without a record at or after the time, that is the end.
            return ends | consume.find_offsets_at_time(facts, ranges, timestamp_ms)

        return self._ask_once((facts.stream, timestamp_ms), ask)

    def _ranges(
        self, ranges: Mapping[SystemStreamPartition, OffsetRange]
    ) -> tuple[TopicFacts, list[TopicRange]]:
        """Return the topic of these ranges of one stream, and the ranges, validated against the
        topic's current offsets.
        """
        facts = self._describe_topic_of(ranges)
        bounds = self._offsets(facts, [ssp.partition for ssp in ranges])
        wanted = []
        for ssp, given in ranges.items():
            start = system.parse_offset(given.start, str(ssp))
            end = system.parse_offset(given.end, str(ssp))
            oldest = bounds.oldest[ssp.partition]
            system.check_range(ssp, start, end, oldest, bounds.upcoming[ssp.partition], last=_LAST)
            wanted.append(TopicRange(ssp.partition, start, end))
        return facts, wanted


def _find_markers(facts: TopicFacts, ranges: Sequence[TopicRange]) -> list[Marker]:
    """Return the markers in these ranges. Raises MalformedDocumentError for one that no other
    follows.
    """
    found: list[Marker] = []
    malformed: dict[int, errors.MalformedDocumentError] = {}
    for wanted, got in consume.read_ranges(facts, ranges):
        partition = wanted.partition
        for message in got:
            if consume.is_marker(message.headers()):
                try:
                    found.append(consume.marker_from_message(message, facts.ssp(partition)))
                    malformed.pop(partition, None)
                except errors.MalformedDocumentError as error:
                    malformed.setdefault(partition, error)
            elif partition in malformed:  # a record follows, so no other marker can replace it
                raise malformed[partition]
    errors.raise_first(list(malformed.values()))
    return found


def _is_stream_name(topic: str) -> bool:
    """Whether a topic's name can be that of a stream."""
    try:
        check_name("stream", topic)
    except errors.InvalidNameError:
        return False
    return True


# By system: its settings, and the function that was registered for it.
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
    """Register a Kafka cluster as the stream system `name`, so that its streams are `NAME.STREAM`;
    return its settings.

    `client` are librdkafka settings, with secrets as "env:NAME". `client_factory`
    ("module:function") returns more of them in each process, such as token callbacks. `topics`
    declares streams; any other name is the topic of that name, with raw keys and values. A stream
    that Adjunct creates is the topic `prefix` + name. The same call may be repeated. Raises
    ConfigurationError.
    """
    settings = KafkaSettings(
        name, bootstrap_servers, dict(client or {}), client_factory, dict(topics or {}), prefix
    )
    known, opener = _openers.get(name, (None, None))
    if opener is None or known != settings:
        opener = partial(KafkaStreams, settings=settings)
    system.register_system(name, opener)  # rejects another function than the registered one
    _openers[name] = settings, opener
    return settings
