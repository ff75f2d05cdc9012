"""What a stream remembers of its producers, so that a retried append adds nothing.

Of each producer the last 32 sequences are kept, of the stream the 256 producers that appended last. A sequence
below a full window is taken for a duplicate: whoever retries 32 appends later has lost its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from dagster_adjunct.resources.errors import ProducerConflictError
from dagster_adjunct.resources.streams.interface.stream_system import AppendResult
from dagster_adjunct.resources.streams.lake.stream_manifest import Sent

WINDOW = 32
PRODUCERS = 256

Producers = Mapping[str, tuple[Sent, ...]]


def content_digest(files: Iterable[tuple[int, int, int | str | None]], markers: Iterable[object]) -> str:
    """Return one digest of an append: (partition, rows, digest of the rows) of each file, and its markers."""
    content = json.dumps([sorted(files), list(markers)], separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def known(producers: Producers, producer: str, sequence: int) -> Sent | None:
    """Return what was sent under this sequence, or None for a new one.

    Below the window its content is not known any more: the digest is then empty.
    """
    window = producers.get(producer, ())
    for sent in window:
        if sent.sequence == sequence:
            return sent
    if len(window) >= WINDOW and sequence < window[0].sequence:
        return Sent(sequence, "", (), (), 0)
    return None


def check_same(sent: Sent, digest: str, what: str, *, stream: str, producer: str) -> None:
    """Refuse other contents under a sequence that is known."""
    if sent.digest and sent.digest != digest:
        raise ProducerConflictError(
            f"{what} is in already with {sent.rows} records of other contents (digest {sent.digest[:12]}, "
            f"now {digest[:12]}).",
            "Nothing was added. Retry with the same records, or give new records the next sequence.",
            stream=f"lake.{stream}",
            producer=producer,
            sequence=sent.sequence,
        )


def result_of(sent: Sent, *, duplicate: bool) -> AppendResult:
    return AppendResult(
        {p: str(offset) for p, offset in enumerate(sent.first)},
        {p: str(offset) for p, offset in enumerate(sent.next)},
        sent.rows,
        duplicate,
    )


def remembered(producers: Producers, producer: str, sent: Sent) -> dict[str, tuple[Sent, ...]]:
    """Return the producers with one more sequence; the last to append stands last and leaves last."""
    window = tuple(sorted((*producers.get(producer, ()), sent)))[-WINDOW:]
    others = {name: entry for name, entry in producers.items() if name != producer}
    while len(others) >= PRODUCERS:
        del others[next(iter(others))]
    return {**others, producer: window}
