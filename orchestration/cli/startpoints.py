"""`adjunct startpoint …`: ask that partitions are read from somewhere else, see what was asked for, take it back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from dagster_adjunct.orchestration.application.application import load_application
from dagster_adjunct.orchestration.application.graph import to_dagster_name
from dagster_adjunct.orchestration.cli.options import audit_options, resolve_user
from dagster_adjunct.orchestration.cli.output import (
    console,
    lake_url,
    output_options,
    show_facts,
    show_json,
    show_line,
    show_table,
    show_times,
    times_to_json,
)
from dagster_adjunct.orchestration.operators.stream_facts import JOIN_VERSIONS, JoinVersions
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batch_log.batch_log import Intent
    from dagster_adjunct.orchestration.batch_log.checkpoints import Checkpoint, CheckpointChange
    from dagster_adjunct.orchestration.startpoints.startpoints import AskedStartpoints, Startpoints
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.startpoint import Startpoint
    from dagster_adjunct.resources.streams.system import SystemStreamPartition

_SHOWN = 8


@click.group()
def checkpoint() -> None:
    """Where applications go on in their input streams."""


@checkpoint.command("show")
@click.argument("name", metavar="MODULE:APP|NAME")
@lake_url
@output_options
def show_checkpoint(name: str, lake_url: str | None, json_output: bool) -> None:
    """Show the next offset of each input partition, its epoch, and a batch that is open.

    Where inputs say when their records happened, also how far they and the operators have come in time, and how much
    state there is. With MODULE:APP, also how far the streams have come, and which partitions hold back or are idle.
    """
    from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    app = load_application(name) if ":" in name else None
    application = name if app is None else app.name
    last = CheckpointManager(lake, app or application).read_last_checkpoint()
    if last is None:
        raise _no_checkpoint_error(lake, application)
    ends = {} if app is None else _stream_ends(lake, app, last)
    if json_output:
        facts = {"application": application, **last.to_json(), **times_to_json(lake, app, last)}
        show_json(facts | {"behind": {str(ssp): behind for ssp, (_, behind) in ends.items()}} if ends else facts)
        return
    facts = {"last batch": last.batch, "left so by commit": last.number, "at": f"{last.at:%Y-%m-%d %H:%M:%S} UTC"}
    show_facts(f"checkpoint of {application}", facts | {"by": last.by})
    columns = ["partition", "next offset", "epoch", *(["stream ends at", "offsets behind"] if ends else [])]
    rows = [
        [str(ssp), offset, last.epochs.get(ssp, 0), *ends.get(ssp, ("-", "-") if ends else ())]
        for ssp, offset in last.offsets.items()
    ]
    show_table("goes on at", columns, rows)
    show_times(lake, app, last)
    for ssp, start in last.resolved.items():
        show_line(
            f"{ssp}: the next batch begins at {start.position}, offset {start.offset}, instead "
            f"({start.by}: {start.reason})."
        )
    if last.open is not None:
        show_line(f"Open: {_describe_batch(last.open)}. The next run repeats it as written, if none is in it.")


@checkpoint.command("history")
@click.argument("name")
@click.argument("partition", required=False)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="The newest so many changes.")
@lake_url
@output_options
def show_checkpoint_history(
    name: str, partition: str | None, limit: int, lake_url: str | None, json_output: bool
) -> None:
    """Show the newest changes to where application NAME goes on: who moved what, when, from where to where."""
    from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.streams.system import SystemStreamPartition

    lake = open_lake(lake_url, create=False)
    ssp = None if partition is None else SystemStreamPartition.parse(partition)
    changes = list(CheckpointManager(lake, name).history(limit, ssp))
    if not changes:
        if ssp is None:
            raise _no_checkpoint_error(lake, name)
        raise ConfigurationError(
            f"application {name!r} never read {ssp}.",
            f"See what it reads: adjunct checkpoint show {name}.",
            application=name,
        )
    if json_output:
        show_json([change.to_json() for change in changes])
        return
    for change in changes:
        batch = "" if change.batch is None else f"  batch {change.batch}"
        show_line(f"{change.number}  {change.at:%Y-%m-%d %H:%M:%S} UTC  {change.by}{batch}")
        for line in [*_startpoint_lines(change, ssp), *_move_lines(change, ssp)]:
            show_line(f"    {line}")


@checkpoint.command("abandon")
@click.argument("name")
@click.option("--skip", is_flag=True, help="Count its ranges as read: what no output has yet is passed over.")
@click.option("--yes", is_flag=True, help="Do not ask before.")
@audit_options
@lake_url
@output_options
def abandon_batch(
    name: str, skip: bool, yes: bool, reason: str, by: str | None, lake_url: str | None, json_output: bool
) -> None:
    """Give up the open batch of application NAME, which every run would repeat as it is written, without end.

    For a batch that can't end. Its records are read again in another batch; with --skip they are passed over.
    """
    from dagster_adjunct.orchestration.batch_log.checkpoints import CheckpointManager
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    checkpoints = CheckpointManager(lake, name)
    last = checkpoints.read_last_checkpoint()
    if last is None:
        raise _no_checkpoint_error(lake, name)
    if last.open is not None and not yes:
        explain_abandon(last.open, skip=skip)
        click.confirm(f"{'Skip' if skip else 'Abandon'} batch {last.open.batch} of {name}?", abort=True, err=True)
    intent = checkpoints.abandon(reason=reason, by=resolve_user(by), skip=skip)
    if json_output:
        show_json({"application": name, "skipped": skip, "batch": intent.model_dump(mode="json")})
        return
    after = "passes over its records" if skip else "reads its records again, in another batch"
    show_line(f"Batch {intent.batch} of {name} is {'skipped' if skip else 'abandoned'}; the next run {after}.")


def explain_abandon(intent: Intent, *, skip: bool) -> None:
    """Say what it means to give this batch up."""
    console.print(f"{_describe_batch(intent)}:", markup=False, highlight=False)
    for line in _range_lines(intent):
        show_line(f"  {line}")
    show_line("If a run is in it, that run ends with CommitConflictError, and nothing of it counts here.")
    if skip:
        show_line("Its records count as read: what outputs and tables do not have of them already, they never get.")
    else:
        show_line(
            "Its records are read again in another batch: an output that has taken them in already gets them twice."
        )


def _describe_batch(intent: Intent) -> str:
    what = "a replay" if intent.replays else f"{len(intent.ranges)} partitions"
    return f"batch {intent.batch} of {what}, begun by {intent.run} at {intent.clock:%Y-%m-%d %H:%M:%S} UTC"


def _range_lines(intent: Intent) -> list[str]:
    return [
        f"{ssp}: offsets {span.start} to {span.end}" for ssp, span in intent.ranges.items() if span.start != span.end
    ]


def _startpoint_lines(change: CheckpointChange, ssp: SystemStreamPartition | None) -> list[str]:
    lines = [
        f"{at}: {start.position} is at offset {start.offset} ({start.by}: {start.reason})"
        for at, start in change.resolved.items()
        if ssp in (None, at)
    ]
    lines += [
        f"{at}: {start.position} applied, epoch {start.epoch} ({start.by}: {start.reason})"
        for at, start in change.applied.items()
        if ssp in (None, at)
    ]
    lines += [
        f"{replay.ssp}: replay from {replay.position}, epoch {replay.epoch}, {replay.what}"
        for replay in change.replays
        if replay.what != "moved" and ssp in (None, replay.ssp)
    ]
    return [*([] if change.note is None else [change.note]), *_truncate_lines(lines, ssp)]


def _move_lines(change: CheckpointChange, ssp: SystemStreamPartition | None) -> list[str]:
    moved = {one: span for one, span in change.moved.items() if ssp in (None, one)}
    lines = []
    for one, (before, after) in moved.items():
        by = f"{change.applied[one].offset} -> " if one in change.applied and change.batch is not None else ""
        lines.append(f"{one}: {_or_none(before)} -> {by}{_or_none(after)}")
    lines += [
        f"{replay.ssp}: {replay.before} -> {replay.after} (replay)"
        for replay in change.replays
        if replay.what in ("moved", "ended") and ssp in (None, replay.ssp)
    ]
    return _truncate_lines(lines, ssp)


def _truncate_lines(lines: list[str], ssp: SystemStreamPartition | None) -> list[str]:
    """Return the lines, unless there are many for partitions that nobody named."""
    return lines if ssp or len(lines) <= _SHOWN + 1 else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]


def _or_none(offset: str | None) -> str:
    return "none" if offset is None else offset


def _stream_ends(lake: Lake, app: Application, last: Checkpoint) -> dict[SystemStreamPartition, tuple[str, Any]]:
    """Return the end of each partition of the inputs, and how many offsets the checkpoint is behind it."""
    from dagster_adjunct.orchestration.planner.catalog import systems_for

    systems = systems_for(app, lake)
    ends: dict[SystemStreamPartition, tuple[str, Any]] = {}
    for name in app.inputs:
        ssps = [ssp for ssp in last.offsets if ssp.qualified_stream == name]
        if ssps:
            system = systems[ssps[0].system].snapshot(ssps[0].stream)
            for ssp, end in system.upcoming(ssps).items():
                ends[ssp] = (end, system.distance(ssp, last.offsets[ssp], end))
    return ends


def _no_checkpoint_error(lake: Lake, application: str) -> ConfigurationError:
    from dagster_adjunct.orchestration.batch_log.batch_log import describe_similar_names, list_applications

    known = describe_similar_names(application, list_applications(lake))
    return ConfigurationError(
        f"application {application!r} has no checkpoint in {lake.url}; {known}.",
        "Check the name and the lake; a first run stores one.",
        application=application,
    )


_TASKS_SHOWN = 3
_TIME = "The first record at or after it: ISO 8601 with its zone, a date (UTC), or ms since 1970."


@click.group()
def startpoint() -> None:
    """Requests to read partitions from somewhere else than their checkpoint."""


@startpoint.command("set")
@click.argument("reference", metavar="MODULE:APP")
@click.argument("partitions", metavar="PARTITION...", nargs=-1, required=True)
@click.option("--oldest", is_flag=True, help="Start at the first record that can still be read.")
@click.option("--upcoming", is_flag=True, help="Start at the next record that will arrive.")
@click.option("--timestamp", metavar="T", help=_TIME)
@click.option("--offset", metavar="N", help="Start at this offset, as the stream's system writes offsets.")
@click.option("--until-timestamp", metavar="T", help="A bounded replay, which ends before this time.")
@click.option("--until-offset", metavar="N", help="A bounded replay, which ends before this offset.")
@click.option("--until-upcoming", is_flag=True, help="A bounded replay, which ends where the stream ends at its start.")
@click.option(
    "--versions",
    type=click.Choice(JOIN_VERSIONS),
    help="What a bounded replay meets in datasets: what was valid at each record's time, what is served now, or what "
    "the batches met that read the records first. As-of where joins are as-of, else current.",
)
@click.option("--task", help="For this task alone, such as 'Partition 3', or 'dataset NAME'.")
@click.option(
    "--on-unresolved",
    type=click.Choice(["fail", "checkpoint"]),
    default="fail",
    show_default=True,
    help="Where it has no offset when a run starts: fail, or go on from the checkpoint.",
)
@click.option("--force", is_flag=True, help="Of a dataset's own stream: also where its table gets older, or has gaps.")
@click.option("--replace", is_flag=True, help="A replay may take the place of a startpoint, and the other way round.")
@click.option("--dry-run", is_flag=True, help="Only say what would happen, and write nothing.")
@audit_options
@lake_url
@output_options
def set_startpoint(
    reference: str,
    partitions: tuple[str, ...],
    oldest: bool,
    upcoming: bool,
    timestamp: str | None,
    offset: str | None,
    until_timestamp: str | None,
    until_offset: str | None,
    until_upcoming: bool,
    versions: JoinVersions | None,
    task: str | None,
    on_unresolved: str,
    force: bool,
    replace: bool,
    dry_run: bool,
    reason: str,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Ask that PARTITIONs (lake.flights.3, lake.flights.0-3,7, or lake.flights for all) are read from there on.

    The next run of the application begins there, once. With an --until… option it reads that part again beside its
    position, which stays.
    """
    position = _parse_start({"oldest": oldest, "upcoming": upcoming, "timestamp": timestamp, "offset": offset})
    until = _parse_end({"upcoming": until_upcoming, "timestamp": until_timestamp, "offset": until_offset})
    startpoints = _startpoints(reference, lake_url, create=True)
    app = startpoints.app
    wanted: dict[str, Any] = {"until": until, "task": task, "on_unresolved": on_unresolved, "force": force}
    wanted["versions"] = versions
    if dry_run:
        asked = startpoints.preview(partitions, position, **wanted)
    else:
        asked = startpoints.request(partitions, position, **wanted, replace=replace, by=resolve_user(by), reason=reason)
    if json_output:
        show_json({**asked.to_json(), "next": _next_step(app, reference)} if asked.written else asked.to_json())
        return
    _show_requested(asked)
    if asked.written:
        show_line(
            f"{_next_step(app, reference)} Unless a run applies them, they expire in "
            f"{_format_duration(app.startpoints_expire_after)}."
        )
    else:
        show_line("Nothing is written (--dry-run).")


