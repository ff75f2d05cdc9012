"""Plans the writes of one request: which entries are applied, and the one change of each key that
results.

All of it is pure, and backends share it so that they agree on what a request means. In one
transaction, an SQL store locks the request's keys, reads their state (`StoredState`), calls
`plan_writes`, and writes the plan. Entries of one key take effect in order, each seeing the earlier
ones.

- A record is a mapping of columns. It may omit the key's columns; if present, they must equal the
  key. Columns that a whole record omits become null; an update leaves them alone.
- Keys of several columns are tuples, in the order of the names that the request gives, else in the
  store's.
- With conditions, SQL stores keep `Applied` in a table of its own, the idempotency table
  `<table>__adjunct`, one row per key, which is locked before a conditional write and changed in the
  same transaction. The row outlives the record, so that older messages don't restore it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Context, Decimal
from typing import Any, NamedTuple

from dagster_adjunct.resources.errors import (
    AdjunctError,
    ConfigurationError,
    SchemaMismatchError,
    TableAccessError,
    TableError,
)
from dagster_adjunct.resources.table_backends.columns import (
    Column,
    InnerNameError,
    Kind,
    OutOfRangeError,
    inner_column,
    make_checker,
)
from dagster_adjunct.resources.table_backends.nested_values import (
    InnerName,
    json_writer,
    parse_inner_name,
    value_inside,
    with_inside,
    write_json,
)
from dagster_adjunct.resources.tables.arrow import ArrowEntries
from dagster_adjunct.resources.tables.functions import record_not_found_error
from dagster_adjunct.resources.tables.operation import (
    Changes,
    Conditions,
    Mark,
    Operation,
    OperationKind,
    Outcomes,
    Problem,
    State,
    key_length_error,
    key_reorderer,
)
from dagster_adjunct.resources.tables.presence import BOOKKEEPING_SUFFIX

Key = Any  # one value, or a tuple for a key of several columns
Row = tuple[Any, ...]
Record = Mapping[str, Any]

_EXACT = Context(prec=2000)  # the default rounds sums to 28 digits
_NUMBERS = (Kind.INTEGER, Kind.FLOAT, Kind.DECIMAL)


class CheckedChanges(NamedTuple):
    """`Changes` after `RowCodec.changes` has checked them; removed columns are in `set`, as
    None. Values inside columns of structs have an `InnerName` as the column.
    """

    set: dict[str, Any]
    add: dict[str, Any]
    append: dict[str, Any]


class _InnerColumn(NamedTuple):
    """A value inside a column of structs: where it is, and its type as if it were a column."""

    path: InnerName
    column: Column


class RowCodec:
    """Checks, encodes and decodes the records of one table; errors name the table, the column and
    the value.

    `check`, `encode` and `decode` return a function for each column. That of `check` checks and
    normalizes a value, or raises TypeError. That of `encode` turns a checked value into the store's
    form, that of `decode` turns it back; None leaves values unchanged.
    """

    has_inner = False
    """Whether an update has changed values inside columns of structs."""

    def __init__(
        self,
        table: str,
        key: Sequence[str],
        columns: Sequence[Column],
        *,
        check: Callable[[Column], Callable[[Any], Any]] = make_checker,
        encode: Callable[[Column], Callable[[Any], Any] | None] = lambda _: None,
        decode: Callable[[Column], Callable[[Any], Any] | None] = lambda _: None,
    ) -> None:
        self.table = table
        self.columns = {column.name: column for column in columns}
        self.names = tuple(self.columns)
        self.key = tuple(key)
        for name in self.key:
            if name not in self.columns:
                what = (
                    f"{table} has no column {name!r}, but it is declared as its key; it has"
                    f" {', '.join(self.names)}."
                )
                raise SchemaMismatchError(what, "Correct the key, or the columns.", column=name)
            if self.columns[name].kind in (Kind.JSON, Kind.LIST, Kind.NESTED):
                problem = (
                    f"{table}: column {name!r} is {self.columns[name].type}, which can't be a key."
                )
                raise SchemaMismatchError(
                    problem, "Use columns of single values as the key.", column=name
                )
        self._make_check = check
        self._check = {c.name: check(c) for c in columns}
        self._encode = {c.name: encode(c) for c in columns}
        self._decode = {c.name: decode(c) for c in columns}
        # What updates have changed inside columns of structs, by the path as text.
        self._inner: dict[str, _InnerColumn] = {}

    @property
    def types(self) -> dict[str, str]:
        """The types of the columns, by the columns' names."""
        return {name: f"{column.type}{column.size}" for name, column in self.columns.items()}

    def keys_by(self, names: Sequence[str]) -> Callable[[Key], Row]:
        """Return the function that checks a key whose columns are in the order of `names`
        (`key_row`).

        Empty `names` stand for the store's order.
        """
        ordered = key_reorderer(self.table, self.key, names)
        if ordered is None:
            return self.key_row
        return lambda key: self.key_row(ordered(key))

    def key_row(self, key: Key) -> Row:
        """The key's checked values, in the store's order. Raises SchemaMismatchError for another
        number of values, and for null.
        """
        if len(self.key) == 1:
            row: Row = (self.checked(self.key[0], key),)
        elif isinstance(key, tuple) and len(key) == len(self.key):
            row = tuple(map(self.checked, self.key, key))
        else:
            raise key_length_error(self.table, key, self.key)
        if None in row:
            problem = (
                f"{self.table} got {key!r} as a key; {' and '.join(self.key)} must not be null."
            )
            raise SchemaMismatchError(
                problem, "Filter such records out before they reach the table.", table=self.table
            )
        return row

    def whole(self, key: Row, record: Record) -> dict[str, Any]:
        """The checked values of a whole record, including the key's columns, which `record` may
        omit. Raises SchemaMismatchError if a value does not fit its column, or the key differs.
        """
        fields = self._drop_key(key, self._fields(record), record)
        if self.has_inner:
            self._check_whole(fields)
        fields.update(zip(self.key, key, strict=True))
        return fields

    def _check_whole(self, fields: Mapping[str, Any]) -> None:
        """Raise SchemaMismatchError for a path among the columns of a whole record."""
        for name in self._inner.keys() & fields.keys():
            problem = f"{self.table}: a whole record names {name!r}, a part of a column."
            raise SchemaMismatchError(problem, "Put the whole column.", column=name)

    def changes(self, key: Row, update: Record | Changes) -> CheckedChanges:
        """The checked changes of an update, which may set the key's columns only to the key's own
        values. Raises SchemaMismatchError for changes that its columns do not take.
        """
        given = update.set if isinstance(update, Changes) else update
        sets = self._drop_key(key, self._fields(given), given)
        for name in sets.keys() - self.columns.keys():
            self.column(name)  # raises, unless it is a path inside a column
        changes = CheckedChanges(sets, {}, {})
        if not isinstance(update, Changes):
            if self.has_inner:
                return self._with_inner_names(changes)
            return changes
        for name, value in update.add.items():
            if value is not None:
                changes.add[name] = self.check_added(name, value)
        for name, value in update.append.items():
            if value is not None:
                values = self.check_appended(name, value)
                if values:
                    changes.append[name] = values
        self._check_names(sets, [*update.add, *update.append, *update.remove])
        sets.update(dict.fromkeys(update.remove))
        if self.has_inner:
            return self._with_inner_names(changes)
        return changes

    def _with_inner_names(self, changes: CheckedChanges) -> CheckedChanges:
        """Return changes whose paths are `InnerName`s. Raises SchemaMismatchError if they change a
        column as a whole, too, or a path twice.
        """
        inner = self._inner
        # By the steps to what is changed (a column as a whole: its name), the update's name for it.
        changed: dict[str | tuple[str, ...], str] = {}
        for name in (*changes.set, *changes.add, *changes.append):
            steps: str | tuple[str, ...]
            if name in inner:
                path = inner[name].path
                steps = (path.root, *path.names)
            else:
                steps = name
            other = changed.setdefault(steps, name)
            if other != name:
                raise self._double_error(other, name)
        for name in changed.values():
            if name in inner and inner[name].path.root in changed:
                raise self._double_error(inner[name].path.root, name)
        paths = {name: inner[name].path for name in changed.values() if name in inner}
        return CheckedChanges(
            {paths.get(name, name): value for name, value in changes.set.items()},
            {paths.get(name, name): value for name, value in changes.add.items()},
            changes.append,
        )

    def _double_error(self, one: str, other: str) -> SchemaMismatchError:
        """The error for an update that changes one value by two names."""
        problem = f"{self.table}: an update changes {one!r} and {other!r}, which overlap."
        return SchemaMismatchError(problem, "Name a value once.", column=other)

    def _check_names(self, sets: Mapping[str, Any], others: Sequence[str]) -> None:
        """Raise SchemaMismatchError if an update changes a column twice, or one of the key.

        It sets the columns in `sets`, and adds to, appends to or removes `others`.
        """
        for name in others:
            if name in sets or others.count(name) > 1:
                problem = f"{self.table}: an update changes column {name!r} in two ways."
                raise SchemaMismatchError(
                    problem, "Name a column in one of set, add, append and remove.", column=name
                )
        for name in others:
            self.column(name)  # raises if there is none
            if name in self.key:
                problem = (
                    f"{self.table}: an update changes column {name!r}, which is part of the key."
                )
                raise SchemaMismatchError(
                    problem, "Delete the record and put it with its new key.", column=name
                )

    def sum(self, name: str, old: Any, number: Any) -> Any:
        """The value of column `name` after adding `number` to `old`.

        In a column of JSON, both are objects: the result has the members of both; where both have a
        name, it has the member of `number`. SchemaMismatchError if the sum does not fit the column.
        """
        if self.column(name).kind is Kind.JSON:
            if old is not None and not isinstance(old, dict):
                raise self.misfit_error(
                    name, number, f"members can't be added to what the column holds, {old!r}"
                )
            return {**(old or {}), **number}
        if old is None:
            return number
        total = _EXACT.add(old, number) if isinstance(old, Decimal) else old + number
        return self.checked(name, total)

    def column(self, name: str) -> Column:
        """The column of that name, or the value inside a column at the path `name`, as a column.

        Raises SchemaMismatchError if the table has neither. From its first use on, a path is known
        to this codec (`has_inner`).
        """
        column = self.columns.get(name)
        if column is not None:
            return column
        if name in self._inner:
            return self._inner[name].column
        path = None
        if isinstance(name, str):
            path = parse_inner_name(name)
        if path is not None:
            return self._inner_column(path)
        problem = f"{self.table} has no column {name!r}; it has {', '.join(self.names)}."
        raise SchemaMismatchError(problem, "Omit the field, or add the column.", column=str(name))

    def _inner_column(self, path: InnerName) -> Column:
        """The simple value at a path inside a column of structs, as a column, which is known from
        now on. Raises SchemaMismatchError if there is none.
        """
        try:
            column = inner_column(path, self.columns.get(path.root))
        except InnerNameError as error:
            raise SchemaMismatchError(
                f"{self.table}{error}.", f"{error.next_step}.", column=str(path)
            ) from None
        assert column.nested is not None
        to_json = json_writer(column.nested)
        self._check[path] = self._make_check(column)
        self._encode[path] = lambda value: write_json(to_json(value))
        self._inner[path] = _InnerColumn(path, column)
        self.has_inner = True
        return column

    def checked(self, name: str, value: Any) -> Any:
        """The normalized value for column `name`. Raises SchemaMismatchError if it does not fit.

        If it has the column's type, but is out of its range, OutOfRangeError is the cause.
        """
        self.column(name)  # raises if there is none
        try:
            if value is None:
                return None
            return self._check[name](value)
        except OutOfRangeError as error:
            raise self.misfit_error(name, value, str(error)) from error
        except (TypeError, ValueError, ArithmeticError) as error:
            raise self.misfit_error(name, value, str(error)) from None

    def check_order(self, newest_by: str) -> None:
        """Raise SchemaMismatchError if `newest_by` is a column whose values have no order, such
        as JSON.
        """
        is_path = newest_by not in self.columns
        if self.column(newest_by).kind not in _TIME_FROM_TEXT or is_path:
            problem = (
                f"{self.table}: newest_by needs a column of times, numbers or text, and"
                f" {newest_by!r} is none."
            )
            raise SchemaMismatchError(
                problem, "Name another column as newest_by.", column=newest_by
            )

    def time(self, newest_by: str, operation: Operation[Any], place: int) -> Any:
        """The checked time of the entry at index `place`, for the column `newest_by`. Raises
        SchemaMismatchError if the entry has none.
        """
        newest = operation.entries.newest
        time = None
        if newest is not None:
            time = self.checked(newest_by, newest[place])
        if time is None:
            raise SchemaMismatchError(
                f"{self.table}: the entry for key {operation.entries.keys[place]!r} has no"
                f" {newest_by}, which newest_by needs.",
                f"Set {newest_by} in every message, or filter such messages out.",
                column=newest_by,
            )
        return time

    def encoded(self, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Return rows of checked values of the columns `names` in the store's form, as one list
        per column.
        """
        columns: list[list[Any]] = []
        for place, name in enumerate(names):
            encode = self._encode[name]
            values = [row[place] for row in rows]
            if encode is not None:
                values = [None if value is None else encode(value) for value in values]
            columns.append(values)
        return columns

    def read(self, names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
        """Return a stored row as values by column; its values are in the store's form and in the
        order of `names`.
        """
        decode = self._decode
        try:
            return {
                name: value if value is None or (to := decode[name]) is None else to(value)
                for name, value in zip(names, row, strict=True)
            }
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
            for name, value in zip(names, row, strict=True):
                self._read_value(name, value)
            raise

    def _read_value(self, name: str, value: Any) -> Any:
        """The value of a column in the store's form; SchemaMismatchError if it can't be read."""
        decode = self._decode[name]
        try:
            if value is None or decode is None:
                return value
            return decode(value)
        except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
            raise self.unreadable_error(name, value, str(error)) from error

    def unreadable_error(self, name: str, value: Any, why: str) -> SchemaMismatchError:
        """The error for a stored value that no Python value of its column's type can hold."""
        column = self.columns[name]
        problem = (
            f"{self.table}: column {name!r} ({column.type}{column.size}) holds {value!r:.100},"
            f" which can't be read: {why}."
        )
        return SchemaMismatchError(
            problem, "Correct the record, or leave the column out of `columns`.", column=name
        )

    def are_equal(self, value: Any, part: Any) -> bool:
        """Whether a checked value equals a checked part of a key."""
        return bool(value == part)

    def _drop_key(self, key: Row, fields: dict[str, Any], given: Record) -> dict[str, Any]:
        """Return `fields` without the key's columns. Raises SchemaMismatchError if they differ from
        the key; `given` has the values as the caller gave them.
        """
        for name, part in zip(self.key, key, strict=True):
            if name in fields and not self.are_equal(fields.pop(name), part):
                problem = (
                    f"{self.table}: the record for key {key!r} has {given[name]!r} as its {name}."
                )
                step = "Set the key's columns to the record's own key, or omit them."
                raise SchemaMismatchError(problem, step, table=self.table, column=name)
        return fields

    def _fields(self, record: Record) -> dict[str, Any]:
        """Return a record's values, checked and normalized. Raises SchemaMismatchError."""
        if not isinstance(record, Mapping):
            problem = (
                f"{self.table} got a {type(record).__name__}; expected a mapping of columns to"
                " values."
            )
            raise SchemaMismatchError(problem, "Pass dicts.", table=self.table)
        check = self._check
        try:
            return {
                name: None if value is None else check[name](value)
                for name, value in record.items()
            }
        except (KeyError, TypeError, ValueError, ArithmeticError):
            # Raises with a helpful message, unless all that was missing is a path inside a column.
            return {name: self.checked(name, value) for name, value in record.items()}

    def check_added(self, name: str, value: Any) -> Any:
        """The checked value to add to a column. Raises SchemaMismatchError if that can not be
        added.
        """
        kind = self.column(name).kind
        if kind is Kind.JSON and not isinstance(value, dict):
            raise self.misfit_error(name, value, "only the members of a dict can be added to json")
        if kind not in (*_NUMBERS, Kind.JSON):
            raise self.misfit_error(name, value, "only numbers, and members of json, can be added")
        return self.checked(name, value)

    def check_appended(self, name: str, value: Any) -> Any:
        """The checked values to append to a column. Raises SchemaMismatchError if they can not be
        appended.
        """
        if self.column(name).kind is not Kind.LIST:
            raise self.misfit_error(
                name, value, "only a column of lists (array<type>) can be appended to"
            )
        return self.checked(name, value)

    def misfit_error(self, name: str, value: Any, why: str) -> SchemaMismatchError:
        """The error for a value that does not fit its column."""
        column = self.column(name)
        problem = (
            f"{self.table}: column {name!r} is {column.type}{column.size}, but got {value!r:.100} "
            f"({type(value).__name__}); {why}."
        )
        return SchemaMismatchError(
            problem, "Convert the value to the type of the column.", column=name
        )


COLUMNS = ("newest_of", "newest", "tie", "applied")
"""The columns of the idempotency table that store an `Applied` as texts, in this order.

Before them are the key's columns, after them is `at`, the time at which the row was last written.
"""

# How a time for `newest_by` is read from its text, and written to it, unless by `isoformat`. Values
# of other kinds have no order.
_TIME_FROM_TEXT: dict[Kind, Any] = {
    Kind.STRING: str,
    Kind.INTEGER: int,
    Kind.FLOAT: float,
    Kind.DECIMAL: Decimal,
    Kind.DATE: date.fromisoformat,
    Kind.TIMESTAMP: datetime.fromisoformat,
}
_TIME_TO_TEXT: dict[Kind, Any] = {
    Kind.STRING: str,
    Kind.INTEGER: str,
    Kind.DECIMAL: str,
    Kind.FLOAT: repr,
}


def marks_table_name(table: str) -> str:
    """The name of the idempotency table of `table`, whether it can have one or not."""
    return f"{table}__adjunct"


def idempotency_table_name(table: str, key: Sequence[str]) -> str:
    """The name of the idempotency table of `table`. Raises ConfigurationError if `table` can't have
    one.

    That is so if the name is too long, or if a column of the key has the name of one of the table's
    own columns.
    """
    name = marks_table_name(table)
    if len(name.encode()) > 63:
        problem = (
            f"table {table!r} can't have conditions: {name!r}, the table for their state, is longer"
            " than 63 bytes."
        )
        raise ConfigurationError(
            problem, "Use a shorter table name, or remove newest_by and idempotent.", table=table
        )
    for part in key:
        if part in (*COLUMNS, "at"):
            raise ConfigurationError(
                f"table {table!r} can't have conditions: {name!r}, the table for their state, has a"
                f" column {part!r}.",
                "Rename the key's column, or remove newest_by and idempotent.",
                table=table,
            )
    return name


def bookkeeping_table_name(table: str) -> str | None:
    """The name of the table with the book-keeping of `table`; None if `table` is too long to
    have one.
    """
    name = f"{table}{BOOKKEEPING_SUFFIX}"
    if len(name.encode()) <= 63:
        return name
    return None


def check_idempotency_columns(
    label: str, idempotency: str, key: Sequence[str], names: Sequence[str]
) -> None:
    """Raise TableAccessError unless the idempotency table has the columns that it must have.

    `names` are its columns; there are none if the table is missing.
    """
    if set(names) != {*key, *COLUMNS, "at"}:
        found = "there is none"
        if names:
            found = f"it has {', '.join(names)}"
        raise TableAccessError(
            f"{label}: newest_by and idempotent need a table {idempotency!r} with the columns"
            f" {', '.join(key)}, {', '.join(COLUMNS)}, at; {found}.",
            "Declare the table with create=True, or create that table.",
            table=label,
        )


class Newest(NamedTuple):
    """The newest message of a key: its time for `newest_by`, and its `Mark.tie`. They order as
    messages do.
    """

    time: Any
    tie: str


@dataclass(slots=True)
class Applied:
    """What was applied to a key: the newest message, and each source's greatest position."""

    newest: Newest | None = None
    positions: dict[str, str] = field(default_factory=dict)  # by source
    # The first three of `COLUMNS` as read.
    stored_texts: tuple[str | None, ...] = (None, None, None)
    # The record's own time, which stands for `newest` if there is none; not stored.
    record_newest: Newest | None = None

    def was_applied(self, conditions: Conditions, mark: Mark) -> bool:
        """Whether the message, or a later one of its source, was applied before."""
        return conditions.idempotent and mark.position <= self.positions.get(mark.source, "")

    def is_late(self, conditions: Conditions, mark: Mark, time: Any) -> bool:
        """Whether the newest message applied to the key is newer than this one, by time and tie."""
        newest = self.newest or self.record_newest
        if conditions.newest_by is None or newest is None:
            return False
        return (time, mark.tie) < newest

    def remember(self, conditions: Conditions, mark: Mark, time: Any, *, late: bool) -> None:
        """Note that a message was applied; one that is `late` does not become the newest."""
        if conditions.idempotent:
            self.positions[mark.source] = mark.position
        if conditions.newest_by is not None and not late:
            self.newest = Newest(time, mark.tie)


def applied_to_texts(
    codec: RowCodec, newest_by: str | None, applied: Applied
) -> tuple[str | None, ...]:
    """Return the texts to store in `COLUMNS`: the column `newest_by`, the newest message's time and
    tie, and the positions.

    Without `newest_by`, and if all messages that were applied are older than the record, column,
    time and tie stay as they were read.
    """
    if applied.newest is None or newest_by is None:
        return (*applied.stored_texts, json.dumps(applied.positions))
    time, tie = applied.newest
    write = _TIME_TO_TEXT.get(codec.columns[newest_by].kind)
    return (
        newest_by,
        write(time) if write else time.isoformat(),
        tie,
        json.dumps(applied.positions),
    )


def applied_from_texts(codec: RowCodec, newest_by: str | None, texts: tuple[Any, ...]) -> Applied:
    """Return which messages a record has, from the texts that `applied_to_texts` made; a newest
    time of another column than `newest_by` is ignored.
    """
    column, time_text, tie, positions_text = texts
    positions = json.loads(positions_text) if positions_text else {}
    stored_texts = (column, time_text, tie)
    if newest_by is None or column != newest_by or time_text is None:
        return Applied(None, positions, stored_texts)
    time = _TIME_FROM_TEXT[codec.columns[newest_by].kind](time_text)
    return Applied(Newest(time, tie), positions, stored_texts)


class Entry(NamedTuple):
    """A valid entry with checked values: its index in the operation, its key, and its time for
    `newest_by`.

    `value` is the whole record of a put or the `CheckedChanges` of an update, else None.
    """

    place: int
    key: Row
    value: Any
    time: Any = None


@dataclass(frozen=True, slots=True)
class ValidEntries:
    """The valid entries of an operation, and the problems of the others by their index."""

    entries: Sequence[Entry]
    problems: dict[int, Problem]

    @property
    def keys(self) -> list[Row]:
        """The distinct keys of the entries."""
        return list(dict.fromkeys(entry.key for entry in self.entries))

    def outcomes(self, count: int, stored: Sequence[Any]) -> Outcomes:
        """Return the outcomes of a get of `count` entries; `stored` has for each valid entry the
        record, None if there is none, or the error of one that can't be read.
        """
        records: list[Any] = [None] * count
        problems = dict(self.problems)
        for entry, record in zip(self.entries, stored, strict=True):
            if isinstance(record, AdjunctError):
                problems[entry.place] = Problem(State.REFUSED, record)
            else:
                records[entry.place] = record
        return Outcomes(count, records, problems)


@dataclass(frozen=True, slots=True)
class StoredState:
    """What the store has: for each key with a record the columns that were read, and what was
    applied to keys.
    """

    records: Mapping[Row, Mapping[str, Any]] = field(default_factory=dict)
    applied: Mapping[Row, Applied] = field(default_factory=dict)


class ChangeGroup(NamedTuple):
    """Changes of keys that set the same columns and append to the same ones.

    Each row has the values of `sets`, then those of `appends`, then the key.
    """

    sets: tuple[str, ...]
    appends: tuple[str, ...]
    rows: list[Row]


@dataclass(slots=True)
class WritePlan:
    """What to write for one operation. Each key is in at most one of `puts`, `begins`, `deletes`
    and `changes`.

    `puts` are whole records for keys with or without a record. `begins` are whole records for keys
    without one: if another writer creates one meanwhile, nothing of the plan may be written.
    `changes` are for existing records. `applied` is stored in the idempotency table. `problems` are
    by the entries' indices.
    """

    puts: dict[Row, dict[str, Any]] = field(default_factory=dict)
    begins: dict[Row, dict[str, Any]] = field(default_factory=dict)
    deletes: dict[Row, None] = field(default_factory=dict)
    changes: dict[Row, CheckedChanges] = field(default_factory=dict)
    applied: dict[Row, Applied] = field(default_factory=dict)
    problems: dict[int, Problem] = field(default_factory=dict)
    defaults_put: int = 0

    def groups(self) -> Iterable[ChangeGroup]:
        """Return `changes`, grouped by the columns that they change.

        Additions are not in them: planning has made them values to set.
        """
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], ChangeGroup] = {}
        for key, (sets, _, append) in self.changes.items():
            if sets or append:
                set_names = tuple(sorted(sets))
                append_names = tuple(sorted(append))
                group = groups.get((set_names, append_names))
                if group is None:
                    group = ChangeGroup(set_names, append_names, [])
                    groups[set_names, append_names] = group
                group.rows.append((*map(sets.get, set_names), *map(append.get, append_names), *key))
        return groups.values()


