"""Finds the latest results of each source record: which records of a stream were replaced by a
replay.

After a repartitioning, offsets start again and the stream has a new identity, so old offsets can't
be mapped to new ones; only the end of the old records in each new partition is known. A reader that
has read all of these again has replaced all its earlier results; for one that has read a part
again, the replaced results can't be determined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol

from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.lake.manifest import (
    CommittedState,
    Coverage,
    ReadCoverage,
    RepartitionRecord,
    Segment,
    Span,
    StreamState,
    SupersededRange,
    list_superseded,
    split_by_epoch,
)
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    READER,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    OffsetRange,
    SystemStreamPartition,
)

_BY_EPOCH = "Compare the records by __epoch, which adds up along the chain."
EVERY_EPOCH = 2**31 - 1
"""The epoch of ranges whose results are replaced in all epochs: higher than each of these."""


class ReadStreams(Protocol):
    """The streams of a lake, as replaced records are looked for in them."""

    @property
    def name(self) -> str: ...
    def state(self, stream: str) -> CommittedState:
        """Return a stream's current commit and the state in it."""

    def read_parts(
        self,
        ranges: Mapping[SystemStreamPartition, OffsetRange],
        columns: Sequence[str] | None = None,
        *,
        epochs: Literal["latest"],
    ) -> Iterator[pa.Table]:
        """Yield the records of these ranges, in order."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The identities of a stream, oldest first: `rewritings[i]` is the repartitioning of
    `ids[i]` to `ids[i + 1]`.
    """

    ids: tuple[str, ...]
    rewritings: tuple[RepartitionRecord, ...]

    @classmethod
    def of(cls, state: StreamState) -> Lineage:
        """Return the lineage of the stream in this state."""
        ids = [rewriting.id for rewriting in state.rewritings]
        return cls((*ids, state.id), state.rewritings)

    def index_of(self, identity: str) -> int | None:
        """Return the index of this identity in `ids`; None if the stream never had it."""
        if identity in self.ids:
            return self.ids.index(identity)
        return None

    def find_replayed(
        self, identity: str, stream: str, reads: Sequence[Mapping[str, Coverage]]
    ) -> _Replayed | None:
        """Return the repartitioning of this identity if its records were replayed later, else
        None.

        `reads` are the reader's coverages of the identities in `ids`. If the reader has replayed
        records after several repartitionings, the latest of these decides whether all were.
        """
        index = self.index_of(identity)
        if index is None:
            return None
        for later in range(len(self.ids) - 1, index, -1):
            extent = _reread_extent(self.rewritings[later - 1], stream, reads[later])
            if extent == "none":
                continue
            whole = extent == "all" and not self._has_loss_between(index, later)
            return _Replayed(self.rewritings[index], whole)
        return None

    def _has_loss_between(self, earlier: int, later: int) -> bool:
        """Return whether retention dropped records between these two of the `rewritings`.

        If it did, the dropped records can't be mapped to older partitions.
        """
        for before, after in pairwise(self.rewritings[earlier:later]):
            if max(after.oldest) > _first_offset(before):
                return True
        return False


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A repartitioning whose records were replayed: all of them (`whole`), or a part."""

    rewriting: RepartitionRecord
    whole: bool


LineageOf = Callable[[str], Lineage | None]
"""Returns the lineage of a stream such as "lake.orders", None if it is not a stream of this
lake.
"""
StateOf = Callable[[str], StreamState | None]
"""Returns the state of a stream such as "lake.orders", None if it is not a stream of this lake."""


def _find_replaced_by_repartition(
    stream: str, read: ReadCoverage, lineage_of: LineageOf
) -> list[SupersededRange]:
    """Return the ranges of results that were replaced because their source was repartitioned and
    then replayed.

    `read` is the stream's coverage. Raises ConfigurationError if only a part was replayed, or
    retention dropped records in between, since the replaced results can't be determined then.
    """
    replaced: list[SupersededRange] = []
    for reader, name in sorted(_list_reads(read)):
        application, _, identity = reader.partition("@")
        lineage = lineage_of(name)
        if lineage is None:
            continue
        reads = [read.get(f"{application}@{each}", {}) for each in lineage.ids]
        replayed = lineage.find_replayed(identity, name, reads)
        if replayed is None:
            continue
        if not replayed.whole:
            raise _repartitioned_error(stream, reader, name)
        replaced += _old_ranges(reader, name, replayed.rewriting)
    return replaced


def _old_ranges(reader: str, stream: str, was: RepartitionRecord) -> Iterator[SupersededRange]:
    """Yield the ranges of the old partitions of a repartitioned stream."""
    for number, (start, end) in enumerate(zip(was.oldest, was.ended, strict=True)):
        if start < end:
            yield SupersededRange(reader, f"{stream}.{number}", start, end, EVERY_EPOCH)


def translate_coverage(
    before: ReadCoverage, now: ReadCoverage, lineage_of: LineageOf
) -> ReadCoverage:
    """Return the coverage `before`, in which streams that were repartitioned since have their new
    partitions.

    All records that were repartitioned count as read from these.
    """
    known = {reader: dict(partitions) for reader, partitions in before.items()}
    for reader, partitions in now.items():
        application, _, identity = reader.partition("@")
        for source in partitions:
            ssp = SystemStreamPartition.parse(source)
            lineage = lineage_of(ssp.qualified_stream)
            if lineage is None:
                continue
            index = lineage.index_of(identity) or 0  # there is none before an unknown identity
            had_read = any(f"{application}@{one}" in before for one in lineage.ids[:index])
            if not had_read:
                continue
            coverage = known.setdefault(reader, {}).get(source, Coverage())
            # Up to the end of the records that were repartitioned into this partition.
            until = max(coverage.until, lineage.rewritings[index - 1].next[ssp.partition])
            known[reader][source] = coverage.model_copy(update={"until": until})
    return known


def _reread_extent(
    rewriting: RepartitionRecord, stream: str, read: Mapping[str, Coverage]
) -> Literal["none", "part", "all"]:
    """Return how many of the records that were repartitioned have been replayed from the new
    partitions.
    """
    first = _first_offset(rewriting)
    epochs: list[int] = []  # 0 for offsets that were not replayed
    for p, end in enumerate(rewriting.next):
        replayed = read.get(f"{stream}.{p}", Coverage()).replayed
        epochs += [piece.epoch for piece in split_by_epoch(replayed, first, end)]
    if not any(epochs):
        return "none"
    if all(epochs):
        return "all"
    return "part"


def _first_offset(rewriting: RepartitionRecord) -> int:
    """Return the first offset of the partitions after a repartitioning: 0, or 1 if the stream had
    lost records before.
    """
    return int(any(rewriting.oldest))


def _stream_of(source: str) -> str:
    return SystemStreamPartition.parse(source).qualified_stream


class _Read(NamedTuple):
    """A stream that a reader has read."""

    reader: str
    stream: str


def _list_reads(read: ReadCoverage) -> set[_Read]:
    """Return which streams each reader has read."""
    reads: set[_Read] = set()
    for reader, sources in read.items():
        reads.update(_Read(reader, _stream_of(source)) for source in sources)
    return reads


WithoutPosition = Literal["refuse", "keep"]


def find_replaced_results(
    streams: ReadStreams,
    stream: str,
    state: StreamState,
    segments: Sequence[Segment],
    without_position: WithoutPosition,
) -> list[SupersededRange]:
    """Return the ranges of results that later epochs have replaced, in this stream or upstream.

    Raises ConfigurationError if that can't be determined for the records in these segments: if some
    have no source position (unless `without_position="keep"`), or are results of replayed records
    of a stream that is not in this lake or was recreated.
    """
    unknown = sum(segment.rows for segment in segments if not segment.positioned)
    if unknown and without_position == "refuse":
        problem = (
            f'stream {stream!r}: epochs="latest" needs the source position of every record, and'
            f" {unknown} records have none: no application sent them, or one made them of several"
            " inputs (merge) or records (a window, a join of streams)."
        )
        step = (
            'Read them all as latest (without_position="keep"), those that a replay has sent again'
            " too; or read from the first record with a position, of a stream to which each"
            " application sends what it makes of one input."
        )
        raise ConfigurationError(problem, step, stream=f"lake.{stream}")
    return [
        *_find_upstream_replacements(streams, stream, state, segments),
        *list_superseded(state.read),
    ]


def _find_upstream_replacements(
    streams: ReadStreams, stream: str, state: StreamState, segments: Sequence[Segment]
) -> list[SupersededRange]:
    """Return the ranges of results whose source records were themselves replaced, or were replayed
    after their stream was repartitioned.

    Reads the upstream streams that have replaced records. Raises ConfigurationError if this can't
    be determined.
    """
    state_of = _state_lookup(streams)
    replaced = _find_replaced_by_repartition(stream, state.read, lineage_lookup(streams))
    # Of these, all results are replaced already, whatever happened upstream.
    rewritten = {_Read(span.reader, _stream_of(span.source)) for span in replaced}
    unknown: set[str] = set()
    for reader, name in sorted(_list_reads(state.read) - rewritten):
        _, _, identity = reader.partition("@")
        above = state_of(name)
        if above is None or Lineage.of(above).index_of(identity) is None:
            unknown.add(name)  # in another lake, deleted, or recreated since
        elif _is_replayed(state_of, name, {f"lake.{stream}"}):
            if above.id != identity:
                raise _repartitioned_error(stream, reader, name)
            replaced += _find_replaced_upstream(
                streams, stream, reader, name, above, state.read[reader]
            )
    if unknown and any(segment.chained for segment in segments):
        raise _ambiguous_error(
            stream,
            f"some are results of records of {', '.join(sorted(unknown))} that a replay had"
            " replaced, and which these are is not known here",
            _BY_EPOCH,
        )
    return replaced


def _is_replayed(state_of: StateOf, name: str, seen: Collection[str]) -> bool:
    """Return whether a stream, or one upstream of it in the lake, has replaced records. Streams in
    `seen` are not looked at again, as a stream may be upstream of itself.
    """
    state = state_of(name)
    if state is None or name in seen:
        return False
    if list_superseded(state.read):
        return True
    upstream = {read.stream for read in _list_reads(state.read)}
    return any(_is_replayed(state_of, each, {*seen, name}) for each in upstream)


def _find_replaced_upstream(
    streams: ReadStreams,
    stream: str,
    reader: str,
    name: str,
    above: StreamState,
    partitions: Mapping[str, Coverage],
) -> list[SupersededRange]:
    """Return the ranges of the stream `name` whose records were replaced; their results in `stream`
    are, too, in all epochs.

    `above` is the state of `name`, and `partitions` what the reader has read of it. Raises
    ConfigurationError if the reader has not read all of `name`, or `name` has lost records.
    """
    application = reader.partition("@")[0]
    ends = {f"{name}.{p}": end for p, end in enumerate(above.next)}
    behind = []
    for source, end in ends.items():
        if partitions.get(source, Coverage()).until != end:
            behind.append(source)
    if behind:
        why = (
            f"{name} was replayed, and {application!r} has not read all of it yet (in"
            f" {', '.join(behind[:3])}): earlier results would be missing before the later ones"
            " exist"
        )
        step = (
            f"Run {application!r} until it has read all, then read again. If records wait for a"
            " dataset (adjunct checkpoint show MODULE:APP lists them), it reads them once the"
            f" dataset has advanced past their time, or they have waited long enough. {_BY_EPOCH}"
        )
        raise _ambiguous_error(stream, why, step)
    if any(above.oldest):
        why = (
            f"{name} was replayed, but retention has dropped records that are needed to find"
            " replaced ones"
        )
        step = (
            f"Keep {name} longer than its replays reach back, and replay its reader from its oldest"
            " record."
        )
        raise _ambiguous_error(stream, why, step)
    latest: dict[int, list[Any]] = {}  # the offsets of the latest records, by partition
    ranges = {}
    for source, end in ends.items():
        ranges[SystemStreamPartition.parse(source)] = OffsetRange("0", str(end))
    for part in streams.read_parts(ranges, [], epochs="latest"):
        for partition in part.column(PARTITION).unique().to_pylist():
            rows = part.filter(pc.equal(part.column(PARTITION), partition))
            latest.setdefault(partition, []).append(rows.column(OFFSET).to_numpy())
    replaced = []
    for p, (source, until) in enumerate(ends.items()):
        for gap in _find_gaps(latest.get(p, []), until):
            replaced.append(SupersededRange(reader, source, gap.start, gap.end, EVERY_EPOCH))
    return replaced


def _find_gaps(latest: Sequence[Any], until: int) -> Iterator[Span]:
    """Yield the ranges of [0, until) that contain none of the offsets `latest` (arrays, in
    ascending order).
    """
    offsets = np.concatenate([[-1], *latest, [until]])
    for place in np.nonzero(np.diff(offsets) > 1)[0]:
        yield Span(int(offsets[place]) + 1, int(offsets[place + 1]))


def _state_lookup(streams: ReadStreams) -> StateOf:
    """Return a function from a stream such as "lake.orders" to its state, which it reads only once;
    None for a stream that is not in this lake.
    """

    @cache
    def state_of(name: str) -> StreamState | None:
        system, stream = split_stream_name(name)
        if system != streams.name:
            return None
        try:
            return streams.state(stream).state
        except StreamNotFoundError:
            return None

    return state_of


def lineage_lookup(streams: ReadStreams) -> LineageOf:
    """Return a function from a stream such as "lake.orders" to its lineage, None for a stream that
    is not in this lake.
    """
    state_of = _state_lookup(streams)

    def lineage_of(name: str) -> Lineage | None:
        state = state_of(name)
        if state is None:
            return None
        return Lineage.of(state)

    return lineage_of


def _repartitioned_error(stream: str, reader: str, name: str) -> ConfigurationError:
    """Return the error for a source of `stream` that was repartitioned, and then partly replayed by
    its reader.
    """
    application = reader.partition("@")[0]
    why = (
        f"{name} was repartitioned after {application!r} had read it, and then partly replayed:"
        " which earlier results were replaced is not known"
    )
    again = f"adjunct startpoint set MODULE:APP {name} --oldest --reason …"
    step = (
        f"Let {application!r} read all of {name} again, which replaces all its results: {again},"
        " and a run. Or compare the records by __epoch."
    )
    return _ambiguous_error(stream, why, step)


def _ambiguous_error(stream: str, why: str, next_step: str) -> ConfigurationError:
    problem = f'stream {stream!r}: epochs="latest" can\'t determine the latest records: {why}.'
    return ConfigurationError(problem, next_step, stream=f"lake.{stream}")


def filter_latest(table: pa.Table, replaced: Sequence[SupersededRange]) -> pa.Table:
    """Return the records of the table that are not replaced. It must have the columns of
    POSITION.
    """
    if not replaced or not table.num_rows:
        return table
    offsets = pc.fill_null(table.column(SOURCE_OFFSET), -1).to_numpy()
    epochs = pc.fill_null(table.column(SOURCE_EPOCH), 0).to_numpy()
    is_replaced = np.zeros(table.num_rows, bool)
    for group, spans in _group_ranges(replaced).items():
        by_reader = pc.equal(table.column(READER), group.reader)
        of_source = pc.equal(table.column(SOURCE), group.source)
        rows = np.nonzero(pc.fill_null(pc.and_(by_reader, of_source), False).to_numpy())[0]
        if not rows.size:
            continue
        starts = np.array([span.start for span in spans])
        ends = np.array([span.end for span in spans])
        later_epochs = np.array([span.epoch for span in spans])
        # The place of the last range that begins at or before each row's offset.
        place = np.searchsorted(starts, offsets[rows], side="right") - 1
        is_inside = (place >= 0) & (offsets[rows] < ends[place])
        is_replaced[rows] |= is_inside & (epochs[rows] < later_epochs[place])
    return table.filter(pa.array(~is_replaced))


class _Group(NamedTuple):
    """Ranges of results that are disjoint. Those that were replaced upstream, in all epochs, may
    overlap those that were replaced in the stream itself.
    """

    reader: str
    source: str
    replaced_upstream: bool


def _group_ranges(ranges: Sequence[SupersededRange]) -> dict[_Group, list[SupersededRange]]:
    """Return the ranges in groups within which they are disjoint; they keep their order."""
    groups: dict[_Group, list[SupersededRange]] = {}
    for span in ranges:
        group = _Group(span.reader, span.source, span.epoch == EVERY_EPOCH)
        groups.setdefault(group, []).append(span)
    return groups
