"""How far a change stream's table is behind its stream: in offsets, records and time (SAMZA-1278)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.sources.opened_stream import by_partition, system_given
from dagster_adjunct.resources.errors import StaleDatasetError
from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
from dagster_adjunct.resources.times import before

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

# Below this, the time since it was caught up says enough; above, the stream is asked, to within a tenth.
_EXACT_FROM = timedelta(minutes=1)
_STEP = 1.1


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """How much of one stream partition is not in the table.

    `offset` is the next one to read and `end` that of the next record to come. `offsets` counts those between them,
    `records` the records that the stream still holds there (the offsets, where counting them would be reading them),
    and `lost` the offsets that it does not hold any more. No unread record is older than `seconds`, which is right to
    within a tenth or a minute, and never more than the time since the table was last known to be caught up; 0 where
    nothing is unread, None while it has never been caught up.
    """

    offset: str
    end: str
    offsets: int
    records: int
    lost: int
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the lag as JSON-able values."""
        seconds = None if self.seconds is None else round(self.seconds, 1)
        return {"offsets": self.offsets, "records": self.records, "lost": self.lost, "seconds": seconds}


@dataclass(frozen=True, slots=True)
class PlaceInStream:
    """The next offset of what a table serves, in each partition of its stream as one look finds that.

    `confirmed_at` is when the table was last known to be caught up, None where that is not known.
    """

    system: StreamSystem
    offsets: Mapping[SystemStreamPartition, str]
    oldest: Mapping[SystemStreamPartition, str]
    ends: Mapping[SystemStreamPartition, str]
    confirmed_at: datetime | None

    @classmethod
    def of(cls, systems: Mapping[str, StreamSystem], manifest: UnboundedManifest) -> PlaceInStream:
        """Look at the stream. While a table is built anew, what is served is the one before it.

        Raises StreamNotFoundError for a stream that is not there any more.
        """
        followed = manifest.declaration.input
        what = f"dataset {manifest.name!r} follows {followed}"
        system, stream = system_given(systems, followed, what, dataset=manifest.name)
        system = system.snapshot(stream)
        ssps = system.partitions(stream)
        oldest = system.oldest(ssps)
        known = by_partition(manifest.offsets)
        if manifest.bootstrap.state == "running" and manifest.version is not None:
            known = by_partition({ssp: end for ssp, (_, end) in manifest.version.offsets.items()})
        offsets = {ssp: known.get(ssp, oldest[ssp]) for ssp in ssps}  # of a partition that is new nothing was read
        return cls(system, offsets, oldest, system.upcoming(ssps), manifest.confirmed_at)

    def lags(self, now: datetime) -> dict[SystemStreamPartition, PartitionLag]:
        """Return how far what is served is behind, by partition; reads no records."""
        return {ssp: self._lag(ssp, now) for ssp in self.offsets}

    def stale(self, max_staleness: timedelta, now: datetime) -> list[SystemStreamPartition]:
        """Return the partitions of which the table lacks something older than `max_staleness`."""
        limit = before(now, max_staleness)
        behind = [ssp for ssp, offset in self.offsets.items() if self.system.compare(offset, self.ends[ssp]) < 0]
        return [ssp for ssp in behind if self._unread_before(ssp, limit)]

    def _lag(self, ssp: SystemStreamPartition, now: datetime) -> PartitionLag:
        offset, oldest, end = self.offsets[ssp], self.oldest[ssp], self.ends[ssp]
        behind, lost = self.system.distance(ssp, offset, end), self.system.distance(ssp, offset, oldest)
        records = max(behind - lost, 0)
        if records and self.system.counts_unread:
            records = self.system.records_between({ssp: OffsetRange(oldest if lost else offset, end)})
        seconds = self._seconds_behind(ssp, now) if behind else 0.0
        return PartitionLag(offset, end, behind, records, min(lost, behind), seconds)

    def _seconds_behind(self, ssp: SystemStreamPartition, now: datetime) -> float | None:
        """Return an age that no unread record is above: found by halving, since only the inverse can be asked for."""
        if self.confirmed_at is None:
            return None
        oldest, youngest = max((now - self.confirmed_at).total_seconds(), 0.0), _EXACT_FROM.total_seconds()
        if oldest <= youngest or not self._unread_before(ssp, now - _EXACT_FROM):
            return min(oldest, youngest)
        while oldest / youngest > _STEP:
            middle = (oldest * youngest) ** 0.5
            if self._unread_before(ssp, now - timedelta(seconds=middle)):
                youngest = middle
            else:
                oldest = middle
        return oldest

    def _unread_before(self, ssp: SystemStreamPartition, moment: datetime) -> bool:
        """Whether the first unread record of a partition that is behind is older than `moment`."""
        first = self.system.offset_for_timestamp(ssp, int(moment.timestamp() * 1000))
        return self.system.compare(self.offsets[ssp], first) < 0


def check_fresh(
    systems: Mapping[str, StreamSystem],
    spec: AdjunctDataset,
    manifest: UnboundedManifest,
    max_staleness: timedelta,
    now: datetime,
) -> None:
    """Raise StaleDatasetError where the table lacks something older than `max_staleness`, naming what it lacks.

    A table that is behind by younger changes, or idle because its stream is, is fresh.
    """
    at = PlaceInStream.of(systems, manifest)
    stale = at.stale(max_staleness, now)
    if not stale:
        return
    lags = at.lags(now)
    ssp = max(stale, key=lambda ssp: (lags[ssp].seconds or float("inf"), lags[ssp].offsets))
    lag = lags[ssp]
    age = "" if lag.seconds is None else f", the oldest about {timedelta(seconds=round(lag.seconds))} old"
    others = f" ({len(stale) - 1} more of its partitions are too old as well)" if len(stale) > 1 else ""
    gone = f", of which the stream does not hold {lag.lost:,} any more" if lag.lost else ""
    raise StaleDatasetError(
        f"dataset {spec.name!r} is stale: {lag.offsets:,} offsets of {ssp} are not in it{gone}{age}, and at most "
        f"{max_staleness} is allowed{others}.",
        f"Advance it (materialise its asset, or adjunct dataset advance {spec.name} MODULE:APP) and run this again, or "
        "allow more: max_staleness=….",
        dataset=spec.name,
    )
