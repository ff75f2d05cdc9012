"""`adjunct kvt get`, `put`, `remove` and `iterate`: the entries of a key-value table."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Any

import click

from dagster_adjunct.orchestration.cli.kvt_options import (
    cell,
    failures_shown,
    family_option,
    opened,
    shown,
    shown_entry,
    table_name,
    typed,
    typed_entries,
    version_from,
)
from dagster_adjunct.orchestration.cli.output import (
    as_json,
    fail_if_missing,
    lake_url,
    show_json,
    show_line,
    show_table,
)
from dagster_adjunct.resources.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dagster_adjunct.resources.key_value.iterator_state import IteratorState
    from dagster_adjunct.resources.key_value.table_pages import IteratorPage

_PAGE = 100


@click.command()
@table_name
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@family_option
@typed_entries
@lake_url
@as_json
def get(
    table: str,
    keys: tuple[str, ...],
    family: str | None,
    key_type: str,
    value_type: str,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Look entries up by their keys, with their versions. The exit code is 6 where one of them is not there."""
    wanted = [typed(key_type, key, "key") for key in keys]
    with opened(lake_url, table, key_type, value_type) as reading:
        read = reading.get_all(wanted, family=family)
    entries = [None if one is None else shown_entry(one.key, one, key_type, value_type) for one in read]
    if json_output:
        show_json({"table": table, "family": family, "entries": entries})
    else:
        rows = [
            [key, "", "no entry"] if one is None else [key, cell(value_type, one["value"]), one["version"]]
            for key, one in zip(keys, entries, strict=True)
        ]
        show_table(_title(table, family), ["key", "value", "version"], rows, own=True)
    fail_if_missing(entries)


