"""`adjunct dataset versions, history, pin, rollback, …`: what versions a dataset has, and what operators do to them."""

from __future__ import annotations

import getpass
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import click

from dagster_adjunct.orchestration.cli.output import (
    as_json,
    lake_url,
    show_facts,
    show_items,
    show_json,
    show_line,
    show_table,
    zoned,
)
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.versions.manifest import BoundedManifest, DatasetManifest
    from dagster_adjunct.assets.versions.sealed_version import VersionRef

C = TypeVar("C", bound=Callable[..., Any])
_DURATION = re.compile(r"(\d+)\s*(m|h|d|w)")
_UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def explained(command: C) -> C:
    """Add what every change needs: why, and by whom."""
    why = click.option("--reason", required=True, help="Why; it is kept with the change.")
    who = click.option("--by", help="Who does it. Default: the user of this machine.")
    return why(who(command))


def who(by: str | None) -> str:
    """Return who does it: as given, or the user of the operating system. Raises ConfigurationError for nobody."""
    if by is None:
        try:
            by = getpass.getuser()
        except (KeyError, OSError, ImportError) as error:
            raise ConfigurationError("this machine does not say who you are.", "Pass --by NAME.") from error
    if not by.strip():
        raise ConfigurationError("--by is empty.", "Name who does it, or leave --by out.")
    return by.strip()


def duration(text: str) -> timedelta | None:
    """Return what 90m, 2h, 7d or 1w says, None for another text."""
    found = _DURATION.fullmatch(text.strip())
    return timedelta(**{_UNITS[found[2]]: int(found[1])}) if found else None


def expiry(text: str | None, now: datetime) -> datetime | None:
    """Return when a pin ends: an ISO time with its zone, or a duration from now such as 90m, 2h, 7d, 1w."""
    if text is None:
        return None
    span = duration(text)
    if span is not None:
        return now + span
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None:
        raise ConfigurationError(
            f"--expires {text!r} is neither a duration nor a time with its zone.",
            "Write for example 2h, 7d, or 2026-01-31T18:00Z.",
        )
    moment = zoned("--expires", text, moment)
    if moment <= now:
        raise ConfigurationError(f"--expires {text} has passed already.", "Give a later time.")
    return moment.astimezone(UTC)


@click.command("versions")
@click.argument("name")
@lake_url
@as_json
def list_versions(name: str, lake_url: str | None, json_output: bool) -> None:
    """List the retained versions: which is served, pinned, rejected or withdrawn, and why."""
    store = _store(lake_url, name)
    if json_output:
        manifest = store.require_manifest()
        show_json(_listed(manifest))
    else:
        show_versions(store)


def show_versions(store: StoredVersions) -> None:
    """Print the retained versions as a table, oldest first."""
    manifest = store.require_manifest()
    columns = ["id", "name", "rows", "bytes", "sealed at", "state", "reason"]
    facts = _listed(manifest)
    marked = [fact | {"state": ", ".join([fact["state"], *fact["marks"]])} for fact in facts]
    rows = [[fact[column.replace(" ", "_")] for column in columns] for fact in marked]
    show_table(f"versions of {store.name}, sealed in UTC", columns, rows)


def show_version(store: StoredVersions, version: str, *, json_output: bool) -> None:
    """Print one version: what it holds, where it came from, and what the validators said."""
    from dagster_adjunct.assets.versions.choose_version import require_version
    from dagster_adjunct.assets.versions.manifest import UnboundedManifest

    manifest = store.require_manifest()
    if isinstance(manifest, UnboundedManifest):
        view = store.version(version)
        facts: dict[str, Any] = {"id": view.version, "columns": view.schema.to_json(), "offsets": view.sealed.offsets}
        verdicts: list[dict[str, Any]] = []
    else:
        ref = require_version(manifest, version)
        facts = _facts(manifest, ref)
        verdicts = [verdict.model_dump(mode="json") for verdict in ref.verdicts]
        if ref.document is not None:
            sealed = store.log.read_version(ref)
            verdicts = [verdict.model_dump(mode="json") for verdict in sealed.verdicts]
            facts |= {"columns": sealed.columns.to_json(), "offsets": sealed.offsets, "counters": sealed.counters}
    if json_output:
        show_json(facts | {"verdicts": verdicts})
        return
    schema = facts.pop("columns", [])
    show_facts(
        f"version {facts['id']} of {store.name}", {k: v for k, v in facts.items() if v not in ({}, [], "", None)}
    )
    if verdicts:
        rows = [[v["name"], "passed" if v["passed"] else "failed", v["severity"], v["message"]] for v in verdicts]
        show_table("validators", ["name", "result", "severity", "message"], rows)
    show_table("schema", ["column", "type"], [[field["name"], field["type"]] for field in schema])


