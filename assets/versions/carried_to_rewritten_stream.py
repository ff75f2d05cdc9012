"""Carries a dataset over to its stream as it was rewritten into other partitions (`repartition_stream`).

Only where it had read all of the old partitions: what it has not read, and what came after the rewriting, then are the
same. A table ordered by offset goes on with positions above all that it holds, for offsets begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    Change,
    CommonManifest,
    DatasetManifest,
    UnboundedManifest,
)
from dagster_adjunct.resources.errors import DatasetNotFoundError

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.resources.streams.interface.stream_system import StreamInfo

CARRY = "carry"
M = TypeVar("M", bound=CommonManifest)


def carried_over(manifest: M, info: StreamInfo) -> M | None:
    """Return the manifest at the same place of its stream as that is partitioned now; None where there is none.

    That is so unless the stream was rewritten just when the dataset had read all of it, and nothing was under way.
    """
    rewritten, stream = info.repartitioned, manifest.declaration.input
    if rewritten is None or info.identity is None or manifest.stream != rewritten.identity:
        return None
    if not has_read_all(manifest, rewritten.identity, rewritten.ended):
        return None
    now = {f"{stream}.{p}": offset for p, offset in enumerate(rewritten.went_on)}
    told = f"{stream} was repartitioned into {info.partitions}: goes on where it had read to"
    return manifest.after(
        declaration=manifest.declaration.model_copy(update={"input_partitions": info.partitions}),
        offsets=now,
        stream=info.identity,
        positions_from=manifest.positions_from + max(map(int, rewritten.ended), default=0),
        change=Change(action=CARRY, version=manifest.version.id if manifest.version else None, reason=told),
        **_of_its_kind(manifest, now),
    )


def _of_its_kind(manifest: CommonManifest, now: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of the one kind that are another after it."""
    if isinstance(manifest, UnboundedManifest):
        return {"bootstrap": manifest.bootstrap.model_copy(update={"start": now, "target": now})}
    assert isinstance(manifest, BoundedManifest)
    awaited = manifest.awaited
    if awaited is not None:  # of its version set: this member has delivered nothing of it
        awaited = awaited.model_copy(update={"missing": tuple(now)})
    # The counts of its markers were those of the old partitions: they contradict nothing.
    delivered = tuple(done.model_copy(update={"markers": {}}) for done in manifest.delivered)
    return {"awaited": awaited, "delivered": delivered}


def has_read_all(manifest: CommonManifest, identity: str, ends: tuple[str, ...]) -> bool:
    """Whether a dataset has read its stream up to these ends, and nothing of it is under way."""
    stream = manifest.declaration.input
    if isinstance(manifest, UnboundedManifest) and not manifest.is_settled:
        return False
    return manifest.stream == identity and manifest.offsets == {f"{stream}.{p}": end for p, end in enumerate(ends)}


def carry_over(log: DatasetLog, stream: str, info: StreamInfo, *, by: str) -> bool:
    """Commit that a dataset goes on in its stream as it is partitioned now; return whether it did."""
    done = False

    def carry(manifest: DatasetManifest) -> DatasetManifest | None:
        nonlocal done
        after = carried_over(manifest, info) if manifest.declaration.input == stream else None
        done = after is not None
        return after

    try:
        log.transact(carry, by=by)
    except DatasetNotFoundError:  # deleted meanwhile
        return False
    return done