@click.command()
@table_name
@click.argument("key", metavar="KEY")
@click.argument("value", metavar="VALUE")
@family_option
@click.option("--if-absent", is_flag=True, help="Only where the key is not there.")
@click.option("--version", metavar="VERSION", help="Only where the key has this version.")
@typed_entries
@lake_url
@as_json
def put(
    table: str,
    key: str,
    value: str,
    family: str | None,
    if_absent: bool,
    version: str | None,
    key_type: str,
    value_type: str,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Write an entry, and print its new version."""
    if if_absent and version is not None:
        raise ConfigurationError(
            "--if-absent and --version can't both hold.", "Give one of them.", setting="--if-absent"
        )
    name, content = typed(key_type, key, "key"), typed(value_type, value, "value")
    with opened(lake_url, table, key_type, value_type) as writing, failures_shown(key_type):
        if version is not None:
            written = writing.replace(name, content, version_from(version), family=family)
        elif if_absent:
            written = writing.put_if_absent(name, content, family=family)
        else:
            written = writing.put(name, content, family=family)
    if json_output:
        show_json({"table": table, "family": family, "key": shown(key_type, name), "version": str(written)})
    else:
        show_line(f"{key} has version {written}.")


@click.command()
@table_name
@click.argument("keys", metavar="KEY...", nargs=-1, required=True)
@family_option
@click.option("--version", metavar="VERSION", help="Only where the key has this version.")
@typed_entries
@lake_url
@as_json
def remove(
    table: str,
    keys: tuple[str, ...],
    family: str | None,
    version: str | None,
    key_type: str,
    value_type: str,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Remove entries: whatever is there, or one that has a version. Several of one family go together."""
    if len(keys) > 1 and (version is not None or family is None):
        raise ConfigurationError(
            f"{len(keys)} keys with {'--version' if version is not None else 'no --family'}: expected one key.",
            "Keys of one family, given by --family, are removed together; a version belongs to one key.",
            setting="--family" if version is None else "--version",
        )
    wanted = [typed(key_type, key, "key") for key in keys]
    with opened(lake_url, table, key_type, value_type) as writing, failures_shown(key_type):
        if len(wanted) > 1 and family is not None:
            writing.remove_all(wanted, family=family)
        else:
            writing.remove(wanted[0], version=None if version is None else version_from(version), family=family)
    if json_output:
        show_json({"table": table, "family": family, "removed": [shown(key_type, key) for key in wanted]})
    else:
        show_line(f"{', '.join(keys)} {'is' if len(keys) == 1 else 'are'} not there any more.")


@click.command()
@table_name
@click.option("--family", metavar="FAMILY", help="The entries of this family, by key. Default: all of the table.")
@click.option(
    "--prefix",
    metavar="TEXT",
    help="With --family: keys that begin so (of text; of JSON as it is stored; of bytes in base64).",
)
@click.option("--start", metavar="KEY", help="With --family: from this key on.")
@click.option("--end", metavar="KEY", help="With --family: up to this key, which is not in it.")
@click.option("--keys-only", is_flag=True, help="Without values.")
@click.option("--page-size", type=click.IntRange(1), default=_PAGE, show_default=True, help="How many at most.")
@click.option("--state", metavar="STATE", help="Go on where the page ended that printed this.")
@click.option("--all", "whole", is_flag=True, help="All pages to the end.")
@typed_entries
@lake_url
@as_json
def iterate(
    table: str,
    family: str | None,
    prefix: str | None,
    start: str | None,
    end: str | None,
    keys_only: bool,
    page_size: int,
    state: str | None,
    whole: bool,
    key_type: str,
    value_type: str,
    lake_url: str | None,
    json_output: bool,
) -> None:
    """Print a page of entries, and the state from which the same command goes on."""
    within: dict[str, Any] = {
        "prefix": prefix.encode() if prefix and key_type == "json" else prefix and typed(key_type, prefix, "--prefix"),
        "start": None if start is None else typed(key_type, start, "--start"),
        "end": None if end is None else typed(key_type, end, "--end"),
    }
    bounds = [f"--{name}" for name, bound in within.items() if bound is not None]
    if family is None and bounds:
        raise ConfigurationError(
            f"{bounds[0]} is given without --family: only the keys of a family are in order.",
            "Add --family.",
            setting=bounds[0],
        )
    behind = None if state is None else _state(state)
    entries: list[dict[str, Any]] = []
    at, ended = None, False
    with opened(lake_url, table, key_type, value_type) as reading:

        def pages(most: int) -> Iterator[IteratorPage[Any]]:
            if family is None:
                return (reading.all_keys if keys_only else reading.all_entries)(page_size=most, state=behind)
            return (reading.keys if keys_only else reading.entries)(family, **within, page_size=most, state=behind)

        # A page of a table ends with its partition. What is shown does not: most partitions may hold next to nothing.
        while not ended and (whole or len(entries) < page_size):
            page = next(pages(page_size if whole else page_size - len(entries)), None)
            ended = page is None
            if page is not None:
                behind = page.state
                at = base64.urlsafe_b64encode(behind.to_bytes()).decode()
                entries += [
                    shown_entry(item, None, key_type, value_type)
                    if keys_only
                    else shown_entry(item.key, item, key_type, value_type)
                    for item in page.items
                ]
    if json_output:
        show_json({"table": table, "entries": entries, "state": at})
        return
    if entries:
        _show(_title(table, family), entries, keys_only, key_type, value_type)
    if not entries:
        show_line("There is nothing there." if state is None else "There is nothing more.")
    elif ended:
        show_line("That is all.")
    else:
        show_line(f"Go on with --state {at}")


def _show(title: str, entries: Sequence[dict[str, Any]], keys_only: bool, key_type: str, value_type: str) -> None:
    columns = ["family", "key", *(() if keys_only else ("value",)), "version"]
    rows = [
        [
            "" if one["family"] is None else one["family"],
            cell(key_type, one["key"]),
            *(() if keys_only else (cell(value_type, one["value"]),)),
            one["version"],
        ]
        for one in entries
    ]
    show_table(title, columns, rows, own=True)


def _title(table: str, family: str | None) -> str:
    return f"key-value table {table}" + ("" if family is None else f", family {family}")


def _state(text: str) -> IteratorState:
    from dagster_adjunct.resources.key_value.iterator_state import IteratorState

    try:
        return IteratorState.from_bytes(base64.b64decode(text, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error) as error:
        raise ConfigurationError(
            f"--state {text!r:.80} is no state: {error}.", "Give what iterate has printed.", setting="--state"
        ) from error
