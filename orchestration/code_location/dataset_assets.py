"""Assets of datasets: materializing one publishes what was delivered, and reports the served
version.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import natural_sort_key
from dagster_adjunct.assets.reading.stored_versions import StoredVersions
from dagster_adjunct.assets.unbounded.progress import StreamPosition
from dagster_adjunct.assets.versions.manifest import DatasetManifest, as_follower
from dagster_adjunct.assets.versions.reports import AdvanceReport
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.code_location import checks, metadata
from dagster_adjunct.orchestration.code_location.dagster_internals import (
    SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION,
    UnresolvedAssetJobDefinition,
)
from dagster_adjunct.orchestration.code_location.op_work import run_work
from dagster_adjunct.orchestration.code_location.resources import LakeResource, SparkResource
from dagster_adjunct.orchestration.code_location.submission import Host
from dagster_adjunct.resources.errors import CommitConflictError, TransientError
from dagster_adjunct.resources.file_streams.streams import FileStreams
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.tasks import find_adjunct_error

AssetEvent = dg.MaterializeResult[Any] | dg.AssetMaterialization | dg.Output[None]


def last_data_version(
    context: dg.AssetExecutionContext | dg.OpExecutionContext, key: dg.AssetKey
) -> str | None:
    """Return the data version of the asset's newest materialization, None before the first."""
    known = context.instance.get_latest_materialization_event(key)
    tags = None
    if known and known.asset_materialization:
        tags = known.asset_materialization.tags
    return (tags or {}).get(metadata.DATA_VERSION_TAG)


def report_version(
    context: dg.AssetExecutionContext,
    key: dg.AssetKey,
    version: str,
    facts: Mapping[str, Any],
    description: str,
    *,
    always: bool = False,
) -> Iterator[AssetEvent]:
    """Yield the event that reports the asset's data version to Dagster.

    A changed version (or `always`) is a materialization. An unchanged one is an observation, so
    that automation is not triggered, while downstream assets of this run still execute.
    """
    selected = key in context.selected_asset_keys
    if not always and last_data_version(context, key) == version:
        context.log_event(
            dg.AssetObservation(
                key,
                description=description,
                metadata=facts,
                tags={metadata.DATA_VERSION_TAG: version},
            )
        )
        if selected:
            yield output_without_materialization(context, key)
    elif selected:
        yield dg.MaterializeResult(
            asset_key=key, metadata=facts, data_version=dg.DataVersion(version)
        )
    else:
        # Not selected, but built together with a selected asset, like members of a version set.
        yield dg.AssetMaterialization(
            key, metadata=facts, tags={metadata.DATA_VERSION_TAG: version}
        )


def output_without_materialization(
    context: dg.AssetExecutionContext, key: dg.AssetKey
) -> dg.Output[None]:
    """Return an asset's output without a materialization, so that downstream assets of the run are
    not skipped.

    Dagster creates a materialization for each output, except for those with the mark of observable
    source assets.
    """
    name = context.assets_def.get_output_name_for_asset_key(key)
    return dg.Output(
        None, output_name=name, metadata={SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION: True}
    )


def missing_check_outputs(
    context: dg.AssetExecutionContext, results: Iterable[object] = ()
) -> Iterator[dg.Output[None]]:
    """Yield outputs for selected checks without a result, because Dagster expects one for each."""
    evaluated = set()
    for result in results:
        if isinstance(result, dg.AssetCheckResult):
            evaluated.add((result.asset_key, result.check_name))
    for check in context.selected_asset_check_keys:
        if (check.asset_key, check.name) not in evaluated:
            yield dg.Output(
                None, output_name=context.assets_def.get_output_name_for_asset_check_key(check)
            )


NOT_MATERIALIZED = "adjunct/not_materialized"
"""The tag of a run that names the partitions which it has not materialized, and why."""
# Errors after which the op is retried. After a conflict, the faster run may have left less to do,
# or nothing.
RETRYABLE = (TransientError, CommitConflictError)
Results = Iterator[AssetEvent | dg.AssetCheckResult]


