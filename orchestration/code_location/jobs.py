"""Jobs and schedules of an application: compact, expire, register Iceberg tables, set
startpoints, change versions.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg
from pydantic import Field

from dagster_adjunct.assets.declaration.dataset import LocalTable, UnboundedDataset
from dagster_adjunct.assets.exchange.iceberg import publish_to_iceberg
from dagster_adjunct.assets.reading.stored_versions import (
    StoredVersions,
    list_datasets,
    open_stored_versions,
)
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.versions.manifest import BoundedManifest
from dagster_adjunct.assets.versions.switches import describe_unserved_version
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.code_location.dataset_assets import (
    DatasetAsset,
    report_served_version,
)
from dagster_adjunct.orchestration.code_location.metadata import translate_errors
from dagster_adjunct.orchestration.code_location.resources import LakeResource, SparkResource
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    NoSealedVersionError,
    raise_first,
)
from dagster_adjunct.resources.iceberg import IcebergTable
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
    from dagster_adjunct.resources.streams.startpoint import Startpoint


class _Schedule(NamedTuple):
    """When a job runs, in UTC; `every` is the end of the schedule's name."""

    every: str
    cron: str
    description: str


_SCHEDULES = {
    "compact": _Schedule("hourly", "41 * * * *", "Compacts what is due once an hour."),
    "discard": _Schedule(
        "daily", "17 3 * * *", "Deletes expired versions and leftovers once a day."
    ),
    "iceberg": _Schedule(
        "daily", "7 4 * * *", "Registers the served versions in their Iceberg tables once a day."
    ),
}
"""By what the job does."""


# Values that users choose in Dagster's launchpad, which shows the members' names.
CompactionLevel = StrEnum("CompactionLevel", "due minor major")
StartpointAction = StrEnum("StartpointAction", "set clear")
Position = StrEnum("Position", "oldest upcoming timestamp offset")
UnresolvedPolicy = StrEnum("UnresolvedPolicy", "fail checkpoint")
Versions = StrEnum("Versions", {"as_of": "as-of", "current": "current", "recorded": "recorded"})
VersionAction = StrEnum("VersionAction", "pin unpin rollback revoke accept remove")


def op_job(
    application: str, what: str, description: str
) -> Callable[[Callable[..., None]], dg.JobDefinition]:
    """Return a decorator that makes a function the only op of the job `<application>_<what>`.

    If the job has a schedule, its op has a pool of its own, so that its runs can wait for each
    other.
    """

    def decorate(act: Callable[..., None]) -> dg.JobDefinition:
        pool = None
        if what in _SCHEDULES:
            pool = f"adjunct/{what}/{application}"
        only = dg.op(name=to_dagster_name(f"{what}_{application}"), pool=pool)(act)

        @dg.job(
            name=to_dagster_name(f"{application}_{what}"),
            executor_def=dg.in_process_executor,
            description=description,
            tags={"adjunct/application": application},
        )
        def run() -> None:
            only()

        return run

    return decorate


def with_schedule(
    what: str, job: dg.JobDefinition
) -> tuple[dg.JobDefinition, dg.ScheduleDefinition]:
    """Return the job and its schedule, which is off by default."""
    declared = _SCHEDULES[what]
    schedule = dg.ScheduleDefinition(
        name=f"{job.name}_{declared.every}",
        job=job,
        cron_schedule=declared.cron,
        execution_timezone="UTC",
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description=declared.description,
    )
    return job, schedule


class Outcome(NamedTuple):
    """What a job did with one dataset: in a sentence, as a report, and whether it changed it."""

    summary: str
    report: Mapping[str, Any]
    changed: bool


