"""LakeStreams: append-only streams in the lake's object store, Adjunct's own.

    streams/_names/NAME                        says that a stream of this name was declared
    streams/NAME/CURRENT, manifests/…          the commit log (`document.StreamState`)
    streams/NAME/data/ATTEMPT/part-0000i-…     an append's records, one file a partition
    streams/NAME/pages/…                       pages of the index

An append writes its files first and then commits offsets, markers and its producer's sequence at once: a crash
in between leaves files that no manifest lists, which `maintain` collects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import ConfigurationError, ObjectExistsError, ProducerConflictError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.removal import is_deleted
from dagster_adjunct.resources.schemas.records import ArrowFrame, table_of
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.checked_arguments import check_producer, no_partition, one_stream
from dagster_adjunct.resources.streams.interface.marker_times import micros_of_marker
from dagster_adjunct.resources.streams.interface.source_ranges import Sources
from dagster_adjunct.resources.streams.interface.startpoint import check_ms
from dagster_adjunct.resources.streams.interface.stream_system import AppendResult, StreamInfo, StreamSystem
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.streams.lake.appending import Append, NewMarker, decide_append
from dagster_adjunct.resources.streams.lake.arrow_read import first_offset_at
from dagster_adjunct.resources.streams.lake.lake_reads import LakeReads
from dagster_adjunct.resources.streams.lake.producers import content_digest, known, result_of
from dagster_adjunct.resources.streams.lake.segment_index import Fold, foldable
from dagster_adjunct.resources.streams.lake.sending import written
from dagster_adjunct.resources.streams.lake.stream_declaration import (
    NEW_STREAMS,
    StreamDescription,
    declare,
    described,
    evolve,
    info_of,
)
from dagster_adjunct.resources.streams.lake.stream_manifest import (
    KIND,
    CompactionPolicy,
    Retention,
    StreamState,
)
from dagster_adjunct.resources.streams.lake.stream_states import NAMES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.streams.lake.maintenance import Maintained

_COMMIT_ATTEMPTS = 100


class LakeStreams(LakeReads):
    """The streams of one lake, as the system `lake`. Safe to use from threads and from many processes."""

    evolves = True
    new_streams = NEW_STREAMS
    appends_alone = True
    counts_unread = True
    reads_columns = True
    keeps_positions = True
    appends_by_one_task = True
    reads_arrow = True
    reads_in_tasks = True

    # -- declaring

    def create(
        self,
        name: str,
        *,
        schema: Schema,
        key: Sequence[str] = (),
        partitions: int,
        timestamp: str | None = None,
        retention: Retention | None = None,
        compaction: CompactionPolicy | None = None,
    ) -> StreamInfo:
        """Create a stream, or give one that is there the columns that are added or widened; else nothing changes.

        What is left out (not `key`) stays as it is there. Records that are there are not written again: what is added
        is null in them, what is widened is cast when they are read.
        `key` gives a record's partition (Spark's hash of it modulo `partitions`; a null key has one, too); a
        stream without key has one partition. `timestamp` names the column with the record's time; without one,
        and where it is null, that is the time of the append.
        Raises StreamExistsError with the differences, and ConfigurationError or SchemaMismatchError.
        """
        prefix = self.lake.stream_prefix(name)
        declaration = declare(name, schema, tuple(key), partitions, timestamp, retention, compaction)

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            if commit is None or is_deleted(commit):
                return StreamState.empty(declaration).body()
            state = self._parse(commit)
            now = evolve(name, state.declaration, declaration)
            return None if now is state.declaration else state.with_declaration(now).body()

        # The name first: a stream that is there is always listed, and a listed name without commit is left out.
        with suppress(ObjectExistsError):
            self.lake.store.put_if_absent(f"{NAMES}/{name}", b"")
        self.lake.commit_log(prefix, KIND).transact(decide, by="create", attempts=_COMMIT_ATTEMPTS)
        return self.info(name)

    def check_create(self, name: str, *, schema: Schema, key: Sequence[str] = (), partitions: int) -> None:
        declaration = declare(name, schema, tuple(key), partitions, None, None, None)
        commit = self.log(name).current()
        if commit is not None and not is_deleted(commit):
            evolve(name, self._parse(commit).declaration, declaration)

    def info(self, stream: str) -> StreamInfo:
        state = self.state(stream)[1]
        return info_of(stream, state)

    def stored_bytes(self, stream: str) -> int:
        return self.describe(stream).size

    def describe(self, stream: str) -> StreamDescription:
        """Return the whole of what the stream's manifest says in sums."""
        return described(stream, *self.state(stream))

    # -- offsets

    def oldest(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._edges(ssps, lambda state: state.oldest)

    def upcoming(self, ssps: Iterable[SystemStreamPartition]) -> dict[SystemStreamPartition, str]:
        return self._edges(ssps, lambda state: state.next)

    def offset_for_timestamp(self, ssp: SystemStreamPartition, timestamp_ms: int) -> str:
        check_ms("timestamp_ms", timestamp_ms, str(ssp))
        state = self._state_of(ssp)
        prefix, pages = self.lake.stream_prefix(ssp.stream), self.pages_of(ssp.stream)
        offset = first_offset_at(self.lake.store, prefix, state, pages, ssp.partition, timestamp_ms * 1000)
        return str(offset)

    # -- appending

    def append(
        self,
        stream: str,
        data: DataFrame | ArrowFrame | Sequence[Mapping[str, Any]],
        *,
        producer: str,
        sequence: int,
        end_of_dataset: str | None = None,
        valid_from: datetime | None = None,
        order_by: Sequence[str] = (),
        partitioned: bool = False,
        consumed: Mapping[SystemStreamPartition, str] | None = None,
        sources: Sources | None = None,
        one_task: bool = False,
    ) -> AppendResult:
        """Add records to all their partitions in one commit, once per producer and sequence.

        `data` is a Spark frame, an Arrow table or batch, a pandas or Polars frame, or rows as dictionaries; all but
        Spark's become a table, which is written without Spark. It has the stream's columns, or those that it had before
        some were added, which then are null. It may have `__tombstone` (boolean), `__timestamp` and `__epoch` (int).
        The records of a partition keep the order of a table, or get that of `order_by` in a Spark frame (columns that
        only serve the order are left out). `end_of_dataset` ends a version: a marker follows in every partition, with
        the number of its records since its marker before; `valid_from` (with its zone) is since when it is valid.
        `partitioned=True` says that partition i of the frame holds exactly the stream's partition i. `consumed` is not
        kept here. `sources` says what ranges all records were made of; each then has the columns of POSITION, which are
        left out otherwise. With `one_task` one task writes all partitions of a frame, which has few records.

        A retry with the same records is answered with the first result. It must come the same way, as a table or as a
        Spark frame, because the two have digests of their own. Raises SchemaMismatchError, ProducerConflictError, and
        CommitConflictError or CommitStateUnknownError, after which the same call may be repeated.
        """
        check_producer(producer, sequence)
        if end_of_dataset is not None:
            check_name("version", end_of_dataset)
        valid_micros = micros_of_marker(end_of_dataset, valid_from)
        _, state = self.state(stream)
        if not hasattr(data, "mapInArrow"):
            data = table_of(data, f"stream {stream!r}", state.declaration.schema_)
        while True:
            append, files = written(
                self.lake,
                stream,
                state,
                data,
                producer,
                sequence,
                end_of_dataset,
                valid_micros,
                order_by,
                partitioned,
                self.now_ms(),
                sources,
                one_task,
            )
            try:
                result = self._commit(state, append)
            except ProducerConflictError:
                sent = known(self.state(stream)[1].producers, producer, sequence, stream)
                if sent is None or sent.columns == append.columns:
                    raise
                _, state = self.state(stream)
                continue  # somebody with other columns came first: with the same records, maybe
            if result.duplicate:
                self.lake.store.delete_many(files)
            return result

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
        """Add an end-of-dataset marker to these partitions (default: all) and nothing else.

        `version` is the name that the version gets, which has no id before it is sealed. `rows` tells the records of
        the version by partition, for the reader to check; without it, each marker says how many the stream holds
        since the partition's marker before. `valid_from` (with its zone) is since when the version is valid.
        """
        check_producer(producer, sequence)
        check_name("version", version)
        valid_micros = micros_of_marker(version, valid_from)
        _, state = self.state(stream)
        sent = known(state.producers, producer, sequence, stream)
        count = sent.partitions if sent is not None and sent.partitions else state.declaration.partitions
        chosen = tuple(range(count)) if partitions is None else tuple(sorted(set(partitions)))
        if not chosen or not 0 <= chosen[0] <= chosen[-1] < count:
            raise ConfigurationError(
                f"marker {version!r}: partitions {list(chosen)} are not all of {stream!r}, which has {count}.",
                "Name partitions that the stream has.",
                argument="partitions",
                stream=f"lake.{stream}",
            )
        marker = NewMarker(version, chosen, None if rows is None else dict(rows), checksum, valid_micros)
        started = self.now_ms()
        digest = content_digest((), marker.content())
        append = Append(stream, producer, sequence, digest, f"{started:013d}", started, (), marker, state.id)
        return self._commit(state, append)

    def appended(self, stream: str, producer: str, sequence: int) -> AppendResult | None:
        sent = known(self.state(stream)[1].producers, producer, sequence, stream)
        return None if sent is None else result_of(sent, duplicate=True)

    # -- keeping

    def configure(self, stream: str, *, retention: Retention | None, compaction: CompactionPolicy | None) -> None:
        """Set the policies of a stream; they hold from the next `maintain` on."""
        update = {"retention": retention, "compaction": compaction}

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            state = self._parse(self._there(stream, commit))
            declaration = state.declaration.model_copy(update=update)
            if declaration == state.declaration:
                return None
            return state.model_copy(update={"declaration": declaration}).body()

        self.log(stream).transact(decide, by="configure", attempts=_COMMIT_ATTEMPTS)

    def maintain(self, stream: str, now: datetime | None = None) -> Maintained:
        """Apply the stream's retention and compaction, and delete what has been out of reach for an hour.

        Retention drops whole segments from the front and moves `oldest`; compaction changes no offset. An append
        that began longer ago can't commit any more, and says so.
        """
        from dagster_adjunct.resources.streams.lake.maintenance import maintain

        return maintain(self, stream, now or self.lake.now())

    def snapshot(self, stream: str) -> StreamSystem:
        """Return the streams with this one as it stands now: two requests answer all questions about it."""
        return _Snapshot(self, stream)

    # -- inside

    def _commit(self, seen: StreamState, append: Append) -> AppendResult:
        result: list[AppendResult] = []
        append = replace(append, fold=self._fold(append.stream, seen))

        def decide(commit: Commit | None) -> dict[str, Any] | None:
            state = self._parse(self._there(append.stream, commit))
            after, decided = decide_append(state, append, self.now_ms())
            result[:] = [decided]
            return None if after is None else after.body()

        self.log(append.stream).transact(decide, by=append.producer, attempts=_COMMIT_ATTEMPTS)
        return result[0]

    def _fold(self, stream: str, state: StreamState) -> Fold | None:
        """Write the page that the index needs next, if any, so that the decision itself does no I/O."""
        full = foldable(state)
        if full is None:
            return None
        level, entries = full
        return Fold(self.pages_of(stream).write(level, entries), entries, self.now_ms())

    def _state_of(self, ssp: SystemStreamPartition) -> StreamState:
        _, state = self.state(one_stream(self.name, [ssp]))
        if ssp.partition >= state.declaration.partitions:
            raise no_partition(ssp, state.declaration.partitions)
        return state

    def _edges(
        self, ssps: Iterable[SystemStreamPartition], edge: Callable[[StreamState], tuple[int, ...]]
    ) -> dict[SystemStreamPartition, str]:
        edges: dict[SystemStreamPartition, str] = {}
        by_stream: dict[str, list[SystemStreamPartition]] = {}
        for ssp in ssps:
            by_stream.setdefault(one_stream(self.name, [ssp]), []).append(ssp)
        for stream, wanted in by_stream.items():
            offsets = edge(self.state(stream)[1])
            for ssp in wanted:
                if ssp.partition >= len(offsets):
                    raise no_partition(ssp, len(offsets))
                edges[ssp] = str(offsets[ssp.partition])
        return edges


class _Snapshot(LakeStreams):
    """The streams of a lake, of which one is seen as it was at the first look; its manifests never change."""

    def __init__(self, streams: LakeStreams, stream: str) -> None:
        super().__init__(streams.lake)
        self._stream = stream
        self._state: tuple[Commit, StreamState] | None = None

    def state(self, stream: str) -> tuple[Commit, StreamState]:
        if stream != self._stream:
            return super().state(stream)
        if self._state is None:
            self._state = super().state(stream)
        return self._state