@dataclass(frozen=True, slots=True)
class DatasetAsset:
    """A dataset and its asset; `streams` maps the name of its input stream, if it has one, to that
    stream's asset.

    `application` is the first that declares it. Each materialization shows `preview_rows` entries.
    """

    dataset: AdjunctDataset
    spec: dg.AssetSpec
    streams: Mapping[str, dg.AssetKey]
    application: str
    preview_rows: int

    @property
    def key(self) -> dg.AssetKey:
        """The key of the dataset's asset."""
        return self.spec.key


def dataset_assets(
    unit: Sequence[DatasetAsset], applications: Sequence[Application] = ()
) -> dg.AssetsDefinition:
    """Return the asset, or the assets of a version set, that one op brings up to date with their
    input.

    Without a version nothing is materialized: the run logs which markers are awaited, and
    downstream assets are skipped, unless the dataset has bootstrap=False. If Dagster knows the
    served version already, it is observed, and downstream assets run. A rejected version is an
    observation of its own and a failed check. Members of a version set are published together,
    whichever of them are selected. With only checks selected, nothing advances, and the checks are
    reported again. Startpoints of the `applications` for a dataset's stream are applied first.
    """
    datasets = tuple(member.dataset for member in unit)
    specs = []
    streams: dict[str, dg.AssetKey] = {}
    followers = {}
    for member in unit:
        streams |= member.streams
        if member.dataset.follows_changes:
            followers[member.dataset.name] = member.key
        specs += checks.validator_check_specs(member.dataset, member.key)
        specs += checks.bootstrap_check_specs(member.dataset, member.key)
    if datasets[0].version_set:
        kind = "version_set"
        name = datasets[0].version_set
    else:
        kind = "dataset"
        name = datasets[0].name

    @dg.multi_asset(
        name=to_dagster_name(f"{kind}_{name}"),
        specs=[member.spec.replace_attributes(skippable=True) for member in unit],
        check_specs=specs,
        # Makes the checks' outputs optional: a run may validate no version.
        can_subset=bool(specs),
        pool=f"adjunct/{kind.replace('_', '-')}/{name}",
    )
    def advance(
        context: dg.AssetExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource
    ) -> Results:
        from dagster_adjunct.orchestration.planner.planner import open_dataset_systems

        keys = {member.dataset.name: member.key for member in unit}
        with (
            metadata.translate_errors(context, retry=RETRYABLE),
            checks.report_validator_errors(context, keys),
        ):
            lake = adjunct_lake.open()
            run = checks.OpRun(context, lake, open_dataset_systems(datasets, lake))
            reports: dict[str, AdvanceReport] = {}
            if context.selected_asset_keys:
                observe_streams(run, streams)
                with checks.report_unfinished_bootstrap(run, followers):
                    done = run_work(
                        run,
                        adjunct_spark,
                        partial(_advance_unit, datasets, applications),
                        {
                            "stage": run.log_event,
                            "rewound": lambda report: context.log.info(report.summary()),
                            "info": context.log.info,
                        },
                        partial(open_dataset_systems, datasets),
                        # Not if an application has chosen another engine.
                        few_in_process={app.engine for app in applications} == {"auto"},
                    )
                reports = {report.dataset: report for report in done}
            results: list[AssetEvent | dg.AssetCheckResult] = []
            for member in unit:
                results += dataset_results(run, member, reports.get(member.dataset.name))
        yield from results
        yield from missing_check_outputs(context, results)

    return advance


def _advance_unit(
    datasets: Sequence[AdjunctDataset], applications: Sequence[Application], host: Host
) -> list[AdvanceReport]:
    """Apply the startpoints of the applications for these datasets' streams, then advance the
    datasets.
    """
    from dagster_adjunct.orchestration.planner.planner import systems_for
    from dagster_adjunct.orchestration.step.run import advance_unit, apply_startpoints

    names = {dataset.name for dataset in datasets}
    for app in applications:
        runtime = replace(host.runtime, systems=systems_for(app, lake=host.runtime.lake))
        apply_startpoints(
            runtime, app, only=names, on_report=partial(host.tell, "rewound")
        ).raise_failed()
    return advance_unit(host.runtime, datasets, on_stage=partial(host.tell, "stage"))


