"""What an advance reads next: about a chunk of each partition, of whole transactions where these are kept whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.changes.debezium import DebeziumEnvelope
from dagster_adjunct.assets.sources.opened_stream import Offsets, Ranges, by_partition
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.assets.unbounded.commit_table import Advance, AdvanceProgress


def next_ranges(advance: Advance, progress: AdvanceProgress) -> tuple[Ranges, bool]:
    """Return the next ranges to read, about a chunk, and whether there is nothing more to read now.

    Ranges that were read before for their dead letters are read again as they were. Where transactions are kept whole,
    the ranges end before the first that is not all there, and a chunk that holds no whole one is made larger. A
    bootstrap then reads on behind its target: there a transaction may end.
    """
    system, form = advance.source.system, advance.spec.following.changes
    starts = by_partition(progress.manifest.offsets)
    transactions = isinstance(form, DebeziumEnvelope) and form.transactions is not None
    target = by_partition(progress.bootstrap.target) if progress.running else progress.ends
    quarantining = progress.manifest.quarantining
    if quarantining is not None:
        begun: Ranges = {SystemStreamPartition.parse(ssp): span for ssp, span in quarantining.items()}
        at = offsets_after(progress, begun)
        return begun, all(system.compare(at[ssp], target[ssp]) >= 0 for ssp in starts)
    ends = progress.ends if transactions else target
    lags = {ssp: max(system.distance(ssp, start, ends[ssp]), 0) for ssp, start in starts.items()}
    lag, chunk = sum(lags.values()), advance.spec.following.chunk
    while True:
        ranges: Ranges = {
            ssp: (starts[ssp], system.advance(ssp, starts[ssp], count))
            for ssp, most in lags.items()
            if (count := _share(most, lag, chunk))
        }
        if transactions and ranges:
            ranges = _whole_transactions(advance, ranges)
        if ranges or lag <= chunk:
            return ranges, lag <= chunk
        chunk *= 4


def reaches_target(advance: Advance, progress: AdvanceProgress, ranges: Ranges) -> bool:
    """Whether all of the bootstrap's target is in the table once these ranges are."""
    at, target = offsets_after(progress, ranges), by_partition(progress.bootstrap.target)
    return all(advance.source.system.compare(at[ssp], end) >= 0 for ssp, end in target.items())


def offsets_after(progress: AdvanceProgress, ranges: Ranges) -> Offsets:
    """Return the next offsets to read once these ranges are in the table."""
    return {**by_partition(progress.manifest.offsets), **{ssp: end for ssp, (_, end) in ranges.items()}}


def _share(most: int, lag: int, chunk: int) -> int:
    """Return how many of a partition's `most` offsets belong to a chunk of all that is behind."""
    return most if lag <= chunk else min(most, -(-most * chunk // lag))


def _whole_transactions(advance: Advance, ranges: Ranges) -> Ranges:
    from dagster_adjunct.assets.sources.whole_transactions import whole_transactions

    context = advance.context
    return whole_transactions(advance.spec, context.systems, context.spark(), advance.source, ranges)
