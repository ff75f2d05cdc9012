"""A request to start at a startpoint: for which partition and task, by whom and why; and which of two counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from dagster_adjunct.orchestration.operators.spec.versions_met import RECORDED, VERSIONS_MET, VersionsMet
from dagster_adjunct.resources.errors import ConfigurationError, InvalidNameError, MalformedDocumentError
from dagster_adjunct.resources.streams.interface.startpoint import (
    VERSION,
    Startpoint,
    check_id,
    check_startpoint,
    check_version,
    startpoint_from_json,
)
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

OnUnresolved = Literal["fail", "checkpoint"]
_ON_UNRESOLVED = ("fail", "checkpoint")
_NAME = re.compile(r"[0-9a-f]{32}")
_TASK_LENGTH = 500
_TEXT_LENGTH = 1_000

# What a request is for: a partition, and one task or (None) every task that reads it.
Target = tuple[SystemStreamPartition, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartpointRequest:
    """A startpoint for a partition, at one task or (`task` None) at every task that reads the partition.

    `by` and `reason` say who wants it and why. `on_unresolved` says what a start does where the startpoint has no
    offset: fail, or go on from the checkpoint. With `until`, it is a bounded replay: what lies from the startpoint up
    to, but without, that position is read again, and the main position does not move. `force` lets a dataset's table
    get older, or lack changes, where the partition is of a dataset's stream. `versions` says which versions of its
    datasets the replay meets: those of each record's time ("as-of"), those that are served then ("current"), or those
    that the batches met which read the records first ("recorded", held by the plan `recorded`); None is as-of where the
    application joins so, and current where not.

    A request is applied once, however often it is written: that is what its `id` is for, which is its startpoint's
    unless it is given. `sequence` is the place in the store's own order of requests, given when it is written: it tells
    which of two came later even where clocks do not.
    """

    ssp: SystemStreamPartition
    startpoint: Startpoint
    by: str
    reason: str
    task: str | None = None
    on_unresolved: OnUnresolved = "fail"
    until: Startpoint | None = None
    force: bool = False
    versions: VersionsMet | None = None
    recorded: str | None = None
    sequence: int = 0
    id: str = ""

    def __post_init__(self) -> None:
        check_partition(self.ssp, "the startpoint request")
        check_startpoint(self.startpoint, f"the startpoint of the request for {self.ssp}")
        if self.until is not None:
            check_startpoint(self.until, f"the end (until) of the request for {self.ssp}")
        if not isinstance(self.force, bool):
            raise ConfigurationError(
                f"the startpoint request for {self.ssp} has force={self.force!r:.80}: expected True or False.",
                "Leave it out for False.",
                argument="force",
            )
        if self.versions is not None and self.versions not in VERSIONS_MET:
            raise ConfigurationError(
                f"the startpoint request for {self.ssp} has versions={self.versions!r:.80}: expected one of "
                f"{', '.join(VERSIONS_MET)}.",
                "Leave it out: as-of where the application's joins are, else current.",
                argument="versions",
            )
        if self.recorded is not None and (self.versions != RECORDED or not _NAME.fullmatch(str(self.recorded))):
            raise ConfigurationError(
                f"the startpoint request for {self.ssp} has recorded={self.recorded!r:.80} and "
                f"versions={self.versions!r}: expected the id of a plan, of a request for recorded versions.",
                "Leave it out: asking for recorded versions gives it.",
                argument="recorded",
            )
        if not isinstance(self.sequence, int) or isinstance(self.sequence, bool):
            raise ConfigurationError(
                f"the startpoint request for {self.ssp} has sequence={self.sequence!r:.80}: expected an integer.",
                "Leave it out: the store gives it.",
                argument="sequence",
            )
        if self.id == "":
            object.__setattr__(self, "id", self.startpoint.id)
        check_id("startpoint request", self.id)
        if self.task is not None:
            check_task(self.task)
        for name, value in (("by", self.by), ("reason", self.reason)):
            if not isinstance(value, str) or not value.strip() or len(value) > _TEXT_LENGTH or not _storable(value):
                shown = repr(value) if len(repr(value)) < 100 else f"{repr(value)[:100]}…"
                raise ConfigurationError(
                    f"the startpoint request for {self.ssp} has {name}={shown}: expected a text of 1 to "
                    f"{_TEXT_LENGTH} characters.",
                    "Say who asks (by) and why (reason): both are shown with the replay.",
                    argument=name,
                )
        if self.on_unresolved not in _ON_UNRESOLVED:
            raise ConfigurationError(
                f"the startpoint request for {self.ssp} has on_unresolved={self.on_unresolved!r}: expected one of "
                f"{', '.join(_ON_UNRESOLVED)}.",
                'Leave it out to fail, or say "checkpoint".',
                argument="on_unresolved",
            )

    @property
    def target(self) -> Target:
        return self.ssp, self.task

    def expired(self, now_ms: int, expiry_ms: int) -> bool:
        """Whether it is too old to be followed; the moment at which it gets so is too late already."""
        return now_ms - self.startpoint.creation_timestamp_ms >= expiry_ms

    def to_json(self) -> dict[str, Any]:
        """Return the stored form, of JSON-able values."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "version": VERSION,
            "ssp": str(self.ssp),
            "startpoint": self.startpoint.to_json(),
            "until": None if self.until is None else self.until.to_json(),
        }

    @staticmethod
    def from_json(value: object) -> StartpointRequest:
        """Return what `to_json` returned. Raises MalformedDocumentError."""
        return request_from_json(value, "startpoint request")


