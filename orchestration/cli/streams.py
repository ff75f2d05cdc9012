"""`adjunct stream …`: list, show, create, export, append files to, maintain, repartition and delete
streams of the lake, and change their columns.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import click

from dagster_adjunct.assets.exchange.file_appends import append_files
from dagster_adjunct.orchestration.cli import file_streams
from dagster_adjunct.orchestration.cli.options import (
    confirm_at_terminal,
    deletion_command,
    flag,
    lake_option,
    lake_options,
    name_argument,
    option,
    repartition_command,
    yes_option,
)
from dagster_adjunct.orchestration.cli.output import (
    show_facts,
    show_items,
    show_json,
    show_line,
    show_schema,
)
from dagster_adjunct.orchestration.maintenance.delete import delete_stream
from dagster_adjunct.orchestration.maintenance.repartition import (
    RepartitionReport,
    repartition_stream,
)
from dagster_adjunct.resources.errors import ConfigurationError, translate_file_errors
from dagster_adjunct.resources.file_streams.overview import find_file_stream, is_of_files
from dagster_adjunct.resources.lazy_modules import pa, pq
from dagster_adjunct.resources.names import unqualify_stream_name
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.streams.lake import readers
from dagster_adjunct.resources.streams.lake.streams import LakeStreams
from dagster_adjunct.resources.streams.system import LAKE

stream = click.Group("stream")


@stream.command("list")
@lake_options()
def list_streams(lake: Lake) -> None:
    """List the streams with their partitions and records, also those of files."""
    streams = LakeStreams(lake)
    descriptions = list(map(streams.describe, streams.list_streams()))
    of_files = file_streams.list_summaries(lake)
    show_json([*descriptions, *of_files])
    columns = ["name", "partitions", "key", "records", "bytes", "segments"]
    if descriptions or not of_files:
        show_items("streams", columns, descriptions)
    if of_files:
        columns = ["name", "partitions", "key", "records", "files"]
        show_items("streams of files", columns, of_files)


@stream.command("show")
@name_argument
@lake_options()
def show_stream(lake: Lake, name: str) -> None:
    """Show a stream's schema, partitions, offsets, markers, policies and named readers.

    Of a stream of files (files.clicks), show its declaration, how many files were admitted and set
    aside, and which wait, and why.
    """
    of_files = find_file_stream(lake, name)
    if of_files is not None:
        file_streams.show(*of_files)
        return
    facts = LakeStreams(lake).describe(_lake_stream(name))
    named = list(map(asdict, readers.list_readers(lake, _lake_stream(name))))
    show_json({**facts, "readers": named})
    schema = facts.pop("schema")
    show_facts(f"stream {name}", facts)
    show_schema(schema)
    if named:
        show_items("readers", ["name", "behind", "lost", "committed_at", "problem"], named)


@stream.command()
@name_argument
@option("--schema", "DDL", "The columns, such as 'user string, at timestamp'.")
@click.option("--key", multiple=True, help="A column by which records are partitioned. Repeatable.")
@click.option(
    "--partitions", type=click.IntRange(1), help="Default: 1. Without --key there is one."
)
@option("--timestamp", "COLUMN", "The column with a record's time; default: when it is appended.")
@lake_option(create=True)
def create(
    lake: Lake,
    name: str,
    schema: str | None,
    key: tuple[str, ...],
    partitions: int | None,
    timestamp: str | None,
) -> None:
    """Create a stream of the lake, or add columns to one that exists.

    `adjunct schema infer FILES` shows the columns of a sample.
    """
    if schema is None:
        step = "Give --schema 'user string, at timestamp'; adjunct schema infer FILES shows it."
        raise ConfigurationError(f"stream {name} has no columns.", step, setting="--schema")
    info = LakeStreams(lake).create(
        _lake_stream(name),
        schema=Schema.from_ddl(schema, f"stream '{name}'"),
        key=key,
        partitions=partitions or 1,
        timestamp=timestamp,
    )
    count = "1 partition" if info.partitions == 1 else f"{info.partitions} partitions"
    show_line(f"Stream lake.{info.name} is there, with {count}.")


@stream.command()
@name_argument
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Path(path_type=Path),
    help="A new .parquet file, or a new folder.",
)
@click.option(
    "--records-per-file",
    type=click.IntRange(1, sys.maxsize),
    metavar="N",
    help="Write a folder of files with at most N records each.",
)
@click.option(
    "--epochs",
    type=click.Choice(["all", "latest"]),
    default="all",
    show_default=True,
    help="All records, or only the latest results of each source record.",
)
@flag("--positions", "Add the source position of each record.")
@flag(
    "--keep-without-position",
    "With --epochs latest: include records without a source position, which are an error"
    " otherwise.",
)
@lake_option()
def export(
    lake: Lake,
    name: str,
    target: Path,
    records_per_file: int | None,
    keep_without_position: bool,
    **options: Any,
) -> None:
    """Write a stream's records to a new Parquet file, or a folder of them.

    Records are ordered by partition and offset, and have the columns __partition, __offset,
    __timestamp, __tombstone and __epoch. Memory use does not grow with the stream. The file or
    folder appears only once it is complete; until then its name begins with a dot and ends in
    .partial.
    """
    check_export_target(target, records_per_file)
    of_files = find_file_stream(lake, name)
    parts: Iterable[pa.Table]
    if of_files is not None:
        kept = {"keep_without_position": keep_without_position}
        file_streams.check_export_options(name, options | kept)
        parts = file_streams.iterate_records(*of_files)
    else:
        streams = LakeStreams(lake)
        parts = streams.read_parts(
            streams.all_ranges(_lake_stream(name)),
            without_position="keep" if keep_without_position else "refuse",
            **options,
        )
    done = export_records(parts, target, records_per_file=records_per_file)
    written = f"{done.records:,} records of {name} written to {target}"
    if records_per_file is not None:
        written += f" in {done.files} files"
    show_line(f"{written}.")


@stream.command()
@name_argument
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "jsonl", "parquet"]),
    help=(
        "Of all files. Default: what their names end in: .csv, .jsonl, .ndjson, .json or "
        ".parquet, also with .gz, .bz2 or .zst."
    ),
)
@flag("--dry-run", "Only read and check the files, and show what would be appended.")
@lake_options()
def append(lake: Lake, name: str, files: tuple[str, ...], form: Any, dry_run: bool) -> None:
    """Append the records of files to a stream, each file once.

    FILE is a CSV file with a header line, a file of JSON lines, or a Parquet file, with the
    stream's columns; - is the standard input, which needs --format. All files are checked before
    anything is appended. A file that was appended before, under any name, adds nothing, and an
    interrupted append is continued: repeat the command. The last 128 files of a stream are
    remembered.
    """
    _check_system(name)
    if files.count("-") > 1:
        problem = "the standard input is named twice (-), and can be read only once."
        raise ConfigurationError(problem, "Write - once.", argument="FILE")
    with tempfile.TemporaryDirectory(prefix="adjunct-") as folder:
        paths = []
        for file in files:
            paths.append(_saved_input(Path(folder), form) if file == "-" else Path(file))
        done = append_files(lake, _lake_stream(name), paths, format=form, dry_run=dry_run)
        names = dict(zip(map(str, paths), files, strict=True))
    items = []
    for appended in done:
        own = {"file": names[appended.file], "same_as": names.get(appended.same_as or "")}
        items.append({**appended.to_json(), **own})
    show_json({"stream": f"lake.{_lake_stream(name)}", "dry_run": dry_run, "files": items})
    verb = "would be appended" if dry_run else "appended"
    for item in items:
        show_line(f"{item['file']}: {_describe_append(item, verb)}.")


def _describe_append(item: Mapping[str, Any], verb: str) -> str:
    """Say how many records of a file were appended, with the words of `verb`, and how many were
    before.
    """
    records = item["records"]
    appended = item["appended"]
    if item["same_as"] is not None:
        return f"nothing appended: the same contents as {item['same_as']}"
    if not appended and records:
        return f"nothing appended: its {records:,} records were appended before"
    what = f"{appended:,} records {verb}"
    if appended < records:
        what += f", {records - appended:,} were before"
    return what


def _check_system(name: str) -> None:
    """Raise ConfigurationError for a stream of another system than the lake."""
    system, dot, _ = name.partition(".")
    if is_of_files(name):
        problem = f"{name} is a stream of files: records are not appended to it."
        step = (
            f"Put the files where it looks for them (adjunct stream show {name}), or append to a"
            " stream of the lake."
        )
        raise ConfigurationError(problem, step, stream=name, system=system)
    if dot and system != LAKE:
        problem = (
            f"{name} is a stream of the system {system!r}: files are appended to streams of the"
            " lake."
        )
        step = (
            f"Write to it with a producer of {system}, or run an application that copies a stream"
            " of the lake to it."
        )
        raise ConfigurationError(problem, step, stream=name, system=system)


def _saved_input(folder: Path, form: str | None) -> Path:
    """Store the standard input in a file, because it is read twice: to check it, and to append
    it.
    """
    if form is None:
        step = "Give --format csv, jsonl or parquet."
        raise ConfigurationError(
            "the standard input has no name that says its format.", step, setting="--format"
        )
    path = folder / "standard-input"  # errors show the name
    with translate_file_errors(folder, "a copy of the standard input"), path.open("wb") as target:
        shutil.copyfileobj(sys.stdin.buffer, target)
    return path


@stream.command()
@click.argument("names", metavar="[NAME]...", nargs=-1)
@lake_option()
def maintain(lake: Lake, names: tuple[str, ...]) -> None:
    """Apply the retention and compaction that streams declare, index records by the keys of
    `find_by`, and delete unreferenced objects.

    Without NAME, maintain all streams, also those of files. Unreferenced objects are kept for an
    hour. For cron; safe while readers and writers work.
    """
    streams = LakeStreams(lake)
    if names:
        of_files = list(filter(is_of_files, names))
        of_lake = [_lake_stream(name) for name in names if not is_of_files(name)]
    else:
        of_files = [item["name"] for item in file_streams.list_summaries(lake)]
        of_lake = streams.list_streams()
    for name in of_files:
        file_streams.maintain(lake, name)
    for name in of_lake:
        done = streams.maintain(name)
        show_line(
            f"{name}: {done.dropped_rows:,} records in {done.dropped_segments} segments dropped by"
            f" retention, {done.merged_segments} segments merged into {done.merged_into},"
            f" {done.indexes} indexes written, {done.deleted_objects} objects deleted."
        )
        if done.dropped_segments:
            _show_missed(lake, name)


def _show_missed(lake: Lake, name: str) -> None:
    """Print which named readers of a stream have not read offsets that retention has dropped."""
    for reader in readers.list_readers(lake, name):
        if reader.lost:
            show_line(
                f"{name}: reader {reader.name} missed {reader.lost:,} offsets that retention has"
                " dropped."
            )


@stream.command("remove-reader")
@name_argument
@click.argument("reader")
@yes_option
@lake_options()
def remove_reader(lake: Lake, name: str, reader: str, yes: bool) -> None:
    """Remove a named reader; if it reads again, it starts as a new reader.

    A batch that it has open can't be committed any more.
    """
    existing = [known.name for known in readers.list_readers(lake, _lake_stream(name))]
    if reader in existing:
        confirm_at_terminal(
            f"Remove reader {reader} of {name}, with its position? That can't be undone.", yes=yes
        )
    if not readers.remove_reader(lake, _lake_stream(name), reader):
        listed = ", ".join(existing) or "none"
        problem = f"stream {name!r} has no reader {reader!r}; its readers: {listed}."
        raise ConfigurationError(problem, "Check the name.", stream=f"lake.{name}")
    show_json({"stream": name, "reader": reader, "removed": True})
    show_line(f"Reader {reader} of {name} is removed.")


def _lake_stream(name: str) -> str:
    """Return the stream name without the prefix "lake.", if it has one. Raises ConfigurationError
    for a stream of another system.
    """
    if is_of_files(name):
        problem = (
            f"{name} is a stream of files, which others write: this command is for streams of the"
            " lake."
        )
        step = (
            "An application can copy it to a stream of the lake: app.input_stream(…).send_to(…)."
            f" What {name} holds: adjunct stream show {name}."
        )
        raise ConfigurationError(problem, step, stream=name)
    return unqualify_stream_name("lake", name)


def _deletable_stream(name: str) -> str:
    """Return the name of a stream that can be deleted: without the prefix "lake.", or of files."""
    return name if is_of_files(name) else _lake_stream(name)


def _repartition_details(report: RepartitionReport) -> list[str]:
    """Return the lines below the summary of a stream's repartitioning."""
    if report.dry_run:
        continues = "would continue at its position"
        verdict = "prevented"
    else:
        continues = "continues at its position"
        verdict = "forced"
    details = [f"application {application} {continues}" for application in report.carried]
    details += [f"dataset {dataset} {continues}" for dataset in report.datasets]
    details += [f"{verdict}: {reader}" for reader in (*report.blocking, *report.affected)]
    return details


