"""Changes that can't be applied: sent to a stream of dead letters, or failing the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_adjunct.assets.declaration.change_formats import PROBLEM
from dagster_adjunct.assets.declaration.change_values import Samples
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.sources.changes import RAW, drop_late_changes, fail_on_problems
from dagster_adjunct.assets.sources.opened_stream import OpenedStream, Ranges, resolve_stream
from dagster_adjunct.resources.errors import DatasetError, StreamNotFoundError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import OFFSET, PARTITION, TIMESTAMP, StreamSystem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


DEAD_LETTERS = Schema.of(
    dataset="string", stream="string", partition="int", offset="bigint", reason="string", value="string", at="timestamp"
)
"""The columns of a stream of dead letters. `value` is the record's columns as JSON, `at` its own time."""


def dead_letters_from_changes(changes: DataFrame, spec: AdjunctDataset) -> DataFrame:
    """Return the dead letters of changes that have a problem: one for each record."""
    from pyspark.sql import functions as F

    bad = changes.where(F.col(PROBLEM).isNotNull())
    whole = bad.groupBy(PARTITION, OFFSET).agg(
        F.min(PROBLEM).alias("reason"), F.first(RAW).alias("value"), F.first(TIMESTAMP).alias("at")
    )
    return whole.select(
        F.lit(spec.name).alias("dataset"),
        F.lit(str(spec.input)).alias("stream"),
        F.col(PARTITION).alias("partition"),
        F.col(OFFSET).alias("offset"),
        "reason",
        "value",
        "at",
    )


def add_reasons(changes: DataFrame, reasons: Sequence[tuple[int, int, str]]) -> DataFrame:
    """Return the changes with these problems: partition, offset and reason of each."""
    from pyspark.sql import functions as F

    place, reason = ("__bad_partition", "__bad_offset"), "__reason"
    known = changes.sparkSession.createDataFrame(list(reasons), f"{place[0]} int, {place[1]} bigint, {reason} string")
    same = (F.col(PARTITION) == F.col(place[0])) & (F.col(OFFSET) == F.col(place[1]))
    marked = changes.join(F.broadcast(known), same, "left").withColumn(PROBLEM, F.coalesce(PROBLEM, reason))
    return marked.drop(*place, reason)


def drop_problems(changes: DataFrame) -> DataFrame:
    """Return the changes that can be applied."""
    from pyspark.sql import functions as F

    return changes.where(F.col(PROBLEM).isNull()).drop(PROBLEM, RAW)


def send_dead_letters(
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    letters: DataFrame | pa.Table,
    *,
    producer: str,
    sequence: int,
) -> int:
    """Append letters to the dataset's stream of dead letters, once; return their number.

    An Arrow table must be in the order of partition and offset. The stream is created if it does not exist. Repeating
    the same letters with the same producer and sequence adds nothing. Raises DatasetError for a stream with other
    columns, and ProducerConflictError for other letters.
    """
    policy = spec.following.on_bad_change
    assert isinstance(policy, DeadLetters)
    what = f"dataset {spec.name!r} sends bad changes to {policy.stream}"
    system, stream = resolve_stream(systems, policy.stream, what, dataset=spec.name)
    try:
        columns = system.info(stream).schema
    except StreamNotFoundError:
        columns = system.create(stream, schema=DEAD_LETTERS, partitions=1).schema
    if columns != DEAD_LETTERS:
        wrong = "no columns" if columns is None else DEAD_LETTERS.difference(columns)
        raise DatasetError(
            f"dataset {spec.name!r} sends bad changes to {policy.stream}, which is no stream of dead letters: {wrong}.",
            "Name a new stream, which is then created.",
            dataset=spec.name,
        )
    order_by = () if hasattr(letters, "column_names") else ("partition", "offset")
    return system.append(stream, letters, producer=producer, sequence=sequence, order_by=order_by).rows


@dataclass(frozen=True, slots=True)
class SparkDecoder:
    """A ChangeDecoder over Spark frames; the first read starts the session."""

    session: Callable[[], SparkSession]

    def check(self, source: OpenedStream) -> None:
        return

    def read_changes(
        self, source: OpenedStream, ranges: Ranges, *, positions_from: int = 0, samples: Samples | None = None
    ) -> tuple[DataFrame, Samples | None]:
        return source.read_changes(self.session(), ranges, positions_from=positions_from, samples=samples)

    def drop_late(
        self, changes: DataFrame, horizon: int | None, on_bad_change: object
    ) -> tuple[DataFrame, Callable[[], int] | None]:
        return drop_late_changes(changes, horizon, on_bad_change)

    def fail_on_problems(self, changes: DataFrame, dataset: str) -> DataFrame:
        return fail_on_problems(changes, dataset)

    def drop_problems(self, changes: DataFrame) -> DataFrame:
        return drop_problems(changes)

    def dead_letters(
        self, changes: DataFrame, spec: AdjunctDataset, incomplete: Sequence[tuple[int, int, str]]
    ) -> DataFrame | None:
        if incomplete:
            changes = add_reasons(changes, incomplete)
        letters = dead_letters_from_changes(changes, spec)
        return None if letters.isEmpty() else letters
