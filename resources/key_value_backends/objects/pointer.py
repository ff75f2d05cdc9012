"""The pointer of a segment: the one object that is swapped, with the current state.

    | magic and format | checksum | status | number | time | nonce |
    | length of levels | levels (JSON) | log |

The log has the recent commits in full, oldest first, and grows at its end:

    | length of the rest | length of tokens | tokens |
    | each change: key length, value length, version, key, value |

Older commits are in runs, which `levels` lists, oldest first. A key's entry in the log hides those
in runs, and one in a newer run those in older runs. The tokens of recent commits are kept with the
data, to find out the outcome of requests whose reply was lost: | number | time in ms | n | n tokens
of 12 bytes | for each commit.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

from pydantic import ValidationError

from dagster_adjunct.resources.documents import StoredDocument, first_validation_problem
from dagster_adjunct.resources.errors import (
    AdjunctError,
    PreconditionFailedError,
    TransientError,
    needs_action,
)
from dagster_adjunct.resources.key_value.segment import TOKEN_BYTES, VERSION_BYTES, ReplyLostError
from dagster_adjunct.resources.key_value_backends.objects.runs import (
    REMOVED,
    Columns,
    RunRef,
    Versioned,
    damaged_object_error,
)
from dagster_adjunct.resources.objects.store import ObjectStore

_TOKEN_HEAD = struct.Struct("<QQI")


@dataclass(frozen=True, slots=True)
class CommitTokens:
    """A commit: its number, its time in milliseconds, and the tokens of the requests that it
    applied.
    """

    number: int
    time: int
    tokens: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """Return the commit in the format in which tokens are stored."""
        return b"".join((_TOKEN_HEAD.pack(self.number, self.time, len(self.tokens)), *self.tokens))


def read_tokens(data: bytes) -> Iterator[CommitTokens]:
    """Yield the commits (`CommitTokens`) whose tokens are in these bytes."""
    at = 0
    while at < len(data):
        number, time, count = _TOKEN_HEAD.unpack_from(data, at)
        at += _TOKEN_HEAD.size
        end = at + count * TOKEN_BYTES
        yield CommitTokens(
            number, time, tuple(data[i : i + TOKEN_BYTES] for i in range(at, end, TOKEN_BYTES))
        )
        at = end


def tokens_since(data: bytes, oldest: int) -> bytes:
    """Return stored tokens without those of commits that are older than a time in milliseconds
    since 1970.
    """
    return b"".join(commit.to_bytes() for commit in read_tokens(data) if commit.time >= oldest)


def find_tokens(data: bytes, tokens: Collection[bytes]) -> set[bytes]:
    """Return which of `tokens` are among the stored ones."""
    return {token for commit in read_tokens(data) for token in commit.tokens if token in tokens}


_MAGIC = b"adjkvp\x00\x01"  # the last two bytes are the number of the format
_POINTER_HEAD = struct.Struct("<8sI")
_FACTS = struct.Struct("<BQQ12sI")
_COMMIT = struct.Struct("<II")
_CHANGE = struct.Struct(f"<HI{VERSION_BYTES}s")


class Status(IntEnum):
    """Whether a segment accepts reads and writes, reads only, or nothing."""

    OPEN = 0
    SEALED = 1
    DELETED = 2


class DroppedRun(StoredDocument):
    """A run that was merged into another one `at` a time in milliseconds since 1970. Its object
    is deleted later.
    """

    id: str
    at: int


class MergeClaim(StoredDocument):
    """A process is merging the runs `of` these ids into one with the id `into`, until a time in
    ms since 1970.
    """

    into: str
    of: tuple[str, ...]
    until: int


class Levels(StoredDocument):
    """The runs, oldest first, and the state of their upkeep.

    `flushed` is the number of the last commit that is in a run, `collected` that of the last swap
    by `_collect`.
    """

    runs: tuple[RunRef, ...] = ()
    flushed: int = 0
    collected: int = 0
    dropped: tuple[DroppedRun, ...] = ()
    claims: tuple[MergeClaim, ...] = ()


@dataclass(frozen=True, slots=True)
class SegmentState:
    """The state of a segment after swap `number`. Its `time`, in milliseconds since 1970, never
    decreases.

    `recent` (entries by key) and `tokens` (with the numbers of their commits) are the content of
    the log. `stored_levels` are the bytes of `levels`. `etag` is that of the pointer, "" before the
    state is stored.
    """

    status: Status = Status.OPEN
    number: int = 0
    time: int = 0
    nonce: bytes = b""
    stored_levels: bytes = b"{}"
    log: bytes = b""
    recent: Mapping[bytes, Versioned] = field(default_factory=dict)
    tokens: Mapping[bytes, int] = field(default_factory=dict)
    etag: str = ""

    @property
    def levels(self) -> Levels:
        """The runs, and the state of their upkeep."""
        return _read_levels(self.stored_levels)

    def following(self, now: int) -> SegmentState:
        """Return the same state with the next number, a new nonce and a time; `now` is that of
        the writer's clock.
        """
        return replace(self, number=self.number + 1, time=max(now, self.time), nonce=os.urandom(12))

    def with_commit(
        self, now: int, tokens: Sequence[bytes], writes: Mapping[bytes, Versioned]
    ) -> SegmentState:
        """Return the next state, with these writes by the requests that have these tokens.

        Without tokens there is nothing to commit: only number, time and nonce change.
        """
        after = self.following(now)
        if not tokens:
            return after
        added = _commit_bytes(CommitTokens(after.number, after.time, tuple(tokens)), writes)
        return replace(
            after,
            log=self.log + added,
            recent={**self.recent, **writes},
            tokens={**self.tokens, **dict.fromkeys(tokens, after.number)},
        )

    def with_levels(self, log: bytes | None = None, **changes: Any) -> SegmentState:
        """Return the state with these fields of its levels changed and, if it is given, with
        this log.
        """
        after = replace(
            self, stored_levels=self.levels.model_copy(update=changes).model_dump_json().encode()
        )
        if log is None or log == self.log:
            return after
        return _with_log(replace(after, log=b"", recent={}, tokens={}), log)

    def to_bytes(self) -> bytes:
        """Return the bytes of the pointer. No two swaps write the same bytes, so an ETag never
        occurs again.
        """
        facts = _FACTS.pack(
            self.status, self.number, self.time, self.nonce, len(self.stored_levels)
        )
        body = b"".join((facts, self.stored_levels, self.log))
        return _POINTER_HEAD.pack(_MAGIC, zlib.crc32(body)) + body


def read_pointer(
    data: bytes, where: str, etag: str = "", before: SegmentState | None = None
) -> SegmentState:
    """Return the state in the bytes of a pointer. Raises MalformedDocumentError.

    `before` is an earlier state of this pointer, if one is known: what both logs begin with is not
    decoded again.
    """
    if len(data) < _POINTER_HEAD.size + _FACTS.size or data[:8] != _MAGIC:
        raise damaged_object_error(where, f"it begins with {data[:8]!r}, expected {_MAGIC!r}")
    if zlib.crc32(memoryview(data)[_POINTER_HEAD.size :]) != _POINTER_HEAD.unpack_from(data)[1]:
        raise damaged_object_error(where, "it has another checksum than was stored with it")
    status, number, time, nonce, size = _FACTS.unpack_from(data, _POINTER_HEAD.size)
    at = _POINTER_HEAD.size + _FACTS.size
    stored_levels = data[at : at + size]
    try:
        levels = _read_levels(stored_levels)
    except ValidationError as error:
        raise damaged_object_error(where, first_validation_problem(error)) from None
    log = data[at + size :]
    state = SegmentState(Status(status), number, time, nonce, stored_levels, etag=etag)
    no_flush_since = before is not None and before.levels.flushed == levels.flushed
    if before is not None and no_flush_since and log.startswith(before.log):
        state = replace(state, log=before.log, recent=before.recent, tokens=before.tokens)
    return _with_log(state, log)


def _with_log(state: SegmentState, log: bytes) -> SegmentState:
    """Return the state with this log, of which the state's own log is the beginning."""
    recent = {**state.recent}
    tokens = {**state.tokens}
    for commit, writes in read_log(log, len(state.log)):
        recent.update(writes)
        tokens.update(dict.fromkeys(commit.tokens, commit.number))
    return replace(state, log=log, recent=recent, tokens=tokens)


