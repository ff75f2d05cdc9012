"""`adjunct dataset …`: list, show, query, repartition and delete datasets."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from typing import Any

import click

from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.reading.key_lookup import key_from_text
from dagster_adjunct.assets.reading.stored_versions import list_datasets, open_stored_versions
from dagster_adjunct.assets.rebucketing.rebucketing import RebucketReport
from dagster_adjunct.assets.versions.manifest import as_follower
from dagster_adjunct.orchestration.cli import maintenance, options, output, versions
from dagster_adjunct.orchestration.maintenance.delete import delete_dataset
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources.errors import ConfigurationError, MalformedDocumentError
from dagster_adjunct.resources.objects.lake import Lake


@click.group()
def dataset() -> None:
    """Manage datasets of the lake."""


for command in (*maintenance.COMMANDS, *versions.COMMANDS):
    dataset.add_command(command)


@dataset.command("list")
@options.lake_options()
def show_datasets(lake: Lake) -> None:
    """List the datasets and the version that each serves."""
    descriptions: list[dict[str, Any]] = []
    rows: list[list[Any]] = []
    for name in list_datasets(lake):
        try:
            item = open_stored_versions(lake, name).describe()
        except MalformedDocumentError as error:
            descriptions.append({"name": name, "unreadable": str(error)})
            rows.append([name, "unreadable", None, None, None, None])
            continue
        descriptions.append(item)
        declaration, version = item["declaration"], item["version"] or {}
        spread = declaration["partitions"] or "broadcast"
        count = "merged when read" if version.get("rows") is None else version["rows"]
        rows.append([name, declaration["kind"], declaration["input"], spread, version.get("id"), count])
    output.show_json(descriptions)
    output.show_table("datasets", ["name", "kind", "input", "partitions", "version", "rows"], rows)
    for item in descriptions:
        if "unreadable" in item:
            output.show_line(f"{item['name']} is unreadable: {item['unreadable']}")


_version = click.option("--version", metavar="VERSION", help="A version id or name. Default: the served version.")
_as_of = click.option(
    "--as-of", metavar="TIME", help="Read what was served then: an ISO time with its zone, or a commit number or id."
)


@dataset.command("show")
@click.argument("name")
@click.argument("version", required=False)
@_as_of
@options.lake_options()
def show_dataset(lake: Lake, name: str, version: str | None, as_of: str | None) -> None:
    """Show a dataset: declaration, current version, retained versions, offsets. With VERSION, show that version."""
    store = open_stored_versions(lake, name)
    if version is not None or as_of is not None:
        versions.show_version(store, _open(lake, name, version, as_of).version)
        return
    facts = store.describe()
    manifest = store.require_manifest()
    table = as_follower(manifest)
    if table is not None:
        facts["lag"] = maintenance.lag_facts(lake, table)
    output.show_json(facts)
    served = facts.get("version") or {}
    schema = served.pop("columns", [])
    output.show_facts(f"dataset {name}", facts["declaration"])
    if served:
        output.show_facts(
            "version served", {key: value for key, value in served.items() if value not in ({}, None, [])}
        )
    for what, title in {"pin": "pinned", "awaited": "waiting", "offsets": "next offsets"}.items():
        if facts.get(what):
            output.show_facts(title, facts[what])
    for lost in manifest.lost[-3:]:
        output.show_line(f"{lost.at:%Y-%m-%d %H:%M} UTC: {lost.summary()}.")
    if facts.get("lag"):
        maintenance.show_lag(facts["lag"])
    if facts.get("versions"):
        versions.show_versions(store)
    output.show_table("schema", ["column", "type"], [[field["name"], field["type"]] for field in schema])


@dataset.command("get")
@click.argument("name")
@click.argument("key", nargs=-1, required=True)
@_version
@_as_of
@options.lake_options()
def get_dataset_entries(lake: Lake, name: str, key: tuple[str, ...], version: str | None, as_of: str | None) -> None:
    """Look up entries by key: one KEY per entry, or one per key column in order.

    Exits with 6 if an entry does not exist.
    """
    with _open(lake, name, version, as_of) as opened:
        fields = [opened.schema.field(column) for column in opened.sealed.key]
        what = f"dataset {name!r}, version {opened.version}"
        texts_of_keys = options.split_keys(name, opened.sealed.key, key)
        keys = [key_from_text(what, fields, texts) for texts in texts_of_keys]
        entries = opened.get_all(keys)
        read = opened.version
    answers = [(texts, entries.get(asked)) for texts, asked in zip(texts_of_keys, keys, strict=True)]
    output.show_json([{"key": texts, "version": read, "entry": entry} for texts, entry in answers])
    for texts, entry in answers:
        output.show_record(f"{name} {', '.join(texts)} (version {read})", entry, "no entry")
    output.fail_if_missing(entry for _, entry in answers)


@dataset.command("items")
@click.argument("name")
@click.option("--prefix", multiple=True, help="What keys begin with; repeat it for several key columns.")
@click.option("--from", "start", multiple=True, metavar="KEY", help="The first key, or its leading values (inclusive).")
@click.option("--to", "end", multiple=True, metavar="KEY", help="The end key, or its leading values (exclusive).")
@options.limit_option(100, "Maximum number of entries.")
@_version
@_as_of
@options.lake_options()
def list_entries(
    lake: Lake,
    name: str,
    prefix: tuple[str, ...],
    start: tuple[str, ...],
    end: tuple[str, ...],
    limit: int,
    version: str | None,
    as_of: str | None,
) -> None:
    """List entries in key order: all of them, a prefix, or a range."""
    with _open(lake, name, version, as_of) as opened:
        fields = [opened.schema.field(column) for column in opened.sealed.key]
        if prefix and (start or end):
            raise ConfigurationError(
                "--prefix and a range are both given.", "Give --prefix, or --from and --to.", setting="--prefix"
            )
        leading: Any = options.parse_leading_values(name, fields, prefix)
        if len(prefix) == 1 and isinstance(leading[0], str):
            leading = leading[0]  # a prefix of the first column's text
        in_order = opened.items(
            leading if prefix else None,
            start=options.parse_leading_values(name, fields, start) if start else None,
            end=options.parse_leading_values(name, fields, end) if end else None,
        )
        entries = [entry for _, entry in islice(in_order, limit)]
        read, columns = opened.version, list(opened.schema.names)
    output.show_json({"dataset": name, "version": read, "entries": entries})
    output.show_table(f"{name} (version {read})", columns, [[entry[c] for c in columns] for entry in entries], own=True)


def _open(lake: Lake, name: str, version: str | None, as_of: str | None) -> Dataset:
    """Open the dataset at the given version or time, by default the served version, without taking a lease."""
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
    return options.require_zone("--as-of", as_of, moment)


def _repartition_details(report: RebucketReport) -> list[str]:
    return [
        *(f"the old copy is kept for now: {pending}" for pending in report.pending),
        *(f"prevented by {reader}" for reader in report.holding),
    ]


dataset.add_command(
    options.repartition_command(
        "Rewrite a dataset into another number of partitions, in one commit.\n\n"
        "Rewrites every retained version of a bounded dataset, or the served table of an unbounded one.",
        repartition_dataset,
        _repartition_details,
    )
)
dataset.add_command(
    options.deletion_command(
        "Delete a dataset and all its versions permanently. Rejected while it is read; repeat it if interrupted.",
        delete_dataset,
    )
)
