"""The pointer of a segment: the one object that is swapped, which says all that stands.

    | magic and format | checksum | status | number | time | nonce | length of levels | levels (JSON) | log |

The log holds the recent commits whole, oldest first, and grows at its end:

    | length of the rest | length of tokens | tokens | each change: key length, value length, version, key, value |

What it holds for a key hides what the runs hold; of the runs, the later in `levels` is the newer one.
"""

from __future__ import annotations

import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache

from pydantic import Field, ValidationError

from dagster_adjunct.resources.common import StoredDocument, first_validation_problem
from dagster_adjunct.resources.errors import AdjunctError, PreconditionFailedError, TransientError
from dagster_adjunct.resources.key_value.segment import TOKEN_BYTES, VERSION_BYTES, ReplyLostError
from dagster_adjunct.resources.key_value_backends.objects.runs import Columns, Versioned, damaged_object_error
from dagster_adjunct.resources.objects.store import ObjectStore

# Which requests were applied, and when: the tokens of recent commits, kept with the data for lost replies.
#
# | number | time in ms | n | n tokens of 12 bytes |   for each commit, one behind the other


_TOKEN_HEAD = struct.Struct("<QQI")


@dataclass(frozen=True, slots=True)
class CommitTokens:
    """A commit: its number, its time in milliseconds, and the tokens of the requests that it applied."""

    number: int
    time: int
    tokens: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        return b"".join((_TOKEN_HEAD.pack(self.number, self.time, len(self.tokens)), *self.tokens))


def read_tokens(data: bytes) -> Iterator[CommitTokens]:
    """Yield the commits whose tokens were written here."""
    at = 0
    while at < len(data):
        number, time, count = _TOKEN_HEAD.unpack_from(data, at)
        at += _TOKEN_HEAD.size
        end = at + count * TOKEN_BYTES
        yield CommitTokens(number, time, tuple(data[i : i + TOKEN_BYTES] for i in range(at, end, TOKEN_BYTES)))
        at = end


def tokens_since(data: bytes, oldest: int) -> bytes:
    """Return the same without the commits before a time in milliseconds."""
    return b"".join(commit.to_bytes() for commit in read_tokens(data) if commit.time >= oldest)


def find_tokens(data: bytes, tokens: Collection[bytes]) -> set[bytes]:
    """Return those of these tokens that were written here."""
    return {token for commit in read_tokens(data) for token in commit.tokens if token in tokens}


_MAGIC = b"adjkvp\x00\x01"  # the last two bytes are the number of the format
_POINTER_HEAD = struct.Struct("<8sI")
_FACTS = struct.Struct("<BQQ12sI")
_COMMIT = struct.Struct("<II")
_CHANGE = struct.Struct(f"<HI{VERSION_BYTES}s")
_REMOVED = 2**32 - 1


class Status(IntEnum):
    """What may be done to a segment."""

    OPEN = 0
    SEALED = 1
    DELETED = 2


class RunRef(StoredDocument):
    """A run: its id, its bytes and those of its footer, its entries, the commits in it, the time of the last."""

    id: str
    size: int = Field(ge=0)
    footer: int = Field(ge=0)
    count: int = Field(ge=0)
    first: int
    last: int
    newest: int


class DroppedRun(StoredDocument):
    """A run that nothing stands on since a time in milliseconds: its object is deleted later."""

    id: str
    at: int


class MergeClaim(StoredDocument):
    """Some process merges these runs into one, until a time in milliseconds. `into` is the id of the run to be."""

    into: str
    of: tuple[str, ...]
    until: int


class Levels(StoredDocument):
    """What lies below the log: runs, oldest first, the number of the last commit in them, and that of the last swap by
    which objects that nothing stands on were collected."""

    runs: tuple[RunRef, ...] = ()
    flushed: int = 0
    collected: int = 0
    dropped: tuple[DroppedRun, ...] = ()
    claims: tuple[MergeClaim, ...] = ()


@dataclass(frozen=True, slots=True)
class Write:
    """What a commit does to a key; a value of None removes it."""

    key: bytes
    version: bytes
    value: bytes | None