@stream.command("change-columns")
@name_argument
@click.option(
    "--rename",
    "renamed",
    multiple=True,
    metavar="OLD=NEW",
    help="Rename a column, or a part of one: customer.mail=email. Repeatable.",
)
@click.option(
    "--drop", multiple=True, metavar="NAME", help="Drop a column, or a part of one. Repeatable."
)
@flag("--dry-run", "Only show what would change.")
@yes_option
@lake_options()
def change_columns(
    lake: Lake, name: str, renamed: tuple[str, ...], drop: tuple[str, ...], dry_run: bool, yes: bool
) -> None:
    """Rename and drop columns of a stream, in all its records; none of them is rewritten.

    A dropped column does not come back. Applications and datasets that name the column fail to plan
    until they are corrected.
    """
    short_name = _lake_stream(name)
    renames = dict(map(_split_rename, renamed))
    streams = LakeStreams(lake)
    planned = streams.change_columns(short_name, renamed=renames, drop=drop, dry_run=True)
    if planned and drop and not dry_run:
        confirm_at_terminal(
            f"{'; '.join(planned)}. Dropped values do not come back. Go on?", yes=yes
        )
    if not dry_run:
        done = streams.change_columns(short_name, renamed=renames, drop=drop)
    else:
        done = planned
    show_json({"changes": list(done), "dry_run": dry_run})
    for line in done or ("Nothing changes.",):
        show_line(line)


