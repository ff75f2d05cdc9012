"""`adjunct dataset …`: what datasets the lake has, their versions and entries."""

from __future__ import annotations

import click

from orchestration.cli.output import as_json, lake_url, show_facts, show_json, show_record, show_table
from resources.errors import ConfigurationError


@click.group()
def dataset() -> None:
    """Adjunct datasets of the lake."""


@dataset.command("list")
@lake_url
@as_json
def list_all(lake_url: str | None, json_output: bool) -> None:
    """List the datasets with the version that each serves."""
    from assets import list_datasets, open_dataset
    from resources.objects import open_lake

    lake = open_lake(lake_url)
    found = [open_dataset(lake, name).describe() for name in list_datasets(lake)]
    if json_output:
        show_json(found)
        return
    rows = []
    for item in found:
        declaration, version = item["declaration"], item["version"] or {}
        spread = declaration["partitions"] or "broadcast"
        rows.append([item["name"], declaration["kind"], declaration["input"], spread, version.get("id")])
        rows[-1].append(version.get("rows") if version.get("rows") is not None else "merged when read")
    show_table("datasets", ["name", "kind", "input", "partitions", "version", "rows"], rows)


@dataset.command()
@click.argument("name")
@lake_url
@as_json
def show(name: str, lake_url: str | None, json_output: bool) -> None:
    """Show a dataset: declaration, current version, retained versions, offsets."""
    from assets import open_dataset
    from resources.objects import open_lake

    facts = open_dataset(open_lake(lake_url), name).describe()
    if json_output:
        show_json(facts)
        return
    version = facts.get("version") or {}
    schema = version.pop("columns", [])
    show_facts(f"dataset {name}", facts["declaration"])
    if version:
        show_facts("version served", {key: value for key, value in version.items() if value not in ({}, None)})
    show_facts("next offsets", facts["offsets"])
    if facts.get("versions"):
        columns = ["id", "name", "rows", "sealed_at"]
        show_table("versions", columns, [[item.get(column) for column in columns] for item in facts["versions"]])
    show_table("schema", ["column", "type"], [[field["name"], field["type"]] for field in schema])


@dataset.command()
@click.argument("name")
@click.argument("key", nargs=-1, required=True)
@lake_url
@as_json
def get(name: str, key: tuple[str, ...], lake_url: str | None, json_output: bool) -> None:
    """Look entries up: one KEY an entry; with a key of several columns, that many KEYs an entry, in its order."""
    from assets import open_dataset
    from resources.objects import open_lake

    view = open_dataset(open_lake(lake_url), name).require_current()
    width = len(view.sealed.key)
    if len(key) % width:
        raise ConfigurationError(
            f"dataset {name!r} has a key of {width} columns ({', '.join(view.sealed.key)}), and {len(key)} values "
            "were given.",
            f"Give {width} values for each entry.",
        )
    keys = [list(key[at : at + width]) for at in range(0, len(key), width)]
    found = [(each, view.get_text(each)) for each in keys]
    if json_output:
        show_json([{"key": each, "version": view.version, "entry": entry} for each, entry in found])
        return
    for each, entry in found:
        title = f"{name} {', '.join(each)} (version {view.version})"
        show_record(title, entry, "no entry")
