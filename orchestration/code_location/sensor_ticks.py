"""One tick of a sensor: its cursor, run requests with back-off, and a scan of streams that may take several ticks.

A scan counts the unread records of every stream first. Only if these are too few to launch a run, it asks partitions
for the age of their first unread record.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import dagster as dg
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition
from pydantic import Field as Default
from pydantic import ValidationError

from dagster_adjunct.orchestration.batch_log.run_lease import describe_runner
from dagster_adjunct.orchestration.code_location.metadata import has_active_run, has_ended
from dagster_adjunct.orchestration.code_location.resources import LakeResource
from dagster_adjunct.resources.common import StoredDocument, split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import SystemStreamPartition

LaunchedJob = dg.JobDefinition | UnresolvedAssetJobDefinition


class StreamFinding(StoredDocument):
    """The result of scanning one stream: unread offsets, a reason for a run without them, and its ends.

    `ends` is a digest for a stream that feeds a dataset, "" otherwise.
    """

    lag: int = 0
    due: str = ""
    ends: str = ""


class StreamScan(StoredDocument):
    """The progress of a scan.

    `of` is the application's last commit; after another one the scan starts over. `streams` maps streams to findings.
    `young` is the last partition, in order, whose first unread record is young enough.
    """

    of: str = ""
    streams: Mapping[str, StreamFinding] = Default(default_factory=dict)
    young: str = ""

    @property
    def lag(self) -> int:
        return sum(stream.lag for stream in self.streams.values())

    @property
    def due(self) -> tuple[str, ...]:
        return tuple(stream.due for stream in self.streams.values() if stream.due)

    @property
    def ends(self) -> dict[str, str]:
        return {name: stream.ends for name, stream in self.streams.items() if stream.ends}


@dataclass
class Deadline:
    """The end of a tick; `clock` is in seconds. The first piece of work is always allowed."""

    at: float
    clock: Callable[[], float]
    begun: bool = field(default=False, init=False)

    def passed(self) -> bool:
        """Whether to stop before the next piece of work."""
        begun, self.begun = self.begun, True
        return begun and self.clock() >= self.at


def scan_streams(
    scan: StreamScan, streams: Sequence[str], visit: Callable[[str], StreamFinding], deadline: Deadline
) -> tuple[StreamScan, bool]:
    """Visit the streams that were not scanned yet; return the scan, and whether it is complete."""
    visited = dict(scan.streams)
    for name in streams:
        if name in visited:
            continue
        if deadline.passed():
            return scan.model_copy(update={"streams": visited}), False
        visited[name] = visit(name)
    return scan.model_copy(update={"streams": visited}), True


def scan_ages(
    scan: StreamScan,
    unread: Callable[[str], Mapping[SystemStreamPartition, str]],
    is_old: Callable[[SystemStreamPartition, str], bool],
    deadline: Deadline,
) -> tuple[StreamScan, SystemStreamPartition | None, bool]:
    """Check the age of the first unread record of each partition; stop at an old one.

    `unread` returns a stream's partitions with the next offset of each. Returns the scan, the partition with an old
    record, and whether the scan is complete.
    """
    done = SystemStreamPartition.parse(scan.young) if scan.young else None
    for name in sorted((name for name, stream in scan.streams.items() if stream.lag), key=split_stream_name):
        if done is not None and split_stream_name(name) < (done.system, done.stream):
            continue
        for ssp, start in sorted(unread(name).items()):
            if done is not None and ssp <= done:
                continue
            if deadline.passed():
                return scan, None, False
            if is_old(ssp, start):
                return scan, ssp, True
            scan = scan.model_copy(update={"young": str(ssp)})
    return scan, None, True


FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0
INTERVAL_SECONDS = 30
_MAX_LENGTH = 200


class LastRequest(StoredDocument):
    """A sensor's last run request: the digest of its cause, the attempt, and when (epoch seconds)."""

    about: str = ""
    attempt: int = 0
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Launch a run with this key."""

    run_key: str
    asked: LastRequest


@dataclass(frozen=True, slots=True)
class Skip:
    """Launch nothing, for this reason."""

    reason: str


def request_run(name: str, what: str, about: object, before: LastRequest, now: float) -> LaunchRequest | Skip:
    """Request a run, or skip if a recent run for the same cause changed nothing.

    `name` is the prefix of the run key, `what` describes why a run is needed, and `about` (JSON-able) is its cause. For
    an unchanged cause the run is requested again after one minute, then two, four and so on, up to an hour. Dagster
    never reuses a run key, even of a failed run, so the key contains the attempt.
    """
    stored = digest(about)
    attempt = before.attempt + 1 if stored == before.about else 1
    wait = 0.0 if attempt == 1 else before.asked_at + backoff_seconds(before.attempt) - now
    if wait > 0:
        return Skip(f"{what}; attempt {before.attempt} did not change that (see its run), the next is in {wait:.0f} s.")
    return LaunchRequest(f"{name}:{stored}:{attempt}", LastRequest(about=stored, attempt=attempt, asked_at=now))


def backoff_seconds(attempt: int) -> float:
    """Return the seconds to wait after this attempt (the first is 1)."""
    return float(min(FIRST_WAIT * 2 ** min(attempt - 1, 30), LONGEST_WAIT))


def digest(about: object) -> str:
    """Return a short digest of a JSON-able value."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def join_shortened(texts: Iterable[str], separator: str = ", ") -> str:
    """Join the first distinct texts, with the number of the others, within the length limit of Dagster's run tags."""
    every = list(dict.fromkeys(texts))
    shown: list[str] = []
    for text in every:
        if shown and len(separator.join([*shown, text])) > _MAX_LENGTH:
            break
        shown.append(text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…")
    more = len(every) - len(shown)
    return separator.join(shown) + (f" and {more} more" if more else "")


# Incremented when the cursor's layout changes.
CURSOR_VERSION = 1

C = TypeVar("C", bound=StoredDocument)


def write_cursor(cursor: StoredDocument) -> str:
    """Serialize a cursor."""
    return json.dumps({"version": CURSOR_VERSION, **cursor.model_dump(mode="json")})


def read_cursor(kind: type[C], text: str | None) -> tuple[C, str]:
    """Return the cursor, and "" or a note that it can't be read and starts over.

    Starting over is harmless: at worst an unnecessary run is requested.
    """
    if not text:
        return kind(), ""
    try:
        stored = json.loads(text)
        version = stored.pop("version", None)
        if version != CURSOR_VERSION:
            return (
                kind(),
                f"The cursor has version {version!r}, but this release writes {CURSOR_VERSION}: it starts over.",
            )
        return kind.model_validate(stored), ""
    except (ValueError, TypeError, AttributeError, ValidationError):
        return kind(), "The cursor can't be read: it starts over."


@dataclass(frozen=True, slots=True)
class Tick:
    """One evaluation of a sensor."""

    context: dg.SensorEvaluationContext
    job: str
    resource: LakeResource

    @property
    def lake(self) -> Lake:
        """The lake, opened on first use."""
        return self.resource.open()

    def load_cursor(self, kind: type[C]) -> C:
        """Return the cursor; an unreadable one starts over with a warning."""
        cursor, note = read_cursor(kind, self.context.cursor)
        if note:
            self.context.log.warning(note)
        return cursor

    def save_cursor(self, cursor: StoredDocument) -> None:
        """Store the cursor for the next tick."""
        self.context.update_cursor(write_cursor(cursor))

    def has_active_run(self, assets: Collection[dg.AssetKey]) -> bool:
        """Whether a run of the job or of one of these assets is queued or in progress."""
        return has_active_run(self.context.instance, self.job, assets)

    def running_sensors(self) -> set[str]:
        """Return the names of the code location's sensors that are on."""
        instance, here = self.context.instance, self.context.code_location_origin
        states = instance.all_instigator_state() if instance.schedule_storage is not None else ()
        on = [state for state in states if (state.status.value, state.instigator_type.value) == ("RUNNING", "SENSOR")]
        places = [state.origin.repository_origin.code_location_origin.location_name for state in on]
        return {
            state.instigator_name
            for state, place in zip(on, places, strict=True)
            if here is None or place == here.location_name
        }

    def lease_holder(self, application: str) -> str:
        """Return the holder of the application's run lease, "" if there is none or its Dagster run has ended."""
        return describe_runner(self.lake, application, partial(has_ended, self.context.instance))

    def request_run(self, name: str, what: str, about: object, **options: Any) -> dg.RunRequest | Skip:
        """Return a run request with these `options`, or why to skip it (see `request_run`)."""
        decision = request_run(name, what, about, self.load_cursor(LastRequest), self.lake.now().timestamp())
        if isinstance(decision, Skip):
            return decision
        self.save_cursor(decision.asked)
        return dg.RunRequest(run_key=decision.run_key, **options)


def job_sensor(
    name: str, job: LaunchedJob, description: str, evaluate: Callable[[Tick], dg.RunRequest | Skip]
) -> dg.SensorDefinition:
    """Return a sensor that launches `job` as `evaluate` decides; it is off by default."""

    @dg.sensor(
        name=name,
        job=job,
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=dg.DefaultSensorStatus.STOPPED,
        description=description,
    )
    def tick(context: dg.SensorEvaluationContext, adjunct_lake: LakeResource) -> dg.RunRequest | dg.SkipReason:
        decision = evaluate(Tick(context, job.name, adjunct_lake))
        return dg.SkipReason(decision.reason) if isinstance(decision, Skip) else decision

    return tick
