"""What became of results of a stream that was rewritten into other partitions since. Pure decisions, no I/O.

Offsets begin anew then, and so does the stream's identity: nobody knows which offset of before is which of now. What is
known is where the records of before end in the new partitions. Where a reader has read all of these again, it has
replaced all that it made of them before; where it has read a part again, nobody can tell what that replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition
from dagster_adjunct.resources.streams.lake.source_coverage import Coverage, Read, Superseded, pieces

if TYPE_CHECKING:
    from dagster_adjunct.resources.streams.lake.stream_manifest import Rewritten, StreamState

EVERY_EPOCH = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Lineage:
    """The identities that a stream has had, oldest first: `rewritings[i]` led from `ids[i]` to `ids[i + 1]`."""

    ids: tuple[str, ...]
    rewritings: tuple[Rewritten, ...]

    @classmethod
    def of(cls, state: StreamState) -> Lineage:
        rewritings = (*state.rewritten_before, *((state.rewritten,) if state.rewritten else ()))
        return cls((*(rewriting.id for rewriting in rewritings), state.id), rewritings)

    def place(self, identity: str) -> int | None:
        """Return which of the stream's identities this is; None for that of another stream."""
        return self.ids.index(identity) if identity in self.ids else None


LineageOf = Callable[[str], Lineage | None]
"""Of a stream such as "lake.orders"; None where nothing is known of it."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Results of before a rewriting that are replaced; `unknown` are (reader, stream) of which nobody can tell."""

    superseded: tuple[Superseded, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()

    @property
    def readers(self) -> frozenset[tuple[str, str]]:
        """(reader, stream) of those whose results are all replaced."""
        return frozenset((span.reader, _stream(span.source)) for span in self.superseded)


def replaced_by_rewritten(read: Read, lineage_of: LineageOf) -> Replaced:
    """Return which results were made of records that were read again after they had been rewritten."""
    replaced: list[Superseded] = []
    unknown: list[tuple[str, str]] = []
    for reader, partitions in sorted(read.items()):
        application, _, identity = reader.partition("@")
        for stream in sorted({_stream(source) for source in partitions}):
            lineage = lineage_of(stream)
            at = lineage.place(identity) if lineage is not None else None
            if lineage is None or at is None or at + 1 == len(lineage.ids):
                continue
            for later in range(len(lineage.ids) - 1, at, -1):
                rewriting = lineage.rewritings[later - 1]
                again = _read_again(rewriting, stream, read.get(f"{application}@{lineage.ids[later]}", {}))
                if again == "none":
                    continue
                if again == "part" or _lost_between(lineage, at, later):
                    unknown.append((reader, stream))
                else:
                    was = lineage.rewritings[at]
                    replaced += [
                        Superseded(reader, f"{stream}.{p}", start, end, EVERY_EPOCH)
                        for p, (start, end) in enumerate(zip(was.oldest, was.ended, strict=True))
                        if start < end
                    ]
                break
    return Replaced(tuple(replaced), tuple(unknown))


def with_rewritten(before: Read, now: Read, lineage_of: LineageOf) -> Read:
    """Return what was known `before`, as it would be told after rewritings: all that was rewritten had been read."""
    known = {reader: dict(partitions) for reader, partitions in before.items()}
    for reader, partitions in now.items():
        application, _, identity = reader.partition("@")
        for source in partitions:
            ssp = SystemStreamPartition.parse(source)
            lineage = lineage_of(ssp.qualified_stream)
            at = lineage.place(identity) if lineage is not None else None
            if (
                lineage is None
                or not at
                or not any(f"{application}@{earlier}" in before for earlier in lineage.ids[:at])
            ):
                continue
            coverage = known.setdefault(reader, {}).get(source, Coverage())
            until = max(coverage.until, lineage.rewritings[at - 1].next[ssp.partition])
            known[reader][source] = coverage.model_copy(update={"until": until})
    return known


def _read_again(rewriting: Rewritten, stream: str, read: Mapping[str, Coverage]) -> Literal["none", "part", "all"]:
    """Return how much of the records of before was read again in the partitions of after."""
    first = 1 if any(rewriting.oldest) else 0
    epochs = [
        piece.epoch
        for p, end in enumerate(rewriting.next)
        for piece in pieces(read.get(f"{stream}.{p}", Coverage()).replayed, first, end)
    ]
    if not any(epochs):
        return "none"
    return "all" if all(epochs) else "part"


def _lost_between(lineage: Lineage, at: int, later: int) -> bool:
    """Whether retention took records between two rewritings: which they had been before is not known."""
    for before, rewriting in zip(lineage.rewritings[at : later - 1], lineage.rewritings[at + 1 : later], strict=True):
        first = 1 if any(before.oldest) else 0
        if any(oldest > first for oldest in rewriting.oldest):
            return True
    return False


def _stream(source: str) -> str:
    return SystemStreamPartition.parse(source).qualified_stream
