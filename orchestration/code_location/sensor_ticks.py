"""One tick of a sensor or condition: its cursor, run requests with back-off, and a scan of streams
over several ticks.

A scan counts the unread records of every stream first. Only if these are too few to launch a run,
it asks partitions for the age of their first unread record.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import dagster as dg
from dagster import SkipReason as Skip
from pydantic import Field as Default
from pydantic import ValidationError

from dagster_adjunct.orchestration.batch_log.run_lease import describe_runner
from dagster_adjunct.orchestration.code_location.dagster_internals import (
    NOT_FINISHED_STATUSES,
    UnresolvedAssetJobDefinition,
)
from dagster_adjunct.orchestration.code_location.metadata import has_ended
from dagster_adjunct.orchestration.code_location.pools import describe_held_slots
from dagster_adjunct.orchestration.code_location.resources import LakeResource
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import SystemStreamPartition
from dagster_adjunct.resources.threads import requested_once

LaunchedJob = dg.JobDefinition | UnresolvedAssetJobDefinition


class StreamFinding(StoredDocument):
    """The result of scanning one stream.

    `lag` is the number of unread offsets. `due` is a reason for a run even without unread records
    ("" for none). `ends` is a digest of the partitions' end offsets, for a stream that feeds a
    dataset ("" for others).
    """

    lag: int = 0
    due: str = ""
    ends: str = ""


class StreamScan(StoredDocument):
    """The progress of a scan, which later ticks continue.

    `of` is the id of the application's last commit: if there is a newer one, the scan starts over.
    `streams` has the findings by stream. `young` is the last partition, in their order, whose first
    unread record was found young enough to wait.
    """

    of: str = ""
    streams: Mapping[str, StreamFinding] = Default(default_factory=dict)
    young: str = ""

    @property
    def lag(self) -> int:
        """The number of unread offsets in the streams scanned so far."""
        return sum(stream.lag for stream in self.streams.values())

    @property
    def due(self) -> tuple[str, ...]:
        """The reasons for a run, even without unread records, that were found so far."""
        found = []
        for stream in self.streams.values():
            if stream.due:
                found.append(stream.due)
        return tuple(found)

    @property
    def ends(self) -> dict[str, str]:
        """The digests of end offsets, by stream that feeds a dataset."""
        found = {}
        for name, stream in self.streams.items():
            if stream.ends:
                found[name] = stream.ends
        return found


@dataclass(frozen=True, slots=True)
class Backlog:
    """The result of a scan, `complete` or to be continued.

    `old` is the first partition found whose first unread record is too old to wait, "" for none.
    """

    scan: StreamScan
    complete: bool = True
    old: str = ""


@dataclass
class Deadline:
    """When a tick has to stop, in seconds of `clock`. The first piece of work is always allowed,
    so a scan advances.
    """

    at: float
    clock: Callable[[], float]
    begun: bool = field(default=False, init=False)

    def passed(self) -> bool:
        """Whether to stop before the next piece of work; False in the first call."""
        begun = self.begun
        self.begun = True
        return begun and self.clock() >= self.at


def scan_streams(
    scan: StreamScan,
    streams: Iterable[str],
    visit: Callable[[str], StreamFinding],
    deadline: Deadline,
) -> Backlog:
    """Continue the scan: `visit` each stream that it has not visited yet, until the deadline has
    passed.
    """
    visited = dict(scan.streams)
    complete = True
    for name in streams:
        if name not in visited:
            if deadline.passed():
                complete = False
                break
            visited[name] = visit(name)
    return Backlog(scan.model_copy(update={"streams": visited}), complete)


def scan_ages(
    scan: StreamScan,
    unread: Callable[[str], Mapping[SystemStreamPartition, str]],
    is_old: Callable[[SystemStreamPartition, str], bool],
    deadline: Deadline,
) -> Backlog:
    """Continue the scan: check the age of the first unread record of each partition, up to the
    first old one.

    `unread` returns, for a stream, the partitions with unread records and the offset of the first
    one in each. `is_old` says whether the record there is too old to wait.
    """
    for ssp, start in _iterate_unchecked(scan, unread):
        if deadline.passed():
            return Backlog(scan, complete=False)
        if is_old(ssp, start):
            return Backlog(scan, old=str(ssp))
        scan = scan.model_copy(update={"young": str(ssp)})
    return Backlog(scan)


def _iterate_unchecked(
    scan: StreamScan, unread: Callable[[str], Mapping[SystemStreamPartition, str]]
) -> Iterator[tuple[SystemStreamPartition, str]]:
    """Yield each partition with unread records after the last one that the scan has checked, with
    the offset of its first unread record.
    """
    last_checked = SystemStreamPartition.parse(scan.young) if scan.young else None
    unread_streams = [name for name, stream in scan.streams.items() if stream.lag]
    for name in sorted(unread_streams, key=split_stream_name):
        if last_checked is not None:
            last_stream = (last_checked.system, last_checked.stream)
            if split_stream_name(name) < last_stream:
                continue
        for ssp, start in sorted(unread(name).items()):
            if last_checked is None or ssp > last_checked:
                yield ssp, start


FIRST_WAIT = 60.0
LONGEST_WAIT = 3600.0


class LastRequest(StoredDocument):
    """A sensor's last run request: the digest of its cause, the number of the attempt, and when
    (epoch seconds).
    """

    about: str = ""
    attempt: int = 0
    asked_at: float = 0.0


class KeyedRequest(NamedTuple):
    """The key of a run to request, and the request to remember."""

    run_key: str
    request: LastRequest


def request_run(
    name: str, what: str, about: object, before: LastRequest, now: float
) -> KeyedRequest | Skip:
    """Return the run to request; skip if a run for this cause is recent.

    `name` is the prefix of the run key, `what` describes why a run is needed, and `about`
    (JSON-able) is its cause: if it is the same as `before`, that run has not done its work. Then
    another run is requested after one minute, then two, four and so on, up to an hour. Dagster
    launches one run for a run key, even if that fails, so the key contains the attempt.
    """
    cause = digest(about)
    attempt = 1
    if cause == before.about:
        attempt = before.attempt + 1
    wait = 0.0
    if attempt != 1:
        wait = before.asked_at + backoff_seconds(before.attempt) - now
    was_clock_set_back = now < before.asked_at
    if wait > 0 and not was_clock_set_back:
        return Skip(
            f"{what}; attempt {before.attempt} did not change that (see its run), the next is in"
            f" {wait:.0f} s."
        )
    request = LastRequest(about=cause, attempt=attempt, asked_at=now)
    return KeyedRequest(f"{name}:{cause}:{attempt}", request)


def backoff_seconds(attempt: int) -> float:
    """Return the seconds to wait after this attempt (the first is 1)."""
    doublings = min(attempt - 1, 30)  # enough for the longest wait, and no huge number
    return float(min(FIRST_WAIT * 2**doublings, LONGEST_WAIT))


def digest(about: object) -> str:
    """Return a short digest of a JSON-able value."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


