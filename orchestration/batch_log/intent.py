"""`Intent`, what a batch will read: written before it begins, so that a retry reads the same; and
values by stream partition, as documents store them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Annotated, TypeVar

from pydantic import Field as Default
from pydantic import PlainSerializer, PlainValidator

from dagster_adjunct.orchestration.operators.stream_facts import AS_OF, JoinVersions
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.streams.system import OffsetRange, SystemStreamPartition


def _parse_partition(stored: object) -> SystemStreamPartition:
    """Return a partition from its stored text; raises ValueError, as pydantic expects."""
    if isinstance(stored, SystemStreamPartition):
        return stored
    try:
        return SystemStreamPartition.parse(str(stored))
    except errors.InvalidNameError as error:
        raise ValueError(error.problem) from error


# A stream partition, stored as its text: "lake.flights.3".
Partition = Annotated[
    SystemStreamPartition, PlainValidator(_parse_partition), PlainSerializer(str, return_type=str)
]


Offsets = dict[SystemStreamPartition, str]
Ranges = dict[SystemStreamPartition, OffsetRange]
Epochs = dict[SystemStreamPartition, int]
T = TypeVar("T")


def of_stream(
    by_partition: Mapping[SystemStreamPartition, T], stream: str
) -> dict[SystemStreamPartition, T]:
    """Return the values of the partitions of one stream ("lake.flights")."""
    found = {}
    for ssp, value in by_partition.items():
        if ssp.qualified_stream == stream:
            found[ssp] = value
    return found


def without_stream(
    by_partition: Mapping[SystemStreamPartition, T], stream: str
) -> dict[SystemStreamPartition, T]:
    """Return the values of the partitions of all other streams."""
    others = {}
    for ssp, value in by_partition.items():
        if ssp.qualified_stream != stream:
            others[ssp] = value
    return others


Spans = tuple[tuple[int, int], ...]
"""Spans [from, to) of offsets of a partition, in order."""
MAX_SKIPPED = 100
"""How many spans of skipped offsets are kept of a partition, at most."""


def cut_out(spans: Iterable[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Return what is left of these spans [from, to) without the offsets [start, end), in order."""
    left = []
    for low, high in spans:
        before = min(high, start)
        after = max(low, end)
        if low < before:
            left.append((low, before))
        if after < high:
            left.append((after, high))
    return left


class HeldTime(StoredDocument):
    """The first record of a partition that waits: its offset in the stream of this identity, its
    event time by the expression `by`, and when it was written.

    Where records wait by event time, `newest` is the latest one of the records up to the offset
    `seen_to`; None where that is not known.
    """

    stream: str | None
    offset: int
    by: str
    time: datetime
    since: datetime
    newest: datetime | None = None
    seen_to: str | None = None


class PassedTime(StoredDocument):
    """The time up to which a dataset was complete for the records that an application has joined
    with it: its joins have passed it.

    `late` is how many changes with times before `until` had come by then after the dataset's
    watermark had passed `until`. `all_late` is how many had come after its watermark had passed
    their own times.
    """

    until: datetime
    late: int = 0
    all_late: int = 0


class WaitState(StoredDocument):
    """What an application has waited for: the times that its joins have `passed`, by dataset, and
    the records that the last batch, or run, found waiting at the checkpoint (`held`).
    """

    passed: dict[str, PassedTime] = Default(default_factory=dict)
    held: dict[Partition, HeldTime] = Default(default_factory=dict)


class ServedCommits(StoredDocument):
    """The commits of a dataset that a batch looks back to: the numbers of the first one, 0 for the
    beginning, and of the last one, and the versions that keep what they served.
    """

    first: int
    last: int
    versions: tuple[str, ...]


class ReadVersions(StoredDocument):
    """What a batch reads of a dataset: the `version` that is served, and those that are joined by
    time.

    `base` is the folder with the entries of a table before its deltas. From one version to another
    one with the same base, all changes in between are in deltas.
    """

    version: str | None
    over_time: tuple[str, ...] = ()
    base: str | None = None


