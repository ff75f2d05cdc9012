"""What is refused of requests: they can't be followed, what can't be read is in the way, or what is of another kind."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.requests.startpoint_documents import request_key
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.startpoints.previews.preview_requests import Preview
    from dagster_adjunct.orchestration.startpoints.requests.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.requests.startpoints_not_applied import Held
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


def check_followed(previews: Sequence[Preview]) -> None:
    """Refuse requests that can't be followed as things are, and replays that would read nothing."""
    wrong = [shown for shown in previews if shown.error and not shown.falls_back]
    if wrong:
        more = "" if len(wrong) == 1 else f" So for {len(wrong) - 1} more of the {len(previews)} partitions."
        raise ConfigurationError(
            f"the startpoint can't be followed as things are, and nothing is written. {wrong[0].error}{more}",
            "See what each would do with --dry-run; in Python: preview(…).",
            stream=wrong[0].request.ssp.qualified_stream,
        )
    if all(shown.request.until is not None and shown.offsets == 0 for shown in previews):
        first, others = previews[0], "" if len(previews) == 1 else ", nor in the other partitions"
        raise ConfigurationError(
            f"{first.request.ssp}: nothing lies between the startpoint (offset {first.start}) and the end of the "
            f"replay (offset {first.end}){others}; nothing is written.",
            "Choose an end that lies after the start.",
            stream=first.request.ssp.qualified_stream,
        )


def replaced_by(
    requests: Iterable[StartpointRequest], there: Iterable[Held], named: Collection[str]
) -> list[tuple[Held, StartpointRequest]]:
    """Return what the requests take the place of; tasks that are `named` get no requests for all tasks."""
    by_ssp: dict[SystemStreamPartition, list[Held]] = {}
    for held in there:
        by_ssp.setdefault(held.request.ssp, []).append(held)
    replaced = []
    for request in requests:
        for held in by_ssp.get(request.ssp, ()):
            old, new = held.at or held.request.task, request.task
            if old == new or (None in (old, new) and (old or new) not in named):
                replaced.append((held, request))
    return replaced


def check_kinds(replaced: Sequence[tuple[Held, StartpointRequest]]) -> None:
    """Refuse a bounded replay that takes the place of a startpoint which moves the position, or the other way round."""
    for held, request in replaced:
        if (held.request.until is None) != (request.until is None):
            what = "a bounded replay" if request.until is not None else "a startpoint that moves the position"
            other = "a startpoint that moves the position" if request.until is not None else "a bounded replay"
            raise ConfigurationError(
                f"{what} would take the place of {other}: {held.summary()}.",
                "Let a run apply that first, take it back (adjunct startpoint clear), or replace it with --replace; "
                "in Python: replace=True.",
                stream=request.ssp.qualified_stream,
            )
