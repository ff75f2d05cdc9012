"""Startpoint requests: their fields and stored form, how users write partitions and positions, what
is allowed.

A dataset whose table can be rewound is a task too, "dataset NAME", which reads the partitions of
its stream. A request for all tasks that read a partition includes the dataset only if the
application does not read the stream itself; otherwise only requests that name the dataset's task
do.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.interval_ids import INTERVAL_ID
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.operators.operator import BROADCAST
from dagster_adjunct.orchestration.operators.stream_facts import (
    AS_OF,
    CURRENT,
    RECORDED,
    JoinVersions,
)
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error, check_choice
from dagster_adjunct.resources.names import is_storable_text, split_partitions, split_stream_name
from dagster_adjunct.resources.streams.startpoint import (
    MAX_MS,
    MIN_MS,
    VERSION,
    Startpoint,
    StartpointOldest,
    StartpointSpecific,
    StartpointTimestamp,
    StartpointUpcoming,
    check_id,
    check_startpoint,
    check_stored_version,
)
from dagster_adjunct.resources.streams.system import StreamSystem, SystemStreamPartition
from dagster_adjunct.resources.validation import validated_methods


@dataclass(frozen=True)
class ReadingTasks:
    """By name of the task, the partitions that it reads: the tasks of the plan, and those of
    rewindable datasets.

    Tasks in `named_only` get only requests that name them.
    """

    of_plan: Mapping[str, frozenset[SystemStreamPartition]]
    of_datasets: Mapping[str, frozenset[SystemStreamPartition]]
    named_only: frozenset[str] = frozenset()

    @cached_property
    def tasks(self) -> dict[str, frozenset[SystemStreamPartition]]:
        """The partitions by task, of the plan and of datasets."""
        return {**self.of_plan, **self.of_datasets}

    @cached_property
    def owners(self) -> dict[SystemStreamPartition, list[str]]:
        """By partition, the tasks that get requests for all tasks: all that read it, except
        those in `named_only`.
        """
        owners: dict[SystemStreamPartition, list[str]] = {}
        for task, ssps in self.tasks.items():
            if task not in self.named_only:
                for ssp in ssps:
                    owners.setdefault(ssp, []).append(task)
        return owners

    def targets_of(self, request: StartpointRequest) -> tuple[str, ...]:
        """Return the tasks that a request is for: the named task if it reads the partition, or
        all owners.
        """
        if request.task is None:
            return tuple(self.owners.get(request.ssp, ()))
        if request.ssp in self.tasks.get(request.task, ()):
            return (request.task,)
        return ()


def find_reading_tasks(
    app: Application, plan: ExecutionPlan | None, systems: Mapping[str, StreamSystem]
) -> ReadingTasks:
    """Return the partitions that each task reads; `plan` is None for an application that has only
    datasets.

    Bounded datasets and tables of one run can't be rewound, so they have no task; no task gets a
    request for a stream that only they read. If the application itself reads a dataset's stream,
    the dataset's task gets only requests that name it.
    """
    named_only = set()
    of_datasets = {}
    for dataset in list_rewindable_datasets(app):
        task = dataset_task_name(dataset.name)
        system, stream = dataset.system_stream
        if dataset.stream in app.inputs:
            named_only.add(task)
        # The application may create the stream in its first batch.
        with suppress(errors.StreamNotFoundError):
            of_datasets[task] = frozenset(systems[system].partitions(stream))
    of_plan = plan.partitions_by_task() if plan is not None else {}
    return ReadingTasks(of_plan, of_datasets, frozenset(named_only))


_DATASET = "dataset "


def dataset_task_name(name: str) -> str:
    """Return the name of a dataset's task."""
    return f"{_DATASET}{name}"


def is_dataset_task(task: str) -> bool:
    """Return whether a task is that of a dataset."""
    return task.startswith(_DATASET)


