"""What the commands print: tables for people, one JSON document for programs, one paragraph for errors."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from resources.errors import AdjunctError

if TYPE_CHECKING:
    from assets import AdvanceReport

console = Console()
_errors = Console(stderr=True)

as_json = click.option("--json", "json_output", is_flag=True, help="Print one JSON document.")
lake_url = click.option(
    "--lake",
    "lake_url",
    metavar="URL",
    help="The lake: s3://bucket/prefix or a folder. Default: ADJUNCT_LAKE, else .adjunct/lake.",
)


REJECTED = 3
"""The exit code of a command that has refused a version: what was served stays, and nothing else is wrong."""


def fail_if_rejected(reports: Iterable[AdvanceReport]) -> None:
    """End the command with an exit code of its own where a dataset has refused a version."""
    if any(report.rejected for report in reports):
        raise click.exceptions.Exit(REJECTED)


def show_json(value: Any) -> None:
    """Print a value as one JSON document; times as ISO text, decimals as text, bytes as hex."""
    click.echo(json.dumps(value, indent=2, default=_jsonable, ensure_ascii=False))


def show_line(text: str) -> None:
    """Print a line as it is, however wide the terminal."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows as a table; numbers align right."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(columns):
        numeric = bool(rows) and all(isinstance(row[index], int | float) for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*[_cell(value) for value in row])
    console.print(table)


def show_facts(title: str, facts: Mapping[str, Any]) -> None:
    """Print names and values, one a line."""
    console.print(title, style="italic", markup=False, highlight=False)
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _cell(value))
    console.print(table)


def show_record(title: str, record: Mapping[str, Any] | None, missing: str) -> None:
    """Print a user's own values as they are: a whole number may be a year, so it gets no thousands separators."""
    if record is None:
        show_facts(title, {"": missing})
        return
    show_facts(title, {name: str(v) if isinstance(v, int | float) else v for name, v in record.items()})


def guarded(command: Callable[[], Any]) -> int:
    """Run a command; return its exit code, with every error as a readable sentence on stderr.

    With ADJUNCT_DEBUG set the traceback follows.
    """
    try:
        ended = command()
        return ended if isinstance(ended, int) else 0  # click returns the code of an Exit, outside its standalone mode
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        _errors.print("Stopped. What was committed stays; the same command goes on from there.")
        return 130
    except Exception as error:  # noqa: BLE001 - the last line of defence: nothing bare reaches the user
        ours = error if isinstance(error, AdjunctError) else _inside(error)
        if ours is not None:
            _errors.print(f"[bold red]{type(ours).__name__}[/]: ", end="")
            _errors.print(ours.problem, markup=False, highlight=False)
            if ours.next_step:
                _errors.print(ours.next_step, markup=False, highlight=False)
            for note in getattr(ours, "__notes__", ()):
                _errors.print(note, markup=False, highlight=False)
            return _failed(1)
        _errors.print(f"[bold red]{type(error).__name__}[/]: ", end="")
        _errors.print(_first_lines(error), markup=False, highlight=False)
        _errors.print("This is not an error that Adjunct expected; set ADJUNCT_DEBUG=1 for the traceback.")
        return _failed(2)


def _failed(code: int) -> int:
    if os.environ.get("ADJUNCT_DEBUG"):
        traceback.print_exc(file=sys.stderr)
    return code


def _inside(error: Exception) -> AdjunctError | None:
    """Return the error of ours that a Spark task raised and Spark reports in its own words."""
    from resources.spark_errors import adjunct_error

    return adjunct_error(error)


def _first_lines(error: BaseException) -> str:
    return "\n".join(str(error).strip().splitlines()[:5])


def _cell(value: Any) -> Text:
    """Return a value as a cell: what people have written is text, never markup."""
    return Text(_shown(value))


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.2f}"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _jsonable(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"{type(value).__name__} has no JSON form")
