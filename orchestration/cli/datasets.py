"""`adjunct dataset …`: list, show, query, repartition and delete datasets."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from dagster_adjunct.assets.reading.dataset import Dataset
from dagster_adjunct.orchestration.cli import maintenance, versions
from dagster_adjunct.orchestration.cli.maintenance import advance
from dagster_adjunct.orchestration.cli.options import (
    deletion_command,
    parse_leading_values,
    repartition_command,
    split_keys,
)
from dagster_adjunct.orchestration.cli.output import (
    fail_if_missing,
    lake_url,
    output_options,
    require_zone,
    show_facts,
    show_json,
    show_line,
    show_record,
    show_table,
)
from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.objects.lake import Lake

if TYPE_CHECKING:
    from dagster_adjunct.assets.rebucketing.rebucketing import RebucketReport
    from dagster_adjunct.orchestration.cli.options import Deletion


@click.group()
def dataset() -> None:
    """Manage datasets of the lake."""


for command in (
    advance,
    *maintenance.COMMANDS,
    *versions.COMMANDS,
    *versions.CHANGE_COMMANDS,
    *maintenance.UPKEEP_COMMANDS,
):
    dataset.add_command(command)


@dataset.command("list")
@lake_url
@output_options
def show_datasets(lake_url: str | None, json_output: bool) -> None:
    """List the datasets and the version that each serves."""
    from dagster_adjunct.assets.reading.stored_versions import list_datasets, open_stored_versions
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    descriptions: list[dict[str, Any]] = []
    for name in list_datasets(lake):
        try:
            descriptions.append(open_stored_versions(lake, name).describe())
        except MalformedDocumentError as error:
            descriptions.append({"name": name, "unreadable": str(error)})
    if json_output:
        show_json(descriptions)
        return
    rows: list[list[Any]] = []
    for item in descriptions:
        if "unreadable" in item:
            rows.append([item["name"], "unreadable", None, None, None, None])
            continue
        declaration, version = item["declaration"], item["version"] or {}
        spread = declaration["partitions"] or "broadcast"
        rows.append([item["name"], declaration["kind"], declaration["input"], spread, version.get("id")])
        rows[-1].append(version.get("rows") if version.get("rows") is not None else "merged when read")
    show_table("datasets", ["name", "kind", "input", "partitions", "version", "rows"], rows)
    for item in descriptions:
        if "unreadable" in item:
            show_line(f"{item['name']} is unreadable: {item['unreadable']}")


_as_of = click.option(
    "--as-of", metavar="TIME", help="Read what was served then: an ISO time with its zone, or a commit number or id."
)


@dataset.command("show")
@click.argument("name")
@click.argument("version", required=False)
@_as_of
@lake_url
@output_options
def show_dataset(name: str, version: str | None, as_of: str | None, lake_url: str | None, json_output: bool) -> None:
    """Show a dataset: declaration, current version, retained versions, offsets. With VERSION, show that version."""
    from dagster_adjunct.assets.reading.stored_versions import open_stored_versions
    from dagster_adjunct.assets.versions.manifest import as_follower
    from dagster_adjunct.resources.objects.lake import open_lake

    lake = open_lake(lake_url, create=False)
    store = open_stored_versions(lake, name)
    if version is not None or as_of is not None:
        versions.show_version(store, _open(lake, name, version, as_of).version, json_output=json_output)
        return
    facts = store.describe()
    manifest = store.require_manifest()
    table = as_follower(manifest)
    if table is not None:
        facts["lag"] = maintenance.lag_facts(lake, table)
    if json_output:
        show_json(facts)
        return
    served = facts.get("version") or {}
    schema = served.pop("columns", [])
    show_facts(f"dataset {name}", facts["declaration"])
    if served:
        show_facts("version served", {key: value for key, value in served.items() if value not in ({}, None, [])})
    if facts.get("pin"):
        show_facts("pinned", facts["pin"])
    if facts.get("awaited"):
        show_facts("waiting", facts["awaited"])
    if facts["offsets"]:
        show_facts("next offsets", facts["offsets"])
    for lost in manifest.lost[-3:]:
        show_line(f"{lost.at:%Y-%m-%d %H:%M} UTC: {lost.summary()}.")
    if facts.get("lag"):
        maintenance.show_lag(facts["lag"])
    if facts.get("versions"):
        versions.show_versions(store)
    show_table("schema", ["column", "type"], [[field["name"], field["type"]] for field in schema])


@dataset.command("get")
@click.argument("name")
@click.argument("key", nargs=-1, required=True)
@click.option("--version", "version", metavar="VERSION", help="A version id or name. Default: the served version.")
@_as_of
@lake_url
@output_options
def get_dataset_entries(
    name: str, key: tuple[str, ...], version: str | None, as_of: str | None, lake_url: str | None, json_output: bool
) -> None:
    """Look up entries by key: one KEY per entry, or one per key column in order.

    Exits with 6 if an entry does not exist.
    """
    from dagster_adjunct.assets.reading.key_lookup import key_from_text
    from dagster_adjunct.resources.objects.lake import open_lake

    with _open(open_lake(lake_url, create=False), name, version, as_of) as opened:
        fields = [opened.schema.field(column) for column in opened.sealed.key]
        what = f"dataset {name!r}, version {opened.version}"
        texts_of_keys = split_keys(name, opened.sealed.key, key)
        keys = [key_from_text(what, fields, texts) for texts in texts_of_keys]
        entries = opened.get_all(keys)
        read = opened.version
    answers = [(texts, entries.get(asked)) for texts, asked in zip(texts_of_keys, keys, strict=True)]
    if json_output:
        show_json([{"key": texts, "version": read, "entry": entry} for texts, entry in answers])
    else:
        for texts, entry in answers:
            show_record(f"{name} {', '.join(texts)} (version {read})", entry, "no entry")
    fail_if_missing(entry for _, entry in answers)


@dataset.command("items")
@click.argument("name")
@click.option("--prefix", multiple=True, help="What keys begin with; repeat it for several key columns.")
@click.option("--from", "start", multiple=True, metavar="KEY", help="The first key, or its leading values (inclusive).")
@click.option("--to", "end", multiple=True, metavar="KEY", help="The end key, or its leading values (exclusive).")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number of entries.")
@click.option("--version", "version", metavar="VERSION", help="A version id or name. Default: the served version.")
@_as_of
@lake_url
@output_options
def list_entries(
    name: str,
    prefix: tuple[str, ...],
    start: tuple[str, ...],
    end: tuple[str, ...],
    limit: int,
    version: str | None,
    as_of: str | None,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """List entries in key order: all of them, a prefix, or a range."""
    from dagster_adjunct.resources.objects.lake import open_lake

    with _open(open_lake(lake_url, create=False), name, version, as_of) as opened:
        fields = [opened.schema.field(column) for column in opened.sealed.key]
        if prefix and (start or end):
            raise ConfigurationError(
                "--prefix and a range are both given.", "Give --prefix, or --from and --to.", setting="--prefix"
            )
        leading: Any = parse_leading_values(name, fields, prefix)
        if len(prefix) == 1 and isinstance(leading[0], str):
            leading = leading[0]  # a prefix of the first column's text
        in_order = opened.items(
            leading if prefix else None,
            start=parse_leading_values(name, fields, start) if start else None,
            end=parse_leading_values(name, fields, end) if end else None,
        )
        entries = [entry for _, entry in islice(in_order, limit)]
        read, columns = opened.version, list(opened.schema.names)
    if json_output:
        show_json({"dataset": name, "version": read, "entries": entries})
        return
    show_table(f"{name} (version {read})", columns, [[entry[c] for c in columns] for entry in entries], own=True)


def _open(lake: Lake, name: str, version: str | None, as_of: str | None) -> Dataset:
    """Open the dataset at the given version or time, by default the served version, without taking a lease."""
    from dagster_adjunct.assets.reading.dataset import open_dataset

    if version is not None and as_of is not None:
        raise ConfigurationError("a version and --as-of are both given.", "Give only one of them.", setting="--as-of")
    return open_dataset(lake, name, version=version, as_of=None if as_of is None else _parse_as_of(as_of), lease=False)


def _parse_as_of(as_of: str) -> datetime | int | str:
    """Parse a commit number or a time; any other text is a commit id."""
    if as_of.isdecimal():
        return int(as_of)
    try:
        moment = datetime.fromisoformat(as_of)
    except ValueError:
        return as_of
    return require_zone("--as-of", as_of, moment)


def _load_delete() -> Deletion:
    from dagster_adjunct.orchestration.maintenance.delete import delete_dataset

    return delete_dataset


def _load_repartition() -> Callable[..., RebucketReport]:
    from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset

    return repartition_dataset


def _repartition_details(report: RebucketReport) -> list[str]:
    return [
        *(f"the old copy is kept for now: {pending}" for pending in report.pending),
        *(f"prevented by {reader}" for reader in report.holding),
    ]


dataset.add_command(
    repartition_command(
        "Rewrite a dataset into another number of partitions, in one commit.\n\n"
        "Rewrites every retained version of a bounded dataset, or the served table of an unbounded one.",
        _load_repartition,
        _repartition_details,
    )
)
dataset.add_command(
    deletion_command(
        "Delete a dataset and all its versions permanently. Rejected while it is read; repeat it if interrupted.",
        _load_delete,
    )
)
