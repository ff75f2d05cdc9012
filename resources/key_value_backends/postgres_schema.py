"""Making, sealing and dropping the two tables that are a key-value table: each in one transaction.

What is `rehearsed` is done and undone: whatever the server has against it (a right that its user lacks, a session that
only reads, a view of somebody's over the table) it says then, by its own rules, and nothing has changed.

They may be called by several at once: an advisory lock of the table's name lets one at a time through.
"""

from __future__ import annotations

from typing import Any

from psycopg import Connection, sql

from dagster_adjunct.resources.key_value.segment import TableId
from dagster_adjunct.resources.key_value_backends.postgres_segment import SEALED
from dagster_adjunct.resources.key_value_backends.sqlite import sql_table_name


def create(connection: Connection[Any], schema: str, table: TableId) -> None:
    """Make both tables where they are missing."""
    name, tokens, _ = _names(schema, table)
    with connection.transaction():
        _alone(connection, schema, table)
        if is_there(connection, schema, table):
            return
        # A plain address is not compressed, so that its length alone says whether the index takes it. A page with some
        # room takes the new version of a row beside the old one, and the index stays as it is.
        connection.execute(
            sql.SQL(
                "CREATE TABLE {name} (address bytea PRIMARY KEY, version bytea NOT NULL, value bytea NOT NULL) "
                "WITH (fillfactor = 90)"
            ).format(name=name)
        )
        connection.execute(sql.SQL("ALTER TABLE {} ALTER address SET STORAGE PLAIN").format(name))
        connection.execute(
            sql.SQL(
                "CREATE TABLE {tokens} (token bytea PRIMARY KEY, applied boolean NOT NULL DEFAULT true, "
                "at timestamptz NOT NULL DEFAULT now())"
            ).format(tokens=tokens)
        )
        for identifier, what in ((name, "entries"), (tokens, "recent requests")):
            comment = sql.Literal(f"{what} of key-value table {table.scope}/{table.name}")
            connection.execute(sql.SQL("COMMENT ON TABLE {} IS {}").format(identifier, comment))


def seal(connection: Connection[Any], schema: str, table: TableId, *, rehearsed: bool = False) -> bool:
    """Refuse all writes to the entries from the commit on; return False where there is no such table.

    The lock that makes a trigger lets reads pass and waits for the writes under way, which began without it.
    """
    name, _, sealed = _names(schema, table)
    with connection.transaction(force_rollback=rehearsed):
        _alone(connection, schema, table)
        if not is_there(connection, schema, table):
            return False
        query = "SELECT FROM pg_trigger WHERE tgrelid = to_regclass(%s) AND tgname = 'sealed'"
        if connection.execute(query, (name.as_string(connection),)).fetchone() is not None:
            return True
        connection.execute(
            sql.SQL(
                "CREATE OR REPLACE FUNCTION {sealed}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
                "RAISE EXCEPTION 'the key-value table is sealed' USING ERRCODE = {state}; END $$"
            ).format(sealed=sealed, state=sql.Literal(SEALED))
        )
        connection.execute(
            sql.SQL(
                "CREATE TRIGGER sealed BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {name} "
                "FOR EACH STATEMENT EXECUTE FUNCTION {sealed}()"
            ).format(name=name, sealed=sealed)
        )
    return True


def drop(connection: Connection[Any], schema: str, table: TableId, *, rehearsed: bool = False) -> None:
    """Remove all that belongs to the table, once what is under way has ended."""
    name, tokens, sealed = _names(schema, table)
    with connection.transaction(force_rollback=rehearsed):
        _alone(connection, schema, table)
        connection.execute(sql.SQL("DROP TABLE IF EXISTS {}, {}").format(name, tokens))
        connection.execute(sql.SQL("DROP FUNCTION IF EXISTS {}()").format(sealed))


def _alone(connection: Connection[Any], schema: str, table: TableId) -> None:
    """Keep others who change the same table from doing so until the open transaction ends; wait for nobody for ever."""
    connection.execute("SET LOCAL lock_timeout = '30s'")
    name = f"{schema}.{sql_table_name(table)}"
    connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (name,))


def _names(schema: str, table: TableId) -> tuple[sql.Identifier, sql.Identifier, sql.Identifier]:
    """Return the names of the entries, of the tokens, and of the function that refuses writes."""
    name = sql_table_name(table)
    return (
        sql.Identifier(schema, name),
        sql.Identifier(schema, f"{name}_tokens"),
        sql.Identifier(schema, f"{name}_sealed"),
    )


def is_there(connection: Connection[Any], schema: str, table: TableId) -> bool:
    """Tell whether the table with the entries exists."""
    (name, *_) = _names(schema, table)
    answer = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name.as_string(connection),)).fetchone()
    return bool(answer and answer[0])
