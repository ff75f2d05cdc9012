"""`adjunct stream repartition` and `adjunct dataset repartition`: options, and what is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import click

from dagster_adjunct.orchestration.cli.common_options import explained, who
from dagster_adjunct.orchestration.cli.output import as_json, lake_url, show_report


def repartition_command(
    text: str,
    rewriting: Callable[[], Callable[..., Any]],
    details: Callable[[Any], Iterable[str]],
    *,
    name_of: Callable[[str], str] = str,
    options: Iterable[click.Parameter] = (),
) -> click.Command:
    """Return the command that rewrites what is named; `options` are its own, and reach the rewriting by their names.

    `rewriting` is looked up when it runs, which keeps --help quick. `details` has the lines beneath the summary.
    """

    @click.command("repartition", help=text)
    @click.argument("name")
    @click.option("--partitions", required=True, type=click.IntRange(1), help="How many it is to have.")
    @click.option("--dry-run", is_flag=True, help="Only show what would be done, and who refuses it.")
    @explained
    @lake_url
    @as_json
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
        report = rewriting()(lake, name_of(name), partitions, reason=reason, by=who(by), **others)
        show_report(report, details(report), json_output=json_output)

    repartition.params[2:2] = options
    return repartition
