"""Assets of datasets: materializing one publishes what was delivered, and reports the served version."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dagster import (
    AssetCheckEvaluation,
    AssetCheckResult,
    AssetExecutionContext,
    AssetKey,
    AssetMaterialization,
    AssetObservation,
    AssetsDefinition,
    AssetSpec,
    BackfillPolicy,
    Config,
    DagsterInstance,
    DailyPartitionsDefinition,
    DataVersion,
    DynamicPartitionsDefinition,
    MaterializeResult,
    MetadataValue,
    OpExecutionContext,
    Output,
    PartitionsDefinition,
    StaticPartitionsDefinition,
    define_asset_job,
    in_process_executor,
    multi_asset,
)
from dagster._core.definitions.source_asset import SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from pydantic import Field

from dagster_adjunct.assets.advancing.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import natural_sort_key
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.progress import StreamPosition
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_follower
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.assets.writing.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.code_location.checks import (
    OpRun,
    bootstrap_check_results,
    bootstrap_check_specs,
    newest_verdicts,
    rejection_metadata,
    rejection_warning,
    report_unfinished_bootstrap,
    report_validator_errors,
    validator_check_results,
    validator_check_specs,
)
from dagster_adjunct.orchestration.code_location.metadata import (
    DATA_VERSION_TAG,
    column_schema,
    dataset_columns,
    dataset_metadata,
    dataset_preview,
    lag_metadata,
    lineage_metadata,
    served_metadata,
    stream_metadata,
    translate_errors,
    version_metadata,
)
from dagster_adjunct.orchestration.code_location.resources import LakeResource
from dagster_adjunct.orchestration.planner.planner import open_dataset_systems, systems_for
from dagster_adjunct.orchestration.step.run import advance_unit, apply_startpoints
from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import CommitConflictError, TransientError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.session import SparkResource

AssetEvent = MaterializeResult[Any] | AssetMaterialization | Output[None]


def last_data_version(context: AssetExecutionContext | OpExecutionContext, key: AssetKey) -> str | None:
    """Return the data version of the asset's newest materialization, None before the first."""
    known = context.instance.get_latest_materialization_event(key)
    tags = known.asset_materialization.tags if known and known.asset_materialization else None
    return (tags or {}).get(DATA_VERSION_TAG)


def report_version(
    context: AssetExecutionContext,
    key: AssetKey,
    version: str,
    metadata: Mapping[str, Any],
    description: str,
    *,
    always: bool = False,
) -> Iterator[AssetEvent]:
    """Yield the event that reports the asset's data version to Dagster.

    A changed version (or `always`) is a materialization. An unchanged one is an observation, so that automation is not
    triggered, while downstream assets of this run still execute.
    """
    selected = key in context.selected_asset_keys
    if not always and last_data_version(context, key) == version:
        context.log_event(
            AssetObservation(key, description=description, metadata=metadata, tags={DATA_VERSION_TAG: version})
        )
        if selected:
            yield output_without_materialization(context, key)
    elif selected:
        yield MaterializeResult(asset_key=key, metadata=metadata, data_version=DataVersion(version))
    else:
        # Not selected, but built together with a selected asset, like members of a version set.
        yield AssetMaterialization(key, metadata=metadata, tags={DATA_VERSION_TAG: version})


def output_without_materialization(context: AssetExecutionContext, key: AssetKey) -> Output[None]:
    """Return an asset's output without a materialization, so that downstream assets of the run are not skipped.

    Dagster creates a materialization for each output, except for those with the mark of observable source assets.
    """
    name = context.assets_def.get_output_name_for_asset_key(key)
    return Output(None, output_name=name, metadata={SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION: True})


def missing_check_outputs(
    context: AssetExecutionContext, evaluated: set[tuple[AssetKey | None, str | None]]
) -> Iterator[Output[None]]:
    """Yield outputs for selected checks that were not evaluated, because Dagster expects one for each."""
    for check in context.selected_asset_check_keys:
        if (check.asset_key, check.name) not in evaluated:
            yield Output(None, output_name=context.assets_def.get_output_name_for_asset_check_key(check))