def run_on_datasets(
    context: dg.OpExecutionContext,
    resource: LakeResource,
    members: Sequence[DatasetAsset],
    act: Callable[[Lake, DatasetAsset], Outcome | None],
    *,
    report_as: str,
) -> None:
    """Run `act` on each dataset that exists in the lake; the reports become the op's metadata.

    `act` returns None if there was nothing to do. A change is logged as an observation with the
    report under the key `report_as`. If a dataset fails, the others are still processed, and the
    first error is raised at the end with notes about the rest.
    """
    reports: dict[str, dg.JsonMetadataValue] = {}
    errors: list[AdjunctError] = []
    with translate_errors(context):
        lake = resource.open()
        for member in select_advanced(context, lake, members):
            try:
                outcome = act(lake, member)
            except AdjunctError as error:
                errors.append(error)
                continue
            if outcome is None:
                continue
            context.log.info(outcome.summary)
            report = reports[member.dataset.name] = dg.MetadataValue.json(outcome.report)
            if outcome.changed:
                context.log_event(
                    dg.AssetObservation(
                        member.key, description=outcome.summary, metadata={report_as: report}
                    )
                )
        raise_first(errors)
    context.add_output_metadata(reports)


def select_advanced(
    context: dg.OpExecutionContext, lake: Lake, members: Sequence[DatasetAsset]
) -> list[DatasetAsset]:
    """Return the datasets that exist in the lake, because a run has advanced them; log the
    others.
    """
    there = set(list_datasets(lake))
    for member in members:
        if member.dataset.name not in there:
            context.log.info(f"dataset {member.dataset.name} has not been advanced yet.")
    return [member for member in members if member.dataset.name in there]


class CompactConfig(dg.Config):
    """Run configuration of the compaction job."""

    level: CompactionLevel = Field(
        default=CompactionLevel.due,
        description=(
            "due: what each policy finds due. minor: merge all deltas into one. major: merge into a"
            " new base."
        ),
    )


def compact_job(application: str, members: Sequence[DatasetAsset]) -> dg.JobDefinition:
    """Return the job that compacts these unbounded datasets by their policies; its reports are the
    op's metadata.

    A compaction is logged as an observation, because the content does not change.
    """

    @op_job(
        application,
        "compact",
        "Merges the deltas of change streams' tables, so that reading them stays cheap.",
    )
    def compact(
        context: dg.OpExecutionContext,
        config: CompactConfig,
        adjunct_lake: LakeResource,
        adjunct_spark: SparkResource,
    ) -> None:
        level: Any = None
        if config.level is not CompactionLevel.due:
            level = config.level.value

        def compact_one(lake: Lake, member: DatasetAsset) -> Outcome:
            assert isinstance(member.dataset, UnboundedDataset | LocalTable)
            report = compact_dataset(
                lake,
                member.dataset.name,
                spark=adjunct_spark.starter,
                by=context.run.run_id,
                level=level,
                policy=member.dataset.compaction,
            )
            return Outcome(report.summary(), report.to_json(), report.changed)

        run_on_datasets(context, adjunct_lake, members, compact_one, report_as="adjunct/compaction")

    return compact


def iceberg_job(
    application: str, members: Sequence[DatasetAsset], tables: Mapping[str, IcebergTable]
) -> dg.JobDefinition:
    """Return the job that registers the served versions of these datasets in their Iceberg tables.

    An unbounded dataset with a history and deltas is compacted first. A new snapshot is logged as
    an observation of the dataset's asset. Datasets without a version are skipped.
    """

    @op_job(
        application, "iceberg", "Registers the served versions of datasets in their Iceberg tables."
    )
    def publish(
        context: dg.OpExecutionContext, adjunct_lake: LakeResource, adjunct_spark: SparkResource
    ) -> None:
        def publish_one(lake: Lake, member: DatasetAsset) -> Outcome | None:
            dataset = member.dataset.name
            table = tables[member.dataset.name]
            try:
                snapshot = publish_to_iceberg(
                    lake, dataset, table, spark=adjunct_spark.starter, by=context.run.run_id
                )
            except NoSealedVersionError as error:
                context.log.info(str(error))
                return None
            done = "was registered" if snapshot.new else "is already registered"
            summary = (
                f"dataset {dataset}: version {snapshot.version} {done} in {snapshot.table},"
                f" snapshot {snapshot.snapshot_id}"
            )
            return Outcome(summary, snapshot.to_json(), snapshot.new)

        run_on_datasets(context, adjunct_lake, members, publish_one, report_as="adjunct/iceberg")

    return publish