def dataset_results(
    run: checks.OpRun, member: DatasetAsset, report: AdvanceReport | None
) -> Results:
    """Yield the events of a dataset's asset after an advance, and the results of its checks.

    Without a `report` nothing advanced: the checks are reported again.
    """
    store = StoredVersions(run.lake, member.dataset)
    manifest = store.manifest()
    if report is not None:
        log_rejected_versions(run.context, member, report, manifest)
        yield from _dataset_events(run, member, report, manifest)
    if member.dataset.follows_changes:
        yield from checks.bootstrap_check_results(run, member.key, manifest, report)
        yield from checks.row_check_results(run.context, member.dataset, member.key, report)
    elif manifest is not None:
        yield from checks.validator_check_results(
            run.context, member.dataset, member.key, checks.newest_verdicts(store, manifest)
        )


def _dataset_events(
    run: checks.OpRun, member: DatasetAsset, report: AdvanceReport, manifest: DatasetManifest | None
) -> Results:
    """Yield the events that report the version served after this run, whoever chose it: a rollback
    by hand is reported by the next run.

    With a freshness policy, each run that checks the stream is a materialization, even without
    changes: Dagster measures freshness by materializations only.
    """
    context = run.context
    facts = report_metadata(run, member, report, manifest)
    if manifest is not None and (table := as_follower(manifest)) is not None:
        facts |= metadata.lag_metadata(StreamPosition.of(run.systems, table).lags(run.lake.now()))
    if report.version is None:
        context.log.warning(report.summary())
        context.log_event(
            dg.AssetObservation(member.key, description=report.summary(), metadata=facts)
        )
        # downstream assets wait for the end of a bootstrap
        if not member.dataset.bootstrap and member.key in context.selected_asset_keys:
            yield output_without_materialization(context, member.key)
        return
    context.log.info(report.summary())
    always = member.spec.freshness_policy is not None
    yield from report_version(
        context, member.key, report.version, facts, report.summary(), always=always
    )


def report_metadata(
    run: checks.OpRun, member: DatasetAsset, report: AdvanceReport, manifest: DatasetManifest | None
) -> dict[str, Any]:
    """Return the metadata of an advance, with the listed versions, the columns (descriptions and
    lineage), and some entries as a preview."""
    facts = metadata.dataset_metadata(report, dataset_uri(run.lake, member.dataset))
    if manifest is None:
        return facts
    facts |= metadata.version_metadata(manifest)
    dataset = member.dataset
    version = manifest.version
    if version is None:
        return facts
    record_columns = None  # unknown
    for stream in member.streams:
        system, name = split_stream_name(stream)
        schema = run.systems[system].info(name).schema
        if schema is not None:
            record_columns = schema.names
    source = next((dep.asset_key for dep in member.spec.deps), None)
    columns = metadata.dataset_columns(dataset, version.columns.names, record_columns)
    facts["dagster/column_schema"] = metadata.column_schema(
        version.columns, dict(dataset.presentation.column_descriptions)
    )
    facts |= metadata.lineage_metadata(columns, lambda node: source)
    return facts | metadata.dataset_preview(run.lake, dataset, version.id, member.preview_rows)


def log_rejected_versions(
    context: dg.AssetExecutionContext,
    member: DatasetAsset,
    report: AdvanceReport,
    manifest: DatasetManifest | None,
) -> None:
    """Report rejected versions in the run's log and as events of the asset; log warnings of
    validators.
    """
    for warning in report.warnings:
        context.log.warning(f"dataset {report.dataset}: {warning}")
    is_partitioned = member.dataset.versions is not None  # by version
    for version in report.rejected:
        ref = manifest.ref(version) if manifest else None
        if ref is not None:
            text = checks.rejection_warning(report.dataset, ref, report.version)
            context.log.warning(text)
            facts = checks.rejection_metadata(ref, report.version)
            context.log_event(
                dg.AssetObservation(
                    member.key,
                    partition=ref.name if is_partitioned else None,
                    description=text,
                    metadata=facts,
                )
            )


