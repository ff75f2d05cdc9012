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

from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from typing import Any, NamedTuple

from psycopg import sql
from psycopg.sql import Composed

from dagster_adjunct.resources.backends.applied import COLUMNS
from dagster_adjunct.resources.backends.column_values import Kind
from dagster_adjunct.resources.backends.postgres_batches import POSITION, SOURCE, TIME, Shape
from dagster_adjunct.resources.backends.postgres_values import AS_TEXT, array_text, can_be_text
from dagster_adjunct.resources.backends.rows import RowCodec


class StagingStatements(NamedTuple):
    """For batches of one shape: their staging table, and the statements that fill it and write from it."""

    name: str
    create: Composed
    copy: Composed
    write: Composed
    lock: Composed


class Statements:
    """Statements for one table, composed once for what reads its shape. `beside`: where what was applied lies."""

    def __init__(self, schema: str, table: str, beside: str, codec: RowCodec, casts: Mapping[str, str]) -> None:
        self._codec, self._casts = codec, casts
        self._texts = {name for name, column in codec.columns.items() if column.kind in AS_TEXT}
        self._key, self._names = codec.key, codec.names
        self._table = _identifier(schema, table)
        rest = [name for name in self._names if name not in self._key]
        changes = _joined(", ", (sql.SQL("{0} = excluded.{0}").format(_identifier(n)) for n in rest))
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
            found=_listed(self._names, "t"),
        )
        self.lock = cache(self._lock)
        self.update = cache(self._update)
        self.staging = cache(self._staging)
        self._beside = _identifier(schema, beside)
        self._conditions(self._beside)

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
            found=_joined(", ", (sql.SQL("t.{}::text").format(_identifier(name)) for name in COLUMNS)),
        )
        names = (*self._key, *COLUMNS)
        self.remember = self._made(
            "UPDATE {beside} AS t SET {changes}, at = now() FROM unnest({given}) AS s ({all}) WHERE {same}",
            beside=beside,
            changes=_joined(
                ", ",
                (
                    sql.SQL("{0} = s.{0}::{1}").format(_identifier(n), sql.SQL("jsonb" if n == "applied" else "text"))
                    for n in COLUMNS
                ),
            ),
            given=_joined(", ", (self._given(self._key), *(sql.SQL("%s::text[]") for _ in COLUMNS))),
            all=_listed(names),
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
            found=_joined(", ", (sql.SQL("s.__place"), *(_identifier("t", name) for name in read))),
        )

    def _update(self, sets: tuple[str, ...], append: tuple[str, ...]) -> Composed:
        names = (*sets, *append, *self._key)
        changes = [sql.SQL("{} = {}").format(_identifier(name), self._typed(name)) for name in sets]
        for name in append:
            appended = sql.SQL("{0} = coalesce(t.{0}, '{{}}') || {1}").format(_identifier(name), self._typed(name))
            changes.append(appended)
        return self._made(
            "UPDATE {table} AS t SET {changes} FROM unnest({given}) AS s ({all}) WHERE {same}",
            changes=_joined(", ", changes),
            given=self._given(names),
            all=_listed(names),
        )

    def _staging(self, shape: Shape) -> StagingStatements:
        stage = sql.Identifier("adjunct_" + sha256(repr(shape).encode()).hexdigest()[:16])
        more = {POSITION: "text", SOURCE: "text", TIME: self._casts.get(shape.conditions.newest_by or "", "text")}
        given = [name for name in shape.columns if name in self._names]
        typed = [sql.SQL("0 AS __place"), *map(_identifier, given)]
        typed += [
            sql.SQL("NULL::{} AS {}").format(sql.SQL(cast), _identifier(name))
            for name, cast in more.items()
            if name in shape.columns
        ]
        whole = (_identifier("s", name) if name in given else sql.SQL("NULL") for name in self._names)
        made = partial(
            self._made,
            stage=stage,
            columns=_listed(shape.columns),
            stage_columns=_joined(", ", typed),
            whole=_joined(", ", whole),
            changes=self._changes(shape),
            passed=self._passed(shape, stage),
        )
        source = "{stage} AS s" + (" JOIN passed AS p USING ({keys})" if shape.conditions else "")
        if shape.inserts:
            write = (
                f"INSERT INTO {{table}} AS t ({{names}}) SELECT {{whole}} FROM {source} ORDER BY {{ordered}} "
                "ON CONFLICT ({keys}) DO {changes} RETURNING (xmax = 0)::int AS begun"
            )
        else:
            write = f"UPDATE {{table}} AS t SET {{changes}} FROM {source} WHERE {{same}} RETURNING 0 AS begun"
        skipped = "ARRAY(SELECT __place FROM {stage} WHERE ({keys}) NOT IN (SELECT {keys} FROM passed))"
        return StagingStatements(
            stage.as_string(None),
            made(
                "CREATE TEMPORARY TABLE IF NOT EXISTS {stage} ON COMMIT DELETE ROWS AS "
                "SELECT {stage_columns} FROM {table} WITH NO DATA"
            ),
            made("COPY {stage} ({columns}) FROM STDIN (FORMAT csv)"),
            made(
                f"WITH {'{passed}, ' if shape.conditions else ''}written AS ({write}) SELECT count(*), "
                f"coalesce(sum(begun), 0), {skipped if shape.conditions else 'ARRAY[]::int[]'} FROM written"
                if shape.begins or shape.conditions
                else write.partition(" RETURNING ")[0]
            ),
            made(
                "SELECT s.__place FROM {stage} AS s JOIN {table} AS t ON {same} ORDER BY {ordered} "
                "FOR NO KEY UPDATE OF t"
            ),
        )

    def _changes(self, shape: Shape) -> sql.Composable:
        """What is done to a record that is there: the action of a conflict, or what UPDATE sets."""
        source = "excluded" if shape.inserts else "s"
        changed = [name for name in self._names if name not in self._key] if shape.puts else list(shape.sets)
        changes = [sql.SQL("{} = {}").format(_identifier(name), _identifier(source, name)) for name in changed]
        changes += [
            sql.SQL("{0} = CASE WHEN {1} IS NULL THEN t.{0} ELSE coalesce(t.{0}, 0) + {1} END").format(
                _identifier(name), _identifier(source, name)
            )
            for name in shape.adds
        ]
        joined = _joined(", ", changes)
        if not shape.inserts:
            return joined
        return sql.SQL("UPDATE SET {}").format(joined) if changes else sql.SQL("NOTHING")

    def _passed(self, shape: Shape, stage: sql.Identifier) -> sql.Composable:
        """The keys whose entries pass, their marks kept; as `Applied.holds` and `Applied.remember` have it."""
        newest_by, idempotent = shape.conditions.newest_by, shape.conditions.idempotent
        values = {"newest_of": "NULL", "newest": "NULL", "tie": "NULL", "applied": "'{{}}'::jsonb"}
        sets, holds, source = ["at = now()"], [], ""
        if idempotent:
            values["applied"] = "jsonb_build_object(s.__source, s.__position)"
            sets.append("applied = coalesce(b.applied, '{{}}') || excluded.applied")
            holds.append(
                "NOT EXISTS (SELECT FROM jsonb_each_text(excluded.applied) AS e "
                """WHERE (b.applied ->> e.key) COLLATE "C" >= e.value)"""
            )
        if newest_by is not None:
            values["newest_of"], values["newest"] = "{newest_of}", "s.__time::text"
            # `Mark.tie`
            values["tie"] = (
                "regexp_replace(s.__source, '~\\d+$', '') || ' ' || substr(s.__position, strpos(s.__position, ':') + 1)"
            )
            sets += [f"{name} = excluded.{name}" for name in ("newest_of", "newest", "tie")]
            holds.append(
                "(b.newest IS NULL OR b.newest_of <> {newest_of} OR "
                """(b.newest::{cast}, b.tie COLLATE "C") <= (excluded.newest::{cast}, excluded.tie))"""
            )
            # One look-up in an index for each key, two for those without a mark; joins would read both tables whole.
            source = (
                " WHERE coalesce((SELECT true FROM {beside} AS b WHERE {same_beside} AND b.newest_of = {newest_of}), "
                "(SELECT t.{newest_by} {collate} <= s.__time FROM {table} AS t WHERE {same}), true)"
            )
        cast = self._casts.get(newest_by or "", "text")
        texts = newest_by is not None and self._codec.column(newest_by).kind is Kind.STRING
        return self._made(
            f"passed AS (INSERT INTO {{beside}} AS b ({{keys}}, {', '.join(values)}, at) "
            f"SELECT {{typed_keys}}, {', '.join(values.values())}, now() FROM {{stage}} AS s{source} "
            f"ORDER BY {{ordered}} ON CONFLICT ({{keys}}) DO UPDATE SET {', '.join(sets)} "
            f"WHERE {' AND '.join(holds) or 'true'} RETURNING {{returned}})",
            stage=stage,
            beside=self._beside,
            returned=_listed(self._key, "b"),
            same_beside=_joined(" AND ", (sql.SQL("b.{0} = s.{0}").format(_identifier(n)) for n in self._key)),
            newest_by=_identifier(newest_by or ""),
            newest_of=sql.Literal((newest_by or "").replace("%", "%%")),
            cast=sql.SQL(cast + (' COLLATE "C"' if texts else "")),
            collate=sql.SQL('COLLATE "C"' if texts else ""),
        )

    def arrays(self, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Any]:
        """Rows of these columns as one array a column."""
        columns = self._codec.columns
        kept = zip(names, self._codec.kept(names, rows), strict=True)
        return [array_text(values) if can_be_text(columns[name]) else values for name, values in kept]

    def _made(self, text: str, **more: sql.Composable) -> Composed:
        known: dict[str, sql.Composable] = {
            "table": self._table,
            "keys": _listed(self._key),
            "names": _listed(self._names),
            "given_keys": self._given(self._key),
            "given": self._given(self._names),
            "typed": _joined(", ", map(self._typed, self._names)),
            "typed_keys": _listed(self._key, "s"),
            "same": _joined(" AND ", (sql.SQL("t.{0} = s.{0}").format(_identifier(n)) for n in self._key)),
            "ordered": _listed(self._key, "s"),
        }
        return sql.SQL(text).format(**{**known, **more})

    def _given(self, names: Sequence[str]) -> Composed:
        # The casts come from the server's catalog, which quotes what needs quoting.
        casts = ("text" if name in self._texts else self._casts[name] for name in names)
        return _joined(", ", (sql.SQL("%s::{}[]").format(sql.SQL(cast)) for cast in casts))

    def _typed(self, name: str) -> Composed:
        cast = sql.SQL("::" + self._casts[name]) if name in self._texts else sql.SQL("")
        return sql.SQL("{}{}").format(_identifier("s", name), cast)


def _joined(between: str, parts: Iterable[sql.Composable]) -> Composed:
    return sql.SQL(between).join(parts)


def _listed(names: Sequence[str], table: str | None = None) -> Composed:
    return sql.SQL(", ").join(_identifier(*((table,) if table else ()), name) for name in names)


def _identifier(*names: str) -> sql.Identifier:
    # Statements with parameters read a single % as the start of one.
    return sql.Identifier(*(name.replace("%", "%%") for name in names))
