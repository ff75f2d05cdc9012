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
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, Protocol

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dagster_adjunct.resources.errors import ConditionsNotMetError
from dagster_adjunct.resources.reports import format_nested, to_json_value
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
_NOTHING = {"", "-"}
_SHORTEST_PATH = 20


def shorten_cells(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the rows with shorter cells: times to the minute, version ids with as few digits as
    tell them apart.
    """
    texts = [cell for cell in chain(*rows) if isinstance(cell, str)]
    short = short_ids(set(filter(_ID.fullmatch, texts)))

    def shorten(cell: Any) -> Any:
        if isinstance(cell, datetime):
            return format_minutes(cell)
        if isinstance(cell, str):
            return short.get(cell) or format_minutes(cell)
        return cell

    return [list(map(shorten, row)) for row in rows]


def short_ids(ids: set[str]) -> dict[str, str]:
    """Return short forms by version id: its number ("v000012"), and as many digits of its suffix
    as tell ids apart.
    """
    suffixes: dict[str, list[str]] = {}
    for version in ids:
        number, suffix = version.split("-")
        suffixes.setdefault(number, []).append(suffix)
    short = {}
    for number, alike in suffixes.items():
        for suffix in alike:
            others = [other for other in alike if other != suffix]
            needed = 0
            while any(other[:needed] == suffix[:needed] for other in others):
                needed += 1
            short[f"{number}-{suffix}"] = f"{number}-{suffix[:needed]}".rstrip("-")
    return short


def format_minutes(value: str | datetime) -> str:
    """Format a stored time (ISO, UTC) to minutes; other texts stay as they are, with their times
    shortened.
    """
    text = value.isoformat() if isinstance(value, datetime) else value
    time = _TIME.fullmatch(text)
    if time is None:
        return _TIME_IN_TEXT.sub(r"\1Z", text)
    return f"{time[1]} {time[2]}"


def format_seconds(value: Any) -> Any:
    """Format a stored time (UTC) to seconds, with its zone; anything else stays as it is."""
    text = value.isoformat() if isinstance(value, datetime) else value
    if isinstance(text, str):
        time = _TIME.fullmatch(text)
        if time is not None:
            return f"{time[1]} {time[2]}{time[3] or ''} UTC"
    return value


def format_value(value: Any, *, own: bool = False) -> str:
    """Format any value as text: "-" for None, yes and no, thousands separators, lists and mappings
    as words.

    With `own`, the value is user data: numbers and booleans stay as they are, since a whole number
    may be a year, and lists and mappings are JSON.
    """
    if value is None:
        return "-"
    if isinstance(value, bytes):  # in base64, as options take them
        return str(to_json_value(value))
    if isinstance(value, bool | int | float) and not own:
        return _format_number(value)
    if own and isinstance(value, Mapping | list | tuple):
        return format_nested(value)
    if isinstance(value, Mapping):
        return _format_mapping(value)
    if not isinstance(value, list | tuple):
        return str(value)
    if all(isinstance(item, Mapping) for item in value):
        return "; ".join(map(format_value, value))
    return ", ".join(map(str, value))


def _format_mapping(value: Mapping[Any, Any]) -> str:
    """Format a mapping as "name: value" for each item."""
    separator = ", "
    parts = []
    for name, item in value.items():
        parts.append(f"{name}: {format_value(item)}")
        if isinstance(item, Mapping | list | tuple):
            separator = "; "
    return separator.join(parts)


def _format_number(value: bool | float) -> str:
    """Format a number with thousands separators, a boolean as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}"


