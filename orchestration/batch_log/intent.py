"""`Intent`, what a batch will read: written before it begins, so that a retry reads the same."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field as Default

from dagster_adjunct.orchestration.batch_log.partition_values import Partition, Ranges, of_stream
from dagster_adjunct.orchestration.operators.stream_facts import AS_OF, JoinVersions
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.streams.system import OffsetRange


class JoinedVersions(StoredDocument):
    """The dataset versions that the joins of a batch read.

    - `versions`: the version of each dataset; None if there is none to read.
    - `over_time`: all versions of each bounded dataset that is joined by time.
    - `reading`: which versions the joins use; `JoinVersions` describes the choices.
    """

    versions: dict[str, str | None] = Default(default_factory=dict)
    over_time: dict[str, tuple[str, ...]] = Default(default_factory=dict)
    reading: JoinVersions = AS_OF

    def list_all(self) -> dict[str, tuple[str, ...]]:
        """Return all versions that are read, by dataset; () for one without a version."""
        read: dict[str, tuple[str, ...]] = {}
        for name, version in self.versions.items():
            known = () if version is None else (version,)
            read[name] = tuple(dict.fromkeys((*known, *self.over_time.get(name, ()))))
        return read


class Intent(StoredDocument):
    """What one batch is going to do, committed before it reads anything.

    - `ranges`: the offsets that it reads of each partition.
    - `joined`: the dataset versions that it reads.
    - `startpoints`: the ids of the startpoints that it applies.
    - `epochs`: the epoch of each partition's records; 0 for partitions that are not listed.
    - `lost`: offsets that retention deleted before they were read, of inputs that declare on_lost.
    - `replays`: the ids of the replays that it reads. Such a batch reads nothing else and moves no
      checkpoint.
    - `tasks`: how many tasks read each record of a broadcast input; None without broadcast inputs.
    - `waiting`: partitions with `idle_after` that have records for a later batch, so they do not
      count as idle.
    - `cut`: whether retention deleted some of its records before it finished. Outputs that were
      written before that keep all of its records.
    """

    batch: int
    run: str
    clock: datetime
    ranges: dict[Partition, OffsetRange]
    joined: JoinedVersions = JoinedVersions()
    startpoints: dict[Partition, str] = Default(default_factory=dict)
    epochs: dict[Partition, int] = Default(default_factory=dict)
    lost: dict[Partition, OffsetRange] = Default(default_factory=dict)
    replays: dict[Partition, str] = Default(default_factory=dict)
    tasks: int | None = None
    waiting: tuple[Partition, ...] = ()
    cut: bool = False

    @property
    def versions(self) -> dict[str, str | None]:
        """The version that the batch reads of each dataset; None if there is none to read."""
        return self.joined.versions

    @property
    def streams(self) -> set[str]:
        """The streams that the batch reads."""
        return {ssp.qualified_stream for ssp in self.ranges}

    def ranges_of(self, stream: str) -> Ranges:
        """Return the offsets that the batch reads of one stream."""
        return of_stream(self.ranges, stream)
