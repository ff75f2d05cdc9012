"""What one batch reads, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batchlog.stored_times import TimeState
from dagster_adjunct.orchestration.operators.spec.versions_met import AS_OF, VersionsMet
from dagster_adjunct.resources.streams.interface.source_ranges import SourceRange, Sources

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.reading.versions_over_time import VersionsOverTime
    from dagster_adjunct.assets.unbounded.transient_version import TransientVersion
    from dagster_adjunct.resources.streams.interface.stream_system import OffsetRange
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """What one batch reads: offsets [start, end) of each input partition, and one version of each dataset.

    A view is None for a dataset that holds nothing back and has no version yet: its joins find no match. `epochs` are
    those of the partitions' positions, without zeros; `consumed` are the offsets at which the main input goes on after
    the batch, None for one that replays. `identities` are those of the input streams that have one. `tasks` is how many
    read broadcast inputs; None: as many as the plan has. `few` records are for one task a stage; where datasets
    have few rows, too, Spark's plans are `interpreted`. `reading` says which versions the records meet. `over_time` are
    all versions that joins by time meet of bounded datasets. `states` are the tables of state as the batch is begun
    with them, by dataset. `clock` is when the batch was begun, `times` how far its inputs had come by then.
    Of a batch that is `cut` retention has taken records since it was begun: an output that has it keeps what it has.
    """

    batch: int
    ranges: Mapping[SystemStreamPartition, OffsetRange]
    views: Mapping[str, VersionReader | TransientVersion | None]
    epochs: Mapping[SystemStreamPartition, int] = field(default_factory=dict)
    consumed: Mapping[SystemStreamPartition, str] | None = None
    identities: Mapping[str, str] = field(default_factory=dict)
    tasks: int | None = None
    few: bool = False
    interpreted: bool = False
    over_time: Mapping[str, VersionsOverTime] = field(default_factory=dict)
    reading: VersionsMet = AS_OF
    states: Mapping[str, VersionReader | None] = field(default_factory=dict)
    clock: datetime = datetime(1970, 1, 1, tzinfo=UTC)
    times: TimeState = field(default_factory=TimeState)
    cut: bool = False

    def sources(self, application: str, stream: str) -> Sources | None:
        """Return what is read of a stream, as records say what they are made of; None where offsets are no numbers."""
        ranges = {ssp: span for ssp, span in self.ranges.items() if ssp.qualified_stream == stream}
        if not all(text.isdecimal() for span in ranges.values() for text in (span.start, span.end)):
            return None
        identity = self.identities.get(stream)
        return Sources(
            stream,
            f"{application}@{identity}" if identity else application,
            tuple(
                SourceRange(str(ssp), int(span.start), int(span.end), self.epochs.get(ssp, 0))
                for ssp, span in sorted(ranges.items())
            ),
        )
