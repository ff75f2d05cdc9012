"""Named readers of lake streams: read the records since the reader's last commit, then commit the
position.

    streams/NAME/readers/READER/CURRENT, manifests/…    the reader's commit log (`ReaderPosition`)

A position is committed after its records were processed, by compare-and-swap: a crash before that
reads the same records again, and of two concurrent readers one commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Literal, Self, Unpack

from pydantic import Field, PositiveInt

from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.errors import CommitConflictError, OffsetOutOfRangeError
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.names import check_name, unqualify_stream_name
from dagster_adjunct.resources.objects.commit_log import (
    Commit,
    CommitLog,
    commit_number,
    decode_body,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.lake import manifest
from dagster_adjunct.resources.streams.lake.lineage import (
    Lineage,
    lineage_lookup,
    translate_coverage,
)
from dagster_adjunct.resources.streams.lake.manifest import (
    Count,
    Coverage,
    StreamState,
    SupersededRange,
)
from dagster_adjunct.resources.streams.lake.read import ReadOptions
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import LAKE, OffsetRange, SystemStreamPartition
from dagster_adjunct.resources.validation import validated, validated_methods

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


READER_KIND = "reader"


class ReaderPosition(StoredDocument):
    """The position of a reader: the next offset of each partition of the stream with this identity.

    `read` is the coverage that the stream's records were made of (`StreamState.read`) when the
    reader began its last batch that reached the stream's end, or its first batch.
    """

    stream: str
    offsets: tuple[Count, ...]
    read: dict[str, dict[str, Coverage]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """A named reader: its next offsets by partition, and how many offsets it is `behind` and has
    `lost` to retention.

    Both numbers include markers. `commits` is the number of its commits; the last was at
    `committed_at`, by the process `by`. `problem` is the reason why the reader can't continue, ""
    if it can.
    """

    name: str
    offsets: tuple[int, ...]
    behind: int
    lost: int
    commits: int
    committed_at: datetime
    by: str
    problem: str = ""


@validated_methods
@dataclass(eq=False, slots=True)
class NewRecords:
    """A batch of records that a reader has not committed yet: read it by `table`, `parts` or
    `frame`, then `commit`.

    `number` counts the reader's batches from 1; a batch that is read again has the same number, and
    maybe more records. `ranges` are its offsets, `records` is its number of records. `lost` are
    offsets that retention dropped unread. `replaced` are source ranges that an application has
    replayed since the reader was last at the stream's end: what the reader made of their earlier
    results is out of date.
    """

    stream: str
    reader: str
    by: str
    ranges: dict[SystemStreamPartition, OffsetRange]
    lost: dict[SystemStreamPartition, OffsetRange]
    replaced: tuple[SupersededRange, ...]
    records: int
    number: int
    _streams: LakeStreams = field(repr=False)
    _parent: Commit | None = field(repr=False)
    _position: ReaderPosition = field(repr=False)
    committed: bool = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: records that were not committed are read again."""

    def table(
        self, columns: Sequence[str] | None = None, **options: Unpack[ReadOptions]
    ) -> pa.Table:
        """Return the records in memory, as `LakeStreams.read_arrow` does."""
        return self._streams.read_arrow(self.ranges, columns, **options)

    def parts(
        self, columns: Sequence[str] | None = None, **options: Unpack[ReadOptions]
    ) -> Iterator[pa.Table]:
        """Yield the records in tables of at most 65,536; the first one is empty."""
        return self._streams.read_parts(self.ranges, columns, **options)

    def frame(
        self, spark: SparkSession | Callable[[], SparkSession], **options: Unpack[ReadOptions]
    ) -> DataFrame:
        """Return the records as a Spark frame, as `LakeStreams.read` does."""
        return self._streams.read(spark, self.ranges, **options)

    def commit(self) -> None:
        """Commit that these records were processed, so that the next batch begins after them.
        Idempotent.

        Raises CommitConflictError if another process has committed for this reader meanwhile, and
        so has processed these records too, or has removed the reader. Raises
        CommitStateUnknownError as every commit.
        """
        if self.committed:
            return
        log = _reader_log(self._streams.lake, self.stream, self.reader)
        try:
            log.commit(self._parent, self._position.model_dump(mode="json"), by=self.by)
        except CommitConflictError as conflict:
            now = log.current()
            if now is None:
                who = "the reader was removed"
            else:
                who = f"{now.by} committed batch {now.number} at {now.created_at}"
            problem = (
                f"reader {self.reader!r} of lake.{self.stream}: batch {self.number} can't be"
                f" committed: {who}."
            )
            step = (
                "Undo the results of this batch, or store results by batch number; then read again."
            )
            raise CommitConflictError(problem, step, stream=f"lake.{self.stream}") from conflict
        self.committed = True


