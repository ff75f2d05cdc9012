"""The effect of startpoints on a dataset's table, and a rewind in progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dagster_adjunct.assets.sources.entries import Ranges
from dagster_adjunct.assets.versions.manifest import Change, UnboundedManifest
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition


@dataclass(frozen=True, slots=True)
class ActiveRewind:
    """A rewind in progress. `ids` are those of its startpoints, by partition.

    `forced` leaves out late changes, or sends them to the dead letters, instead of raising
    DatasetError.
    """

    plan: RewindPlan
    ids: dict[str, str]
    reason: str
    forced: bool

    @property
    def ranges(self) -> Ranges:
        """The ranges to read again."""
        rewound = (partition for partition in self.plan.partitions if partition.again)
        return {partition.ssp: (partition.start, str(partition.taken)) for partition in rewound}

    @property
    def identity(self) -> tuple[object, ...]:
        """The values that distinguish this rewind from others: its startpoints and ranges."""
        return sorted(self.ids.items()), sorted(
            (str(ssp), span) for ssp, span in self.ranges.items()
        )

    def record_in_manifest(
        self, after: UnboundedManifest, system: StreamSystem
    ) -> UnboundedManifest:
        """Return the manifest `after` the changes, with what this rewind did.

        Its startpoints are applied. Partitions that skip changes continue at the startpoint. Where
        the rewind has read from before the bootstrap's start, that moves back.
        """
        bootstrap = after.bootstrap
        begins = dict(bootstrap.start)
        offsets = dict(after.offsets)
        for partition in self.plan.partitions:
            name = str(partition.ssp)
            if partition.skipped:
                offsets[name] = partition.start
            elif partition.again and system.compare(partition.start, begins[name]) < 0:
                begins[name] = partition.start
        return after.after(
            offsets=offsets,
            bootstrap=bootstrap.model_copy(update={"start": begins}),
            applied=after.with_applied(self.ids),
            change=Change(action="rewind", reason=self.reason),
        )


@dataclass(frozen=True, slots=True)
class PartitionRewind:
    """The effect of a startpoint in one partition. The startpoint stands for the offset `start`.

    `taken` is the next offset that the table would read without it, None without a table. `again`
    counts the offsets to apply again (in a rebuild, to read), `skipped` those that would never be
    read.
    """

    ssp: SystemStreamPartition
    startpoint: str
    taken: str | None
    start: str
    again: int = 0
    skipped: int = 0

    def summary(self) -> str:
        """Return the effect in one line."""
        if self.taken is None:
            progress = "there is no table yet"
        else:
            progress = f"read up to {self.taken}"
        if self.again:
            effect = f"{self.again:,} offsets again"
        elif self.skipped:
            effect = f"{self.skipped:,} offsets never"
        else:
            effect = "nothing to apply"
        return f"{self.ssp}: {self.startpoint}: starts at {self.start}, {progress}: {effect}"


@dataclass(frozen=True, slots=True)
class RewindPlan(Report):
    """The effect of startpoints on a dataset's table; the action "applied" says that all were
    applied before.

    `refusal` is the error with which a rewind would reject them, None if it would not. Late changes
    of a table that is ordered by a column are found only when they are read.
    """

    dataset: str
    action: Literal["rebuild", "rewind", "applied"]
    partitions: tuple[PartitionRewind, ...] = ()
    refusal: errors.DatasetError | None = None

    def summary(self) -> str:
        """Return the plan in a few lines, one a partition."""
        lines = [f"  {partition.summary()}" for partition in self.partitions]
        action: str = self.action
        if self.refusal:
            action = "refused"
            lines.append(f"  {self.refusal}")
        return "\n".join([f"dataset {self.dataset}: {action}", *lines])
