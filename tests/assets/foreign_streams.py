"""Streams of a system that checks nothing: values that Python does not have come out of them, in
either engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema, named_column
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import StreamInfo, StreamSystem

_STORED = {"date": "int", "timestamp": "bigint", "string": "binary"}


def stored(schema: Schema) -> Schema:
    """Return the columns as which the lake keeps those of a foreign stream: days, microseconds
    and bytes.
    """
    return Schema.of({field.name: _STORED.get(field.type, field.type) for field in schema.fields})


def stored_table(table: pa.Table) -> pa.Table:
    """Return records as the lake keeps them."""
    kinds = {
        pa.date32(): pa.int32(),
        pa.timestamp("us", tz="UTC"): pa.int64(),
        pa.string(): pa.binary(),
    }
    fields = [
        pa.field(f.name, f.type if f.name.startswith("__") else kinds.get(f.type, f.type))
        for f in table.schema
    ]
    return table.cast(pa.schema(fields))


class ForeignStreams(LakeStreams):
    """A lake's streams, those in `foreign` with these columns."""

    def __init__(self, lake: Lake, foreign: Mapping[str, Schema]) -> None:
        super().__init__(lake)
        self.foreign = foreign

    def info(self, stream: str) -> StreamInfo:
        described = super().info(stream)
        return replace(described, schema=self.foreign.get(stream, described.schema))

    def snapshot(self, stream: str) -> StreamSystem:
        return self

    def read_arrow(self, ranges: Any, *more: Any, **named: Any) -> pa.Table:
        table = super().read_arrow(ranges, *more, **named)
        schema = self._schema(ranges)
        for field in () if schema is None else schema.to_arrow():
            place = table.column_names.index(field.name)
            kept = table.column(place)
            chunks = [chunk.view(field.type) for chunk in kept.chunks]
            table = table.set_column(place, field.name, pa.chunked_array(chunks, field.type))
        return table

    def read(self, spark: Any, ranges: Any, **named: Any) -> Any:
        from pyspark.sql import functions as F

        frame = super().read(spark, ranges, **named)
        made = {"date": F.date_from_unix_date, "timestamp": F.timestamp_micros}
        schema = self._schema(ranges)
        for field in () if schema is None else schema.fields:
            value = named_column(field.name)
            frame = frame.withColumn(
                field.name,
                made[field.type](value) if field.type in made else value.cast(field.type),
            )
        return frame

    def _schema(self, ranges: Any) -> Schema | None:
        return self.foreign.get(next(iter(ranges)).stream)