def _values_to_check(operation: Operation[Any], has_values: bool) -> Sequence[Any]:
    """Return the value of each entry to check; None for all if the operation has no values
    (`has_values`).
    """
    entries = operation.entries
    values = entries.values if has_values else None
    return values or [None] * len(entries)


def validate_entries(codec: RowCodec, operation: Operation[Any]) -> ValidEntries:
    """Check all entries; an invalid one gets a problem of its own.

    The key of a get that no stored record can have is left out, without a problem.
    """
    entries = operation.entries
    kind = operation.kind
    if isinstance(entries, ArrowEntries):  # they know the names of their key's columns
        key_names = entries.key_names
    else:
        key_names = operation.key
    to_key = codec.keys_by(key_names)
    check_value: Callable[[Row, Any], Any] = (
        codec.changes if kind is OperationKind.UPDATE else codec.whole
    )
    has_values = kind not in (OperationKind.GET, OperationKind.DELETE)
    values = _values_to_check(operation, has_values)
    newest_by = operation.conditions.newest_by
    if newest_by is not None:
        codec.check_order(newest_by)
    valid: list[Entry] = []
    problems: dict[int, Problem] = {}
    for place, (key, value) in enumerate(zip(entries.keys, values, strict=True)):
        try:
            row = to_key(key)
            checked = None
            if has_values:
                checked = check_value(row, value)
            time = None
            if newest_by is not None:
                time = codec.time(newest_by, operation, place)
            valid.append(Entry(place, row, checked, time))
        except SchemaMismatchError as error:
            is_out_of_range = isinstance(error.__cause__, OutOfRangeError)
            if not (kind is OperationKind.GET and is_out_of_range):
                problems[place] = Problem(State.REFUSED, error)
    return ValidEntries(valid, problems)


