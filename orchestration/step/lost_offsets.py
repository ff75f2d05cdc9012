"""Counts what retention took before it was read, as the streams' systems count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Range
    from dagster_adjunct.orchestration.step.step_run import Counters
    from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange, StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def with_lost(
    counters: Counters,
    systems: Mapping[str, StreamSystem],
    lost: Mapping[SystemStreamPartition, OffsetRange | Range],
) -> Counters:
    """Return these counters, and beside them how much of each stream is `lost`."""
    counted = {name: dict(of_name) for name, of_name in counters.items()}
    for ssp, span in lost.items():
        of_stream = counted.setdefault(ssp.qualified_stream, {})
        distance = systems[ssp.system].distance(ssp, span.start, span.end)
        of_stream["lost_offsets"] = of_stream.get("lost_offsets", 0) + distance
    return counted
