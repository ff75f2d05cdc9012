"""What streams of tables in lakehouse formats have in common: `iceberg.events`, `delta.orders`.

The records are those of the data files that the table's snapshots, or versions, have added, in the
order of the snapshots, and in each by path. Files are planned and described by the format's own
library; their rows are read by Arrow, at the admitted places.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.documents import StoredDocument
from dagster_adjunct.resources.file_streams.feed import FilePiece, FileStreamDeclaration
from dagster_adjunct.resources.file_streams.log import AdmittedFile, FileLogState, LostFile
from dagster_adjunct.resources.file_streams.streams import FileStreams
from dagster_adjunct.resources.file_streams.table_columns import (
    Located,
    TableColumn,
    select_columns,
)
from dagster_adjunct.resources.lazy_modules import pa, pq
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.texts import TextMisfit, convert_texts
from dagster_adjunct.resources.streams.declaration import check_same_declaration
from dagster_adjunct.resources.threads import map_in_threads

OnDelete = Literal["fail", "ignore"]
Start = Literal["current", "oldest"]
_THREADS = 16
_PLACE = "__place"  # a column that keeps the number of records where no other one is read
_NEW_STREAM = "Read the table as another stream: declare it under another name."


class TableCursor(StoredDocument):
    """Up to where a table was admitted: `table` is its identity, `at` the last snapshot or version
    of which all files are admitted, -1 if it had none. `columns` says where files have the declared
    columns.
    """

    table: str
    at: int
    columns: dict[str, Located]

    @classmethod
    def parse(cls, text: str) -> TableCursor | None:
        """Return the cursor in this text, None before the first look."""
        if not text:
            return None
        return cls.model_validate_json(text)


class TableDeclaration(FileStreamDeclaration):
    """A table as a stream. `located` says where files have the columns, and `table` is the identity
    of the table; both are stored in the log's cursor, not in the declaration.
    """

    start: Start = "current"
    on_delete: OnDelete = "fail"
    located: dict[str, Located] = Field(default_factory=dict, exclude=True)
    table: str = Field("", exclude=True)

    def check_stored(self, stream: str, state: FileLogState) -> None:
        stored = type(self).model_validate(state.declared)
        update = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in self.lasting_fields
        }
        check_same_declaration(stream, stored.model_copy(update=update), self)

    @property
    def lasting_fields(self) -> tuple[str, ...]:
        """The fields that stay what they were when the first file was admitted."""
        return "key", "partitions", "start", "source"


class TableStreams(FileStreams):
    """The streams of the tables of one format."""

    def declaration(self, stream: str) -> FileStreamDeclaration:
        """Return the declaration of a stream, with what the log's cursor knows of the table."""
        declaration = super().declaration(stream)
        state = self.state(stream)
        if state is None:
            return declaration
        cursor = TableCursor.parse(state.cursor)
        if cursor is None:
            return declaration
        return declaration.model_copy(update={"located": cursor.columns, "table": cursor.table})

    def find_lost(self, stream: str, files: Sequence[AdmittedFile]) -> list[LostFile]:
        feed: Any = self.declaration(stream).feed(self.lake)
        exist = map_in_threads(feed.has_file, [file.path for file in files], _THREADS)
        lost = []
        for file, exists in zip(files, exist, strict=True):
            if not exists:
                lost.append(LostFile(file, "it is gone"))
        return lost


def skipped(what: str, origin: str, time: int, reason: str) -> AdmittedFile:
    """Return the entry in the log for a snapshot or version whose records are left out."""
    return AdmittedFile(what, 0, "", time, 0, origin=origin, problem=f"ignored: {reason}")


def table_error(problem: str, step: str, rule: str) -> errors.AdmittedFileError:
    """Return the error for a table that can't be read on as declared."""
    return errors.AdmittedFileError(problem, step, rule=rule)


def deletion_error(what: str, reason: str) -> errors.AdmittedFileError:
    """Return the error for a snapshot or version that does not only add rows."""
    return table_error(
        f"{what} {reason}, and the stream is declared for a table to which rows are only added.",
        'Declare it with on_delete="ignore" to go on without what this adds and deletes, counted;'
        " records that were admitted before stay.",
        "deleted",
    )


def replaced_error(what: str, before: str, now: str) -> errors.AdmittedFileError:
    """Return the error for a table that has replaced, under its name, the one that was admitted."""
    return table_error(
        f"{what} is another table than the one that was read before: its id is {now}, and was"
        f" {before}.",
        _NEW_STREAM,
        "replaced",
    )


