"""Dead letters: the changes that a dataset can't apply, as records of a stream."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.change_formats import PROBLEM
from dagster_adjunct.assets.declaration.dataset import UnboundedDataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.sources import changes as decoding
from dagster_adjunct.assets.sources.entries import resolve_stream
from dagster_adjunct.assets.unbounded.commit import Advance
from dagster_adjunct.assets.unbounded.complete_rows import SetAsideChange
from dagster_adjunct.assets.unbounded.row_rules import list_row_rules
from dagster_adjunct.resources.errors import DatasetError, StreamNotFoundError
from dagster_adjunct.resources.lazy_modules import F, pa, pc
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import (
    OFFSET,
    PARTITION,
    TIMESTAMP,
    AppendOptions,
    StreamSystem,
    require_writer,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


DEAD_LETTERS = Schema.of(
    dataset="string",
    stream="string",
    partition="int",
    offset="bigint",
    reason="string",
    value="string",
    at="timestamp",
)
"""The columns of a stream of dead letters. `value` is the record's columns as JSON, `at` its own
time.
"""


def build_dead_letters(
    changes: DataFrame | pa.Table, spec: UnboundedDataset, refused: Sequence[SetAsideChange]
) -> DataFrame | pa.Table | None:
    """Return a dead letter for each record with a change that can't be applied; None if there is
    none.

    These are the changes with a problem, and those in `refused`, which turned out to be incomplete,
    tied or late while they were written. If several changes of a record can't be applied, the
    letter has the alphabetically first of their reasons.
    """
    if isinstance(changes, pa.Table):
        return _build_arrow_dead_letters(changes, spec, refused)
    if refused:
        columns = "__bad_partition int, __bad_offset bigint, __reason string"
        reasons = changes.sparkSession.createDataFrame(list(map(tuple, refused)), columns)
        same_partition = F.col(PARTITION) == F.col("__bad_partition")
        same_offset = F.col(OFFSET) == F.col("__bad_offset")
        changes = changes.join(F.broadcast(reasons), same_partition & same_offset, "left")
        changes = changes.withColumn(PROBLEM, F.coalesce(PROBLEM, "__reason"))
        changes = changes.drop("__bad_partition", "__bad_offset", "__reason")
    bad = changes.where(F.col(PROBLEM).isNotNull()).groupBy(PARTITION, OFFSET)
    letters = bad.agg(
        F.min(PROBLEM).alias("reason"),
        F.first(decoding.RAW).alias("value"),
        F.first(TIMESTAMP).alias("at"),
    ).select(
        F.lit(spec.name).alias("dataset"),
        F.lit(str(spec.input)).alias("stream"),
        F.col(PARTITION).alias("partition"),
        F.col(OFFSET).alias("offset"),
        "reason",
        "value",
        "at",
    )
    if letters.isEmpty():
        return None
    return letters


def _build_arrow_dead_letters(
    changes: pa.Table, spec: UnboundedDataset, refused: Sequence[SetAsideChange]
) -> pa.Table | None:
    """Return the dead letters of an Arrow table, in the order of partition and offset; None if
    there is none. See `build_dead_letters`.
    """
    if refused:
        reasons = {(change.partition, change.offset): change.reason for change in refused}
        partitions = changes.column(PARTITION).to_pylist()
        records = zip(partitions, changes.column(OFFSET).to_pylist(), strict=True)
        changes = decoding.add_problems(changes, list(map(reasons.get, records)))
    bad = changes.filter(pc.is_valid(changes.column(PROBLEM)))
    if not bad.num_rows:
        return None
    letter_columns = {
        PARTITION: "partition",
        OFFSET: "offset",
        PROBLEM: "reason",
        decoding.RAW: "value",
        TIMESTAMP: "at",
    }
    letters = bad.select(list(letter_columns)).rename_columns(list(letter_columns.values()))
    # By reason, too: the first one of a record is then the least, as with F.min in Spark.
    letters = letters.sort_by(
        [("partition", "ascending"), ("offset", "ascending"), ("reason", "ascending")]
    )
    first_rows: dict[tuple[int, int], int] = {}  # by record
    records = zip(letters["partition"].to_pylist(), letters["offset"].to_pylist(), strict=True)
    for row, record in enumerate(records):
        first_rows.setdefault(record, row)
    letters = letters.take(list(first_rows.values()))
    origin = {"dataset": spec.name, "stream": str(spec.input)}
    columns = {}
    for name, text in origin.items():
        columns[name] = pa.array([text] * letters.num_rows, pa.string())
    for name in letter_columns.values():
        columns[name] = letters.column(name)
    return pa.table(columns).cast(DEAD_LETTERS.to_arrow())


def check_letter_columns(spec: UnboundedDataset, columns: Schema | None) -> None:
    """Raise DatasetError if the existing stream of the dataset's dead letters has other columns."""
    if columns == DEAD_LETTERS:
        return
    if columns is None:
        wrong = "no columns"
    else:
        wrong = DEAD_LETTERS.difference(columns)
    raise DatasetError(
        f"dataset {spec.name!r} sends bad changes to {spec.dead_letters}, which is not a stream of"
        f" dead letters: {wrong}.",
        "Name a new stream, which is then created.",
        dataset=spec.name,
    )


def send_dead_letters(
    systems: Mapping[str, StreamSystem],
    spec: UnboundedDataset,
    letters: DataFrame | pa.Table,
    *,
    producer: str,
    sequence: int,
) -> int:
    """Append letters to the dataset's stream of dead letters, once; return their number.

    An Arrow table must be in the order of partition and offset. The stream is created if it does
    not exist. Repeating the same letters with the same producer and sequence adds nothing. Raises
    DatasetError for a stream with other columns, and ProducerConflictError for other letters.
    """
    policy = spec.following.on_bad_change
    assert isinstance(policy, DeadLetters)
    what = f"dataset {spec.name!r} sends bad changes to {policy.stream}"
    found, stream = resolve_stream(systems, policy.stream, what, dataset=spec.name)
    system = require_writer(found)
    try:
        columns = system.info(stream).schema
    except StreamNotFoundError:
        columns = system.create(stream, schema=DEAD_LETTERS, partitions=1).schema
    check_letter_columns(spec, columns)
    if isinstance(letters, pa.Table):  # in this order already
        options = AppendOptions()
    else:
        options = AppendOptions(order_by=("partition", "offset"))
    return system.append(
        stream, letters, producer=producer, sequence=sequence, options=options
    ).rows


def dead_letter_producer(advance: Advance, identity: tuple[object, ...]) -> str:
    """Return the producer id of dead letters. It differs where the same ranges may give different
    letters.

    That is the case after a rebuild, a changed declaration, a compaction that moved the horizon, or
    an erasure of rows from which changes are completed, and in a rewind. `identity` is what tells
    the letters of a rewind, and those of changes that were refused while written, from others.
    """
    spec = advance.spec
    extractor = advance.spec.extractor
    manifest = advance.manifest
    facts: list[object] = [
        spec.following.changes.describe(),
        extractor and extractor.describe(),
        spec.columns.names,
        manifest.horizon,
    ]
    if manifest.positions_from:
        facts.append(manifest.positions_from)
    rules = list_row_rules(spec, advance.source.schema)
    facts += [rule.condition for rule in rules if rule.severity == "error"]
    facts += identity
    digest = hashlib.sha256(repr(tuple(facts)).encode()).hexdigest()[:8]
    return f"dead-{spec.name}-{advance.bootstrap.started_at:%Y%m%dT%H%M%S%f}-{digest}"