def _split_rename(text: str) -> tuple[str, str]:
    """Return the old and the new name in the value of --rename."""
    old, equals, new = text.rpartition("=")
    if not equals or not old or not new:
        problem = f"--rename {text!r} names no old and new column."
        raise ConfigurationError(problem, "Write --rename OLD=NEW.", setting="--rename")
    return old, new


_force = flag("--force", "Rewrite even if readers have not read all of it: their next run fails.")
_REPARTITION = (
    "Rewrite a stream into another number of partitions, once all its readers have read all of"
    " it.\n\nRejected while an open batch reads or may write it, or a startpoint waits for it."
    " Declare the new number of partitions afterwards."
)
_DELETE = (
    "Delete a stream permanently. Rejected while it is read; repeat it if interrupted.\n\nOf a"
    " stream of files, what was admitted is forgotten; the files stay."
)
stream.add_command(
    _force(
        repartition_command(
            _REPARTITION, repartition_stream, _repartition_details, name_of=_lake_stream
        )
    )
)
stream.add_command(deletion_command(_DELETE, delete_stream, name_of=_deletable_stream))
for command in (
    file_streams.list_files,
    file_streams.admit,
    file_streams.set_aside,
    file_streams.move,
):
    stream.add_command(command)


_GROUP = 65_536  # rows of a row group


