"""Changes that can't be applied: sent to a stream of dead letters, or failing the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DeadLetters
from dagster_adjunct.assets.sources.opened_stream import resolve_stream
from dagster_adjunct.resources.errors import DatasetError, StreamNotFoundError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


DEAD_LETTERS = Schema.of(
    dataset="string", stream="string", partition="int", offset="bigint", reason="string", value="string", at="timestamp"
)
"""The columns of a stream of dead letters. `value` is the record's columns as JSON, `at` its own time."""


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