@validated
def read_new(
    lake: Lake,
    stream: str,
    *,
    reader: str,
    start: Literal["oldest", "upcoming"] = "oldest",
    on_lost: Literal["fail", "oldest"] = "fail",
    max_records: PositiveInt | None = None,
    by: str | None = None,
) -> NewRecords:
    """Return the records of a lake stream that are new for a named reader; `commit` at the end of a
    `with` block.

    A reader begins at `start`; its first commit creates it. A batch has at most `max_records`,
    counting markers. Raises OffsetOutOfRangeError if retention has dropped unread records, unless
    `on_lost="oldest"`, and if the stream was recreated, or repartitioned before this reader had
    read all of it.
    """
    check_name("reader", reader)
    streams = LakeStreams(lake)
    stream = unqualify_stream_name(LAKE, stream)
    # Read the position first, so that the stream's state is at least as new.
    parent = _reader_log(lake, stream, reader).current()
    _, state = streams.state(stream)
    if parent is not None:
        number = parent.number + 1
        position = _resume_position(lake, stream, reader, parent, state)
    else:
        number = 1
        position = _first_position(state, start)
    ssps = streams.partitions(stream)
    begins = []
    lost = {}
    for ssp, offset, oldest in zip(ssps, position.offsets, state.oldest, strict=True):
        begins.append(max(offset, oldest))
        if offset < oldest:
            lost[ssp] = OffsetRange(str(offset), str(oldest))
    if lost and on_lost == "fail":
        raise _lost_error(stream, reader, lost)
    ends = _divide_limit(begins, state.next, max_records)
    ranges = {}
    for ssp, begin, end in zip(ssps, begins, ends, strict=True):
        ranges[ssp] = OffsetRange(str(begin), str(end))
    # Until the reader is at the stream's end, keep the earlier coverage: the results that replace
    # those it has read may still be unread, so every batch up to the end reports what is replaced.
    # Before its first batch it has read nothing.
    at_end = parent is None or ends == state.next
    if at_end:
        read = state.read
    else:
        read = position.read
    after = ReaderPosition(stream=state.id, offsets=ends, read=read)
    known = translate_coverage(position.read, state.read, lineage_lookup(streams))
    replaced = manifest.find_replaced_since(known, state.read)
    return NewRecords(
        stream,
        reader,
        by or f"reader {reader}",
        ranges,
        lost,
        tuple(replaced),
        streams.records_between(ranges),
        number,
        streams,
        parent,
        after,
    )


def _first_position(state: StreamState, start: Literal["oldest", "upcoming"]) -> ReaderPosition:
    """Return the position of a new reader, which has read nothing."""
    offsets = state.oldest if start == "oldest" else state.next
    return ReaderPosition(stream=state.id, offsets=offsets)


def _resume_position(
    lake: Lake, stream: str, reader: str, parent: Commit, state: StreamState
) -> ReaderPosition:
    """Return the reader's position in the current partitions. Raises OffsetOutOfRangeError if the
    reader can't continue.
    """
    position = _follow_repartitions(_parse(parent, lake), state)
    problem = _find_problem(position, state)
    if problem:
        raise OffsetOutOfRangeError(
            f"reader {reader!r} can't continue in lake.{stream}: {problem}.",
            f"Start over as a new reader: adjunct stream remove-reader {stream} {reader}; or"
            " remove_reader in Python.",
            stream=f"lake.{stream}",
        )
    return position


def _lost_error(
    stream: str, reader: str, lost: Mapping[SystemStreamPartition, OffsetRange]
) -> OffsetOutOfRangeError:
    """Return the error for unread records that retention has dropped: the ranges `lost`."""
    positions = ", ".join(
        f"{ssp} (at {span.start}, the oldest left is {span.end})" for ssp, span in lost.items()
    )
    return OffsetOutOfRangeError(
        f"reader {reader!r}: retention has passed its position in {positions}: the records in"
        " between are lost.",
        'Accept the loss with on_lost="oldest", and keep the stream longer than the reader may'
        " stand still.",
        stream=f"lake.{stream}",
    )