# Incremented when the cursor's layout changes.
CURSOR_VERSION = 1


class SensorCursor(StoredDocument):
    """What a launcher keeps between ticks: its last run request (`asked`), and fields that only
    some launchers use.

    `scan` is an unfinished scan of streams, `seen` the delivered version that an earlier tick has
    found, `outside` the names of delivered versions that are no partitions and were reported,
    `failed` the id of the last failed run that was checked, `permanent` why its failure is
    permanent ("" if it is not), `error` the name of its error's class, and `store` a digest of what
    was stored for the application then.
    """

    asked: LastRequest = LastRequest()
    scan: StreamScan | None = None
    seen: str = ""
    outside: tuple[str, ...] = ()
    failed: str = ""
    permanent: str = ""
    error: str = ""
    store: str = ""


def write_cursor(cursor: SensorCursor) -> str:
    """Serialize a cursor."""
    return json.dumps(
        {"version": CURSOR_VERSION, **cursor.model_dump(mode="json", exclude_defaults=True)}
    )


def read_cursor(text: str | None) -> tuple[SensorCursor, str]:
    """Return the stored cursor and "". If it can't be read, return an empty one and a note that
    says so.

    An empty cursor is harmless: at worst an unnecessary run is requested.
    """
    if not text:
        return SensorCursor(), ""
    try:
        stored = json.loads(text)
        version = stored.pop("version", None)
        if version == CURSOR_VERSION:
            return SensorCursor.model_validate(stored), ""
        note = (
            f"The cursor has version {version!r}, but this release writes {CURSOR_VERSION}: it"
            " starts over."
        )
    except (ValueError, TypeError, AttributeError, ValidationError):
        note = "The cursor can't be read: it starts over."
    return SensorCursor(), note


def _pools_of(run: dg.DagsterRun) -> Collection[str]:
    """Return the pools that a run needs slots of."""
    needed = run.run_op_concurrency
    if needed is None:
        return ()
    return needed.all_pools or ()


