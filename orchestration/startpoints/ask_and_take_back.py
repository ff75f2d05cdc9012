"""Asks for startpoints, and takes back what was asked for and not applied: what the commands and the job do."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as with_fields
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.batchlog.batch_log import BatchLog
from dagster_adjunct.orchestration.startpoints.dataset_requests import named_only
from dagster_adjunct.orchestration.startpoints.fan_out_coordinator import startpoints_of
from dagster_adjunct.orchestration.startpoints.handed_requests import is_broadcast
from dagster_adjunct.orchestration.startpoints.request_preview import Preview, preview
from dagster_adjunct.orchestration.startpoints.stored_requests import request_key
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.streams.interface.startpoint import describe_startpoint
from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import ApplicationState
    from dagster_adjunct.orchestration.batchlog.stored_positions import Replay
    from dagster_adjunct.orchestration.startpoints.startpoint_manager import StartpointManager
    from dagster_adjunct.orchestration.startpoints.startpoint_request import StartpointRequest
    from dagster_adjunct.orchestration.startpoints.unreadable_requests import Unreadable
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

_LOOKS = 5


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
        asked = self.request
        until = "" if asked.until is None else f" until {describe_startpoint(asked.until)}"
        where = "waiting" if self.at is None else f"handed to {self.at}"
        where += "" if self.offset is None else f", found at offset {self.offset}"
        task = "" if asked.task is None else f" for {asked.task}"
        return (
            f"{asked.ssp}: {describe_startpoint(asked.startpoint)}{until}{task}, {where} ({asked.by}: {asked.reason})"
        )

    def taken_back(self) -> str:
        """Return in one line that it was taken back, and what may come of it all the same."""
        late = "" if self.offset is None else "; the run that found its offset, if it still goes on, begins there"
        return f"taken back: {self.summary()}{late}"


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked for: what each request would do now, what it takes the place of, and whether it is written."""

    previews: tuple[Preview, ...]
    replaced: tuple[Held, ...]
    written: bool

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return {
            "written": self.written,
            "partitions": [each.to_json() for each in self.previews],
            "replaced": [each.summary() for each in self.replaced],
        }


