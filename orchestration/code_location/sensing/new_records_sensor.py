"""The sensor that launches an application when its input streams hold what no batch has committed."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from typing import TYPE_CHECKING

from dagster import AssetKey, RunRequest, SensorDefinition

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.code_location.sensing.launch_when import LaunchWhen
from dagster_adjunct.orchestration.code_location.sensing.resumable_look import (
    Deadline,
    Look,
    StreamFinding,
    look_at_ages,
    look_at_streams,
)
from dagster_adjunct.orchestration.code_location.sensing.run_requests import (
    LastRequest,
    LaunchRequest,
    Skip,
    ask,
    digest_of,
)
from dagster_adjunct.orchestration.code_location.sensing.tick import Tick, job_sensor
from dagster_adjunct.resources.stored_documents import StoredDocument
from dagster_adjunct.resources.times import before

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.code_location.sensing.tick import LaunchedJob
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

# Dagster ends a tick after a minute; what remains is for looking at datasets and storing the cursor.
TICK_SECONDS = 40.0


class NewRecordsCursor(StoredDocument):
    """What was asked for last, and the look at the streams that the tick before did not finish."""

    asked: LastRequest = LastRequest()
    look: Look | None = None


@dataclass(frozen=True, slots=True)
class Stock:
    """What a look found: whether it is `complete`, and `old`, a partition whose first unread record is too old."""

    look: Look
    complete: bool
    old: str = ""


def decide(
    name: str,
    asked: LastRequest,
    stock: Stock,
    position: Mapping[str, object],
    *,
    rule: LaunchWhen,
    unfinished: Sequence[str] = (),
    waiting: Callable[[], Sequence[str]] = tuple,
    now: float,
) -> LaunchRequest | Skip:
    """Decide whether to launch a run: when enough waits, and no dataset holds it back.

    `name` tells this application in this lake from others, `position` is where it stands, `now` is in epoch seconds.
    """
    look = stock.look
    due = (*unfinished, *look.due)
    if not look.lag and not due:
        return Skip("No new records.")
    old = f"{stock.old} holds one older than {rule.age}" if stock.old else ""
    what = "; ".join(filter(None, [f"{look.lag:,} new records" if look.lag else "", old, *due]))
    if not due and not stock.old and not rule.enough(look.lag):
        return Skip(f"{what}, fewer than wanted: launched at {rule}.")
    held = waiting()
    if held:
        return Skip(f"{what}; {'; '.join(held)}.")
    return ask(name, what, {"position": position, "ends": look.ends}, asked, now)


def new_records_sensor(
    app: "Application", job: "LaunchedJob", assets: Collection[AssetKey], rule: LaunchWhen
) -> SensorDefinition:
    """Return a sensor that launches `job` when input streams hold enough that no batch has committed.

    `assets` are those that the job materialises; while a run is on its way to one of them, none is launched.
    """
    own = frozenset(assets)

    def evaluate(tick: Tick) -> RunRequest | Skip:
        from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog
        from dagster_adjunct.orchestration.planner.lake_catalog import systems_for
        from dagster_adjunct.orchestration.step.progress.input_progress import (
            followed_state,
            position_of,
            unfinished,
            waiting_datasets,
        )

        if tick.in_progress(own):
            return Skip("A run is already in progress.")
        cursor, lake = tick.recall(NewRecordsCursor), tick.lake
        now = lake.now()
        if who := tick.who_runs(app.name):
            return Skip(f"The application is being run by {who}.")
        systems = systems_for(app, lake)
        deadline = Deadline(time.monotonic() + TICK_SECONDS, time.monotonic)
        commit, stored = BatchLog(lake, app.name).read()
        state = followed_state(app, stored)
        begun = cursor.look if cursor.look is not None and cursor.look.of == (commit.id if commit else "") else None
        look = begun or Look(of=commit.id if commit else "")
        stock = take_stock(systems, app, state, look, rule, now, deadline)
        if not stock.complete:
            tick.remember(NewRecordsCursor(asked=cursor.asked, look=stock.look))
            seen = f"{len(stock.look.streams)} streams" + (f", {stock.look.young}" if stock.look.young else "")
            return Skip(f"The tick's {TICK_SECONDS:.0f} s are over after {seen}; the next one goes on there.")
        decision = decide(
            f"{app.name}:{lake.id}",
            cursor.asked,
            stock,
            position_of(app, state),
            rule=rule,
            unfinished=unfinished(state),
            waiting=partial(waiting_datasets, lake, systems, app),
            now=now.timestamp(),
        )
        asked = decision.asked if isinstance(decision, LaunchRequest) else cursor.asked
        tick.remember(NewRecordsCursor(asked=asked))
        if isinstance(decision, Skip):
            # A mistyped address looks like a lake that nobody has written to yet.
            nowhere = "" if lake.exists() else f" There is no lake at {lake.url}."
            return Skip(f"{decision.reason}{nowhere}")
        return RunRequest(run_key=decision.run_key, tags={"adjunct/lag": str(stock.look.lag)})

    return job_sensor(
        f"{dagster_name(app.name)}_new_records",
        job,
        f"Runs {app.name} when its input streams have new records: {rule}.",
        evaluate,
    )


def take_stock(
    systems: "Mapping[str, StreamSystem]",
    app: "Application",
    state: "ApplicationState",
    look: Look,
    rule: LaunchWhen,
    now: datetime,
    deadline: Deadline,
) -> Stock:
    """Go on with a look at the application's streams until it is complete or the deadline has passed."""
    from dagster_adjunct.orchestration.step.progress.input_progress import (
        feeding_streams,
        looked_at,
        stream_ends,
        stream_progress,
        unfinished,
    )

    feeding = feeding_streams(app)
    opened = cache(partial(looked_at, systems))

    def visit(stream: str) -> StreamFinding:
        ends = digest_of(stream_ends(opened(stream), stream)) if stream in feeding else ""
        if stream not in app.inputs:
            return StreamFinding(ends=ends)
        progress = stream_progress(opened(stream), app.inputs[stream], state)
        return StreamFinding(ends=ends, lag=progress.lag, due=progress.due)

    look, complete = look_at_streams(look, tuple(dict.fromkeys([*app.inputs, *feeding])), visit, deadline)
    if not complete or rule.age is None or not look.lag or rule.enough(look.lag) or look.due or unfinished(state):
        return Stock(look, complete)
    before_ms = int(before(now, rule.age).timestamp() * 1000)

    def unread(stream: str) -> "Mapping[SystemStreamPartition, str]":
        return stream_progress(opened(stream), app.inputs[stream], state).unread

    def is_old(ssp: "SystemStreamPartition", start: str) -> bool:
        system = opened(ssp.qualified_stream)
        return system.compare(start, system.offset_for_timestamp(ssp, before_ms)) < 0

    look, old, complete = look_at_ages(look, unread, is_old, deadline)
    return Stock(look, complete, "" if old is None else str(old))