def columns_to_read(
    codec: RowCodec, operation: Operation[Any], entries: Sequence[Entry]
) -> tuple[str, ...]:
    """The columns that must be read of existing records to plan the operation."""
    newest_by = operation.conditions.newest_by
    names: dict[str, None] = {} if newest_by is None else {newest_by: None}
    for entry in entries if operation.kind is OperationKind.UPDATE else ():
        names.update(dict.fromkeys(entry.value.add))
        if codec.has_inner:  # a column that is changed inside must hold a struct
            names.update(dict.fromkeys(split_inner(entry.value.set).paths))
    if not codec.has_inner:
        return tuple(names)
    split = split_inner(names)
    return tuple(dict.fromkeys([*split.columns, *split.paths]))


def needs_read(operation: Operation[Any]) -> bool:
    """Whether an operation can only be planned with the stored state."""
    return bool(operation.conditions) or operation.kind in (
        OperationKind.UPDATE,
        OperationKind.PUT_IF_ABSENT,
    )


def plan_writes(
    codec: RowCodec, operation: Operation[Any], valid: ValidEntries, stored: StoredState
) -> WritePlan:
    """Return what to write for the valid entries of an operation, given the state of their keys
    in the store.
    """
    planner = _Planner(codec, operation, stored, WritePlan(problems=dict(valid.problems)))
    if operation.conditions:
        plan_entry = planner.write_conditionally
    else:
        plan_entry = planner.write
    for entry in valid.entries:
        if (problem := plan_entry(entry)) is not None:
            planner.plan.problems[entry.place] = problem
    return planner.plan


