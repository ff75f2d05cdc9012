"""`adjunct dataset …`: list, show, query, repartition and delete datasets; list, compare and
change their versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import islice, starmap
from typing import Any

import click

from dagster_adjunct.assets.bounded.advance import abandon_version
from dagster_adjunct.assets.reading.dataset import Dataset, open_dataset
from dagster_adjunct.assets.reading.key_lookup import key_from_text
from dagster_adjunct.assets.reading.stored_versions import (
    StoredVersions,
    list_datasets,
    open_stored_versions,
)
from dagster_adjunct.assets.reading.version_reader import Entry
from dagster_adjunct.assets.rebucketing import RebucketReport
from dagster_adjunct.assets.versions.manifest import (
    BoundedManifest,
    DatasetManifest,
    as_bounded,
    as_follower,
)
from dagster_adjunct.assets.versions.switches import describe_unserved_version
from dagster_adjunct.assets.versions.version import Verdict, VersionRef
from dagster_adjunct.orchestration.cli import maintenance, options, output
from dagster_adjunct.orchestration.maintenance.delete import delete_dataset
from dagster_adjunct.orchestration.maintenance.repartition import repartition_dataset
from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    MalformedDocumentError,
)
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.equality import comparable_value
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.times import utc_now

dataset = click.Group("dataset")
for command in maintenance.COMMANDS:
    dataset.add_command(command)


@dataset.command("list")
@options.lake_options()
def show_datasets(lake: Lake) -> None:
    """List the datasets and the version that each serves.

    Rows are "merged when read" if the version has deltas, which readers merge.
    """
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
        declared = item["declaration"]
        version = item["version"] or {}
        spread = declared["partitions"] or "broadcast"
        count = version.get("rows")
        if count is None:
            count = "merged when read"
        rows.append([name, declared["kind"], declared["input"], spread, version.get("id"), count])
    output.show_json(descriptions)
    output.show_table("datasets", ["name", "kind", "input", "partitions", "version", "rows"], rows)
    for item in descriptions:
        if "unreadable" in item:
            output.show_line(f"{item['name']} is unreadable: {item['unreadable']}")


_version = options.option(
    "--version",
    "VERSION",
    "A version id or name, also of a rejected version. Default: the served version.",
)
_as_of = options.option(
    "--as-of",
    "TIME",
    "Read what was served then: an ISO time with its zone, or a commit number or id.",
)


@dataset.command("show")
@options.name_argument
@click.argument("version", required=False)
@_as_of
@options.lake_options()
def show_dataset(lake: Lake, name: str, version: str | None, as_of: str | None) -> None:
    """Show a dataset: declaration, current version, retained versions, offsets. With VERSION,
    show that version.
    """
    store = open_stored_versions(lake, name)
    if version is not None or as_of is not None:
        _show_version(store, _open(lake, name, version, as_of).version)
        return
    facts = store.describe()
    manifest = store.require_manifest()
    table = as_follower(manifest)
    if table is not None:
        facts["declaration"].pop("order", None)  # the order of versions, for bounded datasets
        try:
            facts["lag"] = maintenance.lag_facts(lake, table)
        # Its stream may be deleted, or registered only by the application's module.
        except AdjunctError as error:
            facts["lag"] = {"unknown": str(error)}
    output.show_json(facts)
    served = facts.get("version") or {}
    schema = served.pop("columns", [])
    output.show_facts(f"dataset {name}", facts["declaration"])
    parts = {
        "version served": output.drop_empty(served),
        "pinned": facts.get("pin"),
        "waiting": facts.get("awaited"),
        "next offsets": facts.get("offsets"),
    }
    for title, part in parts.items():
        if part:
            output.show_facts(title, part)
    for lost in manifest.lost[-3:]:
        output.show_line(f"{lost.at:%Y-%m-%d %H:%M} UTC: {lost.summary()}.")
    if facts.get("lag"):
        maintenance.show_lag(facts["lag"])
    if facts.get("versions"):
        _show_versions(name, manifest)
    output.show_schema(schema)


@dataset.command("get")
@options.name_argument
@click.argument("key", nargs=-1, required=True)
@_version
@_as_of
@options.lake_options()
def get_dataset_entries(lake: Lake, name: str, key: tuple[str, ...], **at: str | None) -> None:
    """Look up entries by key: one KEY per entry, or one per key column in order.

    Exits with 6 if an entry does not exist.
    """
    with _open(lake, name, **at) as opened:
        fields = _key_fields(opened)
        version_read = opened.version
        what = f"dataset {name!r}, version {version_read}"
        texts_of_keys = options.split_keys(name, opened.sealed.key, key)
        keys = [key_from_text(what, fields, texts) for texts in texts_of_keys]
        entries = opened.get_all(keys)
    answers = list(map(entries.get, keys))
    shown = []
    for texts, entry in zip(texts_of_keys, answers, strict=True):
        shown.append({"key": texts, "version": version_read, "entry": entry})
    output.show_json(shown)
    for texts, entry in zip(texts_of_keys, answers, strict=True):
        title = f"{name} {', '.join(texts)} (version {version_read})"
        output.show_record(title, entry, "no entry")
    output.fail_if_missing(answers)


def _key_fields(opened: Dataset) -> list[Field]:
    """Return the columns of a dataset's key, with their types."""
    return list(map(opened.schema.field, opened.sealed.key))


