"""How far an application has come in the times of its records, for people: by input and by operator, and the size of
its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.orchestration.batchlog.stored_times import PartitionTimes, TimeState
from dagster_adjunct.orchestration.operators.spec.watermark_inputs import watermark_inputs
from dagster_adjunct.orchestration.step.progress.watermarks import event_times, is_idle, lowest_source

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.operators.event_times.event_time import EventTime
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class InputTimes:
    """How far one input has come: the watermark of the partition that holds it back, None where that had no record.

    `lag` is how far the watermark is behind the clock, `behind_newest` behind the newest time of any of its records.
    Partitions that are `idle` are not waited for; where all are, the newest watermark of any stands.
    """

    stream: str
    watermark: datetime | None
    newest: datetime | None
    lag: timedelta | None
    behind_newest: timedelta | None
    held_by: str | None
    idle: tuple[str, ...]
    max_lag: timedelta | None = None

    @property
    def exceeds(self) -> bool:
        """Whether the lag is larger than is declared; where a partition without records holds all back, it is."""
        if self.max_lag is None or self.newest is None:
            return False
        return self.lag is None or self.lag > self.max_lag

    def words(self) -> str:
        """Return it in one line."""
        held = "" if self.held_by is None else f", held back by {self.held_by}"
        if self.watermark is None:
            return f"{self.stream}: no watermark yet{held}"
        return f"{self.stream}: watermark {shown_time(self.watermark)}, {_rounded(self.lag)} behind the clock{held}"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values; spans in seconds."""
        values = {name: value for name, value in asdict(self).items() if name != "max_lag"}
        spans = {name: None if (span := values[name]) is None else span.total_seconds() for name in _SPANS}
        times = {name: None if (time := values[name]) is None else time.isoformat() for name in _TIMES}
        return {**values, **spans, **times, "idle": list(self.idle)}


_SPANS, _TIMES = ("lag", "behind_newest"), ("watermark", "newest")


def shown_time(moment: datetime | None) -> str:
    """Return a moment as tables show it."""
    return "-" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def input_times(app: Application, times: TimeState, clock: datetime) -> tuple[InputTimes, ...]:
    """Return how far each input that says when its records happened has come, by this clock."""
    return tuple(_of_input(name, declared, times, clock) for name, declared in event_times(app).items())


def waited_for(app: Application, times: TimeState, clock: datetime) -> dict[str, SystemStreamPartition | None]:
    """Return, by stateful operator, the source partition that holds its watermark back; None where all are idle."""
    lowest = {name: lowest_source(app, times, name, clock) for name in watermark_inputs(app.operators)}
    return {name: None if lowest_mark is None else lowest_mark.ssp for name, lowest_mark in lowest.items()}


@dataclass(frozen=True, slots=True)
class StateSize:
    """How much a table of state holds: rows and bytes in its files, expired ones that are not dropped yet included.

    `kept_for` is what it is kept for, in the words of the plan, with the bound that its operator declares.
    """

    rows: int
    bytes: int
    kept_for: str = ""


def state_sizes(lake: Lake, names: Iterable[str]) -> dict[str, StateSize]:
    """Return how much these datasets hold, of those that are tables of state."""
    sizes = {}
    for name in names:
        manifest = DatasetLog(lake, name).read()[1]
        if manifest is None or manifest.declaration.expires is None:
            continue
        stored = () if manifest.version is None else manifest.version.generations
        files = [file for generation in stored for file in generation.files]
        sizes[name] = StateSize(
            sum(file.rows for file in files), sum(file.size for file in files), manifest.declaration.kept_for
        )
    return sizes


def _of_input(name: str, declared: EventTime, times: TimeState, clock: datetime) -> InputTimes:
    stood = {
        ssp: partition_times
        for ssp, partition_times in sorted(times.partitions.items())
        if ssp.qualified_stream == name
    }
    idle = {ssp for ssp, partition_times in stood.items() if is_idle(declared, partition_times, clock)}
    marks = {ssp: partition_times.watermark for ssp, partition_times in stood.items() if ssp not in idle}
    held = min(marks, key=lambda ssp: (marks[ssp] is not None, marks[ssp] or clock, ssp), default=None)
    known = [partition_times.watermark for partition_times in stood.values() if partition_times.watermark is not None]
    watermark = marks[held] if held is not None else max(known, default=None)
    newest = _newest(stood)
    return InputTimes(
        stream=name,
        watermark=watermark,
        newest=newest,
        lag=None if watermark is None else clock - watermark,
        behind_newest=None if watermark is None or newest is None else newest - watermark,
        held_by=None if held is None else str(held),
        idle=tuple(str(ssp) for ssp in sorted(idle)),
        max_lag=declared.max_lag,
    )


def _newest(stood: Mapping[SystemStreamPartition, PartitionTimes]) -> datetime | None:
    return max(
        (partition_times.newest for partition_times in stood.values() if partition_times.newest is not None),
        default=None,
    )


def _rounded(span: timedelta | None) -> timedelta:
    return timedelta(0) if span is None else timedelta(seconds=round(span.total_seconds()))
