"""The SQL of a `PostgresTable`: to create and check its table, and statements for many rows, with
an array per column.

    lock      lock the records of these keys in key order; returns each one's place in the list of
              keys (from 1), and the values of some columns
    select    return the records of these keys, each with its place in the list
    insert    create records; existing ones stay as they are. Returns the places of those that were
              not created
    upsert    put records; returns the places of those that were not written, or under another key,
              as by a trigger
    update    set columns and append to lists, at most one row per key; returns the places of those
              that were changed
    delete    remove records; returns the places of those that were there and were not removed
    claim     create the missing rows of these keys in the idempotency table
    applied   lock the rows of these keys in the idempotency table; returns what was applied
    remember  store what was applied
    forget    purge old rows of the idempotency table

A staged batch (`postgres_values.py`) is copied into a staging table, of which there is one per
shape. Then one statement writes from it: without conditions an upsert or an update, with conditions
a sequence of steps:

    staged    the rows of the batch, with the values that all of them share
    known     of the keys with a row in the idempotency table, those whose conditions hold: stores
              their marks
    fresh     of the other keys, those whose conditions hold: creates the rows with their marks
    passed    the rows of the batch with the keys of both
    changed   changes those of their records that exist
    begun     creates those that are missing

Most keys exist already, so existing rows are updated first, with one lookup and one write; ON
CONFLICT, which looks up, locks and then writes, handles only the rest. Every check of what others
may change is repeated under the lock: `fresh` and `begun` try all rows that `known` and `changed`
did not change, whatever these have seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from psycopg import sql

from dagster_adjunct.resources.errors import SchemaMismatchError, TableNotFoundError
from dagster_adjunct.resources.table_backends import postgres_values
from dagster_adjunct.resources.table_backends.columns import (
    Column,
    Kind,
    check_columns_and_key,
    loose_key_error,
    parse_column,
    to_spark_type,
)
from dagster_adjunct.resources.table_backends.nested_values import InnerName
from dagster_adjunct.resources.table_backends.postgres_values import (
    AS_TEXT,
    POSITION,
    SOURCE,
    TIE,
    TIME,
    StagingShape,
)
from dagster_adjunct.resources.table_backends.write_plan import COLUMNS, RowCodec, split_inner

if TYPE_CHECKING:
    from psycopg import AsyncConnection


def quote_names(names: Iterable[str], table: str = "") -> str:
    """Quote names as SQL identifiers, separated by commas; with `table`, each as a column of
    this alias.
    """
    before = f"{table}." if table else ""
    return ", ".join(f"{before}{quote_name(name)}" for name in names)


def quote_name(*names: str) -> str:
    """Quote a name as an SQL identifier, qualified by those before it, such as its schema.

    % is doubled, because in a statement with parameters a single % begins one.
    """
    return sql.Identifier(*names).as_string(None).replace("%", "%%")


def quote_literal(text: str) -> str:
    """Quote a text as an SQL literal; % is doubled, as in `quote_name`."""
    return sql.Literal(text).as_string(None).replace("%", "%%")


# Settings of a connection that writes staged batches. A hash join would lock rows in no order, so
# that writers of the same keys could deadlock; a merge join keeps the order, but reads or even
# sorts the whole table. JIT compilation takes longer than running the statement, up to some tenths
# of a second.
_SETTINGS = "SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off"


MISSING_RIGHTS = """
    SELECT current_user,
      (SELECT array_agg(DISTINCT privilege)
       FROM unnest(%s::text[], %s::text[]) AS wanted (privilege, name)
       WHERE NOT has_schema_privilege(n.oid, 'USAGE')
         OR NOT has_column_privilege(c.oid, name, privilege)),
      current_setting('transaction_read_only')::boolean
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %s AND c.relname = %s"""
"""The user, which of the privileges it lacks for a column of the table, and whether the session
is read-only.
"""
REQUIRED_COLUMNS = """
    SELECT array_agg(a.attname::text ORDER BY a.attnum)
    FROM pg_attribute a
    JOIN pg_class c ON c.oid = a.attrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_type t ON t.oid = a.atttypid
    WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
      AND a.attnotnull AND NOT a.atthasdef AND a.attidentity = '' AND t.typdefault IS NULL
      AND NOT EXISTS (
        SELECT FROM pg_trigger g
        WHERE g.tgrelid = c.oid AND NOT g.tgisinternal AND (g.tgtype & 2) > 0)"""
"""The columns that each new row has to give, unless a trigger may fill them in."""
MAY_CREATE = """
    SELECT current_user,
      coalesce((SELECT has_schema_privilege(oid, 'CREATE') FROM pg_namespace
                WHERE nspname = %(schema)s),
               has_database_privilege(current_database(), 'CREATE')),
      current_setting('transaction_read_only')::boolean"""
"""The user, whether it may create a table in the schema, or else the schema, and whether the
session is read-only.
"""
DROPS_ROWS = """
    SELECT CASE
      WHEN EXISTS (SELECT FROM pg_trigger
                   WHERE tgrelid = c.oid AND NOT tgisinternal AND tgtype & 3 = 3)
      THEN 'a trigger'
      WHEN c.relhasrules THEN 'a rule'
      WHEN row_security_active(c.oid) THEN 'a row security policy'
    END
    FROM pg_class c WHERE c.oid = to_regclass(%s)"""
"""What a table has that may drop rows without an error (a trigger before each row is of the types 1
and 2); null if nothing."""


# Whether a row's key is that of a staged row, which a trigger may have changed. IS TRUE keeps the
# server from a join, which would compare all rows with all.
_OF_STAGE = "(({keys}) IN (SELECT {keys} FROM {stage})) IS TRUE"


class StagingStatements(NamedTuple):
    """The name of the staging table for batches of one shape, and the statements that create, fill
    and use it.

    `write` has the values that all rows share as parameters (`StagedBatch.constants`). It returns
    one row: how many records were written, how many of these were created from defaults, and the
    places of those that were skipped by a condition. `settings` must be executed once per
    connection.
    """

    name: str
    create: sql.SQL
    copy: sql.SQL
    write: sql.SQL
    lock: sql.SQL
    settings: str = _SETTINGS


class Statements:
    """The SQL statements for one table, composed once after reading its columns."""

    def __init__(self, schema: str, table: str, codec: RowCodec, casts: Mapping[str, str]) -> None:
        self.schema = schema
        self.table = table
        self.codec = codec
        self.casts = casts
        self._key = codec.key
        self._names = codec.names
        self._texts = {name for name, column in codec.columns.items() if column.kind in AS_TEXT}
        # What `_compose` inserts, by its name in braces. The alias t is the table, b the
        # idempotency table, s the given rows.
        self._parts = {
            "table": quote_name(schema, table),
            "idempotency": quote_name(schema, f"{table}__adjunct"),
            "keys": quote_names(self._key),
            "names": quote_names(self._names),
            "key_arrays": self._array_parameters(self._key),
            "column_arrays": self._array_parameters(self._names),
            "typed": ", ".join(
                f"{self._typed(name)} AS {quote_name(name)}" for name in self._names
            ),
            "of_b": quote_names(self._key, "b"),
            "of_t": quote_names(self._key, "t"),
            "of_s": quote_names(self._key, "s"),
            "same": self._equal_keys("t"),
            "same_mark": self._equal_keys("b"),
        }
        self.insert = self._insert(on_conflict="NOTHING")
        self.upsert = self._upsert()
        self.delete = self._delete()
        self.select = self._select()
        self.claim = self._claim()
        self.applied = self._applied()
        self.remember = self._remember()
        self.forget = self._forget()
        self.lock = cache(self._lock)
        self.update = cache(self._update)
        self.staging = cache(self._stage)

    def _insert(self, on_conflict: str) -> sql.SQL:
        """The statement that inserts records, and does `on_conflict` (DO …) where the key exists;
        it returns the places of those that it has not written.
        """
        return self._compose(
            "WITH given AS (SELECT {typed}, s.__place FROM unnest({column_arrays}) WITH ORDINALITY"
            " AS s ({names}, __place)), written AS (INSERT INTO {table} AS t ({names}) SELECT"
            " {names} FROM given AS s ORDER BY {of_s} ON CONFLICT ({keys}) DO {on_conflict}"
            " RETURNING {of_t}) SELECT __place FROM given WHERE ({keys}) NOT IN (SELECT {keys} FROM"
            " written)",
            on_conflict=on_conflict,
        )

    def _upsert(self) -> sql.SQL:
        """The statement `upsert`."""
        changes = []
        for name in self._names:
            if name not in self._key:
                quoted = quote_name(name)
                changes.append(f"{quoted} = excluded.{quoted}")
        if not changes:
            # A statement that changes nothing would not return which records are there.
            changes.append(self._same_key("excluded"))
        return self._insert(on_conflict=f"UPDATE SET {', '.join(changes)}")

    def _delete(self) -> sql.SQL:
        """The statement `delete`: the final SELECT reads the table as it was before."""
        return self._compose(
            "WITH given AS (SELECT * FROM unnest({key_arrays}) WITH ORDINALITY AS s ({keys},"
            " __place)), gone AS (DELETE FROM {table} AS t USING given AS s WHERE {same} RETURNING"
            " s.__place) SELECT s.__place FROM given AS s JOIN {table} AS t ON {same} WHERE"
            " s.__place NOT IN (SELECT __place FROM gone)"
        )

    def _select(self) -> sql.SQL:
        """The statement `select`."""
        return self._compose(
            "SELECT s.__place, {found} FROM unnest({key_arrays}) WITH ORDINALITY AS s ({keys},"
            " __place) JOIN {table} AS t ON {same}",
            found=quote_names(self._names, "t"),
        )

    def _claim(self) -> sql.SQL:
        """The statement `claim`."""
        return self._compose(
            "INSERT INTO {idempotency} AS t ({keys}, at) SELECT {of_s}, now() FROM"
            " unnest({key_arrays}) AS s ({keys}) ORDER BY {of_s} ON CONFLICT ({keys}) DO NOTHING"
        )

    def _applied(self) -> sql.SQL:
        """The statement `applied`."""
        return self._compose(
            "SELECT s.__place, {found} FROM unnest({key_arrays}) WITH ORDINALITY AS s ({keys},"
            " __place) JOIN {idempotency} AS t ON {same} ORDER BY {of_s} FOR NO KEY UPDATE OF t",
            found=", ".join(f"t.{name}::text" for name in COLUMNS),
        )

    def _remember(self) -> sql.SQL:
        """The statement `remember`."""
        types = dict.fromkeys(COLUMNS, "text") | {"applied": "jsonb"}
        return self._compose(
            "UPDATE {idempotency} AS t SET {changes}, at = now() FROM unnest({arrays}) AS s"
            " ({given_names}) WHERE {same}",
            changes=", ".join(f"{name} = s.{name}::{type_}" for name, type_ in types.items()),
            arrays=", ".join([self._array_parameters(self._key), *["%s::text[]"] * len(COLUMNS)]),
            given_names=quote_names((*self._key, *COLUMNS)),
        )

    def _forget(self) -> sql.SQL:
        """The statement `forget`."""
        return self._compose(
            "DELETE FROM {idempotency} AS t USING (SELECT {keys} FROM {idempotency} WHERE at <"
            " now() - make_interval(secs => %s) LIMIT %s FOR UPDATE SKIP LOCKED) AS s WHERE {same}"
        )

    def _same_key(self, source: str) -> str:
        """The assignment that leaves the key as it is."""
        return f"{quote_name(self._key[0])} = {source}.{quote_name(self._key[0])}"

    def _equal_keys(self, table: str) -> str:
        """The condition that the alias `table` has the key of the given row `s`."""
        return " AND ".join(f"{table}.{name} = s.{name}" for name in map(quote_name, self._key))

    def _lock(self, read: tuple[str, ...]) -> sql.SQL:
        """The statement `lock` that returns the columns `read`."""
        return self._compose(
            "SELECT {found} FROM unnest({key_arrays}) WITH ORDINALITY AS s ({keys}, __place) "
            "JOIN {table} AS t ON {same} ORDER BY {of_s} FOR NO KEY UPDATE OF t",
            found=", ".join(("s.__place", *(f"t.{quote_name(name)}" for name in read))),
        )

    def _update(self, sets: tuple[str, ...], append: tuple[str, ...]) -> sql.SQL:
        """The statement `update` that sets the columns `sets` and appends to the columns `append`.

        A path in `sets` sets a value inside a column.
        """
        names = (*sets, *append, *self._key)
        split = split_inner(sets)
        changes = [f"{quote_name(name)} = {self._typed(name)}" for name in split.columns]
        for root, paths in split.paths.items():
            values = {path.names: f"s.{_inner_alias(sets, path)}::jsonb" for path in paths}
            changed = _changed_inside(f"t.{quote_name(root)}::jsonb", values)
            changes.append(f"{quote_name(root)} = ({changed})::{self.casts[root]}")
        for name in append:
            changes.append(
                "{0} = coalesce(t.{0}, '{{}}') || {1}".format(quote_name(name), self._typed(name))
            )
        return self._compose(
            "UPDATE {table} AS t SET {changes} FROM unnest({arrays}) WITH ORDINALITY AS s"
            " ({given_names}, __place) WHERE {same} RETURNING CASE WHEN {same} THEN s.__place END",
            changes=", ".join(changes),
            arrays=self._array_parameters(names),
            given_names=", ".join(
                _inner_alias(sets, name) if isinstance(name, InnerName) else quote_name(name)
                for name in names
            ),
        )

    def arrays(self, names: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[Any]:
        """Return rows of checked values of the columns `names` as parameters: one array per
        column.
        """
        columns = self.codec.columns
        arrays: list[Any] = self.codec.encoded(names, rows)
        for place, name in enumerate(names):
            is_left_to_driver = name in columns and columns[name].kind is Kind.OTHER
            if not is_left_to_driver:
                arrays[place] = postgres_values.format_array(arrays[place])
        return arrays

    def _stage(self, shape: StagingShape) -> StagingStatements:
        """Compose the statements for staged batches of this shape."""
        name = "adjunct_" + sha256(repr(shape).encode()).hexdigest()[:16]
        given = {*shape.columns, *shape.constants}
        staged = [quote_name(column) for column in shape.columns if column in self._names]
        types = {
            POSITION: "text",
            SOURCE: "text",
            TIE: "text",
            TIME: self._cast(shape.conditions.newest_by),
        }
        for column, cast in types.items():
            if column in shape.columns:
                staged.append(f"NULL::{cast} AS {column}")
        constants = [
            f", %s::{self.casts[column]} AS {quote_name(column)}" for column in shape.constants
        ]
        whole = []
        for column in self._names:
            whole.append(f"s.{quote_name(column)}" if column in given else "NULL")
        write = self._conditional(shape) if shape.conditions else self._plain(shape)
        compose = partial(
            self._compose,
            stage=name,
            rows=f"(SELECT r.*{''.join(constants)} FROM {name} AS r)",
            columns=quote_names(shape.columns),
            stage_columns=", ".join(("0 AS __place", *staged)),
            whole=", ".join(whole),
        )
        return StagingStatements(
            name=name,
            create=compose(
                "CREATE TEMPORARY TABLE IF NOT EXISTS {stage} ON COMMIT DELETE ROWS AS "
                "SELECT {stage_columns} FROM {table} WITH NO DATA"
            ),
            copy=compose("COPY {stage} ({columns}) FROM STDIN (FORMAT csv)"),
            write=compose(write, **self._changes_of(shape)),
            lock=compose(
                "SELECT s.__place FROM {stage} AS s JOIN {table} AS t ON {same} ORDER BY {of_s} FOR"
                " NO KEY UPDATE OF t"
            ),
        )

    def _plain(self, shape: StagingShape) -> str:
        """The statement `write` (`StagingStatements`) for a batch without conditions, which skip no
        record. The caller fills in what is in braces.
        """
        if not shape.inserts:
            return (
                "WITH written AS (UPDATE {table} AS t SET {sets} FROM {rows} AS s WHERE {same}"
                " RETURNING {same} AS kept) SELECT count(*) FILTER (WHERE kept), 0, ARRAY[]::int[]"
                " FROM written"
            )
        begun = "0"
        if shape.begins:
            begun = "coalesce(sum(begun), 0)"
        return (
            "WITH written AS (INSERT INTO {table} AS t ({names}) SELECT {whole} FROM"
            " {rows} AS s ORDER BY {of_s} ON CONFLICT ({keys}) DO {action} RETURNING"
            f" {{of_t}}, (xmax = 0)::int AS begun) SELECT count(*), {begun}, ARRAY[]::int[] FROM"
            f" written WHERE {_OF_STAGE}"
        )

    def _conditional(self, shape: StagingShape) -> str:
        """The statement `write` (`StagingStatements`) for a batch with conditions."""
        steps = ["staged AS NOT MATERIALIZED (SELECT * FROM {rows} AS s)", *self._marked(shape)]
        counts = []  # of written records, which are added up
        begun = "0"
        changes = bool(self._changed_columns(shape) or shape.adds)
        if changes:
            counts.append("(SELECT count(*) FROM changed WHERE kept)")
            steps.append(
                "changed AS (UPDATE {table} AS t SET {sets} FROM (SELECT * FROM passed ORDER BY"
                " {keys}) AS s WHERE {same} RETURNING {of_s}, {same} AS kept)"
            )
        if shape.inserts:
            counts.append(f"(SELECT count(*) FROM begun WHERE {_OF_STAGE})")
            begun = "(SELECT coalesce(sum(begun), 0) FROM begun)"
            unchanged = ""
            if changes:
                unchanged = " WHERE ({of_s}) NOT IN (SELECT {keys} FROM changed)"
            steps.append(
                "begun AS (INSERT INTO {table} AS t ({names}) SELECT {whole} FROM passed AS"
                f" s{unchanged} ORDER BY {{of_s}} ON CONFLICT ({{keys}}) DO {{action}} RETURNING"
                " {of_t}, (xmax = 0)::int AS begun)"
            )
        skipped = (
            "ARRAY(SELECT __place FROM staged WHERE ({keys}) NOT IN (SELECT {keys} FROM passed))"
        )
        return f"WITH {', '.join(steps)} SELECT {' + '.join(counts)}, {begun}, {skipped}"

    def _marked(self, shape: StagingShape) -> tuple[str, str, str]:
        """The steps `known`, `fresh` and `passed`, which do in SQL what `Applied` does in Python
        (`write_plan.py`).
        """
        newest_by = shape.conditions.newest_by
        idempotent = shape.conditions.idempotent
        # `values` has a new row's values by column. `marks` and `excluded` are what is set in a row
        # that exists, and in one that another writer creates meanwhile. `holds` are the conditions
        # for the row that exists, `fails` their opposites, and `holds_excluded` the conditions for
        # the row of the other writer.
        values = {"newest_of": "NULL", "newest": "NULL", "tie": "NULL", "applied": "'{{}}'::jsonb"}
        marks = ["at = now()"]
        excluded = ["at = now()"]
        holds = []
        fails = []
        holds_excluded = []
        unmarked = ""
        if idempotent:
            values["applied"] = "jsonb_build_object(s.__source, s.__position)"
            marks.append(f"applied = coalesce(b.applied, '{{{{}}}}') || {values['applied']}")
            excluded.append("applied = coalesce(b.applied, '{{}}') || excluded.applied")
            position = '(b.applied ->> s.__source) COLLATE "C"'
            holds.append(f"coalesce({position} < s.__position, true)")
            fails.append(f"{position} >= s.__position")
            holds_excluded.append(
                "NOT EXISTS (SELECT FROM jsonb_each_text(excluded.applied) AS e "
                """WHERE (b.applied ->> e.key) COLLATE "C" >= e.value)"""
            )
        if newest_by is not None:
            values |= {"newest_of": "{newest_of}", "newest": "s.{time}::text", "tie": "s.__tie"}
            for name in ("newest_of", "newest", "tie"):
                marks.append(f"{name} = {values[name]}")
                excluded.append(f"{name} = excluded.{name}")
            # If the time was stored for another column, its text may be invalid for this column's
            # type: the condition neither holds nor fails, and `fresh` decides.
            newest = (
                'CASE WHEN b.newest_of = {newest_of} THEN (b.newest::{cast}, b.tie COLLATE "C") '
            )
            holds.append(newest + "<= (s.{time}, s.__tie) ELSE false END")
            fails.append(newest + "> (s.{time}, s.__tie) ELSE false END")
            holds_excluded.append(
                "(b.newest IS NULL OR b.newest_of <> {newest_of} OR "
                '(b.newest::{cast}, b.tie COLLATE "C") <= '
                "(excluded.newest::{cast}, excluded.tie))"
            )
            # Subqueries take one index lookup per key, two for a key without a mark; joins would
            # read both tables entirely.
            unmarked = (
                " AND coalesce((SELECT true FROM {idempotency} AS b WHERE {same_mark} AND"
                " b.newest_of = {newest_of}), (SELECT t.{newest_by} {collate} <= s.{time} FROM"
                " {table} AS t WHERE {same}), true)"
            )
        known = (
            f"known AS (UPDATE {{idempotency}} AS b SET {', '.join(marks)} "
            "FROM (SELECT * FROM staged ORDER BY {keys}) "
            f"AS s WHERE {{same_mark}} AND {' AND '.join(holds)} RETURNING s.*)"
        )
        # Rows whose condition has failed are left out: the condition can't hold later, and ON
        # CONFLICT would lock these rows after the rows of `known`, so not in key order.
        fresh = (
            f"fresh AS (INSERT INTO {{idempotency}} AS b ({{keys}}, {', '.join(values)}, at) SELECT"
            f" {{of_s}}, {', '.join(values.values())}, now() FROM staged AS s WHERE ({{of_s}}) NOT"
            " IN (SELECT {keys} FROM known) AND (SELECT true FROM {idempotency} AS b WHERE"
            f" {{same_mark}} AND ({' OR '.join(fails)})) IS NULL{unmarked} ORDER BY {{of_s}} ON"
            f" CONFLICT ({{keys}}) DO UPDATE SET {', '.join(excluded)} WHERE"
            f" {' AND '.join(holds_excluded)} RETURNING {{of_b}})"
        )
        passed = (
            "passed AS (SELECT * FROM known UNION ALL "
            "SELECT * FROM staged WHERE (({keys}) IN (SELECT {keys} FROM fresh)) IS TRUE)"
        )
        return known, fresh, passed

    def _changes_of(self, shape: StagingShape) -> dict[str, str]:
        """The texts to insert into the statements that depend on the shape's changes and
        conditions, by name.
        """
        sets = self._sets(shape, "s")
        newest_by = shape.conditions.newest_by or ""
        collate = ""
        if newest_by and self.codec.column(newest_by).kind is Kind.STRING:
            collate = ' COLLATE "C"'
        return {
            "sets": sets,
            "action": f"UPDATE SET {self._sets(shape, 'excluded') or self._same_key('excluded')}",
            "newest_by": quote_name(newest_by),
            "newest_of": quote_literal(newest_by),
            "time": quote_name(TIME if TIME in shape.columns else newest_by),
            "cast": self._cast(newest_by) + collate,
            "collate": collate,
        }

    def _changed_columns(self, shape: StagingShape) -> list[str]:
        """The columns that the batch sets in existing records."""
        if shape.puts:
            return [name for name in self._names if name not in self._key]
        return list(shape.sets)

    def _sets(self, shape: StagingShape, source: str) -> str:
        """The SET clause that changes an existing record `t` to the values of the row `source`."""
        given = {*shape.columns, *shape.constants}
        changes = []
        for column in self._changed_columns(shape):
            name = quote_name(column)
            if source == "s" and column not in given:  # `excluded` has all columns
                value = "NULL"
            else:
                value = f"{source}.{name}"
            changes.append(f"{name} = {value}")
        for name in map(quote_name, shape.adds):
            added = f"{source}.{name}"
            changes.append(
                f"{name} = CASE WHEN {added} IS NULL THEN t.{name} ELSE coalesce(t.{name}, 0) +"
                f" {added} END"
            )
        return ", ".join(changes)

    def _cast(self, name: str | None) -> str:
        """The type to cast values of a column to, text for another name."""
        return self.casts.get(name or "", "text")

    def _compose(self, text: str, **parts: str) -> sql.SQL:
        """Fill in what stands in braces in the text of a statement."""
        return sql.SQL(text.format(**self._parts, **parts))

    def _array_parameters(self, names: Sequence[str]) -> str:
        """The parameters of a statement for these columns: one array each."""
        # The casts come from the server's catalog, which quotes them where necessary.
        casts = {**self.casts, **dict.fromkeys(self._texts, "text")}
        # A value inside a column is sent as JSON.
        return ", ".join(f"%s::{casts.get(name, 'text')}[]" for name in names)

    def _typed(self, name: str) -> str:
        """The value of a column in a given row, with the column's type."""
        typed = f"s.{quote_name(name)}"
        if name in self._texts:
            typed += f"::{self.casts[name]}"
        return typed


