"""Builds versions without Spark, for tests that need many: the same files, written by the same writer.

Only reading the stream and the row digest differ from a real build; everything after it is the real cycle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.bounded import candidate
from dagster_adjunct.assets.sources.delivery import Delivery
from dagster_adjunct.assets.sources.stream_source import StreamSource
from dagster_adjunct.assets.versions.log import Attempt
from dagster_adjunct.assets.writing.generation import generation_of, write_options
from dagster_adjunct.resources.bucketing.files import BucketLayout, Generation
from dagster_adjunct.resources.bucketing.writer import DIGEST, write_arrow_buckets
from dagster_adjunct.resources.objects import Lake
from dagster_adjunct.resources.streams.interface.ssp import SystemStreamPartition
from dagster_adjunct.resources.streams.interface.system import OffsetRange
from dagster_adjunct.resources.streams.lake.system import LakeStreams


def build_without_spark(patch: pytest.MonkeyPatch) -> None:
    """Replace Spark in the build of versions until the patch is undone."""
    patch.setattr(StreamSource, "read", _read)
    patch.setattr(candidate, "write_generation", _write)


def no_session() -> Any:
    """What `spark()` gives: nothing, since nothing asks it."""
    return None


def _read(source: StreamSource, delivery: Delivery, spark: Any) -> pa.Table:
    system = source._stream.system
    assert isinstance(system, LakeStreams)
    ranges = {SystemStreamPartition.parse(ssp): OffsetRange(*span) for ssp, span in delivery.ranges.items()}
    return system.read_arrow({ssp: span for ssp, span in ranges.items() if span.start != span.end})


def _write(
    lake: Lake,
    attempt: Attempt,
    number: int,
    layout: BucketLayout,
    rows: pa.Table,
    *,
    what: str,
    order_by: Sequence[str],
    keep_tombstones: bool,
    partitioned: bool,
    refuse_conflicting: bool = False,
) -> tuple[Generation, dict[str, int]]:
    names = list(layout.schema.names)
    digests = [
        int.from_bytes(hashlib.sha256(repr(sorted(row.items())).encode()).digest()[:8], "big", signed=True)
        for row in rows.select(names).to_pylist()
    ]
    rows = rows.append_column(DIGEST, pa.array(digests, pa.int64()))
    rows = rows.sort_by([(name, "ascending") for name in order_by])
    options = write_options(what, keep_tombstones=keep_tombstones, refuse_conflicting=refuse_conflicting)
    empty = attempt.generation(number)
    files = write_arrow_buckets(rows, lake.store, empty.folder, layout, options)
    return generation_of(attempt, number, layout, files, what=what, refuse_conflicting=refuse_conflicting)