@dataclass(slots=True)
class _Planner:
    """Adds one entry after the other to `plan`."""

    codec: RowCodec
    operation: Operation[Any]
    stored: StoredState
    plan: WritePlan

    def write_conditionally(self, entry: Entry) -> Problem | None:
        """Plan an entry if its conditions hold, and note that it was applied.

        Returns its problem: SKIPPED if they do not hold, None if it was planned.
        """
        operation = self.operation
        plan = self.plan
        marks = self.operation.entries.marks
        assert marks is not None  # conditions require marks
        conditions = operation.conditions
        mark = marks[entry.place]
        applied = plan.applied.get(entry.key) or self.applied(entry.key)
        late = applied.is_late(conditions, mark, entry.time)
        if applied.was_applied(conditions, mark) or (late and not operation.applies_late_changes):
            return Problem(State.SKIPPED)
        if late:
            entry = self.late_part(entry)
            problem = self.add_late(entry)
        else:
            problem = self.write(entry)
        # A late entry without a record is noted too, so that a replay skips its additions as well.
        is_skipped = problem is not None and problem.state is State.SKIPPED
        has_lost_additions = is_skipped and late and any(entry.value)
        if problem is None or has_lost_additions:
            applied.remember(conditions, mark, entry.time, late=late)
            plan.applied[entry.key] = applied
        return problem

    def applied(self, key: Row) -> Applied:
        """What was applied to the key. If that is unknown, a record's own time counts, as older
        than any message of the same time.
        """
        applied = self.stored.applied.get(key) or Applied()
        newest_by = self.operation.conditions.newest_by
        if newest_by is not None and applied.newest is None:
            time = self.stored.records.get(key, {}).get(newest_by)
            if time is None:
                applied.record_newest = None
            else:
                applied.record_newest = Newest(time, "")
        return applied

    def write(self, entry: Entry) -> Problem | None:
        """Plan an entry without regard to conditions; return its problem, None if it was
        planned.
        """
        kind = self.operation.kind
        plan = self.plan
        if kind is OperationKind.UPDATE:
            return self._update(entry)
        if kind is OperationKind.PUT:
            plan.puts[entry.key] = entry.value
        elif kind is OperationKind.DELETE:
            plan.deletes[entry.key] = None
        elif entry.key in self.stored.records or entry.key in plan.begins:
            return Problem(State.SKIPPED)
        else:
            plan.begins[entry.key] = entry.value
        return None

    def _update(self, entry: Entry) -> Problem | None:
        """Plan an update of the existing or planned record, or of the default if there is none."""
        codec = self.codec
        plan = self.plan
        place = entry.place
        defaults = self.operation.entries.defaults
        try:
            if entry.key in self.stored.records:
                planned = plan.changes.get(entry.key) or CheckedChanges({}, {}, {})
                _apply(
                    codec, entry.value, planned.set, self.stored.records[entry.key], planned.append
                )
                plan.changes[entry.key] = planned
                return None
            record = plan.begins.get(entry.key)
            if record is not None:
                _apply(codec, entry.value, record, record)
                return None
            default = None
            if defaults is not None:
                default = defaults[place]
            if default is None:
                error = record_not_found_error([self.operation.entries.keys[place]], codec.table)
                return Problem(State.MISSING, error)
            record = codec.whole(entry.key, default)
            _apply(codec, entry.value, record, record)
        except SchemaMismatchError as error:
            return Problem(State.REFUSED, error)
        plan.begins[entry.key] = record
        plan.defaults_put += 1
        return None

    def late_part(self, entry: Entry) -> Entry:
        """The part of a late update that still applies to a newer record
        (`Operation.applies_late_changes`).
        """
        numbers = {}
        for name, added in entry.value.add.items():
            if not isinstance(added, Mapping):
                numbers[name] = added
        return entry._replace(value=CheckedChanges({}, numbers, entry.value.append))

    def add_late(self, entry: Entry) -> Problem | None:
        """Plan the late part of an update, if there is a record; SKIPPED if there is none or
        nothing to change.
        """
        exists = entry.key in self.stored.records or entry.key in self.plan.begins
        if exists and any(entry.value):
            return self._update(entry)
        return Problem(State.SKIPPED)