def _inner_alias(sets: Sequence[str], path: InnerName) -> str:
    """The alias of the parameter for a path, whose text may be too long for a name."""
    return f"__inner_{sets.index(path)}"


def _changed_inside(value: str, changes: Mapping[tuple[str, ...], str]) -> str:
    """Return the SQL of a jsonb object with other values (SQL, too) at paths; an object on the way
    that is null is created.
    """
    # By the first name of the path, the values by the rest of it; () is the name itself.
    inner: dict[str, dict[tuple[str, ...], str]] = {}
    for (first, *rest), changed in changes.items():
        inner.setdefault(first, {})[tuple(rest)] = changed
    members = []
    for name, parts in inner.items():
        quoted = quote_literal(name)
        changed = parts.get(()) or _changed_inside(f"({value} -> {quoted})", parts)
        members.append(f"{quoted}, {changed}")
    object_value = f"coalesce(nullif({value}, 'null'::jsonb), '{{}}'::jsonb)"
    return f"{object_value} || jsonb_build_object({', '.join(members)})"


_TYPES = {
    Kind.STRING: "text",
    Kind.BOOLEAN: "boolean",
    Kind.TIMESTAMP: "timestamp with time zone",
    Kind.DATE: "date",
    Kind.DECIMAL: "numeric",
    Kind.BINARY: "bytea",
    Kind.JSON: "jsonb",
    Kind.NESTED: "jsonb",
}
# By Spark's type. A tinyint becomes a smallint, because PostgreSQL has no 8-bit integers.
_NUMBERS = {"tinyint": "smallint", "int": "integer", "float": "real", "double": "double precision"}


