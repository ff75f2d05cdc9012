"""Which runs work on an application."""

from __future__ import annotations

from collections.abc import Collection

from dagster import AssetKey, DagsterInstance, DagsterRun, DagsterRunStatus, RunsFilter

ACTIVE = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


def concerns(run: DagsterRun, job: str, assets: Collection[AssetKey]) -> bool:
    """Whether a run works on the application: its own job, or its assets materialised by hand."""
    return run.job_name == job or any(key in assets for key in run.asset_selection or ())


def in_progress(instance: DagsterInstance, job: str, assets: Collection[AssetKey]) -> bool:
    """Whether a run of this job, or to one of these assets, is on its way or waits in the queue."""
    runs = instance.get_runs(RunsFilter(statuses=ACTIVE), limit=1000)
    return any(concerns(run, job, assets) for run in runs)


def has_ended(instance: DagsterInstance, run_id: str) -> bool:
    """Whether a run has ended, as this instance says; False of one that it does not know."""
    run = instance.get_run_by_id(run_id)
    return run is not None and run.is_finished
