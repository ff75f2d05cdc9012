"""The pointer of a segment: the one object that is swapped, which says all that stands.

    | magic and format | checksum | status | number | time | nonce | length of levels | levels (JSON) | log |

The log holds the recent commits whole, oldest first, and grows at its end:

    | length of the rest | length of tokens | tokens | each change: key length, value length, version, key, value |

What it holds for a key hides what the runs hold; of the runs, the later in `levels` is the newer one.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import lru_cache

from pydantic import Field, ValidationError

from dagster_adjunct.resources.key_value.key_version import VERSION_BYTES
from dagster_adjunct.resources.key_value_backends.object_runs.commit_tokens import CommitTokens, read_tokens
from dagster_adjunct.resources.key_value_backends.object_runs.run_blocks import Columns, Versioned
from dagster_adjunct.resources.key_value_backends.object_runs.run_format import damaged
from dagster_adjunct.resources.stored_documents import StoredDocument, first_problem

_MAGIC = b"adjkvp\x00\x01"  # the last two bytes are the number of the format
_HEAD = struct.Struct("<8sI")
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
        return _HEAD.pack(_MAGIC, zlib.crc32(body)) + body


def read_pointer(data: bytes, where: str, before: SegmentState | None = None) -> SegmentState:
    """Return the state that a pointer says. Raises MalformedDocumentError.

    `before` is any state that was read from this pointer earlier: what both have in common is not read again.
    """
    if len(data) < _HEAD.size + _FACTS.size or data[:8] != _MAGIC:
        raise damaged(where, f"it begins with {data[:8]!r}, expected {_MAGIC!r}")
    if zlib.crc32(memoryview(data)[_HEAD.size :]) != _HEAD.unpack_from(data)[1]:
        raise damaged(where, "it has another checksum than was stored with it")
    status, number, time, nonce, size = _FACTS.unpack_from(data, _HEAD.size)
    at = _HEAD.size + _FACTS.size
    stored_levels = data[at : at + size]
    try:
        levels = _read_levels(stored_levels)
    except ValidationError as error:
        raise damaged(where, first_problem(error)) from None
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


def relogged(state: SegmentState, levels: Levels, log: bytes) -> SegmentState:
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


def columns_of(recent: Mapping[bytes, Versioned]) -> Columns:
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