async def has_relation(connection: AsyncConnection[Any], schema: str, table: str) -> bool:
    """Return whether the table exists, as other sessions have committed it.

    `to_regclass` may answer from what this session has looked up before it waited for a lock.
    """
    cursor = await connection.execute(
        "SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE nspname = %s"
        " AND relname = %s",
        (schema, table),
    )
    return bool(cursor.rowcount)


async def create_table(
    connection: AsyncConnection[Any],
    schema: str,
    table: str,
    types: Mapping[str, Any],
    key: Sequence[str],
) -> bool:
    """Create the schema and the table if they do not exist; return whether the table is new.

    `types` has the columns, `key` is the primary key.
    """
    name = sql.Identifier(schema, table)
    parts = [
        sql.SQL("{} {}").format(sql.Identifier(column), sql.SQL(type_))
        for column, type_ in types.items()
    ]
    parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, key))))
    async with connection.transaction():
        # IF NOT EXISTS alone fails when two sessions create the same schema or table at once.
        await connection.execute(
            "SELECT pg_advisory_xact_lock(hashtext(%s))", (f"adjunct:{schema}",)
        )
        if await has_relation(connection, schema, table):
            return False
        # Even with IF NOT EXISTS, creating a schema needs a right of the database.
        schemas = await connection.execute("SELECT FROM pg_namespace WHERE nspname = %s", (schema,))
        if not schemas.rowcount:
            await connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
        # With space left in each page, rows that are updated often can stay in their page.
        statement = sql.SQL("CREATE TABLE {} ({}) WITH (fillfactor = 80)").format(
            name, sql.SQL(", ").join(parts)
        )
        await connection.execute(statement)
    return True


