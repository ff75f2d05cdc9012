"""`adjunct dataset versions, history, diff, pin, rollback, …`: list, compare and change the versions of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from typing import Any

import click

from dagster_adjunct.assets.bounded.advance import abandon_version
from dagster_adjunct.assets.reading.dataset import open_dataset
from dagster_adjunct.assets.reading.key_lookup import key_from_text
from dagster_adjunct.assets.reading.stored_versions import StoredVersions, open_stored_versions
from dagster_adjunct.assets.versions.actions import describe_unserved_version
from dagster_adjunct.assets.versions.manifest import BoundedManifest, DatasetManifest, as_bounded
from dagster_adjunct.assets.versions.version import VersionRef
from dagster_adjunct.orchestration.cli import output
from dagster_adjunct.orchestration.cli.options import (
    audit_options,
    lake_options,
    limit_option,
    parse_expiry,
    split_keys,
)
from dagster_adjunct.resources.common import utc_now
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake


@click.command("versions")
@click.argument("name")
@lake_options()
def list_versions(lake: Lake, name: str) -> None:
    """List the retained versions with their states (served, pinned, rejected, revoked) and reasons."""
    store = open_stored_versions(lake, name)
    output.show_json(_list_facts(store.require_manifest()))
    show_versions(store)


def show_versions(store: StoredVersions) -> None:
    """Print the retained versions as a table, oldest first."""
    facts = _list_facts(store.require_manifest())
    dated = ["valid from"] if any(fact.get("valid_from") for fact in facts) else []
    columns = ["id", "name", *dated, "rows", "bytes", "sealed at", "state", "reason"]
    marked = [fact | {"state": ", ".join([fact["state"], *fact["marks"]])} for fact in facts]
    rows = [[fact.get(column.replace(" ", "_")) for column in columns] for fact in marked]
    output.show_table(f"versions of {store.name}, sealed in UTC", columns, rows)


def show_version(store: StoredVersions, version: str) -> None:
    """Print one version: its content, offsets and validator results."""
    manifest = store.require_manifest()
    ref = manifest.ref(version)
    if ref is None:  # unbounded datasets do not list their versions
        view = store.version(version)
        facts: dict[str, Any] = {"id": view.version, "columns": view.schema.to_json(), "offsets": view.sealed.offsets}
        verdicts: list[dict[str, Any]] = []
    else:
        facts = _facts(manifest, ref)
        verdicts = [verdict.model_dump(mode="json") for verdict in ref.verdicts]
        if ref.document is not None:
            sealed = store.log.read_version(ref)
            verdicts = [verdict.model_dump(mode="json") for verdict in sealed.verdicts]
            facts |= {"columns": sealed.columns.to_json(), "offsets": sealed.offsets, "counters": sealed.counters}
    output.show_json(facts | {"verdicts": verdicts})
    schema = facts.pop("columns", [])
    output.show_facts(
        f"version {facts['id']} of {store.name}", {k: v for k, v in facts.items() if v not in ({}, [], "", None)}
    )
    if verdicts:
        rows = [[v["name"], "passed" if v["passed"] else "failed", v["severity"], v["message"]] for v in verdicts]
        output.show_table("validators", ["name", "result", "severity", "message"], rows)
    output.show_table("schema", ["column", "type"], [[field["name"], field["type"]] for field in schema])


@click.command("history")
@click.argument("name")
@click.argument("key", nargs=-1)
@limit_option(20, "Maximum number of commits or intervals, newest first.")
@lake_options()
def show_history(lake: Lake, name: str, key: tuple[str, ...], limit: int) -> None:
    """Show the newest commits: what was done to which version, by whom, when and why. With KEY, show one entry.

    Exits with 6 if there was never an entry of KEY.
    """
    if key:
        _show_entry_over_time(lake, name, key, limit)
        return
    entries = [entry.to_json() for entry in open_stored_versions(lake, name).history(limit)]
    output.show_json(entries)
    columns = ["number", "at", "action", "version", "served", "readable", "by", "reason"]
    output.show_items(f"history of {name}, in UTC", columns, entries)


@click.command("diff")
@click.argument("name")
@click.argument("old")
@click.argument("new")
@click.option(
    "--sample", type=click.IntRange(0), default=20, show_default=True, help="Maximum number of keys of each kind."
)
@lake_options()
def show_diff(lake: Lake, name: str, old: str, new: str, sample: int) -> None:
    """Compare two versions: count and sample the keys that were added, removed and changed."""
    differences = open_stored_versions(lake, name).diff(old, new, sample=sample)
    output.show_json(differences.to_json())
    counts = {what: getattr(differences, what) for what in ("added", "removed", "changed", "unchanged")}
    columns = {f"columns {what}": getattr(differences, f"columns_{what}") for what in ("added", "removed", "retyped")}
    retyped = [f"{column} ({before} to {after})" for column, before, after in differences.columns_retyped]
    columns["columns retyped"] = tuple(retyped)
    output.show_facts(
        f"{name}: {differences.old} to {differences.new}", counts | {k: v for k, v in columns.items() if v}
    )
    for what, keys in (("added", differences.added_sample), ("removed", differences.removed_sample)):
        if keys:
            output.show_table(what, list(keys[0]), [list(key.values()) for key in keys], own=True)
    for entry in differences.changed_sample:
        values = {n: f"{entry.old[n]} -> {v}" for n, v in entry.new.items() if n in entry.old and entry.old[n] != v}
        output.show_facts(f"changed: {', '.join(map(str, entry.key.values()))}", values, own=True)


def _show_entry_over_time(lake: Lake, name: str, key: tuple[str, ...], limit: int) -> None:
    """Print the values of one key over time, newest last."""
    with open_dataset(lake, name) as opened:
        texts = split_keys(name, opened.sealed.key, key)
        if len(texts) > 1:
            problem = f"dataset {name!r}: {len(texts)} keys were given, but history shows one entry."
            raise ConfigurationError(problem, "Give one key.", dataset=name)
        fields = [opened.schema.field(column) for column in opened.sealed.key]
        every = opened.history_of(key_from_text(f"dataset {name!r}", fields, texts[0]))
        values = [column for column in opened.schema.names if column not in opened.sealed.key]
    newest = every[-limit:]
    slots = ("valid_from", "valid_to", "is_current", "entry")
    output.show_json([{slot: getattr(part, slot) for slot in slots} for part in newest])
    if not every:
        output.show_line(f"{name} has no entry {', '.join(texts[0])} in its retained history")
    else:
        deleted = ["deleted", *[""] * (len(values) - 1)]
        rows = [
            [
                *("" if time is None else str(time.astimezone(UTC).replace(tzinfo=None)) for time in interval),
                *(deleted if part.entry is None else [part.entry[column] for column in values]),
            ]
            for part in newest
            for interval in [(part.valid_from, part.valid_to)]
        ]
        part_of_all = f", the newest {len(newest)} of {len(every)} (--limit)" if len(newest) < len(every) else ""
        title = f"{name} {', '.join(texts[0])} over time, in UTC{part_of_all}"
        output.show_table(title, ["valid from", "valid to", *(values or [""])], rows, own=True)
    output.fail_if_missing([every or None])


def _list_facts(manifest: DatasetManifest) -> list[dict[str, Any]]:
    return [_facts(manifest, ref) for ref in manifest.listed]


def _facts(manifest: DatasetManifest, ref: VersionRef) -> dict[str, Any]:
    """Return the displayed fields of a version; `marks` tell if it is served, pinned, or served after unpinning."""
    facts = ref.model_dump(
        mode="json", include={"id", "number", "name", "rows", "bytes", "sealed_at", "state", "reason"}
    )
    if ref.valid_from is not None:
        facts["valid_from"] = ref.valid_from.isoformat()
    return facts | {"marks": manifest.marks(ref.id)}


_VERSION = click.argument("version")


def _change_command(
    action: str, *options: Callable[[Any], Any]
) -> Callable[[Callable[..., BoundedManifest]], click.Command]:
    """Turn a change of a dataset's versions into a command that prints the version served afterwards.

    The function receives the stored versions; the options, `reason` and `by` are keyword arguments.
    """

    def command_of(change: Callable[..., BoundedManifest]) -> click.Command:
        @audit_options
        @lake_options()
        def command(lake: Lake, name: str, **given: Any) -> None:
            store = open_stored_versions(lake, name)
            before = store.require_manifest()
            _show_change(store, action, before, change(store, **given))

        for option in reversed((click.argument("name"), *options)):
            command = option(command)
        return click.command(action, help=change.__doc__)(command)

    return command_of


@_change_command(
    "pin",
    _VERSION,
    click.option(
        "--expires", metavar="TIME", help="When the pin ends: a duration (2h, 7d) or an ISO time with its zone."
    ),
)
def pin(store: StoredVersions, version: str, expires: str | None, **audit: str) -> BoundedManifest:
    """Serve VERSION until it is unpinned or the pin expires, even if newer versions are published."""
    expires_at = None if expires is None else parse_expiry(expires, utc_now())
    return store.pin(version, **audit, expires_at=expires_at)


@_change_command("unpin")
def unpin(store: StoredVersions, **audit: str) -> BoundedManifest:
    """Remove the pin: serve the version of the last publication or rollback."""
    return store.unpin(**audit)


@_change_command("rollback", click.argument("version", required=False))
def rollback(store: StoredVersions, version: str | None, **audit: str) -> BoundedManifest:
    """Serve VERSION (default: the previous one) until the next version is published."""
    return store.rollback(version, **audit)


@_change_command("revoke", _VERSION)
def revoke(store: StoredVersions, version: str, **audit: str) -> BoundedManifest:
    """Never serve VERSION again; serve the version before it instead."""
    return store.revoke(version, **audit)


@_change_command(
    "accept",
    _VERSION,
    click.option("--make-current", is_flag=True, help="Serve it even if a newer version is served."),
)
def accept(store: StoredVersions, version: str, make_current: bool, **audit: str) -> BoundedManifest:
    """Publish a rejected VERSION after all; if it is older than the served one, it is only kept."""
    return store.accept(version, **audit, make_current=make_current)


@_change_command("remove-version", _VERSION)
def remove_version(store: StoredVersions, version: str, **audit: str) -> BoundedManifest:
    """Remove a rejected or revoked VERSION; the next `dataset expire` deletes its files."""
    return store.remove_version(version, **audit)


@_change_command("abandon", _VERSION)
def abandon(store: StoredVersions, version: str, **audit: str) -> BoundedManifest:
    """End an incomplete VERSION that can't be completed, so that the next one can follow."""
    abandon_version(store.log.lake, store.name, version, **audit)
    return as_bounded(store.require_manifest())