def observe_streams(run: checks.OpRun, streams: Mapping[str, dg.AssetKey]) -> None:
    """Log an observation of what each stream holds now; files that have arrived are admitted."""
    for name, key in streams.items():
        system, stream = split_stream_name(name)
        if isinstance(run.systems[system], FileStreams):
            run.systems[system].snapshot(stream)
        facts = metadata.stream_metadata(run.lake, run.systems, name)
        if facts is not None:
            run.context.log_event(dg.AssetObservation(key, metadata=facts))


def report_served_version(
    context: dg.AssetExecutionContext | dg.OpExecutionContext,
    lake: Lake,
    dataset: AdjunctDataset,
    key: dg.AssetKey,
    manifest: DatasetManifest,
    *,
    always: bool = False,
) -> None:
    """Log a materialization of the served version if Dagster last recorded another one.

    Otherwise log an observation if `always`, else nothing. A partitioned dataset never gets a
    materialization here: its partitions stay the same when another version is served.
    """
    facts = metadata.served_metadata(manifest, dataset_uri(lake, dataset))
    served = manifest.version
    is_partitioned = dataset.versions is not None
    if served is not None and not is_partitioned and last_data_version(context, key) != served.id:
        tags = {metadata.DATA_VERSION_TAG: served.id}
        context.log_event(dg.AssetMaterialization(key, metadata=facts, tags=tags))
    elif always:
        context.log_event(dg.AssetObservation(key, metadata=facts))


def dataset_uri(lake: Lake, dataset: AdjunctDataset) -> str:
    """Return the URI of a dataset."""
    return f"{lake.url}/{lake.dataset_prefix(dataset.name)}"


def dagster_partitions(dataset: AdjunctDataset) -> dg.PartitionsDefinition[str]:
    """Return Dagster's partitions of a dataset whose versions are partitions. Days begin at
    midnight in their zone.

    If their names are not declared, they are dynamic partitions named `adjunct/<dataset>`, to which
    runs add the names of versions that they publish.
    """
    declared = dataset.versions
    assert declared is not None
    if declared.start is not None:
        # Reference data of a day is often delivered on that day, so the current day is a partition
        # too, and so is the current week or month.
        period: dict[str, Any] = {
            "start_date": declared.start,
            "end_offset": 1,
            "timezone": declared.timezone,
        }
        if declared.by == "week":
            return dg.WeeklyPartitionsDefinition(day_offset=1, **period)
        if declared.by == "month":
            return dg.MonthlyPartitionsDefinition(**period)
        return dg.DailyPartitionsDefinition(**period)
    if declared.names:
        return dg.StaticPartitionsDefinition(sorted(declared.names, key=natural_sort_key))
    return dg.DynamicPartitionsDefinition(name=f"adjunct/{dataset.name}")


def ensure_partitions(
    dataset: AdjunctDataset, instance: dg.DagsterInstance, names: Iterable[str]
) -> list[str]:
    """Return those of the version names that are partitions. If partitions are dynamic, these are
    all: new names are added to Dagster's.
    """
    partitions = dagster_partitions(dataset)
    wanted = list(dict.fromkeys(names))
    if not isinstance(partitions, dg.DynamicPartitionsDefinition):
        existing = set(partitions.get_partition_keys())
        return [name for name in wanted if name in existing]
    existing = set(instance.get_dynamic_partitions(str(partitions.name)))
    missing = []
    for name in wanted:
        if name not in existing:
            missing.append(name)
    if missing:
        instance.add_dynamic_partitions(str(partitions.name), missing)
    return wanted


