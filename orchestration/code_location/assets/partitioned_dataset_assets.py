"""The assets of datasets whose versions are partitions: materialising or backfilling them builds their versions."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetCheckEvaluation,
    AssetCheckResult,
    AssetExecutionContext,
    AssetMaterialization,
    AssetObservation,
    AssetsDefinition,
    BackfillPolicy,
    Config,
    DataVersion,
    MaterializeResult,
    MetadataValue,
    define_asset_job,
    in_process_executor,
    multi_asset,
)
from pydantic import Field

from dagster_adjunct.assets.declaration.discard_policy import natural_order
from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.assets.asset_events import (
    AssetEvent,
    check_outputs,
    passed_on,
)
from dagster_adjunct.orchestration.code_location.assets.dataset_assets import (
    RETRIED,
    DatasetAsset,
    observe,
    shown_metadata,
    uri_of,
    warn_of_rejected,
)
from dagster_adjunct.orchestration.code_location.assets.op_run import OpRun
from dagster_adjunct.orchestration.code_location.assets.validator_checks import (
    check_results,
    check_specs,
    judgement_of,
    mistakes_reported,
)
from dagster_adjunct.orchestration.code_location.assets.version_partitions import (
    known_partitions,
    partitions_of,
)
from dagster_adjunct.orchestration.code_location.shared.asset_metadata import (
    DATA_VERSION_TAG,
    dataset_metadata,
    version_metadata,
)
from dagster_adjunct.orchestration.code_location.shared.failures import clear_failures
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.resources.spark.resource import SparkResource

if TYPE_CHECKING:
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.versions.advance_report import AdvanceReport
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.assets.versions.sealed_version import VersionRef

Results = Iterator[AssetEvent]


class PartitionRun(Config):
    """Run configuration of a dataset whose versions are partitions."""

    make_current: bool = Field(
        default=False, description="Serve what is built, even where a later version is served now."
    )


def partitioned_dataset_asset(member: DatasetAsset) -> AssetsDefinition:
    """Return the asset of a dataset with version partitions.

    A backfill is one run, which builds its partitions in order of their names and tells Dagster of each as soon as
    it is published: what was finished stays when a later one fails. An older version than the one served is kept
    beside it, unless the run's configuration says `make_current`. A dataset on a stream publishes whatever the
    stream holds, in its order, and materialises the partitions of all that it published.
    """
    dataset = member.dataset
    partitions = partitions_of(dataset)

    @multi_asset(
        name=dagster_name(f"dataset_{dataset.name}"),
        specs=[member.spec.replace_attributes(skippable=True)],
        check_specs=check_specs(dataset, member.key),
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
    ) -> Results:
        from dagster_adjunct.assets.reading.stored_versions import StoredVersions
        from dagster_adjunct.orchestration.planner.lake_catalog import systems_of

        wanted = sorted(context.partition_keys, key=natural_order)
        with clear_failures(context, retry=RETRIED), mistakes_reported(context, {dataset.name: member.key}):
            lake = adjunct_lake.open()
            run = OpRun(context, lake, systems_of([dataset], lake))
            build = _Build(run, member, adjunct_spark, StoredVersions(lake, dataset), config)
            try:
                if context.selected_asset_keys:
                    yield from build.run(wanted)
                else:
                    build.judge(wanted)
            finally:
                build.report_checks()
            yield from check_outputs(context, set())

    return advance


def partition_job(member: DatasetAsset) -> "UnresolvedAssetJobDefinition":
    """Return the job that materialises partitions of one dataset."""
    name = dagster_name(member.dataset.name)
    return define_asset_job(
        f"{name}_versions",
        selection=[member.key],
        description=f"Builds versions of the dataset {member.dataset.name}.",
        executor_def=in_process_executor,
    )


@dataclass
class _Build:
    """One run: what it has published so far, and what was said of each partition's version."""

    op: OpRun
    member: DatasetAsset
    spark: SparkResource
    store: "StoredVersions"
    config: PartitionRun
    judged: dict[str, list[AssetCheckResult]] = field(default_factory=dict)
    yielded: bool = False

    def run(self, wanted: list[str]) -> Results:
        context, dataset = self.op.context, self.member.dataset
        observe(self.op, self.member.streams)
        asked: list[str | None] = [None] if dataset.stream else [*wanted]
        done: list[str] = []
        for partition in asked:
            report = self._advance(partition)
            manifest = self.store.require_manifest()
            warn_of_rejected(context, self.member, report, manifest)
            context.log.info(report.summary())
            for name in self._published(report, manifest, wanted if partition is None else [partition]):
                result = self._materialised(name, report, manifest, alone=len(wanted) == 1 and name in wanted)
                if result is not None:
                    done.append(name)
                    yield result
                self.judge([name])
        if done and not self.yielded:
            yield passed_on(context, self.member.key)
        for name in set(wanted) - set(done):
            context.log.warning(f"Partition {name} of {dataset.name} is not materialised: {self._why_not(name)}.")

    def judge(self, names: list[str]) -> None:
        manifest = self.store.require_manifest()
        for name in names:
            judgement = judgement_of(self.store, manifest, name)
            results = check_results(self.op.context, self.member.dataset, self.member.key, judgement)
            self.judged[name] = list(results)

    def report_checks(self) -> None:
        """Log one result for each check: of the partition, or of all that this run has built."""
        checks = {result.check_name: result for results in self.judged.values() for result in results}
        for check, any_result in checks.items():
            by_partition = {name: r for name, results in self.judged.items() for r in results if r.check_name == check}
            failed = {name: result for name, result in by_partition.items() if not result.passed}
            shown = next(iter(failed.values()), any_result)
            failures = "; ".join(f"{name}: {result.description}" for name, result in failed.items())
            metadata = {
                **shown.metadata,
                "adjunct/partitions": MetadataValue.json(sorted(by_partition, key=natural_order)),
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

    def _advance(self, partition: str | None) -> "AdvanceReport":
        from dagster_adjunct.assets.advancing.advance_dataset import advance_dataset

        return advance_dataset(
            self.op.lake,
            self.op.systems,
            self.member.dataset,
            self.spark.starter,
            by=self.op.context.run.run_id,
            partition=partition,
            make_current=self.config.make_current,
            on_stage=self.op.tell,
        )

    def _published(self, report: "AdvanceReport", manifest: "DatasetManifest", wanted: list[str]) -> list[str]:
        """Return the partitions to report: those asked for, and what else the stream had ready."""
        made = [ref.name for ref in map(manifest.ref, (*report.sealed, *report.rejected)) if ref and ref.name]
        known = known_partitions(self.member.dataset, self.op.context.instance, made)
        others = ", ".join(name for name in made if name not in known)
        if others:
            dataset = self.member.dataset.name
            self.op.context.log.warning(f"dataset {dataset}: {others} were delivered and are none of its partitions.")
        return sorted({*wanted, *known}, key=natural_order)

    def _materialised(
        self, name: str, report: "AdvanceReport", manifest: "DatasetManifest", *, alone: bool
    ) -> MaterializeResult[Any] | AssetMaterialization | None:
        ref = _sealed(manifest, name)
        metadata = dataset_metadata(report, uri_of(self.op.lake, self.member.dataset)) | version_metadata(manifest)
        metadata |= shown_metadata(self.op, self.member, manifest)
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
            # One result would stamp all partitions of a backfill with its version: their output is passed on alone.
            self.yielded = True
            return MaterializeResult(asset_key=self.member.key, metadata=metadata, data_version=DataVersion(ref.id))
        tags = {DATA_VERSION_TAG: ref.id}
        return AssetMaterialization(self.member.key, partition=name, metadata=metadata, tags=tags)

    def _why_not(self, name: str) -> str:
        ref = max(
            (listed for listed in self.store.require_manifest().listed if listed.name == name),
            key=lambda listed: listed.number,
            default=None,
        )
        return "it is not delivered whole yet" if ref is None else f"its version {ref.id} is {ref.state}: {ref.reason}"


def _sealed(manifest: "DatasetManifest", name: str) -> "VersionRef | None":
    sealed = [ref for ref in manifest.listed if ref.name == name and ref.state == "sealed"]
    return max(sealed, key=lambda ref: ref.number, default=None)
