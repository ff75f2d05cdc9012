"""Options and arguments that several commands share: audit fields, durations, expiry times and keys."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dagster_adjunct.assets.reading.key_lookup import key_from_text
from dagster_adjunct.orchestration.cli.output import lake_url, output_options, require_zone, show_report
from dagster_adjunct.orchestration.maintenance.delete import DeletionReport
from dagster_adjunct.resources.common import resolve_user
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.schema import Field

C = TypeVar("C", bound=Callable[..., Any])
_DURATION = re.compile(r"(\d+)\s*(m|h|d|w)")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def audit_options(command: C) -> C:
    """Add --reason and --by, which every change records."""
    reason = click.option("--reason", required=True, help="Why; recorded with the change.")
    by = click.option("--by", help="Who does it. Default: the user of this machine.")
    return reason(by(command))


def parse_duration(text: str) -> timedelta | None:
    """Return the duration that 90m, 2h, 7d or 1w stands for, None for any other text."""
    written = _DURATION.fullmatch(text.strip())
    return timedelta(**{_UNITS[written[2]]: int(written[1])}) if written else None


def parse_expiry(text: str | None, now: datetime) -> datetime | None:
    """Return when a pin ends, given an ISO time with its zone or a duration from now such as 90m, 2h, 7d, 1w."""
    if text is None:
        return None
    span = parse_duration(text)
    if span is not None:
        return now + span
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None:
        raise ConfigurationError(
            f"--expires {text!r} is neither a duration nor a time with its zone.",
            "Give for example 2h, 7d, or 2026-01-31T18:00Z.",
            setting="--expires",
        )
    moment = require_zone("--expires", text, moment)
    if moment <= now:
        raise ConfigurationError(f"--expires {text} is in the past.", "Give a later time.", setting="--expires")
    return moment.astimezone(UTC)


if TYPE_CHECKING:
    # Takes the lake, the name and keyword options.
    Deletion = Callable[..., DeletionReport]


def deletion_command(
    text: str, deletion: Callable[[], Deletion], *, name_of: Callable[[str], str] = str
) -> click.Command:
    """Return a `delete` command; `deletion` loads the function when the command runs, which keeps --help fast."""

    @click.command("delete", help=text)
    @click.argument("name")
    @click.option("--force", is_flag=True, help="Delete even if readers find out only at their next read.")
    @click.option("--dry-run", is_flag=True, help="Only show what would be deleted, and who reads it.")
    @click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
    @audit_options
    @lake_url
    @output_options
    def delete(
        name: str,
        force: bool,
        dry_run: bool,
        yes: bool,
        reason: str,
        by: str | None,
        lake_url: str | None,
        json_output: bool,
    ) -> None:
        from dagster_adjunct.resources.objects.lake import open_lake

        lake = open_lake(lake_url, create=False)
        act = partial(deletion(), lake, name_of(name), reason=reason, by=resolve_user(by), force=force)
        if not dry_run and not yes:
            planned = act(dry_run=True)
            click.confirm(f"{planned.summary()}. Delete it permanently?", abort=True, err=True)
        report = act(dry_run=dry_run)
        show_report(report, _reader_lines(report), json_output=json_output)

    return delete


def _reader_lines(report: DeletionReport) -> list[str]:
    verdict = "needs --force" if report.dry_run else "forced"
    return [
        *(f"prevented: {reader}" for reader in report.holding),
        *(f"{verdict}: {reader}" for reader in report.told),
    ]


def split_keys(dataset: str, columns: Sequence[str], values: Sequence[str]) -> list[list[str]]:
    """Split command-line values into keys, one text per key column."""
    width = len(columns)
    if len(values) % width:
        raise ConfigurationError(
            f"dataset {dataset!r} has a key of {width} columns ({', '.join(columns)}), but {len(values)} values were "
            "given.",
            f"Give {width} values for each entry.",
            dataset=dataset,
        )
    return [list(values[at : at + width]) for at in range(0, len(values), width)]


def read_keys(dataset: str, columns: Sequence[str], file: Path) -> list[list[str]]:
    """Return the keys in a CSV file without header, one per line, one field per key column; empty lines are skipped."""
    with file.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.reader(lines) if row]
    wrong = next((number for number, row in enumerate(rows, 1) if len(row) != len(columns)), None)
    if wrong is not None:
        raise ConfigurationError(
            f"{file}: key {wrong} has {len(rows[wrong - 1])} fields, but the key of dataset {dataset!r} is "
            f"({', '.join(columns)}).",
            "Write one key per line, its columns separated by commas, without a header.",
            dataset=dataset,
        )
    return rows


def parse_leading_values(dataset: str, fields: Sequence[Field], texts: Sequence[str]) -> tuple[Any, ...]:
    """Convert texts to values of the leading key columns."""
    known = fields[: len(texts)] if len(texts) <= len(fields) else fields
    return key_from_text(f"dataset {dataset!r}", known, list(texts))


def repartition_command(
    text: str,
    rewriting: Callable[[], Callable[..., Any]],
    details: Callable[[Any], Iterable[str]],
    *,
    name_of: Callable[[str], str] = str,
    options: Iterable[click.Parameter] = (),
) -> click.Command:
    """Return a `repartition` command; `options` are extra options, passed on as keyword arguments.

    `rewriting` loads the function when the command runs, which keeps --help fast. `details` returns the lines below
    the summary.
    """

    @click.command("repartition", help=text)
    @click.argument("name")
    @click.option("--partitions", required=True, type=click.IntRange(1), help="The new number of partitions.")
    @click.option("--dry-run", is_flag=True, help="Only show what would be done, and what prevents it.")
    @audit_options
    @lake_url
    @output_options
    def repartition(
        name: str,
        partitions: int,
        reason: str,
        by: str | None,
        lake_url: str | None,
        json_output: bool,
        **others: Any,
    ) -> None:
        from dagster_adjunct.resources.objects.lake import open_lake

        lake = open_lake(lake_url, create=False)
        report = rewriting()(lake, name_of(name), partitions, reason=reason, by=resolve_user(by), **others)
        show_report(report, details(report), json_output=json_output)

    repartition.params[2:2] = options
    return repartition
