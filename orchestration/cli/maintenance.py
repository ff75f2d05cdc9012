"""`adjunct dataset advance, compact, expire, erase, …`: keep datasets up to date, small and intact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import click

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.retention.discard import DiscardReport
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.assets.versions.reports import AdvanceReport, OnStage, ignore_stage
from dagster_adjunct.orchestration.application.application import Application, load_application
from dagster_adjunct.orchestration.cli.options import audit_options, parse_duration, read_keys, split_keys
from dagster_adjunct.orchestration.cli.output import (
    fail_if_rejected,
    lake_url,
    output_options,
    show_facts,
    show_json,
    show_line,
    show_report,
    show_table,
)
from dagster_adjunct.resources.common import resolve_user, split_stream_name
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError, VersionDiscardedError, raise_first
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.spark.in_process import session_factory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_MASTER = "Spark master, such as local[4] or spark://host:7077. Default: all cores of this machine."


@click.command()
@click.argument("name")
@click.argument("reference", metavar="MODULE:APP")
@click.option("--partition", metavar="VERSION", help="Build the version of this name, if versions are partitions.")
@click.option("--make-current", is_flag=True, help="With --partition: serve it even if a newer version is served.")
@click.option("--master", help=_MASTER)
@click.option("--by", help="Who does it. Default: the user of this machine.")
@lake_url
@output_options
def advance(
    name: str,
    reference: str,
    partition: str | None,
    make_current: bool,
    master: str | None,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Bring dataset NAME of an application, and its version set, up to date.

    Startpoints for the dataset's stream are applied first. Exits with 3 if a version was rejected.
    """
    from dagster_adjunct.assets.advancing.advance_dataset import advance_dataset
    from dagster_adjunct.assets.writing.generation import Runtime
    from dagster_adjunct.orchestration.planner.catalog import open_dataset_systems, systems_for
    from dagster_adjunct.orchestration.step.run import advance_unit, apply_startpoints
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.spark.scope import session_scope

    if make_current and partition is None:
        raise ConfigurationError(
            "--make-current needs --partition.",
            "Add --partition, or use adjunct dataset rollback to serve an earlier version.",
            setting="--make-current",
        )
    app = load_application(reference)
    group = advance_group(app, name)
    lake = open_lake(lake_url)
    person = resolve_user(by)
    systems = open_dataset_systems(group, lake)
    with session_scope(master=master, lake_url=lake.url, on_start=line_printer(json_output)) as spark:
        if partition is None:
            runtime = Runtime(lake, systems_for(app, lake=lake), session_factory(spark), by=person)
            applied = apply_startpoints(runtime, app, only={member.name for member in group})
            applied.raise_failed()
            reports = list(applied.reports)
            reports += advance_unit(replace(runtime, systems=systems), group, on_stage=stage_printer(json_output))
        else:
            _reject_partition(group)
            reports = [
                advance_dataset(
                    group[0],
                    lake=lake,
                    systems=systems,
                    spark=spark,
                    by=person,
                    partition=partition,
                    make_current=make_current,
                )
            ]
    if json_output:
        show_json([report.to_json() for report in reports])
    else:
        for report in reports:
            show_line(report.summary())
    fail_if_rejected(reports)


def has_datasets_only(app: Application) -> bool:
    """Whether an application declares datasets but no inputs, outputs or tables."""
    return bool(app.datasets) and not (app.inputs or app.outputs or app.tables)


def advance_all(
    lake: Lake,
    app: Application,
    spark: Callable[[], SparkSession],
    *,
    by: str,
    on_report: Callable[[AdvanceReport], None],
    on_stage: OnStage = ignore_stage,
) -> tuple[list[AdvanceReport], list[str]]:
    """Bring an application's datasets up to date; return their reports, and the names of those built by partition."""
    from dagster_adjunct.assets.writing.generation import Runtime
    from dagster_adjunct.orchestration.application.graph import is_advanced_by_partition
    from dagster_adjunct.orchestration.planner.catalog import systems_for
    from dagster_adjunct.orchestration.step.run import advance_datasets

    systems = systems_for(app, lake=lake)
    advanced = advance_datasets(
        Runtime(lake, systems, session_factory(spark), by), app, on_report=on_report, on_stage=on_stage
    )
    return list(advanced.reports), [dataset.name for dataset in app.datasets if is_advanced_by_partition(dataset)]


