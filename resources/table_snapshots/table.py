"""The interface of a table whose earlier states can be read: an Iceberg or a Delta table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.lazy_modules import pa
from dagster_adjunct.resources.schemas.records import fit_to_schema
from dagster_adjunct.resources.schemas.schema import Schema
from dagster_adjunct.resources.schemas.types import arrow_type, find_type_mismatch

TASK_BYTES = 64 * 1024 * 1024
"""How many bytes of files one task of Spark reads."""


@dataclass(frozen=True, slots=True)
class TableState:
    """A state of a table: an Iceberg snapshot, or a version of a Delta table.

    `number` rises with each commit: the sequence number of the snapshot, the version. `same_rows`
    says that the commit changed no row, as a compaction.
    """

    id: str
    number: int
    at: datetime
    same_rows: bool = False


@dataclass(frozen=True, slots=True)
class TableHistory:
    """The states of a table that can still be read, the oldest first, and its identity.

    From the number `complete_since` on, no state is missing. The newest state is the table's since
    `current_since`: after a rollback, that is later than when it was committed. None if it is not
    known, or there is no state.
    """

    identity: str
    states: tuple[TableState, ...]
    complete_since: int
    current_since: datetime | None = None

    def after(self, state_id: str, number: int) -> tuple[TableState, ...]:
        """Return the states after this one, which may have expired."""
        ids = [state.id for state in self.states]
        if state_id in ids:
            return self.states[ids.index(state_id) + 1 :]
        return tuple(state for state in self.states if state.number > number)


@dataclass(frozen=True, slots=True)
class StateFile:
    """A data file of a state: its path, its size in bytes, and its number of rows, None if it is
    unknown before they are read.
    """

    path: str
    size: int
    rows: int | None


@dataclass(frozen=True, slots=True)
class ChangedFiles:
    """How the changes between two states are read.

    If the later state only has more files, all of whose rows are new, these are `added`. Otherwise
    `added` is None: rows before and after have to be compared, in files of `size` bytes in total.
    """

    added: Sequence[StateFile] | None
    size: int = 0


class ChangedRows(NamedTuple):
    """Rows of the state before and of the state after, among them all that differ."""

    before: Iterator[pa.RecordBatch | pa.Table]
    after: Iterator[pa.RecordBatch | pa.Table]


@dataclass(frozen=True, slots=True)
class StateScan:
    """How the rows of a state are read: in `parts`, each in a task of its own.

    `rows` is their number, None if it is unknown before they are read. `columns` are those of the
    table, with the types that the state has.
    """

    columns: pa.Schema
    parts: Sequence[Any] = field(repr=False)
    rows: int | None


class VersionedTable(Protocol):
    """A table whose earlier states can be read. Implementations are frozen values without secrets,
    which can be pickled.
    """

    def describe(self) -> str:
        """Return the kind and the name of the table, for errors."""

    def identity(self) -> str:
        """Return the id of the table; a table that replaces it has another one."""

    def history(self, since: TableState | None) -> TableHistory:
        """Return the states that can be read now; those before `since` may be left out.

        Raises DatasetError if there is no such table, TransientError if its store does not answer.
        """

    def is_readable(self, state: TableState) -> bool:
        """Return whether the files of a state of the history are still there."""

    def plan(self, state: TableState, names: Sequence[str]) -> StateScan:
        """Return how to read the columns of these names, as the table calls them now.

        Raises DatasetError for a column that the table does not have, and for a table that the
        library can't read.
        """

    def read(
        self, state: TableState, part: Any, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch | pa.Table]:
        """Yield the rows of a part, with those of these columns that the state has. Raises
        DatasetError.
        """

    def find_state(self, history: TableHistory, state_id: str) -> TableState | None:
        """Return the state with this id, None if the changes since then can't be read any more."""

    def files(self, state: TableState) -> Sequence[StateFile]:
        """Return the data files of a state, in order of their paths."""

    def file_rows(
        self, state: TableState, path: str, names: Sequence[str]
    ) -> Iterator[pa.RecordBatch | pa.Table]:
        """Yield the rows of a file of a state, each time in the same order."""

    def changed_files(self, before: TableState, after: TableState) -> ChangedFiles:
        """Return how the changes between two states are read.

        Raises AdmittedFileError for changes that the table has not recorded.
        """

    def changed_rows(
        self, before: TableState, after: TableState, names: Sequence[str]
    ) -> ChangedRows:
        """Return rows of both states with these columns, among them all that differ."""


def check_types(columns: pa.Schema, schema: Schema, what: str) -> None:
    """Raise DatasetError for a column that is not of the declared type. An integer, for example,
    may be declared wider than it is in the table; a text can't be declared a number.
    """
    for declared in schema.fields:
        place = columns.get_field_index(declared.name)
        if place < 0:
            continue
        found = find_type_mismatch(
            columns.field(place).type, arrow_type(declared.type), declared.name
        )
        if found is not None:
            raise errors.DatasetError(
                f"{what}: {found}.",
                "Declare the column with the type that the table has.",
                column=declared.name,
            )


def fit_rows(rows: Any, schema: Schema, what: str) -> pa.Table:
    """Return rows of a table with exactly the declared columns, null where the state did not have
    the column yet.

    Raises SchemaMismatchError for a value that the declared type does not hold.
    """
    is_batch = isinstance(rows, pa.RecordBatch)
    table = pa.Table.from_batches([rows]) if is_batch else pa.table(rows)
    for declared in schema.fields:
        if declared.name not in table.column_names:
            nulls = pa.nulls(table.num_rows, arrow_type(declared.type))
            table = table.append_column(declared.name, nulls)
    return fit_to_schema(table.select(schema.names), schema, what)


def group_by_size(files: Iterable[tuple[Any, int]]) -> list[list[Any]]:
    """Return files, each given with its size in bytes, in groups of about `TASK_BYTES`."""
    groups: list[list[Any]] = []
    room = 0
    for file, size in files:
        starts_group = not groups or size > room
        if starts_group:
            groups.append([])
            room = TASK_BYTES
        groups[-1].append(file)
        room -= size
    return groups


def unknown_column_error(what: str, name: str, known: Iterable[str]) -> errors.DatasetError:
    """Return the error for a declared column that the table does not have."""
    return errors.DatasetError(
        f"{what} has no column {name!r}: it has {', '.join(known)}.",
        "Declare the columns by the names that the table has now; say renamed= if one is"
        " called otherwise in earlier versions of the dataset.",
        column=name,
    )
