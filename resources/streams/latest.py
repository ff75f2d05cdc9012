"""The latest results of each source record: which records of a stream are left out, and when nobody can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from resources.errors import ConfigurationError, StreamNotFoundError
from resources.streams.document import Segment, StreamState
from resources.streams.sources import Superseded, superseded
from resources.streams.ssp import SystemStreamPartition
from resources.streams.system import POSITION, READER, SOURCE, SOURCE_EPOCH, SOURCE_OFFSET

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from resources.streams.lake import LakeStreams

WithoutPosition = Literal["refuse", "keep"]


def replaced_results(
    streams: LakeStreams,
    stream: str,
    state: StreamState,
    segments: Sequence[Segment],
    without_position: WithoutPosition,
) -> list[Superseded]:
    """Return which results in these segments later epochs have replaced.

    Raises ConfigurationError where nobody can tell: for records without a source position, unless they are to be kept,
    and for records made of such as were replayed themselves.
    """
    if without_position not in ("refuse", "keep"):
        raise ConfigurationError(
            f"without_position={without_position!r}: expected 'refuse' or 'keep'.", "Choose one of the two."
        )
    unknown = sum(segment.rows for segment in segments if not segment.positioned)
    if unknown and without_position == "refuse":
        raise ConfigurationError(
            f'stream {stream!r}: epochs="latest" can\'t tell of {unknown} records what they were made of: no '
            "application of this version sent them.",
            'Keep them all, as the latest of their kind (without_position="keep"), or read from the first record that '
            "an application sent.",
        )
    _check_upstream(streams, stream, state, segments)
    return superseded(state.read)


def _check_upstream(streams: LakeStreams, stream: str, state: StreamState, segments: Sequence[Segment]) -> None:
    """Refuse records that were made of replayed ones: which of these replaced which is known upstream only."""
    sources = sorted({source for read in state.read.values() for source in read})
    names = sorted({SystemStreamPartition.parse(source).qualified_stream for source in sources})
    for name in names:
        system, _, upstream = name.partition(".")
        if system == streams.name:
            try:
                replayed = bool(superseded(streams.state(upstream)[1].read))
            except StreamNotFoundError:
                continue
            if replayed:
                raise _replayed_upstream(stream, name)
    if any(segment.chained for segment in segments):
        raise _replayed_upstream(stream, ", ".join(names))


def _replayed_upstream(stream: str, source: str) -> ConfigurationError:
    return ConfigurationError(
        f'stream {stream!r}: epochs="latest" can\'t tell which records are the latest: they were made of {source}, '
        "whose own records were made again by a replay before.",
        f'Read {source} with epochs="latest", or tell the records by __epoch, which adds up along the chain.',
    )


def only_latest(table: pa.Table, replaced: Sequence[Superseded]) -> pa.Table:
    """Return the records of a table with the columns of POSITION that nothing has replaced."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if not replaced or not table.num_rows:
        return table
    offsets = pc.fill_null(table.column(SOURCE_OFFSET), -1).to_numpy()
    epochs = pc.fill_null(table.column(SOURCE_EPOCH), 0).to_numpy()
    gone = np.zeros(table.num_rows, bool)
    spans: dict[tuple[str, str], list[Superseded]] = {}
    for span in replaced:
        spans.setdefault((span.reader, span.source), []).append(span)
    for (reader, source), mine in spans.items():
        of = pc.and_(pc.equal(table.column(READER), reader), pc.equal(table.column(SOURCE), source))
        rows = np.nonzero(pc.fill_null(of, False).to_numpy())[0]
        if not rows.size:
            continue
        starts, ends, highest = (np.array([getattr(s, name) for s in mine]) for name in ("start", "end", "epoch"))
        at = np.searchsorted(starts, offsets[rows], side="right") - 1
        inside = (at >= 0) & (offsets[rows] < ends[at])
        gone[rows] = inside & (epochs[rows] < highest[at])
    return table.filter(pa.array(~gone))


def only_latest_frame(frame: DataFrame, replaced: Sequence[Superseded]) -> DataFrame:
    """Return the same of a frame, as a join with what is replaced: few rows, which every task gets."""
    from pyspark.sql import functions as F

    if not replaced:
        return frame
    names = [f"__replaced_{name}" for name in Superseded._fields]
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


def check_epochs(epochs: str) -> bool:
    """Return whether the latest results are asked for."""
    if epochs not in ("all", "latest"):
        raise ConfigurationError(f"epochs={epochs!r}: expected 'all' or 'latest'.", "Choose one of the two.")
    return epochs == "latest"


def without_positions(table: pa.Table) -> pa.Table:
    return table.drop_columns([name for name in POSITION if name in table.column_names])
