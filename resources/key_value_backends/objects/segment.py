"""`ObjectSegments`: key-value tables in a lake's store, S3 or a folder, without a server.

    key-values/{incarnation}/{partition}/CURRENT     the pointer: state, recent changes, runs
    key-values/{incarnation}/{partition}/runs/{id}   sorted, immutable entries

A write is one swap of the pointer, which many requests share.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from pydantic import NonNegativeInt

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.key_value import segment
from dagster_adjunct.resources.key_value.segment import (
    ConditionsFailed,
    Failing,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    SegmentLimits,
    StoredEntry,
    StoredPage,
    TableId,
    TableSegment,
)
from dagster_adjunct.resources.key_value_backends.objects.pointer import (
    Levels,
    PointerObject,
    SegmentState,
    Status,
    SwapBackoff,
    Swapped,
)
from dagster_adjunct.resources.key_value_backends.objects.runs import (
    BlockCache,
    RunObjects,
    Versioned,
)
from dagster_adjunct.resources.key_value_backends.objects.segment_view import (
    SegmentCore,
    SegmentUpkeep,
    SegmentView,
    now_in_ms,
)
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.objects.lake import (
    Lake,
    LakeSettings,
    describe_store,
    lake_in,
    open_store,
)
from dagster_adjunct.resources.objects.store import S3Options
from dagster_adjunct.resources.validation import validated

_THREADS = partial(segment.threads, "key-values", 32)


# Group commit: requests that arrive during a swap go into the next one together.
#
# Each process does this for itself, and the swap of the pointer decides among processes. The
# requests of a group are decided one after the other, as if each were a commit of its own.


@dataclass(frozen=True, slots=True, eq=False)
class QueuedWrite:
    """A call of `apply` that waits for a commit; `answer` is the future of its result."""

    changes: Sequence[SegmentChange]
    token: bytes
    repeated: bool
    answer: Future[None] = field(default_factory=Future)

    @property
    def size(self) -> int:
        """Bytes of keys and values."""
        return sum(len(change.key) + len(change.value or b"") for change in self.changes)

    @property
    def conditional_keys(self) -> set[bytes]:
        """The keys with conditions."""
        return {change.key for change in self.changes if change.expected is not segment.ANYTHING}


class RefusedWrite(NamedTuple):
    """A request whose conditions fail, with the versions found."""

    request: QueuedWrite
    failing: Failing


@dataclass(frozen=True, slots=True)
class CommitDecision:
    """What a commit does with the requests of a group.

    They are `applied` by it, were applied by a commit `before` it, or are `refused` because their
    conditions fail. `writes` has each key once, as the last of the applied requests leaves it.
    """

    applied: list[QueuedWrite] = field(default_factory=list)
    before: list[QueuedWrite] = field(default_factory=list)
    refused: list[RefusedWrite] = field(default_factory=list)
    writes: dict[bytes, Versioned] = field(default_factory=dict)

    @property
    def needs_swap(self) -> bool:
        """Whether the pointer has to be swapped before callers are answered.

        That is so even to reject a repeated request: until the pointer changes, its first attempt
        may still arrive and succeed.
        """
        return bool(self.applied) or any(refused.request.repeated for refused in self.refused)


def decide_commit(
    requests: Sequence[QueuedWrite],
    versions: Mapping[bytes, bytes | None],
    applied_before: Collection[bytes],
) -> CommitDecision:
    """Decide about the requests, in their order; `versions` has the current version of each key
    (None: no such key).

    `applied_before` are the tokens of repeated requests that an earlier commit has applied.
    """
    decision = CommitDecision()
    current = dict(versions)
    for request in requests:
        if request.token in applied_before:
            decision.before.append(request)
            continue
        if failing := segment.failed_conditions(request.changes, current):
            decision.refused.append(RefusedWrite(request, failing))
            continue
        decision.applied.append(request)
        for change in request.changes:
            if not change.is_guard:
                decision.writes[change.key] = change.version, change.value
                current[change.key] = None if change.value is None else change.version
    return decision


# the most that a group commits at once, unless a single request is larger
_GROUP_BYTES = 8 * 1024 * 1024
_GROUP_REQUESTS = 2000
_PATIENCE = 30.0  # seconds for which a group competes with other writers
_READS = 5  # of the pointer, while a run that it names is missing


class _SeenSwaps(NamedTuple):
    """The number of our last commit (0: none), and how many swaps this process had made by then."""

    number: int
    by_us: int


class GroupCommit:
    """Commits the writes to a segment that threads of this process submit."""

    def __init__(self, core: SegmentCore) -> None:
        self.core = core
        self.upkeep = SegmentUpkeep(core)
        self._waiting: list[QueuedWrite] = []
        self._running = False
        self._lock = threading.Lock()
        self._backoff = SwapBackoff()
        self._seen = _SeenSwaps(0, 0)

    def submit(
        self, changes: Sequence[SegmentChange], token: bytes, repeated: bool
    ) -> Future[None]:
        """Queue the write of `TableSegment.apply`; return a future, which becomes None or an error
        of that method.
        """
        request = QueuedWrite(changes, token, repeated)
        with self._lock:
            self._waiting.append(request)
            if not self._running:
                _THREADS().submit(self._run)
                self._running = True
        return request.answer

    def _run(self) -> None:
        """Commit groups of waiting requests until there are none; runs in a thread."""
        while True:
            group = self._take([])
            if not group:
                with self._lock:
                    if not self._waiting:
                        self._running = False
                        return
                continue
            try:
                with self.core.translate_errors():
                    self._commit(group)
            except BaseException as error:  # noqa: BLE001 - callers wait for their answers
                for request in group:
                    if not request.answer.done():
                        request.answer.set_exception(error)

    def _take(self, group: list[QueuedWrite]) -> list[QueuedWrite]:
        """Return waiting requests to add to a group, as many as its limits allow."""
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
        """Decide about a group of requests and swap, until all are answered; requests that arrive
        meanwhile join it. Raises TableUnavailableError if other writers are faster for _PATIENCE
        seconds.
        """
        deadline = time.monotonic() + _PATIENCE
        state = None
        if self._backoff.is_alone:  # then the last known state is probably the current one
            state = self.core.pointer.last
        fresh = False  # whether `state` was read after the last request had joined
        reads = 0  # in vain, because a run was missing
        self._wait()
        while time.monotonic() < deadline:
            began = time.monotonic()
            joining = self._take(group)
            group += joining
            if state is None:
                state = self.core.pointer.read()
                fresh = True
            elif joining:
                fresh = False
            try:
                decision = self._decide(state, group)
            except errors.ObjectNotFoundError as error:
                # The run has been merged and deleted meanwhile.
                reads += 1
                self._check_reads(reads, error)
                state = None
                continue
            if not decision.needs_swap:
                if fresh:
                    _answer(decision)
                    return
                state = None  # an answer without a swap needs the current state
                continue
            swapped = self._swap(state, decision)
            if swapped.is_done:
                self._record_win(swapped.state, began)
                # Before the answer, so that a caller who then closes waits for it.
                self.upkeep.after_commit(state, swapped.state)
                _answer(decision)
                return
            state = swapped.state
            fresh = True
        problem = f"other writers of {self.core.pointer.key!r} were faster for {_PATIENCE:.0f} s."
        step = "Try again, with more partitions or fewer writers."
        raise errors.TableUnavailableError(problem, step, table=str(self.core.table))

    def _decide(self, state: SegmentState, group: list[QueuedWrite]) -> CommitDecision:
        """Return the decision about a group.

        If the segment is sealed, answer all requests that were not applied before, and remove them
        from the group. Raises KeyValueTableNotFoundError if the segment is deleted.
        """
        self.core.require_existing(state)
        repeated = {request.token for request in group if request.repeated}
        before = self.core.find_applied(state, repeated) if repeated else set()
        if state.status is Status.SEALED:
            self._refuse_sealed(group, before)
        conditional = {key for request in group for key in request.conditional_keys}
        versions: dict[bytes, bytes | None] = dict.fromkeys(conditional)
        for key, entry in SegmentView(state, self.core.objects).find(conditional).items():
            if entry is not None:
                versions[key], _ = entry
        return decide_commit(group, versions, before)

    def _check_reads(self, reads: int, error: errors.ObjectNotFoundError) -> None:
        """Raise the error of a missing run if it was missing after each of so many reads."""
        if reads == _READS:
            raise self.core.missing_run_error(error) from error

    def _refuse_sealed(self, group: list[QueuedWrite], before: Collection[bytes]) -> None:
        """Refuse the requests of a group that were not applied before, as the table is sealed."""
        label = f"key-value table {self.core.table}"
        for request in group:
            if request.token not in before:
                request.answer.set_exception(segment.sealed_table_error(self.core.table, label))
        group[:] = [request for request in group if request.token in before]

    def _swap(self, state: SegmentState, decision: CommitDecision) -> Swapped:
        """Swap in the state that a decision leads to."""
        tokens = [request.token for request in decision.applied]
        after = state.with_commit(now_in_ms(), tokens, decision.writes)
        spilled = self.upkeep.spill_log(after)

        def is_in(later: SegmentState) -> bool:
            """Whether a state has the commit: all tokens of a commit come into it at once."""
            return bool(tokens and self.core.find_applied(later, tokens[:1], after.number))

        swapped = self.core.pointer.swap(state, spilled, is_in=is_in, pause=self._record_loss)
        if swapped.state.status is Status.DELETED:
            # Delete our new run here: after a deletion nobody lists the runs again.
            for run in set(spilled.levels.runs) - set(state.levels.runs):
                self.core.pointer.store.delete(self.core.objects.key(run.id))
        return swapped

    def _record_win(self, state: SegmentState, began: float) -> None:
        """Tell the back-off of a swap of ours, whose try began at `began`, and how many swaps of
        others came before it.
        """
        before = self._seen
        now = self._seen = _SeenSwaps(state.number, self.core.pointer.swaps)
        by_others = 0
        if before.number:
            by_others = now.number - before.number - (now.by_us - before.by_us)
        self._backoff.record_win(by_others, time.monotonic() - began)

    def _record_loss(self) -> None:
        """Tell the back-off that somebody else was first, and wait."""
        self._backoff.record_loss()
        self._wait()

    def _wait(self) -> None:
        """Wait as long as the back-off says."""
        if seconds := self._backoff.next_pause():
            time.sleep(seconds)


def _answer(decision: CommitDecision) -> None:
    """Answer the requests of a group as decided."""
    for request in (*decision.applied, *decision.before):
        request.answer.set_result(None)
    for request, failing in decision.refused:
        request.answer.set_exception(ConditionsFailed(failing))


class ObjectSegment:
    """A `TableSegment` in objects. Each process makes its own `GroupCommit` on first use."""

    def __init__(self, make_core: Callable[[], SegmentCore]) -> None:
        self._make_core = make_core
        self._made: dict[int, GroupCommit] = {}  # by process

    async def apply(
        self, changes: Sequence[SegmentChange], token: bytes, *, repeated: bool = False
    ) -> None:
        await segment.result_of(self._commits().submit(changes, token, repeated))

    async def get(self, keys: Sequence[bytes], *, values: bool = True) -> list[StoredEntry | None]:
        core = self._commits().core
        if keys:
            return await segment.in_thread(_THREADS, lambda: core.get(keys, values=values))
        return []

    async def page(self, within: KeyRange, limit: int, *, values: bool) -> StoredPage:
        core = self._commits().core
        return await segment.in_thread(_THREADS, lambda: core.page(within, limit, values=values))

    async def close(self) -> None:
        """Wait for the upkeep that writes of this process have started. Event loops have nothing
        to release.
        """
        made = self._made.get(os.getpid())
        if made is not None:
            await segment.in_thread(_THREADS, made.upkeep.finish)

    def _commits(self) -> GroupCommit:
        """Return what commits this process's writes; a forked process makes its own."""
        process = os.getpid()
        made = self._made.get(process)
        if made is None:
            # Two threads that make one at once both use the first. There is no lock, which might be
            # held during a fork.
            made = self._made.setdefault(process, GroupCommit(self._make_core()))
        return made