@dataset.command("items")
@options.name_argument
@click.option(
    "--prefix",
    multiple=True,
    help="The beginning of a text key; repeated: whole values of the first key columns.",
)
@click.option(
    "--from",
    "start",
    multiple=True,
    metavar="KEY",
    help="The first key, or its leading values (inclusive).",
)
@click.option(
    "--to",
    "end",
    multiple=True,
    metavar="KEY",
    help="The end key, or its leading values (exclusive).",
)
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
    **at: Any,
) -> None:
    """List entries in key order: all of them, a prefix, or a range."""
    with _open(lake, name, **at) as opened:
        if prefix and (start or end):
            problem = "--prefix and a range are both given."
            step = "Give --prefix, or --from and --to."
            raise ConfigurationError(problem, step, setting="--prefix")
        parse = partial(options.parse_leading_values, name, _key_fields(opened))
        leading: Any = parse(prefix) or None
        if len(prefix) == 1 and isinstance(leading[0], str):
            leading = leading[0]  # the beginning of the first column's text, not all of it
        in_order = opened.items(leading, start=parse(start) or None, end=parse(end) or None)
        entries = [entry for _, entry in islice(in_order, limit)]
        version_read = opened.version
        columns = list(opened.schema.names)
    output.show_json({"dataset": name, "version": version_read, "entries": entries})
    rows = [list(map(entry.__getitem__, columns)) for entry in entries]
    output.show_table(f"{name} (version {version_read})", columns, rows, own=True)


def _open(lake: Lake, name: str, version: str | None, as_of: str | None) -> Dataset:
    """Open the dataset at the given version or time, by default the served version, without
    taking a lease.
    """
    if version is not None and as_of is not None:
        problem = "a version and --as-of are both given."
        raise ConfigurationError(problem, "Give only one of them.", setting="--as-of")
    moment = None if as_of is None else _parse_as_of(as_of)
    return open_dataset(lake, name, version=version, as_of=moment, lease=False)


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
    """Return the lines below the summary of a dataset's repartitioning."""
    kept = "would be kept" if report.dry_run else "is kept"
    details = [f"the old copy {kept} for now: {pending}" for pending in report.pending]
    return [*details, *(f"prevented by {reader}" for reader in report.holding)]


