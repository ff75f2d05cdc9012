"""The SQL that a `PostgresTable` sends: one statement for many rows, columns given as arrays.

lock      which of these keys have a record, locking each (in order of the key), with some of its columns
select    the records of these keys, each after its place (from 1) in the list of keys
insert    begin records, leaving those alone that are there
upsert    put records
update    set columns and append to lists, at most one row per key
delete    remove records
claim     make the rows of these keys beside the table, where there are none
applied   what was applied to these keys, locking each
remember  keep what was applied
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from psycopg import sql
from psycopg.sql import Composed

from dagster_adjunct.resources.backends.applied_marks import COLUMNS
from dagster_adjunct.resources.backends.postgres_batch_statements import BatchStatements
from dagster_adjunct.resources.backends.postgres_names import identifier, joined, listed
from dagster_adjunct.resources.backends.postgres_values import AS_TEXT, array_text, can_be_text
from dagster_adjunct.resources.backends.rows import RowCodec


class Statements:
    """Statements for one table, composed once for what reads its shape. `beside`: where what was applied lies."""

    def __init__(self, schema: str, table: str, beside: str, codec: RowCodec, casts: Mapping[str, str]) -> None:
        self._codec, self._casts = codec, casts
        self._texts = {name for name, column in codec.columns.items() if column.kind in AS_TEXT}
        self._key, self._names = codec.key, codec.names
        self._table = identifier(schema, table)
        rest = [name for name in self._names if name not in self._key]
        changes = joined(", ", (sql.SQL("{0} = excluded.{0}").format(identifier(n)) for n in rest))
        action = sql.SQL("UPDATE SET {}").format(changes) if rest else sql.SQL("NOTHING")
        begin = (
            "INSERT INTO {table} AS t ({names}) SELECT {typed} FROM unnest({given}) AS s ({names}) ORDER BY {ordered} "
        )
        self.insert = self._made(begin + "ON CONFLICT ({keys}) DO NOTHING")
        self.upsert = self._made(begin + "ON CONFLICT ({keys}) DO {action}", action=action)
        self.delete = self._made("DELETE FROM {table} AS t USING unnest({given_keys}) AS s ({keys}) WHERE {same}")
        self.select = self._made(
            "SELECT s.__place, {found} FROM unnest({given_keys}) WITH ORDINALITY AS s ({keys}, __place) "
            "JOIN {table} AS t ON {same}",
            found=listed(self._names, "t"),
        )
        self.lock = cache(self._lock)
        self.update = cache(self._update)
        self._conditions(identifier(schema, beside))
        self.staging = cache(BatchStatements(self._table, identifier(schema, beside), codec, casts).of)

    def _conditions(self, beside: sql.Identifier) -> None:
        self.claim = self._made(
            "INSERT INTO {beside} AS t ({keys}, at) SELECT {typed_keys}, now() FROM unnest({given_keys}) AS s ({keys}) "
            "ORDER BY {ordered} ON CONFLICT ({keys}) DO NOTHING",
            beside=beside,
        )
        self.applied = self._made(
            "SELECT s.__place, {found} FROM unnest({given_keys}) WITH ORDINALITY AS s ({keys}, __place) "
            "JOIN {beside} AS t ON {same} ORDER BY {ordered} FOR NO KEY UPDATE OF t",
            beside=beside,
            found=joined(", ", (sql.SQL("t.{}::text").format(identifier(name)) for name in COLUMNS)),
        )
        names = (*self._key, *COLUMNS)
        self.remember = self._made(
            "UPDATE {beside} AS t SET {changes}, at = now() FROM unnest({given}) AS s ({all}) WHERE {same}",
            beside=beside,
            changes=joined(
                ", ",
                (
                    sql.SQL("{0} = s.{0}::{1}").format(identifier(n), sql.SQL("jsonb" if n == "applied" else "text"))
                    for n in COLUMNS
                ),
            ),
            given=joined(", ", (self._given(self._key), *(sql.SQL("%s::text[]") for _ in COLUMNS))),
            all=listed(names),
        )
        self.forget = self._made(
            "DELETE FROM {beside} AS t USING (SELECT {keys} FROM {beside} WHERE at < now() - make_interval(secs => %s) "
            "FOR UPDATE SKIP LOCKED) AS s WHERE {same}",
            beside=beside,
        )

    def _lock(self, read: tuple[str, ...]) -> Composed:
        return self._made(
            "SELECT {found} FROM unnest({given_keys}) WITH ORDINALITY AS s ({keys}, __place) "
            "JOIN {table} AS t ON {same} ORDER BY {ordered} FOR NO KEY UPDATE OF t",
            found=joined(", ", (sql.SQL("s.__place"), *(identifier("t", name) for name in read))),
        )

    def _update(self, sets: tuple[str, ...], append: tuple[str, ...]) -> Composed:
        names = (*sets, *append, *self._key)
        changes = [sql.SQL("{} = {}").format(identifier(name), self._typed(name)) for name in sets]
        for name in append:
            appended = sql.SQL("{0} = coalesce(t.{0}, '{{}}') || {1}").format(identifier(name), self._typed(name))
            changes.append(appended)
        return self._made(
            "UPDATE {table} AS t SET {changes} FROM unnest({given}) AS s ({all}) WHERE {same}",
            changes=joined(", ", changes),
            given=self._given(names),
            all=listed(names),
        )

    def arrays(self, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Any]:
        """Rows of these columns as one array a column."""
        columns = self._codec.columns
        kept = zip(names, self._codec.kept(names, rows), strict=True)
        return [array_text(values) if can_be_text(columns[name]) else values for name, values in kept]

    def _made(self, text: str, **more: sql.Composable) -> Composed:
        known: dict[str, sql.Composable] = {
            "table": self._table,
            "keys": listed(self._key),
            "names": listed(self._names),
            "given_keys": self._given(self._key),
            "given": self._given(self._names),
            "typed": joined(", ", map(self._typed, self._names)),
            "typed_keys": listed(self._key, "s"),
            "same": joined(" AND ", (sql.SQL("t.{0} = s.{0}").format(identifier(n)) for n in self._key)),
            "ordered": listed(self._key, "s"),
        }
        return sql.SQL(text).format(**{**known, **more})

    def _given(self, names: Sequence[str]) -> Composed:
        # The casts come from the server's catalog, which quotes what needs quoting.
        casts = ("text" if name in self._texts else self._casts[name] for name in names)
        return joined(", ", (sql.SQL("%s::{}[]").format(sql.SQL(cast)) for cast in casts))

    def _typed(self, name: str) -> Composed:
        cast = sql.SQL("::" + self._casts[name]) if name in self._texts else sql.SQL("")
        return sql.SQL("{}{}").format(identifier("s", name), cast)
