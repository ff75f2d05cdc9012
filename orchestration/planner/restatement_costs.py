"""What a restatement costs at most: how many records, of which size, are searched for those of
changed keys, as the streams are now.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.co_partitioning import format_bytes
from dagster_adjunct.orchestration.planner.planned import PlannedRestatement, RestatedInput
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import (
    LAKE,
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.times import subtract_span


def with_costs(
    app: Application,
    restatements: tuple[PlannedRestatement, ...],
    systems: Mapping[str, StreamSystem],
) -> tuple[PlannedRestatement, ...]:
    """Return the restatements with what each reads at most, a line for each input.

    An input stream that can't be asked now has no line.
    """
    priced = []
    for restated in restatements:
        costs = tuple(_describe_inputs(app, restated, systems))
        priced.append(replace(restated, costs=costs))
    return tuple(priced)


def _describe_inputs(
    app: Application, restated: PlannedRestatement, systems: Mapping[str, StreamSystem]
) -> Iterator[str]:
    """Yield, for each input of a join that restates, what is searched and read again at most.
    Inputs whose stream system does not answer are left out.
    """
    match = app.operator(restated.join).spec.match
    assert match is not None, "it is a join"
    assert match.restate is not None, "it restates"
    lake = systems.get(LAKE)
    now = lake.lake.now() if isinstance(lake, LakeStreams) else datetime.now(UTC)
    since = int(subtract_span(now, match.restate.age).timestamp() * 1000)
    for restated_input in restated.inputs:
        system = systems[split_stream_name(restated_input.stream)[0]]
        try:
            searched = _describe_searched(system, restated_input, since)
        except AdjunctError:
            continue
        most = f"{match.restate.most_keys:,} keys, and {match.restate.most_records:,} records"
        yield f"{searched}; at most {most} of them are read again"


def _describe_searched(system: StreamSystem, restated_input: RestatedInput, since: int) -> str:
    """Return which records of an input are searched, and how. `since` is the time in milliseconds
    from which records are searched.
    """
    stream = split_stream_name(restated_input.stream)[1]
    ssps = system.partitions(stream)
    upcoming = system.upcoming(ssps)
    oldest = system.oldest(ssps)
    ranges: dict[SystemStreamPartition, OffsetRange] = {}
    records = 0
    for ssp in ssps:
        start = system.offset_for_timestamp(ssp, since)
        if system.compare(start, oldest[ssp]) < 0:
            start = oldest[ssp]
        if system.compare(start, upcoming[ssp]) < 0:
            ranges[ssp] = OffsetRange(start, upcoming[ssp])
            records += system.distance(ssp, start, upcoming[ssp])
    size = system.measure(ranges) if ranges else None
    stored = ""
    if size is not None:
        stored = f" in {size.files:,} files of {format_bytes(size.bytes)}"
    how = f"reads {', '.join(restated_input.keys)} of each"
    if restated_input.indexed:
        how = "looks them up in an index, or without one yet " + how
    return f"searches {records:,} records of {restated_input.stream}{stored}: {how}"