def read_log(log: bytes, at: int = 0) -> list[tuple[CommitTokens, dict[bytes, Versioned]]]:
    """Return the commits of a log, oldest first, from the offset `at` on: their tokens and their
    writes.
    """
    commits = []
    while at < len(log):
        length, tokens_length = _COMMIT.unpack_from(log, at)
        at += _COMMIT.size
        end = at + length
        (commit,) = read_tokens(log[at : at + tokens_length])
        at += tokens_length
        writes: dict[bytes, Versioned] = {}
        while at < end:
            key_length, value_length, version = _CHANGE.unpack_from(log, at)
            at += _CHANGE.size
            key = log[at : at + key_length]
            at += key_length
            value = None
            if value_length != REMOVED:
                value = log[at : at + value_length]
                at += value_length
            writes[key] = version, value
        commits.append((commit, writes))
    return commits


def log_tokens(log: bytes) -> bytes:
    """Return the tokens of all commits of a log, in the format in which runs store them."""
    return b"".join(commit.to_bytes() for commit, _ in read_log(log))


def columns_from_log(recent: Mapping[bytes, Versioned]) -> Columns:
    """Return entries of a log in key order, as columns."""
    keys = sorted(recent)
    versioned = [recent[key] for key in keys]
    return Columns(keys, [version for version, _ in versioned], [value for _, value in versioned])