PartitionResults = Iterator[AssetEvent]


class PartitionRun(dg.Config):
    """Run configuration of a dataset whose versions are partitions."""

    make_current: bool = Field(
        default=False, description="Serve what is built, even if a newer version is served."
    )


def partitioned_dataset_asset(member: DatasetAsset) -> dg.AssetsDefinition:
    """Return the asset of a dataset whose versions are partitions.

    A backfill is one run, which builds its partitions in order of their names and reports each as
    soon as it is published, so that finished ones remain if a later one fails. A version older than
    the served one is not served, unless the run's configuration sets `make_current`. A dataset on a
    stream publishes all versions that the stream holds, in order, and materializes their
    partitions.
    """
    dataset = member.dataset
    partitions = dagster_partitions(dataset)

    @dg.multi_asset(
        name=to_dagster_name(f"dataset_{dataset.name}"),
        specs=[member.spec.replace_attributes(skippable=True)],
        check_specs=checks.validator_check_specs(dataset, member.key),
        can_subset=True,
        partitions_def=partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=f"adjunct/dataset/{dataset.name}",
    )
    def advance(
        context: dg.AssetExecutionContext,
        config: PartitionRun,
        adjunct_lake: LakeResource,
        adjunct_spark: SparkResource,
    ) -> PartitionResults:
        from dagster_adjunct.orchestration.planner.planner import open_dataset_systems

        wanted = sorted(context.partition_keys, key=natural_sort_key)
        with (
            metadata.translate_errors(context, retry=RETRYABLE),
            checks.report_validator_errors(context, {dataset.name: member.key}),
        ):
            lake = adjunct_lake.open()
            run = checks.OpRun(context, lake, open_dataset_systems([dataset], lake))
            build = _PartitionBuild(
                run, member, adjunct_spark, StoredVersions(lake, dataset), config
            )
            try:
                if context.selected_asset_keys:
                    yield from build.run(wanted)
                else:
                    build.evaluate_checks(wanted)
            except Exception as error:
                build.report_failure(wanted, error)
                raise
            finally:
                build.report_checks()
            yield from missing_check_outputs(context)

    return advance


def partition_job(member: DatasetAsset) -> UnresolvedAssetJobDefinition:
    """Return the job that materializes partitions of one dataset."""
    name = f"{to_dagster_name(member.dataset.name)}_versions"
    text = f"Builds versions of the dataset {member.dataset.name}."
    return dg.define_asset_job(
        name, selection=[member.key], description=text, executor_def=dg.in_process_executor
    )


