"""`adjunct checkpoint …` shows where applications continue; `adjunct startpoint …` requests
other positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import click

from dagster_adjunct.orchestration.application.application import Application, load_application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.batch_log.batch_log import describe_similar_names
from dagster_adjunct.orchestration.batch_log.checkpoints import (
    Checkpoint,
    CheckpointChange,
    CheckpointManager,
)
from dagster_adjunct.orchestration.batch_log.intent import Intent
from dagster_adjunct.orchestration.cli.options import (
    app_reference,
    audit_options,
    confirm,
    flag,
    lake_options,
    limit_option,
    name_argument,
    option,
    yes_option,
)
from dagster_adjunct.orchestration.cli.output import (
    show_facts,
    show_items,
    show_json,
    show_line,
    show_table,
)
from dagster_adjunct.orchestration.maintenance.followers import list_lagging_followers
from dagster_adjunct.orchestration.operators.stream_facts import JOIN_VERSIONS
from dagster_adjunct.orchestration.planner.planner import systems_for
from dagster_adjunct.orchestration.startpoints.passed_over import PassedOver, find_passed_over
from dagster_adjunct.orchestration.startpoints.request import POSITIONS, parse_position
from dagster_adjunct.orchestration.startpoints.startpoints import AskedStartpoints, Startpoints
from dagster_adjunct.orchestration.step.progress import (
    InputTimes,
    find_holding_partitions,
    format_time,
    measure_input_times,
    measure_state_sizes,
)
from dagster_adjunct.orchestration.step.waiting import find_held
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.startpoint import Startpoint, describe_startpoint
from dagster_adjunct.resources.streams.system import SystemStreamPartition

_MAX_LINES = 8
_MAX_TASKS = 3


class _StreamEnd(NamedTuple):
    """The offset at which a partition of a stream ends, and how many offsets a checkpoint is
    behind it.
    """

    offset: str
    behind: Any


checkpoint = click.Group("checkpoint")


@checkpoint.command("show")
@click.argument("name", metavar="MODULE:APP|NAME")
@lake_options()
def show_checkpoint(lake: Lake, name: str) -> None:
    """Show the next offset and epoch of each input partition, and an open batch.

    For inputs with event times, also show watermarks of inputs and operators, and the size of
    state; for changes of datasets, the versions that are kept for the application. With MODULE:APP,
    also show where the streams end, which partitions hold watermarks back or are idle, and which
    records wait for a dataset since when.
    """
    app = None
    application = name
    ends: dict[SystemStreamPartition, _StreamEnd] = {}
    inputs: Sequence[InputTimes] = ()
    held: Sequence[str] = ()
    if ":" in name:
        app = load_application(name)
        application = app.name
    last = _read_checkpoint(lake, app or application)
    if app is not None:
        ends = _stream_ends(lake, app, last)
        inputs = measure_input_times(app, last.times, lake.now())
        held = _describe_held(lake, app, last, ends)
    times = _times_to_json(lake, app, last, inputs)
    followed = [each.describe(lake.now()) for each in list_lagging_followers(lake, application)]
    document = {"application": application, **last.to_json(), **times, "follows": followed}
    if ends:
        document["behind"] = {str(ssp): end.behind for ssp, end in ends.items()}
    if held:
        document["held"] = held
    show_json(document)
    facts = {
        "last batch": last.batch,
        "left so by commit": last.last_change.number,
        "at": format_time(last.last_change.at),
        "by": last.last_change.by,
    }
    show_facts(f"checkpoint of {application}", facts)
    _show_offsets(last, ends)
    _show_times(app, last, times, inputs)
    for text in held:
        show_line(f"{text}.")
    _show_late(last)
    for ssp, start in last.resolved.items():
        show_line(
            f"{ssp}: the next batch begins at {start.position} instead, offset {start.offset} "
            f"({start.by}: {start.reason})."
        )
    for text in followed:
        show_line(f"{text}.")
    _show_open(last)


def _show_late(last: Checkpoint) -> None:
    """Print how many changes of datasets came late, and when results have followed such changes."""
    for join, late in last.late_changes.items():
        if late:
            show_line(f"{join}: {late:,} changes came after records of their time were read.")
    for dataset, at in last.restated.items():
        show_line(
            f"Results follow dataset {dataset}: they were restated last at {format_time(at)}."
        )


def _show_open(last: Checkpoint) -> None:
    """Print the open batch, if there is one."""
    if last.open is not None:
        show_line(
            f"Open: {_describe_batch(last.open)}. The next run retries it, unless a run is at work"
            " on it."
        )


@checkpoint.command("history")
@name_argument
@click.argument("partition", required=False)
@limit_option(20, "Maximum number of changes, newest first.")
@lake_options()
def show_checkpoint_history(lake: Lake, name: str, partition: str | None, limit: int) -> None:
    """Show the newest changes of application NAME's offsets: who moved what, when, from where to
    where.
    """
    ssp = None if partition is None else SystemStreamPartition.parse(partition)
    changes = list(CheckpointManager(lake, name).history(limit, ssp))
    if not changes:
        _read_checkpoint(lake, name)  # raises an error if there is none
        if ssp:
            problem = f"application {name!r} has never read {ssp}."
        else:
            problem = f"application {name!r} has no retained history."
        step = f"See the partitions that it reads: adjunct checkpoint show {name}."
        raise ConfigurationError(problem, step, application=name)
    show_json([change.to_json() for change in changes])
    for change in changes:
        batch = "" if change.batch is None else f"  batch {change.batch}"
        show_line(f"{change.number}  {format_time(change.at)}  {change.by}{batch}")
        for line in _change_lines(change, ssp):
            show_line(f"    {line}")


@checkpoint.command("abandon")
@name_argument
@flag("--skip", "Count its records as read: outputs that lack their results never get them.")
@yes_option
@audit_options
@lake_options()
def abandon_batch(lake: Lake, name: str, skip: bool, yes: bool, reason: str, by: str) -> None:
    """Abandon the open batch of application NAME, so that runs no longer retry it.

    For a batch that can't succeed. Its records are read again in another batch; with --skip they
    are skipped.
    """
    opened = _read_checkpoint(lake, name).open
    if opened is not None and not yes:
        _explain_abandon(opened, skip=skip)
        if not skip:
            _show_passed_over(find_passed_over(lake, name, opened))
        verb = "Skip" if skip else "Abandon"
        confirm(f"{verb} batch {opened.batch} of {name}?", yes=yes)
    intent = CheckpointManager(lake, name).abandon(reason=reason, by=by, skip=skip)
    passed = [] if skip else find_passed_over(lake, name, intent)
    document = {
        "application": name,
        "skipped": skip,
        "batch": intent.model_dump(mode="json"),
        "passed_over": {str(each.ssp): each.offsets for each in passed},
    }
    show_json(document)
    if skip:
        outcome = "skipped; the next run skips its records"
    elif passed:
        outcome = (
            "abandoned; the next run reads its records again, in another batch, except those that"
            " startpoints pass over"
        )
    else:
        outcome = "abandoned; the next run reads its records again, in another batch"
    show_line(f"Batch {intent.batch} of {name} is {outcome}.")
    _show_passed_over(passed)


def _show_passed_over(passed: Sequence[PassedOver]) -> None:
    """Print a line for each startpoint that passes over records of an abandoned batch."""
    for each in passed:
        show_line(f"A startpoint {each.describe()}")


def _explain_abandon(intent: Intent, *, skip: bool) -> None:
    """Print which batch is abandoned, and what happens to its records and results."""
    show_line(f"{_describe_batch(intent)}:")
    for ssp, span in intent.ranges.items():
        if span.start != span.end:
            within = "" if intent.restating is None else "some of the "
            show_line(f"  {ssp}: {within}offsets {span.start} to {span.end}")
    show_line(
        "A run that is at work on it fails with CommitConflictError, and its results do not count."
    )
    if skip:
        effect = (
            "Its records count as read: outputs and tables that do not have their results yet never"
            " get them."
        )
    elif intent.restating is not None:
        effect = "The results of its records, and of others with changed keys, are restated again."
    else:
        effect = (
            "Its records are read again in another batch: an output that already has their results"
            " gets them twice."
        )
    show_line(effect)


def _describe_batch(intent: Intent) -> str:
    """Say what an open batch reads, who has begun it, and when."""
    if intent.restating is not None:
        what = f"a restatement of {intent.restating.records} records"
    elif intent.replays:
        what = "a replay"
    else:
        what = f"{len(intent.ranges)} partitions"
    return f"batch {intent.batch} of {what}, begun by {intent.run} at {format_time(intent.clock)}"


def _read_checkpoint(lake: Lake, application: Application | str) -> Checkpoint:
    """Return the last checkpoint. Raises ConfigurationError if there is none."""
    last = CheckpointManager(lake, application).read_last_checkpoint()
    if last is None:
        name = application if isinstance(application, str) else application.name
        problem = (
            f"application {name!r} has no checkpoint in {lake.url};"
            f" {describe_similar_names(lake, name)}."
        )
        step = "Check the name and the lake; an application's first run stores a checkpoint."
        raise ConfigurationError(problem, step, application=name)
    return last


def _times_to_json(
    lake: Lake, app: Application | None, last: Checkpoint, inputs: Sequence[InputTimes]
) -> dict[str, Any]:
    """Return state sizes as JSON-able values, and with the application the watermarks; empty if no
    input declares event times.
    """
    if not last.times.partitions:
        return {}
    sizes = measure_state_sizes(lake, last.versions)
    facts: dict[str, Any] = {"state": {name: asdict(size) for name, size in sizes.items()}}
    if app is not None:
        waited = find_holding_partitions(app, last.times, lake.now())
        facts["watermarks"] = [times.to_json() for times in inputs]
        facts["waiting_for"] = {name: ssp and str(ssp) for name, ssp in waited.items()}
    return facts


def _show_times(
    app: Application | None, last: Checkpoint, facts: dict[str, Any], inputs: Sequence[InputTimes]
) -> None:
    """Print watermarks by partition and operator, and state sizes, if any input declares event
    times.
    """
    if not facts:
        return
    idle = set(chain.from_iterable(times.idle for times in inputs))
    # Without the application, the last columns are not known.
    width = None if app else -1
    rows = []
    for ssp, known in sorted(last.times.partitions.items()):
        moments = map(format_time, (known.newest, known.watermark, known.active_at))
        rows.append([str(ssp), *moments, str(ssp) in idle])
    columns = ["partition", "newest record", "watermark", "last active", "idle"]
    show_table("times of records", columns[:width], rows)
    for times in inputs:
        show_line(f"{times.describe()}.")
    waits_for = facts.get("waiting_for", {})
    marks = []
    for name, mark in sorted(last.times.operators.items()):
        marks.append([name, format_time(mark), waits_for.get(name)])
    if marks:
        columns = ["operator", "watermark", "waits for"]
        show_table("watermarks of operators", columns[:width], marks)
    if facts["state"]:
        rows = [[name, *size.values()] for name, size in facts["state"].items()]
        show_table("state", ["table", "rows", "bytes", "kept for"], rows)


def _change_lines(change: CheckpointChange, ssp: SystemStreamPartition | None) -> list[str]:
    """Return lines on what a commit changed, at this partition (None: at all, with only the
    first of many lines).
    """
    # By partition, texts about startpoints and replays, and about moved positions.
    starts: dict[SystemStreamPartition, list[str]] = {}
    moves: dict[SystemStreamPartition, list[str]] = {}
    for at, resolved in change.resolved.items():
        text = f"{resolved.position} is at offset {resolved.offset}"
        starts[at] = [f"{text} ({resolved.by}: {resolved.reason})"]
    for at, start in change.applied.items():
        text = f"{start.position} applied, epoch {start.epoch} ({start.by}: {start.reason})"
        starts.setdefault(at, []).append(text)
    for at, (before, after) in change.moved.items():
        steps = [before or "none", after or "none"]
        if at in change.applied and change.batch is not None:
            steps.insert(1, str(change.applied[at].offset))  # where the batch began to read
        moves[at] = [" -> ".join(steps)]
    for replay in change.replays:
        if replay.what != "moved":
            text = f"replay from {replay.position}, epoch {replay.epoch}, {replay.what}"
            starts.setdefault(replay.ssp, []).append(text)
        if replay.what in ("moved", "ended"):
            moves.setdefault(replay.ssp, []).append(f"{replay.before} -> {replay.after} (replay)")
    lines = [] if change.note is None else [change.note]
    return [*lines, *_list_texts(starts, ssp), *_list_texts(moves, ssp)]


def _list_texts(
    texts: Mapping[SystemStreamPartition, Sequence[str]], ssp: SystemStreamPartition | None
) -> list[str]:
    """Return the texts of one partition, or the first ones of all (None)."""
    if ssp is not None:
        return [f"{ssp}: {text}" for text in texts.get(ssp, ())]
    lines = []
    for at, of_partition in texts.items():
        lines += [f"{at}: {text}" for text in of_partition]
    if len(lines) > _MAX_LINES + 1:
        lines[_MAX_LINES:] = [f"and {len(lines) - _MAX_LINES} more"]
    return lines


def _show_offsets(last: Checkpoint, ends: Mapping[SystemStreamPartition, _StreamEnd]) -> None:
    """Print the next offset of each partition and, if it is known, where its stream ends."""
    columns = ["partition", "next offset", "epoch"]
    if ends:
        columns += ["stream ends at", "offsets behind"]
    rows = []
    for ssp, offset in last.offsets.items():
        row = [str(ssp), offset, last.epochs.get(ssp, 0)]
        if ends:
            row += ends.get(ssp, ("-", "-"))
        rows.append(row)
    show_table("next offsets", columns, rows)


def _describe_held(
    lake: Lake, app: Application, last: Checkpoint, ends: Mapping[SystemStreamPartition, _StreamEnd]
) -> list[str]:
    """Return a text for each partition whose next record waits for a dataset."""
    unread = {}
    for ssp, end in ends.items():
        if end.behind:
            unread[ssp] = last.offsets[ssp]
    held = find_held(systems_for(app, lake=lake), lake, app, unread, last.held)
    return [record.describe() for record in held]


def _stream_ends(
    lake: Lake, app: Application, last: Checkpoint
) -> dict[SystemStreamPartition, _StreamEnd]:
    """Return where the streams of all partitions in the checkpoint end, inputs and changes of
    datasets by which results are restated.
    """
    systems = systems_for(app, lake=lake)
    ends: dict[SystemStreamPartition, _StreamEnd] = {}
    for name in (*app.inputs, *app.restated):
        ssps = [ssp for ssp in last.offsets if ssp.qualified_stream == name]
        if ssps:
            system = systems[ssps[0].system].snapshot(ssps[0].stream)
            for ssp, end in system.upcoming(ssps).items():
                ends[ssp] = _StreamEnd(end, system.distance(ssp, last.offsets[ssp], end))
    return ends


_TIME = (
    "Start at the first record at or after this time: ISO 8601 with its zone, a date (UTC), or ms"
    " since 1970."
)


startpoint = click.Group("startpoint")


@startpoint.command("set")
@app_reference
@click.argument("partitions", metavar="PARTITION...", nargs=-1, required=True)
@flag("--oldest", "Start at the oldest record that can still be read.")
@flag("--upcoming", "Start at the next record that will arrive.")
@option("--timestamp", "T", _TIME)
@option("--offset", "N", "Start at this offset, in the format of the stream system.")
@option("--until-timestamp", "T", "Replay records before this time, as above (a bounded replay).")
@option("--until-offset", "N", "Replay records before this offset (a bounded replay).")
@flag("--until-upcoming", "Replay records up to the current end of the stream (a bounded replay).")
@click.option(
    "--versions",
    type=click.Choice(JOIN_VERSIONS),
    help=(
        "Which dataset versions a bounded replay reads: those valid at each record's time, the"
        " served ones, or those that were read the first time. Default: as-of for as-of joins, else"
        " current."
    ),
)
@click.option("--task", help="Only for this task, such as 'Partition 3' or 'dataset NAME'.")
@click.option(
    "--on-unresolved",
    type=click.Choice(["fail", "checkpoint"]),
    default="fail",
    show_default=True,
    help="If the position has no offset when a run starts: fail, or continue at the checkpoint.",
)
@flag(
    "--force",
    "For a dataset's stream: accept that its table gets older or incomplete. For changes that"
    " results follow: restate any number of results, once.",
)
@flag("--replace", "Let a replay replace a startpoint, or a startpoint a replay.")
@flag("--dry-run", "Only show what would happen.")
@audit_options
@lake_options(create=True)
def set_startpoint(
    lake: Lake, reference: str, partitions: tuple[str, ...], dry_run: bool, **options: Any
) -> None:
    """Set where the next run reads PARTITIONs from: lake.flights.3, lake.flights.0-3,7, or
    lake.flights for all.

    It applies once. With an --until… option the run replays that part in addition, and the
    checkpoint does not move.
    """
    start = _pop_position(options, "")
    until = _pop_position(options, "until_")
    if start is None:
        problem = "no position is given: where should reading start?"
        step = "Give one of --oldest, --upcoming, --timestamp T, --offset N."
        raise ConfigurationError(problem, step, setting="--oldest")
    app = load_application(reference)
    startpoints = Startpoints(app, lake=lake)
    audit = {name: options.pop(name) for name in ("by", "reason")}
    if dry_run:
        asked = startpoints.preview(partitions, start, until=until, **options)
    else:
        asked = startpoints.request(partitions, start, until=until, **options, **audit)
    begins = "The next run begins there"
    if asked.open_batch is not None:
        begins = (
            f"The next run repeats batch {asked.open_batch}, and begins there once it has succeeded"
        )
    next_step = (
        f"{begins}: the sensor {to_dagster_name(app.name)}_startpoints starts one if it is on;"
        f" otherwise: adjunct run {reference}."
    )
    document = asked.to_json()
    if asked.written:
        document["next"] = next_step
    show_json(document)
    _show_requested(asked, start)
    if asked.written:
        hours = app.startpoints_expire_after / timedelta(hours=1)
        span = f"{hours:g} hours" if hours >= 1 else str(app.startpoints_expire_after)
        show_line(f"{next_step} Unless a run applies them, they expire in {span}.")
    else:
        show_line("Dry run: nothing was written.")


@startpoint.command("list")
@app_reference
@lake_options()
def list_requests(lake: Lake, reference: str) -> None:
    """List startpoints: waiting, handed to tasks, applied, expired and unreadable ones, and
    running bounded replays.
    """
    app = load_application(reference)
    facts = Startpoints(app, lake=lake).list()
    show_json({**facts, "switched_off": not app.startpoints})
    if not app.startpoints:
        show_line(
            f"Startpoints of {app.name} are switched off (startpoints=False): runs ignore these."
        )
    for what, listing in _TABLES.items():
        columns = list(listing.columns)
        if any(fact.get("versions") for fact in facts[what]):
            columns.append("versions")
        members = [name.replace(" ", "_") for name in columns]
        rows = list(map(itemgetter(*members), facts[what]))
        if rows:
            show_table(listing.title, columns, rows)
    if not any(facts.values()):
        show_line(f"Application {app.name}: no startpoint waits, and none was applied.")


@startpoint.command("clear")
@app_reference
@click.argument("partitions", metavar="[PARTITION]...", nargs=-1)
@click.option(
    "--all", "everything", is_flag=True, help="All partitions, including those of deleted streams."
)
@click.option("--task", help="Only startpoints for this task. Replays continue then.")
@audit_options
@lake_options()
def clear_requests(
    lake: Lake, reference: str, partitions: tuple[str, ...], everything: bool, **options: Any
) -> None:
    """Remove startpoints of PARTITIONs that are not applied yet, and stop bounded replays there."""
    if everything == bool(partitions):
        if everything:
            problem = "PARTITIONs and --all are both given."
        else:
            problem = "neither PARTITIONs nor --all are given."
        step = "Give partitions, such as lake.flights.3, or --all."
        raise ConfigurationError(problem, step, setting="--all")
    startpoints = Startpoints(load_application(reference), lake=lake)
    if everything:
        done = startpoints.clear(**options)
    else:
        done = startpoints.take_back(partitions, **options)
    show_json(done.to_json())
    for line in done.describe() or [f"Application {startpoints.app.name}: nothing to remove."]:
        show_line(line)


class _Listing(NamedTuple):
    """How startpoints in one state are listed: the table's title, and its columns."""

    title: str
    columns: tuple[str, ...]