@click.command()
@click.argument("name")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="The newest so many commits.")
@lake_url
@as_json
def history(name: str, limit: int, lake_url: str | None, json_output: bool) -> None:
    """Show the newest commits: what was done to which version, by whom, when and why."""
    entries = [entry.to_json() for entry in _store(lake_url, name).history(limit)]
    if json_output:
        show_json(entries)
        return
    columns = ["number", "at", "action", "version", "served", "readable", "by", "reason"]
    show_items(f"history of {name}, in UTC", columns, entries)


@click.command()
@click.argument("name")
@click.argument("version")
@click.option("--expires", metavar="TIME", help="When the pin ends: a duration (2h, 7d) or an ISO time with its zone.")
@explained
@lake_url
@as_json
def pin(
    name: str, version: str, expires: str | None, reason: str, by: str | None, lake_url: str | None, json_output: bool
) -> None:
    """Serve VERSION, whatever is published meanwhile, until it is unpinned or the pin expires."""
    until = expiry(expires, utc_now())
    _change(
        lake_url,
        name,
        "pin",
        lambda store: store.pin(version, reason=reason, by=who(by), expires_at=until),
        json_output,
    )


@click.command()
@click.argument("name")
@explained
@lake_url
@as_json
def unpin(name: str, reason: str, by: str | None, lake_url: str | None, json_output: bool) -> None:
    """Serve again what the last publication or rollback chose."""
    _change(lake_url, name, "unpin", lambda store: store.unpin(reason=reason, by=who(by)), json_output)


@click.command()
@click.argument("name")
@click.argument("version", required=False)
@explained
@lake_url
@as_json
def rollback(
    name: str, version: str | None, reason: str, by: str | None, lake_url: str | None, json_output: bool
) -> None:
    """Serve VERSION (without it: the one before) until the next one is published."""
    _change(lake_url, name, "rollback", lambda store: store.rollback(version, reason=reason, by=who(by)), json_output)


@click.command()
@click.argument("name")
@click.argument("version")
@explained
@lake_url
@as_json
def withdraw(name: str, version: str, reason: str, by: str | None, lake_url: str | None, json_output: bool) -> None:
    """Never serve VERSION again; what was served before it takes its place."""
    _change(lake_url, name, "withdraw", lambda store: store.withdraw(version, reason=reason, by=who(by)), json_output)


@click.command()
@click.argument("name")
@click.argument("version")
@click.option("--make-current", is_flag=True, help="Serve it, also where it does not come after what is served.")
@explained
@lake_url
@as_json
def force(
    name: str, version: str, make_current: bool, reason: str, by: str | None, lake_url: str | None, json_output: bool
) -> None:
    """Publish a rejected VERSION after all; one that is older than what is served is kept beside it."""
    _change(
        lake_url,
        name,
        "force",
        lambda store: store.force(version, reason=reason, by=who(by), make_current=make_current),
        json_output,
    )


@click.command()
@click.argument("name")
@click.argument("version")
@explained
@lake_url
@as_json
def drop(name: str, version: str, reason: str, by: str | None, lake_url: str | None, json_output: bool) -> None:
    """Forget a rejected or withdrawn VERSION; the next discard deletes its files."""
    _change(lake_url, name, "drop", lambda store: store.drop(version, reason=reason, by=who(by)), json_output)


@click.command()
@click.argument("name")
@click.argument("version")
@explained
@lake_url
@as_json
def abandon(name: str, version: str, reason: str, by: str | None, lake_url: str | None, json_output: bool) -> None:
    """End VERSION, which can't be completed: its markers close nothing from now on, and the next one can follow."""
    from dagster_adjunct.assets.bounded.advance_versions import abandon_version

    def end(store: StoredVersions) -> DatasetManifest:
        abandon_version(store.log.lake, name, version, reason=reason, by=who(by))
        return store.require_manifest()

    _change(lake_url, name, "abandon", end, json_output)


