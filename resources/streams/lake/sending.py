"""Writes the files of an append: with which of the stream's columns, and what they say of their content."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.streams.interface.source_ranges import Sources
from dagster_adjunct.resources.streams.interface.stream_system import POSITION
from dagster_adjunct.resources.streams.lake.appending import Append, NewMarker
from dagster_adjunct.resources.streams.lake.producers import content_digest, known
from dagster_adjunct.resources.streams.lake.stored_records import as_before, columns_sent, write_records
from dagster_adjunct.resources.streams.lake.stream_manifest import FileEntry, StreamState, data_folder

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.objects.lake import Lake


def written(
    lake: Lake,
    stream: str,
    state: StreamState,
    data: DataFrame | pa.Table,
    producer: str,
    sequence: int,
    end_of_dataset: str | None,
    valid_from: int | None,
    order_by: Sequence[str],
    partitioned: bool,
    started: int,
    sources: Sources | None = None,
    one_task: bool = False,
) -> tuple[Append, list[str]]:
    """Write records into an attempt's folder, begun at `started` (ms); return the append and its files' keys.

    They are written with the newest of the stream's columns that they have. What was sent already is written with those
    of then, and in as many partitions, whatever the stream has by now: the only way to tell that it is the same.
    """
    data = _with_positions_or_without(data, sources, f"stream {stream!r}")
    now = len(state.earlier)
    sent = known(state.producers, producer, sequence, stream)
    columns = columns_sent(state, data, order_by) if sent is None else min(sent.columns, now)
    declaration = state.declared_with(columns)
    if sent is not None:
        data = as_before(data, declaration.schema_, order_by)
        if sent.partitions:
            declaration, partitioned = declaration.model_copy(update={"partitions": sent.partitions}), False
    attempt = f"{started:013d}-{uuid.uuid4().hex[:12]}"
    folder = data_folder(lake.stream_prefix(stream), attempt)
    what = f"stream {stream!r}"
    try:
        files = write_records(
            data, lake.store, folder, declaration, what, tuple(order_by), partitioned=partitioned, one_task=one_task
        )
    except SchemaMismatchError as error:
        error.stream = f"lake.{stream}"
        raise
    partitions = tuple(range(declaration.partitions))
    marker = None
    if end_of_dataset is not None:
        marker = NewMarker(end_of_dataset, partitions, "delivered", valid_from=valid_from)
    facts = [(file.bucket, file.rows, file.sha256 if file.digest is None else file.digest) for file in files]
    digest = content_digest(facts, marker.content() if marker else ())
    entries = tuple(FileEntry.of(file) for file in files)
    chained = any(file.stats.get("differing") for file in files)
    append = Append(
        stream, producer, sequence, digest, attempt, started, entries, marker, state.id, columns, sources, chained
    )
    return append, [f"{folder}/{file.name}" for file in files]


def _with_positions_or_without(data: Any, sources: Sources | None, what: str) -> Any:
    """Return the records with the columns of POSITION where their sources are known, and else without."""
    there = list(data.column_names if hasattr(data, "column_names") else data.columns)
    missing = [name for name in POSITION if name not in there]
    if sources is not None and missing:
        raise SchemaMismatchError(
            f"{what}: sources are given, and the records lack {', '.join(missing)}.",
            "Add what each record was made of, or leave the sources out.",
            column=missing[0],
        )
    if sources is not None or len(missing) == len(POSITION):
        return data
    names = [name for name in POSITION if name in there]
    return data.drop_columns(names) if hasattr(data, "drop_columns") else data.drop(*names)
