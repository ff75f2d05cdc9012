"""Traces which stream's positions records carry through the operators, and adds the columns of their origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.operators.columns import BRANCH, ORIGIN
from dagster_adjunct.orchestration.operators.operator import Operator
from dagster_adjunct.resources.schemas.column_sql import bigint_array
from dagster_adjunct.resources.streams.system import (
    EPOCH,
    OFFSET,
    PARTITION,
    POSITION,
    READER,
    SOURCE,
    SOURCE_EPOCH,
    SOURCE_OFFSET,
    Sources,
    SystemStreamPartition,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of the positions of an operator's records.

    `streams` are the streams of the positions, by the operator that each comes from: an input, an output that the graph
    continues from, or an operator that makes records of several. `made_of` is the one input stream that all records are
    made of; None if there are several.
    """

    streams: Mapping[str, str]
    made_of: str | None


def trace_origins(operators: Iterable[Operator]) -> dict[str, Origin]:
    """Return the origin of the records after each operator."""
    result: dict[str, Origin] = {}
    for operator in operators:
        before = [result[source] for source in operator.inputs]
        streams: Mapping[str, str]
        if len(before) == 1:  # shared: after a merge of many inputs there may be many
            streams = before[0].streams
        else:
            streams = {begun: stream for origin in before for begun, stream in origin.streams.items()}
        made_of = before[0].made_of if len(streams) == 1 else None
        spec = operator.spec
        if spec.assigns_positions:
            streams, made_of = {operator.id: operator.id}, None
        elif spec.reads is not None:
            streams, made_of = {operator.id: spec.reads}, spec.reads
        elif spec.role == "output" and spec.writes is not None:
            streams = {operator.id: spec.writes}
        result[operator.id] = Origin(streams, made_of)
    return result


def add_epochs(records: DataFrame, epochs: Mapping[int, int]) -> DataFrame:
    """Return the records with the epoch of their partition's position added to their own.

    The sum also tells readers of an output that an application made from a replayed output.
    """
    from pyspark.sql import functions as F

    if not epochs:
        return records
    here = F.get(bigint_array(epochs.get(partition, 0) for partition in range(max(epochs) + 1)), F.col(PARTITION))
    return records.withColumn(EPOCH, (F.col(EPOCH) + F.coalesce(here, F.lit(0))).cast("int"))


def add_positions(records: DataFrame, sources: Sources | None) -> DataFrame:
    """Return the records with the columns of POSITION if their output keeps these, else without.

    Records from an output of this batch already have them: their positions are in the application's input.
    """
    from pyspark.sql import functions as F

    if sources is None:
        return records.drop(*POSITION)
    if SOURCE in records.columns:
        return records
    numbers = {SystemStreamPartition.parse(span.source).partition: span.epoch for span in sources.ranges}
    epoch = F.get(bigint_array(numbers.get(p, 0) for p in range(max(numbers, default=0) + 1)), F.col(PARTITION))
    return records.withColumns(
        {
            SOURCE: F.concat(F.lit(f"{sources.stream}."), F.col(PARTITION).cast("string")),
            SOURCE_OFFSET: F.col(OFFSET),
            SOURCE_EPOCH: F.coalesce(epoch, F.lit(0)).cast("int"),
            READER: F.lit(sources.reader),
        }
    )


def tag_branch(records: DataFrame, number: int, *, one_stream: bool, stream: str = "") -> DataFrame:
    """Return the records tagged as coming from input `number` of an operator with several inputs.

    Unless all inputs have positions in `one_stream`, the columns of POSITION are dropped, because the inputs differ in
    them, and the `stream` of the input's positions is added to each record that lacks it.
    """
    from pyspark.sql import functions as F

    if not one_stream:
        records = records.drop(*POSITION)
        if ORIGIN not in records.columns:
            records = records.withColumn(ORIGIN, F.lit(stream))
    here = F.lit(str(number))
    return records.withColumn(BRANCH, F.concat_ws("/", here, F.col(BRANCH)) if BRANCH in records.columns else here)
