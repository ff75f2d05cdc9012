"""A look at an application's streams that may take several ticks: it stops at a deadline and goes on from there.

First every stream is looked at once, for what waits in it. Only where that is too few records to launch a run,
partitions are asked, one after the other, for the age of their first unread record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import Field as Default

from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.stored_documents import StoredDocument
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


class StreamFinding(StoredDocument):
    """What a look has found in one stream: offsets to be read, a reason for a run without them, and its ends.

    `ends` is a digest, of a stream that feeds a dataset; "" otherwise.
    """

    lag: int = 0
    due: str = ""
    ends: str = ""


class Look(StoredDocument):
    """What a look has found so far.

    `of` is the application's last commit: after another one the look begins anew. `streams` has what was found by
    stream. `young` is the last partition whose first unread record was found young enough, in order of partitions.
    """

    of: str = ""
    streams: Mapping[str, StreamFinding] = Default(default_factory=dict)
    young: str = ""

    @property
    def lag(self) -> int:
        return sum(stream.lag for stream in self.streams.values())

    @property
    def due(self) -> tuple[str, ...]:
        return tuple(stream.due for stream in self.streams.values() if stream.due)

    @property
    def ends(self) -> dict[str, str]:
        return {name: stream.ends for name, stream in self.streams.items() if stream.ends}


@dataclass
class Deadline:
    """Until when a tick works; `clock` is in seconds. What it begins with is never refused, so that each gets on."""

    at: float
    clock: Callable[[], float]
    begun: bool = field(default=False, init=False)

    def passed(self) -> bool:
        """Whether to stop before the next piece of work."""
        begun, self.begun = self.begun, True
        return begun and self.clock() >= self.at


def look_at_streams(
    look: Look, streams: Sequence[str], visit: Callable[[str], StreamFinding], deadline: Deadline
) -> tuple[Look, bool]:
    """Visit the streams that were not looked at yet; return the look, and whether it has all of them."""
    visited = dict(look.streams)
    for name in streams:
        if name in visited:
            continue
        if deadline.passed():
            return look.model_copy(update={"streams": visited}), False
        visited[name] = visit(name)
    return look.model_copy(update={"streams": visited}), True


def look_at_ages(
    look: Look,
    unread: Callable[[str], Mapping[SystemStreamPartition, str]],
    is_old: Callable[[SystemStreamPartition, str], bool],
    deadline: Deadline,
) -> tuple[Look, SystemStreamPartition | None, bool]:
    """Ask partitions in which something waits for the age of the first; stop at one that is old.

    `unread` gives a stream's partitions with the next offset of each. Returns the look, the partition with an old
    record, and whether the deadline left nothing unasked.
    """
    done = SystemStreamPartition.parse(look.young) if look.young else None
    for name in sorted((name for name, stream in look.streams.items() if stream.lag), key=split_stream_name):
        if done is not None and split_stream_name(name) < (done.system, done.stream):
            continue
        for ssp, start in sorted(unread(name).items()):
            if done is not None and ssp <= done:
                continue
            if deadline.passed():
                return look, None, False
            if is_old(ssp, start):
                return look, ssp, True
            look = look.model_copy(update={"young": str(ssp)})
    return look, None, True
