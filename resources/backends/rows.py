"""Between records (mappings) and rows (tuples of values): what is checked, and in which form it is kept.

All of it is pure. SQL backends share it, so that they agree on what a request means:

- A record is a mapping of columns. The key's columns may be left out of it; if they are there, they
  must equal the key. Columns that a whole record leaves out become null; an update leaves them alone.
- Keys of several columns are tuples, in the order of the names that the request gives, else in the store's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal
from typing import Any, NamedTuple

from dagster_adjunct.resources.backends.column_values import Column, Kind, checker_of
from dagster_adjunct.resources.errors import SchemaMismatchError
from dagster_adjunct.resources.tables.column_changes import Changes, changes_of
from dagster_adjunct.resources.tables.key_columns import in_own_order, no_key

Key = Any  # one value, or a tuple of values where the key has several columns
Row = tuple[Any, ...]
Record = Mapping[str, Any]

_EXACT = Context(prec=2000)  # the default rounds sums to 28 digits
_NUMBERS = (Kind.INTEGER, Kind.FLOAT, Kind.DECIMAL)


class CheckedChanges(NamedTuple):
    """`Changes` whose columns and values fit the table; `remove` is in `set`, as None."""

    set: dict[str, Any]
    add: dict[str, Any]
    append: dict[str, list[Any]]


class RowCodec:
    """Checks, keeps and reads back the records of one table; errors name the table, the column and the value.

    `keep` brings a checked value into the form that the store keeps, `decoders` brings it back; by kind, where they
    differ. `bits`: as in `checker_of`.
    """

    def __init__(
        self,
        table: str,
        key: Sequence[str],
        columns: Sequence[Column],
        *,
        bits: int | None = None,
        keep: Callable[[Column], Callable[[Any], Any] | None] = lambda _: None,
        decode: Callable[[Column], Callable[[Any], Any] | None] = lambda _: None,
    ) -> None:
        self.table = table
        self.columns = {column.name: column for column in columns}
        self.names = tuple(self.columns)
        self.key = tuple(key)
        for name in self.key:
            if name not in self.columns:
                raise SchemaMismatchError(
                    f"{table} has no column {name!r}, which is its key; it has {', '.join(self.names)}.",
                    "Correct the key, or the columns.",
                    column=name,
                )
            if self.columns[name].kind in (Kind.JSON, Kind.LIST):
                raise SchemaMismatchError(
                    f"{table}: column {name!r} is {self.columns[name].type}, which can't be a key.",
                    "Use columns of single values as the key.",
                    column=name,
                )
        self._check = {c.name: checker_of(c, bits) for c in columns}
        self._keep = {c.name: keep(c) for c in columns}
        self._decode = {c.name: decode(c) for c in columns}

    @property
    def types(self) -> dict[str, str]:
        """The columns' types by name."""
        return {name: f"{column.type}{column.size}" for name, column in self.columns.items()}

    def keys_by(self, names: Sequence[str]) -> Callable[[Key], Row]:
        """The function that checks a key whose parts have these names, in this order; none: the store's own order."""
        ordered = in_own_order(self.table, self.key, names)
        return self.key_row if ordered is None else lambda key: self.key_row(ordered(key))

    def key_row(self, key: Key) -> Row:
        """The key's checked values, in the store's order."""
        if len(self.key) == 1:
            row: Row = (self.checked(self.key[0], key),)
        elif isinstance(key, tuple) and len(key) == len(self.key):
            row = tuple(map(self.checked, self.key, key))
        else:
            raise no_key(self.table, key, self.key)
        if None in row:
            raise SchemaMismatchError(
                f"{self.table} got {key!r} as a key; {' and '.join(self.key)} must not be null.",
                "Filter such records out before they reach the table.",
                table=self.table,
            )
        return row

    def whole(self, key: Row, record: Record) -> dict[str, Any]:
        """All that the record says, checked, with the key's columns."""
        fields = self._without_key(key, self._fields(record), record)
        fields.update(zip(self.key, key, strict=True))
        return fields

    def changes(self, key: Row, update: Record | Changes) -> CheckedChanges:
        """What the update does, checked; the key's columns may be set to what they are."""
        if not isinstance(update, Changes):
            return CheckedChanges(self._without_key(key, self._fields(update), update), {}, {})
        changes = changes_of(update)
        sets = self._without_key(key, self._fields(changes.set), changes.set)
        add = {name: self._added(name, value) for name, value in changes.add.items() if value is not None}
        append = {name: self._appended(name, value) for name, value in changes.append.items() if value is not None}
        removed: dict[str, Any] = dict.fromkeys(changes.remove)
        twice = len({*sets, *changes.add, *changes.append, *removed})
        if twice < len(sets) + len(changes.add) + len(changes.append) + len(removed):
            raise self._two_ways([*sets, *changes.add, *changes.append, *removed])
        for name in (*changes.add, *changes.append, *removed):
            if name in self.key or name not in self.columns:
                self.column(name)
                raise SchemaMismatchError(
                    f"{self.table}: an update changes column {name!r}, which is of the key.",
                    "Put a record under the other key, and delete this one.",
                    column=name,
                )
        appended = {name: new for name, new in append.items() if new} if append else append
        return CheckedChanges({**sets, **removed} if removed else sets, add, appended)

    def sum(self, name: str, old: Any, number: Any) -> Any:
        """What column `name` holds after `number` is added to `old`; for json, the members of both."""
        if self.columns[name].kind is Kind.JSON:
            if old is not None and not isinstance(old, dict):
                raise self._misfit(name, number, f"members can't be added to what the column holds, {old!r}")
            return {**(old or {}), **number}
        if old is None:
            return number
        exact = isinstance(old, Decimal)
        return self.checked(name, _EXACT.add(old, number) if exact else old + number)

    def column(self, name: str) -> Column:
        """The column of that name; SchemaMismatchError where there is none."""
        column = self.columns.get(name)
        if column is None:
            raise self._no_column(name)
        return column

    def checked(self, name: str, value: Any) -> Any:
        """The value in its one form; SchemaMismatchError where it does not fit the column."""
        check = self._check.get(name)
        if check is None:
            raise self._no_column(name)
        if value is None:
            return None
        try:
            return check(value)
        except TypeError as error:
            raise self._misfit(name, value, str(error)) from None

    def kept(self, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """The values of these columns as the store keeps them, one list a column."""
        columns: list[list[Any]] = []
        for place, name in enumerate(names):
            keep = self._keep[name]
            values = [row[place] for row in rows]
            columns.append(values if keep is None else [None if value is None else keep(value) for value in values])
        return columns

    def read(self, names: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
        """What a row of these columns stands for."""
        decode = self._decode
        return {
            name: value if value is None or (to := decode[name]) is None else to(value)
            for name, value in zip(names, row, strict=True)
        }

    def _without_key(self, key: Row, fields: dict[str, Any], given: Record) -> dict[str, Any]:
        for name, part in zip(self.key, key, strict=True):
            if name in fields and fields.pop(name) != part:
                raise SchemaMismatchError(
                    f"{self.table}: the record for key {key!r} has {given[name]!r} as its {name}.",
                    "A record must carry its own key, or leave the key's columns out.",
                    table=self.table,
                    column=name,
                )
        return fields

    def _fields(self, record: Record) -> dict[str, Any]:
        if not isinstance(record, Mapping):
            raise SchemaMismatchError(
                f"{self.table} got a {type(record).__name__}; expected a mapping of columns to values.",
                "Send dicts.",
                table=self.table,
            )
        check = self._check
        try:
            return {name: None if value is None else check[name](value) for name, value in record.items()}
        except (KeyError, TypeError):
            return {name: self.checked(name, value) for name, value in record.items()}  # says which one

    def _added(self, name: str, value: Any) -> Any:
        column = self.column(name)
        if column.kind is Kind.JSON:
            if not isinstance(value, dict):
                raise self._misfit(name, value, "only the members of a dict can be added to json")
        elif column.kind not in _NUMBERS:
            raise self._misfit(name, value, "only numbers, and members of json, can be added")
        return self.checked(name, value)

    def _appended(self, name: str, value: Any) -> list[Any]:
        if self.column(name).kind is not Kind.LIST:
            raise self._misfit(name, value, "only a column of lists (array<type>) can be appended to")
        checked: list[Any] = self.checked(name, value)
        return checked

    def _no_column(self, name: str) -> SchemaMismatchError:
        return SchemaMismatchError(
            f"{self.table} has no column {name!r}; it has {', '.join(self.names)}.",
            "Leave the field out, or add the column.",
            column=str(name),
        )

    def _two_ways(self, names: Sequence[str]) -> SchemaMismatchError:
        name = next(name for place, name in enumerate(names) if name in names[:place])
        return SchemaMismatchError(
            f"{self.table}: an update changes column {name!r} in two ways.",
            "Name a column in one of set, add, append and remove.",
            column=name,
        )

    def _misfit(self, name: str, value: Any, why: str) -> SchemaMismatchError:
        column = self.columns[name]
        return SchemaMismatchError(
            f"{self.table}: column {name!r} is {column.type}{column.size} and got {value!r} "
            f"({type(value).__name__}); {why}.",
            "Convert the value before it is written.",
            column=name,
        )
