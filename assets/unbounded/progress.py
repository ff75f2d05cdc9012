"""Measures how far a table is behind its stream, in offsets, records and time, and how far its
bootstrap is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Literal

from dagster_adjunct.assets.sources.entries import offsets_by_partition, resolve_stream
from dagster_adjunct.assets.unbounded.commit import Advance
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.assets.versions.reports import Action, AdvanceReport
from dagster_adjunct.resources.errors import StaleDatasetError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.streams.system import (
    OffsetRange,
    StreamSystem,
    SystemStreamPartition,
)
from dagster_adjunct.resources.times import subtract_span


@dataclass(frozen=True, slots=True)
class BootstrapProgress:
    """How far a bootstrap is: `read` of its `total` offsets.

    `missing` counts the unread offsets of each partition that has any. `seconds` is how long the
    bootstrap took, or has taken so far; `why` is the reason for it.
    """

    state: Literal["running", "done"]
    read: int
    total: int
    missing: Mapping[SystemStreamPartition, int]
    seconds: float
    why: str

    @property
    def per_cent(self) -> int:
        """The share of the offsets that is read, in whole per cent, rounded down. A running
        bootstrap has at most 99, also if it has nothing to read.
        """
        if self.state == "done":
            return 100
        if self.total:
            return min(99, 100 * self.read // self.total)
        return 99

    def summary(self) -> str:
        """Return the progress in one line."""
        if self.state == "done":
            return f"done: {self.total:,} offsets in {self.seconds:.1f} s"
        unread = ", ".join(f"{count:,} of {ssp}" for ssp, count in list(self.missing.items())[:5])
        if len(self.missing) > 5:
            unread += f" and of {len(self.missing) - 5} more partitions"
        return f"{self.per_cent}% of {self.total:,} offsets; to read: {unread or 'nothing'}"

    def describe(self, took: float, read: int) -> str:
        """Return the progress, and unless `read` is 0 the estimated time left.

        `read` is the number of records that this run of the bootstrap has read, in `took` seconds.
        """
        detail = f"{self.per_cent}% ({self.read:,} of {self.total:,} offsets)"
        if not read:
            return detail
        left = took * (self.total - self.read) / read
        return f"{detail}, about {timedelta(seconds=round(left))} left"

    def to_json(self) -> dict[str, Any]:
        """Return the progress as JSON-able values."""
        return {
            "state": self.state,
            "per_cent": self.per_cent,
            "offsets": self.read,
            "of": self.total,
            "missing": {str(ssp): count for ssp, count in self.missing.items()},
            "seconds": round(self.seconds, 3),
            "why": self.why,
        }


def bootstrap_progress(
    systems: Mapping[str, StreamSystem], manifest: UnboundedManifest, now: datetime
) -> BootstrapProgress:
    """Return how far an unbounded dataset's last bootstrap is. Reads nothing: the manifest has
    its offsets.
    """
    bootstrap = manifest.bootstrap
    system = systems[split_stream_name(manifest.declaration.input)[0]]
    start = offsets_by_partition(bootstrap.start)
    target = offsets_by_partition(bootstrap.target)
    if bootstrap.state == "running":
        at = offsets_by_partition(manifest.offsets)
    else:
        at = target
    total = sum(system.distance(ssp, start[ssp], end) for ssp, end in target.items())
    missing = {ssp: system.distance(ssp, at[ssp], end) for ssp, end in target.items()}
    return BootstrapProgress(
        state=bootstrap.state,
        read=total - sum(missing.values()),
        total=total,
        missing={ssp: count for ssp, count in missing.items() if count},
        seconds=((bootstrap.finished_at or now) - bootstrap.started_at).total_seconds(),
        why=bootstrap.why,
    )


# Ages above this are found by timestamps of the stream, to within a tenth (`_STEP`). Below, they
# are not looked up: the time since the table was caught up, or this limit, is exact enough.
_MEASURED_FROM = timedelta(minutes=1)
_STEP = 1.1


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How far a table is behind one partition of its stream.

    `offset` is the next one to read and `end` that of the next record to come. `offsets` counts
    those in between, `records` the records that the stream still holds there (the offsets, where
    counting records means reading them), and `lost` the offsets that retention has deleted.
    `seconds` is at least the age of the oldest unread record, and exceeds it by at most a tenth or
    a minute; it never exceeds the time since the table was last caught up. It is 0 when nothing is
    unread, None if the table was never caught up.
    """

    offset: str
    end: str
    offsets: int
    records: int
    lost: int
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the lag as JSON-able values."""
        seconds = None
        if self.seconds is not None:
            seconds = round(self.seconds, 1)
        return {
            "offsets": self.offsets,
            "records": self.records,
            "lost": self.lost,
            "seconds": seconds,
        }


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A table's next offset in each partition of its stream, and the stream's oldest and next
    offsets.

    `confirmed_at` is when the table was last known to be caught up, None if never.
    """

    system: StreamSystem
    offsets: Mapping[SystemStreamPartition, str]
    oldest: Mapping[SystemStreamPartition, str]
    ends: Mapping[SystemStreamPartition, str]
    confirmed_at: datetime | None

    @classmethod
    def of(cls, systems: Mapping[str, StreamSystem], manifest: UnboundedManifest) -> StreamPosition:
        """Return the position of the served table; during a rebuild the new table is not served
        yet.

        Raises StreamNotFoundError for a stream that no longer exists.
        """
        followed = manifest.declaration.input
        what = f"dataset {manifest.name!r} follows {followed}"
        system, stream = resolve_stream(systems, followed, what, dataset=manifest.name)
        system = system.snapshot(stream)
        ssps = system.partitions(stream)
        oldest = system.oldest(ssps)
        if manifest.bootstrap.state == "running" and manifest.version is not None:
            known = offsets_by_partition(
                {ssp: end for ssp, (_, end) in manifest.version.offsets.items()}
            )
        else:
            known = offsets_by_partition(manifest.offsets)
        offsets = {ssp: known.get(ssp, oldest[ssp]) for ssp in ssps}  # a new partition is unread
        return cls(system, offsets, oldest, system.upcoming(ssps), manifest.confirmed_at)

    def lags(self, now: datetime) -> dict[SystemStreamPartition, PartitionLag]:
        """Return the lag of each partition; reads no records."""
        lags = {}
        for ssp, offset in self.offsets.items():
            oldest = self.oldest[ssp]
            end = self.ends[ssp]
            behind = self.system.distance(ssp, offset, end)
            lost = self.system.distance(ssp, offset, oldest)  # 0 if `oldest` is not after it
            records = max(behind - lost, 0)
            if records and self.system.capabilities.counts_unread:
                held = OffsetRange(oldest if lost else offset, end)
                records = self.system.records_between({ssp: held})
            seconds = self._seconds_behind(ssp, now) if behind else 0.0
            lags[ssp] = PartitionLag(offset, end, behind, records, min(lost, behind), seconds)
        return lags

    def stale_partitions(
        self, max_staleness: timedelta, now: datetime
    ) -> list[SystemStreamPartition]:
        """Return the partitions with unread records older than `max_staleness`."""
        limit = subtract_span(now, max_staleness)
        stale = []
        for ssp, offset in self.offsets.items():
            is_behind = self.system.compare(offset, self.ends[ssp]) < 0
            if is_behind and self._has_unread_before(ssp, limit):
                stale.append(ssp)
        return stale

    def raise_if_stale(
        self, dataset: str, max_staleness: timedelta, now: datetime, next_step: str = ""
    ) -> None:
        """Raise StaleDatasetError where the table lacks records older than `max_staleness`, saying
        how many.

        A table that only lacks younger records, or whose stream is idle, is fresh. `next_step` is
        that of the error; "" says to advance the table.
        """
        stale = self.stale_partitions(max_staleness, now)
        if not stale:
            return
        lags = self.lags(now)

        def lateness(ssp: SystemStreamPartition) -> tuple[float, int]:
            seconds = lags[ssp].seconds
            if seconds is None:
                seconds = float("inf")
            return seconds, lags[ssp].offsets

        ssp = max(stale, key=lateness)
        lag = lags[ssp]
        age = others = deleted = ""
        if lag.seconds is not None:
            age = f", the oldest about {timedelta(seconds=round(lag.seconds))} old"
        if len(stale) > 1:
            others = f" ({len(stale) - 1} more of its partitions are too old as well)"
        if lag.lost:
            deleted = f", of which retention has deleted {lag.lost:,}"
        problem = (
            f"dataset {dataset!r} is stale: {lag.offsets:,} offsets of {ssp} are not in"
            f" it{deleted}{age}, and at most {max_staleness} is allowed{others}."
        )
        advance = f"materialise its asset, or adjunct dataset advance {dataset} MODULE:APP"
        step = (
            next_step
            or f"Advance it ({advance}) and run this again, or raise the limit: max_staleness=…."
        )
        raise StaleDatasetError(problem, step, dataset=dataset)

    def _seconds_behind(self, ssp: SystemStreamPartition, now: datetime) -> float | None:
        """Return an upper bound of the age of a partition's unread records in seconds, found by
        bisection over timestamps; None if the table was never caught up.
        """
        if self.confirmed_at is None:
            return None
        # The age of the oldest unread record is between these two ages, which the loop narrows.
        oldest = max((now - self.confirmed_at).total_seconds(), 0.0)
        youngest = _MEASURED_FROM.total_seconds()
        if oldest <= youngest or not self._has_unread_before(ssp, now - _MEASURED_FROM):
            return min(oldest, youngest)
        while oldest / youngest > _STEP:
            middle = (oldest * youngest) ** 0.5
            if self._has_unread_before(ssp, now - timedelta(seconds=middle)):
                youngest = middle
            else:
                oldest = middle
        return oldest

    def _has_unread_before(self, ssp: SystemStreamPartition, moment: datetime) -> bool:
        """Whether the first unread record of a partition that is behind is older than `moment`."""
        first = self.system.offset_for_timestamp(ssp, int(moment.timestamp() * 1000))
        return self.system.compare(self.offsets[ssp], first) < 0


