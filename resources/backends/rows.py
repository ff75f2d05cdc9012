"""Between records (mappings) and rows (tuples of encoded values), and what to do with many of them.

All of it is pure. SQL backends share it, so that they agree on what a request means:

- A record is a mapping of columns. The key's columns may be left out of it; if they are there, they
  must equal the key. Columns that a whole record leaves out become null; an update leaves them alone.
- An update sets columns, so several updates of one key come to the same as one that sets each column
  to its last value. They are sent as that one, in a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dagster_adjunct.resources.backends.column_values import Column, Kind, encoder_of
from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError
from dagster_adjunct.resources.tables.partial_update import UpdateMessage
from dagster_adjunct.resources.tables.table_functions import record_not_found

Key = Any  # one value, or a tuple of values where the key has several columns
Row = tuple[Any, ...]
Changes = dict[str, Any]
Record = Mapping[str, Any]


def key_columns(key: str | Sequence[str]) -> tuple[str, ...]:
    """The key's columns, from one name or several."""
    names = (key,) if isinstance(key, str) else tuple(key)
    if not names or len(set(names)) != len(names):
        raise ConfigurationError(
            f"{names!r} is no key: expected one column or several.", "Name them once.", argument="key"
        )
    return names


class RowCodec:
    """Encodes and decodes the records of one table; errors name the table, the column and the value.

    `encoders` and `decoders` replace the common ones of `values.encoder_of` for a kind.
    """

    def __init__(
        self,
        table: str,
        key: Sequence[str],
        columns: Sequence[Column],
        *,
        encoders: Mapping[Kind, Callable[[Any], Any]] | None = None,
        decoders: Mapping[Kind, Callable[[Any], Any]] | None = None,
    ) -> None:
        self.table = table
        self.columns = tuple(columns)
        self.names = tuple(column.name for column in columns)
        self.key = tuple(key)
        for name in self.key:
            if name not in self.names:
                raise SchemaMismatchError(
                    f"{table} has no column {name!r}, which is its key; it has {', '.join(self.names)}.",
                    "Correct the key, or the columns.",
                    column=name,
                )
        chosen = encoders or {}
        self._encode = {c.name: chosen.get(c.kind) or encoder_of(c.kind) for c in columns}
        self._decode = [(decoders or {}).get(c.kind) for c in columns]

    def key_row(self, key: Key) -> Row:
        """The key's encoded values."""
        if len(self.key) == 1:
            return (self._value(self.key[0], key),)
        if not isinstance(key, tuple) or len(key) != len(self.key):
            raise SchemaMismatchError(
                f"{self.table} got {key!r} as a key; expected a tuple of {', '.join(self.key)}.",
                "Give the key's values in that order.",
            )
        return tuple(self._value(name, part) for name, part in zip(self.key, key, strict=True))

    def changes(self, key: Row, update: Record) -> Changes:
        """The columns that `update` sets, without the key's."""
        encoded = self._fields(update)
        for name, part in zip(self.key, key, strict=True):
            if name in encoded and encoded.pop(name) != part:
                raise SchemaMismatchError(
                    f"{self.table}: the record for key {key!r} has {update[name]!r} as its {name}.",
                    "A record must carry its own key, or leave the key's columns out.",
                )
        return encoded

    def whole_row(self, key: Row, record: Record) -> Row:
        """All columns of the record, null where it has none."""
        encoded = self.changes(key, record)
        encoded.update(zip(self.key, key, strict=True))
        return tuple(encoded.get(name) for name in self.names)

    def record(self, row: Sequence[Any]) -> dict[str, Any]:
        """The record that a row of all columns stands for."""
        return {
            name: value if value is None or decode is None else decode(value)
            for name, decode, value in zip(self.names, self._decode, row, strict=True)
        }

    def _fields(self, record: Record) -> Changes:
        if not isinstance(record, Mapping):
            raise SchemaMismatchError(
                f"{self.table} got a {type(record).__name__}; expected a mapping of columns to values.",
                "Send dicts.",
            )
        encode = self._encode
        try:
            return {name: None if value is None else encode[name](value) for name, value in record.items()}
        except (KeyError, TypeError):
            return {name: self._value(name, value) for name, value in record.items()}  # says which one

    def _value(self, name: str, value: Any) -> Any:
        try:
            encode = self._encode[name]
            return None if value is None else encode(value)
        except KeyError:
            raise SchemaMismatchError(
                f"{self.table} has no column {name!r}; it has {', '.join(self.names)}.",
                "Leave the field out, or add the column.",
                column=name,
            ) from None
        except TypeError as error:
            column = self.columns[self.names.index(name)]
            raise SchemaMismatchError(
                f"{self.table}: column {name!r} is {column.type}{column.size} and got {value!r} "
                f"({type(value).__name__}); {error}.",
                "Convert the value before it is written.",
                column=name,
            ) from None