@dataclass
class Tick:
    """One evaluation of a launcher, whose `job` materializes these `assets`.

    `stored` is its cursor as text, from the last tick. `location` is the name of its code location,
    None if unknown. `by_condition` is whether a condition of an asset asks, instead of a sensor.
    `changed` is whether there is a new cursor to store.
    """

    instance: dg.DagsterInstance
    log: logging.Logger
    stored: str | None
    job: str
    assets: Collection[dg.AssetKey]
    resource: LakeResource
    location: str | None = None
    by_condition: bool = False
    began: float = field(default_factory=time.monotonic)
    changed: bool = field(default=False, init=False)

    @property
    def lake(self) -> Lake:
        """The lake, opened on first use."""
        return self.resource.open()

    @cached_property
    def cursor(self) -> SensorCursor:
        """The cursor; an empty one, with a warning in the log, if the stored one can't be read."""
        cursor, note = read_cursor(self.stored)
        if note:
            self.log.warning(note)
        return cursor

    def remember(self, **changes: Any) -> None:
        """Change these fields of the cursor."""
        self.cursor = self.cursor.model_copy(update=changes)
        self.changed = True

    def is_of(self, run: dg.DagsterRun, assets: Collection[dg.AssetKey]) -> bool:
        """Whether a run belongs to the job, or materializes one of these assets."""
        is_of_job = run.job_name == self.job and self.is_here(run)
        return is_of_job or any(key in assets for key in run.asset_selection or ())

    def is_here(self, run: dg.DagsterRun) -> bool:
        """Whether a run may be of this code location. Others may have jobs of the same name."""
        origin = run.remote_job_origin
        return origin is None or self.location is None or origin.location_name == self.location

    @requested_once
    def unfinished_runs(self) -> Sequence[dg.DagsterRun]:
        """All runs that are queued or in progress."""
        return self.instance.get_runs(dg.RunsFilter(statuses=NOT_FINISHED_STATUSES), limit=1000)

    def active_runs(self) -> list[dg.DagsterRun]:
        """Return the runs of the job or of one of the assets that are queued or in progress."""
        found = []
        for run in self.unfinished_runs:
            if self.is_of(run, self.assets):
                found.append(run)
        return found

    def describe_waiting(self, runs: Sequence[dg.DagsterRun]) -> str:
        """Return a sentence, after a blank, if one of these runs waits for a slot of a pool that an
        ended run still holds; else "".
        """
        pools: set[str] = set()
        for run in runs:
            pools.update(_pools_of(run))
        held = describe_held_slots(self.instance, pools)
        return f" {held}" if held else ""

    def waits_for_pool(self, runs: Sequence[dg.DagsterRun]) -> bool:
        """Whether another run is queued that needs a pool of one of these runs."""
        held: set[str] = set()
        for run in runs:
            held.update(_pools_of(run))
        ids = {run.run_id for run in runs}
        for run in self.unfinished_runs:
            is_other = run.status is dg.DagsterRunStatus.QUEUED and run.run_id not in ids
            if is_other and not held.isdisjoint(_pools_of(run)):
                return True
        return False

    def running_sensors(self) -> set[str]:
        """Return the names of the code location's sensors that are on."""
        on: set[str] = set()
        if self.instance.schedule_storage is None:
            return on
        for state in self.instance.all_instigator_state():
            is_sensor = state.instigator_type.value == "SENSOR"
            if is_sensor and state.status.value == "RUNNING":
                place = state.origin.repository_origin.code_location_origin.location_name
                if self.location in (None, place):
                    on.add(state.instigator_name)
        return on

    def lease_holder(self, application: str) -> str:
        """Return the holder of the application's run lease, "" if there is none or its Dagster
        run has ended.
        """
        return describe_runner(self.lake, application, partial(has_ended, self.instance))

    def request_run(
        self, name: str, what: str, about: object, **options: Any
    ) -> dg.RunRequest | Skip:
        """Return a run request with these `options` and remember it in the cursor; skip while a run
        is in progress, and while the function `request_run` waits.
        """
        active = self.active_runs()
        if active:
            return Skip(f"{what}; a run is already in progress.{self.describe_waiting(active)}")
        decision = request_run(name, what, about, self.cursor.asked, self.lake.now().timestamp())
        if isinstance(decision, Skip):
            return decision
        self.remember(asked=decision.request)
        return dg.RunRequest(run_key=decision.run_key, **options)


@dataclass(frozen=True)
class Launcher:
    """Decides at each tick whether to launch a run of `job`. `assets` are those that the run may
    materialize.

    A sensor named `name` asks it. So does a ready-made condition of the kind `condition` on one of
    the assets `on`.
    """

    name: str
    job: LaunchedJob
    assets: Collection[dg.AssetKey]
    description: str
    evaluate: Callable[[Tick], dg.RunRequest | Skip]
    condition: str = ""
    on: Collection[dg.AssetKey] = ()

    def sensor(self, interval: int) -> dg.SensorDefinition:
        """Return the sensor that asks this launcher at most every `interval` seconds; it is off
        by default.
        """

        @dg.sensor(
            name=self.name,
            job=self.job,
            minimum_interval_seconds=interval,
            default_status=dg.DefaultSensorStatus.STOPPED,
            description=self.description,
        )
        def evaluate_tick(
            context: dg.SensorEvaluationContext, adjunct_lake: LakeResource
        ) -> dg.RunRequest | Skip:
            tick = Tick(
                context.instance,
                context.log,
                context.cursor,
                self.job.name,
                self.assets,
                adjunct_lake,
                location_of(context),
            )
            decision = self.evaluate(tick)
            if tick.changed:
                context.update_cursor(write_cursor(tick.cursor))
            return decision

        return evaluate_tick


def location_of(context: dg.SensorEvaluationContext) -> str | None:
    """Return the name of the code location that a sensor is in, None if unknown."""
    here = context.code_location_origin
    if here is None:
        return None
    return here.location_name
