"""What sensors wait for after a permanent failure: another run would fail in the same way until
something has changed.

Changed is: the code location, if it was loaded after the failure; the application, if another run
has committed a batch since; and what is stored for it, if it is not as the first tick after the
failure found it (`read_store`). A run by hand that succeeds, or fails for another reason, replaces
the failure.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import dagster as dg

from dagster_adjunct.assets.declaration.dataset import BoundedDataset, QuerySource
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.application.written_tables import table_prefix
from dagster_adjunct.orchestration.code_location.sensor_ticks import Tick, digest
from dagster_adjunct.resources.errors import AdjunctError, PermanentError
from dagster_adjunct.resources.file_streams.streams import FileStreams
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake

LOADED_AT = time.time()
"""When this process has loaded the code location, in epoch seconds; loading it again starts
another process.
"""


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that has failed permanently, when it ended (epoch seconds), and its error."""

    run: str
    ended_at: float
    reason: str


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a run depends on: when the code was loaded, when the newest batch was closed, and what
    is stored now.

    `store` and `store_then` are digests, now and in the first tick after the failure.
    """

    loaded_at: float
    closed_at: float
    store: str
    store_then: str


def decide_wait(failure: Failure | None, now: Circumstances) -> str:
    """Return why no run is launched, and for what it waits; "" if there is no failure or if
    something has changed.
    """
    if failure is None or now.loaded_at > failure.ended_at:
        return ""
    if now.closed_at > failure.ended_at or now.store != now.store_then:
        return ""
    return (
        f"Run {failure.run[:8]} failed permanently: {failure.reason.rstrip('.')}. Another run would"
        " fail, too: none is launched until the code location is loaded again, a startpoint, an"
        " abandoned version or batch, a rollback or another command changes what is stored for the"
        " application, or a run that you launch succeeds."
    )


def permanent_failure(instance: dg.DagsterInstance, run_id: str) -> tuple[str, str]:
    """Return why a run's failure is permanent, as `translate_errors` recorded it, and the name of
    the error's class; both are "" if the failure is not permanent.

    Killed runs and errors that are not Adjunct's do not count as permanent.
    """
    for record in instance.all_logs(run_id, of_type=dg.DagsterEventType.STEP_FAILURE):
        event = record.dagster_event
        failure = None if event is None else event.step_failure_data.user_failure_data
        permanent = None if failure is None else failure.metadata.get("permanent")
        if failure is not None and permanent is not None and permanent.value:
            error = failure.metadata["error"].value
            return failure.description or "its error is permanent", str(error)
    return "", ""


def wait_after_failure(tick: Tick, app: Application, records: Sequence[dg.RunRecord]) -> str:
    """Return why no run of the application is launched after a permanent failure, "" if one may be.

    `records` are its newest runs, newest first. The tick's cursor keeps the failure and what was
    stored then.
    """
    from dagster_adjunct.orchestration.batch_log.batch_log import application_state

    if not records:
        return ""
    newest = records[0]
    has_failed = newest.dagster_run.status is dg.DagsterRunStatus.FAILURE
    if not has_failed or newest.end_time is None:
        return ""
    run = newest.dagster_run.run_id
    if tick.cursor.failed != run:
        reason, error = permanent_failure(tick.instance, run)
        stored = read_store(tick.lake, app) if reason else ""
        tick.remember(failed=run, permanent=reason, error=error, store=stored)
    if not tick.cursor.permanent:
        return ""
    last = application_state(tick.lake, app.name).last
    circumstances = Circumstances(
        loaded_at=LOADED_AT,
        closed_at=0.0 if last is None else last.closed_at.timestamp(),
        store=read_store(tick.lake, app),
        store_then=tick.cursor.store,
    )
    failure = Failure(run, newest.end_time, tick.cursor.permanent)
    return decide_wait(failure, circumstances)


def read_store(lake: Lake, app: Application) -> str:
    """Return a digest of what is stored for an application, except for the records of its streams.

    It changes with each commit of the application and its datasets, with startpoints, with a
    delivered version, if a stream or table is created again, and if files of a stream can be
    admitted again or were set aside. Files that have arrived are admitted first.
    """
    from dagster_adjunct.orchestration.planner.planner import systems_for
    from dagster_adjunct.orchestration.startpoints.store import open_startpoints

    facts: dict[str, Any] = {
        "application": _etag(lake, f"{lake.application_prefix(app.name)}/CURRENT")
    }
    tables = sorted({*app.tables, *app.output_tables})
    facts["tables"] = [_etag(lake, f"{table_prefix(name)}/CURRENT") for name in tables]
    stored = open_startpoints(lake, app).read()
    facts["startpoints"] = sorted(request.id for request in stored.waiting)
    for dataset in app.datasets:
        commit = None
        with suppress(AdjunctError):  # what can't be read is the same until it can
            commit, _ = DatasetLog(lake, dataset.name).read()
        facts[f"dataset {dataset.name}"] = commit and commit.id
    systems = systems_for(app, lake=lake)
    facts["delivered"] = _delivered(lake, systems, app)
    feeding = {dataset.stream for dataset in app.datasets if dataset.stream is not None}
    for name in sorted({*app.inputs, *app.outputs, *feeding}):
        system, stream = split_stream_name(name)
        with suppress(AdjunctError):
            facts[f"stream {name}"] = systems[system].info(stream).identity
        files = systems[system]
        if isinstance(files, FileStreams):
            facts[f"files of {name}"] = _admit_files(files, stream)
    return digest(facts)


def _admit_files(streams: FileStreams, stream: str) -> list[Any]:
    """Admit the files that have arrived. Return why they can't be admitted, "" if they can, and how
    many were set aside so far, by reason.
    """
    problem = ""
    try:
        streams.admit(stream)
    except PermanentError as error:
        problem = error.problem
    state = streams.state(stream)
    return [problem, {} if state is None else dict(state.set_aside)]


def _delivered(lake: Lake, systems: Mapping[str, Any], app: Application) -> dict[str, Any]:
    """Return, by bounded dataset, what is delivered to it: the ends of its stream, or else the
    folder that is next, or the error if folders can't be listed. A query delivers nothing.
    """
    from dagster_adjunct.orchestration.step.progress import find_delivered_version, read_stream_ends

    found: dict[str, Any] = {}
    for dataset in app.datasets:
        if not isinstance(dataset, BoundedDataset):
            continue
        if dataset.stream is not None:
            system, _ = split_stream_name(dataset.stream)
            found[dataset.name] = read_stream_ends(systems[system], dataset.stream)
        elif not isinstance(dataset.input, QuerySource):
            try:
                arrived = find_delivered_version(lake, systems, dataset)
                found[dataset.name] = [arrived.version, arrived.awaited, list(arrived.outside)]
            except AdjunctError as error:
                found[dataset.name] = error.problem
    return found


def _etag(lake: Lake, key: str) -> str | None:
    """Return the ETag of an object of the lake, None if there is none."""
    head = lake.store.head(key)
    if head is None:
        return None
    return head.etag
