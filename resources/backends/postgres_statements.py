"""The SQL that a `PostgresTable` sends: one statement for many rows, columns given as arrays.

lock    which of these keys have a record, locking each (in order of the key)
select  the records of these keys, each after its place (from 1) in the list of keys
insert  begin records, leaving those alone that are there
upsert  put records
update  set columns, at most one row per key
delete  remove records
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from psycopg import sql

from dagster_adjunct.resources.backends.rows import Row, UpdateGroup

if TYPE_CHECKING:
    from psycopg.sql import Composed

    from dagster_adjunct.resources.backends.postgres_schema import TableShape


class Statements:
    """Statements for one table, composed once per connection."""

    def __init__(self, schema: str, table: str, key: Sequence[str], shape: TableShape) -> None:
        self._table = _identifier(schema, table)
        self._key = tuple(key)
        self._casts = shape.casts
        self._names = tuple(column.name for column in shape.columns)
        keys, rest = self._key, [name for name in self._names if name not in self._key]
        values = {
            "table": self._table,
            "keys": _listed(keys),
            "names": _listed(self._names),
            "given_keys": self._given(keys),
            "given": self._given(self._names),
            "same": self._same(),
            "ordered": _listed(keys, "s"),
        }
        self.lock = sql.SQL(
            "SELECT s.__place FROM unnest({given_keys}) WITH ORDINALITY AS s ({keys}, __place) "
            "JOIN {table} AS t ON {same} ORDER BY {ordered} FOR NO KEY UPDATE OF t"
        ).format(**values)
        self.select = sql.SQL(
            "SELECT s.__place, {found} FROM unnest({given_keys}) WITH ORDINALITY AS s ({keys}, __place) "
            "JOIN {table} AS t ON {same}"
        ).format(**values, found=_listed(self._names, "t"))
        self.insert = sql.SQL(
            "INSERT INTO {table} ({names}) SELECT {names} FROM unnest({given}) AS s ({names}) "
            "ORDER BY {ordered} ON CONFLICT ({keys}) DO NOTHING"
        ).format(**values)
        changes = sql.SQL(", ").join(sql.SQL("{0} = excluded.{0}").format(_identifier(n)) for n in rest)
        action = sql.SQL("UPDATE SET {}").format(changes) if rest else sql.SQL("NOTHING")
        self.upsert = sql.SQL(
            "INSERT INTO {table} ({names}) SELECT {names} FROM unnest({given}) AS s ({names}) "
            "ORDER BY {ordered} ON CONFLICT ({keys}) DO {action}"
        ).format(**values, action=action)
        self.delete = sql.SQL("DELETE FROM {table} AS t USING unnest({given_keys}) AS s ({keys}) WHERE {same}").format(
            **values
        )

    def update(self, group: UpdateGroup) -> tuple[Composed, list[list[Any]]]:
        """The statement that applies `group`, and its arrays."""
        names = (*group.columns, *self._key)
        statement = sql.SQL(
            "UPDATE {table} AS t SET {changes} FROM unnest({given}) AS s ({names}) WHERE {same}"
        ).format(
            table=self._table,
            changes=sql.SQL(", ").join(sql.SQL("{0} = s.{0}").format(_identifier(n)) for n in group.columns),
            given=self._given(names),
            names=_listed(names),
            same=self._same(),
        )
        return statement, _arrays(group.rows, len(names))

    def key_arrays(self, keys: Sequence[Row]) -> list[list[Any]]:
        """Keys as one array per key column."""
        return _arrays(keys, len(self._key))

    def row_arrays(self, rows: Sequence[Row]) -> list[list[Any]]:
        """Whole rows as one array per column."""
        return _arrays(rows, len(self._names))

    def _given(self, names: Sequence[str]) -> Composed:
        # The casts come from the server's catalog, which quotes what needs quoting.
        return sql.SQL(", ").join(sql.SQL("%s::{}[]").format(sql.SQL(self._casts[name])) for name in names)

    def _same(self) -> Composed:
        return sql.SQL(" AND ").join(sql.SQL("t.{0} = s.{0}").format(_identifier(n)) for n in self._key)


def _listed(names: Sequence[str], table: str | None = None) -> Composed:
    return sql.SQL(", ").join(_identifier(*((table,) if table else ()), name) for name in names)


def _identifier(*names: str) -> sql.Identifier:
    # Statements with parameters read a single % as the start of one.
    return sql.Identifier(*(name.replace("%", "%%") for name in names))


def _arrays(rows: Sequence[Row], width: int) -> list[list[Any]]:
    return [[row[column] for row in rows] for column in range(width)]
