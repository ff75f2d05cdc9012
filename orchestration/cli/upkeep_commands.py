"""`adjunct dataset discard, verify, forget`: what keeps datasets small, whole and lawful."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dagster_adjunct.orchestration.cli.common_options import duration, explained, who
from dagster_adjunct.orchestration.cli.key_arguments import entry_keys, keys_in_file
from dagster_adjunct.orchestration.cli.output import as_json, lake_url, show_json, show_line, show_report, show_table
from dagster_adjunct.resources.errors import AdjunctError, ConfigurationError
from dagster_adjunct.resources.first_error import raise_first

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.discard import DiscardReport
    from dagster_adjunct.resources.objects import Lake


@click.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--keep", help='Keep the newest so many versions, or "all". Default: as each dataset declares.')
@click.option("--grace", help="Delete nothing younger, such as 90m or 7d. Default: as each dataset declares.")
@click.option("--dry-run", is_flag=True, help="Only list what would go, and why.")
@click.option("--by", help="Who does it. Default: the user of this machine.")
@lake_url
@as_json
def discard(
    names: tuple[str, ...],
    keep: str | None,
    grace: str | None,
    dry_run: bool,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Discard versions that the policy lets go, and what failed attempts left. For cron; safe beside readers."""
    from dagster_adjunct.assets.declaration.discard_policy import DiscardPolicy
    from dagster_adjunct.assets.reading.dataset_names import list_datasets
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.orchestration.upkeep.discard_with_roots import discard as discard_one
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    there = list_datasets(lake)
    unknown = [name for name in names if name not in there]
    if unknown:
        raise ConfigurationError(
            f"there is no dataset {unknown[0]!r} to discard in; there are: {', '.join(there) or 'none'}.",
            "Check the name and the lake.",
            dataset=unknown[0],
        )
    span = None if grace is None else duration(grace)
    if grace is not None and span is None:
        raise ConfigurationError(
            f"--grace {grace!r} is no duration.", "Write for example 90m, 24h or 7d.", setting="--grace"
        )
    person, kept = who(by), None if keep is None else _kept(keep)
    reports, errors = [], []
    for name in names or there:
        try:
            declared = StoredVersions(lake, name).require_manifest().declaration.discard
            policy = DiscardPolicy(
                keep=declared.keep if keep is None else kept, grace=declared.grace if span is None else span
            )
            reports.append(discard_one(lake, name, policy, by=person, dry_run=dry_run))
        except AdjunctError as error:
            errors.append(error)
    if json_output:
        show_json([report.to_json() for report in reports])
    else:
        for report in reports:
            _show_discarded(report)
    raise_first(errors)


@click.command()
@click.argument("name")
@click.argument("version", required=False)
@click.option("--deep", is_flag=True, help="Also check rows, columns, and the order and bucket of every key.")
@lake_url
@as_json
def verify(name: str, version: str | None, deep: bool, lake_url: str | None, json_output: bool) -> None:
    """Check by checksum that every object of a version (default: all that are sealed) is as it was written.

    Ends with exit code 1 when one is not.
    """
    from dagster_adjunct.assets.reading.stored_versions import stored_versions
    from dagster_adjunct.assets.reading.verify_version import verify_version
    from dagster_adjunct.resources.errors import VersionDiscardedError
    from dagster_adjunct.resources.objects.lake import open_lake

    store = stored_versions(open_lake(lake_url, create=False), name)
    if version is not None:
        views = [store.version(version)]
    elif store.require_manifest().versions_are_commits:
        views = [store.require_current()]
    else:
        sealed = [ref.id for ref in store.versions() if ref.state == "sealed"]
        views = [store.version(ref) for ref in sealed] or [store.require_current()]  # which says why there is none
    reports = []
    for view in views:
        report = verify_version(view, deep=deep)
        try:
            if not report.ok:
                store.require_manifest().check_kept(view.version)
        except VersionDiscardedError:
            if version is not None:
                raise
            continue  # discarded meanwhile, which is no damage
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
    help="A CSV file without header that holds the keys, one a line, instead of KEYs.",
)
@click.option("--yes", is_flag=True, help="Do not ask before.")
@explained
@lake_url
@as_json
def forget(
    name: str,
    key: tuple[str, ...],
    keys_from: Path | None,
    yes: bool,
    reason: str,
    by: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Erase entries from all that a dataset stores, and prove it by a search; for good.

    One KEY an entry; with a key of several columns, that many KEYs an entry. Ends with exit code 1 while something
    still holds a key: repeat it then.
    """
    from dagster_adjunct.assets.reading.entry_keys import key_from_text
    from dagster_adjunct.assets.reading.stored_versions import stored_versions
    from dagster_adjunct.assets.retention.erasing.erasure import forget as erase
    from dagster_adjunct.resources.objects.lake import open_lake
    from dagster_adjunct.resources.schemas.schema import Field

    person = who(by)
    lake = open_lake(lake_url, create=False)
    store = stored_versions(lake, name)
    manifest = store.require_manifest()
    declared = manifest.declaration
    if bool(key) == (keys_from is not None):
        raise ConfigurationError(
            f"dataset {name!r} is to forget {'keys given twice' if key else 'no keys'}.",
            "Give KEYs, or a file with --keys-from.",
            dataset=name,
        )
    fields = [Field(column, kind) for column, kind in zip(declared.key, declared.key_types, strict=True)]
    texts = keys_in_file(name, declared.key, keys_from) if keys_from else entry_keys(name, declared.key, key)
    keys = [key_from_text(f"dataset {name!r}", fields, values) for values in texts]
    if not yes:
        asked = f"Erase {len(keys)} key(s) from {manifest.stored_in_words} of {name}, for good?"
        click.confirm(asked, abort=True, err=True)
    report = erase(lake, name, keys, reason=reason, by=person, roots=partial(_needed, lake, name))
    show_report(report, json_output=json_output)
    if not json_output:
        show_line(f"Not erased, because it is not the dataset's: {'; '.join(report.not_erased)}.")
    if not report.complete:
        raise click.exceptions.Exit(1)


def _kept(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(
            f"--keep {text!r} is no number of versions.", 'Give 1 or more, or "all".', setting="--keep"
        )
    return int(text)


def _show_discarded(report: DiscardReport) -> None:
    show_line(f"{report.summary()}.")
    outcomes = (("goes", (*report.discarded, *report.garbage)), ("spared", report.spared), ("stays", report.kept))
    rows = [[outcome, item.what, item.name, item.reason] for outcome, items in outcomes for item in items]
    if rows:
        show_table(report.dataset, ["", "what", "name", "why"], rows)


COMMANDS = (discard, verify, forget)


def _needed(lake: Lake, dataset: str) -> dict[str, str]:
    """Return which versions of a dataset open batches will read again, and why."""
    from dagster_adjunct.orchestration.upkeep.discard_with_roots import open_batches

    return open_batches(lake).get(dataset, {})
