"""Named readers: what is new in a lake stream since a reader's last commit, read and committed by anybody.

    streams/NAME/readers/READER/CURRENT, manifests/…    the reader's commit log (`ReaderPosition`)

A position is committed after what was read has been dealt with, by compare-and-swap: a crash before that reads the same
again, and of two that read at once one commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, ValidationError

from dagster_adjunct.resources.common import StoredDocument, check_name, first_validation_problem, unqualify_stream_name
from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ConfigurationError,
    MalformedDocumentError,
    OffsetOutOfRangeError,
)
from dagster_adjunct.resources.streams.lake.lineage import Lineage, WithoutPosition, lineage_lookup, translate_coverage
from dagster_adjunct.resources.streams.lake.manifest import Count, Coverage, SupersededRange, find_replaced_since
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import LAKE, Epochs, OffsetRange, SystemStreamPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from dagster_adjunct.resources.objects.commit_log import Commit, CommitLog
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.lake.manifest import StreamState

READER_KIND = "reader"


class ReaderPosition(StoredDocument):
    """Where a reader goes on: the next offset of each partition of the stream with this identity.

    `read` is what the stream's records were made of when the last batch began.
    """

    stream: str
    offsets: tuple[Count, ...]
    read: dict[str, dict[str, Coverage]] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReaderInfo:
    """A named reader: its next offsets by partition, what it has not read, and what retention took before it did.

    `behind` and `lost` count offsets, markers too. `problem` says why the reader can't go on, "" where it can.
    """

    name: str
    offsets: tuple[int, ...]
    behind: int
    lost: int
    commits: int
    committed_at: datetime
    by: str
    problem: str = ""


class NewRecords:
    """The records of one stream that its reader has not committed yet: `table` or `frame` them, then `commit`.

    `number` counts the reader's batches from 1; a batch that is read again has the same one, and maybe more records.
    `ranges` are its offsets, `records` their count. `lost` are offsets that retention took unread. `replaced` are
    source ranges that an application had read before and has read again since the reader's last commit: what the
    reader made of their results is out of date.
    """

    def __init__(
        self,
        streams: LakeStreams,
        stream: str,
        reader: str,
        parent: Commit | None,
        position: ReaderPosition,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        lost: Mapping[SystemStreamPartition, OffsetRange],
        replaced: Sequence[SupersededRange],
        by: str,
    ) -> None:
        self.stream, self.reader, self.by = stream, reader, by
        self.number = 1 if parent is None else parent.number + 1
        self.ranges, self.lost, self.replaced = dict(ranges), dict(lost), tuple(replaced)
        self.records = streams.records_between(self.ranges)
        self.committed = False
        self._streams, self._parent, self._position = streams, parent, position

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """What was not committed is read again."""

    def table(
        self,
        columns: Sequence[str] | None = None,
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> pa.Table:
        """Return the records as `LakeStreams.read_arrow` does. All of them are held in memory."""
        return self._streams.read_arrow(
            self.ranges, columns, epochs=epochs, positions=positions, without_position=without_position
        )

    def parts(
        self,
        columns: Sequence[str] | None = None,
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> Iterator[pa.Table]:
        """Yield the same in parts of at most 65,536 records; the first one is empty."""
        return self._streams.read_parts(
            self.ranges, columns, epochs=epochs, positions=positions, without_position=without_position
        )

    def frame(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        *,
        epochs: Epochs = "all",
        positions: bool = False,
        without_position: WithoutPosition = "refuse",
    ) -> DataFrame:
        """Return the records by Spark, as `LakeStreams.read` does."""
        return self._streams.read(
            spark, self.ranges, epochs=epochs, positions=positions, without_position=without_position
        )

    def commit(self) -> None:
        """Store that these records were dealt with: the next batch begins behind them. Once more does nothing.

        Raises CommitConflictError where the reader was moved meanwhile: nothing of this batch counts, and what was
        made of it is made by another, too. Raises CommitStateUnknownError as every commit.
        """
        if self.committed:
            return
        log = _reader_log(self._streams.lake, self.stream, self.reader)
        try:
            log.commit(self._parent, self._position.model_dump(mode="json"), by=self.by)
        except CommitConflictError as conflict:
            now = log.current()
            who = f"{now.by} committed batch {now.number} at {now.created_at}" if now else "it was forgotten"
            raise CommitConflictError(
                f"reader {self.reader!r} of lake.{self.stream}: batch {self.number} can't be committed: {who}.",
                "Nothing of this batch counts. Undo what was made of it, or write it under the batch's number, so that "
                "one of the two stays; then read again.",
                stream=f"lake.{self.stream}",
            ) from conflict
        self.committed = True


def read_new(
    lake: Lake,
    stream: str,
    *,
    reader: str,
    start: Literal["oldest", "upcoming"] = "oldest",
    on_lost: Literal["fail", "oldest"] = "fail",
    max_records: int | None = None,
    by: str | None = None,
) -> NewRecords:
    """Return what is new in a lake stream for a named reader; use it in a `with` block, and `commit` at its end.

    A reader is made by its first commit, and begins at `start`. At most `max_records` (markers count) come at a time.
    Raises OffsetOutOfRangeError where retention has passed the position, unless `on_lost="oldest"`, and where the
    stream was made anew or has another number of partitions now.
    """
    check_name("reader", reader)
    streams, stream = LakeStreams(lake), unqualify_stream_name(LAKE, stream)
    if start not in ("oldest", "upcoming") or on_lost not in ("fail", "oldest"):
        raise ConfigurationError(
            f"reader {reader!r}: start={start!r}, on_lost={on_lost!r}: expected 'oldest' or 'upcoming', and 'fail' or "
            "'oldest'.",
            "Choose one of the two.",
            argument="start",
        )
    if max_records is not None and max_records < 1:
        raise ConfigurationError(
            f"reader {reader!r}: max_records={max_records}: expected 1 or more.", "Raise it.", argument="max_records"
        )
    # The position first: what the stream then says is never older.
    parent = _reader_log(lake, stream, reader).current()
    _, state = streams.state(stream)
    position = _follow_repartitions(_parse(parent, lake), state) if parent is not None else None
    if position is None:
        position = ReaderPosition(stream=state.id, offsets=state.oldest if start == "oldest" else state.next)
        position = position.model_copy(update={"read": state.read if start == "upcoming" else {}})
    elif problem := _find_problem(position, state):
        raise OffsetOutOfRangeError(
            f"reader {reader!r} can't go on in lake.{stream}: {problem}.",
            f"Start over as a new reader: adjunct stream remove-reader {stream} {reader}; or forget_reader in Python.",
            stream=f"lake.{stream}",
        )
    ssps = streams.partitions(stream)
    begins = [max(offset, oldest) for offset, oldest in zip(position.offsets, state.oldest, strict=True)]
    lost = {
        ssp: OffsetRange(str(offset), str(begin))
        for ssp, offset, begin in zip(ssps, position.offsets, begins, strict=True)
        if offset < begin
    }
    if lost and on_lost == "fail":
        positions = ", ".join(f"{ssp} (at {span.start}, the oldest left is {span.end})" for ssp, span in lost.items())
        raise OffsetOutOfRangeError(
            f"reader {reader!r}: retention has passed its position in {positions}: it never got what lay between.",
            'Accept the loss with on_lost="oldest", and keep the stream longer than the reader may stand still.',
            stream=f"lake.{stream}",
        )
    ends = _divide_limit(begins, state.next, max_records)
    ranges = {ssp: OffsetRange(str(begin), str(end)) for ssp, begin, end in zip(ssps, begins, ends, strict=True)}
    # All that came since the last batch, as long as some of it is to come: what is made anew may hold that already.
    told = parent is None or ends == state.next
    after = ReaderPosition(stream=state.id, offsets=ends, read=state.read if told else position.read)
    replaced = find_replaced_since(translate_coverage(position.read, state.read, lineage_lookup(streams)), state.read)
    return NewRecords(streams, stream, reader, parent, after, ranges, lost, replaced, by or f"reader {reader}")


def list_readers(lake: Lake, stream: str) -> list[ReaderInfo]:
    """Return the named readers of a lake stream, by name. Two requests for each, and one list."""
    stream = unqualify_stream_name(LAKE, stream)
    _, state = LakeStreams(lake).state(stream)
    folder = f"{lake.stream_prefix(stream)}/readers/"
    names = {key.removesuffix("/CURRENT") for key in _list_keys(lake, folder) if key.endswith("/CURRENT")}
    readers = []
    for name in sorted(names):
        commit = _reader_log(lake, stream, name).current()
        if commit is not None:
            readers.append(_reader_info(name, commit, _follow_repartitions(_parse(commit, lake), state), state))
    return readers


def remove_reader(lake: Lake, stream: str, reader: str) -> bool:
    """Remove a named reader and its history; return whether it was there. A batch of it that is open can't commit."""
    stream = unqualify_stream_name(LAKE, stream)
    log = _reader_log(lake, stream, reader)
    there = lake.store.head(log.pointer_key) is not None
    lake.store.delete(log.pointer_key)  # first: what is without a pointer is no reader
    lake.store.delete_many([item.key for item in lake.store.list(f"{log.prefix}/")])
    return there