@dataclass(frozen=True, slots=True)
class SegmentState:
    """All that stands in a segment after commit `number`; `time` in milliseconds never goes back.

    `recent` and `tokens` are what the log says: by key, and the tokens of its commits with their numbers.
    `stored_levels` are the bytes of `levels`.
    """

    status: Status = Status.OPEN
    number: int = 0
    time: int = 0
    nonce: bytes = b""
    stored_levels: bytes = b"{}"
    log: bytes = b""
    recent: Mapping[bytes, Versioned] = field(default_factory=dict)
    tokens: Mapping[bytes, int] = field(default_factory=dict)

    @property
    def levels(self) -> Levels:
        return _read_levels(self.stored_levels)

    def then(self, now: int) -> SegmentState:
        """Return the state after the next swap, which changes nothing else; `now` by the clock of who swaps."""
        return replace(self, number=self.number + 1, time=max(now, self.time), nonce=os.urandom(12))

    def committed(self, now: int, tokens: Sequence[bytes], writes: Sequence[Write]) -> SegmentState:
        """Return the state after a commit of these writes, by requests of these tokens. There may be none of both."""
        after = self.then(now)
        if not tokens:
            return after
        added = _commit_bytes(CommitTokens(after.number, after.time, tuple(tokens)), writes)
        return replace(
            after,
            log=self.log + added,
            recent={**self.recent, **{write.key: (write.version, write.value) for write in writes}},
            tokens={**self.tokens, **dict.fromkeys(tokens, after.number)},
        )

    def to_bytes(self) -> bytes:
        """Return the object. No two swaps write equal bytes, so that none gives an old ETag back."""
        facts = _FACTS.pack(self.status, self.number, self.time, self.nonce, len(self.stored_levels))
        body = b"".join((facts, self.stored_levels, self.log))
        return _POINTER_HEAD.pack(_MAGIC, zlib.crc32(body)) + body


