"""What a startpoint would do: where reading would continue, how far the position moves, and the
effects on tables.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from dataclasses import replace as with_fields
from functools import partial
from typing import Any, NamedTuple

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.unbounded.rewind import plan_rewind
from dagster_adjunct.assets.unbounded.rewind_plan import PartitionRewind
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.batch_log.batch_log import ApplicationState, Replay
from dagster_adjunct.orchestration.operators.stream_facts import CURRENT, JoinVersions
from dagster_adjunct.orchestration.planner.notes import ReadAgain, trace_records_read_again
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.startpoints.passed_over import count_passed_over, main_range
from dagster_adjunct.orchestration.startpoints.positions import (
    AskedApplication,
    StreamSnapshot,
    resolve_request,
)
from dagster_adjunct.orchestration.startpoints.request import (
    StartpointRequest,
    Unreadable,
    broadcast_task_error,
    choose_versions,
    dataset_task_name,
    is_broadcast,
    is_dataset_task,
    to_startpoint,
)
from dagster_adjunct.orchestration.startpoints.store import PendingStartpoint, request_key
from dagster_adjunct.resources.errors import ConfigurationError, PermanentError
from dagster_adjunct.resources.streams.startpoint import describe_startpoint
from dagster_adjunct.resources.streams.system import SystemStreamPartition

_MAX_NAMED = 3  # partitions in a line


@dataclass(frozen=True, slots=True)
class Preview:
    """What one request would do if a run started now.

    `tasks` are the tasks that it is for (`dataset NAME` for a dataset). They read `offsets` offsets
    from `start` to `end`: the end of the bounded replay, else the current end of the stream.
    `checkpoint` is where reading would continue without the request, after an open batch. `moved`
    is by how many offsets the request moves that position, negative for backwards; None for a
    replay, which does not move it, and without a checkpoint of this stream. With an `error` the run
    would fail, unless the request then continues from the checkpoint (`falls_back`). `versions` are
    the dataset versions that a replay is joined with.

    `open_batch` is the number of a batch that is open: the next run repeats it before it applies
    the request. If it is abandoned instead, the request passes over `passed_over` offsets that the
    batch gives back, and no run reads them.
    """

    request: StartpointRequest
    tasks: tuple[str, ...]
    checkpoint: str | None = None
    start: str | None = None
    end: str | None = None
    offsets: int | None = None
    moved: int | None = None
    error: str | None = None
    falls_back: bool = False
    versions: JoinVersions | None = None
    open_batch: int | None = None
    passed_over: int = 0

    @property
    def move(self) -> str:
        """What happens to the position, in a few words ("goes back by 20"); if the request can't
        be applied, why.
        """
        if self.error is not None:
            if self.falls_back:
                return f"goes on from its checkpoint: {self.error}"
            return self.error
        if self.request.until is not None:
            return "the position stays"
        after = "" if self.open_batch is None else f" after batch {self.open_batch}"
        if self.moved is None:
            return f"begins here{after}"
        if self.moved < 0:
            return f"goes back by {-self.moved:,}{after}"
        if self.moved > 0:
            return f"passes over {self.moved:,}{after}"
        return f"stays where it is{after}"

    @property
    def reads_again(self) -> bool:
        """Whether the application may read records again: in a replay, or if the position does not
        go forward.

        The rewind of a dataset reads none of its inputs again.
        """
        if self.error is not None or all(map(is_dataset_task, self.tasks)):
            return False
        if self.request.until is not None:
            return bool(self.offsets)
        return self.moved is None or self.moved < 0

    @property
    def effect(self) -> str:
        """The effect in one line: "20 offsets to read: goes back by 20".

        If the request can't be applied, it is only the reason.
        """
        if self.error is not None:
            return self.move
        again = "" if self.request.until is None else " again"
        return f"{self.offsets:,} offsets to read{again}: {self.move}"

    @property
    def is_refused(self) -> bool:
        """Whether the request can't be applied, and does not fall back to the checkpoint."""
        return self.error is not None and not self.falls_back

    def to_json(self) -> dict[str, Any]:
        """Return the preview as JSON values."""
        until = None
        if self.request.until is not None:
            until = describe_startpoint(self.request.until)
        names = (
            "checkpoint",
            "start",
            "end",
            "offsets",
            "moved",
            "error",
            "falls_back",
            "effect",
            "versions",
            "open_batch",
            "passed_over",
        )
        return {
            "partition": str(self.request.ssp),
            "tasks": list(self.tasks),
            "position": describe_startpoint(self.request.startpoint),
            "until": until,
            **{name: getattr(self, name) for name in names},
        }


