"""`adjunct dataset pin, unpin, rollback, withdraw, force, drop, abandon`: what operators do to versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypedDict

import click

from dagster_adjunct.orchestration.cli.common_options import expiry, explained, who
from dagster_adjunct.orchestration.cli.output import as_json, lake_url, show_json, show_line
from dagster_adjunct.orchestration.cli.version_commands import store_of
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from dagster_adjunct.assets.reading.stored_versions import StoredVersions
    from dagster_adjunct.assets.versions.bounded_manifest import BoundedManifest
    from dagster_adjunct.assets.versions.manifest import DatasetManifest

_VERSION = click.argument("version")


class Why(TypedDict):
    """What is kept with a change."""

    reason: str
    by: str


def _change_command(
    *options: Callable[[Any], Any],
) -> Callable[[Callable[..., BoundedManifest]], click.Command]:
    """Make a change of a dataset's versions a command with these arguments and options, and show what stands after it.

    The change gets the dataset's stored versions, who does it and why, and the options by their names.
    """

    def command_of(change: Callable[..., BoundedManifest]) -> click.Command:
        action = change.__name__

        @explained
        @lake_url
        @as_json
        def command(
            name: str, reason: str, by: str | None, lake_url: str | None, json_output: bool, **given: Any
        ) -> None:
            store, why = store_of(lake_url, name), Why(reason=reason, by=who(by))
            before = store.require_manifest()
            after = change(store, why, **given)
            _show_change(store, action, before, after, json_output=json_output)

        for option in reversed((click.argument("name"), *options)):
            command = option(command)
        return click.command(action, help=change.__doc__)(command)

    return command_of


@_change_command(
    _VERSION,
    click.option(
        "--expires", metavar="TIME", help="When the pin ends: a duration (2h, 7d) or an ISO time with its zone."
    ),
)
def pin(store: StoredVersions, why: Why, version: str, expires: str | None) -> BoundedManifest:
    """Serve VERSION, whatever is published meanwhile, until it is unpinned or the pin expires."""
    return store.pin(version, **why, expires_at=expiry(expires, utc_now()))


@_change_command()
def unpin(store: StoredVersions, why: Why) -> BoundedManifest:
    """Serve again what the last publication or rollback chose."""
    return store.unpin(**why)


@_change_command(click.argument("version", required=False))
def rollback(store: StoredVersions, why: Why, version: str | None) -> BoundedManifest:
    """Serve VERSION (without it: the one before) until the next one is published."""
    return store.rollback(version, **why)


@_change_command(_VERSION)
def withdraw(store: StoredVersions, why: Why, version: str) -> BoundedManifest:
    """Never serve VERSION again; what was served before it takes its place."""
    return store.withdraw(version, **why)


@_change_command(
    _VERSION,
    click.option("--make-current", is_flag=True, help="Serve it, also where it does not come after what is served."),
)
def force(store: StoredVersions, why: Why, version: str, make_current: bool) -> BoundedManifest:
    """Publish a rejected VERSION after all; one that is older than what is served is kept beside it."""
    return store.force(version, **why, make_current=make_current)


@_change_command(_VERSION)
def drop(store: StoredVersions, why: Why, version: str) -> BoundedManifest:
    """Forget a rejected or withdrawn VERSION; the next discard deletes its files."""
    return store.drop(version, **why)


@_change_command(_VERSION)
def abandon(store: StoredVersions, why: Why, version: str) -> BoundedManifest:
    """End VERSION, which can't be completed: its markers close nothing from now on, and the next one can follow."""
    from dagster_adjunct.assets.bounded.advance_versions import abandon_version
    from dagster_adjunct.assets.versions.manifest import as_bounded

    abandon_version(store.log.lake, store.name, version, **why)
    return as_bounded(store.require_manifest())


COMMANDS = (pin, unpin, rollback, withdraw, force, drop, abandon)


def _show_change(
    store: StoredVersions, action: str, before: DatasetManifest, after: BoundedManifest, *, json_output: bool
) -> None:
    from dagster_adjunct.assets.versions.operator_actions import kept_beside

    served, changed = after.version, after.change.version if after.change and after != before else None
    others = sorted(set(store.log.read_all()[1]) - {store.name})
    note = kept_beside(after) if changed else ""
    if json_output:
        facts = {
            "dataset": store.name,
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
    show_line(f"{store.name}: {what}; {serves}{', pinned' + until if after.pin else ''}.")
    if note:
        show_line(f"{note}.")
    elif others and after != before and action != "abandon":
        show_line(f"{', '.join(others)} moved with it, as members of the same version set.")