_MEGABYTE = 1024 * 1024
_AT_ONCE = 16  # segments of a table that are created, sealed or deleted concurrently


@validated
class ObjectSegments:
    """Key-value tables as objects of a lake: pass it or its URL, by default that of ADJUNCT_LAKE.

    The ADJUNCT_S3_… variables say how S3 is reached; with a URL, so may `s3`, with the fields of
    `S3Options`. Credentials come from boto3's own chain. `cache_bytes` limits the memory for
    segments that this process reads. Clocks of writers may differ by almost half an hour, which is
    more than S3 itself allows.
    """

    limits = SegmentLimits(value=4 * _MEGABYTE, request=16 * _MEGABYTE)
    waits = True
    horizon = 120.0

    def __init__(
        self,
        url: Lake | str | os.PathLike[str] | None = None,
        *,
        s3: Mapping[str, Any] | None = None,
        cache_bytes: NonNegativeInt = 64 * _MEGABYTE,
    ) -> None:
        if unknown := sorted(set(s3 or {}) - {field.name for field in fields(S3Options)}):
            problem = (
                f"key-value tables in objects have s3 with {', '.join(map(repr, unknown))}, unknown"
                " to S3Options."
            )
            raise errors.ConfigurationError(problem, "Pass fields of S3Options.", argument="s3")
        if s3 is not None and (url is None or isinstance(url, Lake)):
            problem = f"key-value tables in objects have s3 with url={url!r}: expected a URL."
            step = "Pass the URL of the lake too, or leave out s3: a lake has its own options."
            raise errors.ConfigurationError(problem, step, argument="s3")
        self._given = os.fspath(url) if isinstance(url, os.PathLike) else url
        self._s3 = s3
        self._cache_bytes = cache_bytes
        self._cache = BlockCache(cache_bytes)

    @cached_property
    def _lake(self) -> Lake:
        """The lake, opened on first use."""
        if isinstance(self._given, Lake):
            return self._given
        if self._given is not None and self._s3 is not None:
            store = describe_store(self._given, S3Options(**self._s3)).open()
        else:
            store = open_store(self._given, LakeSettings())
        return lake_in(store)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ObjectSegments, self._lake, cache_bytes=self._cache_bytes), ()

    def __repr__(self) -> str:
        return (
            f"ObjectSegments({self._given.url if isinstance(self._given, Lake) else self._given!r})"
        )

    def to_dict(self) -> dict[str, Any]:
        descriptor = self._lake.store.descriptor
        s3 = {} if descriptor.s3 is None else {"s3": asdict(descriptor.s3)}
        return {"url": descriptor.url, **s3, "cache_bytes": self._cache_bytes}

    def create(self, table: TableId, partitions: int) -> None:
        """Write the pointers that are missing."""

        def create(core: SegmentCore) -> None:
            with suppress(errors.ObjectExistsError):
                core.pointer.store.put_if_absent(
                    core.pointer.key, SegmentState().following(now_in_ms()).to_bytes()
                )

        self._of_each(table, partitions, create)

    def seal(self, table: TableId, partitions: int) -> None:
        """Swap in pointers that reject writes."""

        def seal(core: SegmentCore) -> None:
            if _settle_status(table, core.pointer, Status.SEALED) is Status.DELETED:
                raise core.deleted_error()

        self._of_each(table, partitions, seal)

    def delete(self, table: TableId, partitions: int) -> None:
        """Swap in pointers of deleted segments, which are never deleted themselves; then delete
        the runs.
        """

        def delete(core: SegmentCore) -> None:
            with suppress(errors.ObjectNotFoundError):
                _settle_status(table, core.pointer, Status.DELETED)
            store = core.pointer.store
            store.delete_many([item.key for item in store.list(core.objects.key(""))])

        self._of_each(table, partitions, delete)

    def open(self, table: TableId, partition: int) -> TableSegment:
        return ObjectSegment(lambda: self._core(table, partition))

    def location(self, table: TableId, partition: int) -> str:
        return f"{self._lake.url}/{_prefix(table, partition)}"

    def _of_each(self, table: TableId, partitions: int, act: Callable[[SegmentCore], None]) -> None:
        """Call `act` for each segment of a table, for several concurrently."""

        def act_on(partition: int) -> None:
            core = self._core(table, partition)
            with core.translate_errors():
                act(core)

        for _ in segment.threads("key-value-control", _AT_ONCE).map(act_on, range(partitions)):
            pass

    def _core(self, table: TableId, partition: int) -> SegmentCore:
        """Return what reads a segment in this process."""
        store = self._lake.store
        prefix = _prefix(table, partition)
        return SegmentCore(
            table, PointerObject(store, f"{prefix}/CURRENT"), RunObjects(store, prefix, self._cache)
        )


