"""What an application's batch log holds of startpoints: resolved ones, applied ones, and replays under way.

    request -> fanned out -> resolved (its offset stored, nothing read yet) -> applied (by a commit of offsets)
                                     `-> with an end: a replay, a cursor beside the main position

Each applied startpoint, and each replay, opens a new epoch of its partition, which the records that it leads to carry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated

from pydantic import Field as Default
from pydantic import PlainSerializer, PlainValidator

from dagster_adjunct.orchestration.operators.spec.versions_met import VersionsMet
from dagster_adjunct.resources.errors import InvalidNameError
from dagster_adjunct.resources.stored_documents import StoredDocument
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

# Requests expire, so one is written again soon or in vain: few others can have come between.
_REMEMBERED = 20


def _partition(stored: object) -> SystemStreamPartition:
    if isinstance(stored, SystemStreamPartition):
        return stored
    try:
        return SystemStreamPartition.parse(str(stored))
    except InvalidNameError as error:
        raise ValueError(error.problem) from error


# A stream partition, stored as its text: "lake.flights.3".
Partition = Annotated[SystemStreamPartition, PlainValidator(_partition), PlainSerializer(str, return_type=str)]


class ResolvedStartpoint(StoredDocument):
    """A startpoint, and the `offset` at which it starts, stored before anything is read from there.

    `id` is that of its request, `stream` is the identity of the stream, `position` says what was asked for, as in
    "timestamp 2026-01-02T00:00:00+00:00".
    """

    id: str
    ssp: Partition
    stream: str | None
    position: str
    offset: str
    by: str
    reason: str
    resolved_at: datetime


class AppliedStartpoint(StoredDocument):
    """The newest startpoint that a commit of offsets applied to a partition, and the epoch that it opened.

    `batch` is the first batch that started there; None where there was nothing to read yet.
    """

    id: str
    position: str
    offset: str
    epoch: int
    by: str
    reason: str
    batch: int | None
    applied_at: datetime

    def words(self, ssp: SystemStreamPartition) -> str:
        """Return what was applied to this partition, as words that a verb may follow."""
        return f"{ssp}: startpoint {self.position} ({self.by}: {self.reason}), epoch {self.epoch},"


class Replay(StoredDocument):
    """A bounded replay of one partition: reads [`start`, `until`) again and has come to `next`.

    `versions` says which versions its records meet; with "recorded" they are in the plan of the id `recorded`.
    """

    id: str
    ssp: Partition
    stream: str | None
    epoch: int
    position: str
    start: str
    next: str
    until: str
    by: str
    reason: str
    began_at: datetime
    versions: VersionsMet
    recorded: str | None = None

    def words(self) -> str:
        """Return which replay it is, as words that a verb may follow."""
        return f"{self.ssp}: replay from {self.position} ({self.by}: {self.reason}), epoch {self.epoch},"


def replay_id(ssp: SystemStreamPartition, startpoint_id: str) -> str:
    """Return the id of the replay that a bounded request begins: one request may be for several partitions."""
    return f"{startpoint_id}@{ssp}"


class OffsetState(StoredDocument):
    """What is known of an application's positions besides its checkpoint; all by partition.

    `streams` holds the identity of each input stream that the checkpoint is of. `epochs` are those of the main
    position and `opened` the highest ones that were ever opened, both without zeros. `replays` are by their ids, and
    `begun` names those that may still be fanned out. `taken` holds the ids
    of the requests that were applied, or whose replay was begun, last: one that is written again is not applied again.
    """

    streams: dict[str, str] = Default(default_factory=dict)
    resolved: dict[Partition, ResolvedStartpoint] = Default(default_factory=dict)
    applied: dict[Partition, AppliedStartpoint] = Default(default_factory=dict)
    epochs: dict[Partition, int] = Default(default_factory=dict)
    opened: dict[Partition, int] = Default(default_factory=dict)
    replays: dict[str, Replay] = Default(default_factory=dict)
    begun: frozenset[str] = frozenset()
    taken: dict[Partition, tuple[str, ...]] = Default(default_factory=dict)

    def has_taken(self, ssp: SystemStreamPartition, startpoint_id: str) -> bool:
        """Whether a commit has applied this startpoint of a partition, or has begun its replay."""
        applied = self.applied.get(ssp)
        known = applied is not None and applied.id == startpoint_id
        return known or replay_id(ssp, startpoint_id) in self.begun or startpoint_id in self.taken.get(ssp, ())

    def next_epoch(self, ssp: SystemStreamPartition) -> int:
        """Return the epoch that the next startpoint of this partition opens."""
        return self.opened.get(ssp, 0) + 1

    def with_applied(
        self, startpoints: Mapping[SystemStreamPartition, str], batch: int | None, at: datetime
    ) -> OffsetState:
        """Return the state after a commit of offsets that applied these startpoints (id by partition)."""
        applied, epochs, opened = dict(self.applied), dict(self.epochs), dict(self.opened)
        resolved, taken = dict(self.resolved), dict[SystemStreamPartition, str]()
        for ssp, startpoint_id in startpoints.items():
            start = resolved.get(ssp)
            if start is None or start.id != startpoint_id:
                continue
            del resolved[ssp]
            taken[ssp] = start.id
            epochs[ssp] = opened[ssp] = self.next_epoch(ssp)
            applied[ssp] = AppliedStartpoint(
                id=start.id,
                position=start.position,
                offset=start.offset,
                epoch=epochs[ssp],
                by=start.by,
                reason=start.reason,
                batch=batch,
                applied_at=at,
            )
        update = {"resolved": resolved, "applied": applied, "epochs": epochs, "opened": opened}
        return self.model_copy(update={**update, "taken": self._remembering(taken)})

    def with_replays(self, replays: Sequence[Replay]) -> OffsetState:
        """Return the state with more replays, whose epochs are opened; those without offsets have ended already."""
        going = {replay.id: replay for replay in replays if replay.start != replay.until}
        return self.model_copy(
            update={
                "replays": {**self.replays, **going},
                "opened": {**self.opened, **{replay.ssp: replay.epoch for replay in going.values()}},
                "begun": self.begun | {replay.id for replay in replays},
                "taken": self._remembering(
                    {replay.ssp: replay.id.removesuffix(f"@{replay.ssp}") for replay in replays}
                ),
            }
        )

    def with_given_up(
        self, epochs: Mapping[SystemStreamPartition, int], replays: Mapping[SystemStreamPartition, str]
    ) -> OffsetState:
        """Return the state after a batch of these epochs was given up: what it read is read again in higher ones.

        Outputs may have taken it in, so that its results have to be told from those that come again. `replays` are the
        ids of those that it read, by partition.
        """
        now, opened, going = dict(self.epochs), dict(self.opened), dict(self.replays)
        for ssp, epoch in epochs.items():
            opened[ssp] = max(self.opened.get(ssp, 0), epoch)
            if ssp in self.resolved and ssp not in replays:
                continue  # the startpoint that it would have applied opens the next one
            opened[ssp] += 1
            if ssp not in replays:
                now[ssp] = opened[ssp]
            elif replays[ssp] in going:
                going[replays[ssp]] = going[replays[ssp]].model_copy(update={"epoch": opened[ssp]})
        return self.model_copy(update={"epochs": now, "opened": opened, "replays": going})

    def _remembering(self, ids: Mapping[SystemStreamPartition, str]) -> dict[SystemStreamPartition, tuple[str, ...]]:
        return {**self.taken, **{ssp: (*self.taken.get(ssp, ()), newest)[-_REMEMBERED:] for ssp, newest in ids.items()}}

    def with_replayed(self, ends: Mapping[str, str]) -> OffsetState:
        """Return the state after a batch that brought these replays (by id) to these offsets; ended ones are gone."""
        replays = dict(self.replays)
        for replay_id, end in ends.items():
            replay = replays.pop(replay_id, None)
            if replay is not None and end != replay.until:
                replays[replay_id] = replay.model_copy(update={"next": end})
        return self.model_copy(update={"replays": replays})