@dataclass
class _PartitionBuild:
    """One run that builds partitions.

    `results` are the check results by partition, and `done` the partitions materialized so far.
    `has_output` is whether one of the materializations is also the op's output.
    """

    op: checks.OpRun
    member: DatasetAsset
    spark: SparkResource
    store: StoredVersions
    config: PartitionRun
    results: dict[str, list[dg.AssetCheckResult]] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    has_output: bool = False

    def run(self, wanted: list[str]) -> PartitionResults:
        """Build the partitions and yield their materializations; report those of `wanted` that are
        not made.
        """
        from dagster_adjunct.orchestration.planner.planner import open_dataset_systems

        context = self.op.context
        dataset = self.member.dataset
        observe_streams(self.op, self.member.streams)
        # An advance from a stream builds whatever it has delivered (None).
        to_build: list[str | None] = [None] if dataset.stream else [*wanted]
        done = self.done
        for partition in to_build:
            report = run_work(
                self.op,
                self.spark,
                partial(_advance_partition, dataset, partition, self.config.make_current),
                {"stage": self.op.log_event, "info": context.log.info},
                partial(open_dataset_systems, [dataset]),
                few_in_process=False,
            )
            manifest = self.store.require_manifest()
            log_rejected_versions(context, self.member, report, manifest)
            context.log.info(report.summary())
            requested = wanted if partition is None else [partition]
            for name in self._list_to_report(report, manifest, requested):
                result = self._materialize(
                    name, report, manifest, alone=len(wanted) == 1 and name in wanted
                )
                if result is not None:
                    done.append(name)
                    yield result
                self.evaluate_checks([name])
        if done and not self.has_output:
            yield output_without_materialization(context, self.member.key)
        missing: dict[str, str] = {}
        for name in sorted(set(wanted) - set(done), key=natural_sort_key):
            ref = _newest_version(self.store.require_manifest(), name)
            if ref is None:
                missing[name] = "it is not completely delivered yet"
            else:
                missing[name] = f"its version {ref.id} is {ref.state}: {ref.reason}"
        self.report_missing(missing)

    def report_failure(self, wanted: Sequence[str], error: Exception) -> None:
        """Report that an error ended the run, on each wanted partition that is not done.

        The first of these was being built, and those after it were not begun. From a stream, all
        are built together.
        """
        ours = find_adjunct_error(error)
        if ours is not None:
            why = ours.problem
        else:
            why = f"{type(error).__name__}: {error}"
        missing = {}
        for name in wanted:
            if name not in self.done:
                missing[name] = why
        failed = next(iter(missing), None)
        if self.member.dataset.stream is None:
            missing = {
                name: why if name == failed else f"the run ended at {failed}" for name in missing
            }
        self.report_missing(missing)

    def report_missing(self, missing: Mapping[str, str]) -> None:
        """Report why these partitions are not materialized: in the log, on each partition, and in a
        tag of the run.

        A backfill's page lists its runs with their tags.
        """
        context = self.op.context
        dataset = self.member.dataset.name
        for name, why in missing.items():
            text = f"Partition {name} of {dataset} is not materialized: {why.rstrip('.')}."
            context.log.warning(text)
            facts = {"adjunct/action": "not materialized", "adjunct/reason": why}
            context.log_event(
                dg.AssetObservation(
                    self.member.key, partition=name, description=text, metadata=facts
                )
            )
        if missing:
            shown = metadata.join_shortened(
                (f"{name}: {why}" for name, why in missing.items()), "; "
            )
            context.instance.add_run_tags(context.run.run_id, {NOT_MATERIALIZED: shown})

    def evaluate_checks(self, names: list[str]) -> None:
        """Keep the check results of the newest version of each name; `report_checks` logs them."""
        manifest = self.store.require_manifest()
        for name in names:
            verdicts = checks.newest_verdicts(self.store, manifest, name)
            results = checks.validator_check_results(
                self.op.context, self.member.dataset, self.member.key, verdicts
            )
            self.results[name] = list(results)

    def report_checks(self) -> None:
        """Log one result for each check, over all partitions that this run built."""
        # By check, its result for each partition.
        by_check: dict[str | None, dict[str, dg.AssetCheckResult]] = {}
        for partition, results in self.results.items():
            for result in results:
                by_check.setdefault(result.check_name, {})[partition] = result
        for check, by_partition in by_check.items():
            failed = {name: result for name, result in by_partition.items() if not result.passed}
            shown = next(iter(failed.values()), list(by_partition.values())[-1])
            if len(by_partition) == 1:
                description = shown.description
            else:
                description = "; ".join(
                    f"{name}: {result.description}" for name, result in failed.items()
                )
            facts = {
                **shown.metadata,
                "adjunct/partitions": dg.MetadataValue.json(
                    sorted(by_partition, key=natural_sort_key)
                ),
            }
            self.op.context.log_event(
                dg.AssetCheckEvaluation(
                    asset_key=self.member.key,
                    check_name=str(check),
                    passed=not failed,
                    severity=shown.severity,
                    description=description or None,
                    metadata=facts,
                )
            )

    def _list_to_report(
        self, report: AdvanceReport, manifest: DatasetManifest, wanted: list[str]
    ) -> list[str]:
        """Return the partitions to report: the `wanted` ones, and others that the stream delivered.

        New dynamic partitions are added; delivered versions that are no partitions get a warning.
        """
        delivered = []
        for ref in map(manifest.ref, (*report.sealed, *report.rejected)):
            if ref and ref.name:
                delivered.append(ref.name)
        partitions = ensure_partitions(self.member.dataset, self.op.context.instance, delivered)
        outside = ", ".join(name for name in delivered if name not in partitions)
        if outside:
            dataset = self.member.dataset.name
            self.op.context.log.warning(
                f"dataset {dataset}: {outside} were delivered but are not among its partitions."
            )
        return sorted({*wanted, *partitions}, key=natural_sort_key)

    def _materialize(
        self, name: str, report: AdvanceReport, manifest: DatasetManifest, *, alone: bool
    ) -> dg.MaterializeResult[Any] | dg.AssetMaterialization | None:
        """Return the materialization of a partition; if its version was not published, log an
        observation and return None.

        The result for the only partition of a run (`alone`) is also the op's output.
        """
        ref = _newest_version(manifest, name, "sealed")
        facts = report_metadata(self.op, self.member, report, manifest)
        rejected = set()
        for rejected_ref in map(manifest.ref, report.rejected):
            if rejected_ref is not None:
                rejected.add(rejected_ref.name)
        # If a version was rejected now, one that is sealed may be an older one of the same name.
        is_published = ref is not None and (name not in rejected or ref.id in report.sealed)
        if ref is None or not is_published:
            facts["adjunct/version"] = ref.id if ref else "none"
            text = report.summary()
            observation = dg.AssetObservation(
                self.member.key, partition=name, metadata=facts, description=text
            )
            self.op.context.log_event(observation)
            return None
        facts |= {
            "adjunct/version": ref.id,
            "adjunct/name": name,
            "adjunct/served": report.version or "none",
        }
        facts.pop("dagster/row_count", None)  # of the served version
        if ref.rows is not None:
            facts["dagster/partition_row_count"] = ref.rows
        if alone:
            # In a backfill of several partitions one result would give all of them the same data
            # version.
            self.has_output = True
            return dg.MaterializeResult(
                asset_key=self.member.key, metadata=facts, data_version=dg.DataVersion(ref.id)
            )
        tags = {metadata.DATA_VERSION_TAG: ref.id}
        return dg.AssetMaterialization(self.member.key, partition=name, metadata=facts, tags=tags)