class JoinedVersions(StoredDocument):
    """The dataset versions that a batch reads: its joins, and its inputs if they are changes of
    datasets.

    - `versions`: the version of each joined dataset; None if there is none to read.
    - `over_time`: all versions of each bounded dataset that is joined by time.
    - `served`: what is read of each dataset that is joined as it was known then.
    - `followed`: the versions between which the changes of a dataset are read.
    - `reading`: which versions the joins use; `JoinVersions` describes the choices.
    - `known`: by join, the watermark of the dataset that its records wait for; None if it has none.
    - `in_time`: the joins whose records have all waited until the watermark had passed their times.
    - `passed`: by dataset that records wait for, the time that joins have passed after this batch.
    - `late`: by dataset, how many changes came since the batch before, after the joins had passed
      their time.
    - `restated`: what is read of datasets whose later changes results follow.
    """

    versions: dict[str, str | None] = Default(default_factory=dict)
    over_time: dict[str, tuple[str, ...]] = Default(default_factory=dict)
    served: dict[str, ServedCommits] = Default(default_factory=dict)
    followed: dict[str, tuple[str, ...]] = Default(default_factory=dict)
    reading: JoinVersions = AS_OF
    known: dict[str, datetime | None] = Default(default_factory=dict)
    in_time: tuple[str, ...] = ()
    passed: dict[str, PassedTime] = Default(default_factory=dict)
    late: dict[str, int] = Default(default_factory=dict)
    restated: dict[str, ReadVersions] = Default(default_factory=dict)

    def list_all(self) -> dict[str, tuple[str, ...]]:
        """Return all versions that are read, by dataset; () for one without a version."""
        read: dict[str, dict[str, None]] = {}  # dictionaries, as sets that keep the order
        for name, version in self.versions.items():
            read[name] = {}
            if version is not None:
                read[name][version] = None
            read[name] |= dict.fromkeys(self.over_time.get(name, ()))
        for name, served in self.served.items():
            read.setdefault(name, {}).update(dict.fromkeys(served.versions))
        for name, followed in self.followed.items():
            read.setdefault(name, {}).update(dict.fromkeys(followed))
        return {name: tuple(versions) for name, versions in read.items()}


class Restating(StoredDocument):
    """What a batch restates: the results of records whose places are stored in the object `places`,
    because of the `changes` of datasets in these ranges.

    `keys` is how many keys have changed, `records` how many records have them.
    """

    places: str
    changes: dict[Partition, OffsetRange]
    keys: int
    records: int

    def describe(self) -> str:
        """Return what it does, as the end of a sentence."""
        return f"restates results: {self.keys:,} keys of {', '.join(sorted(self.datasets))} changed"

    @property
    def datasets(self) -> set[str]:
        """The datasets whose changes are followed."""
        return {ssp.stream for ssp in self.changes}


class LostRecords(StoredDocument):
    """What retention deleted before a batch had read it.

    `offsets` are those of inputs that declare on_lost. `cut` says whether the batch had begun, and
    has lost some of its records: outputs that were written before that keep all of them.
    """

    offsets: dict[Partition, OffsetRange] = Default(default_factory=dict)
    cut: bool = False


class LeftRecords(StoredDocument):
    """What a batch leaves for later ones.

    `waiting` are partitions with `idle_after` that have more records, so that they do not count as
    idle. `held` is the first record that waits for a dataset, of each partition that has one.
    """

    waiting: tuple[Partition, ...] = ()
    held: dict[Partition, HeldTime] = Default(default_factory=dict)


class Intent(StoredDocument):
    """What one batch is going to do, committed before it reads anything.

    - `ranges`: the offsets that it reads of each partition.
    - `joined`: the dataset versions that it reads.
    - `startpoints`: the ids of the startpoints that it applies.
    - `epochs`: the epoch of each partition's records; 0 for partitions that are not listed.
    - `lost`: what retention deleted before it was read.
    - `replays`: the ids of the replays that it reads. Such a batch reads nothing else and moves no
      checkpoint.
    - `restating`: what it restates, None for other batches. Such a batch reads only single records
      within its `ranges`, and moves positions in the changes of datasets instead of checkpoints.
    - `tasks`: how many tasks read each record of a broadcast input; None without broadcast inputs.
    - `left`: what it leaves for later batches.
    """

    batch: int
    run: str
    clock: datetime
    ranges: dict[Partition, OffsetRange]
    joined: JoinedVersions = JoinedVersions()
    startpoints: dict[Partition, str] = Default(default_factory=dict)
    epochs: dict[Partition, int] = Default(default_factory=dict)
    lost: LostRecords = LostRecords()
    replays: dict[Partition, str] = Default(default_factory=dict)
    restating: Restating | None = None
    tasks: int | None = None
    left: LeftRecords = LeftRecords()

    @property
    def versions(self) -> dict[str, str | None]:
        """The version that the batch reads of each dataset; None if there is none to read."""
        return self.joined.versions

    @property
    def reads_again(self) -> bool:
        """Whether it reads records again, next to the main input: it replays or restates them."""
        return bool(self.replays) or self.restating is not None

    @property
    def streams(self) -> set[str]:
        """The streams that the batch reads."""
        return {ssp.qualified_stream for ssp in self.ranges}

    def ranges_of(self, stream: str) -> Ranges:
        """Return the offsets that the batch reads of one stream."""
        return of_stream(self.ranges, stream)
