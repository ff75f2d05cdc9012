"""A tick of a sensor: the job that it may launch, the lake that it looks at, and what it remembers from before."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dagster import (
    AssetKey,
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from dagster_adjunct.orchestration.code_location.sensing.run_requests import (
    SECONDS_BETWEEN_LOOKS,
    LastRequest,
    Skip,
    ask,
)
from dagster_adjunct.orchestration.code_location.sensing.sensor_cursor import read_cursor, write_cursor
from dagster_adjunct.orchestration.code_location.shared.lake_resource import LakeResource
from dagster_adjunct.orchestration.code_location.shared.runs_in_progress import has_ended, in_progress
from dagster_adjunct.resources.stored_documents import StoredDocument

if TYPE_CHECKING:
    from dagster import JobDefinition
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from dagster_adjunct.resources.objects import Lake

    LaunchedJob = JobDefinition | UnresolvedAssetJobDefinition

C = TypeVar("C", bound=StoredDocument)


@dataclass(frozen=True, slots=True)
class Tick:
    """One evaluation of a sensor, as Dagster began it."""

    context: SensorEvaluationContext
    job: str
    resource: LakeResource

    @property
    def lake(self) -> "Lake":
        """The lake, opened when it is first asked for."""
        return self.resource.open()

    def recall(self, kind: type[C]) -> C:
        """Return the cursor; one that can't be read starts anew, and the tick's log says so."""
        cursor, note = read_cursor(kind, self.context.cursor)
        if note:
            self.context.log.warning(note)
        return cursor

    def remember(self, cursor: StoredDocument) -> None:
        """Keep the cursor for the next tick."""
        self.context.update_cursor(write_cursor(cursor))

    def in_progress(self, assets: Collection[AssetKey]) -> bool:
        """Whether a run of the job, or to one of these assets, is on its way or waits in the queue."""
        return in_progress(self.context.instance, self.job, assets)

    def switched_on(self) -> set[str]:
        """Return the names of the code location's sensors that are on; of an instance that stores none, no names."""
        instance, here = self.context.instance, self.context.code_location_origin
        states = instance.all_instigator_state() if instance.schedule_storage is not None else ()
        on = [state for state in states if (state.status.value, state.instigator_type.value) == ("RUNNING", "SENSOR")]
        places = [state.origin.repository_origin.code_location_origin.location_name for state in on]
        return {
            state.instigator_name
            for state, place in zip(on, places, strict=True)
            if here is None or place == here.location_name
        }

    def who_runs(self, application: str) -> str:
        """Return who holds the application's lease, "" for nobody; a run that Dagster knows has ended holds none."""
        from dagster_adjunct.orchestration.batchlog.run_lease import who_runs

        return who_runs(self.lake, application, partial(has_ended, self.context.instance))

    def ask(self, name: str, what: str, about: object, **options: Any) -> RunRequest | Skip:
        """Return the run that is wanted, with these `options`, or why to wait with it; `run_requests.ask` says when."""
        decision = ask(name, what, about, self.recall(LastRequest), self.lake.now().timestamp())
        if isinstance(decision, Skip):
            return decision
        self.remember(decision.asked)
        return RunRequest(run_key=decision.run_key, **options)


def job_sensor(
    name: str, job: "LaunchedJob", description: str, evaluate: Callable[[Tick], RunRequest | Skip]
) -> SensorDefinition:
    """Return a sensor that launches `job` as `evaluate` says; it is off until somebody switches it on."""

    @sensor(
        name=name,
        job=job,
        minimum_interval_seconds=SECONDS_BETWEEN_LOOKS,
        default_status=DefaultSensorStatus.STOPPED,
        description=description,
    )
    def tick(context: SensorEvaluationContext, adjunct_lake: LakeResource) -> RunRequest | SkipReason:
        decision = evaluate(Tick(context, job.name, adjunct_lake))
        return SkipReason(decision.reason) if isinstance(decision, Skip) else decision

    return tick