def _apply(
    codec: RowCodec,
    changes: CheckedChanges,
    new: dict[str, Any],
    old: Mapping[str, Any],
    appended: dict[str, list[Any]] | None = None,
) -> None:
    """Merge all changes into the values `new`, or raise and merge none.

    `new` are the planned changes of a stored record, and `old` are the columns of it that were
    read. For a record that is to be created, both are this record. If `appended` is given, the
    store appends values itself: they are added to `appended`, but to `new` if the column is in it.
    """
    is_record = new is old
    if changes.add:
        sums = {}
        for name, number in changes.add.items():
            sums[name] = codec.sum(name, _known_value(name, new, old), number)
        assign(codec, sums, new, is_record=is_record)
    if changes.set:
        assign(codec, changes.set, new, is_record=is_record)
        if appended:
            for name in changes.set:
                appended.pop(name, None)  # the new value replaces what was appended
    for name, values in changes.append.items():
        if appended is None or name in new:
            new[name] = [*(new.get(name) or ()), *values]
        else:
            appended[name] = [*appended.get(name, ()), *values]


def _known_value(name: str, new: Mapping[str, Any], old: Mapping[str, Any]) -> Any:
    """The value of a column, or inside one, after changes that `new` has, of the record `old`."""
    if name in new or not isinstance(name, InnerName):
        return new.get(name, old.get(name))
    return value_inside(new.get(name.root, old.get(name.root)), name.names)


