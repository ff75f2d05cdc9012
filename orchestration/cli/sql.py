"""`adjunct sql`: query datasets and streams by DuckDB, and print the result or write it to a
file.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from dagster_adjunct.assets.exchange.sql import query_lake
from dagster_adjunct.orchestration.cli import output
from dagster_adjunct.orchestration.cli.options import lake_options
from dagster_adjunct.orchestration.cli.streams import check_export_target, export_records
from dagster_adjunct.resources.errors import ConfigurationError, translate_file_errors
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import to_json_value
from dagster_adjunct.resources.schemas.values import python_rows

if TYPE_CHECKING:
    from dagster_adjunct.resources.lazy_modules import pa as arrow

FORMATS = ("table", "json", "csv", "parquet")
ROWS_OF_A_TABLE = 100


@click.command()
@click.argument("query")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), help="Default: a table; with --json: json."
)
@click.option(
    "--output",
    "target",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write to this new file instead.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, sys.maxsize),
    help=f"Show at most this many rows. Default: {ROWS_OF_A_TABLE} in a table, else all.",
)
@lake_options()
def sql(lake: Lake, query: str, form: str | None, target: Path | None, limit: int | None) -> None:
    """Run one query over the lake; it reads only the datasets and streams that it names, and
    changes nothing.

    Names are those of datasets (planes), of versions ("planes@v2") and of streams ("lake.flights");
    QUERY - reads it from the standard input. Values of sensitive columns are masked. Needs the
    extra duckdb.
    """
    if form is None:
        form = "json" if output.console.quiet else "table"
    _check_output(form, target)
    text = sys.stdin.read() if query == "-" else query
    with query_lake(lake, text) as reader:
        if form == "table":
            _show_table(reader, limit or ROWS_OF_A_TABLE)
            return
        rows = _write(form, target, reader.schema, _limited(reader, limit))
    if target is not None:
        output.show_line(f"{rows:,} rows written to {target}.")


def _check_output(form: str, target: Path | None) -> None:
    """Raise ConfigurationError for a format that needs a file, or a table that has one."""
    if form == "parquet":
        if target is None:
            raise ConfigurationError(
                "--format parquet needs a file.", "Give --output FILE.parquet.", setting="--output"
            )
        check_export_target(target, None)
    elif form == "table" and target is not None:
        step = "Give --format csv, json or parquet with it."
        raise ConfigurationError(
            "--output is for files, not for a table.", step, setting="--output"
        )


def _write(
    form: str, target: Path | None, schema: arrow.Schema, tables: Iterator[arrow.Table]
) -> int:
    """Write tables to a new file, or the standard output, and return the number of rows."""
    if form == "parquet" and target is not None:
        return export_records(tables, target).records
    with _opened(target) as file:
        if form == "json":
            return _write_json(file, tables)
        return _write_csv(file, schema, tables)


def _limited(reader: arrow.RecordBatchReader, limit: int | None) -> Iterator[arrow.Table]:
    """Yield the result in tables, of at most `limit` rows together, and at least an empty one."""
    left = sys.maxsize if limit is None else limit
    yield reader.schema.empty_table()
    for batch in reader:
        if left <= 0:
            return
        table = pa.Table.from_batches([batch]).slice(0, left)
        left -= table.num_rows
        yield table


def _show_table(reader: arrow.RecordBatchReader, limit: int) -> None:
    """Print the first rows of a result as a table."""
    rows: list[dict[str, Any]] = []
    for table in _limited(reader, limit + 1):
        rows += _rows_of(table)
    shown = [list(row.values()) for row in rows[:limit]]
    if len(rows) > limit:
        title = f"the first {limit:,} rows; there are more (--limit)"
    elif len(shown) == 1:
        title = "1 row"
    else:
        title = f"{len(shown):,} rows"
    output.show_table(title, list(reader.schema.names), shown, own=True)


def _rows_of(table: arrow.Table) -> list[dict[str, Any]]:
    """Return rows by name, also where two columns have the same one."""
    seen: Counter[str] = Counter()
    names = []
    for name in table.schema.names:
        names.append(f"{name}_{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return python_rows(table.rename_columns(names))


def _write_json(file: TextIO, tables: Iterator[arrow.Table]) -> int:
    """Write a list of objects, one a line."""
    count = 0
    file.write("[")
    for table in tables:
        for row in _rows_of(table):
            document = json.dumps(to_json_value(row), allow_nan=False, ensure_ascii=False)
            file.write(f"{',' if count else ''}\n  {document}")
            count += 1
    file.write("\n]\n")
    return count


def _write_csv(file: TextIO, schema: arrow.Schema, tables: Iterator[arrow.Table]) -> int:
    """Write RFC 4180 as `adjunct stream append` reads it: null is an empty field, an empty text
    is quoted.
    """
    from pyarrow import csv

    nested = [field.name for field in schema if pa.types.is_nested(field.type)]
    if nested:
        problem = f"column {nested[0]!r} has arrays, structs or maps, which CSV does not hold."
        raise ConfigurationError(problem, "Give --format json or parquet.", setting="--format")

    def write(table: arrow.Table, *, with_header: bool) -> None:
        sink = pa.BufferOutputStream()
        options = csv.WriteOptions(include_header=with_header, quoting_style="needed")
        csv.write_csv(table, sink, options)
        file.write(sink.getvalue().to_pybytes().decode())

    write(schema.empty_table(), with_header=True)
    count = 0
    for table in tables:
        write(table, with_header=False)
        count += table.num_rows
    return count


@contextmanager
def _opened(target: Path | None) -> Iterator[TextIO]:
    """Open a new file, which is removed if writing fails; without one, the standard output."""
    if target is None:
        yield sys.stdout
        return
    with translate_file_errors(target, f"--output {target}"):
        file = target.open("x", encoding="utf-8", newline="")
    try:
        with file:
            yield file
    except BaseException:
        target.unlink(missing_ok=True)
        raise
