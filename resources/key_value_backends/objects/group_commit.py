"""Group commit: requests that arrive during a swap go into the next one together.

Each process does this for itself, and the swap of the pointer decides among processes. The requests of a group are
decided one after the other, as if each were a commit of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from dagster_adjunct.resources.errors import ObjectNotFoundError, TableUnavailableError
from dagster_adjunct.resources.key_value.segment import ABSENT, ANYTHING, ConditionsFailed, SegmentChange, threads
from dagster_adjunct.resources.key_value_backends.objects.pointer import (
    PointerSnapshot,
    Status,
    SwapBackoff,
    SwapResult,
    Write,
)
from dagster_adjunct.resources.key_value_backends.objects.segment_core import (
    SegmentCore,
    SegmentUpkeep,
    SegmentView,
    now_in_ms,
)


@dataclass(frozen=True, slots=True, eq=False)
class QueuedWrite:
    """A call of `apply`, with the future of its answer."""

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
    """The requests that a commit applies, those that an earlier commit has applied, and those whose conditions fail,
    with the versions found. `writes` has each key once, as the last applied request leaves it."""

    applied: tuple[QueuedWrite, ...]
    before: tuple[QueuedWrite, ...]
    refused: tuple[tuple[QueuedWrite, dict[int, bytes | None]], ...]
    writes: tuple[Write, ...]

    @property
    def needs_swap(self) -> bool:
        """Whether callers may only be answered after a swap. The rejection of a repeated request is final only once the
        pointer has changed, because its first attempt may still be in flight."""
        return bool(self.applied) or any(request.repeated for request, _ in self.refused)


def conditional_keys(requests: Sequence[QueuedWrite]) -> set[bytes]:
    """Return the keys whose versions decide."""
    return {change.key for request in requests for change in request.changes if change.expected is not ANYTHING}


def decide_commit(
    requests: Sequence[QueuedWrite], versions: Mapping[bytes, bytes | None], applied_before: Collection[bytes]
) -> CommitDecision:
    """Decide about each request, given the current versions (None: no such key).

    `applied_before` are the tokens of repeated requests that an earlier commit has applied.
    """
    applied, before, refused = [], [], []
    current = dict(versions)
    writes: dict[bytes, Write] = {}
    for request in requests:
        if request.token in applied_before:
            before.append(request)
            continue
        failing = {
            place: current.get(change.key)
            for place, change in enumerate(request.changes)
            if not _holds(change, current.get(change.key))
        }
        if failing:
            refused.append((request, failing))
            continue
        applied.append(request)
        for change in request.changes:
            if change.is_guard:
                continue
            writes[change.key] = Write(change.key, change.version, change.value)
            current[change.key] = None if change.value is None else change.version
    return CommitDecision(tuple(applied), tuple(before), tuple(refused), tuple(writes.values()))


def _holds(change: SegmentChange, version: bytes | None) -> bool:
    if change.expected is ANYTHING:
        return True
    return version is None if change.expected is ABSENT else version == change.expected


_GROUP_BYTES = 8 * 1024 * 1024
_GROUP_REQUESTS = 2000
_PATIENCE = 30.0  # seconds for which a group competes with other writers
_READS = 5


class GroupCommit:
    """Writes to a segment from this process, submitted by any thread."""

    def __init__(self, core: SegmentCore, upkeep: SegmentUpkeep) -> None:
        self._core, self._upkeep = core, upkeep
        self._waiting: list[QueuedWrite] = []
        self._running = False
        self._lock = threading.Lock()
        self._backoff = SwapBackoff()
        self._seen = (0, 0)  # number of our last commit, and the swaps of this process until then

    def submit(self, changes: Sequence[SegmentChange], token: bytes, repeated: bool) -> Future[None]:
        """Return the future of the outcome: None, or an error of `TableSegment.apply`."""
        request = QueuedWrite(changes, token, repeated)
        with self._lock:
            self._waiting.append(request)
            if not self._running:
                threads("key-values", 32).submit(self._run)
                self._running = True
        return request.answer

    def _run(self) -> None:
        while True:
            group = self._take([])
            if not group:
                with self._lock:
                    if not self._waiting:
                        self._running = False
                        return
                continue
            try:
                with self._core.translate_errors():
                    self._commit(group)
            except BaseException as error:  # noqa: BLE001 - callers wait for their answers
                for request in group:
                    if not request.answer.done():
                        request.answer.set_exception(error)

    def _take(self, group: list[QueuedWrite]) -> list[QueuedWrite]:
        """Return the waiting requests that join a group, as many as it may have."""
        size = sum(request.size for request in group)
        joining: list[QueuedWrite] = []
        with self._lock:
            while self._waiting and len(group) + len(joining) < _GROUP_REQUESTS:
                size += self._waiting[0].size
                if size > _GROUP_BYTES and (group or joining):
                    break
                request = self._waiting.pop(0)
                if request.answer.set_running_or_notify_cancel():
                    joining.append(request)
        return joining

    def _commit(self, group: list[QueuedWrite]) -> None:
        """Decide and swap until the requests of a group are answered; later ones join it meanwhile."""
        deadline = time.monotonic() + _PATIENCE
        snapshot = self._core.pointer.last if self._backoff.is_alone else None
        fresh = False
        reads = 0
        self._wait()
        while time.monotonic() < deadline:
            began = time.monotonic()
            joining = self._take(group)
            group += joining
            if snapshot is None:
                snapshot, fresh = self._core.pointer.read(), True
            elif joining:
                fresh = False
            try:
                decision = self._decide(snapshot, group)
            except ObjectNotFoundError as error:  # the run was merged away since
                reads, snapshot = reads + 1, None
                if reads == _READS:
                    raise self._core.missing_run_error(error) from error
                continue
            if not decision.needs_swap:
                if fresh:
                    _answer(decision)
                    return
                snapshot = None
                continue
            swapped = self._swap(snapshot, decision)
            if swapped.won:
                self._won(swapped, began)
                self._upkeep.after_commit(snapshot, swapped.snapshot)  # first, so that closing waits for it
                _answer(decision)
                return
            snapshot, fresh = swapped.snapshot, True
        problem = f"other writers of {self._core.pointer.key!r} were faster for {_PATIENCE:.0f} s."
        step = "Try again, with more partitions or fewer writers."
        raise TableUnavailableError(problem, step, table=str(self._core.table))

    def _decide(self, snapshot: PointerSnapshot, group: list[QueuedWrite]) -> CommitDecision:
        """Decide about the group. Requests that a sealed segment rejects are answered, and leave the group."""
        state = self._core.require_existing(snapshot)
        repeated = {request.token for request in group if request.repeated}
        before = self._core.find_applied(state, repeated) if repeated else set()
        if state.status is Status.SEALED:
            for request in group:
                if request.token not in before:
                    request.answer.set_exception(self._core.sealed_error())
            group[:] = [request for request in group if request.token in before]
        entries = SegmentView(state, self._core.objects).find(conditional_keys(group))
        return decide_commit(group, {key: entry and entry[0] for key, entry in entries.items()}, before)

    def _swap(self, snapshot: PointerSnapshot, decision: CommitDecision) -> SwapResult:
        tokens = [request.token for request in decision.applied]
        after = snapshot.state.with_commit(now_in_ms(), tokens, decision.writes)
        return self._core.pointer.swap(
            snapshot,
            self._upkeep.spill_log(after),
            is_in=lambda later: bool(tokens and self._core.find_applied(later, tokens[:1], after.number)),
            pause=self._lost,
        )

    def _won(self, swapped: SwapResult, began: float) -> None:
        seen, self._seen = self._seen, (swapped.snapshot.state.number, self._core.pointer.swaps)
        others = self._seen[0] - seen[0] - (self._seen[1] - seen[1]) if seen[0] else 0
        self._backoff.record_win(others, time.monotonic() - began)

    def _lost(self) -> None:
        self._backoff.record_loss()
        self._wait()

    def _wait(self) -> None:
        if seconds := self._backoff.next_pause():
            time.sleep(seconds)


def _answer(decision: CommitDecision) -> None:
    for request in (*decision.applied, *decision.before):
        request.answer.set_result(None)
    for request, failing in decision.refused:
        request.answer.set_exception(ConditionsFailed(failing))