def assign(
    codec: RowCodec, values: Mapping[str, Any], new: dict[str, Any], *, is_record: bool
) -> None:
    """Merge the values that an update sets into `new`.

    `new` is a whole record (`is_record`), or changes of one that were planned earlier. In a record,
    a value at a path is set inside its column. In changes, the path becomes a change of its own,
    unless the whole column is among them: then the value is set inside that.
    """
    if not codec.has_inner:
        new.update(values)
        return
    for name, value in values.items():
        if not isinstance(name, InnerName):
            new[name] = value
            for path in split_inner(new).paths.get(name, ()):
                del new[path]  # the new value of the column replaces what was set inside it
        elif is_record or name.root in new:
            new[name.root] = with_inside(new.get(name.root), name.names, value)
        else:
            new[name] = value


class SplitNames(NamedTuple):
    """What an update changes: columns as a whole, and values inside columns, by their column."""

    columns: list[str]
    paths: dict[str, list[InnerName]]


def split_inner(names: Iterable[str]) -> SplitNames:
    """Return the names of an update, with paths and columns apart."""
    split = SplitNames([], {})
    for name in names:
        if isinstance(name, InnerName):
            split.paths.setdefault(name.root, []).append(name)
        else:
            split.columns.append(name)
    return split


class RejectedKeysError(Exception):
    """A store does not take, or can't read, the records of some keys; nothing of the request was
    written.

    `errors` has the error of each of these keys.
    """

    def __init__(self, errors: Mapping[Row, AdjunctError]) -> None:
        super().__init__(f"{len(errors)} keys were rejected")
        self.errors = errors