def _reader_info(name: str, commit: Commit, position: ReaderPosition, state: StreamState) -> ReaderInfo:
    problem = _find_problem(position, state)
    behind = lost = 0
    if not problem:
        for offset, oldest, upcoming in zip(position.offsets, state.oldest, state.next, strict=True):
            behind += upcoming - max(offset, oldest)
            lost += max(oldest - offset, 0)
    return ReaderInfo(name, position.offsets, behind, lost, commit.number, commit.created_at, commit.by, problem)


def _follow_repartitions(position: ReaderPosition, state: StreamState) -> ReaderPosition:
    """Return where the reader goes on in a stream that was rewritten into other partitions after it had read all."""
    lineage = Lineage.of(state)
    for rewriting, identity in zip(lineage.rewritings, lineage.ids[1:], strict=True):
        if (rewriting.id, rewriting.ended) == (position.stream, position.offsets):
            position = position.model_copy(update={"stream": identity, "offsets": rewriting.next})
    return position


def _find_problem(position: ReaderPosition, state: StreamState) -> str:
    if position.stream != state.id:
        if Lineage.of(state).index_of(position.stream) is not None:
            return "the stream was repartitioned before it had read all of it"
        return f"the stream was deleted and made anew (it is {state.id}, and was {position.stream})"
    if len(position.offsets) != len(state.next):
        return f"the stream has {len(state.next)} partitions now, and had {len(position.offsets)}"
    if any(offset > upcoming for offset, upcoming in zip(position.offsets, state.next, strict=True)):
        return "the stream ends before its position: it has lost records"
    return ""