_UNEQUAL = {
    "citext": "which ignores case",
    "bpchar": "which ignores blanks at the end",
    "name": "which cuts texts after 63 bytes",
}
_ROUNDED = re.compile(r"time(stamp)?\([0-5]\)")


# Types whose values in Python differ from the values of every type that can be declared.
_OF_NO_KIND = re.compile(
    r"(time|timetz|time with(out)? time zone|interval|money|inet|cidr|macaddr8?|bit|bit varying)\b"
)


def _check_stored_type(where: str, declared: Column, stored: Column) -> None:
    """Raise SchemaMismatchError for a column in which values of the declared type change."""
    if declared.element is not None and stored.element is not None:
        _check_stored_type(where, declared.element, stored.element)
        return
    if declared.kind is Kind.NESTED and stored.kind is not Kind.JSON:
        raise SchemaMismatchError(
            f"{where}: column {declared.name!r} is declared as {declared.type}, and it is"
            f" {stored.type}{stored.size}; expected jsonb.",
            "Correct the declaration, or make the column jsonb.",
            column=declared.name,
        )
    is_unknown = stored.kind is Kind.OTHER and declared.kind is not Kind.OTHER
    if stored.type == "real" and declared.type in ("double", "double precision", "float8"):
        reason = "real, which rounds to 24 bits"
        advice = "Declare it as float"
    elif is_unknown and _OF_NO_KIND.match(stored.type):
        reason = f"{stored.type}, which is read as another kind of value"
        advice = "Leave it out"
    else:
        return
    raise SchemaMismatchError(
        f"{where}: column {declared.name!r} is declared as {declared.type}, and it is {reason}.",
        f"{advice}, or change the column's type.",
        column=declared.name,
    )