def build_report(advance: Advance, action: Action) -> AdvanceReport:
    """Return the report of an advance: its `action`, the served version and its lag."""
    manifest = advance.manifest
    version = manifest.version
    decision = advance.decision
    system = advance.source.system
    offsets = offsets_by_partition(manifest.offsets)
    lag = {
        str(ssp): system.distance(ssp, offset, advance.ends[ssp]) for ssp, offset in offsets.items()
    }
    notes = []
    if decision.action != "continue":
        notes.append(f"{decision.action}: {decision.reason}")
    unread = sum(lag.values())
    if action == "waiting" or (action == "up-to-date" and unread):
        notes.append(f"{unread:,} offsets wait for unfinished transactions")
    elif action == "up-to-date":
        notes.append("no changes since the last commit")
    notes += [f"warning: {warning}" for warning in advance.warnings]
    verdicts = tuple(finding.verdict for finding in advance.findings)
    report = AdvanceReport(
        dataset=manifest.name,
        kind=manifest.declaration.kind,
        action=action,
        version=manifest.served_id,
        sealed=tuple(dict.fromkeys(advance.sealed)),
        counters=advance.counters,
        offsets=manifest.offsets,
        lag=lag,
        decision=decision,
        seconds=advance.stages.seconds,
        schema=advance.source.schema,
        note="; ".join(notes),
        verdicts=verdicts,
        warnings=tuple(f"{each.name}: {each.message}" for each in verdicts if not each.passed),
    )
    if version is None:
        return report
    return replace(report, rows=version.rows, schema=version.columns)
