"""Twins of stream systems: streams of the test's own lake under the names of any systems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.testing.given_streams import TestStream
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects import Lake
from dagster_adjunct.resources.schemas.exact_array import exact_array
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.interface.registered_systems import LAKE
from dagster_adjunct.resources.streams.interface.stream_system import (
    TOMBSTONE,
    NewStreams,
    Partitioner,
    StreamInfo,
    StreamSystem,
)
from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams

if TYPE_CHECKING:
    import pyarrow as pa


class StreamTwins(LakeStreams):
    """The streams of a lake as the system `name`; `partitioners` say how those of some streams hash, as it is said."""

    def __init__(self, lake: Lake, name: str, partitioners: Mapping[str, Partitioner]) -> None:
        super().__init__(lake)
        self.name = name
        if name != LAKE:
            self.new_streams = NewStreams()  # what the system itself would say is not known here
        self._partitioners = dict(partitioners)

    def info(self, stream: str) -> StreamInfo:
        described = super().info(stream)
        return replace(described, partitioner=self._partitioners.get(stream, described.partitioner))

    def snapshot(self, stream: str) -> StreamSystem:
        """Nobody else writes to the streams of a test."""
        return self


def schema_of(stream: str, given: TestStream | None, rows: Sequence[Mapping[str, Any]]) -> Schema:
    """Return the columns that a test gives a stream, else those of its first records as Python has them."""
    if given is not None and given.schema is not None:
        return given.schema
    if not rows:
        raise ConfigurationError(
            f"stream {stream!r} has no columns: none are given, and no records to take them from.",
            "Describe it: TestApplication(app, {…: TestStream(Schema.of(…))}).",
            stream=stream,
        )
    import pyarrow as pa

    return Schema.from_arrow(pa.Table.from_pylist(list(rows)).schema)


def table_of(
    stream: str, schema: Schema, rows: Sequence[Mapping[str, Any]], deleted: Sequence[Mapping[str, Any]]
) -> pa.Table:
    """Return records, then tombstones, as the stream takes them. Raises ConfigurationError with the record's number."""
    import pyarrow as pa

    everything = [*rows, *deleted]
    for number, row in enumerate(everything):
        unknown = [name for name in row if name not in schema]
        if unknown:
            raise ConfigurationError(
                f"stream {stream!r}: record {number} has a column {unknown[0]!r}; its columns are "
                f"{', '.join(schema.names)}.",
                "Correct the record, or the columns of the stream.",
                stream=stream,
            )
    columns = {}
    for field in schema.to_arrow():
        try:
            columns[field.name] = exact_array([row.get(field.name) for row in everything], field.type)
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"stream {stream!r}: column {field.name!r} is {schema.field(field.name, stream).type}: {error}.",
                "Correct the records, or the columns of the stream.",
                stream=stream,
            ) from error
    columns[TOMBSTONE] = pa.array([False] * len(rows) + [True] * len(deleted), pa.bool_())
    return pa.table(columns)
