"""Jobs for operators: discard what is not needed any more, and pin, roll back, withdraw, force or drop a version."""

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetMaterialization,
    AssetObservation,
    Config,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    ScheduleDefinition,
    op,
)
from pydantic import Field

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.assets.asset_events import known_version
from dagster_adjunct.orchestration.code_location.assets.dataset_assets import DatasetAsset, uri_of
from dagster_adjunct.orchestration.code_location.jobs.job_skeletons import advanced_before, job_of, switched_off
from dagster_adjunct.orchestration.code_location.shared.asset_metadata import DATA_VERSION_TAG, served_metadata
from dagster_adjunct.orchestration.code_location.shared.failures import clear_failures
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
    from dagster_adjunct.assets.versions.manifest import DatasetManifest


class VersionAction(Enum):
    """What can be done to a version; the launchpad takes the names as they are written here."""

    pin = "pin"
    unpin = "unpin"
    rollback = "rollback"
    withdraw = "withdraw"
    force = "force"
    drop = "drop"


class VersionActionConfig(Config):
    """Run configuration of an application's job for versions."""

    dataset: str = Field(description="The dataset's name.")
    action: VersionAction = Field(description="What to do.")
    version: str | None = Field(
        default=None, description="The version's id or name. Not for unpin; rollback takes the one before without it."
    )
    reason: str = Field(description="Why; it is kept with the change.")
    by: str | None = Field(default=None, description="Who does it; this run unless given.")
    expires_in_hours: float | None = Field(default=None, description="For pin: when it ends; never unless given.")
    make_current: bool = Field(
        default=False, description="For force: serve it, also where it does not come after what is served."
    )


class DiscardConfig(Config):
    """Run configuration of an application's job that discards."""

    dry_run: bool = Field(default=False, description="Only list what would go, and why.")


def discard_job(application: str, members: Sequence[DatasetAsset]) -> JobDefinition:
    """Return the job that discards in these datasets by their policies; its report is the op's metadata."""
    declared = {member.dataset.name: member.dataset for member in members}

    @op(name=dagster_name(f"discard_{application}"), pool=f"adjunct/discard/{application}")
    def discard(context: OpExecutionContext, config: DiscardConfig, adjunct_lake: LakeResource) -> None:
        from dagster_adjunct.orchestration.upkeep.discard_with_roots import discard_all

        with clear_failures(context):
            lake = adjunct_lake.open()
            names = [member.dataset.name for member in advanced_before(context, lake, members)]
            reports = discard_all(lake, declared, by=context.run.run_id, datasets=names, dry_run=config.dry_run)
        for report in reports:
            context.log.info(report.summary())
        context.add_output_metadata({report.dataset: MetadataValue.json(report.to_json()) for report in reports})

    return job_of(
        discard,
        dagster_name(f"{application}_discard"),
        application=application,
        description="Discards versions that the datasets' policies let go, and what failed attempts left.",
    )


def discard_schedule(discarding: JobDefinition) -> ScheduleDefinition:
    """Return a schedule that discards once a day; it is off until somebody switches it on."""
    return switched_off(discarding, "daily", "17 3 * * *", "Discards versions and leftovers once a day.")


def version_job(application: str, members: Sequence[DatasetAsset]) -> JobDefinition:
    """Return the job that pins, rolls back, withdraws, forces or drops one version, as its run configuration says.

    What is served then is reported on the dataset's asset by the same run.
    """
    known = {member.dataset.name: member for member in members}

    @op(name=dagster_name(f"version_action_{application}"))
    def act(context: OpExecutionContext, config: VersionActionConfig, adjunct_lake: LakeResource) -> None:
        from dagster_adjunct.assets.reading.stored_versions import stored_versions
        from dagster_adjunct.assets.versions.operator_actions import kept_beside
        from dagster_adjunct.resources.errors import ConfigurationError

        with clear_failures(context):
            if config.dataset not in known:
                raise ConfigurationError(
                    f"there is no dataset {config.dataset!r} here; there are: {', '.join(known)}.",
                    "Correct the name.",
                    dataset=config.dataset,
                )
            lake = adjunct_lake.open()
            store = stored_versions(lake, config.dataset)
            after = _apply(store, config, by=config.by or context.run.run_id)
            moved = [config.dataset, *(set(store.log.read_all()[1]) - {config.dataset})]
            served_now = [
                (known[name], stored_versions(lake, name).require_manifest()) for name in moved if name in known
            ]
        served = after.version.id if after.version else "nothing"
        context.log.info(f"dataset {config.dataset}: {config.action.value} done; {served} is served now.")
        if note := kept_beside(after):
            context.log.warning(f"dataset {config.dataset}: {note}.")
        for member, manifest in served_now:
            context.log_event(_served_event(context, member, manifest, uri_of(lake, member.dataset)))

    return job_of(
        act,
        dagster_name(f"{application}_version_action"),
        application=application,
        description="Pins, unpins, rolls back, withdraws, forces or drops a version of a dataset.",
    )


def _apply(store: "StoredVersions", config: VersionActionConfig, *, by: str) -> "BoundedManifest":
    from dagster_adjunct.resources.errors import ConfigurationError

    action, version, why = config.action, config.version or None, {"reason": config.reason, "by": by}
    if action is VersionAction.unpin:
        return store.unpin(**why)
    if action is VersionAction.rollback:
        return store.rollback(version, **why)
    if version is None:
        raise ConfigurationError(
            f"{action.value} of dataset {config.dataset!r} names no version.",
            f"Set version to an id or name; see adjunct dataset versions {config.dataset}.",
            argument="version",
            dataset=config.dataset,
        )
    if action is VersionAction.pin:
        hours = config.expires_in_hours
        expires_at = None if hours is None else utc_now() + timedelta(hours=hours)
        return store.pin(version, expires_at=expires_at, **why)
    if action is VersionAction.withdraw:
        return store.withdraw(version, **why)
    if action is VersionAction.force:
        return store.force(version, make_current=config.make_current, **why)
    return store.drop(version, **why)


def _served_event(
    context: OpExecutionContext, member: DatasetAsset, manifest: "DatasetManifest", uri: str
) -> AssetMaterialization | AssetObservation:
    """Return what tells Dagster of the version served now: an observation where it knows of it.

    A partition's own version has not changed by it.
    """
    metadata: dict[str, Any] = served_metadata(manifest, uri)
    partitioned = member.dataset.versions is not None
    if manifest.version is None or partitioned or known_version(context, member.key) == manifest.version.id:
        return AssetObservation(member.key, metadata=metadata)
    return AssetMaterialization(member.key, metadata=metadata, tags={DATA_VERSION_TAG: manifest.version.id})