_REPARTITION = (
    "Rewrite a dataset into another number of partitions, in one commit.\n\n"
    "Rewrites every retained version of a bounded dataset, or the served table of an unbounded one."
)
_DELETE = (
    "Delete a dataset and all its versions permanently. Rejected while it is read; repeat it if"
    " interrupted."
)
dataset.add_command(
    options.repartition_command(_REPARTITION, repartition_dataset, _repartition_details)
)
dataset.add_command(options.deletion_command(_DELETE, delete_dataset))


@dataset.command("versions")
@options.name_argument
@options.lake_options()
def list_versions(lake: Lake, name: str) -> None:
    """List the retained versions, oldest first, with their states and reasons."""
    manifest = open_stored_versions(lake, name).require_manifest()
    output.show_json([_facts(manifest, ref) for ref in manifest.listed])
    if as_follower(manifest) is not None:
        output.show_line(
            f"{name} follows changes: each commit is a version, and none is listed. See"
            f" adjunct dataset history {name}."
        )
        return
    _show_versions(name, manifest)


def _show_versions(name: str, manifest: DatasetManifest) -> None:
    """Print the retained versions as a table, oldest first."""
    columns = ["id", "name", "valid from", "rows", "bytes", "sealed at", "state", "reason"]
    if not any(ref.valid_from for ref in manifest.listed):
        columns.remove("valid from")
    rows = []
    for ref in manifest.listed:
        facts = _facts(manifest, ref)
        facts["state"] = ", ".join([facts["state"], *facts["marks"]])
        rows.append([facts.get(column.replace(" ", "_")) for column in columns])
    output.show_table(f"versions of {name}, sealed in UTC", columns, rows)


def _show_version(store: StoredVersions, version: str) -> None:
    """Print one version: its content, offsets and validator results."""
    manifest = store.require_manifest()
    ref = manifest.ref(version)
    verdicts: Sequence[Verdict] = ()
    if ref is None:  # unbounded datasets do not list their versions
        view = store.version(version)
        facts: dict[str, Any] = {
            "id": view.version,
            "columns": view.schema.to_json(),
            "offsets": view.sealed.offsets,
        }
    else:
        facts = _facts(manifest, ref)
        if ref.document is None:  # it was rejected before it was built
            verdicts = ref.verdicts
        else:
            sealed = store.log.read_version(ref)
            verdicts = sealed.verdicts
            facts |= {
                "columns": sealed.columns.to_json(),
                "offsets": sealed.offsets,
                "counters": sealed.counters,
            }
    document = [verdict.model_dump(mode="json") for verdict in verdicts]
    output.show_json(facts | {"verdicts": document})
    schema = facts.pop("columns", [])
    output.show_facts(f"version {facts['id']} of {store.name}", output.drop_empty(facts))
    rows = []
    for verdict in verdicts:
        result = "passed" if verdict.passed else "failed"
        rows.append([verdict.name, result, verdict.severity, verdict.message])
    if rows:
        output.show_table("validators", ["name", "result", "severity", "message"], rows)
    output.show_schema(schema)


@dataset.command("history")
@options.name_argument
@click.argument("key", nargs=-1)
@options.limit_option(20, "Maximum number of commits or intervals, newest first.")
@options.lake_options()
def show_history(lake: Lake, name: str, key: tuple[str, ...], limit: int) -> None:
    """Show the newest commits: what was done to which version, by whom, when and why. With KEY,
    show one entry.

    For KEY, the dataset must keep a history, or its versions must say from when they are valid.
    Give one KEY per key column. Exits with 6 if there was never an entry of KEY.
    """
    if key:
        _show_entry_over_time(lake, name, key, limit)
        return
    entries = [entry.to_json() for entry in open_stored_versions(lake, name).history(limit)]
    output.show_json(entries)
    columns = ["number", "at", "action", "version", "served", "readable", "by", "reason"]
    output.show_items(f"history of {name}, in UTC", columns, entries)