def stage_printer(json_output: bool) -> OnStage:
    """Return a callback that prints a line for each notable stage of a dataset, or nothing with --json."""
    return ignore_stage if json_output else lambda event: show_line(event.summary()) if event.is_notable else None


def line_printer(json_output: bool) -> Callable[[str], None]:
    """Return a callback that prints a line, or nothing with --json."""
    return (lambda text: None) if json_output else show_line


def advance_group(app: Application, name: str) -> tuple[AdjunctDataset, ...]:
    """Return the datasets that advance together with the one of this name."""
    from dagster_adjunct.orchestration.application.graph import group_datasets

    datasets = {dataset.name: dataset for dataset in app.datasets}
    if name not in datasets:
        raise ConfigurationError(
            f"application {app.name!r} declares no dataset {name!r}; it declares: {', '.join(datasets) or 'none'}.",
            "Correct the name, or declare the dataset with app.table(…).",
            application=app.name,
            dataset=name,
        )
    wanted = datasets[name]
    in_set = [member for member in app.datasets if wanted.version_set and member.version_set == wanted.version_set]
    return group_datasets(in_set or [wanted], f"application {app.name!r}")[0]


def _reject_partition(group: Sequence[AdjunctDataset]) -> None:
    """Raise ConfigurationError for a partition of a version set or a change stream.

    For a single bounded dataset this is checked when it advances.
    """
    dataset = group[0]
    if len(group) > 1 or dataset.follows_changes:
        what = f"a member of the version set {dataset.version_set!r}" if len(group) > 1 else f"{dataset.kind}"
        raise ConfigurationError(
            f"dataset {dataset.name!r} is {what} and has no version partitions.",
            "Omit --partition: everything that has been delivered is published.",
            setting="--partition",
            dataset=dataset.name,
        )


@click.command()
@click.argument("name")
@lake_url
@output_options
def lag(name: str, lake_url: str | None, json_output: bool) -> None:
    """Show how far an unbounded dataset is behind its stream, by partition, and its bootstrap progress."""
    from dagster_adjunct.assets.reading.stored_versions import open_stored_versions
    from dagster_adjunct.assets.versions.manifest import as_follower
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    manifest = open_stored_versions(lake, name).require_manifest()
    table = as_follower(manifest)
    if table is None:
        raise _no_lag_error(name, manifest.declaration.owner)
    facts = _lag_to_json(lake, table)
    if json_output:
        show_json({"dataset": name, **facts})
    else:
        show_lag(facts)


def _no_lag_error(name: str, owner: str | None) -> ConfigurationError:
    if owner is not None:
        return ConfigurationError(
            f"dataset {name!r} is a local table of application {owner!r}, which follows no stream.",
            f"See the application's position instead: adjunct checkpoint show {owner}.",
            dataset=name,
        )
    return ConfigurationError(
        f"dataset {name!r} is bounded and has no lag: it is delivered in versions.",
        f"See what its next version waits for: adjunct dataset show {name}.",
        dataset=name,
    )


def lag_facts(lake: Lake, manifest: UnboundedManifest) -> dict[str, Any]:
    """Return how far a table is behind its stream as JSON-able values, or why that is unknown."""
    try:
        return _lag_to_json(lake, manifest)
    except AdjunctError as error:  # its stream may be deleted, or registered only by the application's module
        return {"unknown": str(error)}


def _lag_to_json(lake: Lake, manifest: UnboundedManifest) -> dict[str, Any]:
    from dagster_adjunct.assets.unbounded.progress import StreamPosition, bootstrap_progress
    from dagster_adjunct.resources.streams.registry import open_system

    system = split_stream_name(manifest.declaration.input)[0]
    systems, now = {system: open_system(lake, system)}, lake.now()
    lags = StreamPosition.of(systems, manifest).lags(now)
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
        show_line(f"The lag is unknown: {facts['unknown']}")
        return
    bootstrap = facts["bootstrap"]
    show_facts("bootstrap", {name: value for name, value in bootstrap.items() if value not in ({}, "")})
    rows = [
        [ssp, lag["next"], lag["end"], lag["offsets"], lag["records"], lag["lost"], _format_lag(lag["seconds"])]
        for ssp, lag in facts["partitions"].items()
    ]
    columns = ["partition", "next", "end", "offsets behind", "records", "lost", "time behind"]
    show_table("behind its stream", columns, rows)


