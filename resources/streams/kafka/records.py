"""From records with typed columns to Kafka's messages: what record_formats.py reads, and the other way round."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.bucketing.writer import check_values, record_place
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.schemas.quoted_columns import column
from dagster_adjunct.resources.schemas.schema import Schema, conform, widens
from dagster_adjunct.resources.spark.spark_errors import wrapped
from dagster_adjunct.resources.streams.interface.stream_system import TOMBSTONE
from dagster_adjunct.resources.streams.kafka.record_formats import (
    HEADERS,
    KEY,
    VALUE,
    Batches,
    key_format,
    schema_of,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame

    from dagster_adjunct.resources.streams.kafka.kafka_settings import KafkaTopic

BATCH_ROWS = 10_000


def encode(frame: DataFrame, topic: KafkaTopic, stream: str) -> DataFrame:
    """Return messages for records: `__key` and `__value`, `__headers` where the topic declares them, then the frame's
    own columns that begin with `__`.

    `stream` ("kafka.flights") is for errors. Where the frame has `__tombstone` and it is true, the value is null.
    Raises SchemaMismatchError for columns that are not the topic's, and ConfigurationError where a format can't write.
    """
    from pyspark.sql import functions as F

    written = _written(topic)
    around = [name for name in frame.schema.names if name.startswith("__")]
    given = Schema.from_spark(frame.select(*[column(n) for n in frame.columns if n not in around]).schema)
    _check_columns(given, written, stream)
    encoder(topic, stream)  # what fails here would fail in every task
    casts = [column(field.name).cast(field.type).alias(field.name) for field in written.fields]
    types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    ddl = [f"{KEY} BINARY", f"{VALUE} BINARY"]
    ddl += [f"{HEADERS} ARRAY<STRUCT<name: STRING, value: BINARY>>"] if topic.headers is not None else []
    ddl += [f"`{name}` {types[name]}" for name in around]

    def made(batches: Iterator[Any]) -> Iterator[Any]:
        yield from map(encoder(topic, stream), batches)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        return wrapped(made(batches))

    return frame.select(*casts, *[F.col(name) for name in around]).mapInArrow(run, ", ".join(ddl))


def encode_table(table: pa.Table, topic: KafkaTopic, stream: str) -> pa.Table:
    """Return the same of an Arrow table, in its order."""
    import pyarrow as pa

    encoded = encoder(topic, stream)
    made = [encoded(batch) for batch in table.combine_chunks().to_batches(max_chunksize=BATCH_ROWS)]
    return pa.Table.from_batches(made) if made else pa.Table.from_batches([encoded(_empty(table))])


def encoder(topic: KafkaTopic, stream: str) -> Batches:
    """Return what makes messages of a batch of records, as `encode` does. Make one for each task."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    key, value, written = key_format(topic), topic.value, _written(topic)
    subject = topic.topic or split_stream_name(stream)[1]
    write_value = value.writer(stream, f"{subject}-value")
    write_key = key.writer(stream, f"{subject}-key") if key else None

    def run(batch: pa.RecordBatch) -> pa.RecordBatch:
        names = batch.schema.names
        around = {name: batch.column(name) for name in names if name.startswith("__")}
        table = pa.table({name: batch.column(name) for name in names if name not in around})
        records = conform(table, written, stream, partial(_place, table, written, stream)).combine_chunks()
        check_values(records, written, stream, stream=stream)
        flat = {name: _chunk(records.column(name)) for name in written.names}
        gone = around[TOMBSTONE].fill_null(False) if TOMBSTONE in around else pa.array(np.zeros(batch.num_rows, bool))
        keep = pc.invert(gone)
        present = [flat[name].filter(keep) for name in value.columns().names]
        made = iter(write_value(present))
        values = [next(made) if kept else None for kept in keep.to_pylist()]
        out = {KEY: pa.nulls(batch.num_rows, pa.binary()), VALUE: pa.array(values, pa.binary())}
        if write_key is not None and key is not None:
            out[KEY] = pa.array(write_key([flat[name] for name in key.columns().names]), pa.binary())
        if topic.headers is not None:
            out[HEADERS] = _headers_of(flat[topic.headers], topic.headers, stream)
        return pa.RecordBatch.from_pydict(out | {k: v for k, v in around.items() if k not in out})

    return run


def _place(table: pa.Table, written: Schema, stream: str, row: int) -> tuple[str, dict[str, Any]]:
    return record_place(table, row, written), {"stream": stream}


def _empty(table: pa.Table) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_pylist([], schema=table.schema)


def _chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _written(topic: KafkaTopic) -> Schema:
    """Return the columns that are written: all but those that keep what could not be read."""
    kept = {side.malformed for side in (topic.key, topic.value) if side is not None}
    return Schema(tuple(field for field in schema_of(topic).fields if field.name not in kept))


def _check_columns(given: Schema, written: Schema, stream: str) -> None:
    fits = set(given.names) == set(written.names) and all(
        widens(given.field(field.name).type, field.type) for field in written.fields
    )
    if not fits:
        raise SchemaMismatchError(
            f"{stream}: the records to append do not have its columns: {written.difference(given)}.",
            f"Select exactly {written.ddl()}.",
            stream=stream,
        )


def _headers_of(texts: pa.Array, name: str, stream: str) -> pa.Array:
    """Return the headers that JSON texts name; the opposite of `_headers_json`."""
    import pyarrow as pa

    kind = pa.list_(pa.struct([("name", pa.string()), ("value", pa.binary())]))
    made: list[Any] = []
    for text in texts.to_pylist():
        try:
            pairs = json.loads(text) if text is not None else []
            made.append(
                [{"name": n, "value": None if v is None else base64.b64decode(v, validate=True)} for n, v in pairs]
            )
        except (ValueError, TypeError) as error:
            raise SchemaMismatchError(
                f"{stream}: column {name!r} holds a text that is no list of headers.",
                'Write it like [["name","base64"]].',
                column=name,
                stream=stream,
            ) from error
    return pa.array(made, kind)
