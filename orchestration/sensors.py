"""Sensors: thin shells around pure decisions, with a versioned JSON cursor."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dagster import (
    AssetKey,
    DagsterRun,
    DagsterRunStatus,
    DefaultSensorStatus,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    SkipReason,
    sensor,
)

from orchestration.lake_resource import LakeResource

if TYPE_CHECKING:
    from dagster import JobDefinition
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from orchestration.application import Application
    from orchestration.dataset_ops import DatasetAsset
    from orchestration.progress import InputProgress

CURSOR_VERSION = 1
FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0
_ACTIVE = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


@dataclass(frozen=True, slots=True)
class NewRecordsCursor:
    """What the sensor asked for last: from which position (as a digest), how often, and when (epoch seconds)."""

    position: str = ""
    attempt: int = 0
    asked_at: float = 0.0

    def to_json(self) -> str:
        return json.dumps({"version": CURSOR_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str | None) -> "NewRecordsCursor":
        """Return the cursor; one of another version, or none, starts anew: a repeated request harms nothing."""
        try:
            cursor = json.loads(text or "{}")
            if cursor.get("version") == CURSOR_VERSION:
                return cls(str(cursor["position"]), int(cursor["attempt"]), float(cursor["asked_at"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        return cls()


@dataclass(frozen=True, slots=True)
class Request:
    """Launch a run under this key."""

    run_key: str
    cursor: NewRecordsCursor


@dataclass(frozen=True, slots=True)
class Skip:
    """Launch nothing, and say why."""

    reason: str


def decide(
    name: str,
    cursor: NewRecordsCursor,
    progress: "InputProgress",
    *,
    waiting: Sequence[str],
    active_runs: int,
    now: float,
) -> Request | Skip:
    """Decide whether to launch the step: when records wait, nothing holds them back and no run is on its way.

    A run that left the application where it was has failed: the same position is asked for again after one
    minute, then after two, four and so on, up to an hour. A run key is consumed for ever, even by a failed run,
    so it holds the attempt. `name` tells this application in this lake from others, `now` is in epoch seconds.
    """
    if not progress.lag and not progress.unresolved:
        return Skip("No new records.")
    what = f"{progress.lag} new records" if progress.lag else "No position is stored yet"
    if active_runs:
        return Skip(f"{what}; a run is already in progress.")
    if waiting:
        return Skip(f"{what}; {'; '.join(waiting)}.")
    return _ask(name, what, cursor, progress.position, now)


def _ask(name: str, what: str, cursor: NewRecordsCursor, position: Mapping[str, str], now: float) -> Request | Skip:
    """Ask for a run at this position, or wait where one that was asked for did not get past it."""
    digest = _digest(position)
    if digest != cursor.position:
        asked = NewRecordsCursor(digest, 1, now)
    else:
        wait = cursor.asked_at + min(FIRST_WAIT * 2 ** (cursor.attempt - 1), LONGEST_WAIT) - now
        if wait > 0:
            return Skip(
                f"{what}; attempt {cursor.attempt} did not get past them (see its run), the next is in {wait:.0f} s."
            )
        asked = NewRecordsCursor(digest, cursor.attempt + 1, now)
    return Request(f"{name}:{digest}:{asked.attempt}", asked)


def concerns(run: DagsterRun, job: str, outputs: Collection[AssetKey]) -> bool:
    """Whether a run works on the application: its own job, or its assets materialised by hand."""
    return run.job_name == job or any(key in outputs for key in run.asset_selection or ())


def new_records_sensor(
    app: "Application",
    job: "JobDefinition | UnresolvedAssetJobDefinition",
    assets: Collection[AssetKey],
    *,
    minimum_interval_seconds: int = 30,
) -> SensorDefinition:
    """Return a sensor that launches `job` when an input stream has records that no batch has committed.

    `assets` are those that the job materialises; while a run is on its way to one of them, none is launched.
    """
    own = frozenset(assets)

    @sensor(
        name=f"{app.name.replace('-', '_')}_new_records",
        job=job,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=DefaultSensorStatus.STOPPED,
        description=f"Runs {app.name} when its input streams have new records.",
    )
    def evaluate(context: SensorEvaluationContext, adjunct_lake: LakeResource) -> RunRequest | SkipReason:
        from orchestration.catalog import systems_for
        from orchestration.progress import input_progress, waiting_datasets

        lake = adjunct_lake.open()
        systems = systems_for(app, lake)
        progress = input_progress(lake, systems, app)
        runs = context.instance.get_runs(RunsFilter(statuses=_ACTIVE), limit=1000)
        decision = decide(
            f"{app.name}:{lake.id}",
            NewRecordsCursor.from_json(context.cursor),
            progress,
            waiting=waiting_datasets(lake, systems, app) if progress.lag or progress.unresolved else (),
            active_runs=sum(concerns(run, job.name, own) for run in runs),
            now=datetime.now(UTC).timestamp(),
        )
        if isinstance(decision, Skip):
            return SkipReason(decision.reason)
        context.update_cursor(decision.cursor.to_json())
        return RunRequest(run_key=decision.run_key, tags={"adjunct/lag": str(progress.lag)})

    return evaluate


def new_versions_sensor(
    member: "DatasetAsset",
    job: "JobDefinition | UnresolvedAssetJobDefinition",
    *,
    minimum_interval_seconds: int = 30,
) -> SensorDefinition:
    """Return a sensor that launches `job` for the next version that has been delivered whole, as its partition.

    Where names come as they come, the version's name becomes a partition. A run that did not build it is asked for
    again ever more rarely.
    """
    dataset = member.dataset

    @sensor(
        name=f"{dataset.name.replace('-', '_')}_new_versions",
        job=job,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=DefaultSensorStatus.STOPPED,
        description=f"Builds versions of {dataset.name} as they are delivered.",
    )
    def evaluate(context: SensorEvaluationContext, adjunct_lake: LakeResource) -> SensorResult | SkipReason:
        from orchestration.catalog import systems_of
        from orchestration.progress import delivered_version
        from orchestration.version_partitions import known_partitions

        lake = adjunct_lake.open()
        version, awaited = delivered_version(lake, systems_of([dataset], lake), dataset)
        if version is None:
            return SkipReason(f"No new version; {awaited}.")
        if not known_partitions(dataset, context.instance, [version]):
            return SkipReason(f"Version {version} is delivered, and is none of the partitions that are declared.")
        runs = context.instance.get_runs(RunsFilter(statuses=_ACTIVE), limit=1000)
        if any(concerns(run, job.name, {member.key}) for run in runs):
            return SkipReason(f"Version {version} is delivered; a run is already in progress.")
        decision = _ask(
            f"{dataset.name}:{lake.id}",
            f"Version {version} is delivered",
            NewRecordsCursor.from_json(context.cursor),
            {"version": version},
            datetime.now(UTC).timestamp(),
        )
        if isinstance(decision, Skip):
            return SkipReason(decision.reason)
        request = RunRequest(run_key=decision.run_key, partition_key=version)
        return SensorResult(run_requests=[request], cursor=decision.cursor.to_json())

    return evaluate


def _digest(position: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sorted(position.items())).encode()).hexdigest()[:16]