class Exported(NamedTuple):
    """How many records were written, into how many files."""

    records: int
    files: int


def export_records(
    parts: Iterable[pa.Table], target: Path, *, records_per_file: int | None = None
) -> Exported:
    """Write tables of one schema to `target`.

    `target` is a new .parquet file, or with `records_per_file` a new folder of files with at most
    that many records. It appears when it is complete; until then its data is next to it, under a
    name that begins with a dot, which is deleted if this fails, but stays if the process is killed.
    Raises ConfigurationError if `target` exists.
    """
    check_export_target(target, records_per_file)
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        if records_per_file is None:
            done = _write_files(parts, iter([partial]), None, target)
        else:
            with _file_errors(target):
                partial.mkdir()
            names = (partial / f"part-{number:05d}.parquet" for number in count())
            done = _write_files(parts, names, records_per_file, target)
        with _file_errors(target):
            _publish(partial, target)
    finally:
        with suppress(OSError):
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)
    return done


def _file_errors(target: Path) -> AbstractContextManager[None]:
    """Translate errors of the file system in a `with` block, as those of --to."""
    return translate_file_errors(target.absolute().parent, f"--to {target}")


def check_export_target(target: Path, records_per_file: int | None) -> None:
    """Raise ConfigurationError if `target` can't be written: it exists, has no folder, or is to be
    one file and does not end in .parquet.
    """
    if records_per_file is None and target.suffix != ".parquet":
        step = "Use a name that does, or give --records-per-file for a folder of files."
        raise ConfigurationError(f"--to {target} does not end in .parquet.", step, setting="--to")
    with _file_errors(target):
        exists = target.exists() or target.is_symlink()
        has_folder = target.absolute().parent.is_dir()
    if exists:
        raise _target_exists_error(target)
    if not has_folder:
        problem = f"--to {target}: there is no folder {target.parent}."
        raise ConfigurationError(problem, "Create it first.", setting="--to")


