"""What `adjunct stream delete` and `adjunct dataset delete` share: options, the question before, and what is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dagster_adjunct.orchestration.cli.output import show_json, show_line

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.upkeep.deletion import DeletionReport

C = TypeVar("C", bound=Callable[..., Any])


def deletion(command: C) -> C:
    """Add the options of a deletion."""
    force = click.option("--force", is_flag=True, help="Also where readers find out only at their next look.")
    dry_run = click.option("--dry-run", is_flag=True, help="Only show what would go, and who reads it.")
    yes = click.option("--yes", is_flag=True, help="Do not ask before.")
    return force(dry_run(yes(command)))


def delete_and_show(delete: Callable[..., DeletionReport], *, dry_run: bool, yes: bool, json_output: bool) -> None:
    """Delete after a question, or only show what would be deleted."""
    if not dry_run and not yes:
        planned = delete(dry_run=True)
        click.confirm(f"{planned.summary()}. Delete it for good?", abort=True, err=True)
    report = delete(dry_run=dry_run)
    if json_output:
        show_json(report.to_json())
        return
    show_line(f"{report.summary()}.")
    for reader in report.holding:
        show_line(f"  refused, because {reader}")
    for reader in report.told:
        show_line(f"  {'refused without --force' if dry_run else 'forced'}, because {reader}")