@click.command()
@click.argument("name")
@click.argument("old")
@click.argument("new")
@click.option(
    "--sample", type=click.IntRange(0), default=20, show_default=True, help="At most so many keys of each kind."
)
@lake_url
@as_json
def diff(name: str, old: str, new: str, sample: int, lake_url: str | None, json_output: bool) -> None:
    """Compare two versions: keys that were added, removed and changed, counted and sampled."""
    found = _store(lake_url, name).diff(old, new, sample=sample)
    if json_output:
        show_json(found.to_json())
        return
    counts = {what: getattr(found, what) for what in ("added", "removed", "changed", "unchanged")}
    columns = {f"columns {what}": getattr(found, f"columns_{what}") for what in ("added", "removed", "retyped")}
    retyped = [f"{column} ({before} to {after})" for column, before, after in found.columns_retyped]
    columns["columns retyped"] = tuple(retyped)
    show_facts(f"{name}: {found.old} to {found.new}", counts | {k: v for k, v in columns.items() if v})
    for what, keys in (("added", found.added_sample), ("removed", found.removed_sample)):
        if keys:
            show_table(what, list(keys[0]), [[str(value) for value in key.values()] for key in keys], own=True)
    for entry in found.changed_sample:
        values = {n: f"{entry.old[n]} -> {v}" for n, v in entry.new.items() if n in entry.old and entry.old[n] != v}
        show_facts(f"changed: {', '.join(map(str, entry.key.values()))}", values, own=True)


COMMANDS = (list_versions, history, pin, unpin, rollback, withdraw, force, drop, abandon, diff)


def _store(lake_url: str | None, name: str) -> StoredVersions:
    from dagster_adjunct.assets.reading.stored_versions import stored_versions
    from dagster_adjunct.resources.objects import open_lake

    return stored_versions(open_lake(lake_url, create=False), name)


def _listed(manifest: DatasetManifest) -> list[dict[str, Any]]:
    from dagster_adjunct.assets.versions.manifest import BoundedManifest

    return [_facts(manifest, ref) for ref in manifest.versions] if isinstance(manifest, BoundedManifest) else []


def _facts(manifest: BoundedManifest, ref: VersionRef) -> dict[str, Any]:
    """Return a version as the commands show it; `marks` say which one is served, pinned, or would be served."""
    served = manifest.version.id if manifest.version else None
    marks = ["served"] if ref.id == served else []
    marks += ["pinned"] if manifest.pin is not None and manifest.pin.version == ref.id else []
    marks += ["next when unpinned"] if manifest.head == ref.id and ref.id != served else []
    facts = ref.model_dump(
        mode="json", include={"id", "number", "name", "rows", "bytes", "sealed_at", "state", "reason"}
    )
    return facts | {"marks": marks}


def _change(
    lake_url: str | None,
    name: str,
    action: str,
    change: Callable[[StoredVersions], DatasetManifest],
    json_output: bool,
) -> None:
    """Make a change, and print what stands after it."""
    from dagster_adjunct.assets.versions.manifest import as_bounded
    from dagster_adjunct.assets.versions.operator_actions import kept_beside

    store = _store(lake_url, name)
    before = store.require_manifest()
    after = as_bounded(change(store))
    served, changed = after.version, after.change.version if after.change and after != before else None
    others = sorted(set(store.log.read_all()[1]) - {name})
    note = kept_beside(after) if changed else ""
    if json_output:
        facts = {
            "dataset": name,
            "action": action,
            "changed": after != before,
            "version": changed,
            "served": served.id if served else None,
            "others": others,
            "head": after.head,
            "pin": after.pin.model_dump(mode="json") if after.pin else None,
            "note": note,
        }
        show_json(facts)
        return
    what = f"{action} {changed}" if after != before else f"{action}: nothing had to be done"
    serves = f"{served.id} ({served.name}) is served now" if served else "no version is served now"
    until = f" until {after.pin.expires_at:%Y-%m-%d %H:%M} UTC" if after.pin and after.pin.expires_at else ""
    show_line(f"{name}: {what}; {serves}{', pinned' + until if after.pin else ''}.")
    if note:
        show_line(f"{note}.")
    elif others and after != before and action != "abandon":
        show_line(f"{', '.join(others)} moved with it, as members of the same version set.")
