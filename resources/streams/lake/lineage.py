"""The latest results of each source record: which records of a stream are left out, and when nobody can tell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError
from dagster_adjunct.resources.streams.lake.manifest import (
    Coverage,
    ReadCoverage,
    Segment,
    StreamState,
    SupersededRange,
    list_superseded,
    split_by_epoch,
)
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    POSITION,
    READER,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    OffsetRange,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.streams.lake.manifest import RepartitionRecord
    from dagster_adjunct.resources.streams.lake.streams import LakeReads

# What became of results of a stream that was rewritten into other partitions since. Pure decisions, no I/O.
#
# Offsets begin anew then, and so does the stream's identity: nobody knows which offset of before is which of now. What
# is
# known is where the records of before end in the new partitions. Where a reader has read all of these again, it has
# replaced all that it made of them before; where it has read a part again, nobody can tell what that replaced.


EVERY_EPOCH = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Lineage:
    """The identities that a stream has had, oldest first: `rewritings[i]` led from `ids[i]` to `ids[i + 1]`."""

    ids: tuple[str, ...]
    rewritings: tuple[RepartitionRecord, ...]

    @classmethod
    def of(cls, state: StreamState) -> Lineage:
        rewritings = (*state.rewritten_before, *((state.rewritten,) if state.rewritten else ()))
        return cls((*(rewriting.id for rewriting in rewritings), state.id), rewritings)

    def index_of(self, identity: str) -> int | None:
        """Return which of the stream's identities this is; None for that of another stream."""
        return self.ids.index(identity) if identity in self.ids else None


LineageOf = Callable[[str], Lineage | None]
"""Of a stream such as "lake.orders"; None where nothing is known of it."""