def expired_error(what: str, reason: str) -> errors.AdmittedFileError:
    """Return the error for history that is gone before it was admitted."""
    return table_error(
        f"{what}: {reason}, so it is not known what was added since.",
        f"{_NEW_STREAM} Keep the table's history for longer than the time between two looks.",
        "expired",
    )


@dataclass(frozen=True, slots=True)
class TableFile:
    """An open data file of a table: its columns in order, as the table identifies them."""

    opened: pq.ParquetFile
    columns: Sequence[TableColumn]

    def records(
        self, piece: FilePiece, declared: TableDeclaration, names: Sequence[str]
    ) -> Iterator[tuple[int, pa.Table]]:
        """Yield the records of a piece as (number of the first in the file, table with the declared
        columns of these names), a table for each row group.
        """
        schema = declared.columns.select(names)
        located = declared.located
        constants = _constants(piece.file, located, schema)
        needed = {where.at for name, where in located.items() if name in schema}
        columns = [column for column in self.columns if column.at in needed]
        chosen = [column.name for column in columns]
        first = 0  # the number of the row group's first record
        for group in range(self.opened.num_row_groups):
            count = self.opened.metadata.row_group(group).num_rows
            start = max(piece.start - first, 0)
            end = min(piece.end - first, count)
            if start < end:
                rows = self.opened.read_row_group(group, columns=chosen).select(chosen)
                rows = rows.append_column(_PLACE, pa.nulls(count)).slice(start, end - start)
                records = select_columns(rows, columns, located, schema, constants)
                yield first + start, records
            first += count


def _constants(
    file: AdmittedFile, located: Mapping[str, Located], schema: Schema
) -> dict[str, pa.Array]:
    """Return the columns that have the same value in all records of a file, in arrays of one.
    Raises SchemaMismatchError for a column that no look at the table has located yet.
    """
    constants = {}
    for field in schema.fields:
        if field.name not in located:
            raise errors.SchemaMismatchError(
                f"{file.path}: the column {field.name!r} was declared after the last look at the"
                " table.",
                "Look again: adjunct stream admit STREAM.",
                column=field.name,
            )
        at = str(located[field.name].at)
        if at in file.values:
            constants[field.name] = _constant(file.values[at], field.type, file.path)
    return constants


def _constant(text: str | None, kind: str, path: str) -> pa.Array:
    """Return a partition's value, in an array of one. Raises SchemaMismatchError."""
    try:
        return convert_texts(pa.array([text], pa.string()), kind)
    except TextMisfit as misfit:
        raise errors.SchemaMismatchError(
            f"{path}: a value of its partition is declared {kind}: {misfit.reason}.",
            "Correct the declared type.",
            file=path,
        ) from misfit


@contextmanager
def translate_read_errors(path: str, name: str) -> Iterator[None]:
    """Raise the errors of reading a data file as Adjunct's; `name` is that under which the stream
    has the file.
    """
    set_aside = (
        "Go on without its records: adjunct stream set-aside STREAM"
        f" {shlex.quote(name)} --reason …."
    )
    try:
        yield
    except FileNotFoundError as error:
        raise errors.AdmittedFileError(
            f"{path} is gone, which was admitted: the table's history was expired, or vacuumed,"
            " before its records were read.",
            f"Keep the history for longer than readers need. {set_aside}",
            file=path,
            rule="expired",
        ) from error
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        reason = errors.first_line(error)
        raise errors.AdmittedFileError(
            f"{path} can't be read as declared: {reason}.",
            f"Restore the file, or correct the declared types. {set_aside}",
            file=path,
            rule="damaged",
        ) from error
    except OSError as error:
        reason = errors.first_line(error)
        step = "Check the store, then run it again."
        if error.errno is None:  # of Arrow: about the contents, or a request to the store
            step += f" If the file is damaged, restore it. {set_aside}"
        raise errors.StreamUnavailableError(
            f"{path} can't be read now: {reason}.", step, url=path
        ) from error


def open_parquet(source: Any) -> pq.ParquetFile:
    """Return an open Parquet file. Timestamps of the old form INT96 are read in microseconds."""
    return pq.ParquetFile(source, coerce_int96_timestamp_unit="us", pre_buffer=True)
