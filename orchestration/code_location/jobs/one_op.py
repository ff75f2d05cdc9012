"""What the jobs for operators have in common: one op, a schedule that is off at first, one dataset after the other."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster import (
    DefaultScheduleStatus,
    JobDefinition,
    OpDefinition,
    OpExecutionContext,
    ScheduleDefinition,
    in_process_executor,
    job,
)

from dagster_adjunct.orchestration.code_location.assets.dataset_assets import DatasetAsset
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


def act_on_datasets(
    context: OpExecutionContext, lake: "Lake", members: Sequence[DatasetAsset], act: Callable[[DatasetAsset], None]
) -> None:
    """Act on each of these datasets that has been advanced before.

    One that fails keeps no other from its turn: the first error is raised in the end, and names the rest.
    """
    from dagster_adjunct.assets.reading.dataset_names import list_datasets

    errors: list[AdjunctError] = []
    there = set(list_datasets(lake))
    for member in members:
        if member.dataset.name not in there:
            context.log.info(f"dataset {member.dataset.name} has not been advanced yet.")
            continue
        try:
            act(member)
        except AdjunctError as error:
            errors.append(error)
    raise_first(errors)
