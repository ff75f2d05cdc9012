"""Which requests were applied, and when: the tokens of recent commits, kept with the data for lost replies.

| number | time in ms | n | n tokens of 12 bytes |   for each commit, one behind the other
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dagster_adjunct.resources.key_value.key_version import TOKEN_BYTES

_HEAD = struct.Struct("<QQI")


@dataclass(frozen=True, slots=True)
class CommitTokens:
    """A commit: its number, its time in milliseconds, and the tokens of the requests that it applied."""

    number: int
    time: int
    tokens: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        return b"".join((_HEAD.pack(self.number, self.time, len(self.tokens)), *self.tokens))


def read_tokens(data: bytes) -> Iterator[CommitTokens]:
    """Yield the commits whose tokens were written here."""
    at = 0
    while at < len(data):
        number, time, count = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        end = at + count * TOKEN_BYTES
        yield CommitTokens(number, time, tuple(data[i : i + TOKEN_BYTES] for i in range(at, end, TOKEN_BYTES)))
        at = end


def tokens_since(data: bytes, oldest: int) -> bytes:
    """Return the same without the commits before a time in milliseconds."""
    return b"".join(commit.to_bytes() for commit in read_tokens(data) if commit.time >= oldest)


def holds_any(data: bytes, tokens: Collection[bytes]) -> set[bytes]:
    """Return those of these tokens that were written here."""
    return {token for commit in read_tokens(data) for token in commit.tokens if token in tokens}