def iceberg_jobs(
    datasets: Mapping[str, Sequence[DatasetAsset]], tables: Mapping[str, IcebergTable]
) -> list[dg.JobDefinition]:
    """Return a job for each application whose datasets have Iceberg tables.

    Raises ConfigurationError for a table of a dataset that no application stores.
    """
    known = set()
    for members in datasets.values():
        known |= {member.dataset.name for member in members}
    unknown = sorted(set(tables) - known)
    if unknown:
        raise ConfigurationError(
            f"iceberg={{…}} names the dataset {unknown[0]!r}, which no application stores; known"
            f" datasets: {', '.join(sorted(known)) or 'none'}.",
            "Correct the name.",
            argument="iceberg",
            dataset=unknown[0],
        )
    found = []
    for app, members in datasets.items():
        ours = [member for member in members if member.dataset.name in tables]
        if ours:
            found.append(iceberg_job(app, ours, tables))
    return found


class PlaceConfig(dg.Config):
    """A place in the partitions of a stream."""

    at: Position = Field(description="Which place: an end of the partition, a time or an offset.")
    value: str | None = Field(
        default=None,
        description=(
            "For timestamp: 2026-01-31T18:00Z, a date (UTC), or ms since 1970. For offset: the"
            " offset."
        ),
    )

    def parse(self) -> "Startpoint":
        """Return the place that this configuration describes. Raises ConfigurationError if it
        describes none.
        """
        from dagster_adjunct.orchestration.startpoints.request import parse_position

        return parse_position(self.at.value, self.value)


class StartpointConfig(dg.Config):
    """Run configuration of the startpoint job."""

    action: StartpointAction = Field(
        default=StartpointAction.set, description="Set or clear startpoints."
    )
    partitions: list[str] = Field(
        description=(
            'Partitions of streams: "lake.flights.3", "lake.flights.0-3,7", or "lake.flights" for'
            " all."
        )
    )
    position: PlaceConfig | None = Field(
        default=None, description="Where to start; required for set."
    )
    until: PlaceConfig | None = Field(
        default=None,
        description="For a bounded replay: where it ends. The checkpoint does not move then.",
    )
    versions: Versions | None = Field(
        default=None,
        description=(
            "For a bounded replay: read dataset versions by each record's time, the served ones, or"
            " those that were read the first time. Default: as-of for as-of joins, else current."
        ),
    )
    task: str | None = Field(
        default=None, description='Only this task, such as "Partition 3". Default: all tasks.'
    )
    on_unresolved: UnresolvedPolicy = Field(
        default=UnresolvedPolicy.fail,
        description="If the position has no offset: fail the run, or continue at the checkpoint.",
    )
    force: bool = Field(
        default=False,
        description=(
            "For a dataset's stream: accept that its table gets older or incomplete. For changes"
            " that results follow: restate any number of results, once."
        ),
    )
    replace: bool = Field(
        default=False, description="Let a replay replace a startpoint, or a startpoint a replay."
    )
    reason: str = Field(description="Why; recorded with the request.")
    by: str | None = Field(default=None, description="Who does it. Default: this run.")
    dry_run: bool = Field(default=False, description="Only show what would happen.")


def startpoint_job(app: Application) -> dg.JobDefinition:
    """Return the job that sets or clears startpoints of an application.

    The effect of each is in the op's metadata and the run's log. The next run of the application
    applies them; the sensor `<application>_startpoints` launches one.
    """

    @op_job(app.name, "startpoint", f"Sets or clears startpoints of {app.name}.")
    def act(
        context: dg.OpExecutionContext, config: StartpointConfig, adjunct_lake: LakeResource
    ) -> None:
        from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints

        with translate_errors(context):
            startpoints = Startpoints(app, lake=adjunct_lake.open())
            by = config.by or context.run.run_id
            if config.action is StartpointAction.clear:
                _cancel_startpoints(context, startpoints, config, by)
            else:
                _request_startpoints(context, startpoints, config, by)

    return act


