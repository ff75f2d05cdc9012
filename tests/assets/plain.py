"""Builds versions without Spark, for tests that need many: only how the stream is read differs from a real build.

What is read is an Arrow table, which everything after it takes as it takes Spark's rows.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from dagster_adjunct.assets.sources.end_of_dataset_markers import Delivery
from dagster_adjunct.assets.sources.stream_source import StreamSource
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams


def build_without_spark(patch: pytest.MonkeyPatch) -> None:
    """Replace Spark in the build of versions until the patch is undone."""
    patch.setattr(StreamSource, "read", _read)


def no_session() -> Any:
    """What `spark()` gives: nothing, since nothing asks it."""
    return None


def _read(source: StreamSource, delivery: Delivery, spark: Any) -> pa.Table:
    system = source._stream.system
    assert isinstance(system, LakeStreams)
    ranges = {SystemStreamPartition.parse(ssp): OffsetRange(*span) for ssp, span in delivery.ranges.items()}
    return system.read_arrow({ssp: span for ssp, span in ranges.items() if span.start != span.end})
