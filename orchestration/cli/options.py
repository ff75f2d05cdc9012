"""Options and arguments that several commands share: the lake, output, audit fields, durations,
times and keys.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from dagster_adjunct.assets.reading.key_lookup import key_from_text
from dagster_adjunct.orchestration.cli.output import WIDE, console, show_report
from dagster_adjunct.orchestration.maintenance.delete import DeletionReport
from dagster_adjunct.resources.arguments import resolve_user
from dagster_adjunct.resources.errors import ConfigurationError, translate_file_errors
from dagster_adjunct.resources.objects.lake import Lake, open_lake
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.times import read_duration

C = TypeVar("C", bound=Callable[..., Any])

lake_url_option = click.option(
    "--lake",
    "lake_url",
    metavar="URL",
    help="The lake: s3://bucket/prefix or a folder. Default: ADJUNCT_LAKE, else .adjunct/lake.",
)
master_option = click.option(
    "--master",
    help=(
        "Spark master, such as local[4], spark://host:7077 or sc://host:15002 (Spark Connect); none"
        " starts no Spark session. Default: ADJUNCT_SPARK_MASTER, else all cores here."
    ),
)
name_argument = click.argument("name")
app_reference = click.argument("reference", metavar="MODULE:APP")
yes_option = click.option("--yes", is_flag=True, help="Do not ask before.")
user_option = click.option(
    "--by",
    callback=lambda context, option, by: resolve_user(by),
    help="Who does it. Default: the user of this machine.",
)


def option(name: str, metavar: str, text: str) -> Callable[[C], C]:
    """Return an option with a value, which the help calls `metavar`; `text` is its help."""
    return click.option(name, metavar=metavar, help=text)


def flag(name: str, text: str) -> Callable[[C], C]:
    """Return an option without a value; `text` is its help."""
    return click.option(name, is_flag=True, help=text)


def limit_option(default: int | None, text: str) -> Callable[[C], C]:
    """Return the option --limit, a whole number from 1; `text` is its help."""
    return click.option(
        "--limit",
        type=click.IntRange(1, sys.maxsize),
        default=default,
        show_default=default is not None,
        help=text,
    )


def lake_option(*, create: bool = False) -> Callable[[C], C]:
    """Add --lake, and pass the lake as `lake`; unless `create`, it must exist."""

    def decorate(command: C) -> C:
        @lake_url_option
        @wraps(command)
        def run(lake_url: str | None, **given: Any) -> Any:
            return command(lake=open_lake(lake_url, create=create), **given)

        return run  # type: ignore[return-value]

    return decorate


def lake_options(*, create: bool = False) -> Callable[[C], C]:
    """Add --lake, --json and --wide, and pass the lake as `lake`; unless `create`, it must
    exist.
    """
    return lambda command: lake_option(create=create)(output_options(command))


def output_options(command: C) -> C:
    """Add --json, which prints everything, and --wide, which does not fit tables to the
    terminal.
    """

    def widen(context: click.Context, option: click.Parameter, wide: bool) -> None:
        context.meta[WIDE] = wide

    def silence_console(context: click.Context, option: click.Parameter, json: bool) -> None:
        console.quiet = json

    # Both are for their callbacks only, which are called before other options are checked.
    only: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True}
    wide = click.option(
        "--wide", **only, callback=widen, help="Print full ids, times and texts in tables."
    )
    text = "Print one JSON document, also for an error."
    return click.option("--json", **only, callback=silence_console, help=text)(wide(command))


def audit_options(command: C) -> C:
    """Add --reason and --by, which every change records."""

    def check(context: click.Context, option: click.Parameter, reason: str) -> str:
        if not reason.strip():
            step = "Say why; it is recorded."
            raise ConfigurationError("--reason is empty.", step, setting="--reason")
        return reason

    text = "Why; recorded with the change."
    return click.option("--reason", required=True, callback=check, help=text)(user_option(command))


def confirm(question: str, *, yes: bool) -> None:
    """Ask before what destroys data; without an answer, as in scripts, the command stops."""
    if not yes:
        click.confirm(question, abort=True, err=True)


def confirm_at_terminal(question: str, *, yes: bool) -> None:
    """Ask before what can't be undone, if somebody is at a terminal; scripts go on."""
    confirm(question, yes=yes or not is_at_terminal())


def is_at_terminal() -> bool:
    """Whether somebody can answer a question."""
    return sys.stdin.isatty()


def parse_duration(option: str, text: str, example: str) -> timedelta:
    """Return the duration of an option, such as 30s, 90m, 2h, 7d or 1w."""
    duration = read_duration(text)
    if duration is None:
        problem = f"{option} {text!r} is not a duration."
        raise ConfigurationError(problem, f"Give {example}.", setting=option)
    return duration