def preview_request(asked: AskedApplication, request: StartpointRequest) -> Preview:
    """Return what a request would do; a request that is not allowed or can't be applied has an
    `error`.

    The preview of a rewind or of a replay with recorded versions is not complete: it is made
    without reading the dataset's table or the batch log (see `preview_rewinds` and
    `plan_recorded`).
    """
    is_replay = request.until is not None
    try:
        versions = choose_versions(asked.app, request)
    except ConfigurationError as error:
        given = None
        if is_replay:
            given = request.versions or CURRENT
        return Preview(request, (), error=str(error), versions=given)
    tasks = asked.readers.targets_of(request)
    shown = Preview(request, tasks, versions=versions if is_replay else None)
    rejected = _rejected_preview(asked, shown)
    if rejected is not None:
        return rejected
    is_rewind = not asked.readers.of_datasets.keys().isdisjoint(tasks)
    if not is_rewind:
        batch = asked.state.open
        shown = with_fields(
            shown,
            checkpoint=_find_checkpoint(asked.state, request.ssp),
            open_batch=None if batch is None else batch.batch,
        )
    try:
        stream = asked.snapshot(request.ssp.qualified_stream)
        start = resolve_request(stream, request, versions=versions, now=asked.at)
    except PermanentError as error:
        falls_back = request.on_unresolved == "checkpoint"
        return with_fields(shown, error=str(error), falls_back=falls_back)
    if isinstance(start, Replay):
        offsets = stream.system.distance(request.ssp, start.start, start.until)
        return with_fields(shown, start=start.start, end=start.until, offsets=offsets)
    if is_rewind:
        return with_fields(shown, start=start.offset)
    return _preview_move(shown, stream, start.offset, asked.state)


def _rejected_preview(asked: AskedApplication, shown: Preview) -> Preview | None:
    """Return the preview with the error of a request that no task may apply; None if it is
    allowed.
    """
    request = shown.request
    readers = asked.readers
    task = request.task
    if task in readers.of_plan and is_broadcast(asked.app, request.ssp):
        return with_fields(shown, tasks=(str(task),), error=str(broadcast_task_error(request)))
    if not shown.tasks:
        return with_fields(shown, error=_describe_unread(request, readers.tasks))
    is_of_dataset = not readers.of_datasets.keys().isdisjoint(shown.tasks)
    if request.until is None or not is_of_dataset:
        return None
    refusal = (
        f"{request.ssp} is read by {', '.join(shown.tasks)}, and the table of a dataset can't"
        " be replayed: it always holds what its stream says up to its position. Leave the end"
        " (until) out."
    )
    return with_fields(shown, error=refusal)


def _find_checkpoint(state: ApplicationState, ssp: SystemStreamPartition) -> str | None:
    """Return where reading would continue: after the open batch if that moves the checkpoint, else
    at the checkpoint; None without one.
    """
    span = main_range(state.open, ssp)
    if span is not None:
        return span.end
    return state.checkpoint.get(ssp)


def _preview_move(
    shown: Preview, stream: StreamSnapshot, start: str, state: ApplicationState
) -> Preview:
    """Return the preview of a request that moves the position to the offset `start`."""
    ssp = shown.request.ssp
    distance = partial(stream.system.distance, ssp)
    end = stream.upcoming[ssp]
    shown = with_fields(shown, start=start, end=end, offsets=distance(start, end))
    before = shown.checkpoint
    # The checkpoint of a recreated stream is an offset of the former stream, which can't be
    # compared.
    if before is None or stream.was_recreated(state.offsets):
        return shown
    span = main_range(state.open, ssp)
    return with_fields(
        shown,
        moved=distance(before, start) - distance(start, before),
        passed_over=0 if span is None else count_passed_over(span, start, distance),
    )


def describe_open_batch(application: str, previews: Iterable[Preview]) -> list[str]:
    """Return what an open batch means for these requests, a line each: it comes first, and what
    they pass over if it is abandoned; [] without one.
    """
    concerned = [shown for shown in previews if shown.open_batch is not None]
    if not concerned:
        return []
    number = concerned[0].open_batch
    lines = [
        f"batch {number} is open: the next run repeats it first, and begins at the startpoint only"
        " once it has succeeded"
    ]
    passed = [shown for shown in concerned if shown.passed_over]
    if passed:
        total = sum(shown.passed_over for shown in passed)
        named = [f"{shown.passed_over:,} of {shown.request.ssp}" for shown in passed[:_MAX_NAMED]]
        if len(passed) > _MAX_NAMED:
            named.append("…")
        lines.append(
            f"if batch {number} is abandoned instead (adjunct checkpoint abandon {application}"
            f" --reason …), no run reads {total:,} offsets that it gives back and that are before"
            f" the startpoint: {', '.join(named)}"
        )
    return lines