# After a conflict with a faster run, less or nothing is left to do, so the op decides again.
RETRYABLE = (TransientError, CommitConflictError)
Results = Iterator[AssetEvent | AssetCheckResult]


@dataclass(frozen=True, slots=True)
class DatasetAsset:
    """A dataset and its asset; `streams` has the asset of its input stream, if it has one.

    `preview_rows` is the number of entries shown with each materialization.
    """

    dataset: AdjunctDataset
    spec: AssetSpec
    streams: Mapping[str, AssetKey]
    preview_rows: int = 0

    @property
    def key(self) -> AssetKey:
        return self.spec.key


def dataset_assets(unit: Sequence[DatasetAsset], applications: Sequence[Application] = ()) -> AssetsDefinition:
    """Return the asset, or the assets of a version set, that one op brings up to date with their input.

    Without a version nothing is materialized: the run logs which markers are awaited, and downstream assets are
    skipped, unless the dataset has bootstrap=False. If Dagster knows the served version already, it is observed, and
    downstream assets run. A rejected version is an observation of its own and a failed check. Members of a version set
    are published together, whichever of them are selected. With only checks selected, nothing advances, and they are
    reported again. Startpoints of the `applications` for a dataset's stream are applied first.
    """
    datasets = tuple(member.dataset for member in unit)
    checks = [
        spec
        for member in unit
        for spec in (
            *validator_check_specs(member.dataset, member.key),
            *bootstrap_check_specs(member.dataset, member.key),
        )
    ]
    set_name = datasets[0].version_set
    kind, name = ("version_set", set_name) if set_name else ("dataset", datasets[0].name)

    @multi_asset(
        name=to_dagster_name(f"{kind}_{name}"),
        specs=[member.spec.replace_attributes(skippable=True) for member in unit],
        check_specs=checks,
        # Makes the checks' outputs optional: a run may validate no version.
        can_subset=bool(checks),
        pool=f"adjunct/{kind.replace('_', '-')}/{name}",
    )
    def advance(context: AssetExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource) -> Results:
        keys = {member.dataset.name: member.key for member in unit}
        with translate_errors(context, retry=RETRYABLE), report_validator_errors(context, keys):
            lake = adjunct_lake.open()
            run = OpRun(context, lake, open_dataset_systems(datasets, lake))
            reports: dict[str, AdvanceReport] = {}
            if context.selected_asset_keys:
                observe_streams(run, {name: key for member in unit for name, key in member.streams.items()})
                with report_unfinished_bootstrap(run, keys):
                    runtime = Runtime(lake, run.systems, session_factory(adjunct_spark.starter), by=context.run.run_id)
                    for app in applications:
                        apply_startpoints(
                            replace(runtime, systems=systems_for(app, lake=lake)),
                            app,
                            only=set(keys),
                            on_report=lambda report: context.log.info(report.summary()),
                        ).raise_failed()
                    done = advance_unit(runtime, datasets, on_stage=run.log_event)
                reports = {report.dataset: report for report in done}
            results = [
                result for member in unit for result in _dataset_results(run, member, reports.get(member.dataset.name))
            ]
        yield from results
        checked = [result for result in results if isinstance(result, AssetCheckResult)]
        yield from missing_check_outputs(context, {(result.asset_key, result.check_name) for result in checked})

    return advance


def _dataset_results(run: OpRun, member: DatasetAsset, report: AdvanceReport | None) -> Results:
    store = StoredVersions(run.lake, member.dataset)
    manifest = store.manifest()
    if report is not None:
        log_rejected_versions(run.context, member, report, manifest)
        yield from _dataset_events(run, member, report, manifest)
    yield from bootstrap_check_results(run, member.key, manifest, report)
    if manifest is not None and not member.dataset.follows_changes:
        yield from validator_check_results(run.context, member.dataset, member.key, newest_verdicts(store, manifest))