def parse_expiry(text: str, now: datetime) -> datetime:
    """Return when a pin ends, given an ISO time with its zone or a duration from now such as
    90m, 2h, 7d, 1w.
    """
    span = read_duration(text)
    try:
        if span is not None:
            return now + span
        moment = require_zone("--expires", text, datetime.fromisoformat(text)).astimezone(UTC)
    except OverflowError:
        problem = f"--expires {text!r} is outside the years 1 to 9999 in UTC."
        step = "Leave it out for a pin without an end."
        raise ConfigurationError(problem, step, setting="--expires") from None
    except ValueError:
        problem = f"--expires {text!r} is neither a duration nor a time with its zone."
        step = "Give for example 2h, 7d, or 2026-01-31T18:00Z."
        raise ConfigurationError(problem, step, setting="--expires") from None
    if moment <= now:
        problem = f"--expires {text} is in the past."
        raise ConfigurationError(problem, "Give a later time.", setting="--expires")
    return moment


def require_zone(option: str, text: str, moment: datetime) -> datetime:
    """Return the time of an option. Raises ConfigurationError if it has no time zone."""
    if moment.tzinfo is None:
        written = text if ":" in text else f"{text}T00:00"
        problem = f"{option} {text} has no time zone."
        step = f"Give {written}Z for UTC, or an offset: {written}+01:00."
        raise ConfigurationError(problem, step, setting=option)
    return moment


def split_keys(dataset: str, columns: Sequence[str], values: Sequence[str]) -> list[list[str]]:
    """Split command-line values into keys, one text per key column."""
    width = len(columns)
    if len(values) % width:
        problem = (
            f"dataset {dataset!r} has a key of {width} columns ({', '.join(columns)}), but"
            f" {len(values)} values were given."
        )
        raise ConfigurationError(problem, f"Give {width} values for each entry.", dataset=dataset)
    return [list(values[at : at + width]) for at in range(0, len(values), width)]


def read_keys(dataset: str, columns: Sequence[str], file: Path) -> list[list[str]]:
    """Return the keys in a CSV file without header, one per line, one field per key column;
    empty lines are skipped.
    """
    try:
        # utf-8-sig skips the byte order mark with which spreadsheets begin files.
        with (
            translate_file_errors(file, "--keys-from"),
            file.open(newline="", encoding="utf-8-sig") as lines,
        ):
            rows = [row for row in csv.reader(lines, strict=True) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        problem = f"{file} can't be read as CSV in UTF-8: {error}."
        step = "Save it as CSV in UTF-8."
        raise ConfigurationError(problem, step, setting="--keys-from") from error
    for number, row in enumerate(rows, 1):
        if len(row) != len(columns):
            problem = (
                f"{file}: key {number} has {len(row)} fields, but the key of dataset {dataset!r} is"
                f" ({', '.join(columns)})."
            )
            step = "Write one key per line, its columns separated by commas, without a header."
            raise ConfigurationError(problem, step, dataset=dataset)
    return rows


def parse_leading_values(
    dataset: str, fields: Sequence[Field], texts: Sequence[str]
) -> tuple[Any, ...]:
    """Convert texts to values of the first key columns, one text per column."""
    return key_from_text(f"dataset {dataset!r}", fields[: len(texts)], list(texts))


def deletion_command(
    text: str, deletion: Callable[..., DeletionReport], *, name_of: Callable[[str], str] = str
) -> click.Command:
    """Return a `delete` command with the help `text`, which calls `deletion` and prints its report.

    `deletion` takes the lake, the name, and options by keyword; `name_of` converts the name that
    the user gives.
    """

    @click.command("delete", help=text)
    @name_argument
    @flag("--force", "Delete even if readers find out only at their next read.")
    @flag("--dry-run", "Only show what would be deleted, and who reads it.")
    @yes_option
    @audit_options
    @lake_options()
    def delete(
        lake: Lake, name: str, force: bool, dry_run: bool, yes: bool, reason: str, by: str
    ) -> None:
        act = partial(deletion, lake, name_of(name), reason=reason, by=by, force=force)
        if not dry_run and not yes:
            confirm(f"{act(dry_run=True).summary()}. Delete it permanently?", yes=False)
        report = act(dry_run=dry_run)
        verdict = "needs --force" if report.dry_run else "forced"
        details = [f"prevented: {reader}" for reader in report.blocking]
        details += [f"{verdict}: {reader}" for reader in report.affected]
        show_report(report, details)

    return delete


def repartition_command(
    text: str,
    rewrite: Callable[..., Any],
    details: Callable[[Any], Iterable[str]],
    *,
    name_of: Callable[[str], str] = str,
) -> click.Command:
    """Return a `repartition` command with the help `text`, which calls `rewrite` and prints its
    report.

    Options that are added to the command are passed to `rewrite` by keyword. `details` returns the
    lines below the report's summary; `name_of` converts the name that the user gives.
    """

    @click.command("repartition", help=text)
    @name_argument
    @click.option(
        "--partitions", required=True, type=click.IntRange(1), help="The new number of partitions."
    )
    @flag("--dry-run", "Only show what would be done, and what prevents it.")
    @audit_options
    @lake_options()
    def repartition(lake: Lake, name: str, partitions: int, **options: Any) -> None:
        report = rewrite(lake, name_of(name), partitions, **options)
        show_report(report, details(report))

    return repartition
