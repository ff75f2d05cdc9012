"""How far the bootstrap of a change stream's table has come, as its manifest tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from dagster_adjunct.assets.sources.opened_stream import by_partition
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class BootstrapProgress:
    """What a bootstrap has read of what it set out to read, in offsets of its stream.

    `missing` is how many it lacks by partition, of those that it lacks any. `seconds` are those it took, or takes
    until now. `why` is what asked for it.
    """

    state: Literal["running", "done"]
    read: int
    total: int
    missing: Mapping[SystemStreamPartition, int]
    seconds: float
    why: str

    @property
    def per_cent(self) -> int:
        """Whole per cent, rounded down: 100 says that the target is reached."""
        return 100 if self.state == "done" else min(99, 100 * self.read // self.total) if self.total else 99

    def summary(self) -> str:
        """Return how far it is, in one line."""
        if self.state == "done":
            return f"done: {self.total:,} offsets in {self.seconds:.1f} s"
        lacks = ", ".join(f"{count:,} of {ssp}" for ssp, count in list(self.missing.items())[:5])
        more = f" and of {len(self.missing) - 5} more partitions" if len(self.missing) > 5 else ""
        return f"{self.per_cent}% of {self.total:,} offsets; to read: {lacks or 'nothing'}{more}"

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
    """Return how far an unbounded dataset's last bootstrap is; looks at the manifest only."""
    bootstrap = manifest.bootstrap
    system = systems[split_stream_name(manifest.declaration.input)[0]]
    start, target = by_partition(bootstrap.start), by_partition(bootstrap.target)
    at = by_partition(manifest.offsets) if bootstrap.state == "running" else target
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


def time_left(system: StreamSystem, manifest: UnboundedManifest, took: float, read: int) -> str:
    """Return how far a bootstrap is after a commit, and how long it may last; that is unknown where `read` is 0.

    `read` is how many records were read in the `took` seconds since it began, or was taken up again.
    """
    bootstrap, offsets = manifest.bootstrap, by_partition(manifest.offsets)
    start, target = by_partition(bootstrap.start), by_partition(bootstrap.target)
    left = sum(system.distance(ssp, offset, target[ssp]) for ssp, offset in offsets.items())
    total = sum(system.distance(ssp, start[ssp], target[ssp]) for ssp in start)
    done = total - left
    per_cent = 100 if done >= total else 100 * done // total
    detail = f"{per_cent}% ({done:,} of {total:,} offsets)"
    return detail + f", about {timedelta(seconds=round(took * left / read))} left" if read else detail
