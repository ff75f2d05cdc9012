"""Compares a plan with what Spark would do, without a run: nothing is read, written or begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.declaration.inputs_besides_streams import OwnedBy
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
from dagster_adjunct.orchestration.step.context.step_context import StepContext
from dagster_adjunct.orchestration.step.spark_proof.rehearsal import rehearse

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.writing.runtime import Runtime
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.step.spark_proof.physical_proof import PhysicalProof


def verify_plan(runtime: Runtime, app: Application, plan: ExecutionPlan) -> PhysicalProof:
    """Return what Spark would do with a batch of this application, over the dataset versions that are served now.

    A dataset without a version is taken for an empty one in its buckets. Raises what a run raises before its first
    batch for mistakes in expressions and functions, which are called with no records.
    """
    views = {dataset.name: _served(runtime, dataset) for dataset in app.datasets}
    return rehearse(StepContext(runtime, app, plan, FanOut()), views)


def _served(runtime: Runtime, dataset: AdjunctDataset) -> VersionReader | None:
    if isinstance(dataset.input, OwnedBy) or not dataset.following.persistent or not runtime.lake.exists():
        return None
    return StoredVersions(runtime.lake, dataset).current()
