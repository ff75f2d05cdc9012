"""Files in a folder, or below a prefix of a bucket, as a stream: `files.clicks`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal
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
)
from dagster_adjunct.resources.file_streams.log import AdmittedFile, FileLogState
from dagster_adjunct.resources.file_streams.reading import AddedColumns, FileReader
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
from dagster_adjunct.resources.streams.system import (
    build_declaration,
    check_same_declaration,
    register_system,
)
from dagster_adjunct.resources.threads import map_in_threads
from dagster_adjunct.resources.times import to_microseconds
from dagster_adjunct.resources.validation import validated

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SYSTEM = "files"
_THREADS = 16
_UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".crdownload", "._COPYING_", ".crc")
_NULL = "__HIVE_DEFAULT_PARTITION__"

OnFile = Literal["fail", "set-aside"]


@validated
class FileRules(StoredDocument):
    """What becomes of files that are not as expected.

    `changed`: a file that was admitted has other contents now. "fail" raises AdmittedFileError,
    "ignore" goes on with what was admitted, counted once for each change; "append" admits the new
    contents as further records. `damaged`: a file that can't be read as declared, "fail", or
    "set-aside": it is left out, counted, and listed with the reason. `late`: with
    `listing="after-last"`, a file found by `adjunct stream admit --all` whose name is not after the
    last one: "append", "fail" or "set-aside".
    """

    changed: Literal["fail", "ignore", "append"] = "fail"
    damaged: OnFile = "fail"
    late: Literal["append", "fail", "set-aside"] = "append"


DEFAULT_RULES = FileRules()
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
    "column_rules",
)
_EVOLVE = (
    "Say what became of the columns, as in column_rules=ColumnRules(renamed={…}, drop=(…)), and"
    " keep types or widen them; or use another name for the stream."
)


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
    listing: Literal["all", "after-last"] = "all"
    rules: FileRules = DEFAULT_RULES
    column_rules: ColumnRules = AS_DECLARED

    def feed(self, lake: Lake) -> FolderFeed:
        return FolderFeed(self, open_tree(self.url))

    @property
    def file_schema(self) -> Schema:
        """The columns that files contain."""
        added = {*self.path_columns, self.path_column, self.modified_column}
        return Schema(tuple(one for one in self.columns.fields if one.name not in added))

    def check_stored(self, stream: str, state: FileLogState) -> None:
        stored = FolderDeclaration.model_validate(state.declared)
        same = stored.model_copy(update={name: getattr(self, name) for name in _CHANGEABLE})
        problems = evolution_problems(stored.columns, self.columns, self.column_rules)
        check_same_declaration(stream, same, self, problems, _EVOLVE)


@dataclass(frozen=True, slots=True)
class FolderFeed:
    """The files of a folder."""

    declared: FolderDeclaration
    tree: FileTree

    @property
    def _reader(self) -> FileReader:
        declared = self.declared
        own = declared.file_schema
        required: tuple[str, ...] = ()
        if declared.file_format != "jsonl":  # in which fields that are null may be left out
            required = tuple(name for name in declared.key if name in own)
        files = DeclaredFiles(
            self.tree,
            declared.file_format,
            own,
            "the stream",
            required=required,
            rules=declared.column_rules,
        )
        others = [name for name in declared.columns.names if name not in own]
        added = AddedColumns(
            declared.columns.select(others), declared.path_column, declared.modified_column
        )
        return FileReader(files, added, partial(path_values, declared=declared))

    # -- admission

    def find(self, known: KnownFiles) -> Found:
        listed, waiting = self._ready(self.tree.list())
        fresh = self._new_files(listed, known)
        chosen = fresh[:MOST_AT_ONCE]
        files = map_in_threads(self._examine, chosen, _THREADS)
        cursor = max([known.cursor, *(file.path for file in files)])
        return Found(files, cursor, waiting)

    def _ready(self, listed: Sequence[ListedFile]) -> tuple[list[ListedFile], dict[str, str]]:
        """Return the files that are complete, and why others wait."""
        declared = self.declared
        names = {file.path for file in listed}
        youngest = datetime.now(UTC) - declared.min_age
        ready = []
        waiting = {}
        for file in listed:
            name = file.path.rsplit("/", 1)[-1]
            if not fnmatchcase(name, declared.pattern) or _is_hidden(file.path):
                continue
            marker = self._marker_of(file.path)
            if marker == file.path or declared.marker == name:
                continue
            if declared.marker and "*" in declared.marker and _is_marker(name, declared.marker):
                continue
            if marker is not None and marker not in names:
                waiting[file.path] = f"{marker} is missing"
            elif declared.min_age and file.modified > youngest:
                waiting[file.path] = f"it is younger than {declared.min_age}"
            else:
                ready.append(file)
        return ready, waiting

    def _marker_of(self, path: str) -> str | None:
        """Return the path of the file that says that this one is complete."""
        if self.declared.marker is None:
            return None
        folder, slash, name = path.rpartition("/")
        return f"{folder}{slash}{self.declared.marker.replace('*', name)}"

    def _new_files(self, listed: Sequence[ListedFile], known: KnownFiles) -> list[ListedFile]:
        """Return the files that are to be admitted, in the order of admission."""
        by_path = known.by_path()
        fresh = []
        for file in listed:
            was = by_path.get(file.path)
            if was is None or (was.etag != file.etag and self._is_admitted_again(file, was)):
                fresh.append(file)
        return sorted(fresh, key=lambda file: (file.modified, file.path))

    def _is_admitted_again(self, file: ListedFile, was: AdmittedFile) -> bool:
        """Return whether a file with other contents than before has new records. Raises
        AdmittedFileError, as declared.
        """
        if self.declared.rules.changed != "fail":
            return True
        where = f"{self.tree.url}/{file.path}"
        raise errors.AdmittedFileError(
            f"{where} has changed since it was admitted: it had {was.size:,} bytes, and now has"
            f" {file.size:,}, modified {file.modified:%F %T}.",
            'Restore it, or declare FileRules(changed="ignore") to go on with what was admitted, or'
            ' FileRules(changed="append") to admit the new contents as further records.',
            file=where,
            rule="changed",
        )

    def _examine(self, file: ListedFile) -> AdmittedFile:
        """Return the file with the number of its records. Raises an AdjunctError, as declared, for
        a file that can't be read.
        """
        modified = to_microseconds(file.modified)
        admitted = AdmittedFile(file.path, file.size, file.etag, modified, 0)
        try:
            values = path_values(file.path, self.declared)
            rows, form = self._reader.examine(file)
        except errors.SchemaMismatchError as error:
            if self.declared.rules.damaged == "fail":
                raise
            return admitted._replace(problem=f"damaged: {error.problem}")
        return admitted._replace(rows=rows, values=values, form=form)

    # -- reading

    def tables(self, piece: FilePiece, columns: Sequence[str]) -> Iterator[tuple[int, pa.Table]]:
        return self._reader.tables(piece, columns)

    def frame(self, spark: SparkSession, pieces: Sequence[FilePiece]) -> DataFrame | None:
        return self._reader.frame(spark, pieces)


def _is_hidden(path: str) -> bool:
    """Return whether a file is one that programs keep to themselves, or has not finished."""
    if path.endswith(_UNFINISHED):
        return True
    return any(part.startswith((".", "_")) and "=" not in part for part in path.split("/"))


def _is_marker(name: str, marker: str) -> bool:
    before, _, after = marker.partition("*")
    return len(name) > len(before) + len(after) and name.startswith(before) and name.endswith(after)


def path_values(path: str, declared: FolderDeclaration) -> dict[str, str | None]:
    """Return the values of the columns that the path of a file has, as in `day=2026-11-28/`. Raises
    SchemaMismatchError.
    """
    parts = dict(part.split("=", 1) for part in path.split("/")[:-1] if "=" in part)
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
        try:
            convert_texts(pa.array([values[name]], pa.string()), kind)
        except TextMisfit as misfit:
            raise errors.SchemaMismatchError(
                f"{where}: the part {name}={parts[name]} of the path is declared {kind}:"
                f" {misfit.reason}.",
                "Correct the path, or the declared type.",
                column=name,
            ) from misfit
    return values


class FolderStreams(FileStreams):
    """The declared folders of files, as the system `files`."""

    name = SYSTEM
    declaration_class = FolderDeclaration


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
    rules: FileRules = DEFAULT_RULES,
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
    .part and the like. A file waits until it is `min_age` old, and until its `marker` is there: a
    file beside it, such as "_SUCCESS", or with its name for "*", as in "*.done". With
    `listing="after-last"`, only names after the last admitted one are listed. `rules` say what
    becomes of files that have changed, or are damaged, `column_rules` what becomes of columns that
    are not the declared ones. Both may change later, and so may the schema: columns can be added,
    their types widened, and, by column rules, renamed and dropped; files that were admitted before
    are then read so too.

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
        listing=listing,
        rules=rules,
        column_rules=column_rules,
    )
    check_rules(declaration.file_schema, column_rules, what)
    check_format(declaration.file_schema, format, what)
    return declare_file_stream(SYSTEM, name, declaration)


register_system(SYSTEM, FolderStreams)
