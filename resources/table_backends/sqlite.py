"""`SqliteTable`: records in a table of an SQLite file, for one machine and many processes.

Values are stored as SQLite's text, integer, real and blob, or:

    boolean      0 or 1
    timestamp    text in UTC, `2013-07-01T00:00:00Z`; a fraction of a second only if there is one
    date         text, `2013-07-01`
    decimal      text with all its digits (a column created elsewhere as DECIMAL keeps about 15 of
                 them)
    json, lists  text, as JSON; values in a list as above, but binary ones in base64
    nested       text, as JSON (`nested_values.py`)
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from dagster_adjunct.resources import errors
from dagster_adjunct.resources.objects.fence import Fence
from dagster_adjunct.resources.table_backends import write_plan
from dagster_adjunct.resources.table_backends.columns import (
    Column,
    Kind,
    check_columns_and_key,
    check_identifier,
    check_required_columns,
    decimal_writer,
    declared_digits,
    loose_key_error,
    make_checker,
    nested_form,
    parse_column,
)
from dagster_adjunct.resources.table_backends.nested_values import (
    InnerName,
    json_reader,
    json_writer,
    read_json,
    set_inside_json,
    write_json,
)
from dagster_adjunct.resources.table_backends.sql_table import Pool, SqlTable
from dagster_adjunct.resources.table_backends.sqlite_bookkeeping import (
    SqliteBookkeeping,
    quote_sqlite_name,
)
from dagster_adjunct.resources.table_backends.write_plan import (
    Applied,
    ChangeGroup,
    RejectedKeysError,
    Row,
    RowCodec,
    StoredState,
    ValidEntries,
    WritePlan,
    check_dropped,
)
from dagster_adjunct.resources.tables.functions import TableUse
from dagster_adjunct.resources.tables.operation import Operation, OperationKind
from dagster_adjunct.resources.tables.presence import Presence
from dagster_adjunct.resources.threads import PerLoop
from dagster_adjunct.resources.validation import Seconds, SecondsOrZero, validated

_TYPES = {
    Kind.STRING: "TEXT",
    Kind.INTEGER: "INTEGER",
    Kind.FLOAT: "REAL",
    Kind.BOOLEAN: "BOOLEAN",
    Kind.TIMESTAMP: "TIMESTAMP",
    Kind.DATE: "DATE",
    Kind.DECIMAL: "TEXT DECIMAL",  # TEXT keeps SQLite from converting digits to a float
    Kind.BINARY: "BLOB",
    Kind.JSON: "TEXT JSON",
    Kind.NESTED: "TEXT JSON",
}


def create_sqlite_table(
    connection: sqlite3.Connection,
    table: str,
    types: Mapping[str, str],
    key: Sequence[str],
    options: str = "",
) -> None:
    """Create the table with `key` as its primary key, unless one of that name exists. `options`
    follow the statement.
    """
    parts = [*(f"{quote_sqlite_name(name)} {type_}" for name, type_ in types.items())]
    parts.append(f"PRIMARY KEY ({quote_sqlite_names(key)})")
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {quote_sqlite_name(table)} ({', '.join(parts)}){options}"
    )


class _StoredColumn(NamedTuple):
    """A column as SQLite describes it; `key_place` counts from 1 in the primary key, 0 is
    outside.
    """

    name: str
    type: str
    key_place: int


def read_sqlite_columns(
    connection: sqlite3.Connection,
    label: str,
    table: str,
    key: Sequence[str],
    declared: Sequence[Column],
) -> tuple[Column, ...]:
    """Return the table's columns.

    Raises SchemaMismatchError if a declared column is missing or computed by SQLite, if SQLite
    would change its values, or if `key` is not unique or may equate different values.
    """
    query = "SELECT name, type, pk FROM pragma_table_info(?)"
    stored = [_StoredColumn(*row) for row in connection.execute(query, (table,))]
    types = {column.name: column.type for column in stored}
    names = list(types)
    _check_generated(connection, label, table, names, declared)
    unique_sets = _unique_column_sets(connection, table, stored)
    check_columns_and_key(label, names, declared, key, unique_sets)
    for name in key:
        if _compares_loosely(connection, table, name):
            raise loose_key_error(
                label, name, "compared by a collation of its own", "one of COLLATE BINARY"
            )
    text_names = [column.name for column in declared if column.kind is Kind.STRING]
    for name in text_names:
        if name in key and _is_number(types[name]):
            kind = f"{types[name]}, where '01' and '1' are one number"
            raise loose_key_error(label, name, kind, "TEXT")
    for column in declared:
        change = _changed_by(types[column.name], column)
        if change is not None:
            problem = (
                f"{label}: column {column.name!r} is {types[column.name]}, where {change}, and"
                f" declared as {column.type}."
            )
            step = f"Declare it as what the table has, or make it {_type_of(column)}."
            raise errors.SchemaMismatchError(problem, step, column=column.name)
    return tuple(parse_column(column.name, column.type) for column in stored)


_REALS = ("REAL", "FLOA", "DOUB")
_DOUBLE_DIGITS = 15  # decimals of so many digits are the same after they were a double


def _changed_by(stored_type: str, column: Column) -> str | None:
    """Return how SQLite changes values of `column` in a stored column of this type, None if it
    keeps them.
    """
    if column.kind is Kind.STRING and _is_number(stored_type):
        return "a text such as '007' becomes the number 7"
    if column.kind in (Kind.INTEGER, Kind.FLOAT, Kind.BOOLEAN) and _is_text(stored_type):
        return "a number becomes a text"
    upper = stored_type.upper()
    is_real = "INT" not in upper and any(word in upper for word in _REALS)  # INT comes first
    if column.kind is Kind.INTEGER and is_real:
        return "an integer becomes a floating point number"
    if column.kind is Kind.DECIMAL and _is_number(stored_type):
        digits = declared_digits(column)
        if digits is not None and digits.precision > _DOUBLE_DIGITS:
            return f"a decimal keeps {_DOUBLE_DIGITS} digits"
    return None


def _check_generated(
    connection: sqlite3.Connection,
    label: str,
    table: str,
    names: Sequence[str],
    declared: Sequence[Column],
) -> None:
    """Raise SchemaMismatchError for a declared column that SQLite computes. `names` are the columns
    that can be written.
    """
    info = connection.execute("SELECT name FROM pragma_table_xinfo(?)", (table,))
    generated = {name for (name,) in info}.difference(names)
    for column in declared:
        if column.name in generated:
            problem = (
                f"{label}: column {column.name!r} is generated by SQLite, so it can't be written."
            )
            step = "Leave it out of columns=, or make it a column that is written."
            raise errors.SchemaMismatchError(problem, step, column=column.name)


def _is_text(stored_type: str) -> bool:
    """Whether SQLite converts numbers to texts in a column of this type, by its affinity rules, of
    which the one for INT comes first.
    """
    upper = stored_type.upper()
    return "INT" not in upper and any(word in upper for word in ("CHAR", "CLOB", "TEXT"))


def _unique_column_sets(
    connection: sqlite3.Connection, table: str, stored: Sequence[_StoredColumn]
) -> list[set[str]]:
    """The sets of columns of which no two rows have the same values, compared by their bytes.

    They are those of unique indexes without a collation, and a primary key of type INTEGER.
    """
    unique_sets = []
    primary = [column for column in stored if column.key_place]
    if len(primary) == 1 and primary[0].type.upper() == "INTEGER":
        unique_sets.append({primary[0].name})
    indexes = connection.execute(
        'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial', (table,)
    ).fetchall()
    for (index,) in indexes:
        columns = connection.execute(
            "SELECT name, coll FROM pragma_index_xinfo(?) WHERE key", (index,)
        ).fetchall()
        if all(collation.upper() == "BINARY" for _, collation in columns):
            unique_sets.append({name for name, _ in columns})
    return unique_sets


def _compares_loosely(connection: sqlite3.Connection, table: str, name: str) -> bool:
    """Whether comparisons of the column ignore case or trailing blanks; no pragma tells a
    column's collation.
    """
    # A UNION compares by the collation of its first SELECT.
    of_column = (
        f"SELECT {quote_sqlite_name(name)} AS k FROM {quote_sqlite_name(table)} WHERE 0 UNION ALL"
        " SELECT 'a'"
    )
    (loosely,) = connection.execute(
        f"SELECT EXISTS (SELECT 1 FROM ({of_column}) WHERE k = 'A' OR k = 'a ')"
    ).fetchone()
    return bool(loosely)


def _is_number(stored_type: str) -> bool:
    """Whether SQLite converts texts to numbers in a column of this type, by its affinity rules."""
    upper = stored_type.upper()
    if "INT" in upper:
        return True
    return bool(upper) and not any(word in upper for word in ("CHAR", "CLOB", "TEXT", "BLOB"))


def quote_sqlite_names(names: Iterable[str]) -> str:
    """Quote names as SQL identifiers, separated by commas."""
    return ", ".join(map(quote_sqlite_name, names))


def _type_of(column: Column) -> str:
    """Return the SQL type with which a declared column is created."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        return f"TEXT ARRAY {_type_of(column.element)}"
    return _TYPES[column.kind] + (column.size if column.kind is Kind.DECIMAL else "")


