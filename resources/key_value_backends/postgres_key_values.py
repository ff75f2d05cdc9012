"""The two tables of a PostgreSQL schema that are a key-value table, and the statements over them.

`kvt_<incarnation>` has the entries of all partitions, in the order of their table keys. `kvt_<incarnation>_tokens` has
a row for each recent request, written in the request's own transaction: `applied` is true where it was applied, and
false where a repeat found its condition not to hold, which keeps a late first attempt from being applied still.

Every statement sees what was committed before it began (READ COMMITTED), and waits for whoever has the rows that it
would change. What that means for each is said beside it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from psycopg import sql

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.table_segment import TableId

SEALED = "KV001"
"""The SQLSTATE of a write to a sealed table; classes that begin with I to Z are free for use."""
PAGE_BYTES = 16 << 20
"""Bytes of values after which a page of entries of unknown size ends."""
_FORGOTTEN_AT_ONCE = 10_000
_INCARNATION = re.compile(r"[0-9a-f]{16}")


def physical_name(table: TableId) -> str:
    """Return the name of the table with the entries. Raises ConfigurationError for an incarnation that is none."""
    if not _INCARNATION.fullmatch(table.incarnation):
        raise ConfigurationError(
            f"key-value table {table.scope}/{table.name} has the incarnation {table.incarnation!r}: expected 16 "
            "hexadecimal digits.",
            "Open it through its manager.",
            table=f"{table.scope}/{table.name}",
        )
    return f"kvt_{table.incarnation}"


def quoted(schema: str, name: str) -> str:
    """Return schema.name as it stands in statements."""
    return sql.Identifier(schema, name).as_string(None)


@dataclass(frozen=True, slots=True)
class KeyValueStatements:
    """What is sent about one table. $1 is the partition, or the token where there is no partition.

    A change of one key is one statement, which writes the request's token too. `put` and `remove` write it first, as
    they always happen: a repeat waits for them there. The others write it, and report one row, only if they happened.
    """

    name: str
    rows: str  # the same with its schema, quoted
    get: str
    get_version: str
    get_many: str
    get_many_versions: str
    put: str
    insert: str
    replace: str
    remove: str
    remove_version: str
    batch: str
    batch_again: str
    hold: str
    claim: str
    forget: str

    @staticmethod
    @lru_cache(maxsize=256)
    def of(schema: str, table: TableId) -> KeyValueStatements:
        """Return the statements over the table of this incarnation."""
        name = physical_name(table)
        rows, tokens = quoted(schema, name), quoted(schema, f"{name}_tokens")
        columns = "(partition, table_key, version, value)"
        one, many = "partition = $1 AND table_key = $2", "partition = $1 AND table_key = ANY ($2)"
        entry, bare = "table_key, version, value", "table_key, version, NULL::bytea"
        first = f"WITH token AS (INSERT INTO {tokens} (token) VALUES ($3::bytea) RETURNING 1)"
        then = f"INSERT INTO {tokens} (token) SELECT $3::bytea FROM done"
        old = f"SELECT ctid FROM {tokens} WHERE at < now() - $1::int * interval '1 second'"
        return KeyValueStatements(
            name,
            rows,
            get=f"SELECT {entry} FROM {rows} WHERE {one}",
            get_version=f"SELECT {bare} FROM {rows} WHERE {one}",
            get_many=f"SELECT {entry} FROM {rows} WHERE {many}",
            get_many_versions=f"SELECT {bare} FROM {rows} WHERE {many}",
            # Of two at once the later has the last word.
            put=f"{first} INSERT INTO {rows} {columns} SELECT $1::int, $2::bytea, $4::bytea, $5::bytea FROM token "
            "ON CONFLICT (partition, table_key) DO UPDATE SET version = excluded.version, value = excluded.value",
            # Waits for one that is inserting or removing the same key; what that one came to decides.
            insert=f"WITH done AS (INSERT INTO {rows} {columns} VALUES ($1, $2, $4, $5) ON CONFLICT DO NOTHING "
            f"RETURNING 1) {then}",
            # Waits for one that is changing the key, then looks at the version again.
            replace=f"WITH done AS (UPDATE {rows} SET version = $4, value = $5 WHERE {one} AND version = $6 "
            f"RETURNING 1) {then}",
            # A key that came in after the statement began stays: then the removal was before it.
            remove=f"{first} DELETE FROM {rows} USING token WHERE {one}",
            remove_version=f"WITH done AS (DELETE FROM {rows} WHERE {one} AND version = $4 RETURNING 1) {then}",
            batch=_batch(rows, f"INSERT INTO {tokens} (token) SELECT $6::bytea FROM fine"),
            batch_again=_batch(rows, f"UPDATE {tokens} SET applied = true FROM fine WHERE token = $6::bytea"),
            hold=f"INSERT INTO {rows} {columns} SELECT $1::int, held, ''::bytea, ''::bytea "
            "FROM unnest($2::bytea[]) AS held ORDER BY held ON CONFLICT DO NOTHING",
            # Waits for an attempt that has written its token; one that has not can't write it any more.
            claim=f"INSERT INTO {tokens} AS t (token, applied) VALUES ($1, false) "
            "ON CONFLICT (token) DO UPDATE SET applied = t.applied RETURNING applied",
            forget=f"DELETE FROM {tokens} WHERE ctid = ANY (ARRAY("
            f"{old} LIMIT {_FORGOTTEN_AT_ONCE} FOR UPDATE SKIP LOCKED))",
        )

    def page(self, values: bool, ends: bool, guarded: bool) -> str:
        """Return the query for the first $3 entries from the key $2 on and, where it `ends`, before $4.

        Where it is `guarded`, no further entry is read behind PAGE_BYTES of values.
        """
        found = "table_key, version, value" if values else "table_key, version, NULL::bytea"
        before = ""
        if guarded:
            size = "octet_length(value)"  # which takes no value apart
            before = f", sum({size}) OVER (ORDER BY table_key ROWS UNBOUNDED PRECEDING) - {size} AS before"
        query = (
            f"SELECT {found}{before} FROM {self.rows} WHERE partition = $1 AND table_key >= $2"
            f"{' AND table_key < $4' if ends else ''} ORDER BY table_key LIMIT $3::int"
        )
        if not guarded:
            return query
        return f"SELECT {found} FROM ({query}) AS part WHERE before < {PAGE_BYTES} ORDER BY table_key"


def _batch(rows: str, token: str) -> str:
    """Return the statement that applies changes of several keys, or none of them, and returns (place, version) of each
    whose condition fails. $2 to $5 are keys, values, versions and what is expected; '' is "no such key".

    The keys that are there are locked in their order, so that those who change the same ones wait rather than deadlock;
    what is locked is the newest, and stays so until the commit. A key that came in after the statement began makes the
    insertion fail, and with it the statement, which is then sent again. Only for keys that are to be removed and were
    not there, while others are changed, nothing would say so: nothing is applied then, and their places are returned
    negative. They must be `hold`-ed first.
    """
    one = f"{rows}.partition = $1 AND {rows}.table_key = ANY ($2) AND {rows}.table_key = seen.table_key"
    return f"""
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest($2::bytea[], $3::bytea[], $4::bytea[], $5::bytea[]) WITH ORDINALITY
        AS a (table_key, value, version, expected, place)
), locked AS MATERIALIZED (
    SELECT table_key, version FROM {rows} WHERE partition = $1::int AND table_key = ANY ($2)
    ORDER BY table_key FOR UPDATE
), seen AS MATERIALIZED (
    SELECT asked.*, locked.version AS found FROM asked LEFT JOIN locked USING (table_key)
), refused AS MATERIALIZED (
    SELECT place, found FROM seen WHERE expected <> coalesce(found, ''::bytea)
), loose AS MATERIALIZED (
    SELECT place FROM seen WHERE found IS NULL AND value IS NULL
        AND EXISTS (SELECT FROM seen WHERE found IS NOT NULL OR value IS NOT NULL)
), fine AS MATERIALIZED (
    SELECT 1 AS fine WHERE NOT EXISTS (SELECT FROM refused) AND NOT EXISTS (SELECT FROM loose)
), noted AS ({token}
), removed AS (
    DELETE FROM {rows} USING seen, fine WHERE {one} AND seen.found IS NOT NULL AND seen.value IS NULL
), updated AS (
    UPDATE {rows} SET version = seen.version, value = seen.value FROM seen, fine
    WHERE {one} AND seen.found IS NOT NULL AND seen.value IS NOT NULL
), inserted AS (
    INSERT INTO {rows} (partition, table_key, version, value) SELECT $1::int, table_key, version, value
    FROM seen, fine WHERE found IS NULL AND value IS NOT NULL ORDER BY table_key
)
SELECT place, found FROM refused
UNION ALL SELECT - place, NULL::bytea FROM loose WHERE NOT EXISTS (SELECT FROM refused)"""
