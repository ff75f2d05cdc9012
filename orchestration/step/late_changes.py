"""Counts the changes of datasets that came after an application's joins had passed their time.

A batch passes the watermark of the dataset that its records wait for: records with times before it
were joined as if no earlier change could come. The commits of the dataset count, for each watermark
that was passed, the changes that came with earlier times. The next batch finds there how many came
since the batch before it, so that changes before the first batch are late for no join.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime

from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import Counters
from dagster_adjunct.orchestration.batch_log.intent import Intent, JoinedVersions, PassedTime
from dagster_adjunct.orchestration.operators.waiting import LATE_CHANGES, list_waits


def pass_watermarks(
    app: Application,
    joined: JoinedVersions,
    manifests: Mapping[str, UnboundedManifest],
    before: Mapping[str, PassedTime],
) -> JoinedVersions:
    """Return what a batch joins, with the times that its joins pass (`passed`) and the numbers of
    changes that came late since the batch before (`late`).

    `manifests` are those of the unbounded datasets that records wait for, and `before` has the
    times that earlier batches had passed, by dataset.
    """
    passed = {}
    late = {}
    for wait in list_waits(app.operators):
        manifest = manifests.get(wait.dataset)
        if manifest is None:
            continue
        last = before.get(wait.dataset)
        until = joined.known.get(wait.join)
        if last is not None:
            late[wait.dataset] = _count_since(last, manifest)
            until = last.until if until is None else max(until, last.until)
        if until is not None:
            # A watermark that the dataset does not count for is its newest one, which no change
            # has missed yet; or it is so old that `_count_since` goes by `all_late`.
            passed[wait.dataset] = PassedTime(
                until=until,
                late=_count_late(manifest, until) or 0,
                all_late=manifest.counters.get(LATE_CHANGES, 0),
            )
    return joined.model_copy(update={"passed": passed, "late": late})


def _count_since(last: PassedTime, manifest: UnboundedManifest) -> int:
    """Return how many changes came since the `last` batch with times that it had passed.

    The number is exact while the dataset still counts changes for that watermark. Otherwise it is
    the number of all changes that came late since then, which is not lower.
    """
    late = _count_late(manifest, last.until)
    if late is None:
        return max(manifest.counters.get(LATE_CHANGES, 0) - last.all_late, 0)
    return max(late - last.late, 0)


def _count_late(manifest: UnboundedManifest, until: datetime) -> int | None:
    """Return how many changes came with times before `until`, after the dataset's watermark had
    reached it; None if the dataset does not count them for this watermark, or no longer.
    """
    for mark in manifest.watermark.passed:
        if mark.until == until:
            return mark.late
    return None


def late_counters(app: Application, intent: Intent) -> Counters:
    """Return the number of late changes by join that waits, as counters; {} for a batch that reads
    records again, whose changes have been counted.
    """
    counters: Counters = {}
    if intent.reads_again:
        return counters
    for wait in list_waits(app.operators):
        if wait.dataset in intent.joined.late:
            counters[wait.join] = {LATE_CHANGES: intent.joined.late[wait.dataset]}
    return counters