def list_rewindable_datasets(
    app: Application, only: Collection[str] | None = None
) -> list[AdjunctDataset]:
    """Return the datasets that startpoints can rewind: the stored unbounded ones, or `only`
    those with these names.
    """
    listed = []
    for dataset in app.datasets:
        is_selected = only is None or dataset.name in only
        if is_selected and _is_rewindable(dataset):
            listed.append(dataset)
    return listed


def _is_rewindable(dataset: AdjunctDataset) -> bool:
    """Whether startpoints can rewind a dataset: a stored unbounded one."""
    return dataset.follows_changes and dataset.stream is not None and dataset.persistent


def find_as_of_joins(app: Application) -> tuple[str, ...]:
    """Return the ids of the application's as-of joins."""
    found = []
    for operator in app.operators:
        match = operator.spec.match
        if match is not None and match.as_of is not None:
            found.append(operator.id)
    return tuple(found)


def _find_joins_with_ids(app: Application) -> list[str]:
    """Return the ids of the application's as-of joins that select the id of an interval."""
    found = []
    for operator in app.operators:
        match = operator.spec.match
        if match is not None and match.selects_interval:
            found.append(operator.id)
    return found


def choose_versions(app: Application, request: StartpointRequest) -> JoinVersions:
    """Return which dataset versions the request's replay is joined with: its own choice, else the
    application's default.

    Raises ConfigurationError if its choice is not possible.
    """
    default = AS_OF if find_as_of_joins(app) else CURRENT
    asked = request.versions or default
    if asked == default:
        return default
    if request.until is None:
        if default == AS_OF:
            joined = "the entries that were valid at each record's time"
        else:
            joined = "the versions served then"
        raise errors.ConfigurationError(
            f"{request.ssp}: versions={asked} is for a bounded replay, and this request has no end."
            f" It moves the main position, and its batches are joined with {joined}.",
            "Give the request an end (--until-timestamp, --until-offset, --until-upcoming; until=…"
            " in Python), or leave versions out.",
            argument="versions",
            application=app.name,
        )
    if app.restated:
        names = ", ".join(dataset.name for dataset in app.restated.values())
        raise errors.ConfigurationError(
            f"{request.ssp}: versions={asked}, and results of application {app.name!r} follow later"
            f" changes of {names} (restate=): such a replay would put other results in their place,"
            " which nothing corrects.",
            "Leave versions out; or replay in an application without restate=, to another stream.",
            argument="versions",
            application=app.name,
        )
    with_ids = _find_joins_with_ids(app)
    if asked == CURRENT and with_ids:
        raise errors.ConfigurationError(
            f"{request.ssp}: versions=current, and {', '.join(with_ids)} selects {INTERVAL_ID}, the"
            " id of the interval that was valid at the record's time.",
            "Use versions=as-of, or leave it out of select=.",
            argument="versions",
            application=app.name,
        )
    if asked == AS_OF:
        raise errors.ConfigurationError(
            f"{request.ssp}: versions=as-of, and no join of application {app.name!r} is as-of.",
            "Declare one (join(…, as_of=…)), or use versions=current or recorded.",
            argument="versions",
            application=app.name,
        )
    return asked


def describe_versions(app: Application, requests: Sequence[StartpointRequest]) -> tuple[str, ...]:
    """Return a line for each kind of versions with which the bounded replays among the requests are
    joined.

    Empty if the versions are not chosen and no join is as-of. Recorded versions are described by
    their plan instead.
    """
    as_of_joins = find_as_of_joins(app)
    default = AS_OF if as_of_joins else None
    chosen = set()
    for request in requests:
        if request.until is not None:
            chosen.add(request.versions or default)
    lines = []
    if AS_OF in chosen:
        lines.append(
            f"versions as-of: {', '.join(as_of_joins)}: what was valid at each record's time; else"
            " what is served"
        )
    if CURRENT in chosen:
        lines.append("versions current: every join uses what is served when the replay runs")
    return tuple(lines)