@dataset.command("diff")
@options.name_argument
@click.argument("old")
@click.argument("new")
@click.option(
    "--sample",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Maximum number of keys of each kind.",
)
@options.lake_options()
def show_diff(lake: Lake, name: str, old: str, new: str, sample: int) -> None:
    """Compare two versions: count and sample the keys that were added, removed and changed."""
    differences = open_stored_versions(lake, name).diff(old, new, sample=sample)
    output.show_json(differences.to_json())
    columns = differences.columns
    renamed = list(starmap("{} to {}".format, columns.renamed))
    retyped = list(starmap("{} ({} to {})".format, columns.retyped))
    facts = {
        "added": differences.added,
        "removed": differences.removed,
        "changed": differences.changed,
        "unchanged": differences.unchanged,
        "columns added": list(columns.added),
        "columns removed": list(columns.removed),
        "columns renamed": renamed,
        "columns retyped": retyped,
    }
    title = f"{name}: {differences.old} to {differences.new}"
    output.show_facts(title, output.drop_empty(facts))
    entries = differences.sample
    masked = entries.masked(differences.sensitive)
    for what, keys in {"added": masked.added, "removed": masked.removed}.items():
        if keys:
            output.show_table(what, list(keys[0]), [list(key.values()) for key in keys], own=True)
    for entry, shown in zip(entries.changed, masked.changed, strict=True):
        values = {}
        for column, value in entry.new.items():
            if comparable_value(entry.old.get(column, value)) == comparable_value(value):
                continue
            before = output.format_value(shown.old[column], own=True)
            now = output.format_value(shown.new[column], own=True)
            values[column] = f"{before} -> {now}"
        output.show_facts(f"changed: {', '.join(map(str, shown.key.values()))}", values, own=True)


_VERSION_OR_TIME = "its id or name, or an ISO time with its zone at which it was served"


@dataset.command("changes")
@options.name_argument
@options.option("--since", "VERSION", f"The version before the changes: {_VERSION_OR_TIME}.")
@options.option(
    "--until", "VERSION", f"The version after them, by default the served one: {_VERSION_OR_TIME}."
)
@options.limit_option(None, "Maximum number of changes.")
@options.lake_options()
def list_changes(
    lake: Lake, name: str, since: str | None, until: str | None, limit: int | None
) -> None:
    """List the entries that differ between two versions, with their values before and after.

    Without --since, all entries are inserts. Of an updated entry, only the columns that differ are
    shown; --json has all. Values of sensitive columns are masked.
    """
    with open_dataset(lake, name) as opened:
        changes = opened.changes(
            _version_or_time("--since", since), _version_or_time("--until", until)
        )
        rows = []
        cells: list[list[Any]] = []
        for change in islice(changes, limit):
            shown = change.masked(changes.sensitive)
            rows.append(asdict(shown))
            columns = change.differing_columns()
            before = _select(shown.before, columns)
            after = _select(shown.after, columns)
            cells.append([shown.kind, ", ".join(map(str, shown.key.values())), before, after])
    span = {"since": changes.since, "until": changes.until, "at": changes.at}
    output.show_json({"dataset": name, **span, "changes": rows})
    title = f"{name}: {changes.since or 'nothing'} to {changes.until}"
    output.show_table(title, ["kind", "key", "before", "after"], cells, own=True)


def _select(entry: Entry | None, columns: Sequence[str]) -> Entry | None:
    """Return these columns of an entry, as far as it has them; None for a missing entry."""
    if entry is None:
        return None
    return {name: entry[name] for name in columns if name in entry}


def _version_or_time(option: str, text: str | None) -> str | datetime | None:
    """Return the value of an option as a time if it has a clock and can be read as one; else the
    text, which is a version's id or name. None for None.
    """
    if text is None or ":" not in text:
        return text
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return options.require_zone(option, text, moment)


