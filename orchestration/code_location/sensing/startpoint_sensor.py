"""The sensor that launches an application for startpoints: sees requests, hands them to tasks, asks for one run."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from dagster import AssetKey, RunRequest, SensorDefinition

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.sensing.run_requests import Skip, shortened
from dagster_adjunct.orchestration.code_location.sensing.tick import Tick, job_sensor

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.stored_positions import OffsetState
    from dagster_adjunct.orchestration.code_location.sensing.tick import LaunchedJob
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import Requests
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest


def not_applied(fan_outs: "Mapping[str, Requests]", offsets: "OffsetState") -> "list[StartpointRequest]":
    """Return what is fanned out and was not taken in by a commit: each startpoint once, in order of partitions.

    A run that died between its commit and removing what that has applied leaves it here; the next one removes it.
    """
    left: dict[tuple[str, str], StartpointRequest] = {}
    for requests in fan_outs.values():
        for ssp, request in requests.items():
            if not offsets.has_taken(ssp, request.id):
                left[str(ssp), request.id] = request
    return sorted(left.values(), key=lambda request: (request.ssp, request.id))


def described(requests: "Sequence[StartpointRequest]") -> str:
    """Return in a few words how many startpoints wait, where, for whom and why."""
    from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

    texts = [f"{one.ssp} at {describe_startpoint(one.startpoint)}, {one.by}: {one.reason}" for one in requests]
    return f"{len(requests)} startpoint{'s wait' if len(requests) != 1 else ' waits'} ({shortened(texts, '; ')})"


def tags_of(requests: "Sequence[StartpointRequest]") -> dict[str, str]:
    """Return the tags of a run that applies these: their ids, who asked for them and why."""
    return {
        "adjunct/startpoints": shortened(request.id for request in requests),
        "adjunct/startpoints_by": shortened(request.by for request in requests),
        "adjunct/startpoints_reason": shortened((request.reason for request in requests), "; "),
    }


def startpoint_sensor(app: "Application", job: "LaunchedJob", assets: Collection[AssetKey]) -> SensorDefinition:
    """Return a sensor that hands requests for startpoints to tasks and launches one run of `job` that applies them.

    `assets` are those that the job materialises; while a run is on its way to one of them, requests wait for the next
    one. Where a run leaves startpoints as they were, it is asked for again ever more rarely.
    """
    own = frozenset(assets)

    def evaluate(tick: Tick) -> RunRequest | Skip:
        from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog
        from dagster_adjunct.orchestration.planner.lake_catalog import plan_application, systems_for
        from dagster_adjunct.orchestration.startpoints.fan_out_coordinator import fan_out_requests
        from dagster_adjunct.orchestration.startpoints.requests.fan_out_in_words import gone_in_words, left_in_words
        from dagster_adjunct.orchestration.startpoints.requests.startpoint_manager import startpoints_of
        from dagster_adjunct.orchestration.step.progress.input_progress import waiting_datasets

        lake = tick.lake
        startpoints = startpoints_of(lake, app)
        state = BatchLog(lake, app.name).read()[1]
        stored = startpoints.read()
        requested = stored.waiting
        pending = not_applied(stored.handed, state.offsets)
        if not requested and not pending:
            return Skip("No startpoints wait.")
        if tick.in_progress(own):
            what = described([*requested, *pending])
            return Skip(f"{what}; a run is in progress: what it did not meet at its start is for the next one.")
        if who := tick.who_runs(app.name):
            what = described([*requested, *pending])
            return Skip(f"{what}; for the next run: the application is being run by {who}.")
        systems = systems_for(app, lake)
        planned = plan_application(app, systems) if app.inputs else None
        fan_out = fan_out_requests(startpoints, systems, app, planned, state.offsets)
        pending = not_applied(fan_out.tasks, state.offsets)
        for text in (*gone_in_words(fan_out), *left_in_words(fan_out)):
            tick.context.log.warning(text)
        nobodys = [*fan_out.unknown, *(request for held in fan_out.stranded.values() for request in held.values())]
        left = [f"{request.ssp}: no task reads it ({request.by}: {request.reason})" for request in nobodys]
        left += [f"{ssp}: what was handed out can't be read" for ssps in fan_out.held.values() for ssp in sorted(ssps)]
        if not pending:
            return Skip(f"No startpoints wait that a task could apply. {shortened(left, '; ')}".rstrip())
        what = "; ".join([described(pending), *left[:3]])
        # Datasets that are not made yet hold the input back, and not what is asked of other datasets.
        waiting = waiting_datasets(lake, systems, app)
        if waiting and planned is not None and fan_out.tasks.keys() <= {task.name for task in planned.tasks}:
            return Skip(f"{what}; {'; '.join(waiting)}.")
        ids = sorted({request.id for request in pending})
        return tick.ask(f"{app.name}:{lake.id}:startpoints", what, ids, tags=tags_of(pending))

    return job_sensor(
        f"{dagster_name(app.name)}_startpoints",
        job,
        f"Runs {app.name} when somebody has asked for startpoints.",
        evaluate,
    )
