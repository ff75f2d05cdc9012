"""Finds the latest results of each source record: which records of a stream were replaced by a replay.

After a repartitioning, offsets start again and the stream has a new identity, so old offsets can't be mapped to new
ones; only the end of the old records in each new partition is known. A reader that has read all of these again has
replaced all its earlier results; for one that has read a part again, the replaced results can't be determined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError
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
    POSITION,
    READER,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    OffsetRange,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.streams.lake.streams import LakeReads

EVERY_EPOCH = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Lineage:
    """The identities of a stream, oldest first: `rewritings[i]` is the repartitioning of `ids[i]` to `ids[i + 1]`."""

    ids: tuple[str, ...]
    rewritings: tuple[RepartitionRecord, ...]

    @classmethod
    def of(cls, state: StreamState) -> Lineage:
        rewritings = (*state.rewritten_before, *((state.rewritten,) if state.rewritten else ()))
        return cls((*(rewriting.id for rewriting in rewritings), state.id), rewritings)

    def index_of(self, identity: str) -> int | None:
        """Return the index of this identity; None for that of another stream."""
        return self.ids.index(identity) if identity in self.ids else None


LineageOf = Callable[[str], Lineage | None]
"""Returns the lineage of a stream such as "lake.orders", or None if it is not known."""


@dataclass(frozen=True, slots=True)
class ReplacedResults:
    """Replaced results from before a repartitioning; `unknown` are (reader, stream) for which they can't be found."""

    superseded: tuple[SupersededRange, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()

    @property
    def readers(self) -> frozenset[tuple[str, str]]:
        """The (reader, stream) whose results are all replaced."""
        return frozenset((span.reader, _stream(span.source)) for span in self.superseded)


def find_replaced_by_repartition(read: ReadCoverage, lineage_of: LineageOf) -> ReplacedResults:
    """Return the results of records that were read again after they were repartitioned."""
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
    """Return the coverage `before` in terms of the streams' current partitions: all repartitioned records were read."""
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
    """Return how much of the repartitioned records was read again in the new partitions."""
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
    """Return whether retention dropped records between two repartitionings; these can't be mapped to old ones."""
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
    """Return the results in these segments that later epochs have replaced, in this stream or upstream.

    Raises ConfigurationError if that can't be determined: for records without a source position, unless they are
    kept, and for results of replayed records whose own replacements are not known.
    """
    if without_position not in ("refuse", "keep"):
        raise ConfigurationError(
            f"without_position={without_position!r}: expected 'refuse' or 'keep'.",
            argument="without_position",
        )
    unknown = sum(segment.rows for segment in segments if not segment.positioned)
    if unknown and without_position == "refuse":
        raise ConfigurationError(
            f'stream {stream!r}: epochs="latest" needs the source position of every record, and {unknown} records '
            "have none: they were not sent by an application.",
            'Treat them all as latest (without_position="keep"), or read from the first record that an application '
            "sent.",
            stream=f"lake.{stream}",
        )
    return [*_find_upstream_replacements(streams, stream, state, segments), *list_superseded(state.read)]


def _find_upstream_replacements(
    streams: LakeReads, stream: str, state: StreamState, segments: Sequence[Segment]
) -> list[SupersededRange]:
    """Return the results of records that were themselves replaced upstream, or that were read again after their stream
    was repartitioned.

    Upstream streams that were replayed are read. Raises ConfigurationError if that does not suffice.
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
            f"some are results of records of {', '.join(sorted(unknown))} that a replay had replaced, and which these "
            "are is not known here",
            "Compare the records by __epoch, which adds up along the chain.",
        )
    return replaced


def _is_replayed(streams: LakeReads, stream: str, state: StreamState, seen: set[str]) -> bool:
    """Return whether a stream, or one upstream of it in the lake, has replaced records."""
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
    """Return the ranges of replaced records of `upstream`, whose results are replaced in every epoch."""
    behind = [
        f"lake.{upstream}.{p}"
        for p, end in enumerate(above.next)
        if partitions.get(f"lake.{upstream}.{p}", Coverage()).until != end
    ]
    if behind:
        raise _ambiguous_error(
            stream,
            f"lake.{upstream} was replayed, and {reader.partition('@')[0]!r} has not read all of it yet (in "
            f"{', '.join(behind[:3])}): earlier results would be missing before the later ones exist",
            f"Run {reader.partition('@')[0]!r} until it has caught up, then read again.",
        )
    if any(above.oldest):
        raise _ambiguous_error(
            stream,
            f"lake.{upstream} was replayed, but retention has dropped records that are needed to find replaced ones",
            f"Keep lake.{upstream} longer than its replays reach back, and replay its reader from its oldest record.",
        )

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
    """Yield the ranges of [0, until) without the given offsets, which are in order."""
    offsets = np.concatenate([[-1], *held, [until]])
    for at in np.nonzero(np.diff(offsets) > 1)[0]:
        yield int(offsets[at]) + 1, int(offsets[at + 1])


def lineage_lookup(streams: LakeReads) -> Callable[[str], Lineage | None]:
    """Return a cached function from a stream such as "lake.orders" to its lineage."""

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
        f"{name} was repartitioned after {application!r} had read it, and then partly replayed: which earlier "
        "results were replaced is not known",
        f"Let {application!r} read all of {name} again, which replaces all its results: adjunct startpoint set "
        f"MODULE:APP {name} --oldest --reason …, and a run. Or compare the records by __epoch.",
    )


def _ambiguous_error(stream: str, why: str, next_step: str) -> ConfigurationError:
    return ConfigurationError(
        f'stream {stream!r}: epochs="latest" can\'t determine the latest records: {why}.',
        next_step,
        stream=f"lake.{stream}",
    )


def filter_latest(table: pa.Table, replaced: Sequence[SupersededRange]) -> pa.Table:
    """Return the records of a table, with columns of POSITION, that are not replaced."""
    if not replaced or not table.num_rows:
        return table
    offsets = pc.fill_null(table.column(SOURCE_OFFSET), -1).to_numpy()
    epochs = pc.fill_null(table.column(SOURCE_EPOCH), 0).to_numpy()
    gone = np.zeros(table.num_rows, bool)
    # Ranges of one group are in order and disjoint; those replaced upstream may overlap those replaced here.
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
    """Return the records of a frame that are not replaced, by a broadcast anti-join with the replaced ranges."""
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