def _request_startpoints(
    context: dg.OpExecutionContext, startpoints: "Startpoints", config: StartpointConfig, by: str
) -> None:
    """Request the startpoints of a run's configuration, or preview them for a dry run; log the
    effect of each.
    """
    if config.position is None:
        raise ConfigurationError(
            "action set needs a position.",
            f"Set position.at to one of {', '.join(position.value for position in Position)}.",
            argument="position",
        )
    position = config.position.parse()
    wanted: dict[str, Any] = {
        "task": config.task or None,
        "on_unresolved": config.on_unresolved.value,
        "force": config.force,
        "replace": config.replace,
    }
    if config.until is not None:
        wanted["until"] = config.until.parse()
    if config.versions is not None:
        wanted["versions"] = config.versions.value
    if config.dry_run:
        asked = startpoints.preview(config.partitions, position, **wanted)
    else:
        asked = startpoints.request(
            config.partitions, position, **wanted, by=by, reason=config.reason
        )
    name = startpoints.app.name
    lines = []
    for preview in asked.previews:
        tasks = ", ".join(preview.tasks) or "no task"
        start = preview.start or "nowhere"
        lines.append(f"{preview.request.ssp} ({tasks}): from {start}; {preview.effect}")
    if asked.written:
        after = "" if asked.open_batch is None else f" after batch {asked.open_batch}"
        outcome = (
            f"requested; the next run of {name} applies it{after}, which the sensor"
            f" {to_dagster_name(name)}_startpoints launches if it is on."
        )
    else:
        outcome = "Dry run: nothing was written."
    lines += [*asked.describe_effects(), outcome]
    for line in lines:
        context.log.info(line)
    context.add_output_metadata({"adjunct/startpoints": dg.MetadataValue.json(asked.to_json())})


def _cancel_startpoints(
    context: dg.OpExecutionContext, startpoints: "Startpoints", config: StartpointConfig, by: str
) -> None:
    """Take back the requested startpoints of these partitions, and log which were removed."""
    if config.dry_run:
        raise ConfigurationError(
            "action clear has no dry run.",
            "List the startpoints instead: adjunct startpoint list MODULE:APP.",
            argument="dry_run",
        )
    taken = startpoints.take_back(
        config.partitions, task=config.task or None, by=by, reason=config.reason
    )
    for line in taken.describe():
        context.log.info(line)
    if taken.not_removed:
        context.log.warning(f"{len(taken.not_removed)} of the requests were not removed.")
    context.add_output_metadata({"adjunct/startpoints": dg.MetadataValue.json(taken.to_json())})


class VersionActionConfig(dg.Config):
    """Run configuration of the version job."""

    dataset: str = Field(description="The dataset's name.")
    action: VersionAction = Field(description="What to do.")
    version: str | None = Field(
        default=None,
        description=(
            "The version's id or name. Not for unpin; optional for rollback (default: the previous"
            " version)."
        ),
    )
    reason: str = Field(description="Why; recorded with the change.")
    by: str | None = Field(default=None, description="Who does it. Default: this run.")
    expires_in_hours: float | None = Field(
        default=None, description="For pin: when it ends. Default: never."
    )
    make_current: bool = Field(
        default=False, description="For accept: serve it even if a newer version is served."
    )


class DiscardConfig(dg.Config):
    """Run configuration of the discard job."""

    dry_run: bool = Field(default=False, description="Only list what would be deleted, and why.")