def _dataset_events(
    run: OpRun, member: DatasetAsset, report: AdvanceReport, manifest: DatasetManifest | None
) -> Results:
    """Report the version served after this run, whoever chose it: a rollback by hand shows with the next run.

    A table with a freshness policy is materialised by each look at its stream, because Dagster counts nothing else.
    """
    context = run.context
    metadata = dataset_metadata(report, dataset_uri(run.lake, member.dataset)) | display_metadata(run, member, manifest)
    if manifest is not None:
        metadata |= version_metadata(manifest)
        table = as_follower(manifest)
        if table is not None:
            metadata |= lag_metadata(StreamPosition.of(run.systems, table).lags(run.lake.now()))
    if report.version is None:
        context.log.warning(report.summary())
        context.log_event(AssetObservation(member.key, description=report.summary(), metadata=metadata))
        if not member.dataset.bootstrap and member.key in context.selected_asset_keys:
            yield output_without_materialization(context, member.key)
        return
    context.log.info(report.summary())
    always = member.spec.freshness_policy is not None
    yield from report_version(context, member.key, report.version, metadata, report.summary(), always=always)


def display_metadata(run: OpRun, member: DatasetAsset, manifest: DatasetManifest | None) -> dict[str, Any]:
    """Return metadata for display: columns with descriptions and lineage, and some entries."""
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


def log_rejected_versions(
    context: AssetExecutionContext,
    member: DatasetAsset,
    report: AdvanceReport,
    manifest: DatasetManifest | None,
) -> None:
    """Report rejected versions in the run's log and as events of the asset; log warnings of validators."""
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


def observe_streams(run: OpRun, streams: Mapping[str, AssetKey]) -> None:
    """Log an observation of what each stream holds now."""
    for name, key in streams.items():
        metadata = stream_metadata(run.lake, run.systems, name)
        if metadata is not None:
            run.context.log_event(AssetObservation(key, metadata=metadata))


def report_served_version(run: OpRun, dataset: AdjunctDataset, key: AssetKey) -> None:
    """Report the version that a dataset serves if it differs from the one that Dagster knows."""
    manifest = StoredVersions(run.lake, dataset).manifest()
    if manifest is None or manifest.version is None:
        return
    if last_data_version(run.context, key) != manifest.version.id:
        tags = {DATA_VERSION_TAG: manifest.version.id}
        metadata = served_metadata(manifest, dataset_uri(run.lake, dataset))
        run.context.log_event(AssetMaterialization(key, metadata=metadata, tags=tags))


def dataset_uri(lake: Lake, dataset: AdjunctDataset) -> str:
    """Return the URI of a dataset."""
    return f"{lake.url}/{lake.dataset_prefix(dataset.name)}"


def dagster_partitions(dataset: AdjunctDataset) -> PartitionsDefinition[str]:
    """Return the partitions of a dataset that declares them. Days begin at midnight UTC.

    Versions without a declared list are dynamic partitions, `adjunct/<dataset>`; runs add what they publish.
    """
    declared = dataset.versions
    assert declared is not None
    if declared.by == "day":
        assert declared.start is not None
        # Reference data of a day is often delivered on that day, so the current day is a partition too.
        return DailyPartitionsDefinition(start_date=declared.start, end_offset=1)
    if declared.names:
        return StaticPartitionsDefinition(sorted(declared.names, key=natural_sort_key))
    return DynamicPartitionsDefinition(name=f"adjunct/{dataset.name}")


def ensure_partitions(dataset: AdjunctDataset, instance: DagsterInstance, names: Iterable[str]) -> list[str]:
    """Return the version names that are partitions; dynamic partitions are created for new names."""
    partitions = dagster_partitions(dataset)
    wanted = list(dict.fromkeys(names))
    if not isinstance(partitions, DynamicPartitionsDefinition):
        there = set(partitions.get_partition_keys())
        return [name for name in wanted if name in there]
    there = set(instance.get_dynamic_partitions(str(partitions.name)))
    missing = [name for name in wanted if name not in there]
    if missing:
        instance.add_dynamic_partitions(str(partitions.name), missing)
    return wanted


