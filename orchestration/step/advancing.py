"""Brings datasets up to date: all members of a version set in one go, independent ones at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.advance_report import StageEvent, ignore
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.orchestration.application.advance_units import Unit, advances_alone
from dagster_adjunct.resources.errors import CommitConflictError
from dagster_adjunct.resources.first_error import raise_first
from dagster_adjunct.resources.spark.given_session import IN_PROCESS
from dagster_adjunct.resources.spark.spark_errors import adjunct_error, first_line
from dagster_adjunct.resources.times import before

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport, OnStage
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.objects import Lake

# More at once would share the same cores, and hold more of the cluster's memory.
_AT_ONCE = 4


def advance_units(
    runtime: Runtime,
    units: Sequence[Unit],
    *,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
    on_stage: OnStage = ignore,
) -> list[AdvanceReport]:
    """Bring several units up to date at once, in threads of one Spark session; reports in order of declaration.

    A unit that fails keeps no other from advancing: the first error is raised in the end, and names the rest.
    `on_report` is called in order by this thread, `on_stage` by one thread at a time.
    """
    starting, telling = threading.Lock(), threading.Lock()

    def session() -> SparkSession:
        with starting:  # threads ask at the same time, and one session is started
            return runtime.spark()

    spark = IN_PROCESS if runtime.spark is IN_PROCESS else session

    def tell(event: StageEvent) -> None:
        with telling:
            on_stage(event)

    def advance(unit: Unit) -> list[AdvanceReport]:
        return advance_together(replace(runtime, spark=spark), unit, on_stage=tell)

    reports: list[AdvanceReport] = []
    errors: list[Exception] = []
    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="adjunct-advance")
    try:
        futures: list[Future[list[AdvanceReport]]] = [pool.submit(advance, unit) for unit in units]
        for future in futures:
            try:
                done = future.result()
            except Exception as error:  # noqa: BLE001 - told when the others have ended
                errors.append(adjunct_error(error) or error)
            else:
                for report in done:
                    on_report(report)
                reports += done
    finally:
        # After Ctrl-C nobody waits for the others: they end with the session.
        pool.shutdown(wait=False, cancel_futures=True)
    raise_first(errors, words=first_line)
    return reports


def follow_meanwhile(
    runtime: Runtime,
    app: Application,
    *,
    on_report: Callable[[AdvanceReport], None] = lambda report: None,
    on_stage: OnStage = ignore,
) -> None:
    """Advance those of the datasets that are not marked for bootstrap: they are followed while batches run.

    So are those that the application itself feeds: the next batch meets what this one has sent.

    Nothing is reported where nothing has come, nor where somebody else follows one too: the next batch meets what they
    have committed.
    """
    fed = {operator.spec.feeds for operator in app.operators}
    for dataset in app.datasets:
        followed = not dataset.bootstrap or dataset.name in fed
        if dataset.follows_changes and followed and advances_alone(dataset):
            with suppress(CommitConflictError):
                for report in advance_together(runtime, [dataset], on_stage=on_stage):
                    if report.changed:
                        on_report(report)


def advance_together(
    runtime: Runtime, unit: Sequence[AdjunctDataset], *, on_stage: OnStage = ignore
) -> list[AdvanceReport]:
    """Bring one dataset, or the members of one version set, up to date with their input; a report for each.

    Where a version was published, what the policy lets go by then is discarded: the last stage of its cycle.
    """
    from dagster_adjunct.assets.advancing.advance_dataset import advance
    from dagster_adjunct.assets.bounded.advance_versions import advance_members

    if unit[0].version_set is not None:
        reports = advance_members(runtime, unit, on_stage=on_stage)
    else:
        reports = [advance(runtime, unit[0], on_stage=on_stage)]
    told = zip(unit, reports, strict=True)
    return [discard_after(runtime.lake, dataset, report, runtime.by, on_stage) for dataset, report in told]


def _may_go(lake: Lake, dataset: AdjunctDataset) -> bool:
    """Whether a compaction has retired something long ago: a commit of changes alone makes nothing needless."""
    manifest = DatasetLog(lake, dataset.name).read()[1]
    limit = before(lake.now(), dataset.discard.grace)
    return manifest is not None and any(retired.at <= limit for retired in manifest.retired)


def discard_after(
    lake: Lake, dataset: AdjunctDataset, report: AdvanceReport, by: str, on_stage: OnStage
) -> AdvanceReport:
    """Discard what a new version has made needless; return the report with the time that this took."""
    from dagster_adjunct.orchestration.upkeep.discard_with_roots import discard_all

    if not report.sealed or (dataset.follows_changes and not _may_go(lake, dataset)):
        return report
    began = time.perf_counter()
    discard_all(lake, {dataset.name: dataset}, datasets=[dataset.name], by=by)
    took = time.perf_counter() - began
    on_stage(StageEvent(dataset.name, None, "discard", took))
    return replace(report, seconds={**report.seconds, "discard": took})