_TABLES = {
    "waiting": _Listing(
        "waiting", ("partition", "task", "position", "until", "by", "reason", "age", "expires in")
    ),
    "expired": _Listing(
        "expired: the next run deletes them",
        ("partition", "task", "position", "until", "by", "reason", "age"),
    ),
    "handed": _Listing(
        "handed to tasks", ("partition", "task", "position", "until", "offset", "by", "reason")
    ),
    "replays": _Listing(
        "bounded replays in progress",
        (
            "partition",
            "position",
            "epoch",
            "start",
            "next",
            "until",
            "left",
            "per cent",
            "by",
            "reason",
        ),
    ),
    "applied": _Listing(
        "applied last",
        ("partition", "position", "offset", "epoch", "batch", "applied at", "by", "reason"),
    ),
    "unreadable": _Listing("unreadable, ignored", ("partition", "task", "handed to", "error")),
}


def _pop_position(options: dict[str, Any], prefix: str) -> Startpoint | None:
    """Take the options for a position (those with this prefix) out of `options`; return the
    position, None if none is given. Raises ConfigurationError for several."""
    given = {name: options.pop(f"{prefix}{name}", None) for name in POSITIONS}
    chosen = [name for name, value in given.items() if value is not None and value is not False]
    if len(chosen) > 1:
        named = [f"--{prefix.replace('_', '-')}{name}" for name in chosen]
        problem = f"{' and '.join(named)} are given, but there can be only one position."
        raise ConfigurationError(problem, "Give only one of them.", setting=named[0])
    if not chosen:
        return None
    value = given[chosen[0]]
    return parse_position(chosen[0], None if value is True else value)


def _show_requested(asked: AskedStartpoints, start: Startpoint) -> None:
    """Print from where each partition is read, and what happens to it."""
    columns = ["partition", "task", "checkpoint", "from", "until", "offsets", "what happens"]
    if not any(preview.request.until is not None for preview in asked.previews):
        columns.remove("until")
    rows = []
    for preview in asked.previews:
        if len(preview.tasks) > _MAX_TASKS:
            tasks = f"all {len(preview.tasks)} tasks"
        else:
            tasks = ", ".join(preview.tasks)
        row = {
            "partition": str(preview.request.ssp),
            "task": tasks or None,
            "checkpoint": preview.checkpoint,
            "from": preview.start,
            "until": preview.end,
            "offsets": preview.offsets,
            "what happens": preview.move,
        }
        rows.append(row)
    title = "requested" if asked.written else "would be requested"
    show_items(f"{title}: {describe_startpoint(start)}", columns, rows)
    for line in asked.describe_effects():
        show_line(line)
