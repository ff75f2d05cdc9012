"""A tick of a sensor: the job that it may launch, the lake that it looks at, and what it remembers from before."""

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from pydantic import Field as Default
from pydantic import ValidationError

from dagster_adjunct.orchestration.code_location.metadata import has_active_run, has_ended
from dagster_adjunct.orchestration.code_location.resources import LakeResource
from dagster_adjunct.resources.common import StoredDocument, split_stream_name
from dagster_adjunct.resources.streams.system import SystemStreamPartition

if TYPE_CHECKING:
    from dagster import JobDefinition
    from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

    from dagster_adjunct.resources.objects.lake import Lake

# A look at an application's streams that may take several ticks: it stops at a deadline and goes on from there.
#
# First every stream is looked at once, for what waits in it. Only where that is too few records to launch a run,
# partitions are asked, one after the other, for the age of their first unread record.


class StreamFinding(StoredDocument):
    """What a look has found in one stream: offsets to be read, a reason for a run without them, and its ends.

    `ends` is a digest, of a stream that feeds a dataset; "" otherwise.
    """

    lag: int = 0
    due: str = ""
    ends: str = ""


class StreamScan(StoredDocument):
    """What a look has found so far.

    `of` is the application's last commit: after another one the look begins anew. `streams` has what was found by
    stream. `young` is the last partition whose first unread record was found young enough, in order of partitions.
    """

    of: str = ""
    streams: "Mapping[str, StreamFinding]" = Default(default_factory=dict)
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
    """Until when a tick works; `clock` is in seconds. What it begins with is never refused, so that each gets on."""

    at: float
    clock: Callable[[], float]
    begun: bool = field(default=False, init=False)

    def passed(self) -> bool:
        """Whether to stop before the next piece of work."""
        begun, self.begun = self.begun, True
        return begun and self.clock() >= self.at


def scan_streams(
    look: "StreamScan", streams: Sequence[str], visit: "Callable[[str], StreamFinding]", deadline: "Deadline"
) -> "tuple[StreamScan, bool]":
    """Visit the streams that were not looked at yet; return the look, and whether it has all of them."""
    visited = dict(look.streams)
    for name in streams:
        if name in visited:
            continue
        if deadline.passed():
            return look.model_copy(update={"streams": visited}), False
        visited[name] = visit(name)
    return look.model_copy(update={"streams": visited}), True


def scan_ages(
    look: "StreamScan",
    unread: Callable[[str], Mapping[SystemStreamPartition, str]],
    is_old: Callable[[SystemStreamPartition, str], bool],
    deadline: "Deadline",
) -> "tuple[StreamScan, SystemStreamPartition | None, bool]":
    """Ask partitions in which something waits for the age of the first; stop at one that is old.

    `unread` gives a stream's partitions with the next offset of each. Returns the look, the partition with an old
    record, and whether the deadline left nothing unasked.
    """
    done = SystemStreamPartition.parse(look.young) if look.young else None
    for name in sorted((name for name, stream in look.streams.items() if stream.lag), key=split_stream_name):
        if done is not None and split_stream_name(name) < (done.system, done.stream):
            continue
        for ssp, start in sorted(unread(name).items()):
            if done is not None and ssp <= done:
                continue
            if deadline.passed():
                return look, None, False
            if is_old(ssp, start):
                return look, ssp, True
            look = look.model_copy(update={"young": str(ssp)})
    return look, None, True


FIRST_WAIT, LONGEST_WAIT = 60.0, 3600.0
INTERVAL_SECONDS = 30
_MAX_LENGTH = 200


class LastRequest(StoredDocument):
    """What a sensor asked for last: for which state of things (a digest), how often, and when (epoch seconds)."""

    about: str = ""
    attempt: int = 0
    asked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """Launch a run under this key."""

    run_key: str
    asked: "LastRequest"


@dataclass(frozen=True, slots=True)
class Skip:
    """Launch nothing, and say why."""

    reason: str


