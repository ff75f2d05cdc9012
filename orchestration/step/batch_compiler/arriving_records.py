"""The records that arrive at an operator, made of those that leave the operators before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.record_times.record_positions import as_branch
from dagster_adjunct.resources.schemas.quoted_columns import column

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from dagster_adjunct.orchestration.operators.spec.operator_spec import Operator
    from dagster_adjunct.orchestration.step.batch_compiler.known_batch import KnownBatch


def only_written_move(known: KnownBatch, operator: Operator) -> bool:
    """Whether records are moved to be written, and go on from where they lay."""
    return operator.spec.writes_aside and bool(known.moves(operator.id))


def moved(known: KnownBatch, operator: Operator, sources: Sequence[DataFrame]) -> list[DataFrame]:
    """Return the records of each input, where the planner's auto_repartition has them before this operator."""
    frames = list(sources)
    for exchange in known.moves(operator.id):
        number, by = exchange.input, map(column, exchange.partitioned_by)
        frames[number] = known.together(frames[number]).repartition(exchange.partitions, *by)
    return frames


def arriving_records(
    known: KnownBatch,
    operator: Operator,
    sources: Sequence[DataFrame],
    with_watermark: Callable[[Operator, DataFrame], DataFrame],
) -> list[DataFrame]:
    """Return the records of each input as the operator gets them: moved, behind its watermark, told apart.

    `sources` are what leaves the operators before it. Records of several inputs may have the same positions: those of
    each say which input they came by.
    """
    frames = [with_watermark(operator, frame) for frame in moved(known, operator, sources)]
    if len(frames) < 2:
        return frames
    one_stream = len(known.origins[operator.id].streams) == 1
    return [
        as_branch(frame, number, one_stream=one_stream, stream=known.stream_of(source) or "")
        for number, (source, frame) in enumerate(zip(operator.inputs, frames, strict=True))
    ]
