"""Sensors: thin shells around pure decisions, with a versioned JSON cursor."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dagster import (
    DagsterRunStatus,
    DefaultSensorStatus,
    RunRequest,
    RunsFilter,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from orchestration.lake_resource import LakeResource

if TYPE_CHECKING:
    from dagster import JobDefinition
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from orchestration.application import Application

CURSOR_VERSION = 1
MAX_ATTEMPTS = 3
_ACTIVE = [
    DagsterRunStatus.QUEUED,
    DagsterRunStatus.NOT_STARTED,
    DagsterRunStatus.STARTING,
    DagsterRunStatus.STARTED,
    DagsterRunStatus.CANCELING,
]


@dataclass(frozen=True, slots=True)
class NewRecordsCursor:
    """What the sensor has asked for: the stream ends (as a digest) and how often they were asked for."""

    ends: str = ""
    attempt: int = 0

    def to_json(self) -> str:
        return json.dumps({"version": CURSOR_VERSION, "ends": self.ends, "attempt": self.attempt})

    @classmethod
    def from_json(cls, text: str | None) -> "NewRecordsCursor":
        """Return the cursor; one of another version, or none, starts anew: a repeated request harms nothing."""
        try:
            cursor = json.loads(text or "{}")
            if cursor.get("version") == CURSOR_VERSION:
                return cls(str(cursor["ends"]), int(cursor["attempt"]))
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
    application: str, cursor: NewRecordsCursor, lag: int, ends: Mapping[str, str], active_runs: int
) -> Request | Skip:
    """Decide whether to launch the step: when records wait and no run is on its way to them.

    A run key is consumed for ever, even by a failed run, so it holds the attempt; ends that three runs have
    not got past need a person.
    """
    if lag == 0:
        return Skip("No new records.")
    if active_runs:
        return Skip(f"{lag} new records; a run is already in progress.")
    digest = hashlib.sha256(json.dumps(sorted(ends.items())).encode()).hexdigest()[:16]
    if digest != cursor.ends:
        asked = NewRecordsCursor(digest, 1)
    elif cursor.attempt < MAX_ATTEMPTS:
        asked = replace(cursor, attempt=cursor.attempt + 1)
    else:
        return Skip(
            f"{lag} new records wait, and {MAX_ATTEMPTS} runs have failed to read them. See the last run's error, "
            "then launch one by hand or reset this sensor's cursor."
        )
    return Request(f"{application}:{asked.ends}:{asked.attempt}", asked)


def new_records_sensor(
    app: "Application", job: "JobDefinition | UnresolvedAssetJobDefinition", *, minimum_interval_seconds: int = 30
) -> SensorDefinition:
    """Return a sensor that launches `job` when an input stream has records that no batch has committed."""

    @sensor(
        name=f"{app.name.replace('-', '_')}_new_records",
        job=job,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=DefaultSensorStatus.STOPPED,
        description=f"Runs {app.name} when its input streams have new records.",
    )
    def evaluate(context: SensorEvaluationContext, adjunct_lake: LakeResource) -> RunRequest | SkipReason:
        from orchestration.catalog import systems_for
        from orchestration.progress import input_progress

        lake = adjunct_lake.open()
        progress = input_progress(lake, systems_for(app, lake), app)
        active = context.instance.get_runs(RunsFilter(job_name=job.name, statuses=_ACTIVE), limit=1)
        decision = decide(
            app.name, NewRecordsCursor.from_json(context.cursor), progress.lag, progress.ends, len(active)
        )
        if isinstance(decision, Skip):
            return SkipReason(decision.reason)
        context.update_cursor(decision.cursor.to_json())
        return RunRequest(run_key=decision.run_key, tags={"adjunct/lag": str(progress.lag)})

    return evaluate