def read_pointer(data: bytes, where: str, before: SegmentState | None = None) -> SegmentState:
    """Return the state that a pointer says. Raises MalformedDocumentError.

    `before` is any state that was read from this pointer earlier: what both have in common is not read again.
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
    recent, tokens, known = {}, {}, 0
    if before is not None and before.levels.flushed == levels.flushed and log.startswith(before.log):
        recent, tokens, known = {**before.recent}, {**before.tokens}, len(before.log)
    for commit, writes in read_log(log, known):
        recent.update((write.key, (write.version, write.value)) for write in writes)
        tokens.update(dict.fromkeys(commit.tokens, commit.number))
    return SegmentState(Status(status), number, time, nonce, stored_levels, log, recent, tokens)


def read_log(log: bytes, at: int = 0) -> list[tuple[CommitTokens, list[Write]]]:
    """Return the commits of a log from a place on, oldest first."""
    commits = []
    while at < len(log):
        length, tokens_length = _COMMIT.unpack_from(log, at)
        at += _COMMIT.size
        end = at + length
        (commit,) = read_tokens(log[at : at + tokens_length])
        at += tokens_length
        writes = []
        while at < end:
            key_length, value_length, version = _CHANGE.unpack_from(log, at)
            at += _CHANGE.size
            key = log[at : at + key_length]
            at += key_length
            value = None
            if value_length != _REMOVED:
                value = log[at : at + value_length]
                at += value_length
            writes.append(Write(key, version, value))
        commits.append((commit, writes))
    return commits


def replace_log(state: SegmentState, levels: Levels, log: bytes) -> SegmentState:
    """Return the state with other runs below it, and the commits of `log` alone above them."""
    stored = levels.model_dump_json().encode()
    if log == state.log:
        return replace(state, stored_levels=stored)
    recent: dict[bytes, Versioned] = {}
    tokens: dict[bytes, int] = {}
    for commit, writes in read_log(log):
        recent.update((write.key, (write.version, write.value)) for write in writes)
        tokens.update(dict.fromkeys(commit.tokens, commit.number))
    return replace(state, stored_levels=stored, log=log, recent=recent, tokens=tokens)


def log_tokens(log: bytes) -> bytes:
    """Return the tokens of all commits of a log, as runs hold them."""
    return b"".join(commit.to_bytes() for commit, _ in read_log(log))


def columns_from_log(recent: Mapping[bytes, Versioned]) -> Columns:
    """Return what a log says by key, in the order of the keys."""
    keys = sorted(recent)
    versioned = [recent[key] for key in keys]
    return Columns(keys, [version for version, _ in versioned], [value for _, value in versioned])


def _commit_bytes(commit: CommitTokens, writes: Sequence[Write]) -> bytes:
    tokens = commit.to_bytes()
    parts = [tokens]
    for write in writes:
        length = _REMOVED if write.value is None else len(write.value)
        parts += (_CHANGE.pack(len(write.key), length, write.version), write.key, write.value or b"")
    body = b"".join(parts)
    return _COMMIT.pack(len(body), len(tokens)) + body


@lru_cache(maxsize=256)
def _read_levels(data: bytes) -> Levels:
    return Levels.model_validate_json(data)


_ATTEMPTS = 6
_FIRST_PAUSE = 0.05
_TURNS = 50


@dataclass(frozen=True, slots=True)
class PointerSnapshot:
    """A state, and the ETag of the pointer that says it."""

    state: SegmentState
    etag: str


@dataclass(frozen=True, slots=True)
class SwapResult:
    """Whether a swap of ours took place, and a state from after it: ours, or one that others made since."""

    won: bool
    standing: PointerSnapshot


class PointerObject:
    """The object at `key`. Any thread may use it. Raises ObjectNotFoundError where there is none, and
    StoreUnavailableError."""

    def __init__(self, store: ObjectStore, key: str) -> None:
        self.store, self.key = store, key
        self.last: PointerSnapshot | None = None  # that was read, or written, by this process
        self.won = 0  # swaps that this process made
        self._turn = threading.Condition()
        self._begun = 0
        self._ended = 0
        self._outcome: PointerSnapshot | None = None  # of the last read that ended; None where it failed

    def read(self) -> PointerSnapshot:
        """Return what stands now. One GET."""
        stored = self.store.get(self.key)
        last = self.last
        if last is not None and last.etag == stored.etag:
            return last
        before = None if last is None else last.state
        state = read_pointer(stored.data, f"pointer {self.key!r} in {self.store.url}", before)
        self.last = PointerSnapshot(state, stored.etag)
        return self.last

    def fresh(self) -> PointerSnapshot:
        """Return what stands at some moment of this call. Threads that ask while a GET is under way share the next."""
        with self._turn:
            mine = self._begun + 1  # what began before this call may have read what was before it
            while self._begun > self._ended or self._ended >= mine:
                if self._ended >= mine:
                    if self._outcome is not None:
                        return self._outcome
                    if self._begun == self._ended:
                        break  # it failed: every caller asks for itself
                self._turn.wait()
            self._begun += 1
            number = self._begun
        standing: PointerSnapshot | None = None
        try:
            standing = self.read()
            return standing
        finally:
            with self._turn:
                self._ended, self._outcome = number, standing
                self._turn.notify_all()

    def change(
        self, make: Callable[[SegmentState], SegmentState | None], *, is_in: Callable[[SegmentState], bool]
    ) -> SwapResult | None:
        """Swap in what `make` makes of what stands, and anew of what others put there first.

        `is_in` is as for `swap`, whose errors it raises. What is returned was not won where `make` returned None: it
        has nothing to change then. None where others were always first.
        """
        standing = self.read()
        for _ in range(_TURNS):
            after = make(standing.state)
            if after is None:
                return SwapResult(False, standing)
            swapped = self.swap(standing, after, is_in=is_in)
            if swapped.won:
                return swapped
            standing = swapped.standing
        return None

    def swap(
        self,
        before: PointerSnapshot,
        after: SegmentState,
        *,
        is_in: Callable[[SegmentState], bool],
        pause: Callable[[], None] = lambda: None,
    ) -> SwapResult:
        """Put `after` in the place of `before`; `is_in(state)` says of a later state whether ours is part of it.

        `pause` is called where somebody else was first, before that is looked at. Raises ReplyLostError where nobody
        knows; what else it raises says that nothing happened.
        """
        data = after.to_bytes()
        problem: Exception | None = None
        for attempt in range(_ATTEMPTS):
            try:
                etag = self.store.put_if_match(self.key, data, before.etag)
            except PreconditionFailedError as error:
                problem = problem or error
                pause()
            except TransientError as error:
                problem = error
            except AdjunctError as error:
                if problem is None:
                    raise
                raise self._lost(error) from problem
            else:
                self.last = PointerSnapshot(after, etag)
                self.won += 1
                return SwapResult(True, self.last)
            try:
                now = self.read()
                if now.state.nonce == after.nonce:
                    return SwapResult(True, now)
                if now.etag != before.etag:  # whatever of ours may still be on its way is refused now
                    return SwapResult(is_in(now.state), now)
            except AdjunctError as error:
                raise self._lost(error) from problem
            time.sleep(random.uniform(0.5, 1.0) * _FIRST_PAUSE * 2**attempt)  # the identical request again
        raise self._lost(problem) from problem

    def _lost(self, error: Exception | None) -> ReplyLostError:
        return ReplyLostError(
            f"the store did not say whether {self.key!r} in {self.store.url} was replaced ({error}).",
            "Repeat the request, with its token.",
        )


_MOST = 32.0
_ALONE = 0.25
_HALF_LIFE = 0.5  # seconds after which half of the rivals that were not met again are forgotten


class SwapBackoff:
    """How many others write the same pointer, and how long a try takes, as this writer has met them lately.

    With n writers the one that won waits for up to n tries' time, and those that lost for less each time: else who wins
    meets nobody, takes itself for alone, and the others starve.
    """

    def __init__(self) -> None:
        self._rivals = 0.0
        self._try_takes = 0.005
        self._losses = 0
        self._last = time.monotonic()

    @property
    def alone(self) -> bool:
        """Whether nobody else seems to write."""
        return self._rivals < _ALONE

    def won(self, others: int, seconds: float) -> None:
        """Note a swap of ours: how many others made since our last one, and how long reading and swapping took."""
        now = time.monotonic()
        weight = 0.5 if others > self._rivals else 1 - 0.5 ** ((now - self._last) / _HALF_LIFE)
        self._last, self._losses = now, 0
        self._rivals += weight * (min(others, _MOST) - self._rivals)
        self._try_takes += 0.25 * (min(seconds, 1.0) - self._try_takes)

    def lost(self) -> None:
        """Note that somebody else was first."""
        self._losses += 1
        self._rivals = max(1.0, self._rivals)

    def pause(self) -> float:
        """Return how many seconds to wait before the next try."""
        return 0.0 if self.alone else random.uniform(0, self._rivals * self._try_takes / (1 + self._losses))
