"""`adjunct checkpoint …`: where an application goes on, how it came there, and giving up a batch that can't end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dagster_adjunct.orchestration.application.load_application import load_application
from dagster_adjunct.orchestration.cli.common_options import explained, who
from dagster_adjunct.orchestration.cli.output import (
    as_json,
    console,
    lake_url,
    show_facts,
    show_json,
    show_line,
    show_table,
)
from dagster_adjunct.orchestration.cli.shown_times import json_times, show_times
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.batchlog.checkpoint_history import Checkpoint, CheckpointChange
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

_SHOWN = 8


@click.group()
def checkpoint() -> None:
    """Where applications go on in their input streams."""


@checkpoint.command()
@click.argument("name", metavar="MODULE:APP|NAME")
@lake_url
@as_json
def show(name: str, lake_url: str | None, json_output: bool) -> None:
    """Show the next offset of each input partition, its epoch, and a batch that is open.

    Where inputs say when their records happened, also how far they and the operators have come in time, and how much
    state there is. With MODULE:APP, also how far the streams have come, and which partitions hold back or are idle.
    """
    from dagster_adjunct.orchestration.batchlog.checkpoint_history import CheckpointManager
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    app = load_application(name) if ":" in name else None
    application = name if app is None else app.name
    last = CheckpointManager(lake, app or application).read_last_checkpoint()
    if last is None:
        raise _unknown(lake, application)
    ends = {} if app is None else _ends(lake, app, last)
    if json_output:
        facts = {"application": application, **last.to_json(), **json_times(lake, app, last)}
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
        show_line(f"Open: {_words(last.open)}. The next run repeats it as written, if none is in it.")


@checkpoint.command()
@click.argument("name")
@click.argument("partition", required=False)
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="The newest so many changes.")
@lake_url
@as_json
def history(name: str, partition: str | None, limit: int, lake_url: str | None, json_output: bool) -> None:
    """Show the newest changes to where application NAME goes on: who moved what, when, from where to where."""
    from dagster_adjunct.orchestration.batchlog.checkpoint_history import CheckpointManager
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.streams.interface.system_stream_partition import SystemStreamPartition

    lake = open_lake(lake_url, create=False)
    ssp = None if partition is None else SystemStreamPartition.parse(partition)
    changes = list(CheckpointManager(lake, name).history(limit, ssp))
    if not changes:
        if ssp is None:
            raise _unknown(lake, name)
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
        for line in [*_startpoint_lines(change, ssp), *_moves(change, ssp)]:
            show_line(f"    {line}")


@checkpoint.command()
@click.argument("name")
@click.option("--skip", is_flag=True, help="Count its ranges as read: what no output has yet is passed over.")
@click.option("--yes", is_flag=True, help="Do not ask before.")
@explained
@lake_url
@as_json
def abandon(
    name: str, skip: bool, yes: bool, reason: str, by: str | None, lake_url: str | None, json_output: bool
) -> None:
    """Give up the open batch of application NAME, which every run would repeat as it is written, without end.

    For a batch that can't end. Its records are read again in another batch; with --skip they are passed over.
    """
    from dagster_adjunct.orchestration.batchlog.checkpoint_history import CheckpointManager
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    checkpoints = CheckpointManager(lake, name)
    last = checkpoints.read_last_checkpoint()
    if last is None:
        raise _unknown(lake, name)
    if last.open is not None and not yes:
        show_explained(last.open, skip=skip)
        click.confirm(f"{'Skip' if skip else 'Abandon'} batch {last.open.batch} of {name}?", abort=True, err=True)
    intent = checkpoints.abandon(reason=reason, by=who(by), skip=skip)
    if json_output:
        show_json({"application": name, "skipped": skip, "batch": intent.model_dump(mode="json")})
        return
    after = "passes over its records" if skip else "reads its records again, in another batch"
    show_line(f"Batch {intent.batch} of {name} is {'skipped' if skip else 'abandoned'}; the next run {after}.")


def show_explained(intent: Intent, *, skip: bool) -> None:
    """Say what it means to give this batch up."""
    console.print(f"{_words(intent)}:", markup=False, highlight=False)
    for line in _spans(intent):
        show_line(f"  {line}")
    show_line("If a run is in it, that run ends with CommitConflictError, and nothing of it counts here.")
    if skip:
        show_line("Its records count as read: what outputs and tables do not have of them already, they never get.")
    else:
        show_line(
            "Its records are read again in another batch: an output that has taken them in already gets them twice."
        )


def _words(intent: Intent) -> str:
    what = "a replay" if intent.replays else f"{len(intent.ranges)} partitions"
    return f"batch {intent.batch} of {what}, begun by {intent.run} at {intent.clock:%Y-%m-%d %H:%M:%S} UTC"


def _spans(intent: Intent) -> list[str]:
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
    return [*([] if change.note is None else [change.note]), *_shortened(lines, ssp)]


def _moves(change: CheckpointChange, ssp: SystemStreamPartition | None) -> list[str]:
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
    return _shortened(lines, ssp)


def _shortened(lines: list[str], ssp: SystemStreamPartition | None) -> list[str]:
    """Return the lines, unless there are many for partitions that nobody named."""
    return lines if ssp or len(lines) <= _SHOWN + 1 else [*lines[:_SHOWN], f"and {len(lines) - _SHOWN} more"]


def _or_none(offset: str | None) -> str:
    return "none" if offset is None else offset


def _ends(lake: Lake, app: Application, last: Checkpoint) -> dict[SystemStreamPartition, tuple[str, Any]]:
    """Return the end of each partition of the inputs, and how many offsets the checkpoint is behind it."""
    from dagster_adjunct.orchestration.planner.lake_catalog import systems_for

    systems = systems_for(app, lake)
    ends: dict[SystemStreamPartition, tuple[str, Any]] = {}
    for name in app.inputs:
        ssps = [ssp for ssp in last.offsets if ssp.qualified_stream == name]
        if ssps:
            system = systems[ssps[0].system].snapshot(ssps[0].stream)
            for ssp, end in system.upcoming(ssps).items():
                ends[ssp] = (end, system.distance(ssp, last.offsets[ssp], end))
    return ends


def _unknown(lake: Lake, application: str) -> ConfigurationError:
    from dagster_adjunct.orchestration.batchlog.known_applications import list_applications, nearest

    known = nearest(application, list_applications(lake))
    return ConfigurationError(
        f"application {application!r} has no checkpoint in {lake.url}; {known}.",
        "Check the name and the lake; a first run stores one.",
        application=application,
    )
