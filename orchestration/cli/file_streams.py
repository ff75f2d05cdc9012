"""`adjunct stream …` for streams of files: what they hold, their files, looking for new ones now,
setting files aside, and moving the folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from dagster_adjunct.orchestration.application.application import load_application
from dagster_adjunct.orchestration.cli.options import (
    audit_options,
    confirm_at_terminal,
    flag,
    lake_options,
    limit_option,
    yes_option,
)
from dagster_adjunct.orchestration.cli.output import (
    drop_empty,
    show_facts,
    show_items,
    show_json,
    show_line,
    show_report,
    show_schema,
    show_table,
)
from dagster_adjunct.orchestration.maintenance.move import move_stream
from dagster_adjunct.resources.errors import ConfigurationError, StreamNotFoundError
from dagster_adjunct.resources.file_streams import overview
from dagster_adjunct.resources.file_streams.log import AdmittedFile, FileLogState
from dagster_adjunct.resources.file_streams.streams import FileStreams
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import OffsetRange

_SHOWN = 20
stream_argument = click.argument("name", metavar="STREAM")


def list_summaries(lake: Lake) -> list[dict[str, Any]]:
    """Return a line about each stream of files whose files were looked for."""
    found = [overview.require_file_stream(lake, name) for name in overview.list_stored(lake)]
    return [overview.summarize(*stream) for stream in found]


def show(streams: FileStreams, stream: str) -> None:
    """Print what a stream of files holds, and which files wait."""
    facts = overview.describe(streams, stream)
    show_json(facts)
    schema = facts.pop("schema")
    declared = facts.pop("declared")
    waiting = facts.pop("waiting")
    problem = facts.pop("problem")
    moved = facts.pop("moved")
    show_facts(f"stream {streams.name}.{stream}", {**facts, "waiting": len(waiting)})
    show_facts("declared", drop_empty(declared))
    if moved:
        show_items("moved", ["before", "after", "at", "by", "reason"], moved)
    show_schema(schema)
    if waiting:
        rows = [[path, why] for path, why in sorted(waiting.items())]
        show_table("files that wait", ["file", "why"], rows[:_SHOWN])
    if len(waiting) > _SHOWN:
        show_line(f"{len(waiting) - _SHOWN:,} more files wait; all are in --json.")
    _show_problem(problem)


@click.command("files")
@stream_argument
@flag("--problems", "Only files that are set aside.")
@limit_option(None, "Only the newest N files.")
@lake_options()
def list_files(lake: Lake, name: str, problems: bool, limit: int | None) -> None:
    """List the files of a stream in the order of admission: state, offsets, records, times, and why
    a file was set aside; and the file because of which no others can be admitted.

    \b
    STATE is
      admitted     its records are read
      gone         it was admitted, and does not exist any more (in folders)
      overwritten  it was admitted, and has other contents now (in folders)
      dropped      retention has disposed of its records
      set aside    it is left out
      redelivered  it was set aside; its later contents are listed, too

    A file that was set aside before it was admitted has no offsets.
    """
    streams, stream = overview.require_file_stream(lake, name)
    look = overview.look_for_waiting(streams, stream)
    present = None
    if not problems:  # what is set aside may exist or not
        present = overview.list_present(streams, stream)
    files = overview.list_files(streams, stream, problems=problems, present=present)
    shown = files if limit is None else files[-limit:]
    left_out = len(files) - len(shown)
    show_json({"stream": name, "files": shown, "left_out": left_out, "problem": look.problem})
    columns = ["file", "state", "offset", "records", "modified"]
    if any(file["problem"] for file in shown):
        columns.append("why")  # it was set aside
    show_items("files", columns, [{**file, "why": file["problem"]} for file in shown], path="file")
    if left_out:
        show_line(f"{left_out:,} older files are left out.")
    _show_problem(look.problem)


def _show_problem(problem: str) -> None:
    """Print why no files can be admitted, if that is so."""
    if problem:
        show_line(f"No files can be admitted. {problem}")


@click.command()
@stream_argument
@click.argument("reference", metavar="[MODULE:APP]", required=False)
@click.option(
    "--all",
    "all_files",
    is_flag=True,
    help="Also find files that came late under an old name, or whose notification was lost.",
)
@lake_options(create=True)
def admit(lake: Lake, name: str, reference: str | None, all_files: bool) -> None:
    """Look for new files now, and admit them: their records get the next offsets.

    Runs and sensors do it by themselves. MODULE:APP is the application that declares the stream; it
    is needed only before the first admission, and after a change of the declaration.
    """
    if reference is not None:
        load_application(reference)
    streams, stream = overview.require_file_stream(lake, name)
    _require_declared(streams, stream, name)
    before = streams.state(stream)
    after = streams.admit(stream, all_files=all_files)
    report = _describe_admission(before, after, streams.waiting(stream))
    show_json({"stream": name, **report})
    line = (
        f"{name}: {report['files']:,} files with {report['records']:,} records admitted; the next"
        f" offset is {after.next}."
    )
    show_line(line)
    for rule, count in report["set_aside"].items():
        show_line(
            f"{count:,} files were set aside ({rule}): adjunct stream files {name} --problems"
        )
    if report["waiting"]:
        show_line(f"{len(report['waiting']):,} files wait: adjunct stream show {name}")


def _require_declared(streams: FileStreams, stream: str, name: str) -> None:
    """Raise StreamNotFoundError, which names what this command takes, for an unknown stream."""
    try:
        streams.declaration(stream)
    except StreamNotFoundError as error:
        step = f"Name the application that declares it: adjunct stream admit {name} MODULE:APP."
        raise StreamNotFoundError(error.problem, step, stream=name) from None


def _describe_admission(
    before: FileLogState | None, after: FileLogState, waiting: Mapping[str, str]
) -> dict[str, Any]:
    """Return what was admitted between two states of a stream."""
    return {
        "files": overview.count_files(after) - overview.count_files(before),
        "records": after.next - (0 if before is None else before.next),
        "next": str(after.next),
        "set_aside": after.set_aside_since(before),
        "waiting": dict(waiting),
    }


@click.command("set-aside")
@stream_argument
@click.argument("file")
@yes_option
@audit_options
@lake_options()
def set_aside(lake: Lake, name: str, file: str, yes: bool, reason: str, by: str) -> None:
    """Leave out the records of a FILE that is gone or damaged, so that readers go on.

    FILE is its name below the folder, as in `adjunct stream files`. New contents, also of a file
    that was overwritten, are not admitted, and earlier records of it stay. Otherwise its admitted
    records are left out, and their offsets stay; who has read them keeps what it made of them.
    Delivered again with other contents, it is admitted.
    """
    streams, stream = overview.require_file_stream(lake, name)
    streams.declaration(stream)
    confirm_at_terminal(
        f"Leave out what {file} of {name} has in all later reads? That can't be undone.", yes=yes
    )
    found = streams.set_aside(stream, file, reason=reason, by=by)
    show_json({"stream": name, "file": file, "records": found.rows, "before": found.problem})
    if found.problem:
        show_line(f"{file} of {name} was set aside before: {found.problem}.")
    else:
        show_line(f"{file} of {name} is set aside, {_describe_extent(found)}.")


@click.command("move")
@stream_argument
@click.argument("url")
@flag("--force", "Move it even if files are missing or changed there, or an open batch reads it.")
@flag("--dry-run", "Only show what would be moved, and what prevents it.")
@audit_options
@lake_options()
def move(lake: Lake, name: str, url: str, force: bool, dry_run: bool, reason: str, by: str) -> None:
    """Move a stream to the folder URL, to which its files were moved with their names.

    What was read of it stays read, and new files in URL get the next offsets. Its files are looked
    for first: by size and time, or ETag (copy with cp -p). Rejected if one is missing or changed,
    and while an open batch reads it. Declare the new URL afterwards.
    """
    report = move_stream(lake, name, url, reason=reason, by=by, force=force, dry_run=dry_run)
    verdict = "needs --force" if dry_run else "forced"
    show_report(report, [f"{verdict}: {problem}" for problem in report.problems])


def _describe_extent(file: AdmittedFile) -> str:
    """Return what was set aside of a file, to follow "is set aside"."""
    if not file.rows:
        return "without having been admitted; what was admitted of it before, if anything, stays"
    return f"with {file.rows:,} records"


def iterate_records(streams: FileStreams, stream: str) -> Iterator[pa.Table]:
    """Yield all records of a stream that can still be read, in order, in parts."""
    columns = streams.declaration(stream).columns.names
    (ssp,) = streams.partitions(stream)
    view = {ssp: OffsetRange(streams.oldest([ssp])[ssp], streams.upcoming([ssp])[ssp])}
    yield streams.read_arrow({ssp: OffsetRange(view[ssp].start, view[ssp].start)}, columns)
    yield from streams.task_reads(view, columns)(0)


def check_export_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for options of `export` that only streams of the lake have."""
    given = {
        "--epochs latest": options["epochs"] == "latest",
        "--positions": options["positions"],
        "--keep-without-position": options["keep_without_position"],
    }
    for option, is_given in given.items():
        if is_given:
            raise ConfigurationError(
                f"{name} is a stream of files, whose records have no source positions: {option}"
                " does not apply.",
                f"Leave {option} out.",
                setting=option.partition(" ")[0],
            )


def maintain(lake: Lake, name: str) -> None:
    """Maintain a stream of files, and print what was done."""
    streams, stream = overview.require_file_stream(lake, name)
    streams.declaration(stream)
    done = streams.maintain(stream)
    show_line(
        f"{name}: {done.dropped_rows:,} records in {done.dropped_files} files dropped by retention,"
        f" {done.deleted_objects} objects of its log deleted. Its files stay."
    )