COMMANDS = (list_versions, show_history, show_diff, pin, unpin, rollback, revoke, accept, remove_version, abandon)


def _show_change(store: StoredVersions, action: str, before: DatasetManifest, after: BoundedManifest) -> None:
    changed = after != before
    served, pin = after.version, after.pin
    version = after.change.version if after.change and changed else None
    others = sorted(set(store.log.read_all()[1]) - {store.name})
    note = describe_unserved_version(after) if version else ""
    output.show_json(
        {
            "dataset": store.name,
            "action": action,
            "changed": changed,
            "version": version,
            "served": served.id if served else None,
            "others": others,
            "head": after.head,
            "pin": pin.model_dump(mode="json") if pin else None,
            "note": note,
        }
    )
    what = f"{action} {version}" if changed else f"{action}: nothing to do"
    serves = f"{served.id} ({served.name}) is served now" if served else "no version is served now"
    until = f" until {pin.expires_at:%Y-%m-%d %H:%M} UTC" if pin and pin.expires_at else ""
    output.show_line(f"{store.name}: {what}; {serves}{', pinned' + until if pin else ''}.")
    if note:
        output.show_line(f"{note}.")
    elif others and changed and action != "abandon":
        output.show_line(f"{', '.join(others)} changed with it, as members of the same version set.")
