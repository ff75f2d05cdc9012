"""`adjunct startpoint …`: ask that partitions are read from somewhere else, see what was asked for, take it back."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from dagster_adjunct.orchestration.application.dagster_names import dagster_name
from dagster_adjunct.orchestration.application.load_application import load_application
from dagster_adjunct.orchestration.cli.common_options import explained, who
from dagster_adjunct.orchestration.cli.output import as_json, lake_url, show_json, show_line, show_table
from dagster_adjunct.orchestration.operators.spec.versions_met import VERSIONS_MET, VersionsMet
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.startpoints.application_startpoints import AskedStartpoints, Startpoints
    from dagster_adjunct.resources.streams.interface.startpoint import Startpoint

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
    type=click.Choice(VERSIONS_MET),
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
@explained
@lake_url
@as_json
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
    versions: VersionsMet | None,
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
    position = _position({"oldest": oldest, "upcoming": upcoming, "timestamp": timestamp, "offset": offset})
    until = _until({"upcoming": until_upcoming, "timestamp": until_timestamp, "offset": until_offset})
    startpoints = _startpoints(reference, lake_url, create=True)
    app = startpoints.app
    wanted: dict[str, Any] = {"until": until, "task": task, "on_unresolved": on_unresolved, "force": force}
    wanted["versions"] = versions
    if dry_run:
        asked = startpoints.preview(partitions, position, **wanted)
    else:
        asked = startpoints.request(partitions, position, **wanted, replace=replace, by=who(by), reason=reason)
    if json_output:
        show_json({**asked.to_json(), "next": _next(app, reference)} if asked.written else asked.to_json())
        return
    _show_asked(asked)
    if asked.written:
        show_line(f"{_next(app, reference)} Not taken up, they expire in {_span(app.startpoints_expire_after)}.")
    else:
        show_line("Nothing is written (--dry-run).")


@startpoint.command("list")
@click.argument("reference", metavar="MODULE:APP")
@lake_url
@as_json
def list_startpoints(reference: str, lake_url: str | None, json_output: bool) -> None:
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


@startpoint.command()
@click.argument("reference", metavar="MODULE:APP")
@click.argument("partitions", metavar="[PARTITION]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="At every partition, also of streams that are gone.")
@click.option("--task", help="Only what is for this task, or was handed to it. Replays go on then.")
@explained
@lake_url
@as_json
def clear(
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
    startpoints, why = _startpoints(reference, lake_url), {"by": who(by), "reason": reason}
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
    from dagster_adjunct.orchestration.startpoints.application_startpoints import Startpoints
    from dagster_adjunct.resources.objects.lake import open_lake

    return Startpoints(open_lake(lake_url, create=create), load_application(reference))


def _position(given: dict[str, str | bool | None]) -> Startpoint:
    from dagster_adjunct.orchestration.startpoints.requests.request_parsing import parse_position

    chosen = _given(given)
    if len(chosen) != 1:
        raise ConfigurationError(
            f"{_options(chosen, '--') or 'no position'} {'are given' if chosen else 'is given'}: where is reading to "
            "start?",
            "Give one of --oldest, --upcoming, --timestamp T, --offset N.",
            setting=f"--{chosen[0]}" if chosen else None,
        )
    return parse_position(chosen[0], _value(given[chosen[0]]))


def _until(given: dict[str, str | bool | None]) -> Startpoint | None:
    from dagster_adjunct.orchestration.startpoints.requests.request_parsing import parse_position

    chosen = _given(given)
    if len(chosen) > 1:
        raise ConfigurationError(
            f"{_options(chosen, '--until-')} are given: where is the replay to end?",
            "Give one of them.",
            setting=f"--until-{chosen[0]}",
        )
    return parse_position(chosen[0], _value(given[chosen[0]])) if chosen else None


def _given(options: dict[str, str | bool | None]) -> list[str]:
    return [name for name, value in options.items() if value is not None and value is not False]


def _value(value: str | bool | None) -> str | None:
    return value if isinstance(value, str) else None


def _options(names: Sequence[str], prefix: str) -> str:
    return " and ".join(f"{prefix}{name}" for name in names)


def _show_asked(asked: AskedStartpoints) -> None:
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


def _next(app: Application, reference: str) -> str:
    sensor = dagster_name(f"{app.name}_startpoints")
    return f"The next run begins there: the sensor {sensor}, if it is on, starts one; else: adjunct run {reference}."


def _span(span: timedelta) -> str:
    hours = span / timedelta(hours=1)
    return f"{hours:g} hours" if hours >= 1 else str(span)
