"""Startpoints that are not applied yet: those that wait, and those that were handed to tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint

if TYPE_CHECKING:
    from datetime import datetime

    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import Requests
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.requests.unreadable_requests import Unreadable


@dataclass(frozen=True, slots=True)
class StoredStartpoints:
    """What is stored of an application's startpoints, as it stood at one look, `at` this time by the lake's clock.

    `waiting` are the requests that no fan-out has taken up, in the order in which the store took them; those that are
    too old to be followed are `expired`: the next fan-out deletes them. `handed` is what each task has to apply.
    `unreadable` is what this release of Adjunct can't read, of both: it is left alone until it is taken back.
    """

    waiting: Sequence[StartpointRequest]
    expired: Sequence[StartpointRequest]
    handed: Mapping[str, Requests]
    unreadable: Sequence[Unreadable]
    at: datetime


@dataclass(frozen=True, slots=True)
class Held:
    """A startpoint that is not applied yet: it waits, or was handed to the task `at`.

    `offset` is where a run has found that it starts, and has stored that.
    """

    request: StartpointRequest
    at: str | None = None
    offset: str | None = None

    def summary(self) -> str:
        """Return it in one line."""
        request = self.request
        until = "" if request.until is None else f" until {describe_startpoint(request.until)}"
        where = "waiting" if self.at is None else f"handed to {self.at}"
        where += "" if self.offset is None else f", found at offset {self.offset}"
        task = "" if request.task is None else f" for {request.task}"
        asked = f"{request.ssp}: {describe_startpoint(request.startpoint)}{until}{task}"
        return f"{asked}, {where} ({request.by}: {request.reason})"

    def taken_back(self) -> str:
        """Return in one line that it was taken back, and what may come of it all the same."""
        late = "" if self.offset is None else "; the run that found its offset, if it still goes on, begins there"
        return f"taken back: {self.summary()}{late}"


def not_applied(handed: Mapping[str, Requests], state: ApplicationState) -> Iterator[Held]:
    """Yield what is fanned out, without what a commit has applied already: a crash may have left that there."""
    for task, requests in handed.items():
        for ssp, request in requests.items():
            if not state.offsets.has_taken(ssp, request.id):
                resolved = state.offsets.resolved.get(ssp)
                yield Held(request, task, resolved.offset if resolved and resolved.id == request.id else None)


def has_begun(held: Held, state: ApplicationState) -> bool:
    """Whether a batch has applied it, or the open one does, which is repeated as it is written."""
    ssp, startpoint_id = held.request.ssp, held.request.id
    applied = state.offsets.applied.get(ssp)
    opened = state.open is not None and state.open.startpoints.get(ssp) == startpoint_id
    return opened or (applied is not None and applied.id == startpoint_id)