def is_broadcast(app: Application, ssp: SystemStreamPartition) -> bool:
    """Return whether the partition is of a broadcast input, which all tasks read with one common
    position.
    """
    source = app.inputs.get(ssp.qualified_stream)
    return source is not None and source.role in BROADCAST


def broadcast_task_error(request: StartpointRequest) -> errors.ConfigurationError:
    """Return the error for a request that names one task, at a partition of a broadcast input."""
    return errors.ConfigurationError(
        f"{request.ssp} is of a broadcast input, which all tasks read with one position:"
        f" {request.task!r} alone can't start elsewhere.",
        "Leave the task out, so that all tasks start there; take a waiting request back with "
        f"adjunct startpoint clear MODULE:APP {request.ssp} --reason ….",
        stream=request.ssp.qualified_stream,
    )


POSITIONS = ("oldest", "upcoming", "timestamp", "offset")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
_SPAN = re.compile(r"(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)
# A smaller number is probably a time in seconds: this is 1973 in ms, and the year 5138 in seconds.
_LEAST_MS = 100_000_000_000
_DIGITS = re.compile(r"\d{1,13}", re.ASCII)
_FINER = re.compile(r"\d{16,30}", re.ASCII)


def parse_position(kind: str, value: str | None = None) -> Startpoint:
    """Return the startpoint for `oldest`, `upcoming`, `timestamp` VALUE or `offset` VALUE.

    A timestamp is ISO 8601 with a time zone, a date (its start in UTC), or milliseconds since 1970.
    Raises ConfigurationError for anything else.
    """
    check_choice(kind, f"position {kind!r} is unknown", POSITIONS, argument="position")
    text = (value or "").strip()
    if kind in ("oldest", "upcoming"):
        if text:
            raise errors.ConfigurationError(
                f"position {kind} takes no value, and {text!r} was given.",
                "Leave the value out.",
                argument="position",
            )
        if kind == "oldest":
            return StartpointOldest()
        return StartpointUpcoming()
    if not text:
        if kind == "timestamp":
            example = "Write it as in 2026-01-31T18:00Z."
        else:
            example = "Write the offset as its system does."
        raise errors.ConfigurationError(
            f"position {kind} needs a value.", example, argument="position"
        )
    if kind == "offset":
        return StartpointSpecific(offset=text)
    return StartpointTimestamp(timestamp_ms=_parse_timestamp(text))


def expand_partitions(
    app: Application, systems: Mapping[str, StreamSystem], texts: Iterable[str]
) -> list[SystemStreamPartition]:
    """Return the partitions that texts name: `lake.flights.3`, `lake.flights.0-3,7`, or
    `lake.flights` for all.

    Each partition is returned once, in order. Raises ConfigurationError for a stream that the
    application does not read and for a partition that the stream does not have; InvalidNameError
    and StreamNotFoundError.
    """
    counts: dict[str, int] = {}
    partitions: dict[SystemStreamPartition, None] = {}
    for text in texts:
        qualified, spans = split_partitions(text)
        _check_stream_read(app, qualified)
        system, stream = split_stream_name(qualified)
        if qualified not in counts:
            counts[qualified] = systems[system].info(stream).partitions
        numbers: Iterable[int]
        if spans is None:
            numbers = range(counts[qualified])
        else:
            numbers = _parse_numbers(text, spans, counts[qualified])
        for number in numbers:
            partitions[SystemStreamPartition(system, stream, number)] = None
    return list(partitions)


def _parse_timestamp(text: str) -> int:
    """Return a time in milliseconds since 1970. Raises ConfigurationError for what is no time, and
    for one that is ambiguous, finer than a millisecond or out of range.
    """
    if _DIGITS.fullmatch(text):
        if int(text) < _LEAST_MS:
            shown = f"{_EPOCH + int(text) * MS:%Y-%m-%d %H:%M} UTC"
            raise _timestamp_error(
                text,
                f"is {shown} in milliseconds since 1970: it looks like a year, or like seconds",
                "Write milliseconds, or the time in ISO form, as in 2026-01-31T18:00Z.",
            )
        return int(text)
    if _FINER.fullmatch(text):
        return int(text)  # micro- or nanoseconds: the startpoint rejects them
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise _timestamp_error(
            text,
            "can't be read: expected ISO 8601 with its zone, a date (UTC), or milliseconds since"
            " 1970",
            "Write it as in 2026-01-31T18:00Z.",
        ) from None
    if _DATE.fullmatch(text):
        moment = moment.replace(tzinfo=UTC)
    if moment.tzinfo is None:
        step = f"Write {text}Z for UTC, or the offset of its zone: {text}+01:00."
        raise _timestamp_error(text, "names no zone", step)
    if moment.microsecond % 1000:
        step = "Round it: down to begin there, up to end there."
        raise _timestamp_error(text, "is finer than a millisecond, and startpoints are not", step)
    since_1970 = to_epoch_ms(moment)
    if not MIN_MS <= since_1970 <= MAX_MS:
        step = "Give a time in that range, or start at the oldest record."
        raise _timestamp_error(text, "is outside the years 1 to 9999 in UTC", step)
    return since_1970


def to_epoch_ms(moment: datetime) -> int:
    """Return the milliseconds from 1970 (UTC) to a moment."""
    return (moment - _EPOCH) // MS


def _timestamp_error(text: str, problem: str, next_step: str) -> errors.ConfigurationError:
    return errors.ConfigurationError(
        f"timestamp {text!r} {problem}.", next_step, argument="timestamp"
    )


def _parse_numbers(text: str, spans: str, count: int) -> list[int]:
    """Return the numbers of the partitions that `spans` ("0-3,7") lists, of a stream with `count`
    partitions. `text` is all that the user wrote, for errors.

    Raises ConfigurationError for an invalid span, and for a partition that does not exist.
    """
    numbers: list[int] = []
    for span in spans.split(","):
        bounds = _SPAN.fullmatch(span)
        listed = range(0)
        if bounds:
            first = bounds["first"]
            last = bounds["last"] or first
            listed = range(int(first), int(last) + 1)
        if not listed:
            raise errors.ConfigurationError(
                f"{text!r} can't be read: {span!r} is neither a partition nor a range.",
                "Write partitions as in lake.flights.3, lake.flights.0-3,7, or lake.flights for"
                " all.",
                argument="partitions",
            )
        if listed[-1] >= count:
            raise errors.ConfigurationError(
                f"{text!r} names partition {listed[-1]}, and the stream has {count} partitions, 0"
                f" to {count - 1}.",
                "Name existing partitions.",
                argument="partitions",
            )
        numbers += listed
    return numbers


def _check_stream_read(app: Application, stream: str) -> None:
    """Raise ConfigurationError if the application does not read a stream, or only for a dataset
    that can't be rewound; InvalidNameError for an invalid name.
    """
    split_stream_name(stream)
    readable = {*app.inputs, *app.restated}
    dataset_of = {}
    for dataset in app.datasets:
        if _is_rewindable(dataset):
            readable.add(str(dataset.stream))
        if dataset.stream is not None:
            dataset_of[dataset.stream] = dataset
    if stream in readable:
        return
    if stream not in dataset_of:
        names = ", ".join(sorted(readable)) or "no stream"
        problem = f"application {app.name!r} does not read {stream}; it reads: {names}."
        raise errors.ConfigurationError(problem, "Check the name.", application=app.name)
    name = dataset_of[stream].name
    if not dataset_of[stream].follows_changes:
        raise errors.ConfigurationError(
            f"{stream} is the input of dataset {name!r}, which is bounded: it rolls back to a"
            " version, not to an offset.",
            f"Choose one (adjunct dataset versions {name}), then: adjunct dataset rollback"
            f" {name} VERSION --reason ….",
            dataset=name,
        )
    raise errors.ConfigurationError(
        f"{stream} is the input of dataset {name!r}, whose table lives for one run, so it can't be"
        " rewound.",
        "Run the application again: it rebuilds the table.",
        dataset=name,
    )


OnUnresolved = Literal["fail", "checkpoint"]
_NAME = re.compile(r"[0-9a-f]{32}")
_TASK_LENGTH = 500
_TEXT_LENGTH = 1_000


class Target(NamedTuple):
    """What a request is for: a partition, and one task or (None) every task that reads it."""

    ssp: SystemStreamPartition
    task: str | None


@validated_methods
@dataclass(frozen=True, slots=True, kw_only=True)
class StartpointRequest:
    """A startpoint for a partition, for one task, or (`task` None) for every task that reads the
    partition.

    `by` and `reason` say who asks and why. `on_unresolved` says what a run does if the startpoint
    has no offset: fail, or continue from the checkpoint. With `until` it is a bounded replay: the
    records from the startpoint up to, excluding, that position are read again, and the main
    position does not move. `force` allows a dataset's table to get older, or to lack changes; at
    the changes by which results are restated, it allows any number of results, once.
    `versions` says which dataset versions a replay is joined with: those of each record's time
    ("as-of"), those served then ("current"), or those of the batches that read the records first
    ("recorded", retained by the plan `recorded`); None is as-of if the application has as-of joins,
    else current.

    A request is applied once, however often it is written, by its `id`, by default its
    startpoint's. `sequence` is its place in the store's order of requests, set when it is written:
    it says which of two came later even if clocks do not.
    """

    ssp: SystemStreamPartition
    startpoint: Startpoint
    by: str
    reason: str
    task: str | None = None
    on_unresolved: OnUnresolved = "fail"
    until: Startpoint | None = None
    force: bool = False
    versions: JoinVersions | None = None
    recorded: str | None = None
    sequence: int = 0
    id: str = ""

    def __post_init__(self) -> None:
        """Check the fields. A request without an id gets that of its startpoint."""
        check_startpoint(self.startpoint, f"the startpoint of the request for {self.ssp}")
        if self.until is not None:
            check_startpoint(self.until, f"the end (until) of the request for {self.ssp}")
        what = f"the startpoint request for {self.ssp} has "
        if self.recorded is not None:
            is_plan = _NAME.fullmatch(self.recorded) is not None
            if not is_plan or self.versions != RECORDED:
                found = f"{what}recorded={self.recorded!r:.80} and versions={self.versions!r}"
                expected = "the id of a plan, of a request for recorded versions"
                step = "Leave it out: Startpoints.request sets it for versions=recorded."
                raise argument_error(found, expected, step, argument="recorded")
        if self.id == "":
            object.__setattr__(self, "id", self.startpoint.id)
        check_id("startpoint request", self.id)
        if self.task is not None:
            check_task(self.task)
        for name, value in {"by": self.by, "reason": self.reason}.items():
            if not value.strip() or not _is_storable(value, _TEXT_LENGTH):
                found = f"{what}{name}={value!r:.100}"
                expected = f"a text of 1 to {_TEXT_LENGTH} characters"
                step = "Say who asks (by) and why (reason): both are shown with the replay."
                raise argument_error(found, expected, step, argument=name)

    @property
    def target(self) -> Target:
        """What the request is for."""
        return Target(self.ssp, self.task)

    def is_expired(self, now_ms: int, expiry_ms: int) -> bool:
        """Return whether it is too old to be handed out: its startpoint was created `expiry_ms`
        ago, or earlier.
        """
        return now_ms - self.startpoint.creation_timestamp_ms >= expiry_ms

    def to_json(self) -> dict[str, Any]:
        """Return the stored form, as JSON values."""
        until = None
        if self.until is not None:
            until = self.until.to_json()
        own_fields = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            **own_fields,
            "version": VERSION,
            "ssp": str(self.ssp),
            "startpoint": self.startpoint.to_json(),
            "until": until,
        }

    @staticmethod
    def from_json(value: object, where: str = "startpoint request") -> StartpointRequest:
        """Return the request from its stored form. Raises MalformedDocumentError, in which
        `where` names the entry.
        """
        if not isinstance(value, Mapping):
            raise malformed_error(where, f"{value!r:.80} is not an object")
        check_stored_version(value, where)
        expected = {*_NAMED, "version"}
        if set(value) != expected:
            raise malformed_error(
                where, f"it has the fields {sorted(map(str, value))}, expected {sorted(expected)}"
            )
        given = dict(value)
        del given["version"]
        given["startpoint"] = Startpoint.from_json(
            given["startpoint"], f"the startpoint of {where}"
        )
        if given["until"] is not None:
            given["until"] = Startpoint.from_json(given["until"], f"the end (until) of {where}")
        try:
            given["ssp"] = SystemStreamPartition.parse(given["ssp"])
            return StartpointRequest(**given)
        except errors.ConfigurationError as error:
            raise malformed_error(where, error.problem) from error