def columns_below(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return the sentence columns to print below the table, as many as it takes for the others to
    fit into `width` without wrapping.

    The first column, which names the row, and empty columns stay in the table.
    """
    moved: list[str] = []
    left = list(columns)
    for name in SENTENCE_COLUMNS:
        if natural_width(left, columns, rows) <= width:
            break
        if name not in columns[1:]:
            continue
        cells = set(map(itemgetter(columns.index(name)), rows))
        is_empty = cells <= _NOTHING
        if not is_empty:
            moved.append(name)
            left.remove(name)
    return moved


def natural_width(
    shown: Sequence[str], columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> int:
    """Return the width of a table of the columns `shown` if no cell wraps; `rows` have the cells of
    all `columns`.
    """
    total = 1
    for name in shown:
        cells = map(itemgetter(columns.index(name)), rows)
        total += 3 + max(map(len, (name, *cells)))
    return total


# Prints the output for people. It is quiet with --json, so that commands can print both forms in
# any case.
console = Console()
_error_console = Console(stderr=True)

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
        """Run the command; with --json, an error is printed as JSON too before it is raised."""
        console.quiet = False
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if not ctx.meta.get(_SHOWN):
                show_json({"error": _list_facts(error), **ctx.meta.get(_OF_ERROR, {})})
            raise
        finally:
            console.quiet = False


def _list_facts(error: Exception) -> dict[str, str]:
    """Return what the JSON document of an error says about it."""
    ours = find_adjunct_error(error)
    if ours is None:
        return {"type": type(error).__name__, "problem": _first_lines(error), "next_step": ""}
    return {"type": type(ours).__name__, "problem": ours.problem, "next_step": ours.next_step}


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


def show_json_of(reports: Iterable[Report]) -> None:
    """Print reports as one JSON document if --json is given."""
    show_json([report.to_json() for report in reports])


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
        _error_console.print(text, markup=False, highlight=False, soft_wrap=True)


class Report(Protocol):
    """A report of what a command did, or would do."""

    def summary(self) -> str:
        """Return a sentence about what was done."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""


def show_report(report: Report, details: Iterable[str] = ()) -> None:
    """Print a report as JSON, or as its summary with details indented below it."""
    show_json(report.to_json())
    show_line(f"{report.summary().removesuffix('.')}.")
    for line in details:
        show_line(f"  {line}")


def show_items(
    title: str,
    columns: Sequence[str],
    items: Sequence[Mapping[str, Any]],
    *,
    path: str | None = None,
) -> None:
    """Print these fields of each item as a table."""
    rows = [[item[column] for column in columns] for item in items]
    show_table(title, columns, rows, path=path)


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    own: bool = False,
    path: str | None = None,
) -> None:
    """Print rows as a table with these columns, numbers aligned right; further cells of a row are
    left out.

    User data (`own`) is printed as it is: with nested values that do not fit, a block of lines for
    each row. Otherwise version ids and times are shortened, sentences that do not fit are printed
    below the table, and the values of the column `path` lose their middle if they do not fit.
    """
    wide = _is_wide()
    below: list[str] = []
    if own or wide:
        cells = _format_cells(rows, own=own)
        path = None
    else:
        cells = _format_cells(shorten_cells(rows))
        below = columns_below(columns, cells, console.width)
    shown = [at for at, name in enumerate(columns) if name not in below]
    with_whole_paths = cells
    cells = _shorten_paths(columns, cells, path, [columns[at] for at in shown])
    width = natural_width([columns[at] for at in shown], columns, cells)
    if _needs_blocks(rows, width, own=own):
        _show_blocks(title, columns, rows)
        return
    table = Table()
    is_whole = wide or (width <= console.width and not own)
    for at in shown:
        _add_column(table, columns[at], rows, at, no_wrap=is_whole or (at == 0 and not own))
    _add_rows(table, cells, shown)
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    if wide:
        Console(width=max(console.width, width), quiet=console.quiet).print(table)
        return
    console.print(table)
    _show_sentences(columns, below, with_whole_paths)


def _needs_blocks(rows: Iterable[Sequence[Any]], width: int, *, own: bool) -> bool:
    """Whether a cell of user data is a list or a mapping, and the table of this width does not
    fit.
    """
    if not own or _is_wide() or width <= console.width:
        return False
    return any(isinstance(cell, Mapping | list | tuple) for row in rows for cell in row)