def report_partitions(
    op: checks.OpRun, member: DatasetAsset, report: AdvanceReport, asked: str | None
) -> Iterator[AssetEvent]:
    """Yield the materializations of partitions that an advance has published, and log the results
    of their checks.

    `asked` is the partition that was requested, if any.
    """
    build = _PartitionBuild(
        op, member, SparkResource(), StoredVersions(op.lake, member.dataset), PartitionRun()
    )
    manifest = build.store.require_manifest()
    log_rejected_versions(op.context, member, report, manifest)
    for name in build._list_to_report(report, manifest, [] if asked is None else [asked]):
        result = build._materialize(name, report, manifest, alone=False)
        if result is not None:
            yield result
        build.evaluate_checks([name])
    build.report_checks()


def _advance_partition(
    dataset: AdjunctDataset, partition: str | None, make_current: bool, host: Host
) -> AdvanceReport:
    """Advance the dataset to the newest content of a partition, or of its stream if `partition` is
    None.
    """
    from dagster_adjunct.assets.advance_dataset import advance_with_runtime

    on_stage = partial(host.tell, "stage")
    with host.runtime.lake.manifests.while_kept():
        return advance_with_runtime(
            host.runtime, dataset, partition=partition, make_current=make_current, on_stage=on_stage
        )


def _newest_version(
    manifest: DatasetManifest, name: str, state: str | None = None
) -> VersionRef | None:
    """Return the newest version of this name, and in this state if one is given; None if there is
    none.
    """
    refs = []
    for ref in manifest.listed:
        if ref.name == name and state in (None, ref.state):
            refs.append(ref)
    return max(refs, key=lambda ref: ref.number, default=None)