def _format_lag(seconds: float | None) -> str:
    return "never caught up" if seconds is None else str(timedelta(seconds=round(seconds)))


@click.command()
@click.argument("name")
@click.option("--level", type=click.Choice(["minor", "major"]), help="Default: what its compaction policy finds due.")
@click.option("--master", help=_MASTER)
@click.option("--by", help="Who does it. Default: the user of this machine.")
@lake_url
@output_options
def compact(
    name: str, level: str | None, master: str | None, by: str | None, lake_url: str | None, json_output: bool
) -> None:
    """Merge the deltas of an unbounded dataset into one (minor), or with its base into a new one (major).

    Safe while readers and writers work; for cron.
    """
    from dagster_adjunct.assets.unbounded.compaction import compact_dataset
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.spark.scope import session_scope

    lake, person = open_lake(lake_url, create=False), resolve_user(by)
    chosen = cast(Literal["minor", "major"] | None, level)
    with session_scope(master=master, lake_url=lake.url, on_start=line_printer(json_output)) as spark:
        report = compact_dataset(lake, name, spark=spark, by=person, level=chosen)
    show_report(report, json_output=json_output)


@click.command()
@click.argument("name")
@click.argument("reference", metavar="MODULE:APP")
@click.option("--master", help=_MASTER)
@audit_options
@lake_url
@output_options
def rebuild(
    name: str,
    reference: str,
    master: str | None,
    reason: str,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Rebuild an unbounded dataset from the start of its stream or its bulk snapshot; readers keep the old one."""
    from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
    from dagster_adjunct.orchestration.planner.catalog import open_dataset_systems
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.spark.scope import session_scope

    spec = advance_group(load_application(reference), name)[0]
    lake = open_lake(lake_url, create=False)
    on_stage = stage_printer(json_output)
    with session_scope(master=master, lake_url=lake.url, on_start=line_printer(json_output)) as spark:
        report = rebuild_dataset(
            spec,
            lake=lake,
            systems=open_dataset_systems([spec], lake),
            spark=spark,
            reason=reason,
            by=resolve_user(by),
            on_stage=on_stage,
        )
    show_report(report, json_output=json_output)


COMMANDS = (lag, compact, rebuild)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--keep", help='Number of newest versions to keep, or "all". Default: as each dataset declares.')
@click.option(
    "--grace", help="Keep everything younger than this, such as 90m or 7d. Default: as each dataset declares."
)
@click.option("--dry-run", is_flag=True, help="Only list what would be deleted, and why.")
@click.option("--by", help="Who does it. Default: the user of this machine.")
@lake_url
@output_options
def expire(
    names: tuple[str, ...],
    keep: str | None,
    grace: str | None,
    dry_run: bool,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Delete versions that the retention policy no longer keeps, and what failed builds left.

    For cron; safe while readers and writers work.
    """
    from dagster_adjunct.assets.declaration.policies import DiscardPolicy
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions, list_datasets
    from dagster_adjunct.orchestration.maintenance.discard import discard
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    there = list_datasets(lake)
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ConfigurationError(
            f"there is no dataset {unknown[0]!r}; the lake has: {', '.join(there) or 'none'}.",
            "Check the name and the lake.",
            dataset=unknown[0],
        )
    span = None if grace is None else parse_duration(grace)
    if grace is not None and span is None:
        raise ConfigurationError(
            f"--grace {grace!r} is not a duration.", "Give for example 90m, 24h or 7d.", setting="--grace"
        )
    person, kept = resolve_user(by), None if keep is None else _parse_keep(keep)
    reports, errors = [], []
    for name in names or there:
        try:
            declared = StoredVersions(lake, name).require_manifest().declaration.discard
            policy = DiscardPolicy(
                keep=declared.keep if keep is None else kept, grace=declared.grace if span is None else span
            )
            reports.append(discard(lake, name, policy, by=person, dry_run=dry_run))
        except AdjunctError as error:
            errors.append(error)
    if json_output:
        show_json([report.to_json() for report in reports])
    else:
        for report in reports:
            _show_expired(report)
    raise_first(errors)


@click.command()
@click.argument("name")
@click.argument("version", required=False)
@click.option("--deep", is_flag=True, help="Also check rows, columns, key order and buckets.")
@lake_url
@output_options
def verify(name: str, version: str | None, deep: bool, lake_url: str | None, json_output: bool) -> None:
    """Compare every object of a version (default: all sealed versions) with its checksum.

    Exits with 1 if one is damaged or missing.
    """
    from dagster_adjunct.assets.reading.stored_versions import open_stored_versions
    from dagster_adjunct.assets.reading.verify import verify_version
    from dagster_adjunct.resources.objects.lake import open_lake

    store = open_stored_versions(open_lake(lake_url, create=False), name)
    if version is not None:
        views = [store.version(version)]
    elif store.require_manifest().versions_are_commits:
        views = [store.require_current()]
    else:
        sealed = [ref.id for ref in store.versions() if ref.state == "sealed"]
        views = [store.version(ref) for ref in sealed] or [store.require_current()]  # raises an error if there is none
    reports = []
    for view in views:
        report = verify_version(view, deep=deep)
        try:
            if not report.ok:
                store.require_manifest().check_kept(view.version)
        except VersionDiscardedError:
            if version is not None:
                raise
            continue  # discarded meanwhile, not damaged
        reports.append(report)
    if json_output:
        show_json([report.to_json() for report in reports])
    else:
        for report in reports:
            show_line(report.summary())
            for damage in report.damaged:
                show_line(f"  {damage}")
    if not all(report.ok for report in reports):
        raise click.exceptions.Exit(1)


@click.command()
@click.argument("name")
@click.argument("key", nargs=-1)
@click.option(
    "--keys-from",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the keys from a CSV file without header, one per line.",
)
@click.option("--yes", is_flag=True, help="Do not ask before.")
@audit_options
@lake_url
@output_options
def erase(
    name: str,
    key: tuple[str, ...],
    keys_from: Path | None,
    yes: bool,
    reason: str,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Erase entries permanently from everything that a dataset stores, and verify it by a search.

    Give one KEY per entry, or one per key column in order. Exits with 1 while something still holds a key: repeat it
    then.
    """
    from dagster_adjunct.assets.reading.key_lookup import key_from_text
    from dagster_adjunct.assets.reading.stored_versions import open_stored_versions
    from dagster_adjunct.assets.retention.erasure import forget
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.schemas.schema import Field

    person = resolve_user(by)
    lake = open_lake(lake_url, create=False)
    store = open_stored_versions(lake, name)
    manifest = store.require_manifest()
    declared = manifest.declaration
    if bool(key) == (keys_from is not None):
        raise ConfigurationError(
            f"dataset {name!r} can't erase {'keys given twice' if key else 'no keys'}.",
            "Give KEYs, or a file with --keys-from.",
            dataset=name,
        )
    fields = [Field(column, kind) for column, kind in zip(declared.key, declared.key_types, strict=True)]
    texts = read_keys(name, declared.key, keys_from) if keys_from else split_keys(name, declared.key, key)
    keys = [key_from_text(f"dataset {name!r}", fields, values) for values in texts]
    if not yes:
        question = f"Erase {len(keys)} key(s) from {manifest.stored_description} of {name} permanently?"
        click.confirm(question, abort=True, err=True)
    report = forget(lake, name, keys, reason=reason, by=person, roots=partial(_versions_in_open_batches, lake, name))
    show_report(report, json_output=json_output)
    if not json_output:
        show_line(f"Not erased, because the dataset does not own it: {'; '.join(report.not_erased)}.")
    if not report.complete:
        raise click.exceptions.Exit(1)


def _parse_keep(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"--keep {text!r} is not a number of versions.", 'Give 1 or more, or "all".', setting="--keep"
        )
    return int(text)


def _show_expired(report: DiscardReport) -> None:
    show_line(f"{report.summary()}.")
    outcomes = (("deleted", (*report.discarded, *report.garbage)), ("spared", report.spared), ("kept", report.kept))
    rows = [[outcome, item.what, item.name, item.reason] for outcome, items in outcomes for item in items]
    if rows:
        show_table(report.dataset, ["", "what", "name", "why"], rows)


UPKEEP_COMMANDS = (expire, verify, erase)


def _versions_in_open_batches(lake: Lake, dataset: str) -> dict[str, str]:
    """Return the versions of a dataset that open batches will read again, and why."""
    from dagster_adjunct.orchestration.maintenance.discard import versions_in_open_batches

    return versions_in_open_batches(lake).get(dataset, {})
