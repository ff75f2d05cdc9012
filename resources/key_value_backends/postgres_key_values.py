"""The two tables of a PostgreSQL schema that are a key-value table, and the statements over them.

`kvt_<incarnation>` has the entries of all partitions. An address is the partition in four bytes and the table key; were
they two columns, a plan could search for the partition alone and look at all of its keys. `kvt_<incarnation>_tokens`
has a row for each recent request, written in the request's own transaction: `applied` is true where it was applied, and
false where a repeat found its condition not to hold, which keeps a late first attempt from being applied still.

Every statement sees what was committed before it began (READ COMMITTED), and waits for whoever has the rows that it
would change. What that means for each is said beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from psycopg import sql

from dagster_adjunct.resources.key_value.table_segment import TableId
from dagster_adjunct.resources.key_value_backends.sql_table_name import sql_table_name

SEALED = "KV001"
"""The SQLSTATE of a write to a sealed table; classes that begin with I to Z are free for use."""
ENTRY = "substr(address, 5), version, value"
BARE = "substr(address, 5), version, NULL::bytea"
PAGE_BYTES = 16 << 20
"""Bytes of values after which a page of entries of unknown size ends."""
FORGETTING_BLOCKS = 64
"""Blocks of the tokens' table that are looked through at a time: about 8,000 requests, after each thousand."""


def quoted(schema: str, name: str) -> str:
    """Return schema.name as it stands in statements."""
    return sql.Identifier(schema, name).as_string(None)


@dataclass(frozen=True, slots=True)
class PostgresStatements:
    """What is sent about one table. $1 is the address, or all of them. Rows are the table key, version and value.

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
    def of(schema: str, table: TableId) -> PostgresStatements:
        """Return the statements over the table of this incarnation."""
        name = sql_table_name(table)
        rows, tokens = quoted(schema, name), quoted(schema, f"{name}_tokens")
        columns = "(address, version, value)"
        first = f"WITH token AS (INSERT INTO {tokens} (token) VALUES ($2::bytea) RETURNING 1)"
        then = f"INSERT INTO {tokens} (token) SELECT $2::bytea FROM done"
        return PostgresStatements(
            name,
            rows,
            get=f"SELECT {ENTRY} FROM {rows} WHERE address = $1",
            get_version=f"SELECT {BARE} FROM {rows} WHERE address = $1",
            get_many=f"SELECT {ENTRY} FROM {rows} WHERE address = ANY ($1)",
            get_many_versions=f"SELECT {BARE} FROM {rows} WHERE address = ANY ($1)",
            # Of two at once the later has the last word.
            put=f"{first} INSERT INTO {rows} {columns} SELECT $1::bytea, $3::bytea, $4::bytea FROM token "
            "ON CONFLICT (address) DO UPDATE SET version = excluded.version, value = excluded.value",
            # Waits for one that is inserting or removing the same key; what that one came to decides.
            insert=f"WITH done AS (INSERT INTO {rows} {columns} VALUES ($1, $3, $4) ON CONFLICT DO NOTHING "
            f"RETURNING 1) {then}",
            # Waits for one that is changing the key, then looks at the version again.
            replace=f"WITH done AS (UPDATE {rows} SET version = $3, value = $4 WHERE address = $1 AND version = $5 "
            f"RETURNING 1) {then}",
            # A key that came in after the statement began stays: then the removal was before it.
            remove=f"{first} DELETE FROM {rows} USING token WHERE address = $1",
            remove_version=f"WITH done AS (DELETE FROM {rows} WHERE address = $1 AND version = $3 RETURNING 1) {then}",
            batch=_batch(rows, f"INSERT INTO {tokens} (token) SELECT $5::bytea WHERE EXISTS (SELECT FROM fine)"),
            batch_again=_batch(
                rows, f"UPDATE {tokens} SET applied = true WHERE token = $5::bytea AND EXISTS (SELECT FROM fine)"
            ),
            # As a batch does it: those that are there in their order, then the others in theirs.
            hold=f"WITH locked AS MATERIALIZED (SELECT address FROM {rows} WHERE address = ANY ($1) ORDER BY address "
            f"FOR UPDATE) INSERT INTO {rows} AS t {columns} SELECT held, ''::bytea, ''::bytea "
            "FROM unnest($1::bytea[]) AS held WHERE held NOT IN (SELECT address FROM locked) ORDER BY held "
            "ON CONFLICT (address) DO UPDATE SET version = t.version",
            # Waits for an attempt that has written its token; one that has not can't write it any more.
            claim=f"INSERT INTO {tokens} AS t (token, applied) VALUES ($1, false) "
            "ON CONFLICT (token) DO UPDATE SET applied = t.applied RETURNING applied",
            forget=_forget(tokens),
        )

    def page(self, values: bool, guarded: bool) -> str:
        """Return the query for the first $3 entries from the address $1 on and before $2.

        Where it is `guarded`, no further entry is read behind PAGE_BYTES of values.
        """
        range_ = f"FROM {self.rows} WHERE address >= $1 AND address < $2 ORDER BY address LIMIT $3::int"
        if not guarded:
            return f"SELECT {ENTRY if values else BARE} {range_}"
        # The sizes are known without taking a value apart.
        sizes = "sum(octet_length(value)) OVER (ORDER BY address ROWS UNBOUNDED PRECEDING) - octet_length(value)"
        return (
            f"SELECT {ENTRY} FROM (SELECT address, version, value, {sizes} AS before {range_}) AS part "
            f"WHERE before < {PAGE_BYTES} ORDER BY address"
        )


def _forget(tokens: str) -> str:
    """Return the statement that forgets the requests that are older than so many seconds, in some blocks of the table.

    Which blocks is left to chance. An index of times would find all that is old, and cost each write a tenth more.
    """
    blocks = f"(pg_relation_size({sql.Literal(tokens).as_string(None)}) / current_setting('block_size')::int)"
    # From before the first block on, so that those at both ends have the same chance as all others.
    first = f"random() * ({blocks} + {FORGETTING_BLOCKS}) - {FORGETTING_BLOCKS}"
    return (
        f"DELETE FROM {tokens} WHERE ctid = ANY (ARRAY(WITH part AS MATERIALIZED (SELECT "
        f"greatest(least({first}, {blocks} - {FORGETTING_BLOCKS}), 0)::bigint AS first) SELECT ctid FROM {tokens} "
        "WHERE ctid >= (SELECT format('(%s,0)', first)::tid FROM part) "
        f"AND ctid < (SELECT format('(%s,0)', first + {FORGETTING_BLOCKS})::tid FROM part) "
        "AND at < now() - interval '1 second' * {} FOR UPDATE SKIP LOCKED))"
    )


def _batch(rows: str, token: str) -> str:
    """Return the statement that applies changes of several keys, or none of them, and returns the place of each whose
    condition failed. $1 to $4 are addresses, values, versions and what is expected; '' is "no such key". What has the
    version '' is only looked at: it is locked, and stays as it is.

    The keys that are there are locked in their order, so that those who change the same ones wait rather than deadlock;
    what is locked is the newest, and stays so until the commit. A key that came in after the statement began makes the
    insertion fail, and with it the statement, which is then sent again. Only for keys that are to be removed and were
    not there, while others are changed, nothing would say so: nothing is applied then, and their places are returned
    negative. Then all keys are made and locked first, by `hold`, with a version that is empty.
    """
    one = f"{rows}.address = ANY ($1) AND {rows}.address = seen.address AND EXISTS (SELECT FROM fine)"
    return f"""