def discard_job(application: str, members: Sequence[DatasetAsset]) -> dg.JobDefinition:
    """Return the job that deletes versions of these datasets by their retention policies."""
    declared = {member.dataset.name: member.dataset for member in members}

    @op_job(
        application,
        "discard",
        "Deletes versions that the retention policies no longer keep, and what failed builds left.",
    )
    def discard(
        context: dg.OpExecutionContext, config: DiscardConfig, adjunct_lake: LakeResource
    ) -> None:
        from dagster_adjunct.orchestration.maintenance.expire import expire_all_versions

        with translate_errors(context):
            lake = adjunct_lake.open()
            names = [member.dataset.name for member in select_advanced(context, lake, members)]
            reports = expire_all_versions(
                lake, declared, by=context.run.run_id, datasets=names, dry_run=config.dry_run
            )
        for report in reports:
            context.log.info(report.summary())
        context.add_output_metadata(
            {report.dataset: dg.MetadataValue.json(report.to_json()) for report in reports}
        )

    return discard


def version_job(application: str, members: Sequence[DatasetAsset]) -> dg.JobDefinition:
    """Return the job that pins, unpins, rolls back, revokes, accepts or removes one version.

    It also reports the version served afterwards on the dataset's asset.
    """
    known = {member.dataset.name: member for member in members}

    @op_job(
        application,
        "version_action",
        "Pins, unpins, rolls back, revokes, accepts or removes a version of a dataset.",
    )
    def act(
        context: dg.OpExecutionContext, config: VersionActionConfig, adjunct_lake: LakeResource
    ) -> None:
        with translate_errors(context):
            if config.dataset not in known:
                raise ConfigurationError(
                    f"this job has no dataset {config.dataset!r}; its datasets:"
                    f" {', '.join(known)}.",
                    "Correct the name.",
                    dataset=config.dataset,
                )
            lake = adjunct_lake.open()
            store = open_stored_versions(lake, config.dataset)
            after = _apply_action(store, config, by=config.by or context.run.run_id)
            _, members_of_set = store.log.read_all()
            switched_with = set(members_of_set) - {config.dataset}
            manifests = {
                name: open_stored_versions(lake, name).require_manifest()
                for name in (config.dataset, *switched_with)
                if name in known
            }
        served = after.served_id or "nothing"
        context.log.info(
            f"dataset {config.dataset}: {config.action.value} done; {served} is served now."
        )
        if note := describe_unserved_version(after):
            context.log.warning(f"dataset {config.dataset}: {note}.")
        for name, manifest in manifests.items():
            report_served_version(
                context, lake, known[name].dataset, known[name].key, manifest, always=True
            )

    return act


def _apply_action(
    store: StoredVersions, config: VersionActionConfig, *, by: str
) -> BoundedManifest:
    """Do the action of a run's configuration; return the dataset's manifest afterwards.

    Raises ConfigurationError without a version, except to unpin, and to roll back, which then
    serves the previous version.
    """
    action = config.action
    version = config.version or None
    why = {"reason": config.reason, "by": by}
    if action is VersionAction.unpin:
        return store.unpin(**why)
    if action is VersionAction.rollback:
        return store.rollback(version, **why)
    if version is None:
        raise ConfigurationError(
            f"{action.value} of dataset {config.dataset!r} needs a version.",
            f"Set version to an id or name; see adjunct dataset versions {config.dataset}.",
            argument="version",
            dataset=config.dataset,
        )
    if action is VersionAction.pin:
        return store.pin(version, expires_at=_end_of_pin(config.expires_in_hours), **why)
    if action is VersionAction.accept:
        return store.accept(version, make_current=config.make_current, **why)
    if action is VersionAction.revoke:
        return store.revoke(version, **why)
    return store.remove_version(version, **why)


def _end_of_pin(hours: float | None) -> datetime | None:
    """Return when a pin of so many hours from now ends; None for one without an end."""
    try:
        if hours is None:
            return None
        return utc_now() + timedelta(hours=hours)
    except (OverflowError, ValueError) as error:
        raise ConfigurationError(
            f"expires_in_hours is {hours}: expected hours until the year 9999 at most.",
            "Leave it out for a pin without an end.",
            argument="expires_in_hours",
        ) from error