class _Statement(NamedTuple):
    """A statement of a plan, its parameters for each row, the key of each, and what it does."""

    sql: str
    parameters: Sequence[Row]
    keys: Sequence[Row]
    does: str


class SqliteRequests:
    """A connection to the file of a declared table, with the requests that run over it in
    `thread`.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        thread: ThreadPoolExecutor,
        codec: RowCodec,
        declared: SqliteTable,
    ) -> None:
        self.connection = connection
        self.thread = thread
        self.codec = codec
        self._declared = declared
        self.closed = False
        self.may_have_committed = False
        self.has_idempotency_table = False
        self._file = file_identity(declared.path)
        self._table = quote_sqlite_name(declared.table)
        self._idempotency = ""  # the quoted name of that table, once it is open
        self._bookkeeping = SqliteBookkeeping(connection, declared.table)
        self._is_key = " AND ".join(f"{quote_sqlite_name(name)} = ?" for name in codec.key)

    @property
    def outdated(self) -> bool:
        """Whether the file was removed or replaced since connecting: writes over this connection
        would be lost.
        """
        return self._file != file_identity(self._declared.path)

    async def close(self) -> None:
        """Close the connection, and wait until it is closed."""
        await asyncio.wrap_future(self.finish())

    def finish(self) -> Future[None]:
        """Begin to close the connection; the future is done once it is closed."""
        self.closed = True
        closed = self.thread.submit(self.connection.close)
        self.thread.shutdown(wait=False)
        return closed

    def get(self, keys: Sequence[Row]) -> list[dict[str, Any] | errors.AdjunctError | None]:
        """The record of each key; None if there is none, an error if it can't be read."""
        with self._transaction("DEFERRED"):
            return [
                self._readable_record(self.codec.names, key) for key in self._encoded_keys(keys)
            ]

    def write(self, operation: Operation[Any], valid: ValidEntries) -> WritePlan:
        """Write the valid entries in one transaction. After an error nothing was written, unless
        `may_have_committed` is set.

        Raises RejectedKeysError for records that were dropped or can't be read, and
        RunLeaseLostError if the run that writes has lost its lease.
        """
        with self._transaction("IMMEDIATE"):
            # From here on the write lock is held, so nobody changes before the commit what is read
            # now.
            if operation.fence is not None and operation.fenced:
                self._bookkeeping.pass_fence(self.codec.table, operation.fence)
            if write_plan.needs_read(operation):
                stored = self._read_state(operation, valid)
            else:
                stored = StoredState()
            plan = write_plan.plan_writes(self.codec, operation, valid, stored)
            self._write(plan, operation.conditions.newest_by)
            if operation.fence is not None:
                operation.fence.check()
        return plan

    def forget(self, older_than: float, most: int = -1) -> int:
        """Purge what was last applied to keys more than `older_than` seconds ago, for at most
        `most` keys (-1: all); return how many.
        """
        with self._transaction("IMMEDIATE"):
            horizon = time.time() - older_than
            key = quote_sqlite_names(self.codec.key)
            old_keys = f"SELECT {key} FROM {self._idempotency} WHERE at < ? LIMIT ?"
            return self.connection.execute(
                f"DELETE FROM {self._idempotency} WHERE ({key}) IN ({old_keys})", (horizon, most)
            ).rowcount

    def _record(self, names: Sequence[str], key: Sequence[Any]) -> dict[str, Any] | None:
        """Return these columns of the record of an encoded key; None if there is none."""
        columns = quote_sqlite_names(names) or "1"  # a query needs a column
        query = f"SELECT {columns} FROM {self._table} WHERE {self._is_key}"
        row = self.connection.execute(query, key).fetchone()
        if row is None:
            return None
        return self.codec.read(names, row[: len(names)])

    def _readable_record(
        self, names: Sequence[str], key: Sequence[Any]
    ) -> dict[str, Any] | errors.SchemaMismatchError | None:
        """Return these columns of the record of an encoded key, None if there is none, or the error
        if the record can't be read.
        """
        try:
            return self._record(names, key)
        except errors.SchemaMismatchError as error:
            return error

    def _read_state(self, operation: Operation[Any], valid: ValidEntries) -> StoredState:
        """Return what must be known of the entries' keys to plan the operation; RejectedKeysError
        if some records can't be read.
        """
        names = write_plan.columns_to_read(self.codec, operation, valid.entries)
        newest_by = operation.conditions.newest_by
        keys = valid.keys
        records: dict[Row, dict[str, Any]] = {}
        applied: dict[Row, Applied] = {}
        unreadable: dict[Row, errors.AdjunctError] = {}
        for key, encoded in zip(keys, self._encoded_keys(keys), strict=True):
            record = self._readable_record(names, encoded)
            if isinstance(record, errors.AdjunctError):
                unreadable[key] = record
            elif record is not None:
                records[key] = record
            if operation.conditions:
                query = (
                    f"SELECT {quote_sqlite_names(write_plan.COLUMNS)} FROM"
                    f" {self._idempotency} WHERE {self._is_key}"
                )
                texts = self.connection.execute(query, encoded).fetchone()
                if texts is not None:
                    applied[key] = write_plan.applied_from_texts(self.codec, newest_by, texts)
        if unreadable:
            raise RejectedKeysError(unreadable)
        return StoredState(records, applied)

    def _write(self, plan: WritePlan, newest_by: str | None) -> None:
        """Execute the statements of a plan, and store its marks. Raises RejectedKeysError for
        records that were dropped.
        """
        codec = self.codec
        may_drop = self._may_drop(self._declared.table)
        dropped: dict[Row, str] = {}  # by key, what was not done
        for statement in self._statements(plan):
            if not may_drop:
                self.connection.executemany(statement.sql, statement.parameters)
                continue
            # One row at a time, to see which have no effect.
            for key, row in zip(statement.keys, statement.parameters, strict=True):
                written = self.connection.execute(statement.sql, row).rowcount
                # A record that is not there is not deleted either.
                if not written and statement.does != "delete the record":
                    dropped[key] = statement.does
        if may_drop:
            dropped = self._find_dropped(plan) | dropped
        check_dropped(codec.table, dropped)
        if plan.applied:
            keys = self._encoded_keys(list(plan.applied))
            marks = []
            for key, applied in zip(keys, plan.applied.values(), strict=True):
                texts = write_plan.applied_to_texts(codec, newest_by, applied)
                marks.append((*key, *texts, time.time()))
            upsert = self._upsert(self._idempotency, (*codec.key, *write_plan.COLUMNS, "at"))
            self.connection.executemany(upsert, marks)

    def _statements(self, plan: WritePlan) -> Iterator[_Statement]:
        """Yield the statements that write a plan's records, but not its marks."""
        codec = self.codec
        for records in (plan.puts, plan.begins):
            if records:
                rows = [tuple(map(record.get, codec.names)) for record in records.values()]
                upsert = self._upsert(self._table, codec.names)
                parameters = self._rows(codec.names, rows)
                yield _Statement(upsert, parameters, list(records), "put the record")
        if plan.deletes:
            keys = list(plan.deletes)
            delete = f"DELETE FROM {self._table} WHERE {self._is_key}"
            yield _Statement(delete, self._encoded_keys(keys), keys, "delete the record")
        yield from map(self._update_statement, plan.groups())

    def _update_statement(self, group: ChangeGroup) -> _Statement:
        """Return the statement that makes the changes of a group."""
        key = self.codec.key
        split = write_plan.split_inner(group.sets)
        changes = [f"{quote_sqlite_name(name)} = ?" for name in split.columns]
        for name in map(quote_sqlite_name, split.paths):
            changes.append(f"{name} = adjunct_set_inside({name}, ?)")
        for name in map(quote_sqlite_name, group.appends):
            changes.append(f"{name} = adjunct_appended({name}, ?)")
        rows = self._rows((*group.sets, *group.appends, *key), group.rows)
        if split.paths:
            rows = [_with_inner_changes(group.sets, row, split.paths) for row in rows]
        update = f"UPDATE {self._table} SET {', '.join(changes)} WHERE {self._is_key}"
        keys = [row[-len(key) :] for row in group.rows]
        return _Statement(update, rows, keys, "update the record")

    def check(self, use: TableUse) -> None:
        """Raise if the file can't be written, or required columns or the idempotency table are
        missing.
        """
        if not use.writes:  # connecting has checked all that reads need
            return
        # A file that is locked can be written: nobody waits for the lock here.
        busy = self.connection.execute("PRAGMA busy_timeout").fetchone()[0]
        self.connection.execute("PRAGMA busy_timeout = 0")
        try:
            with self._transaction("IMMEDIATE"):
                # Fails if the file can't be written.
                self.connection.execute(f"DELETE FROM {self._table} WHERE 0")
        except sqlite3.OperationalError as error:
            if primary_error_code(error) != sqlite3.SQLITE_BUSY:  # another process writes
                raise
        finally:
            self.connection.execute(f"PRAGMA busy_timeout = {busy}")
        if use.kinds & {OperationKind.PUT, OperationKind.PUT_IF_ABSENT}:
            required = self.connection.execute(
                'SELECT name FROM pragma_table_info(?) WHERE "notnull" AND dflt_value IS NULL',
                (self._declared.table,),
            )
            names = [name for (name,) in required]
            check_required_columns(self.codec.table, names, self.codec.names)
        if use.conditions:
            self._check_idempotency_table(may_be_missing=self._declared.create)

    def _may_drop(self, table: str) -> bool:
        """Whether a table may drop rows without an error: it has a trigger, or a constraint ON
        CONFLICT IGNORE.
        """
        query = """SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE tbl_name = ? COLLATE NOCASE
                   AND (type = 'trigger' OR sql LIKE '%CONFLICT%'))"""
        return bool(self.connection.execute(query, (table,)).fetchone()[0])

    def _find_dropped(self, plan: WritePlan) -> dict[Row, str]:
        """What the plan should have done and did not, by key: a written record is missing, or a
        deleted one is still there.

        A trigger can move a row that was written to another key, and a constraint can replace it by
        a later one.
        """
        written = [*plan.puts, *plan.begins, *plan.changes]
        dropped = dict.fromkeys(self._select(written, present=False), "keep the record")
        return dropped | dict.fromkeys(
            self._select(list(plan.deletes), present=True), "delete the record"
        )

    def _select(self, keys: list[Row], *, present: bool) -> list[Row]:
        """Return the keys that have a record; with `present=False` the keys that have none."""
        encoded = zip(keys, self._encoded_keys(keys), strict=True)
        return [key for key, stored in encoded if (self._record((), stored) is not None) is present]

    def _upsert(self, table: str, names: Sequence[str]) -> str:
        """Return the statement that puts a row of these columns, whether the key has one or not."""
        # Without other columns, the key is set to itself: a statement that changes nothing would
        # not count a record that is there.
        others = [name for name in names if name not in self.codec.key] or self.codec.key[:1]
        changes = ", ".join(
            f"{quote_sqlite_name(name)} = excluded.{quote_sqlite_name(name)}" for name in others
        )
        return (
            f"INSERT INTO {table} ({quote_sqlite_names(names)}) VALUES"
            f" ({', '.join('?' * len(names))}) ON CONFLICT ({quote_sqlite_names(self.codec.key)})"
            f" DO UPDATE SET {changes}"
        )

    def _rows(self, names: Sequence[str], rows: Sequence[Row]) -> list[Row]:
        """Return rows of checked values of these columns as rows of SQLite's values."""
        return list(zip(*self.codec.encoded(names, rows), strict=True))

    def _encoded_keys(self, keys: Sequence[Row]) -> list[Row]:
        """Return checked keys as rows of SQLite's values."""
        if keys:
            return self._rows(self.codec.key, keys)
        return []

    def inspect(self) -> Presence:
        with self._transaction("DEFERRED"):
            return self._bookkeeping.presence()

    def begin_run(self, fence: Fence | None) -> None:
        """Count the run in the bookkeeping, created first if the table may be, and pass the
        fence.
        """
        with self._transaction("IMMEDIATE"):
            if self._declared.create:
                self._bookkeeping.create()
            if fence is not None:
                self._bookkeeping.pass_fence(self.codec.table, fence)
            self._bookkeeping.count_run()

    def open_idempotency_table(self, *, create: bool) -> None:
        """Check the table that stores marks, after creating it if asked to; then use it. Raises
        TableAccessError if it is missing or unsuitable.
        """
        codec = self.codec
        key = [part.lower() for part in codec.key]  # as SQLite compares names
        name = write_plan.idempotency_table_name(self._declared.table, key)
        if create:
            with self._transaction("IMMEDIATE"):
                types = {part: f"{_type_of(codec.columns[part])} NOT NULL" for part in codec.key}
                types |= dict.fromkeys(write_plan.COLUMNS, "TEXT") | {"at": "REAL NOT NULL"}
                create_sqlite_table(self.connection, name, types, codec.key, " WITHOUT ROWID")
        self._check_idempotency_table(may_be_missing=False)
        self._idempotency = quote_sqlite_name(name)
        self.has_idempotency_table = True

    def _check_idempotency_table(self, *, may_be_missing: bool) -> None:
        """Raise TableAccessError if the idempotency table is missing (unless it may be), has other
        columns, or could drop rows.
        """
        codec = self.codec
        key = [part.lower() for part in codec.key]  # as SQLite compares names
        name = write_plan.idempotency_table_name(self._declared.table, key)
        info = self.connection.execute("SELECT name FROM pragma_table_info(?)", (name,))
        columns = [column for (column,) in info]
        if may_be_missing and not columns:
            return
        write_plan.check_idempotency_columns(codec.table, name, list(codec.key), columns)
        if self._may_drop(name):
            problem = (
                f"{codec.table}: {name!r}, the table for its conditions, has a trigger, which may"
                " drop rows."
            )
            raise errors.TableAccessError(
                problem, f"Remove the trigger from {name}.", table=codec.table
            )

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        """Run the `with` block in a transaction, which an error rolls back.

        `may_have_committed` is set if the commit fails in a way that leaves its outcome unknown.
        """
        self.may_have_committed = False
        self.connection.execute(f"BEGIN {kind}")
        try:
            yield
            try:
                self.connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                self.may_have_committed = primary_error_code(error) == sqlite3.SQLITE_IOERR
                raise
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise


def primary_error_code(error: sqlite3.Error) -> int:
    """Return SQLite's code for the kind of an error, without its details; 0 if it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def sqlite_encoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that turns a checked value into SQLite's form; None if it is stored
    unchanged.
    """
    tree = nested_form(column)
    if tree is not None:
        to_json = json_writer(tree)
        return lambda value: write_json(to_json(value))
    if column.kind is Kind.LIST:
        assert column.element is not None
        item = sqlite_encoder(column.element)
        if item is None:
            return json.dumps
        return lambda values: json.dumps([v if v is None else item(v) for v in values])
    if column.kind is Kind.DECIMAL:
        return decimal_writer(column)
    return _ENCODE.get(column.kind)


def sqlite_decoder(column: Column) -> Callable[[Any], Any] | None:
    """Return the function that turns SQLite's form back into a value; None if it is unchanged."""
    tree = nested_form(column)
    if tree is not None:
        from_json = json_reader(tree)
        return lambda text: from_json(read_json(text))
    if column.kind is Kind.LIST:
        assert column.element is not None
        item = sqlite_decoder(column.element)
        if item is None:
            return json.loads
        return lambda text: [v if v is None else item(v) for v in json.loads(text)]
    return _DECODE.get(column.kind)


def _with_inner_changes(
    sets: Sequence[str], row: Row, inside: Mapping[str, Sequence[InnerName]]
) -> Row:
    """Return the parameters of an update in which each column that is changed inside has one
    parameter: its changes, as `set_inside_json` takes them.

    `row` has the values of `sets` (of paths as JSON), then all other parameters. In the result, the
    columns' parameters follow the values of `sets` that are no paths.
    """
    values = dict(zip(sets, row, strict=False))
    changes = []
    for paths in inside.values():
        pairs = [f"[{write_json(path.names)},{values.pop(path) or 'null'}]" for path in paths]
        changes.append(f"[{','.join(pairs)}]")
    return (*values.values(), *changes, *row[len(sets) :])


