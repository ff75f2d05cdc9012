"""What the jobs for operators have in common: one op, a schedule that is off at first, one dataset after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetObservation,
    DefaultScheduleStatus,
    JobDefinition,
    JsonMetadataValue,
    MetadataValue,
    OpDefinition,
    OpExecutionContext,
    ScheduleDefinition,
    in_process_executor,
    job,
)

from dagster_adjunct.orchestration.code_location.assets.dataset_assets import DatasetAsset
from dagster_adjunct.orchestration.code_location.shared.failures import clear_failures
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.first_error import raise_first

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects import Lake


def job_of(act: OpDefinition, name: str, *, application: str, description: str) -> JobDefinition:
    """Return the job of one op. Its name must differ from the op's: it stands for a graph."""

    @job(
        name=name,
        executor_def=in_process_executor,
        description=description,
        tags={"adjunct/application": application},
    )
    def acting() -> None:
        act()

    return acting


def switched_off(upkeep: JobDefinition, every: str, cron: str, description: str) -> ScheduleDefinition:
    """Return a schedule of a job, by the clock of UTC, that runs nothing until somebody switches it on."""
    return ScheduleDefinition(
        name=f"{upkeep.name}_{every}",
        job=upkeep,
        cron_schedule=cron,
        execution_timezone="UTC",
        default_status=DefaultScheduleStatus.STOPPED,
        description=description,
    )


@dataclass(frozen=True, slots=True)
class Acted:
    """What a job did with one dataset; where that has `changed` something, it is observed on the dataset's asset."""

    summary: str
    report: Mapping[str, Any]
    changed: bool


def act_on_datasets(
    context: OpExecutionContext,
    resource: LakeResource,
    members: Sequence[DatasetAsset],
    act: Callable[["Lake", DatasetAsset], Acted | None],
    *,
    report_as: str,
) -> None:
    """Act on each of these datasets that has been advanced before; the reports are the op's metadata.

    What changed is observed under the key `report_as`, and materialises nothing. One dataset that fails keeps no other
    from its turn: the first error is raised in the end, and names the rest.
    """
    reports: dict[str, JsonMetadataValue] = {}
    errors: list[AdjunctError] = []
    with clear_failures(context):
        lake = resource.open()
        for member in advanced_before(context, lake, members):
            try:
                acted = act(lake, member)
            except AdjunctError as error:
                errors.append(error)
                continue
            if acted is None:
                continue
            context.log.info(acted.summary)
            report = reports[member.dataset.name] = MetadataValue.json(acted.report)
            if acted.changed:
                metadata = {report_as: report}
                context.log_event(AssetObservation(member.key, description=acted.summary, metadata=metadata))
        raise_first(errors)
    context.add_output_metadata(reports)


def advanced_before(context: OpExecutionContext, lake: "Lake", members: Sequence[DatasetAsset]) -> list[DatasetAsset]:
    """Return those that the lake has; the log says which have not been advanced yet."""
    from dagster_adjunct.assets.reading.dataset_names import list_datasets

    there = set(list_datasets(lake))
    for member in members:
        if member.dataset.name not in there:
            context.log.info(f"dataset {member.dataset.name} has not been advanced yet.")
    return [member for member in members if member.dataset.name in there]
