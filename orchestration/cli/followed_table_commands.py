"""`adjunct dataset lag, compact, rebuild`: tables that follow change streams."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from dagster_adjunct.orchestration.application.load_application import load_application
from dagster_adjunct.orchestration.cli.advance_command import lines_shown, stages_shown, unit_of
from dagster_adjunct.orchestration.cli.common_options import explained, who
from dagster_adjunct.orchestration.cli.output import (
    as_json,
    lake_url,
    show_facts,
    show_json,
    show_line,
    show_report,
    show_table,
)
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.unbounded_manifest import UnboundedManifest
    from dagster_adjunct.resources.objects import Lake

_MASTER = "Spark master, such as local[4] or spark://host:7077. Default: all cores here."


@click.command()
@click.argument("name")
@lake_url
@as_json
def lag(name: str, lake_url: str | None, json_output: bool) -> None:
    """Show how far an unbounded dataset is behind its stream, by partition, and how far its bootstrap is."""
    from dagster_adjunct.assets.reading.stored_versions import stored_versions
    from dagster_adjunct.assets.versions.manifest import follower
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    manifest = stored_versions(lake, name).require_manifest()
    table = follower(manifest)
    if table is None:
        raise _follows_nothing(name, manifest.declaration.owner)
    facts = _facts(lake, table)
    if json_output:
        show_json({"dataset": name, **facts})
    else:
        show_lag(facts)


def _follows_nothing(name: str, owner: str | None) -> ConfigurationError:
    if owner is not None:
        return ConfigurationError(
            f"dataset {name!r} is a local table of application {owner!r}: it follows no stream.",
            f"See how far the application is: adjunct checkpoint show {owner}.",
            dataset=name,
        )
    return ConfigurationError(
        f"dataset {name!r} is bounded: it arrives in versions and follows no stream.",
        f"See what its next version waits for: adjunct dataset show {name}.",
        dataset=name,
    )


def lag_facts(lake: Lake, manifest: UnboundedManifest) -> dict[str, Any]:
    """Return how far a table is behind its stream, as JSON-able values, or why that can't be seen."""
    try:
        return _facts(lake, manifest)
    except AdjunctError as error:  # its stream may be gone, or known to its application's module only
        return {"unknown": str(error)}


def _facts(lake: Lake, manifest: UnboundedManifest) -> dict[str, Any]:
    from dagster_adjunct.assets.unbounded.bootstrap_progress import bootstrap_progress
    from dagster_adjunct.assets.unbounded.table_lag import PlaceInStream
    from dagster_adjunct.resources.streams.registry import open_system

    system = split_stream_name(manifest.declaration.input)[0]
    systems, now = {system: open_system(system, lake)}, lake.now()
    lags = PlaceInStream.of(systems, manifest).lags(now)
    return {
        "caught_up_at": manifest.confirmed_at,
        "bootstrap": bootstrap_progress(systems, manifest, now).to_json(),
        "decision": None if manifest.decision is None else manifest.decision.model_dump(mode="json"),
        "partitions": {
            str(ssp): {"next": behind.offset, "end": behind.end, **behind.to_json()} for ssp, behind in lags.items()
        },
    }


def show_lag(facts: Mapping[str, Any]) -> None:
    """Print how far a table is behind its stream."""
    if "unknown" in facts:
        show_line(f"How far it is behind its stream can't be seen: {facts['unknown']}")
        return
    bootstrap = facts["bootstrap"]
    show_facts("bootstrap", {name: value for name, value in bootstrap.items() if value not in ({}, "")})
    rows = [
        [ssp, lag["next"], lag["end"], lag["offsets"], lag["records"], lag["lost"], _span(lag["seconds"])]
        for ssp, lag in facts["partitions"].items()
    ]
    columns = ["partition", "next", "end", "offsets behind", "records", "lost", "time behind"]
    show_table("behind its stream", columns, rows)


def _span(seconds: float | None) -> str:
    return "never caught up" if seconds is None else str(timedelta(seconds=round(seconds)))


@click.command()
@click.argument("name")
@click.option("--level", type=click.Choice(["minor", "major"]), help="Default: what its policy finds due.")
@click.option("--master", help=_MASTER)
@click.option("--by", help="Who does it. Default: the user of this machine.")
@lake_url
@as_json
def compact(
    name: str, level: str | None, master: str | None, by: str | None, lake_url: str | None, json_output: bool
) -> None:
    """Merge the deltas of an unbounded dataset into one (minor), or with its base into a new one (major).

    Safe beside readers and writers; for cron.
    """
    from dagster_adjunct.assets.unbounded.compact_table import compact_dataset
    from dagster_adjunct.orchestration.step.session_scope import session_scope
    from dagster_adjunct.resources.objects.lake import open_lake

    lake, person = open_lake(lake_url, create=False), who(by)
    asked = cast(Literal["minor", "major"] | None, level)
    with session_scope(master=master, lake_url=lake.url, on_start=lines_shown(json_output)) as spark:
        report = compact_dataset(lake, name, spark, by=person, level=asked)
    show_report(report, json_output=json_output)


@click.command()
@click.argument("name")
@click.argument("reference", metavar="MODULE:APP")
@click.option("--master", help=_MASTER)
@explained
@lake_url
@as_json
def rebuild(
    name: str,
    reference: str,
    master: str | None,
    reason: str,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Build an unbounded dataset anew from its stream's oldest offset, or its bulk snapshot; readers keep the old."""
    from dagster_adjunct.assets.unbounded.rebuild import rebuild_dataset
    from dagster_adjunct.orchestration.planner.lake_catalog import systems_of
    from dagster_adjunct.orchestration.step.session_scope import session_scope
    from dagster_adjunct.resources.objects.lake import open_lake

    spec = unit_of(load_application(reference), name)[0]
    lake = open_lake(lake_url, create=False)
    shown = stages_shown(json_output)
    with session_scope(master=master, lake_url=lake.url, on_start=lines_shown(json_output)) as spark:
        report = rebuild_dataset(lake, systems_of([spec], lake), spec, spark, reason=reason, by=who(by), on_stage=shown)
    show_report(report, json_output=json_output)


COMMANDS = (lag, compact, rebuild)