def append_json_lists(old: str | None, new: str) -> str:
    """Concatenate two JSON lists, the first of which may be null; SQL statements call it as
    `adjunct_appended`.
    """
    if old is None:
        return new
    return json.dumps([*json.loads(old), *json.loads(new)])


def _moment(text: str) -> datetime:
    """Return the time in a stored text, in UTC; without a time zone it is one in UTC."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        return moment.replace(tzinfo=UTC)
    return moment.astimezone(UTC)


_ENCODE: dict[Kind, Callable[[Any], Any]] = {
    Kind.TIMESTAMP: lambda moment: moment.isoformat().replace("+00:00", "Z"),
    Kind.BOOLEAN: int,
    Kind.DATE: date.isoformat,
    Kind.JSON: json.dumps,
}
_DECODE: dict[Kind, Callable[[Any], Any]] = {
    Kind.BOOLEAN: bool,
    Kind.TIMESTAMP: _moment,
    Kind.DATE: date.fromisoformat,
    Kind.DECIMAL: lambda value: Decimal(str(value)),
    Kind.FLOAT: float,
    Kind.JSON: json.loads,
}


_log = logging.getLogger("adjunct.table")


def prepare_new_file(path: Path) -> None:
    """Create the folder of a file that does not exist yet, and log which file is created: its path
    may be misspelt. Raises OSError.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _log.warning("Creating the SQLite file %s.", path)