PartitionResults = Iterator[AssetEvent]


class PartitionRun(Config):
    """Run configuration of a dataset whose versions are partitions."""

    make_current: bool = Field(default=False, description="Serve what is built, even if a newer version is served.")


def partitioned_dataset_asset(member: DatasetAsset) -> AssetsDefinition:
    """Return the asset of a dataset whose versions are partitions.

    A backfill is one run, which builds its partitions in order of their names and reports each as soon as it is
    published, so that finished ones remain if a later one fails. A version older than the served one is not served,
    unless the run's configuration sets `make_current`. A dataset on a stream publishes all versions that the stream
    holds, in order, and materializes their partitions.
    """
    dataset = member.dataset
    partitions = dagster_partitions(dataset)

    @multi_asset(
        name=to_dagster_name(f"dataset_{dataset.name}"),
        specs=[member.spec.replace_attributes(skippable=True)],
        check_specs=validator_check_specs(dataset, member.key),
        can_subset=True,
        partitions_def=partitions,
        backfill_policy=BackfillPolicy.single_run(),
        pool=f"adjunct/dataset/{dataset.name}",
    )
    def advance(
        context: AssetExecutionContext,
        config: PartitionRun,
        adjunct_lake: LakeResource,
        adjunct_spark: SparkResource,
    ) -> PartitionResults:
        wanted = sorted(context.partition_keys, key=natural_sort_key)
        with translate_errors(context, retry=RETRYABLE), report_validator_errors(context, {dataset.name: member.key}):
            lake = adjunct_lake.open()
            run = OpRun(context, lake, open_dataset_systems([dataset], lake))
            build = _PartitionBuild(run, member, adjunct_spark, StoredVersions(lake, dataset), config)
            try:
                if context.selected_asset_keys:
                    yield from build.run(wanted)
                else:
                    build.evaluate_checks(wanted)
            finally:
                build.report_checks()
            yield from missing_check_outputs(context, set())

    return advance


def partition_job(member: DatasetAsset) -> UnresolvedAssetJobDefinition:
    """Return the job that materializes partitions of one dataset."""
    name = to_dagster_name(member.dataset.name)
    return define_asset_job(
        f"{name}_versions",
        selection=[member.key],
        description=f"Builds versions of the dataset {member.dataset.name}.",
        executor_def=in_process_executor,
    )