@startpoint.command("list")
@click.argument("reference", metavar="MODULE:APP")
@lake_url
@output_options
def list_requests(reference: str, lake_url: str | None, json_output: bool) -> None:
    """List what waits, what was handed to tasks, the bounded replays under way, and what was applied last.

    And what has expired, and what this version can't read.
    """
    startpoints = _startpoints(reference, lake_url)
    facts = startpoints.list()
    if json_output:
        show_json({**facts, "switched_off": not startpoints.app.startpoints})
        return
    if not startpoints.app.startpoints:
        show_line(
            f"Startpoints of {startpoints.app.name} are switched off (startpoints=False): runs leave these alone."
        )
    for what, (title, always) in _TABLES.items():
        if facts[what]:
            columns = (*always, *(["versions"] if any(fact.get("versions") for fact in facts[what]) else []))
            show_table(title, columns, [[fact[name.replace(" ", "_")] for name in columns] for fact in facts[what]])
    if not any(facts.values()):
        show_line(f"Application {startpoints.app.name}: no startpoint waits, and none was ever applied.")


@startpoint.command("clear")
@click.argument("reference", metavar="MODULE:APP")
@click.argument("partitions", metavar="[PARTITION]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="At every partition, also of streams that are gone.")
@click.option("--task", help="Only what is for this task, or was handed to it. Replays go on then.")
@audit_options
@lake_url
@output_options
def clear_requests(
    reference: str,
    partitions: tuple[str, ...],
    everything: bool,
    task: str | None,
    reason: str,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Take back what was asked for at PARTITIONs and is not applied, and stop bounded replays there."""
    if everything == bool(partitions):
        raise ConfigurationError(
            f"{'PARTITIONs and --all are both given' if everything else 'nothing is named'}: what is to be taken back?",
            "Name partitions, as in lake.flights.3, or give --all.",
            setting="--all",
        )
    startpoints, why = _startpoints(reference, lake_url), {"by": resolve_user(by), "reason": reason}
    done = startpoints.clear(task=task, **why) if everything else startpoints.take_back(partitions, task=task, **why)
    if json_output:
        show_json(done.to_json())
        return
    for held in done.startpoints:
        show_line(held.taken_back())
    for replay in done.replays:
        show_line(
            f"stopped: {replay.ssp}: the replay from {replay.position} ({replay.by}: {replay.reason}) at offset "
            f"{replay.next}, {replay.until} not reached"
        )
    for text in done.left:
        show_line(f"left: {text}")
    for unread in done.unreadable:
        show_line(f"taken back unread: {unread.summary()}")
    if not (done.startpoints or done.replays or done.left or done.unreadable):
        show_line(f"Application {startpoints.app.name}: nothing is asked for.")


_TABLES = {
    "waiting": ("waiting", ("partition", "task", "position", "until", "by", "reason", "age", "expires in")),
    "expired": (
        "expired: the next run deletes them",
        ("partition", "task", "position", "until", "by", "reason", "age"),
    ),
    "handed": ("handed to tasks", ("partition", "task", "position", "until", "offset", "by", "reason")),
    "replays": (
        "bounded replays under way",
        ("partition", "position", "epoch", "start", "next", "until", "left", "per cent", "by", "reason"),
    ),
    "applied": (
        "applied last",
        ("partition", "position", "offset", "epoch", "batch", "applied at", "by", "reason"),
    ),
    "unreadable": ("left alone: can't be read", ("partition", "task", "handed to", "error")),
}


def _startpoints(reference: str, lake_url: str | None, *, create: bool = False) -> Startpoints:
    from dagster_adjunct.orchestration.startpoints.startpoints import Startpoints
    from dagster_adjunct.resources.objects.lake import open_lake

    return Startpoints(open_lake(lake_url, create=create), load_application(reference))


def _parse_start(given: dict[str, str | bool | None]) -> Startpoint:
    from dagster_adjunct.orchestration.startpoints.request import parse_position

    chosen = _given_options(given)
    if len(chosen) != 1:
        raise ConfigurationError(
            f"{_join_options(chosen, '--') or 'no position'} {'are given' if chosen else 'is given'}: where should "
            "reading start?",
            "Give one of --oldest, --upcoming, --timestamp T, --offset N.",
            setting=f"--{chosen[0]}" if chosen else None,
        )
    return parse_position(chosen[0], _value(given[chosen[0]]))


def _parse_end(given: dict[str, str | bool | None]) -> Startpoint | None:
    from dagster_adjunct.orchestration.startpoints.request import parse_position

    chosen = _given_options(given)
    if len(chosen) > 1:
        raise ConfigurationError(
            f"{_join_options(chosen, '--until-')} are given: where is the replay to end?",
            "Give one of them.",
            setting=f"--until-{chosen[0]}",
        )
    return parse_position(chosen[0], _value(given[chosen[0]])) if chosen else None


def _given_options(options: dict[str, str | bool | None]) -> list[str]:
    return [name for name, value in options.items() if value is not None and value is not False]


def _value(value: str | bool | None) -> str | None:
    return value if isinstance(value, str) else None


def _join_options(names: Sequence[str], prefix: str) -> str:
    return " and ".join(f"{prefix}{name}" for name in names)


def _show_requested(asked: AskedStartpoints) -> None:
    bounded = any(preview.request.until is not None for preview in asked.previews)
    columns = ["partition", "task", "checkpoint", "from", *(["until"] if bounded else []), "offsets", "what happens"]
    rows = [
        [
            str(preview.request.ssp),
            f"all {len(preview.tasks)} tasks"
            if len(preview.tasks) > _TASKS_SHOWN
            else ", ".join(preview.tasks) or None,
            preview.checkpoint,
            preview.start,
            *([preview.end] if bounded else []),
            preview.offsets,
            preview.move,
        ]
        for preview in asked.previews
    ]
    show_table("asked for" if asked.written else "would be asked for", columns, rows)
    for held in asked.replaced:
        show_line(f"{'replaced' if asked.written else 'would be replaced'}: {held.summary()}")
    for table, becomes in asked.tables.items():
        show_line(f"table {table}: {becomes}")
    for note in asked.notes:
        show_line(note)


def _tasks(names: Sequence[str]) -> str | None:
    return f"all {len(names)} tasks" if len(names) > _TASKS_SHOWN else ", ".join(names) or None


def _next_step(app: Application, reference: str) -> str:
    sensor = to_dagster_name(f"{app.name}_startpoints")
    return f"The next run begins there: the sensor {sensor}, if it is on, starts one; else: adjunct run {reference}."


def _format_duration(span: timedelta) -> str:
    hours = span / timedelta(hours=1)
    return f"{hours:g} hours" if hours >= 1 else str(span)