_LONGEST_WAIT = 2e6  # seconds, because SQLite counts milliseconds in 32 bits

# Errors that concern the file or its disk, not the request.
_UNUSABLE = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CORRUPT,
)


@validated
class SqliteTable(SqlTable[SqliteRequests]):
    """Read and write function for one table of an SQLite file; every request is one transaction.

    A relative `path` is resolved in the working directory of the declaration. `key` names one
    column or several (then keys are tuples); it must be the primary key or unique. `columns` gives
    the columns' types (see `columns.py`); without it they are read from the table. With `create`
    the first write creates a missing file and table, and `columns` is required; a read creates
    neither, and finds no records. The file is in write-ahead mode, which needs a local disk. A
    writer waits up to `busy_timeout` seconds for other writers, then fails with
    TableUnavailableError, which is retried. `forget_after` is as in `SqlTable`.
    """

    def __init__(
        self,
        path: str | Path,
        table: str,
        key: str | Sequence[str],
        *,
        columns: Mapping[str, str] | None = None,
        create: bool = False,
        busy_timeout: SecondsOrZero = 10.0,
        forget_after: Seconds | None = None,
    ) -> None:
        if str(path) in ("", ":memory:"):
            problem = (
                f"SQLite table {table!r} has the path {str(path)!r}: each connection would open a"
                " database of its own."
            )
            raise errors.ConfigurationError(
                problem, "Use a file, or MemoryTable.", argument="path", table=table
            )
        self.path = str(Path(path).expanduser().absolute())
        self.table = check_identifier("table", table)
        self._label = f"SQLite table {table!r} in {self.path}"
        self._declare(table, key, columns, create=create)
        self.busy_timeout = busy_timeout
        self.forget_after = forget_after
        self._pools = PerLoop(lambda: Pool(1, self._connected), Pool.finish)

    def __repr__(self) -> str:
        return f"SqliteTable({self.path!r}, {self.table!r}, key={self.key})"

    def storage_notes(self) -> list[str]:
        """Return what users should know of stored decimals; nothing without decimal columns."""
        decimals = []
        for column in self._declared:
            if column.kind is Kind.DECIMAL:
                decimals.append(column.name)
        if not decimals:
            return []
        stored = f"SQLite stores decimals ({', '.join(decimals)}) as text, with all their digits"
        return [
            f"{stored}: SQL sorts them as text. CAST({decimals[0]} AS REAL) sorts as numbers, and"
            " rounds."
        ]

    def exists(self) -> bool:
        """Whether the file exists and has the table; creates neither."""
        if not self._has_file():
            return False
        with self._translated(), closing(self._connect_file("rw")) as connection:
            columns = connection.execute("SELECT count(*) FROM pragma_table_info(?)", (self.table,))
            return bool(columns.fetchone()[0])

    async def _check_creation(self) -> None:
        """Raise TableAccessError if the file, or the nearest folder that exists, can't be
        written.
        """
        path = Path(self.path)
        nearest = next(place for place in (path, *path.parents) if place.exists())
        can_hold_table = nearest == path or nearest.is_dir()
        if can_hold_table and os.access(nearest, os.W_OK):
            return
        problem = f"{self._label} does not exist and can't be created: {nearest} is not writable."
        raise errors.TableAccessError(problem, "Use a path that is writable.", table=self._label)

    async def _run(
        self, requests: SqliteRequests, request: Callable[..., Any], *arguments: Any
    ) -> Any:
        with self._translated(requests):
            return await asyncio.get_running_loop().run_in_executor(
                requests.thread, request, *arguments
            )

    def _is_data_error(self, error: BaseException | None) -> bool:
        return isinstance(error, sqlite3.IntegrityError | sqlite3.DataError)

    async def _connected(self, create: bool) -> SqliteRequests:
        """Return a new connection with a thread of its own; `create`: a missing file or table is
        created.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix=f"sqlite-{self.table}")
        try:
            with self._translated():
                return await asyncio.wrap_future(thread.submit(self._connect, thread, make=create))
        except BaseException:
            thread.shutdown(wait=False)
            raise

    def _connect_file(self, mode: str) -> sqlite3.Connection:
        """Connect to the file, which must exist for the mode "rw"; the mode "rwc" creates a
        missing one.
        """
        return sqlite3.connect(
            f"{Path(self.path).as_uri()}?mode={mode}",
            uri=True,
            timeout=min(self.busy_timeout, _LONGEST_WAIT),
            isolation_level=None,
            check_same_thread=False,
        )

    def _has_file(self) -> bool:
        """Whether the file exists; TableAccessError if that can't be found out."""
        try:
            Path(self.path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            problem = f"{self._label} can't be accessed: {error.strerror}."
            raise errors.TableAccessError(
                problem, "Use a path that this user may read.", table=self._label
            ) from error
        return True

    def _connect(self, thread: ThreadPoolExecutor, *, make: bool) -> SqliteRequests:
        """Connect in the thread for requests, check the table's columns, and with `make` create a
        missing file and table. Raises TableNotFoundError, and TableAccessError if the file can not
        be created.
        """
        path = Path(self.path)
        if make:
            try:
                prepare_new_file(path)
            except OSError as error:
                problem = f"{self._label} can't be created: {error.strerror} ({error.filename})."
                raise errors.TableAccessError(
                    problem, "Use a path that is writable.", table=self._label
                ) from error
        elif not self.exists():
            what = f"{self._label}: the file does not exist, or does not have this table."
            step = (
                "Correct path and name, or restore the file. With create=True the first write"
                " creates both; if a run has created them before: adjunct table allow-recreate"
                " NAME --reason …."
            )
            raise errors.TableNotFoundError(what, step, table=self._label)
        connection = self._connect_file("rwc" if make else "rw")
        try:
            _use_write_ahead_log(connection)
            # An application's batch is committed after its writes, so these must be on disk by
            # then.
            connection.execute("PRAGMA synchronous = FULL")
            if make:
                nulls = dict.fromkeys(self.key, " NOT NULL")
                types = {c.name: _type_of(c) + nulls.get(c.name, "") for c in self._declared}
                create_table = partial(create_sqlite_table, connection, self.table, types, self.key)
                SqliteBookkeeping(connection, self.table).create_with_table(create_table)
            connection.create_function("adjunct_appended", 2, append_json_lists, deterministic=True)
            connection.create_function("adjunct_set_inside", 2, set_inside_json, deterministic=True)
            stored = read_sqlite_columns(
                connection, self._label, self.table, self.key, self._declared
            )
            columns: Sequence[Column] = self._declared or stored
            bits = None if self._declared else 64  # SQLite's INTEGER holds any 64-bit integer
            codec = RowCodec(
                self._label,
                self.key,
                columns,
                check=partial(make_checker, bits=bits),
                encode=sqlite_encoder,
                decode=sqlite_decoder,
            )
        except BaseException:
            connection.close()
            raise
        return SqliteRequests(connection, thread, codec, self)

    @contextmanager
    def _translated(self, requests: SqliteRequests | None = None) -> Iterator[None]:
        """Turn errors of SQLite in the `with` block into ours.

        In this order: locked, kept from the file by the file system, a commit of unknown outcome
        over the connection of `requests`, a file that can't be used, a rejected request.
        """
        try:
            yield
        except sqlite3.Error as error:
            code = primary_error_code(error)
            kind: type[errors.AdjunctError]
            kind = errors.TableError
            what = "rejected the request"
            step = "Correct the data or the table."
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                kind = errors.TableUnavailableError
                what = "is locked by another process"
                step = (
                    "The request is retried; if it keeps failing, find the long transaction or the"
                    " stopped process that holds the lock, or raise busy_timeout."
                )
            elif (of_file := sqlite_file_error(error, self.path, self._label)) is not None:
                raise of_file from error
            elif requests is not None and requests.may_have_committed:
                kind = errors.TableUnavailableError
                what = "may have committed the request or not"
                step = "The request is retried; if it keeps failing, check the disk."
            elif code in _UNUSABLE:
                kind = errors.TableAccessError
                what = "can't be accessed"
                step = (
                    "Check that it is an intact SQLite file, that the disk has space, and that this"
                    " user may write the file and its folder. In write-ahead (WAL) mode even"
                    " reading needs that."
                )
            raise kind(f"{self._label} {what} ({error}).", step, table=self._label) from error


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Set the file to write-ahead mode, if it may be written."""
    try:
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")
    except sqlite3.OperationalError as error:
        if primary_error_code(error) != sqlite3.SQLITE_READONLY:  # it can still be read
            raise


# Errors of SQLite that may hide an error of the file system.
_OF_FILE_SYSTEM = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
)


def sqlite_file_error(
    error: sqlite3.Error, path: str, label: str
) -> errors.TableUnavailableError | errors.TableAccessError | None:
    """Return the table's error if the file system keeps this process from writing the file at
    `path`: the disk is full, read-only or denied, or too many files are open. Else None.
    """
    code = primary_error_code(error)
    if code not in _OF_FILE_SYSTEM:
        return None
    found = errors.find_file_error(path)
    if found is None and code == sqlite3.SQLITE_FULL:
        found = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if found is None:
        return None
    reason, step = errors.describe_file_error(found, path)
    if found.errno in (errno.EACCES, errno.EROFS):
        step = (
            "Check that this user may write the file and its folder. In write-ahead (WAL) mode even"
            " reading needs that."
        )
    problem = f"{label} can't be written: {reason} ({error})."
    if errors.needs_room(found):
        return errors.TableUnavailableError(problem, step, table=label, needs_action=True)
    return errors.TableAccessError(problem, step, table=label)


def is_missing(path: str) -> bool:
    """Whether there is certainly no file at the path. If that can't be found out, whoever opens it
    gets the reason.
    """
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def file_identity(path: str) -> tuple[int, int] | None:
    """The device and inode of the file at the path, which tell whether it was replaced; None if
    there is no file, or it can't be looked at: a new connection then gets the reason.
    """
    try:
        # For each request: a Path takes three times as long.
        status = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return status.st_dev, status.st_ino