_NAMED = {field.name for field in fields(StartpointRequest)}
_FIELDS = _NAMED | {"version"}


def request_from_json(value: object, where: str) -> StartpointRequest:
    """Return what `to_json` wrote. Raises MalformedDocumentError, which names `where` it was read from."""
    if not isinstance(value, Mapping):
        raise _malformed(where, f"{value!r:.80} is no object")
    check_version(value, where)
    if set(value) != _FIELDS:
        raise _malformed(where, f"it has the fields {sorted(map(str, value))}, expected {sorted(_FIELDS)}")
    startpoint = startpoint_from_json(value["startpoint"], f"the startpoint of {where}")
    bounded = value["until"] is not None
    until = startpoint_from_json(value["until"], f"the end (until) of {where}") if bounded else None
    given = {name: value[name] for name in _NAMED - {"ssp", "startpoint", "until"}}
    try:
        ssp = SystemStreamPartition.parse(value["ssp"])
        return StartpointRequest(ssp=ssp, startpoint=startpoint, until=until, **given)
    except ConfigurationError as error:
        raise _malformed(where, error.problem) from error


def newer(left: StartpointRequest, right: StartpointRequest) -> StartpointRequest:
    """Return which of two requests counts for one task and partition.

    Between one for the task and one for all tasks: the one created later, and the task's of two created at once.
    Between two for the same target: the one that the store took later, whatever the clocks of their writers said.
    """
    if (left.task is None) == (right.task is None):
        return left if left.sequence > right.sequence else right
    specific, broadcast = (right, left) if left.task is None else (left, right)
    later = broadcast.startpoint.creation_timestamp_ms > specific.startpoint.creation_timestamp_ms
    return broadcast if later else specific


def positioned(request: StartpointRequest) -> Startpoint:
    """Return where a request starts, under the request's id: by that a table knows what it has applied."""
    return replace(request.startpoint, id=request.id)


def check_partition(ssp: object, what: str) -> SystemStreamPartition:
    """Return `ssp` if it is a stream partition; `what` says in the error what it was for. Raises InvalidNameError."""
    if isinstance(ssp, SystemStreamPartition):
        return ssp
    raise InvalidNameError(
        f"{what} is for {ssp!r:.200}, which is no SystemStreamPartition.",
        'Write SystemStreamPartition("lake", "flights", 3), or SystemStreamPartition.parse("lake.flights.3").',
        argument="ssp",
    )


def check_task(task: str) -> str:
    """Return `task` if it can name a task: any text, as in "Partition 3"."""
    if not isinstance(task, str) or not 0 < len(task) <= _TASK_LENGTH or not _storable(task):
        raise InvalidNameError(
            f"task name {task!r} can't be kept: expected a text of 1 to {_TASK_LENGTH} characters.",
            "Name the task as the plan does, as in 'Partition 3'.",
            argument="task",
        )
    return task


def _storable(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def _malformed(where: str, problem: str) -> MalformedDocumentError:
    return MalformedDocumentError(
        f"{where} can't be read: {problem.rstrip('.')}.",
        "Take it back and ask again (adjunct startpoint clear), or upgrade if a newer version wrote it.",
        document=where,
    )