def _settle_status(table: TableId, pointer: PointerObject, status: Status) -> Status:
    """Give a segment this status unless it has this one or, being deleted, a later one; return the
    one it has then. Raises TableUnavailableError if the outcome is unknown, or other writers were
    always first.
    """

    def is_settled(state: SegmentState) -> bool:
        return state.status >= status

    def settled(state: SegmentState) -> SegmentState | None:
        """Return the state with the new status, if deleted without log and runs; else None."""
        if is_settled(state):
            return None
        after = replace(state.following(now_in_ms()), status=status)
        if status is Status.DELETED:
            return after.with_levels(b"", **dict(Levels()))
        return after

    try:
        swapped = pointer.change(settled, is_in=is_settled)
    except ReplyLostError as error:
        raise errors.TableUnavailableError(
            error.problem, "Do it again.", table=str(table)
        ) from error
    if swapped is None:
        problem = (
            f"other writers were always first to replace {pointer.key!r} in {pointer.store.url}."
        )
        raise errors.TableUnavailableError(problem, "Do it again.", table=str(table))
    return swapped.state.status


def _prefix(table: TableId, partition: int) -> str:
    """Return what the keys of a segment's objects begin with."""
    return f"key-values/{check_name('incarnation', table.incarnation)}/{partition}"
