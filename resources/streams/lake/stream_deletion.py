"""Deletes a lake's stream for good; what is made anew under its name is another stream, and readers are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.objects.removal import (
    Swept,
    commit_deletion,
    is_deleted,
    objects_of,
    older_than,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams


def objects_in(streams: LakeStreams, stream: str) -> dict[str, int]:
    """Return what a deletion takes: all but the positions of named readers, which tell them of the deletion later."""
    log = streams.log(stream)
    return {key: size for key, size in objects_of(log).items() if not key.startswith(f"{log.prefix}/readers/")}


def delete(streams: LakeStreams, stream: str, seen: Commit, *, reason: str, by: str) -> Swept:
    """Delete the stream as it was `seen`, or what an interrupted deletion has left; return what went.

    Raises CommitConflictError where it has changed since. Who reads it at this moment fails over a missing file.
    """
    log = streams.log(stream)
    last = seen if is_deleted(seen) else commit_deletion(log, seen, reason=reason, by=by)
    sizes = objects_in(streams, stream)
    now = log.current()
    if now is None or now.id != last.id:
        return Swept(0, 0, left=True)  # made anew meanwhile: its `maintain` collects what is left of the one before
    # Nobody writes to a stream that is deleted: what was found while it still was is of before.
    keys = older_than(log, last, sizes)
    log.store.delete_many(keys)
    return Swept(len(keys), sum(sizes[key] for key in keys))
