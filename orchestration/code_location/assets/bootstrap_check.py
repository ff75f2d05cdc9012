"""The check `bootstrapped` of a change stream's table: whether what it serves is a consistent snapshot.

The op that bootstraps reports it. It is blocking: where it fails as an error, nothing downstream runs. The step of an
application holds back its main input by itself, whoever runs it; the check shows it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckEvaluation,
    AssetCheckResult,
    AssetCheckSeverity,
    AssetCheckSpec,
    AssetExecutionContext,
    AssetKey,
    MetadataValue,
)

from dagster_adjunct.orchestration.code_location.assets.op_run import OpRun
from dagster_adjunct.resources.errors import AdjunctError

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.unbounded.bootstrap_progress import BootstrapProgress
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.unbounded_state import Decision

BOOTSTRAPPED = "bootstrapped"


def bootstrap_specs(dataset: "AdjunctDataset", key: AssetKey) -> list[AssetCheckSpec]:
    """Return the check of a dataset that is marked for bootstrap; none for others."""
    if not _marked(dataset):
        return []
    text = "The table has reached the ends that its stream had when its bootstrap began; others wait for it."
    return [AssetCheckSpec(BOOTSTRAPPED, asset=key, description=text, blocking=True)]


def bootstrap_results(
    run: OpRun,
    dataset: "AdjunctDataset",
    key: AssetKey,
    manifest: "DatasetManifest | None",
    report: "AdvanceReport | None",
) -> Iterator[AssetCheckResult]:
    """Yield the check's result, where the run has selected it; `report` is None where nothing has advanced."""
    from dagster_adjunct.assets.unbounded.bootstrap_progress import bootstrap_progress
    from dagster_adjunct.assets.versions.manifest import as_unbounded

    if not _marked(dataset) or not _selected(run.context, key):
        return
    table = None if manifest is None else as_unbounded(manifest)
    progress = None if table is None else bootstrap_progress(run.systems, table, run.lake.now())
    decision = report.decision if report is not None else table.decision if table is not None else None
    stale = decision is not None and decision.action == "serve-stale"
    served = table is not None and table.version is not None
    yield AssetCheckResult(
        asset_key=key,
        check_name=BOOTSTRAPPED,
        passed=served and not stale,
        # Where it is declared that a stale table is served, it is: readers are warned, and not held back.
        severity=AssetCheckSeverity.WARN if served else AssetCheckSeverity.ERROR,
        description=_description(progress, decision),
        metadata=_metadata(progress, decision, report),
    )


@contextmanager
def unfinished_reported(run: OpRun, datasets: "Sequence[tuple[AdjunctDataset, AssetKey]]") -> Iterator[None]:
    """Report a bootstrap that an error has ended before its target as failed, and let the error fail the run."""
    try:
        yield
    except Exception as error:
        for dataset, key in datasets:
            if _marked(dataset) and _selected(run.context, key):
                evaluation = _unfinished(run, dataset, key, error)
                if evaluation is not None:
                    # A result would be an output, and a step that fails has none.
                    run.context.log_event(evaluation)
        raise


def _unfinished(run: OpRun, dataset: "AdjunctDataset", key: AssetKey, error: Exception) -> AssetCheckEvaluation | None:
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.unbounded.bootstrap_progress import bootstrap_progress
    from dagster_adjunct.assets.versions.manifest import as_unbounded

    table, progress, looked = None, None, ""
    try:
        manifest = StoredVersions(run.lake, dataset.name).manifest()
        table = None if manifest is None else as_unbounded(manifest)
        progress = None if table is None else bootstrap_progress(run.systems, table, run.lake.now())
    except AdjunctError as unread:  # what made the run fail may keep us from looking, too
        looked = f"; how far it was can't be seen: {unread.problem}"
    if progress is not None and progress.state == "done":
        return None
    decision = None if table is None else table.decision
    return AssetCheckEvaluation(
        asset_key=key,
        check_name=BOOTSTRAPPED,
        passed=False,
        severity=AssetCheckSeverity.ERROR,
        description=f"{_description(progress, decision)}{looked}. It ended with: {error}",
        metadata=_metadata(progress, decision, None),
        blocking=True,
    )


def _description(progress: "BootstrapProgress | None", decision: "Decision | None") -> str:
    if progress is None:
        return "The bootstrap has not begun"
    if decision is not None and decision.action == "serve-stale":
        return f"What is served is stale, as is declared: {decision.reason}"
    if progress.state == "running":
        return f"The bootstrap has not reached its target: {progress.summary()}"
    return f"Bootstrap {progress.summary()}"


def _metadata(
    progress: "BootstrapProgress | None", decision: "Decision | None", report: "AdvanceReport | None"
) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if progress is not None:
        metadata |= {
            "adjunct/per_cent": progress.per_cent,
            "adjunct/seconds": round(progress.seconds, 3),
            "adjunct/bootstrap": MetadataValue.json(progress.to_json()),
        }
    if decision is not None:
        metadata["adjunct/decision"] = MetadataValue.json(decision.model_dump(mode="json"))
    if report is not None and report.action == "bootstrapped":
        metadata["adjunct/records"] = report.counters.get("read", 0) + report.counters.get("loaded", 0)
    return metadata


def _marked(dataset: "AdjunctDataset") -> bool:
    return dataset.follows_changes and dataset.bootstrap


def _selected(context: AssetExecutionContext, key: AssetKey) -> bool:
    return any((check.asset_key, check.name) == (key, BOOTSTRAPPED) for check in context.selected_asset_check_keys)
