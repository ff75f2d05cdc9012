"""Files in a folder, or below a prefix of a bucket, as a stream: `files.clicks`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Literal, NamedTuple
from urllib.parse import unquote

from pydantic import Field

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.arguments import argument_error
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.file_streams.feed import (
    MOST_AT_ONCE,
    FilePiece,
    FileStreamDeclaration,
    Found,
    KnownFiles,
    naming_large_file,
)
from dagster_adjunct.resources.file_streams.listing import (
    AfterLast,
    AllFiles,
    DayFolders,
    Listing,
    Look,
    NotifiedFiles,
    check_date_prefix,
)
from dagster_adjunct.resources.file_streams.log import (
    AdmittedFile,
    FileLogState,
    FileRetention,
    LostFile,
    rule_of,
)
from dagster_adjunct.resources.file_streams.notifications import Notifications, check_queue_url
from dagster_adjunct.resources.file_streams.reading import (
    AddedColumns,
    FileReader,
    check_unchanged,
    listed_file,
)
from dagster_adjunct.resources.file_streams.streams import FileStreams, declare_file_stream
from dagster_adjunct.resources.files.columns import (
    AS_DECLARED,
    ColumnRules,
    check_rules,
    evolution_problems,
)
from dagster_adjunct.resources.files.formats import DeclaredFiles, FileFormat, check_format
from dagster_adjunct.resources.files.tree import FileTree, ListedFile, check_folder_url, open_tree
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.texts import TextMisfit, convert_texts
from dagster_adjunct.resources.streams.declaration import build_declaration, check_same_declaration
from dagster_adjunct.resources.streams.system import register_system
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.times import to_microseconds, utc_now
from dagster_adjunct.resources.validation import validated

SYSTEM = "files"
_THREADS = 16
_BYTES_AT_ONCE = 1024**3
_AVRO_BYTES_AT_ONCE = 64 * 1024**2  # whose values are read: some megabytes a second
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".crdownload", "._COPYING_", ".crc")
_NULL = "__HIVE_DEFAULT_PARTITION__"

OnFile = Literal["fail", "set-aside"]


@validated
class FileRules(StoredDocument):
    """What is done with files that are not as expected. Those that are set aside have no records;
    they are counted, and listed with the reason.

    `changed`: a file that was admitted has other contents when files are listed. "fail" raises
    AdmittedFileError, "ignore" goes on with what was admitted, "append" admits the new contents as
    further records.
    `damaged`: a file can't be read as declared: "fail", or "set-aside", for which all values of a
    file are read before it is admitted.
    `empty`: a file has no records, or no bytes: "set-aside", "fail", or "admit".
    `late`: where only new names or days are listed, a look for all files finds one that arrived
    under an older name: "append", "fail" or "set-aside".
    `lost`: an admitted file is gone, or has other contents, when its records are to be read:
    "fail", or "set-aside", which leaves its records out from then on.

    A file that is set aside because it was damaged or empty, or by a command, is admitted if it is
    delivered again with other contents.
    """

    changed: Literal["fail", "ignore", "append"] = "fail"
    damaged: OnFile = "fail"
    empty: Literal["set-aside", "fail", "admit"] = "set-aside"
    late: Literal["append", "fail", "set-aside"] = "append"
    lost: OnFile = "fail"


DEFAULT_RULES = FileRules()
_DELIVERED_AGAIN = ("damaged", "empty", "set aside")
# What may differ between the stored declaration of a stream and the one that continues it.
_CHANGEABLE = (
    "key",
    "path_columns",
    "path_column",
    "modified_column",
    "pattern",
    "marker",
    "min_age",
    "listing",
    "rules",
    "retention",
    "column_rules",
)
_EVOLVE = (
    "Keep or widen the types of columns; declare which are renamed or dropped, as in"
    " column_rules=ColumnRules(renamed={…}, drop=(…)). Another name for the stream is another"
    " stream, which reads all files again, from the first one."
)


def _move_step(stream: str, url: str) -> str:
    """Return what to do about a declaration with another URL."""
    return (
        "If the files were moved, with their names below the folder, move the stream as well, which"
        f" keeps what was read: adjunct stream move {stream} {shlex.quote(url)} --reason …. If"
        " they are other files, use another name for the stream: it reads all of them, also those"
        f" that {stream} has read."
    )


class FolderListing(StoredDocument):
    """How looks find new files in a folder: as `names` says, or in the folders of the last days
    (`date_prefix`), or by the notifications in a queue.
    """

    names: Literal["all", "after-last"] = "all"
    date_prefix: str | None = None
    days_back: Annotated[int, Field(ge=0, le=60)] = 2
    notifications: str | None = None

    def check(self, url: str, what: str) -> None:
        """Raise ConfigurationError unless at most one way of listing is declared, and possible for
        a folder at this URL.
        """
        chosen = [self.names != "all", self.date_prefix is not None, self.notifications is not None]
        if sum(chosen) > 1:
            raise argument_error(
                f"{what} is to be listed in {sum(chosen)} ways",
                'one of listing="after-last", date_prefix=… and notifications=…',
                argument="listing",
            )
        if self.date_prefix is not None:
            check_date_prefix(self.date_prefix)
        if self.notifications is None:
            return
        check_queue_url(self.notifications)
        if not url.startswith(("s3://", "s3a://")):
            raise argument_error(
                f"{what}: notifications of {url!r}",
                "s3://BUCKET/PREFIX, as only buckets notify queues",
                argument="notifications",
            )

    def open(self) -> Listing:
        """Return what lists the files."""
        if self.notifications is not None:
            return NotifiedFiles(Notifications(self.notifications))
        if self.date_prefix is not None:
            return DayFolders(self.date_prefix, self.days_back)
        if self.names == "after-last":
            return AfterLast()
        return AllFiles()


class FolderDeclaration(FileStreamDeclaration):
    """A folder as a stream: see `file_stream`."""

    url: str
    file_format: FileFormat
    path_columns: tuple[str, ...] = ()
    path_column: str | None = None
    modified_column: str | None = None
    pattern: str = "*"
    marker: str | None = None
    min_age: Annotated[timedelta, Field(ge=timedelta(0))] = timedelta(0)
    listing: FolderListing = FolderListing()
    rules: FileRules = DEFAULT_RULES
    column_rules: ColumnRules = AS_DECLARED

    @property
    def source_url(self) -> str:
        return open_tree(self.url).url

    def feed(self, lake: Lake) -> FolderFeed:
        return FolderFeed(self, open_tree(self.url))

    @property
    def file_schema(self) -> Schema:
        """The columns that files contain."""
        added = {*self.path_columns, self.path_column, self.modified_column}
        return Schema(tuple(field for field in self.columns.fields if field.name not in added))

    def check_stored(self, stream: str, state: FileLogState) -> None:
        stored = FolderDeclaration.model_validate(state.declared)
        same = stored.model_copy(update={name: getattr(self, name) for name in _CHANGEABLE})
        step = _EVOLVE
        if stored.source_url == self.source_url:
            same = same.model_copy(update={"url": self.url})
        elif stored.url != self.url:
            step = _move_step(stream, self.url)
        problems = evolution_problems(stored.columns, self.columns, self.column_rules)
        if problems and step != _EVOLVE:
            step = f"{step} {_EVOLVE}"
        check_same_declaration(stream, same, self, problems, step)


@dataclass(frozen=True, slots=True)
class FolderFeed:
    """The files of a folder."""

    declared: FolderDeclaration
    tree: FileTree

    @property
    def _reader(self) -> FileReader:
        """What reads the files as declared."""
        declared = self.declared
        own = declared.file_schema
        required: tuple[str, ...] = ()
        if declared.file_format != "jsonl":  # where a missing field is null
            required = tuple(name for name in declared.key if name in own)
        files = DeclaredFiles(
            self.tree, declared.file_format, own, "", required=required, rules=declared.column_rules
        )
        others = [name for name in declared.columns.names if name not in own]
        added = AddedColumns(
            declared.columns.select(others), declared.path_column, declared.modified_column
        )
        return FileReader(
            files,
            added,
            partial(path_values, declared=declared),
            reads_all=declared.rules.damaged == "set-aside",
        )

    # -- admission

    def find(self, known: KnownFiles) -> Found:
        look = self.declared.listing.open().look(self.tree, known.cursor, known.all_files)
        arrivals = self._arrivals(look)
        waiting = arrivals.waiting | look.waiting
        fresh = self._new_files(arrivals.complete, known, look)
        chosen = self._first_of(fresh)
        examined = map_in_threads(self._examine, chosen, _THREADS)
        files = []
        for new, file in zip(chosen, examined, strict=True):
            if file is None:
                waiting[new.listed.path] = "it was replaced or removed while it was examined"
            elif new.was_damaged and file.problem:
                continue  # it is set aside already
            else:
                files.append(file)
        rest = fresh[len(chosen) :]
        # A later look has to find these, whatever it lists: so the cursor stays before them, and
        # messages about them stay in the queue.
        left = {*waiting, *(new.listed.path for new in rest)}
        done = [file.path for file in arrivals.complete if file.path not in left]
        if look.more and files:
            # The queue has more messages. While no file can be admitted, another look at once would
            # only receive the same ones again.
            more = True
        else:
            more = bool(rest)
        return Found(files, look.cursor(done, left), waiting, look.settled(left), more)

    def _first_of(self, fresh: Sequence[_NewFile]) -> Sequence[_NewFile]:
        """Return the first of these files, as many as are examined before the next commit: at least
        one.
        """
        reader = self._reader
        if self.declared.file_format == "parquet" and not reader.reads_all:  # only footers are read
            return fresh[:MOST_AT_ONCE]
        most = _BYTES_AT_ONCE
        if self.declared.file_format == "avro" and reader.reads_all:
            most = _AVRO_BYTES_AT_ONCE
        size = 0
        for count, new in enumerate(fresh[:MOST_AT_ONCE]):
            size += new.listed.size
            if size > most and count > 0:
                return fresh[:count]
        return fresh[:MOST_AT_ONCE]

    def _arrivals(self, look: Look) -> _Arrivals:
        """Return which of the listed files are complete, and why others wait."""
        markers = _Markers(self.tree, self.declared.marker, look)
        youngest = utc_now() - self.declared.min_age
        complete = []
        waiting = {}
        for file in look.files:
            if not self._is_wanted(file.path):
                continue
            missing = markers.missing_for(file.path)
            if missing is not None:
                waiting[file.path] = f"{missing} is missing"
            elif self.declared.min_age and file.modified > youngest:
                waiting[file.path] = f"it is younger than {self.declared.min_age}"
            else:
                complete.append(file)
        return _Arrivals(complete, waiting)

    def _is_wanted(self, path: str) -> bool:
        """Return whether a file is one of the stream, by its name: not hidden, and no marker."""
        name = path.rsplit("/", 1)[-1]
        pattern = self.declared.pattern
        if pattern != "*" and not fnmatchcase(name, pattern):
            return False
        if _is_hidden(path):
            return False
        return self.declared.marker is None or not _is_marker(name, self.declared.marker)

    def _new_files(
        self, ready: Sequence[ListedFile], known: KnownFiles, look: Look
    ) -> list[_NewFile]:
        """Return the files that are to be admitted, in the order of admission."""
        admitted = known.among([file.path for file in ready])
        fresh = []
        for file in ready:
            before = admitted.get(file.path)
            if before is None:
                fresh.append(_NewFile(file, self._problem_of_late(file, look)))
            elif before.etag != file.etag and not known.has_contents(file.path, file.etag):
                # Contents that are back, and were admitted before, are not admitted again.
                fresh.append(_NewFile(file, self._problem_of_changed(file, before, look)))
            elif known.all_files and before.etag == file.etag and self._was_damaged(before):
                # Perhaps it can be read as it is declared now.
                fresh.append(_NewFile(file, was_damaged=True))
        if look.in_name_order:
            return sorted(fresh, key=_path)
        return sorted(fresh, key=_time_and_path)

    def _was_damaged(self, before: AdmittedFile) -> bool:
        """Return whether a file was set aside by a rule because it could not be read as it was
        declared then.
        """
        return rule_of(before.problem) == "damaged" and self.declared.rules.damaged == "set-aside"

    def _problem_of_late(self, file: ListedFile, look: Look) -> str:
        """Return why a new file is set aside if it is late, "" if it is admitted. Raises
        AdmittedFileError if the rule for late files is "fail".
        """
        rule = self.declared.rules.late
        if rule == "append" or not look.is_late(file.path):
            return ""
        problem = "it came under an older name than files that were admitted before"
        if rule == "set-aside":
            return f"late: {problem}"
        step = _leave_out_step(file, 'late="append"')
        raise self._admission_error(file, "late", problem, step)

    def _problem_of_changed(self, file: ListedFile, before: AdmittedFile, look: Look) -> str:
        """Return why a file with other contents than before is set aside, "" if its contents are
        admitted. Raises AdmittedFileError if the rule for changed files is "fail".

        In this order: what was damaged, empty or set aside by a command is admitted; for what was
        late, the rule for late files decides; for all others, the rule for changed files.
        """
        set_aside_by = rule_of(before.problem)
        if set_aside_by in _DELIVERED_AGAIN:
            return ""
        if set_aside_by == "late":
            return self._problem_of_late(file, look)
        rule = self.declared.rules.changed
        if rule == "append":
            return ""
        problem = _describe_change(self.tree, file, before)
        if rule == "ignore":
            return f"changed: {problem}"
        step = (
            "Move the admitted file back (in a folder, a copy counts as another file), and write"
            f" new records under a new name. Or leave the new contents out: {_set_aside(file)}. Or"
            ' declare FileRules(changed="append"), which admits all that the file has now as'
            " further records, also what was admitted before."
        )
        touch = self.tree.undo_touch(file, before.etag)
        if touch:
            step = f"If only its time has changed, set it back: {touch}. {step}"
        raise self._admission_error(file, "changed", problem, step)

    def _admission_error(
        self, file: ListedFile, rule: str, problem: str, step: str
    ) -> errors.AdmittedFileError:
        """Return the error for a file that the declared rule does not admit."""
        where = f"{self.tree.url}/{file.path}"
        return errors.AdmittedFileError(
            f"{where} can't be admitted: {problem}.", step, file=where, rule=rule
        )

    def _examine(self, new: _NewFile) -> AdmittedFile | None:
        """Return the file as it is admitted, with the number of its records; None if it was changed
        while they were counted.

        Raises an error for a file without records, or one that can't be read, if its rule is
        "fail".
        """
        file = new.listed
        admitted = _unread(file)
        if new.problem:
            return admitted._replace(problem=new.problem)
        rules = self.declared.rules
        try:
            values = path_values(file.path, self.declared)
            with naming_large_file(file.path):
                rows = self._reader.count(file) if file.size else 0  # no bytes: empty, not damaged
        except errors.SourceChangedError:
            return None
        except errors.SchemaMismatchError as error:
            if rules.damaged == "set-aside":
                return admitted._replace(problem=f"damaged: {error.problem}")
            raise self._damage_error(file, error) from error
        if not rows and rules.empty != "admit":
            problem = f"it has no records, in {file.size:,} bytes"
            if rules.empty == "fail":
                step = _leave_out_step(file, 'empty="admit"')
                raise self._admission_error(file, "empty", problem, step)
            return admitted._replace(problem=f"empty: {problem}")
        return admitted._replace(rows=rows, values=values)

    def _damage_error(
        self, file: ListedFile, error: errors.SchemaMismatchError
    ) -> errors.AdjunctError:
        """Return the error for a file that can't be read as declared; its next step also says how
        to go on without the file.
        """
        step = (
            f"{error.next_step} To go on without the file: {_set_aside(file)}, or"
            ' FileRules(damaged="set-aside").'
        )
        return error.reworded(error.problem, step)

    # -- reading

    def tables(self, piece: FilePiece, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        yield from self._reader.tables(piece, columns)
        # A file that is read to its end is checked there.
        if piece.end < piece.file.rows:
            check_unchanged(self.tree, listed_file(piece.file))

    def cuts(self, file: AdmittedFile) -> Sequence[int]:
        if self.declared.file_format != "parquet":
            return ()
        return self._reader.files.row_group_starts(listed_file(file))


# Parts such as "_day=2026-11-28" are columns.
_HIDDEN = re.compile(r"(?:^|/)[._][^/=]*(?:/|$)")


def _is_hidden(path: str) -> bool:
    """Return whether a file is hidden, or its name is one of a file that is still written."""
    return path.endswith(_UNFINISHED) or _HIDDEN.search(path) is not None


def _is_marker(name: str, marker: str) -> bool:
    """Return whether a file is a marker: its name is `marker`, or that with a name for "*"."""
    before, star, after = marker.partition("*")
    if not star:
        return name == marker
    has_name = len(name) > len(before) + len(after)
    return has_name and name.startswith(before) and name.endswith(after)


class _Arrivals(NamedTuple):
    """The listed files that are complete, and why others wait, by path."""

    complete: list[ListedFile]
    waiting: dict[str, str]


class _Markers:
    """The files that exist to mark others as complete. If the listing is partial, each is looked
    for once.
    """

    def __init__(self, tree: FileTree, name: str | None, look: Look) -> None:
        self.tree = tree
        self.name = name
        self.is_partial = look.is_partial
        self._exists = {} if name is None else {file.path: True for file in look.files}

    def missing_for(self, path: str) -> str | None:
        """Return the path of the marker that a file waits for, None if it does not wait for one."""
        if self.name is None:
            return None
        folder, slash, file_name = path.rpartition("/")
        marker = f"{folder}{slash}{self.name.replace('*', file_name)}"
        if self.is_partial and marker not in self._exists:
            self._exists[marker] = self.tree.find(marker) is not None
        if self._exists.get(marker):
            return None
        return marker


def path_values(path: str, declared: FolderDeclaration) -> dict[str, str | None]:
    """Return the values of the declared `path_columns` for a file, by column, from parts of its
    path such as `day=2026-11-28/`. Raises SchemaMismatchError.
    """
    parts = {}
    for folder in path.split("/")[:-1]:
        column, equals, text = folder.partition("=")
        if equals:
            parts[column] = text
    values: dict[str, str | None] = {}
    for name in declared.path_columns:
        kind = declared.columns.types[name]
        where = f"file {declared.url}/{path}"
        if name not in parts:
            raise errors.SchemaMismatchError(
                f"{where}: the path has no part {name}=….",
                f"Write files into folders such as {name}=…, or leave {name} out of path_columns.",
                column=name,
            )
        value = unquote(parts[name])
        values[name] = None if value == _NULL else value
        try:  # only checks: readers convert the text
            convert_texts(pa.array([values[name]], pa.string()), kind)
        except TextMisfit as misfit:
            raise errors.SchemaMismatchError(
                f"{where}: the part {name}={parts[name]} of the path is declared {kind}:"
                f" {misfit.reason}.",
                "Correct the path, or the declared type.",
                column=name,
            ) from misfit
    return values


class _NewFile(NamedTuple):
    """A file to admit, with the problem for which it is set aside. One that `was_damaged` is
    examined again, and is admitted if it can be read now.
    """

    listed: ListedFile
    problem: str = ""
    was_damaged: bool = False


def _path(new: _NewFile) -> str:
    return new.listed.path


def _time_and_path(new: _NewFile) -> tuple[datetime, str]:
    return new.listed.modified, new.listed.path


def _describe_change(tree: FileTree, file: ListedFile, before: AdmittedFile) -> str:
    """Return how a file differs from what was admitted."""
    now = f"modified {file.modified:%F %T.%f} UTC"
    if file.size != before.size:
        how = "shrunk" if file.size < before.size else "grown"
        sizes = f"from {before.size:,} to {file.size:,} bytes"
        return f"it has {how} since it was admitted, {sizes}, {now}"
    if to_microseconds(file.modified) == before.modified:
        return (
            f"it was written again or replaced since it was admitted: it has {file.size:,} bytes,"
            f" {now}, both as before, but {tree.describe_difference(file, before.etag)}"
        )
    return (
        f"it was written again or touched since it was admitted: it has {file.size:,} bytes as"
        f" before, {now}, and was admitted as modified {before.modified_at:%F %T.%f} UTC"
    )


def _leave_out_step(file: ListedFile, instead: str) -> str:
    """Return what to do about a new file that the declared rule does not admit."""
    return f"Remove it, go on without it ({_set_aside(file)}), or declare FileRules({instead})."


def _set_aside(file: ListedFile) -> str:
    """Return the command that goes on without a file."""
    return f"adjunct stream set-aside STREAM {shlex.quote(file.path)} --reason …"


def _unread(file: ListedFile) -> AdmittedFile:
    """Return the entry of a file whose records have not been counted."""
    return AdmittedFile(file.path, file.size, file.etag, to_microseconds(file.modified), 0)


class FolderStreams(FileStreams):
    """The declared folders of files, as the system `files`."""

    name = SYSTEM
    declaration_class = FolderDeclaration

    def find_file(self, stream: str, path: str) -> AdmittedFile | None:
        found = open_tree(self._folder(stream).url).find(path)
        if found is None:
            return None
        return _unread(found)

    def find_lost(self, stream: str, files: Sequence[AdmittedFile]) -> list[LostFile]:
        tree = open_tree(self._folder(stream).url)
        found = map_in_threads(tree.find, [file.path for file in files], _THREADS)
        lost = []
        for file, now in zip(files, found, strict=True):
            if now is None:
                lost.append(LostFile(file, "it is gone"))
            elif now.etag != file.etag:
                lost.append(LostFile(file, "it has other contents than when it was admitted"))
        return lost

    def _find_lost_to_leave_out(self, stream: str, files: Sequence[AdmittedFile]) -> list[LostFile]:
        if self._folder(stream).rules.lost == "fail":
            return []
        lost = self.find_lost(stream, files)
        if not lost:
            return []
        tree = open_tree(self._folder(stream).url)
        reason = tree.absence()
        if reason:
            # Perhaps a disk is not mounted.
            raise errors.AdmittedFileError(
                f"{tree.url}: {reason}, and {len(lost):,} files were admitted from it.",
                "Restore the folder, or correct its URL.",
                url=tree.url,
                rule="lost",
            )
        return lost

    def present_files(self, stream: str) -> Mapping[str, str] | None:
        return {file.path: file.etag for file in open_tree(self._folder(stream).url).list()}

    def _folder(self, stream: str) -> FolderDeclaration:
        declaration = self.declaration(stream)
        assert isinstance(declaration, FolderDeclaration)
        return declaration


@validated
def file_stream(  # noqa: PLR0913
    name: str,
    url: str,
    *,
    format: FileFormat,
    schema: Schema | str,
    key: Sequence[str] = (),
    path_columns: Sequence[str] = (),
    path_column: str | None = None,
    modified_column: str | None = None,
    pattern: str = "*",
    marker: str | None = None,
    min_age: timedelta = timedelta(0),
    listing: Literal["all", "after-last"] = "all",
    date_prefix: str | None = None,
    days_back: int = 2,
    notifications: str | None = None,
    rules: FileRules = DEFAULT_RULES,
    retention: FileRetention | None = None,
    column_rules: ColumnRules = AS_DECLARED,
) -> str:
    """Declare the files in a folder, and below it, as a stream; return its name, "files.NAME".

    `url` is a path, or `s3://BUCKET/PREFIX`. Files are admitted once, in the order in which they
    were modified, and their records then have fixed offsets, in one partition. `schema` has all
    columns: those of the files, and those that are added, which are `path_columns` (parts of the
    path, as in `day=2026-11-28/`), `path_column` (a string, the path of the file below the folder)
    and `modified_column` (a timestamp). A record's time is that when its file was modified. `key`
    are the columns by which records belong together.

    Files are left out whose names do not match `pattern`, or begin with "." or "_", or end in .tmp,
    .part and the like. A file waits until it is `min_age` old, and until its `marker` exists: a
    file next to it, such as "_SUCCESS", or with its name for "*", as in "*.done". With
    `listing="after-last"`, only names after the last admitted one are listed. `rules` say what is
    done with files that have changed, or are damaged, `column_rules` what is done with columns that
    are not the declared ones. Both may change later, and so may the schema: columns can be added,
    their types widened, and, by column rules, renamed and dropped. Files that were admitted before
    are then read by the new schema too.

    Raises ConfigurationError or SchemaMismatchError.
    """
    check_folder_url(url)
    what = f"stream '{SYSTEM}.{name}'"
    columns = schema if isinstance(schema, Schema) else Schema.from_ddl(schema, what)
    added = [*path_columns, *filter(None, [path_column, modified_column])]
    for column in added:
        columns.field(column, what)
    if len({*added}) < len(added):
        raise argument_error(
            f"{what}: added columns are {added}", "different columns", argument="schema"
        )
    declaration = build_declaration(
        FolderDeclaration,
        f"{SYSTEM}.{name}",
        columns,
        tuple(key),
        1,
        url=url,
        file_format=format,
        path_columns=tuple(path_columns),
        path_column=path_column,
        modified_column=modified_column,
        pattern=pattern,
        marker=marker,
        min_age=min_age,
        listing={
            "names": listing,
            "date_prefix": date_prefix,
            "days_back": days_back,
            "notifications": notifications,
        },
        rules=rules,
        retention=retention,
        column_rules=column_rules,
    )
    declaration.listing.check(url, what)
    check_rules(declaration.file_schema, column_rules, what)
    check_format(declaration.file_schema, format, what)
    return declare_file_stream(SYSTEM, name, declaration)


register_system(SYSTEM, FolderStreams)
