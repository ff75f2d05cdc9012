"""`adjunct stream delete` and `adjunct dataset delete`: options, the question before, and what is shown."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import click

from dagster_adjunct.orchestration.cli.common_options import explained, who
from dagster_adjunct.orchestration.cli.output import as_json, lake_url, show_report

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.upkeep.delete_unread import DeletionReport

    # Given the lake, the name and how to go about it.
    Deletion = Callable[..., DeletionReport]


def deletion_command(
    text: str, deletion: Callable[[], Deletion], *, name_of: Callable[[str], str] = str
) -> click.Command:
    """Return the command that deletes what is named; `deletion` is looked up when it runs, which keeps --help quick."""

    @click.command("delete", help=text)
    @click.argument("name")
    @click.option("--force", is_flag=True, help="Also where readers find out only at their next look.")
    @click.option("--dry-run", is_flag=True, help="Only show what would go, and who reads it.")
    @click.option("--yes", is_flag=True, help="Do not ask before.")
    @explained
    @lake_url
    @as_json
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
        act = partial(deletion(), lake, name_of(name), reason=reason, by=who(by), force=force)
        if not dry_run and not yes:
            planned = act(dry_run=True)
            click.confirm(f"{planned.summary()}. Delete it for good?", abort=True, err=True)
        report = act(dry_run=dry_run)
        show_report(report, _readers(report), json_output=json_output)

    return delete


def _readers(report: DeletionReport) -> list[str]:
    verb = "refused without --force" if report.dry_run else "forced"
    return [
        *(f"refused, because {reader}" for reader in report.holding),
        *(f"{verb}, because {reader}" for reader in report.told),
    ]
