"""The stream in which the loads of dlt pipelines are recorded, with the state of the pipelines.

    prefix-_dlt_loads    a record for each load, appended once all of its tables are

A pipeline that starts on another machine takes the newest state and schema from here, so that its
incremental cursors go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dagster_adjunct.assets.exchange.dlt_target import LoadTarget
from dagster_adjunct.resources.errors import StreamNotFoundError
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake.manifest import CompactionPolicy
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import LAKE, OffsetRange, SystemStreamPartition

TABLE = "_dlt_loads"
_COLUMNS = Schema.of(
    load_id="string",
    pipeline="string",
    loaded_at="timestamp",
    tables="map<string,bigint>",
    schema_name="string",
    schema_version="bigint",
    schema_engine_version="bigint",
    schema_hash="string",
    schema="string",
    state_version="bigint",
    state_engine_version="bigint",
    state_hash="string",
    state_created_at="timestamp",
    state="string",
    pending="array<string>",
)
_PART = 500

Load = Mapping[str, Any]


class LoadLog:
    """The loads that were appended to the streams of a target."""

    def __init__(self, target: LoadTarget) -> None:
        self._streams = LakeStreams(target.lake)
        self._stream = target.stream(TABLE)

    def create(self) -> None:
        """Create the stream if it does not exist."""
        self._streams.create(
            self._stream, schema=_COLUMNS, partitions=1, compaction=CompactionPolicy()
        )

    def exists(self) -> bool:
        """Whether anything was ever loaded to these streams."""
        try:
            self._streams.info(self._stream)
        except StreamNotFoundError:
            return False
        return True

    def add(self, load: Load, producer: str, sequence: int) -> None:
        """Record a load, once. Its schema is only stored if it differs from the newest one."""
        if self._streams.appended(self._stream, producer, sequence) is not None:
            return
        newest = self.find(
            lambda each: each["schema_name"] == load["schema_name"] and each["schema"] is not None
        )
        if newest is not None and newest["schema_hash"] == load["schema_hash"]:
            load = {**load, "schema": None}
        self._streams.append(self._stream, [load], producer=producer, sequence=sequence)

    def find_state(self, pipeline: str) -> Load | None:
        """Return the newest load with a state of the pipeline that is not newer than the data.

        dlt writes the state of all sources of a run with the load of the first one; `pending` are
        the others, which have to be finished, too. A load that was begun earlier may be recorded
        later: its machine had stopped for a while, and another one went on.
        """
        finished: set[str] = set()
        newest = None
        for seen, load in enumerate(self._newest_first()):
            # Once there is one, only the last 500 loads are searched for one that was begun later.
            if newest is not None and seen >= _PART:
                break
            if load["pipeline"] != pipeline:
                continue
            is_complete = finished.issuperset(load["pending"] or ())
            is_newer = newest is None or load["loaded_at"] > newest["loaded_at"]
            if load["state"] is not None and is_complete and is_newer:
                newest = load
            finished.add(load["load_id"])
        return newest

    def find(self, is_wanted: Callable[[Load], bool]) -> Load | None:
        """Return the newest load that is wanted, None if there is none."""
        return next(filter(is_wanted, self._newest_first()), None)

    def _newest_first(self) -> Iterator[Load]:
        """Yield the recorded loads from the newest to the oldest, read in parts."""
        ssp = SystemStreamPartition(LAKE, self._stream, 0)
        view = self._streams.snapshot(self._stream)
        oldest = int(view.oldest([ssp])[ssp])
        end = int(view.upcoming([ssp])[ssp])
        while end > oldest:
            start = max(oldest, end - _PART)
            span = {ssp: OffsetRange(str(start), str(end))}
            part = view.read_arrow(span, columns=list(_COLUMNS.names))
            yield from reversed(part.to_pylist(maps_as_pydicts="strict"))
            end = start
