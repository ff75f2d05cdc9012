"""A job for people at the launchpad: ask for startpoints, look at what they would do, take them back."""

from enum import Enum
from typing import TYPE_CHECKING, Any

from dagster import Config, JobDefinition, MetadataValue, OpExecutionContext, op
from pydantic import Field

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.jobs.job_skeletons import job_of
from dagster_adjunct.orchestration.code_location.shared.failures import clear_failures
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.startpoints.application_startpoints import Startpoints


class StartpointAction(Enum):
    """What to do; the launchpad takes the names as they are written here."""

    set = "set"
    clear = "clear"


class Position(Enum):
    """Where reading is to start or to end."""

    oldest = "oldest"
    upcoming = "upcoming"
    timestamp = "timestamp"
    offset = "offset"


class UnresolvedPolicy(Enum):
    """What a run is to do with a startpoint that has no offset."""

    fail = "fail"
    checkpoint = "checkpoint"


class Versions(Enum):
    """Which versions of its datasets a bounded replay meets."""

    as_of = "as-of"
    current = "current"
    recorded = "recorded"


class StartpointConfig(Config):
    """Run configuration of an application's job for startpoints."""

    action: StartpointAction = Field(
        default=StartpointAction.set, description="Ask for startpoints, or take them back."
    )
    partitions: list[str] = Field(
        description='Partitions of streams: "lake.flights.3", "lake.flights.0-3,7", or "lake.flights" for all.'
    )
    position: Position | None = Field(default=None, description="Where to start; needed for set.")
    value: str | None = Field(
        default=None, description="For timestamp: 2026-01-31T18:00Z, a date, or ms since 1970. For offset: the offset."
    )
    until: Position | None = Field(
        default=None, description="For a bounded replay: where it ends. The main position does not move then."
    )
    until_value: str | None = Field(default=None, description="The end's timestamp or offset, as for value.")
    versions: Versions | None = Field(
        default=None,
        description="For a bounded replay: what it meets in datasets, by each record's time, as it is served now, or "
        "as it was recorded when the records were read first. By time where joins are as-of, else current.",
    )
    task: str | None = Field(default=None, description='Only this task, as in "Partition 3"; all tasks unless given.')
    on_unresolved: UnresolvedPolicy = Field(
        default=UnresolvedPolicy.fail, description="Without an offset: fail the run, or go on from the checkpoint."
    )
    force: bool = Field(
        default=False, description="Of a dataset's stream: also where its table gets older, or lacks changes."
    )
    replace: bool = Field(
        default=False, description="Let a bounded replay take the place of a startpoint, or the other way round."
    )
    reason: str = Field(description="Why; it is kept with the request and shown with the replay.")
    by: str | None = Field(default=None, description="Who asks; this run unless given.")
    dry_run: bool = Field(default=False, description="Only show what it would do.")


def startpoint_job(app: "Application") -> JobDefinition:
    """Return the job that asks for startpoints of an application, or takes them back, as its run configuration says.

    What each would do, and what it takes the place of, is in the op's metadata and in the run's log. Nothing is read
    by it: the sensor `<application>_startpoints`, or the next run of the application, applies what was asked for.
    """
    name = dagster_name(app.name)

    @op(name=f"startpoint_{name}")
    def act(context: OpExecutionContext, config: StartpointConfig, adjunct_lake: LakeResource) -> None:
        from dagster_adjunct.orchestration.startpoints.application_startpoints import Startpoints

        with clear_failures(context):
            startpoints = Startpoints(adjunct_lake.open(), app)
            do = _take_back if config.action is StartpointAction.clear else _request
            do(context, startpoints, config, config.by or context.run.run_id)

    return job_of(
        act,
        f"{name}_startpoint",
        application=app.name,
        description=f"Asks for startpoints of {app.name}, or takes them back.",
    )


def _request(context: OpExecutionContext, startpoints: "Startpoints", config: StartpointConfig, by: str) -> None:
    from dagster_adjunct.orchestration.startpoints.requests.request_parsing import parse_position
    from dagster_adjunct.resources.errors import ConfigurationError

    if config.position is None:
        raise ConfigurationError(
            "a startpoint without a position.",
            f"Set position to one of {', '.join(position.value for position in Position)}.",
            argument="position",
        )
    if config.until is None and config.until_value:
        raise ConfigurationError(
            f"until_value is {config.until_value!r}, and until is not given.",
            "Set until to timestamp or offset.",
            argument="until_value",
        )
    position = parse_position(config.position.value, config.value)
    wanted: dict[str, Any] = {
        "until": parse_position(config.until.value, config.until_value) if config.until is not None else None,
        "task": config.task or None,
        "on_unresolved": config.on_unresolved.value,
        "force": config.force,
        "versions": config.versions.value if config.versions is not None else None,
    }
    if config.dry_run:
        asked = startpoints.preview(config.partitions, position, **wanted)
    else:
        wanted |= {"replace": config.replace, "by": by, "reason": config.reason}
        asked = startpoints.request(config.partitions, position, **wanted)
    for preview in asked.previews:
        tasks = ", ".join(preview.tasks) or "no task"
        context.log.info(f"{preview.request.ssp} ({tasks}): from {preview.start or 'nowhere'}; {preview.effect}")
    for held in asked.replaced:
        context.log.info(f"takes the place of: {held.summary()}")
    for table, becomes in asked.tables.items():
        context.log.info(f"table {table}: {becomes}")
    for note in asked.notes:
        context.log.info(note)
    if asked.written:
        name = startpoints.app.name
        sensor = f"{dagster_name(name)}_startpoints"
        context.log.info(f"asked for; the sensor {sensor}, or the next run of {name}, applies it.")
    else:
        context.log.info("dry run: nothing is written.")
    context.add_output_metadata({"adjunct/startpoints": MetadataValue.json(asked.to_json())})


def _take_back(context: OpExecutionContext, startpoints: "Startpoints", config: StartpointConfig, by: str) -> None:
    from dagster_adjunct.resources.errors import ConfigurationError

    if config.dry_run:
        raise ConfigurationError(
            "a dry run takes nothing back.", "See what waits: adjunct startpoint list MODULE:APP.", argument="dry_run"
        )
    taken = startpoints.take_back(config.partitions, task=config.task or None, by=by, reason=config.reason)
    for request in taken.startpoints:
        context.log.info(request.taken_back())
    for unread in taken.unreadable:
        context.log.info(f"taken back unread: {unread.summary()}")
    for replay in taken.replays:
        context.log.info(f"replay stopped: {replay.ssp} at offset {replay.next} of {replay.until}")
    for text in taken.left:
        context.log.warning(f"stays: {text}")
    context.add_output_metadata({"adjunct/startpoints": MetadataValue.json(taken.to_json())})