def _divide_limit(begins: Sequence[int], ends: Sequence[int], limit: int | None) -> tuple[int, ...]:
    """Return where a batch of at most `limit` offsets ends, shared by what is new in each partition."""
    lags = [end - begin for begin, end in zip(begins, ends, strict=True)]
    total = sum(lags)
    if limit is None or total <= limit:
        return tuple(ends)
    shares = [lag * limit // total for lag in lags]
    for index, lag in enumerate(lags):
        shares[index] += (more := min(lag - shares[index], limit - sum(shares)))
        if not more and sum(shares) == limit:
            break
    return tuple(begin + share for begin, share in zip(begins, shares, strict=True))


def _reader_log(lake: Lake, stream: str, reader: str) -> CommitLog:
    return lake.commit_log(f"{lake.stream_prefix(stream)}/readers/{check_name('reader', reader)}", READER_KIND)


def _list_keys(lake: Lake, folder: str) -> list[str]:
    return [item.key.removeprefix(folder) for item in lake.store.list(folder)]


def _parse(commit: Commit, lake: Lake) -> ReaderPosition:
    body: Any = commit.body
    try:
        return ReaderPosition.model_validate(body)
    except ValidationError as error:
        raise MalformedDocumentError(
            f"the position {commit.manifest_key!r} in {lake.url} is malformed: {first_validation_problem(error)}.",
            "Restore this object from a backup, or forget the reader and begin anew; the stream is untouched.",
            document=commit.manifest_key,
        ) from None
