"""`adjunct dataset advance, compact, expire, erase, …`: keep datasets up to date, small and
intact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import click

from dagster_adjunct.assets.advance_dataset import advance_dataset
from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.assets.reading.key_lookup import key_from_text
from dagster_adjunct.assets.reading.stored_versions import (
    StoredVersions,
    list_datasets,
    open_stored_versions,
)
from dagster_adjunct.assets.reading.verification import verify_version
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.retention.discard import DiscardReport
from dagster_adjunct.assets.unbounded.advance import rebuild_dataset
from dagster_adjunct.assets.unbounded.compaction import compact_dataset
from dagster_adjunct.assets.unbounded.progress import StreamPosition, bootstrap_progress
from dagster_adjunct.assets.versions.manifest import UnboundedManifest, as_follower
from dagster_adjunct.assets.versions.reports import StageEvent
from dagster_adjunct.orchestration.application.application import (
    Application,
    group_datasets,
    load_application,
)
from dagster_adjunct.orchestration.cli import options, output
from dagster_adjunct.orchestration.cli.dagster_events import reporting
from dagster_adjunct.orchestration.maintenance.expire import (
    collect_metadata,
    erase_keys,
    expire_versions,
)
from dagster_adjunct.orchestration.planner.planner import open_dataset_systems, systems_for
from dagster_adjunct.orchestration.step.run import advance_unit, apply_startpoints
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    VersionDiscardedError,
    raise_first,
)
from dagster_adjunct.resources.names import split_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.session import session_scope
from dagster_adjunct.resources.streams.lake.streams import open_system


@click.command()
@options.name_argument
@options.app_reference
@options.option(
    "--partition", "VERSION", "Build the version of this name, if versions are partitions."
)
@options.flag("--make-current", "With --partition: serve it even if a newer version is served.")
@options.master_option
@options.user_option
@options.lake_options(create=True)
def advance(
    lake: Lake,
    name: str,
    reference: str,
    partition: str | None,
    make_current: bool,
    master: str | None,
    by: str,
) -> None:
    """Bring dataset NAME of an application, and its version set, up to date.

    No batch of the application is run. Startpoints for the dataset's stream are applied first.
    Exits with 3 if this command rejected a version, even if it published a later one.
    """
    if make_current and partition is None:
        problem = "--make-current needs --partition."
        step = (
            "Add --partition. To serve an earlier version: adjunct dataset rollback"
            f" {name} --reason …."
        )
        raise ConfigurationError(problem, step, setting="--make-current")
    app = load_application(reference)
    group = datasets_advanced_with(app, name)
    systems = open_dataset_systems(group, lake)
    with (
        reporting(app, lake, systems_for(app, lake=lake), by) as reporter,
        session_scope(master=master, lake_url=lake.url, on_start=output.show_line) as spark,
    ):
        if partition is None:
            runtime = Runtime(lake, systems_for(app, lake=lake), session_factory(spark), by=by)
            applied = apply_startpoints(runtime, app, only={member.name for member in group})
            applied.raise_failed()
            advanced = advance_unit(replace(runtime, systems=systems), group, on_stage=show_stage)
            reports = [*applied.reports, *advanced]
        else:
            _reject_partition(group)
            report = advance_dataset(
                group[0],
                lake=lake,
                systems=systems,
                spark=spark,
                by=by,
                partition=partition,
                make_current=make_current,
            )
            reports = [report]
        if reporter is not None:
            for report in reports:
                reporter.add_advance(report, partition)
    output.show_json_of(reports)
    for report in reports:
        output.show_line(report.summary())
    output.fail_if_rejected(reports)


def show_stage(event: StageEvent) -> None:
    """Print a line for a notable stage of a dataset."""
    if event.is_notable:
        output.show_line(event.summary())


def declared_dataset(app: Application, name: str) -> AdjunctDataset:
    """Return the dataset of this name. Raises ConfigurationError if the application does not
    declare it.
    """
    datasets = {dataset.name: dataset for dataset in app.datasets}
    if name not in datasets:
        problem = (
            f"application {app.name!r} declares no dataset {name!r}; it declares:"
            f" {', '.join(datasets) or 'none'}."
        )
        step = "Correct the name, or declare the dataset with app.table(…)."
        raise ConfigurationError(problem, step, application=app.name, dataset=name)
    return datasets[name]


def datasets_advanced_with(app: Application, name: str) -> tuple[AdjunctDataset, ...]:
    """Return the dataset of this name and the members of its version set, which advance together.

    Raises ConfigurationError if the application does not declare the dataset.
    """
    dataset = declared_dataset(app, name)
    version_set = dataset.version_set
    if version_set:
        group = [member for member in app.datasets if member.version_set == version_set]
    else:
        group = [dataset]
    return group_datasets(group, f"application {app.name!r}")[0]


def _reject_partition(group: tuple[AdjunctDataset, ...]) -> None:
    """Raise ConfigurationError for a partition of a version set or a change stream.

    For a single bounded dataset this is checked when it advances.
    """
    dataset = group[0]
    if len(group) > 1 or dataset.follows_changes:
        what: str
        if len(group) > 1:
            what = f"a member of the version set {dataset.version_set!r}"
        else:
            what = dataset.kind
        problem = f"dataset {dataset.name!r} is {what} and has no version partitions."
        step = "Omit --partition: everything that has been delivered is published."
        raise ConfigurationError(problem, step, setting="--partition", dataset=dataset.name)


@click.command()
@options.name_argument
@options.lake_options()
def lag(lake: Lake, name: str) -> None:
    """Show how far an unbounded dataset is behind its stream, by partition, and its bootstrap
    progress.
    """
    manifest = open_stored_versions(lake, name).require_manifest()
    table = as_follower(manifest)
    if table is None:
        raise _no_lag_error(name, manifest.declaration.owner)
    facts = lag_facts(lake, table)
    output.show_json({"dataset": name, **facts})
    show_lag(facts)


def _no_lag_error(name: str, owner: str | None) -> ConfigurationError:
    """Return the error for a dataset that follows no stream; `owner` is the application whose local
    table it is, None for a bounded dataset.
    """
    if owner is not None:
        problem = (
            f"dataset {name!r} is a local table of application {owner!r}, which follows no stream."
        )
        step = f"See the application's position instead: adjunct checkpoint show {owner}."
        return ConfigurationError(problem, step, dataset=name)
    problem = f"dataset {name!r} is bounded and has no lag: it is delivered in versions."
    step = f"See what its next version waits for: adjunct dataset show {name}."
    return ConfigurationError(problem, step, dataset=name)


def lag_facts(lake: Lake, manifest: UnboundedManifest) -> dict[str, Any]:
    """Return how far a table is behind its stream as JSON-able values, by partition; also its
    bootstrap, and the decision to serve it stale, if any.
    """
    system, _ = split_stream_name(manifest.declaration.input)
    systems = {system: open_system(lake, system)}
    now = lake.now()
    partitions = {}
    for ssp, behind in StreamPosition.of(systems, manifest).lags(now).items():
        partitions[str(ssp)] = {"next": behind.offset, "end": behind.end, **behind.to_json()}
    return {
        "caught_up_at": manifest.confirmed_at,
        "bootstrap": bootstrap_progress(systems, manifest, now).to_json(),
        "decision": manifest.decision and manifest.decision.model_dump(mode="json"),
        "partitions": partitions,
    }


def show_lag(facts: Mapping[str, Any]) -> None:
    """Print how far a table is behind its stream."""
    if "unknown" in facts:
        output.show_line(f"The lag is unknown: {facts['unknown']}")
        return
    bootstrap = facts["bootstrap"].items()
    output.show_facts(
        "bootstrap", {name: value for name, value in bootstrap if value not in ({}, "")}
    )
    rows = []
    for ssp, lag in facts["partitions"].items():
        if lag["seconds"] is None:
            behind = "never caught up"
        else:
            behind = str(timedelta(seconds=round(lag["seconds"])))
        shown = [lag[name] for name in ("next", "end", "offsets", "records", "lost")]
        rows.append([ssp, *shown, behind])
    columns = ["partition", "next", "end", "offsets behind", "records", "lost", "time behind"]
    output.show_table("behind its stream", columns, rows)


@click.command()
@options.name_argument
@click.option(
    "--level",
    type=click.Choice(["minor", "major"]),
    help="Default: what its compaction policy finds due.",
)
@options.master_option
@options.user_option
@options.lake_options()
def compact(
    lake: Lake, name: str, level: Literal["minor", "major"] | None, master: str | None, by: str
) -> None:
    """Merge the deltas of an unbounded dataset into one (minor), or with its base into a new one
    (major).

    Safe while readers and writers work; for cron.
    """
    with session_scope(master=master, lake_url=lake.url, on_start=output.show_line) as spark:
        output.show_report(compact_dataset(lake, name, spark=spark, by=by, level=level))


@click.command()
@options.name_argument
@options.app_reference
@options.master_option
@options.audit_options
@options.lake_options()
def rebuild(
    lake: Lake, name: str, reference: str, master: str | None, reason: str, by: str
) -> None:
    """Rebuild an unbounded dataset from the start of its stream or its bulk snapshot; readers keep
    the old one.

    If it is interrupted, `dataset advance` continues it.
    """
    dataset = declared_dataset(load_application(reference), name)
    systems = open_dataset_systems([dataset], lake)
    with session_scope(master=master, lake_url=lake.url, on_start=output.show_line) as spark:
        report = rebuild_dataset(
            dataset,
            lake=lake,
            systems=systems,
            spark=spark,
            reason=reason,
            by=by,
            on_stage=show_stage,
        )
    output.show_report(report)


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "--keep",
    help=(
        'Number of newest versions to keep; "all" deletes only rejected and revoked ones and'
        " leftovers. Default: as each dataset declares."
    ),
)
@click.option(
    "--grace",
    help="Keep everything younger than this, such as 90m or 7d. Default: as each dataset declares.",
)
@click.option(
    "--followed",
    help=(
        "Keep what applications that follow the changes have to go on from for this long after it"
        " was replaced; 0s lets go of it. Default: as each dataset declares."
    ),
)
@options.flag("--dry-run", "Only list what would be deleted, and why.")
@options.user_option
@options.lake_options()
def expire(
    lake: Lake,
    names: tuple[str, ...],
    keep: str | None,
    grace: str | None,
    followed: str | None,
    dry_run: bool,
    by: str,
) -> None:
    """Delete versions that the retention policy no longer keeps, and what failed builds left.

    Without NAME, of all datasets; then unreferenced metadata of the lake is deleted, too. Versions
    that are served, pinned, leased by a reader, needed by an open batch, or by an application that
    follows the changes, are kept. For cron; safe while readers and writers work.
    """
    existing = list_datasets(lake)
    unknown = [name for name in names if name not in existing]
    if unknown:
        listed = ", ".join(existing) or "none"
        problem = f"there is no dataset {unknown[0]!r}; the lake has: {listed}."
        raise ConfigurationError(problem, "Check the name and the lake.", dataset=unknown[0])
    given = _parse_retention(keep, grace, followed)
    reports = []
    errors = []
    for name in names or existing:
        try:
            declared = StoredVersions(lake, name).require_manifest().declaration.discard
            policy = replace(declared, **given)
            reports.append(expire_versions(lake, name, policy, by=by, dry_run=dry_run))
        except AdjunctError as error:
            errors.append(error)
    try:
        if not names and not dry_run:
            collect_metadata(lake)
    except AdjunctError as error:
        errors.append(error)
    output.show_json_of(reports)
    for report in reports:
        _show_discarded(report)
    raise_first(errors)


def _parse_retention(keep: str | None, grace: str | None, followed: str | None) -> dict[str, Any]:
    """Return the given settings of a DiscardPolicy; those that are not given are left out."""
    given: dict[str, Any] = {}
    for name, span in {"grace": grace, "followed": followed}.items():
        if span is not None:
            example = "for example 90m, 24h or 7d"
            given[name] = options.parse_duration(f"--{name}", span, example)
    if keep == "all":
        given["keep"] = None
    elif keep is not None:
        if not keep.isdecimal() or int(keep) < 1:
            problem = f"--keep {keep!r} is not a number of versions."
            raise ConfigurationError(problem, 'Give 1 or more, or "all".', setting="--keep")
        given["keep"] = int(keep)
    return given


def _show_discarded(report: DiscardReport) -> None:
    """Print what `expire` has deleted, spared and kept of a dataset."""
    output.show_line(f"{report.summary()}.")
    outcomes = {
        "deleted": (*report.discarded, *report.garbage),
        "spared": report.spared,
        "kept": report.kept,
    }
    rows = []
    for outcome, items in outcomes.items():
        rows += [[outcome, item.what, item.name, item.reason] for item in items]
    if rows:
        output.show_table(report.dataset, ["", "what", "name", "why"], rows)


@click.command()
@options.name_argument
@click.argument("version", required=False)
@options.flag("--deep", "Also check rows, columns, key order and buckets.")
@options.lake_options()
def verify(lake: Lake, name: str, version: str | None, deep: bool) -> None:
    """Compare every object of a version (default: all sealed versions) with its checksum.

    Exits with 1 if one is damaged, missing or not listed.
    """
    store = open_stored_versions(lake, name)
    views = _list_sealed(store) if version is None else [store.version(version)]
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
    output.show_json_of(reports)
    for report in reports:
        output.show_line(report.summary())
        for damage in report.damaged:
            output.show_line(f"  {damage}")
    if not all(report.ok for report in reports):
        raise click.exceptions.Exit(1)


def _list_sealed(store: StoredVersions) -> list[VersionReader]:
    """Return the sealed versions of a bounded dataset, or the served one of an unbounded dataset.
    Raises an error if there is none.
    """
    if not store.require_manifest().versions_are_commits:
        sealed = [ref.id for ref in store.versions() if ref.state == "sealed"]
        if sealed:
            return [store.version(ref) for ref in sealed]
    return [store.require_current()]  # raises if there is none


@click.command()
@options.name_argument
@click.argument("key", nargs=-1)
@click.option(
    "--keys-from",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the keys from a CSV file without header, one per line.",
)
@options.yes_option
@options.audit_options
@options.lake_options()
def erase(
    lake: Lake,
    name: str,
    key: tuple[str, ...],
    keys_from: Path | None,
    yes: bool,
    reason: str,
    by: str,
) -> None:
    """Erase entries permanently from everything that a dataset stores, and verify it by a search.

    Give one KEY per entry, or one per key column in order. Exits with 1 while something still holds
    a key: repeat it then.
    """
    manifest = open_stored_versions(lake, name).require_manifest()
    declared = manifest.declaration
    if bool(key) == (keys_from is not None):
        found = "given twice" if key else "missing"
        problem = f"the keys to erase from dataset {name!r} are {found}."
        raise ConfigurationError(problem, "Give KEYs or --keys-from FILE, not both.", dataset=name)
    fields = list(map(Field, declared.key, declared.key_types))
    if keys_from:
        texts = options.read_keys(name, declared.key, keys_from)
    else:
        texts = options.split_keys(name, declared.key, key)
    keys = [key_from_text(f"dataset {name!r}", fields, values) for values in texts]
    what = f"{len(keys)} key(s) from {manifest.stored_description} of {name}"
    options.confirm(f"Erase {what} permanently?", yes=yes)
    report = erase_keys(lake, name, keys, reason=reason, by=by)
    output.show_report(report)
    output.show_line(
        f"Not erased, because the dataset does not own it: {'; '.join(report.not_erased)}."
    )
    if not report.complete:
        raise click.exceptions.Exit(1)


COMMANDS = (advance, lag, compact, rebuild, expire, verify, erase)