@dataclass(frozen=True, slots=True)
class TakenBack:
    """What was taken back, and the `replays` that were stopped where they were; `left` says what was not, and why.

    `unreadable` is what this release of Adjunct can't read, taken back as it is.
    """

    startpoints: tuple[Held, ...]
    replays: tuple[Replay, ...]
    left: tuple[str, ...]
    unreadable: tuple[Unreadable, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return {
            "taken_back": [each.summary() for each in self.startpoints],
            "replays": [each.model_dump(mode="json") for each in self.replays],
            "left": list(self.left),
            "unreadable": [each.summary() for each in self.unreadable],
        }


def ask(
    lake: Lake,
    systems: Mapping[str, StreamSystem],
    app: Application,
    requests: Sequence[StartpointRequest],
    *,
    replace: bool = False,
    dry_run: bool = False,
) -> Asked:
    """Write these requests, all or none; return what they would do if a run started now.

    Each takes the place of what is not applied yet at the same partition and task. Raises ConfigurationError where no
    task reads a partition; where what waits or was handed out there can't be read; where a startpoint has no offset
    now, and the request does not go on from the checkpoint then; and, without `replace`, where a bounded replay would
    take the place of a startpoint, or the other way round. With `dry_run` nothing is written, and nothing is refused:
    the previews say what is wrong. Where the application has startpoints switched off, both are refused.
    """
    if not requests:
        raise ConfigurationError(
            "a startpoint is asked for at no partition.",
            "Name one, as in lake.flights.3, or a stream: lake.flights.",
            argument="partitions",
        )
    startpoints = startpoints_of(lake, app)
    startpoints.check_on()
    previews = _behind(startpoints.unreadable(), preview(lake, systems, app, requests))
    _, state = BatchLog(lake, app.name).read()
    there = [*_waiting(startpoints), *_handed(startpoints, state)]
    replaced = _replaced(previews, there, named_only(app))
    if not dry_run:
        _check(previews)
        if not replace:
            _check_kinds(replaced)
        startpoints.write_startpoints(requests)
    return Asked(tuple(previews), tuple(dict.fromkeys(old for old, _ in replaced)), not dry_run)


def take_back(
    lake: Lake,
    app: Application,
    ssps: Collection[SystemStreamPartition] | None = None,
    *,
    task: str | None = None,
    by: str,
    reason: str,
) -> TakenBack:
    """Take back what is asked for at these partitions (None: at all) and not applied, and stop bounded replays there.

    With `task`, only what is for this task alone or was handed to it; replays are of all, and go on. What a batch has
    begun with stays. Raises CommitConflictError where a run commits at the same moment; what was taken back stays so.
    """
    startpoints, log = startpoints_of(lake, app), BatchLog(lake, app.name)
    _, state = log.read()
    wanted = None if ssps is None else dict.fromkeys(ssps)

    def chosen(held: Held) -> bool:
        # Of a broadcast input, all tasks hold what is for all of them: one does not give it back alone.
        one = held.request.task if held.at is None or is_broadcast(app, held.request.ssp) else held.at
        return (wanted is None or held.request.ssp in wanted) and (task is None or task == one)

    waiting = [each.request for each in _waiting(startpoints) if chosen(each)]
    taken = [Held(request) for request in startpoints.take_back(waiting, by=by)]
    unread = startpoints.delete_unreadable(
        (
            each
            for each in startpoints.unreadable()
            if (wanted is None or each.ssp in wanted or (each.ssp is None and each.at and each.at == task))
            and (task is None or task in (each.task, each.at))
        ),
        by=by,
    )
    # More than once: a fan-out that has read a request before it was deleted may still hand it out.
    for _ in range(_LOOKS):
        handed = [each for each in _handed(startpoints, state) if chosen(each)]
        found = [each for each in handed if not _begun(each, state)]
        if not found:
            break
        _remove(startpoints, found)
        taken += found
    # Again: a run may have begun there before it was removed.
    _, state = log.read()
    used = [each for each in dict.fromkeys([*taken, *handed]) if _begun(each, state)]
    taken = [each for each in taken if each not in used]
    left = [f"{each.summary()}: a batch has begun there" for each in used]
    stopped, going = _stop_replays(log, state, wanted, by, reason) if task is None else ([], [])
    known = (
        {each.ssp for each in unread}
        | {each.request.ssp for each in (*taken, *used)}
        | {each.ssp for each in (*stopped, *going)}
    )
    left += [
        f"{each.ssp}: the replay from {each.position} ({each.by}: {each.reason}): the open batch is reading it; repeat "
        "this after its end, or abandon the batch (adjunct checkpoint abandon)"
        for each in going
    ]
    if task is not None:
        for ssp, held in {each.request.ssp: each for each in _handed(startpoints, state)}.items():
            if ssp not in known and is_broadcast(app, ssp) and (wanted is None or ssp in wanted):
                left.append(f"{held.summary()}: it is for all tasks, and taken back from all of them or none")
                known.add(ssp)
        for held in _waiting(startpoints):
            ssp = held.request.ssp
            if ssp not in known and held.request.task is None and (wanted is None or ssp in wanted):
                left.append(f"{held.summary()}: it is for every task that reads the partition; name no task")
                known.add(ssp)
    left += [_nothing(ssp, state) for ssp in wanted or () if ssp not in known]
    return TakenBack(tuple(taken), tuple(stopped), tuple(left), tuple(unread))


def _waiting(startpoints: StartpointManager) -> Iterator[Held]:
    return map(Held, startpoints.requests())


def _handed(startpoints: StartpointManager, state: ApplicationState) -> Iterator[Held]:
    """Yield what is fanned out, without what a commit has applied already: a crash may have left that there."""
    for task, requests in startpoints.get_fan_outs().items():
        for ssp, request in requests.items():
            if not state.offsets.has_taken(ssp, request.id):
                found = state.offsets.resolved.get(ssp)
                yield Held(request, task, found.offset if found and found.id == request.id else None)


def _begun(held: Held, state: ApplicationState) -> bool:
    """Whether a batch has applied it, or the open one does, which is repeated as it is written."""
    ssp, startpoint_id = held.request.ssp, held.request.id
    applied = state.offsets.applied.get(ssp)
    opened = state.open is not None and state.open.startpoints.get(ssp) == startpoint_id
    return opened or (applied is not None and applied.id == startpoint_id)


def _remove(startpoints: StartpointManager, handed: Sequence[Held]) -> None:
    ids: dict[str, dict[SystemStreamPartition, str]] = {}
    for each in handed:
        ids.setdefault(str(each.at), {})[each.request.ssp] = each.request.id
    startpoints.remove_fan_outs(ids)


def _replaced(
    previews: Sequence[Preview], there: Iterable[Held], named: Collection[str]
) -> list[tuple[Held, StartpointRequest]]:
    """Return what the requests take the place of; tasks that are `named` get no requests for all tasks."""
    by_ssp: dict[SystemStreamPartition, list[Held]] = {}
    for held in there:
        by_ssp.setdefault(held.request.ssp, []).append(held)
    replaced = []
    for each in previews:
        for held in by_ssp.get(each.request.ssp, ()):
            old, new = held.at or held.request.task, each.request.task
            if old == new or (None in (old, new) and (old or new) not in named):
                replaced.append((held, each.request))
    return replaced


def _check(previews: Sequence[Preview]) -> None:
    wrong = [each for each in previews if each.error and not each.falls_back]
    if wrong:
        more = "" if len(wrong) == 1 else f" So for {len(wrong) - 1} more of the {len(previews)} partitions."
        raise ConfigurationError(
            f"the startpoint can't be followed as things are, and nothing is written. {wrong[0].error}{more}",
            "See what each would do with --dry-run; in Python: preview(…).",
        )
    if all(each.request.until is not None and each.offsets == 0 for each in previews):
        first, others = previews[0], "" if len(previews) == 1 else ", nor in the other partitions"
        raise ConfigurationError(
            f"{first.request.ssp}: nothing lies between the startpoint (offset {first.start}) and the end of the "
            f"replay (offset {first.end}){others}; nothing is written.",
            "Choose an end that lies after the start.",
        )


def _behind(unreadable: Sequence[Unreadable], previews: Sequence[Preview]) -> list[Preview]:
    """Return the previews, with an error where what can't be read is in the way.

    That is what waits at the same partition and task, in whose place a request would be lost, and what a task was
    handed for the partition, or for one that is not known: nothing is read there.
    """

    def seen(each: Preview) -> Preview:
        asked = each.request
        for one in unreadable:
            waits = one.kind == "request" and one.key == request_key(asked.target)
            holds = one.at is not None and (one.ssp == asked.ssp or (one.ssp is None and one.at in each.tasks))
            if waits or holds:
                way = f"{asked.ssp} --reason …" if one.ssp is not None else f"--all --task {str(one.at)!r} --reason …"
                error = f"{one.summary()} Take that back first: adjunct startpoint clear MODULE:APP {way}."
                return with_fields(each, error=error, falls_back=False)
        return each

    return [seen(each) for each in previews]


def _check_kinds(replaced: Sequence[tuple[Held, StartpointRequest]]) -> None:
    for held, request in replaced:
        if (held.request.until is None) != (request.until is None):
            what = "a bounded replay" if request.until is not None else "a startpoint that moves the position"
            other = "a startpoint that moves the position" if request.until is not None else "a bounded replay"
            raise ConfigurationError(
                f"{what} would take the place of {other}: {held.summary()}.",
                "Let a run apply that first, take it back (adjunct startpoint clear), or replace it with --replace; "
                "in Python: replace=True.",
            )


def _stop_replays(
    log: BatchLog, state: ApplicationState, ssps: Collection[SystemStreamPartition] | None, by: str, reason: str
) -> tuple[list[Replay], list[Replay]]:
    """Stop the replays at these partitions; return them, and those that the open batch reads, which go on."""
    ours = [each for each in state.offsets.replays.values() if ssps is None or each.ssp in ssps]
    reading = set(state.open.replays.values()) if state.open else set()
    idle = [each.id for each in ours if each.id not in reading]
    return log.cancel_replays(idle, by=by, reason=reason), [each for each in ours if each.id in reading]


def _nothing(ssp: SystemStreamPartition, state: ApplicationState) -> str:
    last = state.offsets.applied.get(ssp)
    if last is None:
        return f"{ssp}: nothing is asked for"
    return (
        f"{ssp}: nothing is asked for; {last.position} ({last.by}: {last.reason}) was applied at "
        f"{last.applied_at:%Y-%m-%d %H:%M} UTC, and is moved from by another startpoint only"
    )
