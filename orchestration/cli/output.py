"""Output of the commands: tables for people, one JSON document for programs, one paragraph for
errors.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagster_adjunct.resources.errors import ConditionsNotMetError
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.spark.tasks import find_adjunct_error

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.reports import AdvanceReport

_ID = re.compile(r"v(\d{6,})-([0-9a-f]{8,})")
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d)(:\d\d)?(\.\d+)?(Z|\+00:00)")
# A time (UTC) within a text. Only zero seconds are cut off it, so that it stays exact.
_TIME_IN_TEXT = re.compile(
    r"(\d{4}-\d\d-\d\dT\d\d:\d\d(?:(?!:00\+00:00):\d\d(?:\.\d+)?)?)(?::00)?\+00:00"
)
# Columns that hold sentences: they are printed below the table if they do not fit into it.
SENTENCE_COLUMNS = ("what happens", "error", "message", "why", "reason", "by")


def shorten_cells(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the rows with shorter cells: times to the minute, version ids with as few digits as
    tell them apart.
    """
    ids = {cell for row in rows for cell in row if isinstance(cell, str) and _ID.fullmatch(cell)}
    short = short_ids(ids)

    def shorter(cell: Any) -> Any:
        if isinstance(cell, str):
            return short.get(cell) or format_minutes(cell)
        return format_minutes(cell) if isinstance(cell, datetime) else cell

    return [[shorter(cell) for cell in row] for row in rows]


def short_ids(ids: set[str]) -> dict[str, str]:
    """Return short forms by version id: its number ("v000012"), and as many digits of its suffix
    as tell ids apart.
    """
    short = {}
    for version in ids:
        number, rest = version.split("-")
        others = [
            other.split("-")[1]
            for other in ids
            if other != version and other.startswith(f"{number}-")
        ]
        needed = next(
            (n for n in range(len(rest) + 1) if not any(other[:n] == rest[:n] for other in others)),
            99,
        )
        short[version] = f"{number}-{rest[:needed]}" if needed else number
    return short


def format_minutes(value: str | datetime) -> str:
    """Format a stored time (ISO, UTC) to minutes; other texts stay as they are, with their times
    shortened.
    """
    text = value.isoformat() if isinstance(value, datetime) else value
    time = _TIME.fullmatch(text)
    return f"{time[1]} {time[2]}" if time else _TIME_IN_TEXT.sub(r"\1Z", text)


def format_seconds(value: Any) -> Any:
    """Format a stored time (UTC) to seconds, with its zone; anything else stays as it is."""
    text = value.isoformat() if isinstance(value, datetime) else value
    time = _TIME.fullmatch(text) if isinstance(text, str) else None
    return f"{time[1]} {time[2]}{time[3] or ''} UTC" if time else value


