"""What is there already where startpoints are asked for: what can't be read is in the way, the rest is replaced."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.requests.stored_requests import request_key

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.startpoints.previews.request_preview import Preview
    from dagster_adjunct.orchestration.startpoints.requests.held_startpoints import Held
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.requests.unreadable_requests import Unreadable
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition


def behind_unreadable(unreadable: Sequence[Unreadable], previews: Sequence[Preview]) -> list[Preview]:
    """Return the previews, with an error where what can't be read is in the way.

    That is what waits at the same partition and task, in whose place a request would be lost, and what a task was
    handed for the partition, or for one that is not known: nothing is read there.
    """

    def checked(shown: Preview) -> Preview:
        asked = shown.request
        for unread in unreadable:
            waits = unread.kind == "request" and unread.key == request_key(asked.target)
            of_task = unread.at is not None and unread.at in shown.tasks
            holds = unread.at is not None and (unread.ssp == asked.ssp or (unread.ssp is None and of_task))
            if waits or holds:
                way = f"{asked.ssp} --reason …" if unread.ssp else f"--all --task {str(unread.at)!r} --reason …"
                error = f"{unread.summary()} Take that back first: adjunct startpoint clear MODULE:APP {way}."
                return replace(shown, error=error, falls_back=False)
        return shown

    return [checked(shown) for shown in previews]


def replaced_by(
    previews: Sequence[Preview], there: Iterable[Held], named: Collection[str]
) -> list[tuple[Held, StartpointRequest]]:
    """Return what the requests take the place of; tasks that are `named` get no requests for all tasks."""
    by_ssp: dict[SystemStreamPartition, list[Held]] = {}
    for held in there:
        by_ssp.setdefault(held.request.ssp, []).append(held)
    replaced = []
    for request in (shown.request for shown in previews):
        for held in by_ssp.get(request.ssp, ()):
            old, new = held.at or held.request.task, request.task
            if old == new or (None in (old, new) and (old or new) not in named):
                replaced.append((held, request))
    return replaced