@validated
def list_readers(lake: Lake, stream: str) -> list[ReaderInfo]:
    """Return the named readers of a lake stream, sorted by name. Costs a listing, and two
    requests for each reader.
    """
    stream = unqualify_stream_name(LAKE, stream)
    _, state = LakeStreams(lake).state(stream)
    names = []
    for item in lake.store.list(f"{lake.stream_prefix(stream)}/readers/"):
        if item.key.endswith("/CURRENT"):
            names.append(item.key.split("/")[-2])
    readers = []
    for name in sorted(names):
        commit = _reader_log(lake, stream, name).current()
        if commit is not None:
            position = _follow_repartitions(_parse(commit, lake), state)
            readers.append(_describe_reader(name, position, commit, state))
    return readers


def _describe_reader(
    name: str, position: ReaderPosition, commit: Commit, state: StreamState
) -> ReaderInfo:
    """Return what `list_readers` says of a reader; `behind` and `lost` are 0 if it can't
    continue.
    """
    behind = 0
    lost = 0
    problem = _find_problem(position, state)
    if not problem:
        for offset, oldest, upcoming in zip(
            position.offsets, state.oldest, state.next, strict=True
        ):
            behind += upcoming - max(offset, oldest)
            lost += max(oldest - offset, 0)
    return ReaderInfo(
        name,
        position.offsets,
        behind,
        lost,
        commits=commit.number,
        committed_at=commit.created_at,
        by=commit.by,
        problem=problem,
    )


@validated
def remove_reader(lake: Lake, stream: str, reader: str) -> bool:
    """Remove a named reader and its history; return whether it existed. If it has an open batch,
    that can't commit.
    """
    stream = unqualify_stream_name(LAKE, stream)
    log = _reader_log(lake, stream, reader)
    there = lake.store.head(log.pointer_key) is not None
    # Listed before the pointer is deleted, and without first manifests, so as not to delete what a
    # new reader of this name writes meanwhile.
    old = []
    for item in lake.store.list(f"{log.prefix}/manifests/"):
        if commit_number(item.key) > 1:
            old.append(item.key)
    lake.store.delete(log.pointer_key)  # without a pointer there is no reader
    lake.store.delete_many(old)
    return there


def _follow_repartitions(position: ReaderPosition, state: StreamState) -> ReaderPosition:
    """Return the position in the new partitions if the stream was repartitioned, maybe repeatedly,
    while the reader was at its end; otherwise the position as it is.
    """
    lineage = Lineage.of(state)
    for rewriting, identity in zip(lineage.rewritings, lineage.ids[1:], strict=True):
        if (rewriting.id, rewriting.ended) == (position.stream, position.offsets):
            position = position.model_copy(update={"stream": identity, "offsets": rewriting.next})
    return position


def _find_problem(position: ReaderPosition, state: StreamState) -> str:
    """Return why a reader can't continue from this position, "" if it can."""
    if position.stream != state.id:
        if Lineage.of(state).index_of(position.stream) is not None:
            return "the stream was repartitioned before it had read all of it"
        return f"the stream was deleted and recreated (it is {state.id}, and was {position.stream})"
    if len(position.offsets) != len(state.next):
        return f"the stream has {len(state.next)} partitions now, and had {len(position.offsets)}"
    for offset, upcoming in zip(position.offsets, state.next, strict=True):
        if offset > upcoming:
            return "the stream ends before the reader's position: it has lost records"
    return ""


def _divide_limit(begins: Sequence[int], ends: Sequence[int], limit: int | None) -> tuple[int, ...]:
    """Return the end of a batch by partition: the stream's end, or, if more offsets than `limit`
    are unread, shares of that limit in proportion to the unread ones.
    """
    lags = [end - begin for begin, end in zip(begins, ends, strict=True)]
    total = sum(lags)
    if limit is None or total <= limit:
        return tuple(ends)
    shares = [lag * limit // total for lag in lags]
    left = limit - sum(shares)  # since shares are rounded down
    for index, lag in enumerate(lags):
        more = min(lag - shares[index], left)
        shares[index] += more
        left -= more
    return tuple(begin + share for begin, share in zip(begins, shares, strict=True))


def _reader_log(lake: Lake, stream: str, reader: str) -> CommitLog:
    return lake.commit_log(
        f"{lake.stream_prefix(stream)}/readers/{check_name('reader', reader)}", READER_KIND
    )


def _parse(commit: Commit, lake: Lake) -> ReaderPosition:
    """Return the position in a reader's commit. Raises MalformedDocumentError."""
    return decode_body(
        ReaderPosition,
        commit.body,
        f"the position {commit.manifest_key!r} in {lake.url}",
        "is malformed",
        "Restore this object from a backup, or remove the reader and start again; the stream is not"
        " affected.",
    )