def _describe_unread(
    request: StartpointRequest, tasks: Mapping[str, frozenset[SystemStreamPartition]]
) -> str:
    """Return the error text for a request that is for no task: which tasks, if any, read its
    partition.
    """
    if request.task is None:
        return f"no task reads {request.ssp}."
    readers = [repr(task) for task, ssps in tasks.items() if request.ssp in ssps]
    instead = ""
    if readers:
        instead = f"; {', '.join(readers[:3])} does"
    return f"task {request.task!r} does not read {request.ssp}{instead}."


def find_streams_read_again(previews: Iterable[Preview]) -> frozenset[str]:
    """Return the input streams of which the application would read records again."""
    return frozenset(shown.request.ssp.qualified_stream for shown in previews if shown.reads_again)


def describe_remote_tables(plan: ExecutionPlan | None, streams: Set[str]) -> dict[str, str]:
    """Return, by remote table that is written from these streams, what records that are read
    again do to it.
    """
    if plan is None:
        return {}
    effects: dict[str, dict[str, None]] = {}  # by table, the effects, each once and in order
    for table in plan.tables:
        if streams & set(table.again):
            effects.setdefault(table.table, {})[table.replay] = None
        elif streams & set(table.streams):
            effects.setdefault(table.table, {})[table.left_out] = None
    return {table: "; and ".join(replays) for table, replays in effects.items()}


def describe_output_tables(plan: ExecutionPlan | None, streams: Set[str]) -> dict[str, str]:
    """Return, by output table that is written from these streams, what records that are read again
    do to it.
    """
    effects = {}
    for table in () if plan is None else plan.output_tables:
        if streams & set(table.streams):
            effects[table.table] = table.replay
    return effects


def describe_state_effects(app: Application, streams: Set[str]) -> tuple[str, ...]:
    """Return what stateful operators do with records of these streams that are read again, a
    line each.
    """
    again = trace_records_read_again(app)
    effects = []
    for operator in app.operators:
        arriving = ReadAgain.union(again[source] for source in operator.inputs)
        if operator.spec.over_time is not None and streams & arriving.streams:
            effects.append(
                f"{operator.id} keeps state: it leaves out records that were read before, and"
                " counts them (again)"
            )
    return tuple(effects)


def mark_blocked_previews(
    unreadable: Sequence[Unreadable], previews: Iterable[Preview]
) -> list[Preview]:
    """Return the previews, with an error for each request that an unreadable entry blocks.

    An entry blocks:
    - while it waits, the request for the same partition and task, which would replace it,
    - once it was handed to a task, all requests for its partition, which is not read meanwhile,
    - once it was handed to a task for an unknown partition, all requests for this task, which reads
      nothing meanwhile.
    """
    return [_mark_blocked(unreadable, shown) for shown in previews]


def _mark_blocked(unreadable: Sequence[Unreadable], shown: Preview) -> Preview:
    """Return the preview, with an error if an unreadable entry blocks the request."""
    for blocking in unreadable:
        if not _blocks(blocking, shown):
            continue
        if blocking.ssp:
            which = str(shown.request.ssp)
        else:
            which = f"--all --task {str(blocking.at)!r}"
        clear = f"adjunct startpoint clear MODULE:APP {which} --reason …"
        error = f"{blocking.summary()} Take that back first: {clear}."
        return with_fields(shown, error=error, falls_back=False)
    return shown


def _blocks(unread: Unreadable, shown: Preview) -> bool:
    """Whether an unreadable entry blocks a request, as `mark_blocked_previews` says."""
    own_key = request_key(shown.request.ssp, shown.request.task)
    if unread.kind == "request" and unread.key == own_key:
        return True
    if unread.at is None:
        return False
    if unread.ssp is None:
        return unread.at in shown.tasks
    return unread.ssp == shown.request.ssp


def check_previews(previews: Sequence[Preview]) -> None:
    """Raise ConfigurationError for requests that can't be applied now."""
    refused = [shown for shown in previews if shown.is_refused]
    if not refused:
        return
    first, *others = refused
    more = ""
    if others:
        more = f" The same goes for {len(others)} more of the {len(previews)} partitions."
    raise ConfigurationError(
        f"the startpoint can't be applied now, and nothing is written. {first.error}{more}",
        "See what each would do: --dry-run, or preview(…) in Python.",
        stream=first.request.ssp.qualified_stream,
    )


