"""The job that hands datasets over to Iceberg tables, and its schedule."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagster import JobDefinition, OpExecutionContext, ScheduleDefinition, op

from dagster_adjunct.assets.exchange.iceberg import IcebergTable
from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.assets.dataset_assets import DatasetAsset
from dagster_adjunct.orchestration.code_location.jobs.job_skeletons import Acted, act_on_datasets, job_of, switched_off
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.resources.errors import ConfigurationError, NoSealedVersionError
from dagster_adjunct.resources.spark.resource import SparkResource

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects import Lake


def iceberg_job(application: str, members: Sequence[DatasetAsset], tables: Mapping[str, IcebergTable]) -> JobDefinition:
    """Return the job that registers what these datasets serve in their Iceberg tables, where it is not there yet.

    A table of a change stream that has deltas is compacted before. A new snapshot is observed on the dataset's asset.
    A dataset that fails keeps no other from being handed over, and one without a version is passed over.
    """

    @op(name=dagster_name(f"iceberg_{application}"), pool=f"adjunct/iceberg/{application}")
    def publish(context: OpExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource) -> None:
        from dagster_adjunct.assets.exchange.iceberg import publish_to_iceberg

        def publish_one(lake: "Lake", member: DatasetAsset) -> Acted | None:
            dataset, table = member.dataset.name, tables[member.dataset.name]
            try:
                snapshot = publish_to_iceberg(lake, dataset, table, adjunct_spark.starter, by=context.run.run_id)
            except NoSealedVersionError as error:
                context.log.info(str(error))
                return None
            done = "is registered" if snapshot.new else "was there already"
            words = f"version {snapshot.version} {done} in {snapshot.table}, snapshot {snapshot.snapshot_id}"
            return Acted(f"dataset {dataset}: {words}", snapshot.to_json(), snapshot.new)

        act_on_datasets(context, adjunct_lake, members, publish_one, report_as="adjunct/iceberg")

    return job_of(
        publish,
        dagster_name(f"{application}_iceberg"),
        application=application,
        description="Hands what the datasets serve over to their Iceberg tables, compacted before where it has deltas.",
    )


def iceberg_schedule(publishing: JobDefinition) -> ScheduleDefinition:
    """Return a schedule that hands over once a day; it is off until somebody switches it on."""
    return switched_off(
        publishing, "daily", "7 4 * * *", "Registers what the datasets serve in their Iceberg tables once a day."
    )


def iceberg_jobs(
    datasets: Mapping[str, Sequence[DatasetAsset]], tables: Mapping[str, IcebergTable]
) -> list[JobDefinition]:
    """Return a job for each application with datasets that have an Iceberg table.

    `datasets` are those of each application. Raises ConfigurationError for a table of a dataset that is in none.
    """
    known = {member.dataset.name for members in datasets.values() for member in members}
    unknown = sorted(set(tables) - known)
    if unknown:
        raise ConfigurationError(
            f"an Iceberg table is given for the dataset {unknown[0]!r}, which no application here stores; there are: "
            f"{', '.join(sorted(known)) or 'none'}.",
            "Correct the name in iceberg={…}.",
            argument="iceberg",
            dataset=unknown[0],
        )
    ours = {app: [member for member in members if member.dataset.name in tables] for app, members in datasets.items()}
    return [iceberg_job(app, members, tables) for app, members in ours.items() if members]