def _commit_bytes(commit: CommitTokens, writes: Mapping[bytes, Versioned]) -> bytes:
    """Return a commit as the log stores it."""
    tokens = commit.to_bytes()
    parts = [tokens]
    for key, (version, value) in writes.items():
        if value is not None:
            length = len(value)
        else:
            length = REMOVED
        parts += (_CHANGE.pack(len(key), length, version), key, value or b"")
    body = b"".join(parts)
    return _COMMIT.pack(len(body), len(tokens)) + body


@lru_cache(maxsize=256)
def _read_levels(data: bytes) -> Levels:
    """Return levels from their JSON, which is decoded once. Raises pydantic's ValidationError."""
    return Levels.model_validate_json(data)


_ATTEMPTS = 6  # to send one swap whose reply is lost or unclear
_FIRST_PAUSE = 0.05  # seconds, doubled after each attempt
_TURNS = 50  # of `change` in which others may be first


class Swapped(NamedTuple):
    """Whether our swap took place, and the state after it: ours, or a later one."""

    is_done: bool
    state: SegmentState


class PointerObject:
    """The pointer object at `key`, for any thread.

    Raises ObjectNotFoundError if it is missing, and StoreUnavailableError.
    """

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.store = store
        self.key = key
        # The state that this process has read or written last. Another thread may replace it at any
        # moment, also by an older one whose GET took longer.
        self.last: SegmentState | None = None
        self.swaps = 0  # how many this process has made
        self._sharing = threading.Lock()
        self._reading = threading.Lock()
        # Of the next shared GET: its state, None if it failed.
        self._next: Future[SegmentState | None] | None = None

    def read(self) -> SegmentState:
        """Return the current state, by one GET."""
        stored = self.store.get(self.key)
        last = self.last
        if last is not None and last.etag == stored.etag:
            return last
        where = f"pointer {self.key!r} in {self.store.url}"
        state = read_pointer(stored.data, where, stored.etag, last)
        self.last = state
        return state

    def read_fresh(self) -> SegmentState:
        """Return the state that is current at some moment of this call.

        Threads that call this during a GET share the next one.
        """
        with self._sharing:
            leads = self._next is None
            shared = self._next or Future()
            self._next = shared
        if not leads:
            return shared.result() or self.read()  # None if the shared GET failed
        state: SegmentState | None = None
        try:
            with self._reading:
                with self._sharing:
                    self._next = None  # this GET may be too early for threads that call from now on
                state = self.read()
                return state
        finally:
            with self._sharing:
                if self._next is shared:  # it failed before its GET
                    self._next = None
            shared.set_result(state)

    def change(
        self,
        make: Callable[[SegmentState], SegmentState | None],
        *,
        is_in: Callable[[SegmentState], bool],
    ) -> Swapped | None:
        """Swap in what `make` returns for the current state; if another writer was first, try again
        with its state.

        Returns whether the swap was made, and the state after it. If `make` returns None, nothing
        is changed, and the result is False and the current state. Returns None if other writers
        were first _TURNS times. For `is_in` and errors, see `swap`.
        """
        state = self.read()
        for _ in range(_TURNS):
            after = make(state)
            if after is None:
                return Swapped(False, state)
            swapped = self.swap(state, after, is_in=is_in)
            if swapped.is_done:
                return swapped
            state = swapped.state
        return None

    def swap(
        self,
        before: SegmentState,
        after: SegmentState,
        *,
        is_in: Callable[[SegmentState], bool],
        pause: Callable[[], None] = lambda: None,
    ) -> Swapped:
        """Replace the state `before` by `after`; return whether that was done, and the current
        state.

        `is_in(state)` says whether a later state contains our change: then it was done before that.
        `pause` is called if another writer was first, before the state is read again. Raises
        ReplyLostError if the outcome is unknown; any other error means that nothing was changed.
        """
        data = after.to_bytes()
        problem: Exception | None = None
        for attempt in range(_ATTEMPTS):
            try:
                etag = self.store.put_if_match(self.key, data, before.etag)
            except PreconditionFailedError as error:
                problem = problem or error
                pause()
            except AdjunctError as error:
                self._require_repeatable(error, problem)
                problem = error
            else:
                swapped = replace(after, etag=etag)
                self.last = swapped
                self.swaps += 1
                return Swapped(True, swapped)
            try:
                found = self._find_outcome(before, after, is_in)
            except AdjunctError as error:
                raise self._lost(error) from problem
            if found is not None:
                return found
            # Then send the identical request again.
            time.sleep(random.uniform(0.5, 1.0) * _FIRST_PAUSE * 2**attempt)
        raise self._lost(problem) from problem

    def _require_repeatable(self, error: AdjunctError, earlier: Exception | None) -> None:
        """Raise the error of a request that can't be sent again: itself, if it changed nothing,
        else that the outcome is unknown. `earlier` is the error of the request before.
        """
        is_passing = isinstance(error, TransientError)
        # As on a full disk: nothing was sent.
        if earlier is None and (not is_passing or needs_action(error)):
            raise error
        if not is_passing:
            raise self._lost(error) from earlier

    def _find_outcome(
        self, before: SegmentState, after: SegmentState, is_in: Callable[[SegmentState], bool]
    ) -> Swapped | None:
        """Return what a swap without a clear reply has done; None while nobody has replaced
        `before`.
        """
        now = self.read()
        if now.nonce == after.nonce:
            return Swapped(True, now)
        if now.etag != before.etag:
            # Then requests of ours that are still in flight will be rejected.
            return Swapped(is_in(now), now)
        return None

    def _lost(self, error: Exception | None) -> ReplyLostError:
        """Return the error for a swap whose outcome is unknown."""
        problem = f"whether {self.key!r} in {self.store.url} was replaced is unknown ({error})."
        return ReplyLostError(problem, "Repeat the request, with its token.")