_NAMED = {field.name for field in fields(StartpointRequest)}


def pick_newer(left: StartpointRequest, right: StartpointRequest) -> StartpointRequest:
    """Return which of two requests for one partition a task applies.

    Of two with the same target, that is the one that the store received later, whatever the clocks
    of their writers say. Of one for the task and one for all tasks, it is the one created later, or
    the task's if both are equally old.
    """
    if (left.task is None) == (right.task is None):
        return max(right, left, key=lambda request: request.sequence)
    if left.task is None:
        for_all = left
        for_task = right
    else:
        for_task = left
        for_all = right
    if for_all.startpoint.creation_timestamp_ms > for_task.startpoint.creation_timestamp_ms:
        return for_all
    return for_task


def to_startpoint(request: StartpointRequest) -> Startpoint:
    """Return the startpoint of a request, with the id of the request, which a dataset stores
    once it is applied.
    """
    return replace(request.startpoint, id=request.id)


def check_task(task: str) -> str:
    """Return `task` if it is a valid task name: any text, as in "Partition 3"."""
    if isinstance(task, str) and _is_storable(task, _TASK_LENGTH):
        return task
    raise errors.InvalidNameError(
        f"task name {task!r} can't be stored: expected a text of 1 to {_TASK_LENGTH} characters.",
        "Name the task as the plan does, as in 'Partition 3'.",
        argument="task",
    )