def _show_entry_over_time(lake: Lake, name: str, key: tuple[str, ...], limit: int) -> None:
    """Print the newest `limit` values of one key over time, newest last; exit with NOT_FOUND if
    there are none.
    """
    with open_dataset(lake, name) as opened:
        texts = options.split_keys(name, opened.sealed.key, key)
        if len(texts) > 1:
            problem = (
                f"dataset {name!r}: {len(texts)} keys were given, but history shows one entry."
            )
            raise ConfigurationError(problem, "Give one key.", dataset=name)
        key_fields = _key_fields(opened)
        every = opened.history_of(key_from_text(f"dataset {name!r}", key_fields, texts[0]))
        value_columns = [name for name in opened.schema.names if name not in opened.sealed.key]
    newest = every[-limit:]
    names = ("valid_from", "valid_to", "is_current", "interval_id", "entry")
    output.show_json([{name: getattr(part, name) for name in names} for part in newest])
    if not every:
        output.show_line(f"{name} has no entry {', '.join(texts[0])} in its retained history")
        output.fail_if_missing([None])  # exits
    rows = []
    for part in newest:
        if part.entry is None:
            cells = ["deleted", *[""] * (len(value_columns) - 1)]
        else:
            cells = [part.entry[column] for column in value_columns]
        rows.append([_format_utc(part.valid_from), _format_utc(part.valid_to), *cells])
    title = f"{name} {', '.join(texts[0])} over time, in UTC"
    if len(newest) < len(every):
        title += f", the newest {len(newest)} of {len(every)} (--limit)"
    columns = ["valid from", "valid to", *(value_columns or [""])]
    output.show_table(title, columns, rows, own=True)


def _format_utc(time: datetime | None) -> str:
    """Return a time in UTC without its zone; "" for None."""
    if time is None:
        return ""
    return str(time.astimezone(UTC).replace(tzinfo=None))


def _facts(manifest: DatasetManifest, ref: VersionRef) -> dict[str, Any]:
    """Return the displayed fields of a version; `marks` tell if it is served, pinned, or served
    after unpinning.
    """
    facts = ref.model_dump(
        mode="json",
        include={"id", "number", "name", "rows", "bytes", "sealed_at", "state", "reason"},
    )
    if ref.valid_from is not None:
        facts["valid_from"] = ref.valid_from.isoformat()
    return facts | {"marks": manifest.marks(ref.id)}


_VERSION = click.argument("version")
# What a command has done to a version, by its name.
_DONE = {
    "pin": "pinned",
    "unpin": "unpinned",
    "rollback": "rolled back to",
    "revoke": "revoked",
    "accept": "accepted",
    "remove-version": "removed",
    "abandon": "abandoned",
}


def _change_command(
    action: str, *extra: Callable[[Any], Any], asks: str = ""
) -> Callable[[Callable[..., BoundedManifest]], click.Command]:
    """Return a decorator that makes a function a command, which changes a dataset's versions and
    prints the served one.

    The function receives the stored versions; the options, `reason` and `by` are keyword arguments.
    Its docstring is the help. `asks` is the question before a change that can't be undone, with {}
    for the version and {} for the dataset; such a command has the argument `version`.
    """

    def command_of(change: Callable[..., BoundedManifest]) -> click.Command:
        @options.audit_options
        @options.lake_options()
        def command(lake: Lake, name: str, yes: bool = False, **given: Any) -> None:
            store = open_stored_versions(lake, name)
            before = store.require_manifest()
            if asks:
                question = asks.format(given["version"], name)
                options.confirm_at_terminal(f"{question} That can't be undone.", yes=yes)
            after = change(store, **given)
            _show_change(store, action, before, after)

        if asks:
            command = options.yes_option(command)
        for option in reversed((click.argument("name"), *extra)):
            command = option(command)
        return dataset.command(action, help=change.__doc__)(command)

    return command_of


