"""The assets of datasets: materialising one publishes what has been delivered, and reports what is served then."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckResult,
    AssetExecutionContext,
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    AssetsDefinition,
    AssetSpec,
    multi_asset,
)

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.assets.asset_events import (
    AssetEvent,
    check_outputs,
    known_version,
    passed_on,
    told,
)
from dagster_adjunct.orchestration.code_location.assets.bootstrap_check import (
    bootstrap_results,
    bootstrap_specs,
    unfinished_reported,
)
from dagster_adjunct.orchestration.code_location.assets.op_run import OpRun
from dagster_adjunct.orchestration.code_location.assets.validator_checks import (
    check_results,
    check_specs,
    judgement_of,
    mistakes_reported,
    rejection_metadata,
    rejection_warning,
)
from dagster_adjunct.orchestration.code_location.shared.asset_metadata import (
    DATA_VERSION_TAG,
    column_schema,
    dataset_metadata,
    lag_metadata,
    lineage_metadata,
    served_metadata,
    stream_metadata,
    version_metadata,
)
from dagster_adjunct.orchestration.code_location.shared.failures import clear_failures
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.orchestration.code_location.shared.row_preview import dataset_preview
from dagster_adjunct.orchestration.code_location.shared.shown_column_lineage import dataset_columns
from dagster_adjunct.resources.errors import CommitConflictError, TransientError
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.spark.given_session import starter_of
from dagster_adjunct.resources.spark.resource import SparkResource

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.resources.objects import Lake

# Another run that was faster leaves nothing to do, or less: decide again.
RETRIED = (TransientError, CommitConflictError)
Results = Iterator[AssetEvent | AssetCheckResult]


@dataclass(frozen=True, slots=True)
class DatasetAsset:
    """A dataset and the asset that it becomes; `streams` has the asset of its input stream, if it has one.

    `preview_rows` is how many entries are shown with each materialisation.
    """

    dataset: "AdjunctDataset"
    spec: AssetSpec
    streams: Mapping[str, AssetKey]
    preview_rows: int = 0

    @property
    def key(self) -> AssetKey:
        return self.spec.key


def dataset_assets(unit: Sequence[DatasetAsset], applications: "Sequence[Application]" = ()) -> AssetsDefinition:
    """Return the asset that brings a dataset up to date with its input, or those of a version set, in one op.

    Without a version there is nothing to materialise: the run then says which markers are awaited, and what
    needs the dataset is skipped. Only a dataset with bootstrap=False lets its application run before. Where the version
    served is the one that Dagster knows of, it is observed, and what is downstream runs. A version that is rejected is
    an observation of its own, and a failed check. Members of a version set are
    published together, whichever of them are selected. With only checks selected, nothing advances: they are
    reported again. The check `bootstrapped` of a change stream's table holds back what is downstream. Startpoints that
    the `applications` which declare a dataset have for its stream are applied first.
    """
    datasets = tuple(member.dataset for member in unit)
    checks = [
        spec
        for member in unit
        for spec in (*check_specs(member.dataset, member.key), *bootstrap_specs(member.dataset, member.key))
    ]
    set_name = datasets[0].version_set
    kind, name = ("version_set", set_name) if set_name else ("dataset", datasets[0].name)

    @multi_asset(
        name=dagster_name(f"{kind}_{name}"),
        specs=[member.spec.replace_attributes(skippable=True) for member in unit],
        check_specs=checks,
        # Makes the checks' outputs optional: a run in which no version was judged has none.
        can_subset=bool(checks),
        pool=f"adjunct/{kind.replace('_', '-')}/{name}",
    )
    def advance(context: AssetExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource) -> Results:
        from dagster_adjunct.assets.writing.runtime import Runtime
        from dagster_adjunct.orchestration.planner.lake_catalog import systems_for, systems_of
        from dagster_adjunct.orchestration.step.advancing import advance_together
        from dagster_adjunct.orchestration.step.run_application import apply_startpoints

        keys = {member.dataset.name: member.key for member in unit}
        with clear_failures(context, retry=RETRIED), mistakes_reported(context, keys):
            lake = adjunct_lake.open()
            run = OpRun(context, lake, systems_of(datasets, lake))
            reports: dict[str, AdvanceReport] = {}
            if context.selected_asset_keys:
                observe(run, {name: key for member in unit for name, key in member.streams.items()})
                with unfinished_reported(run, [(member.dataset, member.key) for member in unit]):
                    runtime = Runtime(lake, run.systems, starter_of(adjunct_spark.starter), by=context.run.run_id)
                    for app in applications:
                        apply_startpoints(
                            replace(runtime, systems=systems_for(app, lake)),
                            app,
                            only=set(keys),
                            on_report=lambda report: context.log.info(report.summary()),
                        ).raise_failed()
                    done = advance_together(runtime, datasets, on_stage=run.tell)
                reports = {report.dataset: report for report in done}
            results = [result for member in unit for result in _results(run, member, reports.get(member.dataset.name))]
        yield from results
        checked = [result for result in results if isinstance(result, AssetCheckResult)]
        yield from check_outputs(context, {(result.asset_key, result.check_name) for result in checked})

    return advance


def _results(run: OpRun, member: DatasetAsset, report: "AdvanceReport | None") -> Results:
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions

    store = StoredVersions(run.lake, member.dataset)
    manifest = store.manifest()
    if report is not None:
        warn_of_rejected(run.context, member, report, manifest)
        yield from _materialised(run, member, report, manifest)
    yield from bootstrap_results(run, member.dataset, member.key, manifest, report)
    if manifest is not None and not member.dataset.follows_changes:
        yield from check_results(run.context, member.dataset, member.key, judgement_of(store, manifest))


def _materialised(
    run: OpRun, member: DatasetAsset, report: "AdvanceReport", manifest: "DatasetManifest | None"
) -> Results:
    """Report the version served after this run, whoever chose it: a rollback by hand shows with the next run.

    A table with a freshness policy is materialised by each look at its stream, because Dagster counts nothing else.
    """
    from dagster_adjunct.assets.unbounded.table_lag import PlaceInStream
    from dagster_adjunct.assets.versions.manifest import follower

    context = run.context
    metadata = dataset_metadata(report, uri_of(run.lake, member.dataset)) | shown_metadata(run, member, manifest)
    if manifest is not None:
        metadata |= version_metadata(manifest)
        table = follower(manifest)
        if table is not None:
            metadata |= lag_metadata(PlaceInStream.of(run.systems, table).lags(run.lake.now()))
    if report.version is None:
        context.log.warning(report.summary())
        context.log_event(AssetObservation(member.key, description=report.summary(), metadata=metadata))
        if not member.dataset.bootstrap and member.key in context.selected_asset_keys:
            yield passed_on(context, member.key)
        return
    context.log.info(report.summary())
    always = member.spec.freshness_policy is not None
    yield from told(context, member.key, report.version, metadata, report.summary(), always=always)


def shown_metadata(run: OpRun, member: DatasetAsset, manifest: "DatasetManifest | None") -> dict[str, Any]:
    """Return what people look at: columns with their descriptions and what they are made of, and some entries."""
    from dagster_adjunct.assets.reading.open_dataset import open_dataset

    dataset, version = member.dataset, manifest.version if manifest else None
    if version is None:
        return {}
    records = None
    for stream in member.streams:
        system, name = split_stream_name(stream)
        schema = run.systems[system].info(name).schema
        records = None if schema is None else schema.names
    source = next((dep.asset_key for dep in member.spec.deps), None)
    metadata: dict[str, Any] = {
        "dagster/column_schema": column_schema(version.columns, dict(dataset.column_descriptions)),
        **lineage_metadata(dataset_columns(dataset, version.columns.names, records), lambda node: source),
    }
    if not member.preview_rows:
        return metadata
    with open_dataset(run.lake, dataset.name, version=version.id, lease=False) as opened:
        return metadata | dataset_preview(opened, member.preview_rows, dataset.sensitive)


def warn_of_rejected(
    context: AssetExecutionContext,
    member: DatasetAsset,
    report: "AdvanceReport",
    manifest: "DatasetManifest | None",
) -> None:
    """Say what was rejected, why, and what can be done about it: in the run's log, and as an event of the asset.

    So is told what validators warn of, in the log.
    """
    for warning in report.warnings:
        context.log.warning(f"dataset {report.dataset}: {warning}")
    for version in report.rejected:
        ref = manifest.ref(version) if manifest else None
        if ref is not None:
            text = rejection_warning(report.dataset, ref, report.version)
            context.log.warning(text)
            metadata = rejection_metadata(ref, report.version)
            partition = ref.name if member.dataset.versions is not None else None
            context.log_event(AssetObservation(member.key, partition=partition, description=text, metadata=metadata))


def observe(run: OpRun, streams: Mapping[str, AssetKey]) -> None:
    """Tell Dagster what the streams hold as this run finds them."""
    for name, key in streams.items():
        metadata = stream_metadata(run.lake, run.systems, name)
        if metadata is not None:
            run.context.log_event(AssetObservation(key, metadata=metadata))


def report_served(run: OpRun, dataset: "AdjunctDataset", key: AssetKey) -> None:
    """Report the version that a dataset serves, if it is another one than Dagster knows of."""
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions

    manifest = StoredVersions(run.lake, dataset).manifest()
    if manifest is None or manifest.version is None:
        return
    if known_version(run.context, key) != manifest.version.id:
        tags = {DATA_VERSION_TAG: manifest.version.id}
        metadata = served_metadata(manifest, uri_of(run.lake, dataset))
        run.context.log_event(AssetMaterialization(key, metadata=metadata, tags=tags))


def uri_of(lake: "Lake", dataset: "AdjunctDataset") -> str:
    """Return where a dataset lies."""
    return f"{lake.url}/{lake.dataset_prefix(dataset.name)}"