def _is_storable(text: str, length: int) -> bool:
    """Whether a text can be stored, and has 1 to `length` characters."""
    return 0 < len(text) <= length and is_storable_text(text)


def malformed_error(where: str, problem: str) -> errors.MalformedDocumentError:
    """Return the error for a stored entry that can't be read; `where` names the entry."""
    step = (
        "Take it back (adjunct startpoint clear MODULE:APP PARTITION --reason …, or --all for"
        " PARTITION) and request it again, or upgrade if a newer version wrote it."
    )
    return errors.MalformedDocumentError(
        f"{where} can't be read: {problem.rstrip('.')}.", step, document=where
    )


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A stored entry that this release of Adjunct can't read, as `error` says; other entries are
    not affected.

    `value` is stored under `key`. It is a waiting "request", or a "fan-out": what was handed to the
    task `at`, either all of it or one of its requests. `partition` and `task` are what it is for,
    None if unknown.
    """

    kind: Literal["request", "fan-out"]
    key: str
    value: object
    error: str
    partition: str | None = None
    task: str | None = None
    at: str | None = None

    @property
    def ssp(self) -> SystemStreamPartition | None:
        """The partition that the entry is for, None if `partition` is unknown or not a valid
        name.
        """
        return parse_partition(self.partition)

    def summary(self) -> str:
        """Return the entry as one line."""
        where = "waiting" if self.at is None else f"handed to {self.at}"
        return f"{self.partition or self.key}: {where}, and can't be read: {self.error}"


def parse_partition(text: str | None) -> SystemStreamPartition | None:
    """Return the partition of this name; None if it is not valid."""
    if text is None:
        return None
    try:
        return SystemStreamPartition.parse(text)
    except errors.InvalidNameError:
        return None
