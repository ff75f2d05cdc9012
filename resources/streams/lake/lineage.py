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
from typing import TYPE_CHECKING, Any, Literal, Protocol

from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError
from dagster_adjunct.resources.lazy_modules import np, pa, pc
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.commit_log import Commit
from dagster_adjunct.resources.streams.lake.manifest import (
    Coverage,
    ReadCoverage,
    RepartitionRecord,
    Segment,
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

if TYPE_CHECKING:
    pass

EVERY_EPOCH = 2**31 - 1


class ReadStreams(Protocol):
    """The streams of a lake, as replaced records are looked for in them."""

    @property
    def name(self) -> str: ...
    def state(self, stream: str) -> tuple[Commit, StreamState]:
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

        `reads` are the reader's coverages of the identities in `ids`.
        """
        at = self.index_of(identity)
        if at is None:
            return None
        for later in range(len(self.ids) - 1, at, -1):
            extent = _reread_extent(self.rewritings[later - 1], stream, reads[later])
            if extent != "none":
                whole = extent == "all" and not self._has_loss_between(at, later)
                return _Replayed(self.rewritings[at], whole)
        return None

    def _has_loss_between(self, at: int, later: int) -> bool:
        """Return whether retention dropped records between the repartitionings `at` and `later`.

        Then the dropped records can't be mapped to older partitions.
        """
        return any(
            max(rewriting.oldest) > any(before.oldest)
            for before, rewriting in pairwise(self.rewritings[at:later])
        )


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
    for reader, name in sorted(_streams_by_reader(read)):
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
    """Return the coverage `before`, with streams that were repartitioned since in terms of their
    new partitions.

    There, all records that were repartitioned count as read.
    """
    known = {reader: dict(partitions) for reader, partitions in before.items()}
    for reader, partitions in now.items():
        application, _, identity = reader.partition("@")
        for source in partitions:
            ssp = SystemStreamPartition.parse(source)
            lineage = lineage_of(ssp.qualified_stream)
            if lineage is None:
                continue
            at = lineage.index_of(identity) or 0
            if any(f"{application}@{earlier}" in before for earlier in lineage.ids[:at]):
                coverage = known.setdefault(reader, {}).get(source, Coverage())
                until = max(coverage.until, lineage.rewritings[at - 1].next[ssp.partition])
                known[reader][source] = coverage.model_copy(update={"until": until})
    return known


def _reread_extent(
    rewriting: RepartitionRecord, stream: str, read: Mapping[str, Coverage]
) -> Literal["none", "part", "all"]:
    """Return how many of the records that were repartitioned have been replayed from the new
    partitions.
    """
    first = int(any(rewriting.oldest))
    epochs: list[int] = []
    for p, end in enumerate(rewriting.next):
        replayed = read.get(f"{stream}.{p}", Coverage()).replayed
        epochs += [piece.epoch for piece in split_by_epoch(replayed, first, end)]
    if not any(epochs):
        return "none"
    if all(epochs):
        return "all"
    return "part"


def _stream(source: str) -> str:
    return SystemStreamPartition.parse(source).qualified_stream


def _streams_by_reader(read: ReadCoverage) -> set[tuple[str, str]]:
    """Return each reader with each stream that it has read."""
    return {(reader, _stream(source)) for reader, sources in read.items() for source in sources}


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
            f" {unknown} records have none: they were not sent by an application."
        )
        step = (
            'Treat them as latest (without_position="keep"), or read from the first record that an'
            " application sent."
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
    # All results that these readers made of these streams are replaced.
    rewritten = {(span.reader, _stream(span.source)) for span in replaced}
    unknown: set[str] = set()
    for reader, name in sorted(_streams_by_reader(state.read) - rewritten):
        identity = reader.partition("@")[2]
        above = state_of(name)
        if above is None or Lineage.of(above).index_of(identity) is None:
            unknown.add(name)
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
            "Compare the records by __epoch, which adds up along the chain.",
        )
    return replaced


def _is_replayed(state_of: StateOf, name: str, seen: Collection[str]) -> bool:
    """Return whether a stream, or one upstream of it in the lake, has replaced records."""
    state = state_of(name)
    if state is None or name in seen:
        return False
    if list_superseded(state.read):
        return True
    sources = {source for _, source in _streams_by_reader(state.read)}
    return any(_is_replayed(state_of, each, {*seen, name}) for each in sources)


def _find_replaced_upstream(
    streams: ReadStreams,
    stream: str,
    reader: str,
    name: str,
    above: StreamState,
    partitions: Mapping[str, Coverage],
) -> list[SupersededRange]:
    """Return the ranges of the stream `name` whose records were replaced; their results in all
    epochs are, too.
    """
    application = reader.partition("@")[0]
    ends = {f"{name}.{p}": end for p, end in enumerate(above.next)}
    behind = [
        source for source, end in ends.items() if partitions.get(source, Coverage()).until != end
    ]
    if behind:
        why = (
            f"{name} was replayed, and {application!r} has not read all of it yet (in"
            f" {', '.join(behind[:3])}): earlier results would be missing before the later ones"
            " exist"
        )
        raise _ambiguous_error(
            stream, why, f"Run {application!r} until it has caught up, then read again."
        )
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
    kept: dict[int, list[Any]] = {}
    ranges = {
        SystemStreamPartition.parse(source): OffsetRange("0", str(end))
        for source, end in ends.items()
    }
    for part in streams.read_parts(ranges, [], epochs="latest"):
        for partition in part.column(PARTITION).unique().to_pylist():
            rows = part.filter(pc.equal(part.column(PARTITION), partition))
            kept.setdefault(partition, []).append(rows.column(OFFSET).to_numpy())
    replaced = []
    for p, (source, until) in enumerate(ends.items()):
        for start, end in _find_gaps(kept.get(p, []), until):
            replaced.append(SupersededRange(reader, source, start, end, EVERY_EPOCH))
    return replaced


def _find_gaps(kept: Sequence[Any], until: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of [0, until) that contain none of the `kept` offsets (arrays, in
    ascending order).
    """
    offsets = np.concatenate([[-1], *kept, [until]])
    for at in np.nonzero(np.diff(offsets) > 1)[0]:
        yield int(offsets[at]) + 1, int(offsets[at + 1])


def _state_lookup(streams: ReadStreams) -> StateOf:
    """Return a function from a stream such as "lake.orders" to its state, which it reads only
    once.
    """

    @cache
    def state_of(name: str) -> StreamState | None:
        system, stream = split_stream_name(name)
        if system != streams.name:
            return None
        try:
            return streams.state(stream)[1]
        except StreamNotFoundError:
            return None

    return state_of


def lineage_lookup(streams: ReadStreams) -> LineageOf:
    """Return a function from a stream such as "lake.orders" to its lineage."""
    state_of = _state_lookup(streams)

    def lineage_of(name: str) -> Lineage | None:
        state = state_of(name)
        if state is None:
            return None
        return Lineage.of(state)

    return lineage_of


def _repartitioned_error(stream: str, reader: str, name: str) -> ConfigurationError:
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
    # By reader, source and cause: within a group, ranges are in order and disjoint, as
    # `searchsorted` requires. Ranges that were replaced upstream (EVERY_EPOCH) may overlap those
    # that were replaced in this stream.
    spans: dict[tuple[str, str, bool], list[SupersededRange]] = {}
    for span in replaced:
        spans.setdefault((span.reader, span.source, span.epoch == EVERY_EPOCH), []).append(span)
    for (reader, source, _), mine in spans.items():
        of = pc.and_(pc.equal(table.column(READER), reader), pc.equal(table.column(SOURCE), source))
        rows = np.nonzero(pc.fill_null(of, False).to_numpy())[0]
        if not rows.size:
            continue
        starts, ends, highest = (
            np.array([getattr(s, name) for s in mine]) for name in ("start", "end", "epoch")
        )
        at = np.searchsorted(starts, offsets[rows], side="right") - 1
        inside = (at >= 0) & (offsets[rows] < ends[at])
        is_replaced[rows] |= inside & (epochs[rows] < highest[at])
    return table.filter(pa.array(~is_replaced))
