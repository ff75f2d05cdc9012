"""The job that compacts the tables of change streams, and its schedule."""

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Literal

from dagster import Config, JobDefinition, OpExecutionContext, ScheduleDefinition, op
from pydantic import Field

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.assets.dataset_assets import DatasetAsset
from dagster_adjunct.orchestration.code_location.jobs.job_skeletons import Acted, act_on_datasets, job_of, switched_off
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.resources.spark.resource import SparkResource

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects import Lake


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

    @op(name=dagster_name(f"compact_{application}"), pool=f"adjunct/compact/{application}")
    def compact(
        context: OpExecutionContext, config: CompactConfig, adjunct_lake: LakeResource, adjunct_spark: SparkResource
    ) -> None:
        from dagster_adjunct.assets.unbounded.compact_table import compact_dataset

        def compact_one(lake: "Lake", member: DatasetAsset) -> Acted:
            report = compact_dataset(
                lake,
                member.dataset.name,
                adjunct_spark.starter,
                by=context.run.run_id,
                level=_LEVELS[config.level],
                policy=member.dataset.following.compaction,
            )
            return Acted(report.summary(), report.to_json(), report.changed)

        act_on_datasets(context, adjunct_lake, members, compact_one, report_as="adjunct/compaction")

    return job_of(
        compact,
        dagster_name(f"{application}_compact"),
        application=application,
        description="Merges the deltas of change streams' tables, so that reading them stays cheap.",
    )


def compact_schedule(compacting: JobDefinition) -> ScheduleDefinition:
    """Return a schedule that compacts once an hour; it is off until somebody switches it on."""
    return switched_off(compacting, "hourly", "41 * * * *", "Compacts what is due once an hour.")