@_change_command(
    "pin",
    _VERSION,
    options.option(
        "--expires",
        "TIME",
        "How long (2h, 7d) or until when (an ISO time with its zone). The next advance or"
        " expire then ends it.",
    ),
)
def pin(store: StoredVersions, version: str, expires: str | None, **audit: str) -> BoundedManifest:
    """Serve VERSION until it is unpinned or the pin expires, even if newer versions are
    published.
    """
    expires_at = None if expires is None else options.parse_expiry(expires, utc_now())
    return store.pin(version, **audit, expires_at=expires_at)


@_change_command("unpin")
def unpin(store: StoredVersions, **audit: str) -> BoundedManifest:
    """Remove the pin: serve the version of the last publication or rollback."""
    return store.unpin(**audit)


@_change_command("rollback", click.argument("version", required=False))
def rollback(store: StoredVersions, version: str | None, **audit: str) -> BoundedManifest:
    """Serve VERSION (default: the previous one) until the next version is published. Rejected
    for a pinned dataset.
    """
    return store.rollback(version, **audit)


@_change_command("revoke", _VERSION, asks="Never serve version {} of {} again?")
def revoke(store: StoredVersions, version: str, **audit: str) -> BoundedManifest:
    """Never serve VERSION again; serve the version before it instead.

    A pin to VERSION ends. Its name can be delivered again with other content; the same content is
    rejected.
    """
    return store.revoke(version, **audit)


@_change_command(
    "accept",
    _VERSION,
    options.flag("--make-current", "Serve it even if a newer version is served."),
)
def accept(
    store: StoredVersions, version: str, make_current: bool, **audit: str
) -> BoundedManifest:
    """Publish a rejected VERSION after all; if it is older than the served one, it is only kept."""
    return store.accept(version, **audit, make_current=make_current)


@_change_command(
    "remove-version", _VERSION, asks="Remove version {} of {}, with its files at the next expire?"
)
def remove_version(store: StoredVersions, version: str, **audit: str) -> BoundedManifest:
    """Remove a rejected or revoked VERSION; the next `dataset expire` deletes its files."""
    return store.remove_version(version, **audit)


@_change_command("abandon", _VERSION, asks="Drop what was delivered of version {} of {}?")
def abandon(store: StoredVersions, version: str, **audit: str) -> BoundedManifest:
    """End an incomplete VERSION that can't be completed, so that the next one can follow.

    What was delivered of it is dropped.
    """
    abandon_version(store.log.lake, store.name, version, **audit)
    return as_bounded(store.require_manifest())


def _show_change(
    store: StoredVersions, action: str, before: DatasetManifest, after: BoundedManifest
) -> None:
    """Print what a command has done to a version, and which version is served now.

    `before` and `after` are the dataset's manifests; they are equal if there was nothing to do.
    """
    changed = after != before
    served = after.version
    version = None
    note = ""
    if changed and after.change is not None:
        version = after.change.version
    if version:
        note = describe_unserved_version(after)
    _, datasets = store.log.read_all()
    others = sorted(set(datasets) - {store.name})
    document = {
        "dataset": store.name,
        "action": action,
        "changed": changed,
        "version": version,
        "served": served and served.id,
        "others": others,
        "head": after.head,
        "pin": after.pin and after.pin.model_dump(mode="json"),
        "note": note,
    }
    output.show_json(document)
    what = f"{_DONE[action]} {version}" if changed else f"nothing to do for {action}"
    output.show_line(f"{store.name}: {what}; {_describe_served(after)}.")
    if note:
        output.show_line(f"{note}.")
    elif others and changed:
        output.show_line(
            f"{', '.join(others)} changed with it, as members of the same version set."
        )


def _describe_served(manifest: BoundedManifest) -> str:
    """Say which version is served, and whether it is pinned."""
    served = manifest.version
    pin = manifest.pin
    if served is None:
        text = "no version is served now"
    else:
        text = f"{served.id} ({served.name}) is served now"
    if pin is not None:
        text += ", pinned"
        if pin.expires_at is not None:
            text += f" until {pin.expires_at:%Y-%m-%d %H:%M} UTC"
    return text