def empty_replay_error(previews: Sequence[Preview]) -> ConfigurationError | None:
    """Return the error for requests that are all replays without any record to read; else None."""
    for shown in previews:
        if shown.request.until is None or shown.offsets != 0:
            return None
    first = previews[0]
    others = "" if len(previews) == 1 else ", nor in the other partitions"
    return ConfigurationError(
        f"{first.request.ssp}: there are no records between the startpoint (offset"
        f" {first.start}) and the end of the replay (offset {first.end}){others}; nothing is"
        " written.",
        "Choose an end after the start.",
        stream=first.request.ssp.qualified_stream,
    )


class Replaced(NamedTuple):
    """A startpoint that is not applied yet, and the request that would replace it."""

    pending: PendingStartpoint
    request: StartpointRequest


def find_replaced(
    requests: Iterable[StartpointRequest],
    pending: Iterable[PendingStartpoint],
    named_only: Collection[str],
) -> list[Replaced]:
    """Return each `pending` startpoint that a request would replace, with that request.

    A request for all tasks replaces none of a task in `named_only`, and a request for such a task
    replaces none for all tasks.
    """
    by_ssp: dict[SystemStreamPartition, list[PendingStartpoint]] = {}
    for held in pending:
        by_ssp.setdefault(held.request.ssp, []).append(held)
    replaced = []
    for request in requests:
        for held in by_ssp.get(request.ssp, ()):
            if _is_replaced(held.at or held.request.task, request.task, named_only):
                replaced.append(Replaced(held, request))
    return replaced


def _is_replaced(before: str | None, after: str | None, named_only: Collection[str]) -> bool:
    """Whether a request for the task `after` replaces one of the same partition for the task
    `before`; None are all tasks except those in `named_only`.
    """
    if before == after:
        return True
    if before is None:
        return after not in named_only
    if after is None:
        return before not in named_only
    return False


def _describe_kind(request: StartpointRequest) -> str:
    """Return the kind of a request, with its article."""
    if request.until is not None:
        return "a bounded replay"
    return "a startpoint that moves the position"


def other_kind_error(replaced: Sequence[Replaced]) -> ConfigurationError | None:
    """Return the error for a bounded replay that would replace a startpoint that moves the
    position, or for such a startpoint that would replace a replay. None if there is neither.
    """
    for held, request in replaced:
        before = _describe_kind(held.request)
        after = _describe_kind(request)
        if after != before:
            return ConfigurationError(
                f"{after} would replace {before}: {held.summary()}.",
                "Let a run apply that first, take it back (adjunct startpoint clear MODULE:APP"
                f" {request.ssp} --reason …), or replace it with --replace (replace=True in"
                " Python).",
                stream=request.ssp.qualified_stream,
            )
    return None


def preview_rewinds(asked: AskedApplication, previews: Sequence[Preview]) -> list[Preview]:
    """Return the previews; those for datasets are completed by what all requests for the dataset
    would do together.
    """
    completed = list(previews)
    for dataset in asked.app.datasets:
        task = dataset_task_name(dataset.name)
        of_dataset = {}  # by place in the list
        for number, shown in enumerate(completed):
            if task in shown.tasks and shown.error is None:
                of_dataset[number] = shown
        if of_dataset:
            rewinds = _preview_rewind(asked, dataset, list(of_dataset.values()))
            for number, rewind in zip(of_dataset, rewinds, strict=True):
                completed[number] = rewind
    return completed


def _preview_rewind(
    asked: AskedApplication, dataset: AdjunctDataset, previews: Sequence[Preview]
) -> list[Preview]:
    """Return the previews of all requests for one dataset, completed by their common rewind; with
    its error if the rewind can't be planned.
    """
    requests = [shown.request for shown in previews]
    try:
        plan = plan_rewind(
            dataset,
            lake=asked.lake,
            systems=asked.systems,
            positions={request.ssp: to_startpoint(request) for request in requests},
            force={request.ssp for request in requests if request.force},
        )
    except PermanentError as error:
        return [with_fields(shown, error=str(error)) for shown in previews]
    rewinds = {partition.ssp: partition for partition in plan.partitions}
    completed = []
    for shown in previews:
        completed.append(_preview_partition(shown, rewinds[shown.request.ssp], plan.refusal))
    return completed


def _preview_partition(
    shown: Preview, partition: PartitionRewind, refusal: Exception | None
) -> Preview:
    """Return the preview of a request for a dataset, completed by what the rewind does to its
    partition; `refusal` is why the whole rewind would not be made, None if it would.
    """
    moved = None
    if partition.taken is not None:
        moved = partition.skipped - partition.again
    return with_fields(
        shown,
        checkpoint=partition.taken,
        start=partition.start,
        end=partition.taken,
        offsets=partition.again,
        moved=moved,
        error=None if refusal is None else str(refusal),
    )