def _write_files(
    parts: Iterable[pa.Table], paths: Iterator[Path], limit: int | None, target: Path
) -> Exported:
    """Write tables to files at these paths, with at most `limit` records each; to a single file
    without a limit. Without records one file is written, for the columns.

    `target` is what errors of the file system name.
    """
    rows = 0
    files = 0
    room = 0  # for records in the open file; it has no meaning without a limit
    with ExitStack() as opened:
        writer: pq.ParquetWriter | None = None
        for part in parts:
            left = part
            while writer is None or left.num_rows:
                with _file_errors(target):
                    if writer is None or (limit is not None and room == 0):
                        opened.close()
                        writer = opened.enter_context(
                            pq.ParquetWriter(next(paths), part.schema, compression="zstd")
                        )
                        files += 1
                        room = limit or 0
                    fitting = left if limit is None else left.slice(0, room)
                    writer.write_table(fitting, row_group_size=_GROUP)
                left = left.slice(fitting.num_rows)
                rows += fitting.num_rows
                room -= fitting.num_rows
        with _file_errors(target):
            opened.close()
    return Exported(rows, files)


def _publish(partial: Path, target: Path) -> None:
    """Give a complete file or folder its final name, after everything in it is on the disk. Raises
    ConfigurationError if the name is taken.
    """
    is_folder = partial.is_dir()
    for path in partial.iterdir() if is_folder else [partial]:
        _sync(path)
    try:
        if is_folder:
            partial.rename(target)  # can only replace an empty folder
        else:
            os.link(partial, target)  # unlike a rename, this never replaces a file
    except OSError as error:
        if target.exists():
            raise _target_exists_error(target) from None
        if is_folder or isinstance(error, FileExistsError):
            raise
        partial.rename(target)  # on a file system without links
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, if it may be opened for that."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _target_exists_error(target: Path) -> ConfigurationError:
    """Return the error for a file or folder that would be overwritten."""
    return ConfigurationError(
        f"{target} already exists.", "Remove it, or use another name.", setting="--to"
    )