WITH asked AS MATERIALIZED (
    SELECT * FROM unnest($1::bytea[], $2::bytea[], $3::bytea[], $4::bytea[]) WITH ORDINALITY
        AS a (address, value, version, expected, place)
), locked AS MATERIALIZED (
    SELECT address, version FROM {rows} WHERE address = ANY ($1) ORDER BY address FOR UPDATE
), seen AS MATERIALIZED (
    SELECT asked.*, locked.version AS found FROM asked LEFT JOIN locked USING (address)
), refused AS MATERIALIZED (
    SELECT place FROM seen WHERE expected <> coalesce(found, ''::bytea)
), loose AS MATERIALIZED (
    SELECT place FROM seen WHERE found IS NULL AND value IS NULL
        AND EXISTS (SELECT FROM seen WHERE found IS NOT NULL OR value IS NOT NULL)
), fine AS MATERIALIZED (
    SELECT WHERE NOT EXISTS (SELECT FROM refused) AND NOT EXISTS (SELECT FROM loose)
), noted AS ({token}
), removed AS (
    DELETE FROM {rows} USING seen WHERE {one} AND seen.found IS NOT NULL AND seen.value IS NULL
        AND (seen.version <> '' OR seen.found = '')
), updated AS (
    UPDATE {rows} SET version = seen.version, value = seen.value FROM seen
    WHERE {one} AND seen.found IS NOT NULL AND seen.value IS NOT NULL
), inserted AS (
    INSERT INTO {rows} (address, version, value) SELECT address, version, value FROM seen
    WHERE found IS NULL AND value IS NOT NULL AND EXISTS (SELECT FROM fine) ORDER BY address
)
SELECT place FROM refused
UNION ALL SELECT - place FROM loose WHERE NOT EXISTS (SELECT FROM refused)"""