@dataclass(frozen=True, slots=True)
class ReplacedResults:
    """Results of before a rewriting that are replaced; `unknown` are (reader, stream) of which nobody can tell."""

    superseded: tuple[SupersededRange, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()

    @property
    def readers(self) -> frozenset[tuple[str, str]]:
        """(reader, stream) of those whose results are all replaced."""
        return frozenset((span.reader, _stream(span.source)) for span in self.superseded)


def find_replaced_by_repartition(read: ReadCoverage, lineage_of: LineageOf) -> ReplacedResults:
    """Return which results were made of records that were read again after they had been rewritten."""
    replaced: list[SupersededRange] = []
    unknown: list[tuple[str, str]] = []
    for reader, partitions in sorted(read.items()):
        application, _, identity = reader.partition("@")
        for stream in sorted({_stream(source) for source in partitions}):
            lineage = lineage_of(stream)
            at = lineage.index_of(identity) if lineage is not None else None
            if lineage is None or at is None or at + 1 == len(lineage.ids):
                continue
            for later in range(len(lineage.ids) - 1, at, -1):
                rewriting = lineage.rewritings[later - 1]
                again = _reread_extent(rewriting, stream, read.get(f"{application}@{lineage.ids[later]}", {}))
                if again == "none":
                    continue
                if again == "part" or _has_loss_between(lineage, at, later):
                    unknown.append((reader, stream))
                else:
                    was = lineage.rewritings[at]
                    replaced += [
                        SupersededRange(reader, f"{stream}.{p}", start, end, EVERY_EPOCH)
                        for p, (start, end) in enumerate(zip(was.oldest, was.ended, strict=True))
                        if start < end
                    ]
                break
    return ReplacedResults(tuple(replaced), tuple(unknown))


def translate_coverage(before: ReadCoverage, now: ReadCoverage, lineage_of: LineageOf) -> ReadCoverage:
    """Return what was known `before`, as it would be told after rewritings: all that was rewritten had been read."""
    known = {reader: dict(partitions) for reader, partitions in before.items()}
    for reader, partitions in now.items():
        application, _, identity = reader.partition("@")
        for source in partitions:
            ssp = SystemStreamPartition.parse(source)
            lineage = lineage_of(ssp.qualified_stream)
            at = lineage.index_of(identity) if lineage is not None else None
            if (
                lineage is None
                or not at
                or not any(f"{application}@{earlier}" in before for earlier in lineage.ids[:at])
            ):
                continue
            coverage = known.setdefault(reader, {}).get(source, Coverage())
            until = max(coverage.until, lineage.rewritings[at - 1].next[ssp.partition])
            known[reader][source] = coverage.model_copy(update={"until": until})
    return known


def _reread_extent(
    rewriting: RepartitionRecord, stream: str, read: Mapping[str, Coverage]
) -> Literal["none", "part", "all"]:
    """Return how much of the records of before was read again in the partitions of after."""
    first = 1 if any(rewriting.oldest) else 0
    epochs = [
        piece.epoch
        for p, end in enumerate(rewriting.next)
        for piece in split_by_epoch(read.get(f"{stream}.{p}", Coverage()).replayed, first, end)
    ]
    if not any(epochs):
        return "none"
    return "all" if all(epochs) else "part"


def _has_loss_between(lineage: Lineage, at: int, later: int) -> bool:
    """Whether retention took records between two rewritings: which they had been before is not known."""
    for before, rewriting in zip(lineage.rewritings[at : later - 1], lineage.rewritings[at + 1 : later], strict=True):
        first = 1 if any(before.oldest) else 0
        if any(oldest > first for oldest in rewriting.oldest):
            return True
    return False


def _stream(source: str) -> str:
    return SystemStreamPartition.parse(source).qualified_stream


WithoutPosition = Literal["refuse", "keep"]


def find_replaced_results(
    streams: LakeReads,
    stream: str,
    state: StreamState,
    segments: Sequence[Segment],
    without_position: WithoutPosition,
) -> list[SupersededRange]:
    """Return which results in these segments later epochs have replaced, here or in what they were made of.

    Raises ConfigurationError where nobody can tell: for records without a source position, unless they are to be kept,
    and for records made of such as were replayed themselves, where these do not tell.
    """
    if without_position not in ("refuse", "keep"):
        raise ConfigurationError(
            f"without_position={without_position!r}: expected 'refuse' or 'keep'.",
            "Choose one of the two.",
            argument="without_position",
        )
    unknown = sum(segment.rows for segment in segments if not segment.positioned)
    if unknown and without_position == "refuse":
        raise ConfigurationError(
            f'stream {stream!r}: epochs="latest" can\'t tell of {unknown} records what they were made of: no '
            "application of this version sent them.",
            'Keep them all, as the latest of their kind (without_position="keep"), or read from the first record that '
            "an application sent.",
            stream=f"lake.{stream}",
        )
    return [*_find_upstream_replacements(streams, stream, state, segments), *list_superseded(state.read)]


def _find_upstream_replacements(
    streams: LakeReads, stream: str, state: StreamState, segments: Sequence[Segment]
) -> list[SupersededRange]:
    """Return which results were made of records that are replaced themselves, in the stream that they came from, or
    that were read again after that stream was rewritten.

    Which these are is known there: it is asked, and read where it was replayed. Refused where that can't answer.
    """
    lineages = lineage_lookup(streams)
    rewritten = find_replaced_by_repartition(state.read, lineages)
    if rewritten.unknown:
        raise _repartitioned_error(stream, *rewritten.unknown[0])
    replaced = list(rewritten.superseded)
    unknown: set[str] = set()
    for reader, partitions in sorted(state.read.items()):
        for name in sorted({SystemStreamPartition.parse(source).qualified_stream for source in partitions}):
            if (reader, name) in rewritten.readers:
                continue
            system, upstream = split_stream_name(name)
            try:
                above = streams.state(upstream)[1] if system == streams.name else None
            except StreamNotFoundError:
                above = None
            identity = reader.partition("@")[2]
            if above is None or Lineage.of(above).index_of(identity) is None:
                unknown.add(name)
            elif above.id != identity:
                if _is_replayed(streams, upstream, above, set()):
                    raise _repartitioned_error(stream, reader, name)
            elif _is_replayed(streams, upstream, above, set()):
                replaced += _find_replaced_upstream(streams, stream, reader, upstream, above, partitions)
    if unknown and any(segment.chained for segment in segments):
        raise _ambiguous_error(
            stream,
            f"some were made of records of {', '.join(sorted(unknown))} that a replay had made again, and which it "
            "replaced is not known here",
            "Tell the records by __epoch, which adds up along the chain.",
        )
    return replaced


def _is_replayed(streams: LakeReads, stream: str, state: StreamState, seen: set[str]) -> bool:
    """Whether a stream, or one of the lake that it was made of, has replaced records."""
    if list_superseded(state.read):
        return True
    sources = {source for read in state.read.values() for source in read}
    for name in {SystemStreamPartition.parse(source).qualified_stream for source in sources}:
        system, upstream = split_stream_name(name)
        if system == streams.name and upstream not in {*seen, stream}:
            try:
                if _is_replayed(streams, upstream, streams.state(upstream)[1], {*seen, stream}):
                    return True
            except StreamNotFoundError:
                continue
    return False


def _find_replaced_upstream(
    streams: LakeReads,
    stream: str,
    reader: str,
    upstream: str,
    above: StreamState,
    partitions: Mapping[str, Coverage],
) -> list[SupersededRange]:
    """Return the offsets of replaced records of `upstream`, as ranges whose results are replaced in every epoch."""
    behind = [
        f"lake.{upstream}.{p}"
        for p, end in enumerate(above.next)
        if partitions.get(f"lake.{upstream}.{p}", Coverage()).until != end
    ]
    if behind:
        raise _ambiguous_error(
            stream,
            f"lake.{upstream} was replayed, and {reader.partition('@')[0]!r} has not read all of it yet (in "
            f"{', '.join(behind[:3])}): earlier results would be gone before the later ones are there",
            f"Run {reader.partition('@')[0]!r} until it has caught up, then read again.",
        )
    if any(above.oldest):
        raise _ambiguous_error(
            stream,
            f"lake.{upstream} was replayed, and retention has dropped records of it that would tell which are replaced",
            f"Keep lake.{upstream} longer than its replays reach back, and replay its reader from its oldest record.",
        )
    import pyarrow.compute as pc

    held: dict[int, list[Any]] = {}
    for kept in streams.read_parts(_full_ranges(streams, upstream, above), [], epochs="latest"):
        for partition in kept.column(PARTITION).unique().to_pylist():
            rows = kept.filter(pc.equal(kept.column(PARTITION), partition))
            held.setdefault(partition, []).append(rows.column(OFFSET).to_numpy())
    return [
        SupersededRange(reader, f"lake.{upstream}.{p}", start, end, EVERY_EPOCH)
        for p, until in enumerate(above.next)
        for start, end in _find_gaps(held.get(p, []), until)
    ]


def _full_ranges(streams: LakeReads, stream: str, state: StreamState) -> dict[SystemStreamPartition, OffsetRange]:
    return {
        SystemStreamPartition(streams.name, stream, p): OffsetRange("0", str(end)) for p, end in enumerate(state.next)
    }


def _find_gaps(held: Sequence[Any], until: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of [0, until) that are not among the offsets held, which are in order."""
    import numpy as np

    offsets = np.concatenate([[-1], *held, [until]])
    for at in np.nonzero(np.diff(offsets) > 1)[0]:
        yield int(offsets[at]) + 1, int(offsets[at + 1])


def lineage_lookup(streams: LakeReads) -> Callable[[str], Lineage | None]:
    """Return what tells, of a stream such as "lake.orders", which identities it has had. Each is looked up once."""

    @cache
    def lineage_of(name: str) -> Lineage | None:
        system, stream = split_stream_name(name)
        try:
            return Lineage.of(streams.state(stream)[1]) if system == streams.name else None
        except StreamNotFoundError:
            return None

    return lineage_of


def _repartitioned_error(stream: str, reader: str, name: str) -> ConfigurationError:
    application = reader.partition("@")[0]
    return _ambiguous_error(
        stream,
        f"{name} was repartitioned after {application!r} had made some of it, and records of it were replayed: which "
        "of the earlier results that replaced is not known",
        f"Let {application!r} read all of {name} again, which replaces them all: adjunct startpoint set MODULE:APP "
        f"{name} --oldest --reason …, and a run. Or tell the records by __epoch.",
    )


def _ambiguous_error(stream: str, why: str, next_step: str) -> ConfigurationError:
    return ConfigurationError(
        f'stream {stream!r}: epochs="latest" can\'t tell which records are the latest: {why}.',
        next_step,
        stream=f"lake.{stream}",
    )


def filter_latest(table: pa.Table, replaced: Sequence[SupersededRange]) -> pa.Table:
    """Return the records of a table with the columns of POSITION that nothing has replaced."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if not replaced or not table.num_rows:
        return table
    offsets = pc.fill_null(table.column(SOURCE_OFFSET), -1).to_numpy()
    epochs = pc.fill_null(table.column(SOURCE_EPOCH), 0).to_numpy()
    gone = np.zeros(table.num_rows, bool)
    # Those of one group are in order and apart; what is replaced upstream may overlap with what is here.
    spans: dict[tuple[str, str, bool], list[SupersededRange]] = {}
    for span in replaced:
        spans.setdefault((span.reader, span.source, span.epoch == EVERY_EPOCH), []).append(span)
    for (reader, source, _), mine in spans.items():
        of = pc.and_(pc.equal(table.column(READER), reader), pc.equal(table.column(SOURCE), source))
        rows = np.nonzero(pc.fill_null(of, False).to_numpy())[0]
        if not rows.size:
            continue
        starts, ends, highest = (np.array([getattr(s, name) for s in mine]) for name in ("start", "end", "epoch"))
        at = np.searchsorted(starts, offsets[rows], side="right") - 1
        inside = (at >= 0) & (offsets[rows] < ends[at])
        gone[rows] |= inside & (epochs[rows] < highest[at])
    return table.filter(pa.array(~gone))


def filter_latest_frame(frame: DataFrame, replaced: Sequence[SupersededRange]) -> DataFrame:
    """Return the same of a frame, as a join with what is replaced: few rows, which every task gets."""
    from pyspark.sql import functions as F

    if not replaced:
        return frame
    names = [f"__replaced_{name}" for name in SupersededRange._fields]
    kinds = ("string", "string", "bigint", "bigint", "int")
    ddl = ", ".join(f"{name} {kind}" for name, kind in zip(names, kinds, strict=True))
    spans = frame.sparkSession.createDataFrame([tuple(span) for span in replaced], ddl)
    reader, source, start, end, epoch = (F.col(name) for name in names)
    condition = (
        (F.col(READER) == reader)
        & (F.col(SOURCE) == source)
        & (F.col(SOURCE_OFFSET) >= start)
        & (F.col(SOURCE_OFFSET) < end)
        & (F.col(SOURCE_EPOCH) < epoch)
    )
    return frame.join(F.broadcast(spans), condition, "left_anti")


def drop_positions(table: pa.Table) -> pa.Table:
    return table.drop_columns([name for name in POSITION if name in table.column_names])
