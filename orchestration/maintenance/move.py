"""Move a stream of files to another folder: what was read of it is not read again."""

from __future__ import annotations

from dataclasses import dataclass

from dagster_adjunct.orchestration.maintenance.delete import find_open_batches
from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import require_reason
from dagster_adjunct.resources.file_streams.folder import FolderStreams
from dagster_adjunct.resources.file_streams.log import FileLogState
from dagster_adjunct.resources.file_streams.moving import (
    Move,
    commit_move,
    plan_move,
    require_state,
)
from dagster_adjunct.resources.file_streams.overview import require_file_stream
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.reports import Report
from dagster_adjunct.resources.validation import validated

_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class MoveReport(Report):
    """A stream of files that was moved from the URL `before` to `url`, or (`dry_run`) would be.

    `files` are there as they were admitted. Only a forced move accepts what else was found: files
    with records that are `missing` there, files that were `changed`, and open batches that read the
    stream (`affected`).
    """

    name: str
    before: str
    url: str
    files: int
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    affected: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def problems(self) -> tuple[str, ...]:
        """What only a forced move accepts."""
        found = list(self.affected)
        for paths, what in (
            (self.missing, "admitted files are missing there"),
            (self.changed, "files have another size or time than when they were admitted"),
        ):
            if paths:
                names = ", ".join(paths[:_MOST_NAMED])
                more = ", …" if len(paths) > _MOST_NAMED else ""
                found.append(f"{len(paths):,} {what}: {names}{more}")
        return tuple(found)

    def summary(self) -> str:
        """Return the report in one line."""
        verb = "would be moved" if self.dry_run else "is moved"
        return (
            f"stream {self.name} {verb} from {self.before} to {self.url}, where {self.files:,} of"
            " its files are as they were admitted; declare the new URL where it is declared"
        )


@validated
def move_stream(
    lake: Lake,
    name: str,
    url: str,
    *,
    reason: str,
    by: str,
    force: bool = False,
    dry_run: bool = False,
) -> MoveReport:
    """Move the stream "files.NAME" to another folder, to which its files were moved or copied with
    their names below the folder. What was admitted keeps its offsets, and nothing is read twice.

    A file is the one that was admitted if its size and its time, or its ETag, are the same; copy
    with `cp -p`, for example. Missing are only files whose records can still be read. Raises
    StillReadError while an open batch reads the stream, and AdmittedFileError for missing and
    changed files. With `force`, these are accepted: a file of the same size counts as the same, and
    for other ones the stream's rules decide, at the next look or read; an open batch is repeated
    from the new folder. With `dry_run`, nothing is changed. Raises ConfigurationError for tables,
    and for a folder that does not exist.
    """
    streams, stream = require_file_stream(lake, name)
    require_reason(reason, f"stream {name!r}", "moved", stream=name)
    if not isinstance(streams, FolderStreams):
        raise errors.ConfigurationError(
            f"{name} is a stream of a table, which has no folder of files.",
            "Name a stream of a folder: files.NAME.",
            stream=name,
        )
    affected: tuple[str, ...] = ()

    def plan(state: FileLogState) -> Move:
        nonlocal affected
        affected = find_open_batches(lake, name)
        move = plan_move(streams, stream, state, url, accept_changed=force, reason=reason, by=by)
        if not force and not dry_run:
            _check(describe(move))
        return move

    def describe(move: Move) -> MoveReport:
        return MoveReport(
            name, move.before, url, move.same, move.missing, move.changed, affected, dry_run
        )

    if dry_run:
        return describe(plan(require_state(streams, stream, streams.file_log(stream).read())))
    return describe(commit_move(streams, stream, plan, by=by))


def _check(report: MoveReport) -> None:
    """Raise an error for what only a forced move accepts."""
    if not report.problems:
        return
    problem = f"{report.name} can't be moved to {report.url}: {'; '.join(report.problems)}."
    if report.affected:
        raise errors.StillReadError(
            problem,
            "Let their runs end, with the files where they were, or abandon their batches (adjunct"
            " checkpoint abandon APPLICATION --reason …). Or force it (--force, force=True): the"
            " batches are then repeated from the new folder.",
            readers=report.affected,
            stream=report.name,
        )
    raise errors.AdmittedFileError(
        problem,
        "Move these files, too; copies need the time of the original (cp -p). Or force it (--force,"
        " force=True): a file of the same size then counts as the same, and the stream's rules"
        ' decide on others (FileRules: "changed", and "lost" for missing ones).',
        file=(*report.missing, *report.changed)[0],
        rule="lost" if report.missing else "changed",
        stream=report.name,
    )
