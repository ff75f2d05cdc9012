"""The job that compacts the tables of change streams, and its schedule."""

from collections.abc import Sequence
from enum import Enum
from typing import Literal

from dagster import (
    AssetObservation,
    Config,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    ScheduleDefinition,
    in_process_executor,
    job,
    op,
)
from pydantic import Field

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.assets.datasets import DatasetAsset
from dagster_adjunct.orchestration.code_location.jobs.versions import switched_off
from dagster_adjunct.orchestration.code_location.shared.failures import clear_failures, raise_first
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.spark.resource import SparkResource


class CompactionLevel(Enum):
    """What is compacted; the launchpad takes the names as they are written here."""

    due = "due"
    minor = "minor"
    major = "major"


class CompactConfig(Config):
    """Run configuration of an application's job that compacts."""

    level: CompactionLevel = Field(
        default=CompactionLevel.due,
        description="due: what each dataset's policy finds due. minor: all deltas into one. major: into a new base.",
    )


_LEVELS: dict[CompactionLevel, Literal["minor", "major"] | None] = {
    CompactionLevel.due: None,
    CompactionLevel.minor: "minor",
    CompactionLevel.major: "major",
}


def compact_job(application: str, members: Sequence[DatasetAsset]) -> JobDefinition:
    """Return the job that compacts these unbounded datasets by their policies; its reports are the op's metadata.

    What was compacted is observed on the dataset's asset and materialises nothing: its content is what it was. A
    dataset that fails keeps no other from being compacted.
    """
    keys = {member.dataset.name: member for member in members}
    name = dagster_name(f"{application}_compact")

    # An op's name must differ from its job's, which stands for a graph.
    @op(name=dagster_name(f"compact_{application}"), pool=f"adjunct/compact/{application}")
    def compact(
        context: OpExecutionContext, config: CompactConfig, adjunct_lake: LakeResource, adjunct_spark: SparkResource
    ) -> None:
        from dagster_adjunct.assets.reading.stored_versions import list_datasets
        from dagster_adjunct.assets.unbounded.compaction import compact_dataset

        reports, errors = [], []
        with clear_failures(context):
            lake = adjunct_lake.open()
            there = set(list_datasets(lake))
            for each, member in keys.items():
                if each not in there:
                    continue
                try:
                    report = compact_dataset(
                        lake,
                        each,
                        lambda: adjunct_spark.spark_session,
                        by=context.run.run_id,
                        level=_LEVELS[config.level],
                        policy=member.dataset.following.compaction,
                    )
                except AdjunctError as error:
                    errors.append(error)
                    continue
                reports.append(report)
                context.log.info(report.summary())
                if report.changed:
                    metadata = {"adjunct/compaction": MetadataValue.json(report.to_json())}
                    context.log_event(AssetObservation(member.key, description=report.summary(), metadata=metadata))
            raise_first(context, errors)
        context.add_output_metadata({report.dataset: MetadataValue.json(report.to_json()) for report in reports})

    @job(
        name=name,
        executor_def=in_process_executor,
        description="Merges the deltas of change streams' tables, so that reading them stays cheap.",
        tags={"adjunct/application": application},
    )
    def compacting() -> None:
        compact()

    return compacting


def compact_schedule(compacting: JobDefinition) -> ScheduleDefinition:
    """Return a schedule that compacts once an hour; it is off until somebody switches it on."""
    return switched_off(compacting, "hourly", "41 * * * *", "Compacts what is due once an hour.")