def _show_blocks(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print each row of user data as a block with a line for each column, and for each element of
    an array that does not fit into one.
    """
    console.print(title, style="italic", markup=False, highlight=False, soft_wrap=True)
    room = console.width - max(map(len, columns)) - 7  # what the borders leave to values
    for row in rows:
        table = Table(show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold", ratio=1)
        for name, cell in zip(columns, row, strict=False):
            text = format_value(cell, own=True)
            if isinstance(cell, list | tuple) and len(text) > room:
                elements = [format_nested([element])[1:-1] for element in cell]
                text = "[" + ",\n ".join(elements) + "]"
            table.add_row(Text(name), Text(text))
        console.print(table)


def _shorten_paths(
    columns: Sequence[str], cells: list[list[str]], path: str | None, shown: Sequence[str]
) -> list[list[str]]:
    """Return the cells with the values of the column `path`, if any, shortened so that the table of
    the columns `shown` fits, if it can.
    """
    if path is None:
        return cells
    others = [name for name in shown if name != path]
    room = max(console.width - natural_width(others, columns, cells) - 3, _SHORTEST_PATH)
    at = columns.index(path)
    return [[*row[:at], shorten_middle(row[at], room), *row[at + 1 :]] for row in cells]


def shorten_middle(text: str, length: int) -> str:
    """Return a text of at most this length: of a longer one the begin, and more of the end."""
    if len(text) <= length:
        return text
    head = (length - 1) // 3
    return f"{text[:head]}…{text[head + 1 - length :]}"


def _is_wide() -> bool:
    """Whether the running command has the option --wide."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(WIDE))


def _format_cells(rows: Sequence[Sequence[Any]], *, own: bool = False) -> list[list[str]]:
    """Return all cells as texts."""
    return [[format_value(cell, own=own) for cell in row] for row in rows]


def _show_sentences(
    columns: Sequence[str], below: Sequence[str], cells: Sequence[Sequence[str]]
) -> None:
    """Print the cells of the columns `below` a table, a line for each row."""
    for row in cells:
        sentences = []
        for name in below:
            text = row[columns.index(name)]
            if text not in _NOTHING:
                sentences.append(f"{name}: {text}")
        if sentences:
            show_line(f"{columns[0]} {row[0]}: {', '.join(sentences)}".strip())


def _add_rows(table: Table, cells: Iterable[Sequence[str]], shown: Sequence[int]) -> None:
    """Add the shown cells of each row to a table."""
    for row in cells:
        table.add_row(*[Text(row[at]) for at in shown])


def _add_column(
    table: Table, name: str, rows: Sequence[Sequence[Any]], at: int, *, no_wrap: bool
) -> None:
    """Add the column for the cells `at` of the rows to a table."""
    justify = _justify(rows, at)
    table.add_column(Text(name), justify=justify, overflow="fold", no_wrap=no_wrap)


def _justify(rows: Sequence[Sequence[Any]], at: int) -> Literal["left", "right"]:
    """Return "right" for a column that has nothing but numbers, where it has anything."""
    given = [row[at] for row in rows if row[at] is not None]
    if given and all(isinstance(cell, int | float) for cell in given):
        return "right"
    return "left"


def show_facts(title: str, facts: Mapping[str, Any], *, own: bool = False) -> None:
    """Print names and values, one per line, with times to the second; user data (`own`) is
    printed as it is.
    """
    console.print(title, style="italic", markup=False, highlight=False)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        shown = value if own else format_seconds(value)
        table.add_row(name, Text(format_value(shown, own=own)))
    console.print(table)


def show_schema(fields: Iterable[Mapping[str, Any]]) -> None:
    """Print the columns of a schema (`Schema.to_json`) with their types."""
    rows = [[field["name"], field["type"]] for field in fields]
    show_table("schema", ["column", "type"], rows)


def drop_empty(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that have a value."""
    return {name: value for name, value in facts.items() if value not in ({}, [], "", None)}


def show_record(title: str, record: Mapping[str, Any] | None, missing: str) -> None:
    """Print a record of user data, or `missing` if there is none."""
    show_facts(title, {"": missing} if record is None else record, own=record is not None)


def run_command(command: Callable[[], Any]) -> int:
    """Run a command and return its exit code; print errors on stderr, with a traceback if
    ADJUNCT_DEBUG is set.
    """
    try:
        ended = command()
        # With standalone_mode=False, click returns exit codes.
        return ended if isinstance(ended, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _error_console.print(
            "Stopped. Committed results are kept; run the same command again to continue."
        )
        return 130
    except Exception as error:  # noqa: BLE001 - users must not see a bare traceback
        if os.environ.get("ADJUNCT_DEBUG"):
            traceback.print_exc(file=sys.stderr)
        return _show_error(error)


def _show_error(error: Exception) -> int:
    """Print an error on stderr, and return the exit code: 2 for one that is not Adjunct's, and
    CONDITIONS_NOT_MET or 1 for others.
    """
    ours = find_adjunct_error(error)
    if ours is None:
        _show_problem(error, _first_lines(error))
        _error_console.print("This error is unexpected; set ADJUNCT_DEBUG=1 for the traceback.")
        return 2
    place = ours.facts.get("declared_at")
    problem = f"{place}: {ours.problem}" if place else ours.problem
    _show_problem(ours, problem)
    for text in filter(None, [ours.next_step, *getattr(ours, "__notes__", ())]):
        _error_console.print(text, markup=False, highlight=False)
    return CONDITIONS_NOT_MET if isinstance(ours, ConditionsNotMetError) else 1


def _show_problem(error: Exception, problem: str) -> None:
    """Print the type of an error and its problem on stderr."""
    _error_console.print(Text.assemble((type(error).__name__, "bold red"), f": {problem}"))


def _first_lines(error: BaseException) -> str:
    """Return the first few lines of an error's message."""
    return "\n".join(str(error).strip().splitlines()[:5])