def format_value(value: Any, *, own: bool = False) -> str:
    """Format any value as text: "-" for None, yes and no, thousands separators, lists and mappings
    as words.

    With `own`, the value is user data: numbers and booleans stay as they are, since a whole number
    may be a year.
    """
    if value is None:
        return "-"
    if isinstance(value, bytes):  # in base64, as options take them
        return str(to_json_value(value))
    if own and isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return f"{value:,}"
    if isinstance(value, Mapping):
        apart = (
            "; "
            if any(isinstance(item, Mapping | list | tuple) for item in value.values())
            else ", "
        )
        return apart.join(f"{name}: {format_value(item, own=own)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        if value and all(isinstance(item, Mapping) for item in value):
            return "; ".join(format_value(item, own=own) for item in value)
        return ", ".join(map(str, value))
    return str(value)


def columns_below(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the sentence columns to print below the table, so that the others fit into `width`
    without wrapping.
    """
    moved: list[str] = []
    for name in SENTENCE_COLUMNS:
        if natural_width([c for c in columns if c not in moved], columns, rows) <= width:
            break
        if name in columns[1:] and any(row[columns.index(name)] not in ("", "-") for row in rows):
            moved.append(name)
    return moved


def natural_width(
    shown: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> int:
    """Return the width of a table of these columns if no cell wraps."""
    wide = [max([len(name), *(len(row[columns.index(name)]) for row in rows)]) for name in shown]
    return sum(wide) + 3 * len(shown) + 1


# Prints the output for people. It is quiet with --json, so that commands can print both forms in
# any case.
console = Console()
_errors = Console(stderr=True)

WIDE = "adjunct.wide"
_SHOWN = "adjunct.shown"
_OF_ERROR = "adjunct.of_error"

REJECTED = 3
"""Exit code if a dataset rejected a version and everything else succeeded."""
NOT_FOUND = 6
"""Exit code of a lookup if a key does not exist."""
CONDITIONS_NOT_MET = 5
"""Exit code of a conditional write whose condition does not hold: nothing was written."""


class Commands(click.Group):
    """The root command. With --json it prints errors as JSON too, unless the command already
    printed a document.
    """

    def invoke(self, ctx: click.Context) -> Any:
        console.quiet = False
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if not ctx.meta.get(_SHOWN):
                ours = find_adjunct_error(error)
                problem, next_step = (
                    (ours.problem, ours.next_step) if ours else (_first_lines(error), "")
                )
                facts = {
                    "type": type(ours or error).__name__,
                    "problem": problem,
                    "next_step": next_step,
                }
                show_json({"error": facts, **ctx.meta.get(_OF_ERROR, {})})
            raise
        finally:
            console.quiet = False


def show_with_error(**facts: Any) -> None:
    """Add facts to the JSON document of the error that the running command ends with."""
    click.get_current_context().meta[_OF_ERROR] = facts


def fail_if_rejected(reports: Iterable[AdvanceReport]) -> None:
    """Exit with REJECTED if a dataset rejected a version."""
    if any(report.rejected for report in reports):
        raise click.exceptions.Exit(REJECTED)


def fail_if_missing(answers: Iterable[object]) -> None:
    """Exit with NOT_FOUND if a key that was looked up does not exist."""
    if any(answer is None for answer in answers):
        raise click.exceptions.Exit(NOT_FOUND)


def show_json(value: Any) -> None:
    """Print a value as one JSON document if --json is given."""
    if console.quiet:
        click.get_current_context().meta[_SHOWN] = True
        click.echo(format_json(value).encode())  # JSON is UTF-8, whatever the terminal takes


def format_json(value: Any) -> str:
    """Return a value as an indented JSON document."""
    return json.dumps(to_json_value(value), indent=2, allow_nan=False, ensure_ascii=False)


def show_line(text: str) -> None:
    """Print a line without wrapping it."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_remark(text: str) -> None:
    """Print a line about what is beside the command's work on stderr, unless --json is given."""
    if not console.quiet:
        _errors.print(text, markup=False, highlight=False, soft_wrap=True)


class Report(Protocol):
    """A report of what a command did, or would do."""

    def summary(self) -> str: ...

    def to_json(self) -> dict[str, Any]: ...


def show_report(report: Report, details: Iterable[str] = ()) -> None:
    """Print a report as JSON, or as its summary with details indented below it."""
    show_json(report.to_json())
    show_line(f"{report.summary().removesuffix('.')}.")
    for line in details:
        show_line(f"  {line}")


def show_items(title: str, columns: Sequence[str], items: Sequence[Mapping[str, Any]]) -> None:
    """Print these fields of each item as a table."""
    show_table(title, columns, [[item[column] for column in columns] for item in items])


def show_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], *, own: bool = False
) -> None:
    """Print rows as a table with these columns, numbers aligned right; further cells of a row are
    left out.

    User data (`own`) is printed as it is. Otherwise version ids and times are shortened, and
    sentences that do not fit are printed below the table.
    """
    context = click.get_current_context(silent=True)
    wide = context is not None and bool(context.meta.get(WIDE))
    numeric = [
        bool(rows) and all(isinstance(row[at], int | float) for row in rows)
        for at in range(len(columns))
    ]
    cells = [
        [format_value(cell, own=own) for cell in row]
        for row in (rows if own or wide else shorten_cells(rows))
    ]
    moved = [] if own or wide else columns_below(columns, cells, console.width)
    shown = [at for at, name in enumerate(columns) if name not in moved]
    folds = own or natural_width([columns[at] for at in shown], columns, cells) > console.width
    table = Table()
    for at in shown:
        atom = wide or not folds or (at == 0 and not own)
        table.add_column(
            Text(columns[at]),
            justify="right" if numeric[at] else "left",
            overflow="fold",
            no_wrap=atom,
        )
    for row in cells:
        table.add_row(*[Text(row[at]) for at in shown])
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    if wide:
        width = max(console.width, natural_width(columns, columns, cells))
        Console(width=width, quiet=console.quiet).print(table)
        return
    console.print(table)
    for row in cells:
        texts = {name: row[columns.index(name)] for name in moved}
        sentences = ", ".join(
            f"{name}: {text}" for name, text in texts.items() if text not in ("", "-")
        )
        if sentences:
            show_line(f"{columns[0]} {row[0]}: {sentences}".strip())


def show_facts(title: str, facts: Mapping[str, Any], *, own: bool = False) -> None:
    """Print names and values, one per line, with times to the second; user data (`own`) is
    printed as it is.
    """
    console.print(title, style="italic", markup=False, highlight=False)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(
            name,
            Text(format_value(value, own=True) if own else format_value(format_seconds(value))),
        )
    console.print(table)


def show_record(title: str, record: Mapping[str, Any] | None, missing: str) -> None:
    """Print a record of user data, or `missing` if there is none."""
    show_facts(title, {"": missing} if record is None else record, own=record is not None)


def run_command(command: Callable[[], Any]) -> int:
    """Run a command and return its exit code; print errors on stderr, with a traceback if
    ADJUNCT_DEBUG is set.
    """
    try:
        ended = command()
        return (
            ended if isinstance(ended, int) else 0
        )  # with standalone_mode=False, click returns exit codes
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _errors.print(
            "Stopped. Committed results are kept; run the same command again to continue."
        )
        return 130
    except Exception as error:  # noqa: BLE001 - users must not see a bare traceback
        if os.environ.get("ADJUNCT_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        ours = find_adjunct_error(error)
        if ours is None:
            _errors.print(
                Text.assemble((type(error).__name__, "bold red"), f": {_first_lines(error)}")
            )
            _errors.print("This error is unexpected; set ADJUNCT_DEBUG=1 for the traceback.")
            return 2
        place = ours.facts.get("declared_at")
        problem = f"{place}: {ours.problem}" if place else ours.problem
        _errors.print(Text.assemble((type(ours).__name__, "bold red"), f": {problem}"))
        for text in filter(None, [ours.next_step, *getattr(ours, "__notes__", ())]):
            _errors.print(text, markup=False, highlight=False)
        return CONDITIONS_NOT_MET if isinstance(ours, ConditionsNotMetError) else 1


def _first_lines(error: BaseException) -> str:
    return "\n".join(str(error).strip().splitlines()[:5])