def request_run(name: str, what: str, about: object, before: "LastRequest", now: float) -> "LaunchRequest | Skip":
    """Ask for a run, or wait where one that was asked for has left things as they were.

    `name` is how the run key begins, `what` says why a run is wanted, and `about` (JSON-able) is the state of things.
    As long as that stays the same, the run is asked for again after one minute, then after two, four and so on, up to
    an hour. A run key is consumed for ever, even by a failed run, so it holds the attempt.
    """
    stored = digest(about)
    attempt = before.attempt + 1 if stored == before.about else 1
    wait = 0.0 if attempt == 1 else before.asked_at + backoff_seconds(before.attempt) - now
    if wait > 0:
        return Skip(
            f"{what}; attempt {before.attempt} did not get past that (see its run), the next is in {wait:.0f} s."
        )
    return LaunchRequest(f"{name}:{stored}:{attempt}", LastRequest(about=stored, attempt=attempt, asked_at=now))


def backoff_seconds(attempt: int) -> float:
    """Return how many seconds to wait after this attempt, counted from 1."""
    return float(min(FIRST_WAIT * 2 ** min(attempt - 1, 30), LONGEST_WAIT))


def digest(about: object) -> str:
    """Return a short text that differs where `about` does."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]


def join_shortened(texts: Iterable[str], separator: str = ", ") -> str:
    """Return distinct texts as one that a run's tag can hold and a person can read: the first ones, and how many more.

    Dagster's storage indexes the values of tags, which bounds them.
    """
    every = list(dict.fromkeys(texts))
    shown: list[str] = []
    for text in every:
        if shown and len(separator.join([*shown, text])) > _MAX_LENGTH:
            break
        shown.append(text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…")
    more = len(every) - len(shown)
    return separator.join(shown) + (f" and {more} more" if more else "")


# A layout that an older release can't read gets another one.
CURSOR_VERSION = 1

C = TypeVar("C", bound=StoredDocument)


def write_cursor(cursor: StoredDocument) -> str:
    """Return the cursor as it is stored."""
    return json.dumps({"version": CURSOR_VERSION, **cursor.model_dump(mode="json")})


def read_cursor(kind: "type[C]", text: str | None) -> "tuple[C, str]":
    """Return the cursor, and "" or what to say of one that can't be read and so starts anew.

    Starting anew harms nothing: at worst a run is asked for again, which then finds nothing to do.
    """
    if not text:
        return kind(), ""
    try:
        stored = json.loads(text)
        version = stored.pop("version", None)
        if version != CURSOR_VERSION:
            return (
                kind(),
                f"The cursor is of version {version!r}, and this release writes {CURSOR_VERSION}: it starts anew.",
            )
        return kind.model_validate(stored), ""
    except (ValueError, TypeError, AttributeError, ValidationError):
        return kind(), "The cursor can't be read: it starts anew."


if TYPE_CHECKING:
    LaunchedJob = JobDefinition | UnresolvedAssetJobDefinition


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
        return has_active_run(self.context.instance, self.job, assets)

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
        from dagster_adjunct.orchestration.batch_log.run_lease import describe_runner

        return describe_runner(self.lake, application, partial(has_ended, self.context.instance))

    def ask(self, name: str, what: str, about: object, **options: Any) -> RunRequest | Skip:
        """Return the run that is wanted, with these `options`, or why to wait with it; `run_requests.ask` says when."""
        decision = request_run(name, what, about, self.recall(LastRequest), self.lake.now().timestamp())
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
        minimum_interval_seconds=INTERVAL_SECONDS,
        default_status=DefaultSensorStatus.STOPPED,
        description=description,
    )
    def tick(context: SensorEvaluationContext, adjunct_lake: LakeResource) -> RunRequest | SkipReason:
        decision = evaluate(Tick(context, job.name, adjunct_lake))
        return SkipReason(decision.reason) if isinstance(decision, Skip) else decision

    return tick