@dataclass
class _PartitionBuild:
    """One run that builds partitions, with the check results of each partition so far."""

    op: OpRun
    member: DatasetAsset
    spark: SparkResource
    store: StoredVersions
    config: PartitionRun
    results: dict[str, list[AssetCheckResult]] = field(default_factory=dict)
    has_output: bool = False

    def run(self, wanted: list[str]) -> PartitionResults:
        context, dataset = self.op.context, self.member.dataset
        observe_streams(self.op, self.member.streams)
        asked: list[str | None] = [None] if dataset.stream else [*wanted]
        done: list[str] = []
        for partition in asked:
            report = self._advance(partition)
            manifest = self.store.require_manifest()
            log_rejected_versions(context, self.member, report, manifest)
            context.log.info(report.summary())
            for name in self._published(report, manifest, wanted if partition is None else [partition]):
                result = self._materialised(name, report, manifest, alone=len(wanted) == 1 and name in wanted)
                if result is not None:
                    done.append(name)
                    yield result
                self.evaluate_checks([name])
        if done and not self.has_output:
            yield output_without_materialization(context, self.member.key)
        for name in set(wanted) - set(done):
            context.log.warning(f"Partition {name} of {dataset.name} is not materialized: {self._why_not(name)}.")

    def evaluate_checks(self, names: list[str]) -> None:
        manifest = self.store.require_manifest()
        for name in names:
            judgement = newest_verdicts(self.store, manifest, name)
            results = validator_check_results(self.op.context, self.member.dataset, self.member.key, judgement)
            self.results[name] = list(results)

    def report_checks(self) -> None:
        """Log one result for each check, over all partitions that this run built."""
        checks = {result.check_name: result for results in self.results.values() for result in results}
        for check, any_result in checks.items():
            by_partition = {name: r for name, results in self.results.items() for r in results if r.check_name == check}
            failed = {name: result for name, result in by_partition.items() if not result.passed}
            shown = next(iter(failed.values()), any_result)
            failures = "; ".join(f"{name}: {result.description}" for name, result in failed.items())
            metadata = {
                **shown.metadata,
                "adjunct/partitions": MetadataValue.json(sorted(by_partition, key=natural_sort_key)),
            }
            self.op.context.log_event(
                AssetCheckEvaluation(
                    asset_key=self.member.key,
                    check_name=str(check),
                    passed=not failed,
                    severity=shown.severity,
                    description=(failures if len(by_partition) > 1 else shown.description) or None,
                    metadata=metadata,
                )
            )

    def _advance(self, partition: str | None) -> AdvanceReport:
        return advance_dataset(
            self.member.dataset,
            lake=self.op.lake,
            systems=self.op.systems,
            spark=self.spark.starter,
            by=self.op.context.run.run_id,
            partition=partition,
            make_current=self.config.make_current,
            on_stage=self.op.log_event,
        )

    def _published(self, report: AdvanceReport, manifest: DatasetManifest, wanted: list[str]) -> list[str]:
        """Return the partitions to report: the requested ones, and others that the stream delivered."""
        made = [ref.name for ref in map(manifest.ref, (*report.sealed, *report.rejected)) if ref and ref.name]
        known = ensure_partitions(self.member.dataset, self.op.context.instance, made)
        others = ", ".join(name for name in made if name not in known)
        if others:
            dataset = self.member.dataset.name
            self.op.context.log.warning(f"dataset {dataset}: {others} were delivered but are not among its partitions.")
        return sorted({*wanted, *known}, key=natural_sort_key)

    def _materialised(
        self, name: str, report: AdvanceReport, manifest: DatasetManifest, *, alone: bool
    ) -> MaterializeResult[Any] | AssetMaterialization | None:
        ref = _sealed_version(manifest, name)
        metadata = dataset_metadata(report, dataset_uri(self.op.lake, self.member.dataset)) | version_metadata(manifest)
        metadata |= display_metadata(self.op, self.member, manifest)
        refused = {rejected.name for rejected in map(manifest.ref, report.rejected) if rejected is not None}
        if ref is None or (name in refused and ref.id not in report.sealed):
            metadata["adjunct/version"] = ref.id if ref else "none"
            observed = AssetObservation(
                self.member.key, partition=name, metadata=metadata, description=report.summary()
            )
            self.op.context.log_event(observed)
            return None
        metadata |= {"adjunct/version": ref.id, "adjunct/name": name, "adjunct/served": report.version or "none"}
        metadata.pop("dagster/row_count", None)
        if ref.rows is not None:
            metadata["dagster/partition_row_count"] = ref.rows
        if alone:
            # In a backfill of several partitions one result would give all of them the same data version.
            self.has_output = True
            return MaterializeResult(asset_key=self.member.key, metadata=metadata, data_version=DataVersion(ref.id))
        tags = {DATA_VERSION_TAG: ref.id}
        return AssetMaterialization(self.member.key, partition=name, metadata=metadata, tags=tags)

    def _why_not(self, name: str) -> str:
        ref = max(
            (listed for listed in self.store.require_manifest().listed if listed.name == name),
            key=lambda listed: listed.number,
            default=None,
        )
        return (
            "it is not completely delivered yet"
            if ref is None
            else f"its version {ref.id} is {ref.state}: {ref.reason}"
        )


def _sealed_version(manifest: DatasetManifest, name: str) -> VersionRef | None:
    sealed = [ref for ref in manifest.listed if ref.name == name and ref.state == "sealed"]
    return max(sealed, key=lambda ref: ref.number, default=None)
