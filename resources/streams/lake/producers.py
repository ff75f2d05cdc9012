"""The appends that a stream remembers of its producers, so that a retried append adds nothing.

A stream keeps the last 32 sequences of each of the 256 producers that appended last. A sequence older than a full
window is rejected, since it may be a retry or a restarted counter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from dagster_adjunct.resources.errors import ProducerConflictError
from dagster_adjunct.resources.streams.lake.manifest import SentSequence
from dagster_adjunct.resources.streams.system import AppendResult, stale_sequence_error

WINDOW = 32
PRODUCERS = 256

Producers = Mapping[str, tuple[SentSequence, ...]]


def content_digest(files: Iterable[tuple[int, int, int | str | None]], markers: Iterable[object]) -> str:
    """Return the digest of an append: of its markers and of each file's (partition, rows, digest)."""
    content = json.dumps([sorted(files), list(markers)], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def find_sequence(producers: Producers, producer: str, sequence: int, stream: str) -> SentSequence | None:
    """Return what was appended to the stream under this sequence, or None if it is new.

    Raises ProducerConflictError for a sequence before the window, which is no longer known.
    """
    window = producers.get(producer, ())
    for sent in window:
        if sent.sequence == sequence:
            return sent
    if len(window) >= WINDOW and sequence < window[0].sequence:
        raise stale_sequence_error(f"lake.{stream}", producer, sequence, window[-1].sequence)
    return None


def check_same_contents(sent: SentSequence, digest: str, producers: Producers, *, stream: str, producer: str) -> None:
    """Raise ProducerConflictError if the appended contents differ from those of the sequence."""
    if sent.digest != digest:
        newest = producers[producer][-1].sequence
        raise ProducerConflictError(
            f"sequence {sent.sequence} of producer {producer!r} in stream {stream!r} was appended with {sent.rows} "
            f"records of other contents (digest {sent.digest[:12]}, now {digest[:12]}); the newest is {newest}.",
            f"Nothing was added. Retry with the same records, or give new records the sequence {newest + 1}.",
            stream=f"lake.{stream}",
            producer=producer,
            sequence=sent.sequence,
            newest=newest,
        )


def result_from_sequence(sent: SentSequence, *, duplicate: bool) -> AppendResult:
    return AppendResult(
        {p: str(offset) for p, offset in enumerate(sent.first)},
        {p: str(offset) for p, offset in enumerate(sent.next)},
        sent.rows,
        duplicate,
    )


def record_sequence(producers: Producers, producer: str, sent: SentSequence) -> dict[str, tuple[SentSequence, ...]]:
    """Return the producers with one more sequence, ordered by their last append; the oldest is dropped."""
    window = tuple(sorted((*producers.get(producer, ()), sent)))[-WINDOW:]
    others = {name: entry for name, entry in producers.items() if name != producer}
    while len(others) >= PRODUCERS:
        del others[next(iter(others))]
    return {**others, producer: window}
