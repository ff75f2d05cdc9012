"""Which of the requests that wait are applied, in the order in which they came. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dagster_adjunct.resources.key_value.table_segment import ABSENT, ANYTHING, SegmentChange
from dagster_adjunct.resources.key_value_backends.object_runs.segment_pointer import Write


@dataclass(frozen=True, slots=True, eq=False)
class QueuedWrite:
    """A call of `apply`, and where its answer goes."""

    changes: Sequence[SegmentChange]
    token: bytes
    repeated: bool
    answer: Future[None] = field(default_factory=Future)

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        return sum(len(change.key) + len(change.value or b"") for change in self.changes)


@dataclass(frozen=True, slots=True)
class CommitDecision:
    """What a commit does: the requests that it applies, those applied by an earlier commit, and those whose conditions
    fail, with the versions found. `writes` has each key once, as the last of the applied requests leaves it."""

    applied: tuple[QueuedWrite, ...]
    before: tuple[QueuedWrite, ...]
    refused: tuple[tuple[QueuedWrite, dict[int, bytes | None]], ...]
    writes: tuple[Write, ...]

    @property
    def needs_swap(self) -> bool:
        """Whether it may be told only after a swap. A repeated request is refused for good only when the pointer is not
        the one any more that its first attempt, which may still be on its way, would swap."""
        return bool(self.applied) or any(request.repeated for request, _ in self.refused)


def conditional_keys(requests: Sequence[QueuedWrite]) -> set[bytes]:
    """Return the keys whose versions must be known to decide."""
    return {change.key for request in requests for change in request.changes if change.expected is not ANYTHING}


def decide(
    requests: Sequence[QueuedWrite], versions: Mapping[bytes, bytes | None], applied_before: Collection[bytes]
) -> CommitDecision:
    """Return what becomes of each request, upon the versions that stand (None: no such key).

    `applied_before` are tokens, among those of repeated requests, that an earlier commit holds.
    """
    applied, before, refused = [], [], []
    standing = dict(versions)
    writes: dict[bytes, Write] = {}
    for request in requests:
        if request.token in applied_before:
            before.append(request)
            continue
        failing = {
            place: standing.get(change.key)
            for place, change in enumerate(request.changes)
            if not _holds(change, standing.get(change.key))
        }
        if failing:
            refused.append((request, failing))
            continue
        applied.append(request)
        for change in request.changes:
            if change.is_guard:
                continue
            writes[change.key] = Write(change.key, change.version, change.value)
            standing[change.key] = None if change.value is None else change.version
    return CommitDecision(tuple(applied), tuple(before), tuple(refused), tuple(writes.values()))


def _holds(change: SegmentChange, version: bytes | None) -> bool:
    if change.expected is ANYTHING:
        return True
    return version is None if change.expected is ABSENT else version == change.expected