class _CatalogColumn(NamedTuple):
    """A column as the server's catalog describes it. `type` is `full_type` without a size."""

    name: str
    full_type: str
    type: str
    is_deterministic: bool
    collation: str | None


def _check_key_type(where: str, column: _CatalogColumn) -> None:
    """Raise SchemaMismatchError for a column that would equate different keys."""
    type_ = column.type
    if _ROUNDED.match(column.full_type):
        kind = f"{column.full_type}, which is rounded"
        raise loose_key_error(where, column.name, kind, type_)
    if type_ in _UNEQUAL:
        raise loose_key_error(where, column.name, f"{type_}, {_UNEQUAL[type_]}", "text")
    if not column.is_deterministic:
        kind = f"{type_} with the collation {column.collation}, which is not deterministic"
        raise loose_key_error(where, column.name, kind, "text")


class StoredColumns(NamedTuple):
    """The columns of a table that are used, and the types to cast values of all of them to."""

    columns: list[Column]
    casts: dict[str, str]


async def read_postgres_columns(
    connection: AsyncConnection[Any],
    label: str,
    address: str,
    schema: str,
    table: str,
    key: Sequence[str],
    declared: Sequence[Column],
) -> StoredColumns:
    """Return the table's columns: only the declared ones, if any are.

    Raises TableNotFoundError if the table does not exist, and SchemaMismatchError if a declared
    column is missing, or if `key` is not unique or may equate different values.
    """
    cursor = await connection.execute(
        """SELECT a.attname, format_type(a.atttypid, a.atttypmod), format_type(a.atttypid, -1),
             coalesce(o.collisdeterministic, true), o.collname
           FROM pg_attribute a
           JOIN pg_class c ON c.oid = a.attrelid
           JOIN pg_namespace n ON n.oid = c.relnamespace
           LEFT JOIN pg_collation o ON o.oid = a.attcollation
           WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
           ORDER BY a.attnum""",
        (schema, table),
    )
    found = [_CatalogColumn(*row) for row in await cursor.fetchall()]
    where = f"{label} at {address}"
    if not found:
        step = "Correct schema and name, or declare the table with create=True."
        raise TableNotFoundError(f"{where}: the table does not exist.", step, table=label)
    names = [column.name for column in found]
    cursor = await connection.execute(
        """SELECT array_agg(a.attname::text)
           FROM pg_index i
           JOIN pg_class c ON c.oid = i.indrelid
           JOIN pg_namespace n ON n.oid = c.relnamespace
           JOIN pg_attribute a
             ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
           WHERE n.nspname = %s AND c.relname = %s AND i.indisunique AND i.indpred IS NULL
           GROUP BY i.indexrelid""",
        (schema, table),
    )
    unique_sets = [set(columns) for (columns,) in await cursor.fetchall()]
    check_columns_and_key(where, names, declared, key, unique_sets)
    wanted = {column.name for column in declared} or names
    stored = {}
    for catalog_column in found:
        name = catalog_column.name
        if name in key:
            _check_key_type(where, catalog_column)
        if name in wanted:
            stored[name] = parse_column(name, catalog_column.full_type)
    for column in declared:
        _check_stored_type(where, column, stored[column.name])
        if column.kind is Kind.NESTED:  # the server knows only that it is JSON
            stored[column.name] = column
    return StoredColumns(list(stored.values()), {column.name: column.type for column in found})


def column_type(column: Column) -> str:
    """The SQL type of a declared column when its table is created."""
    if column.kind is Kind.LIST:
        assert column.element is not None
        return column_type(column.element) + "[]"
    simple = str(to_spark_type(column))
    base = _TYPES.get(column.kind) or _NUMBERS.get(simple, simple)
    sized = column.kind is Kind.DECIMAL or column.type in ("varchar", "character varying")
    if column.size and sized:
        return ("varchar" if column.kind is Kind.STRING else base) + column.size
    return base
