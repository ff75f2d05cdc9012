"""Carries a dataset over to its stream as it was rewritten into other partitions (`repartition_stream`).

Only where it had read all of the old partitions: what it has not read, and what came after the rewriting, then are the
same. A table ordered by offset goes on with positions above all that it holds, for offsets begin anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dagster_adjunct.assets.versions.common_manifest import Change, CommonManifest
from dagster_adjunct.assets.versions.manifest import DatasetManifest
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
        **manifest.carried_to(now),
    )


def has_read_all(manifest: CommonManifest, identity: str, ends: tuple[str, ...]) -> bool:
    """Whether a dataset has read its stream up to these ends, and nothing of it is under way."""
    stream = manifest.declaration.input
    there = manifest.offsets == {f"{stream}.{p}": end for p, end in enumerate(ends)}
    return manifest.is_settled and manifest.stream == identity and there


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
