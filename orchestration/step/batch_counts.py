"""How much lies in the ranges of a batch, and how much retention took before it, as the streams' systems count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import Range
    from dagster_adjunct.orchestration.step.step_run import Counters
    from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange, StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def records_in(systems: Mapping[str, StreamSystem], ranges: Mapping[SystemStreamPartition, Range]) -> int:
    """Return how many records (or offsets, where their system counts these) lie in the ranges."""
    return sum(systems[ssp.system].distance(ssp, span.start, span.end) for ssp, span in ranges.items())


def unit_of_records(systems: Mapping[str, StreamSystem], app: Application) -> str:
    """Return what is counted: offsets have no records behind them everywhere in systems with holes."""
    names = {split_stream_name(stream)[0] for stream in app.inputs}
    return "records" if all(systems[name].counts_unread for name in names) else "offsets"


def lost_counters(
    systems: Mapping[str, StreamSystem], lost: Mapping[SystemStreamPartition, OffsetRange | Range]
) -> Counters:
    """Return the counters of what retention took, by stream."""
    counters: Counters = {}
    for ssp, span in lost.items():
        of_stream = counters.setdefault(ssp.qualified_stream, {"lost_offsets": 0})
        of_stream["lost_offsets"] += systems[ssp.system].distance(ssp, span.start, span.end)
    return counters
