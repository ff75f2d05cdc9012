"""Up to when a dataset is complete: its watermark, for joins that wait for it.

    newest time of the changes of each partition, and when it last had any (`ChangeTimes`)
    -> its watermark: newest - delay; or, if it is idle, when that was found - idle_after
    -> the dataset's watermark: the lowest of all partitions

Each commit also counts the changes that came after a watermark of an earlier one had passed their
time (`PassedMark`): who read the dataset at that watermark finds the number there.

A bounded dataset is complete up to the end of the version that is read, the newest one or the
current one: its `valid_from` + `valid_for`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from dagster_adjunct.assets.declaration.dataset import (
    AdjunctDataset,
    BoundedDataset,
    UnboundedDataset,
)
from dagster_adjunct.assets.declaration.policies import Watermark
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    ChangeTimes,
    DatasetManifest,
    PassedMark,
    UnboundedManifest,
)
from dagster_adjunct.assets.versions.version import datetime_from_micros
from dagster_adjunct.resources.times import add_span, subtract_span, to_microseconds

MAX_PASSED = 32
"""How many watermarks are kept of earlier commits, at most."""
_FIRST = to_microseconds(datetime(1, 1, 1, tzinfo=UTC))


def known_until(
    dataset: AdjunctDataset, manifest: DatasetManifest | None, *, over_time: bool = True
) -> datetime | None:
    """Return up to when a dataset is complete, as far as its manifest says; None if that is
    unknown, or without a manifest.

    For a bounded dataset that is the watermark of all its versions, or without `over_time` of the
    version served. While the table of an unbounded one is rebuilt it has none, because its manifest
    is ahead of what is served.
    """
    if isinstance(dataset, BoundedDataset) and isinstance(manifest, BoundedManifest):
        read: set[str | None]
        if over_time:
            read = {*manifest.versions_over_time}
        else:
            read = {manifest.served_id}
        return _versions_known_until(dataset.valid_for, manifest, read)
    if isinstance(dataset, UnboundedDataset) and isinstance(manifest, UnboundedManifest):
        return _changes_known_until(dataset.following.watermark, manifest)
    return None


def _versions_known_until(
    valid_for: timedelta | None, manifest: BoundedManifest, read: Collection[str | None]
) -> datetime | None:
    """Return the end of the newest of the sealed versions `read`, by id; None if none of them has a
    time, or without `valid_for`.
    """
    if valid_for is None:
        return None
    times = []
    for ref in manifest.sealed:
        if ref.id in read and ref.valid_from is not None:
            times.append(ref.valid_from)
    if not times:
        return None
    return add_span(max(times), valid_for)


def _changes_known_until(
    watermark: Watermark | None, manifest: UnboundedManifest
) -> datetime | None:
    """Return the lowest watermark of all partitions; None if one of them has none, or nothing is
    served.
    """
    is_served = manifest.version is not None and manifest.bootstrap.state == "done"
    if watermark is None or not is_served:
        return None
    times = manifest.watermark.times
    lowest: datetime | None = None
    for ssp in manifest.offsets:
        mark = _partition_known_until(watermark, times.get(ssp), manifest.confirmed_at)
        if mark is None:
            return None
        if lowest is None or mark < lowest:
            lowest = mark
    return lowest


def _partition_known_until(
    watermark: Watermark, times: ChangeTimes | None, confirmed: datetime | None
) -> datetime | None:
    """Return the watermark of one partition, None if it has none yet.

    It is `delay` before the newest time. An idle partition's is higher if the table was `confirmed`
    to be caught up later: it has had no changes for `idle_after`.
    """
    mark = None
    if times is not None and times.newest is not None:
        mark = subtract_span(times.newest, watermark.delay)
    if watermark.idle_after is None or confirmed is None:
        return mark
    quiet_until = subtract_span(confirmed, watermark.idle_after)
    is_idle = times is None or times.read_at <= quiet_until
    if is_idle and (mark is None or mark < quiet_until):
        return quiet_until
    return mark


def after_changes(
    watermark: Watermark,
    manifest: UnboundedManifest,
    newest: Mapping[str, int],
    read: Collection[str],
    now: datetime,
) -> dict[str, ChangeTimes]:
    """Return the times of the partitions after changes were read of the partitions `read`, whose
    `newest` times are these, in microseconds. Times later than the clock count as the clock's.

    No watermark goes back: that of a partition that was idle keeps its time until newer changes
    pass it, so that all changes that are late are counted.
    """
    times_before = manifest.watermark.times
    confirmed = None
    if manifest.bootstrap.state == "done":
        confirmed = manifest.confirmed_at
    after = dict(times_before)
    clock = to_microseconds(now)
    for ssp in read:
        times = []
        mark = _partition_known_until(watermark, times_before.get(ssp), confirmed)
        if mark is not None:
            times.append(add_span(mark, watermark.delay))
        if ssp in newest:
            micros = min(newest[ssp], clock)
            times.append(datetime_from_micros(max(micros, _FIRST)))
        after[ssp] = ChangeTimes(newest=max(times, default=None), read_at=now)
    return after


def passed_marks(dataset: UnboundedDataset, manifest: UnboundedManifest) -> tuple[PassedMark, ...]:
    """Return the watermarks that readers may have passed up to this manifest, its own included,
    oldest first.
    """
    passed = manifest.watermark.passed
    mark = known_until(dataset, manifest)
    if mark is not None and (not passed or passed[-1].until < mark):
        passed = (*passed, PassedMark(until=mark))
    return passed[-MAX_PASSED:]


def after_late(passed: Sequence[PassedMark], late: Sequence[int]) -> tuple[PassedMark, ...]:
    """Return the watermarks after further changes, of which `late` are late for each; () adds
    nothing to any of them.
    """
    if not late:
        return tuple(passed)
    after = []
    for mark, count in zip(passed, late, strict=True):
        after.append(mark.model_copy(update={"late": mark.late + count}))
    return tuple(after)