def check_dropped(table: str, dropped: Mapping[Row, str]) -> None:
    """Raise RejectedKeysError if the store reported success, but did not write some records as they
    were sent.

    `dropped` has for their keys what the store did not do, such as "delete the record".
    """
    found: dict[Row, AdjunctError] = {}
    for key, what in dropped.items():
        one = key[0] if len(key) == 1 else key
        found[key] = TableError(
            f"{table} did not {what} for key {one!r:.300}, without an error: a trigger, rule or"
            " policy of the table, or one of its constraints, drops the record or changes its key.",
            "Filter such records out, or correct the table.",
            table=table,
            keys=(one,),
        )
    if found:
        raise RejectedKeysError(found)


class BisectRejected:
    """Finds the entries that a store rejects, if it only says that the request as a whole was
    rejected.

    A rejected part is sent again as two halves, in order; where the store names the rejected keys,
    without those. After a failure for another reason nothing more is sent: it would overtake the
    retry.
    """

    def __init__(self, valid: ValidEntries) -> None:
        self.problems: dict[int, Problem] = dict(valid.problems)
        self.defaults_put = 0
        self._parts = [valid.entries] if valid.entries else []

    def next(self) -> ValidEntries | None:
        """The next part to send, None once all are sent; report its result with `done`, `rejected`
        or `failed`.
        """
        if self._parts:
            return ValidEntries(self._parts[0], {})
        return None

    def done(self, plan: WritePlan) -> None:
        """Report that the part was written according to `plan`."""
        self._parts.pop(0)
        self.problems |= plan.problems
        self.defaults_put += plan.defaults_put

    def rejected(self, errors: Mapping[Row, AdjunctError]) -> None:
        """Report that nothing of the part was written, because of the keys in `errors`.

        A rejected key's only entry gets the error as its problem. If the key has several entries,
        they are sent one by one: only some of them may be rejected. Entries of all other keys are
        sent together before these.
        """
        part = self._parts.pop(0)
        count = Counter(entry.key for entry in part)
        rest: list[Entry] = []
        parts: list[Sequence[Entry]] = []
        for entry in part:
            if entry.key not in errors:
                rest.append(entry)
            elif count[entry.key] > 1:
                parts.append([entry])
            else:
                self.problems[entry.place] = Problem(State.REFUSED, errors[entry.key])
        if rest:
            parts.insert(0, rest)
        self._parts[:0] = parts

    def failed(self, problem: Problem, *, by_data: bool) -> None:
        """Report that the part has failed as a whole. `by_data`: because of values in it, so its
        halves are tried.
        """
        part = self._parts.pop(0)
        if by_data and len(part) > 1:
            middle = len(part) // 2
            self._parts[:0] = [part[:middle], part[middle:]]
            return
        self.problems.update({entry.place: problem for entry in part})
        if by_data:
            return
        for rest in self._parts:
            self.problems.update({entry.place: problem.unsent for entry in rest})
        self._parts = []

    def outcomes(self, count: int) -> Outcomes:
        """The outcomes of the operation, which has `count` entries; call it when `next` returns
        None.
        """
        return Outcomes(count, problems=self.problems, defaults_put=self.defaults_put)