_MOST = 32.0  # rivals that the estimate takes into account
_ALONE = 0.25  # an estimate below this counts as no rivals
_HALF_LIFE = 0.5  # seconds in which the estimated number of rivals halves while none is seen


class SwapBackoff:
    """Chooses pauses between tries to swap a pointer, from estimates of its number of writers and
    of the time of a try.

    With n writers, the winner waits for up to the time of n tries, and losers for less after each
    loss. Without this pause, a winner would never meet the others (rivals), conclude that it is
    alone, and starve them.
    """

    def __init__(self) -> None:
        self._rivals = 0.0
        self._try_takes = 0.005
        self._losses = 0
        self._last = time.monotonic()

    @property
    def is_alone(self) -> bool:
        """Whether there seem to be no other writers."""
        return self._rivals < _ALONE

    def record_win(self, others: int, seconds: float) -> None:
        """Record a swap of ours: the number of swaps by others since our last one, and the
        seconds of the try.
        """
        now = time.monotonic()
        if others > self._rivals:
            weight = 0.5  # the estimate grows at once, and shrinks only with time
        else:
            weight = 1 - 0.5 ** ((now - self._last) / _HALF_LIFE)
        self._last = now
        self._losses = 0
        self._rivals += weight * (min(others, _MOST) - self._rivals)
        self._try_takes += 0.25 * (min(seconds, 1.0) - self._try_takes)

    def record_loss(self) -> None:
        """Record that somebody else was first."""
        self._losses += 1
        self._rivals = max(1.0, self._rivals)

    def next_pause(self) -> float:
        """Return the seconds to wait before the next try."""
        if self.is_alone:
            return 0.0
        return random.uniform(0, self._rivals * self._try_takes / (1 + self._losses))
