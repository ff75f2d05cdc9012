"""Reads exact ranges of a lake stream partition by partition, in any process: few columns of many records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.objects.object_store import StoreDescriptor
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.arrow_read import read_tables
from dagster_adjunct.resources.streams.lake.segment_index import Span
from dagster_adjunct.resources.streams.lake.stream_manifest import Segment

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class TaskReads:
    """Returns, called with a partition, its records in the order of offsets: these columns, then those of RECORD_META.

    They come in parts of a row group each. It can be pickled, and opens the store where it is called.
    """

    store: StoreDescriptor
    prefix: str
    schema: Schema
    segments: Sequence[Segment]
    spans: Mapping[int, Span]

    def __call__(self, partition: int) -> Iterator[pa.Table]:
        spans = {partition: self.spans[partition]}
        return read_tables(self.store.open(), self.prefix, self.schema, self.segments, spans)
