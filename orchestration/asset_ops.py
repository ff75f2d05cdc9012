"""What happens when an asset is materialised: a dataset advances, an application's step runs."""

import hashlib
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetExecutionContext,
    AssetKey,
    AssetObservation,
    AssetsDefinition,
    AssetSpec,
    DataVersion,
    MaterializeResult,
    multi_asset,
)

from orchestration.failures import clear_failures
from orchestration.lake_resource import LakeResource
from orchestration.lineage import Node
from orchestration.metadata import dataset_metadata, output_metadata, step_metadata, stream_metadata, table_metadata
from resources.errors import CommitConflict, TransientError
from resources.spark import SparkResource

if TYPE_CHECKING:
    from assets.dataset import AdjunctDataset
    from orchestration.application import Application
    from orchestration.step import StepEvent
    from resources.objects import Lake
    from resources.streams import StreamSystem

# What the step does, for whoever follows it from outside of Dagster; records carry the event itself.
_log = logging.getLogger("adjunct.step")


def dataset_asset(
    app: "Application", dataset: "AdjunctDataset", spec: AssetSpec, streams: Mapping[str, AssetKey]
) -> AssetsDefinition:
    """Return the asset that brings a dataset up to date with its input; `streams` has the asset of its input stream.

    Without a version there is nothing to materialise: the run then says which markers are awaited, and what
    needs the dataset is skipped. Only a dataset with bootstrap=False lets its application run before.
    """

    @multi_asset(
        name=f"dataset_{dataset.name}".replace("-", "_"),
        specs=[spec.replace_attributes(skippable=True)],
        pool=f"adjunct/dataset/{dataset.name}",
    )
    def advance(
        context: AssetExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource
    ) -> Iterator[MaterializeResult[Any]]:
        from assets import advance_dataset
        from orchestration.catalog import systems_for

        # Another run that was faster leaves nothing to do, or less: decide again.
        with clear_failures(context, retry=(TransientError, CommitConflict)):
            lake = adjunct_lake.open()
            systems = systems_for(app, lake)
            _observe(context, lake, systems, streams)
            report = advance_dataset(lake, systems, dataset, lambda: adjunct_spark.spark_session, by=context.run.run_id)
            uri = f"{lake.url}/{lake.dataset_prefix(dataset.name)}"
        metadata = dataset_metadata(report, uri)
        if report.version is None:
            context.log.warning(report.summary())
            context.log_event(AssetObservation(spec.key, description=report.summary(), metadata=metadata))
            if dataset.bootstrap:
                return
        else:
            context.log.info(report.summary())
        version = DataVersion(report.version) if report.version else None
        yield MaterializeResult(asset_key=spec.key, metadata=metadata, data_version=version)

    return advance


def outputs_asset(
    app: "Application", outputs: Mapping[Node, AssetSpec], inputs: Mapping[str, AssetKey]
) -> AssetsDefinition:
    """Return the multi-asset of all that an application writes: one run of its step materialises all.

    `inputs` are the assets of its input streams. Before the first batch there is no output to materialise.
    """

    @multi_asset(
        name=f"{app.name}_step".replace("-", "_"),
        specs=[spec.replace_attributes(skippable=True) for spec in outputs.values()],
        pool=f"adjunct/application/{app.name}",
        description=app.description or None,
    )
    def step(
        context: AssetExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource
    ) -> Iterator[MaterializeResult[Any]]:
        from orchestration.catalog import systems_for
        from orchestration.run import plan_application
        from orchestration.step import StepContext, run_step
        from orchestration.tables import remember_tables

        def log(event: "StepEvent") -> None:
            context.log.info(event.summary())
            _log.info(event.summary(), extra={"adjunct_event": event})

        with clear_failures(context):
            lake = adjunct_lake.open()
            systems = systems_for(app, lake)
            _observe(context, lake, systems, inputs)
            planned = plan_application(app, systems)
            remember_tables(lake, app, by=context.run.run_id)
            report = run_step(
                StepContext(lake, systems, app, planned, lambda: adjunct_spark.spark_session, context.run.run_id, log)
            )
            described = {
                node: stream_metadata(lake, systems, node.name)
                if node.kind == "stream"
                else table_metadata(app.tables[node.name])
                for node in outputs
            }
        if not report.state.batch:
            context.log.warning(f"{app.name} has run no batch yet: its inputs hold no records.")
            return
        version = DataVersion(hashlib.sha256(f"{app.name}:{report.state.batch}".encode()).hexdigest()[:16])
        for node, spec in outputs.items():
            metadata = step_metadata(report) | output_metadata(report, node.name) | (described[node] or {})
            yield MaterializeResult(asset_key=spec.key, metadata=metadata, data_version=version)

    return step


def _observe(
    context: AssetExecutionContext,
    lake: "Lake",
    systems: Mapping[str, "StreamSystem"],
    streams: Mapping[str, AssetKey],
) -> None:
    """Tell Dagster what the streams hold as this run finds them."""
    for name, key in streams.items():
        found = stream_metadata(lake, systems, name)
        if found is not None:
            context.log_event(AssetObservation(key, metadata=found))