@dataclass(frozen=True, slots=True)
class UpdateGroup:
    """Updates that set the same columns, at most one per key: rows of the columns, then the key."""

    columns: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class UpdatePlan:
    """What one request of updates comes to, given which keys have records."""

    inserts: dict[Row, Row]  # key -> whole record to begin with
    changes: dict[Row, Changes]  # key -> what to set, on old records and on begun ones
    missing: tuple[Key, ...]  # keys, as the caller gave them, of messages that could do nothing

    def groups(self) -> list[UpdateGroup]:
        """The changes as groups of the same columns, keys in order of their values."""
        by_columns: dict[tuple[str, ...], list[Row]] = {}
        for key in sorted(self.changes):
            changes = self.changes[key]
            if changes:
                names = tuple(sorted(changes))
                by_columns.setdefault(names, []).append((*(changes[n] for n in names), *key))
        return [UpdateGroup(columns, tuple(rows)) for columns, rows in by_columns.items()]

    def raise_missing(self, table: str) -> None:
        """RecordNotFoundError for the messages that could do nothing, if there are any."""
        if self.missing:
            raise record_not_found(self.missing, table)


class EncodedUpdate(NamedTuple):
    """One message whose update is checked and encoded."""

    key: Key
    row_key: Row
    changes: Changes
    default: Record | None


def encode_updates(
    codec: RowCodec, entries: Sequence[tuple[Key, UpdateMessage[Record, Record]]]
) -> list[EncodedUpdate]:
    """Check and encode all updates, so that bad ones are found before anything is written."""
    encoded = []
    for key, message in entries:
        row_key = codec.key_row(key)
        changes = codec.changes(row_key, message.update)
        encoded.append(EncodedUpdate(key, row_key, changes, message.default))
    return encoded


def plan_updates(codec: RowCodec, updates: Sequence[EncodedUpdate], existing: Collection[Row]) -> UpdatePlan:
    """Decide in order, message by message, what each finds and does. `existing`: keys with a record.

    Only defaults that are needed get encoded: they are whole records, and most messages meet one.
    """
    inserts: dict[Row, Row] = {}
    changes: dict[Row, Changes] = {}
    missing: dict[Key, None] = {}
    for key, row_key, update, default in updates:
        known = changes.get(row_key)
        if known is not None:
            known.update(update)
            continue
        if row_key not in existing:
            if default is None:
                missing[key] = None
                continue
            inserts[row_key] = codec.whole_row(row_key, default)
        changes[row_key] = dict(update)
    return UpdatePlan(inserts, changes, tuple(missing))


def encode_puts(codec: RowCodec, entries: Sequence[tuple[Key, Record]], *, first: bool = False) -> dict[Row, Row]:
    """Whole rows by key, ordered by key; the last record of a key counts, or the first if so wanted."""
    rows: dict[Row, Row] = {}
    for key, value in entries:
        row_key = codec.key_row(key)
        row = codec.whole_row(row_key, value)
        rows[row_key] = rows.get(row_key, row) if first else row
    return dict(sorted(rows.items()))
