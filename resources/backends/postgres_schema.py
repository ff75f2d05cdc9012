"""The columns and keys of PostgreSQL tables: making them, and checking those that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.backends.applied_marks import COLUMNS, check_columns_beside
from dagster_adjunct.resources.backends.column_values import (
    Column,
    Kind,
    check_declared,
    column_of,
    not_unique,
    unequal_keys,
)
from dagster_adjunct.resources.errors import TableNotFoundError

if TYPE_CHECKING:
    from psycopg import AsyncConnection

_TYPES = {
    Kind.STRING: "text",
    Kind.BOOLEAN: "boolean",
    Kind.TIMESTAMP: "timestamp with time zone",
    Kind.DATE: "date",
    Kind.DECIMAL: "numeric",
    Kind.BINARY: "bytea",
    Kind.JSON: "jsonb",
}
_WIDTHS = {
    **dict.fromkeys(("tinyint", "byte", "smallint", "short", "int2"), "smallint"),
    **dict.fromkeys(("int", "integer", "int4"), "integer"),
    **dict.fromkeys(("bigint", "long", "int8"), "bigint"),
    **dict.fromkeys(("float", "real", "float4"), "real"),
    **dict.fromkeys(("double", "double precision", "float8"), "double precision"),
}


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table's columns in the order of the table, and the type that a cast of each must name."""

    columns: tuple[Column, ...]
    casts: Mapping[str, str]


async def create_table(
    connection: AsyncConnection[Any], schema: str, table: str, key: Sequence[str], columns: Sequence[Column]
) -> None:
    """Make schema and table with `key` as its primary key, unless they are there."""
    from psycopg import sql

    parts = [sql.SQL("{} {}").format(sql.Identifier(column.name), sql.SQL(_type_of(column))) for column in columns]
    parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, key))))
    await _create(connection, schema, table, parts)


async def _create(connection: AsyncConnection[Any], schema: str, table: str, parts: Sequence[Any]) -> None:
    from psycopg import sql

    name = sql.Identifier(schema, table)
    async with connection.transaction():
        # IF NOT EXISTS alone fails when two sessions create the same table at once.
        await connection.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", (f"adjunct:{schema}.{table}",))
        exists = await connection.execute("SELECT to_regclass(%s)", (name.as_string(connection),))
        if (await exists.fetchone() or (None,))[0] is not None:
            return
        await connection.execute(sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema)))
        # Rows that are updated over and over stay in their page where it has room.
        made = sql.SQL("CREATE TABLE {} ({}) WITH (fillfactor = 80)").format(name, sql.SQL(", ").join(parts))
        await connection.execute(made)


_UNEQUAL = {
    "citext": "which ignores case",
    "bpchar": "which ignores blanks at the end",
}


async def read_shape(
    connection: AsyncConnection[Any],
    label: str,
    place: str,
    schema: str,
    table: str,
    key: Sequence[str],
    declared: Sequence[Column],
) -> TableShape:
    """The table's shape, checked: declared columns are there, and `key` is unique.

    TableNotFoundError where there is no such table; SchemaMismatchError where it does not fit.
    """
    cursor = await connection.execute(
        """SELECT a.attname, format_type(a.atttypid, a.atttypmod), format_type(a.atttypid, -1)
           FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
           WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
           ORDER BY a.attnum""",
        (schema, table),
    )
    rows = await cursor.fetchall()
    if not rows:
        raise TableNotFoundError(
            f"{label} at {place}: there is no such table.",
            "Correct schema and name, or declare create=True.",
            table=label,
        )
    names = [name for name, _, _ in rows]
    check_declared(f"{label} at {place}", names, declared)
    cursor = await connection.execute(
        """SELECT array_agg(a.attname::text)
           FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
           JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
           WHERE n.nspname = %s AND c.relname = %s AND i.indisunique AND i.indpred IS NULL
           GROUP BY i.indexrelid""",
        (schema, table),
    )
    if set(key) not in [set(columns) for (columns,) in await cursor.fetchall()]:
        raise not_unique(f"{label} at {place}", key)
    cursor = await connection.execute(
        """SELECT a.attname, format_type(a.atttypid, -1), coalesce(o.collisdeterministic, true), o.collname
           FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
           LEFT JOIN pg_collation o ON o.oid = a.attcollation
           WHERE n.nspname = %s AND c.relname = %s AND a.attname = ANY (%s)""",
        (schema, table, list(key)),
    )
    for name, type_, exact, collation in await cursor.fetchall():
        if type_ in _UNEQUAL:
            raise unequal_keys(f"{label} at {place}", name, f"{type_}, {_UNEQUAL[type_]}", "text")
        if not exact:
            raise unequal_keys(
                f"{label} at {place}",
                name,
                f"{type_} with the collation {collation}, which is not deterministic",
                "text",
            )
    wanted = {column.name for column in declared} or set(names)
    return TableShape(
        tuple(column_of(name, type_) for name, type_, _ in rows if name in wanted),
        {name: cast for name, _, cast in rows},
    )


async def open_beside(
    connection: AsyncConnection[Any], label: str, schema: str, beside: str, key: Mapping[str, str], *, create: bool
) -> None:
    """Check the table that keeps what was applied to keys, made before if `create` says so; `key`: columns' types.

    TableAccessError where it is missing or another.
    """
    from psycopg import sql

    parts: list[sql.Composable] = [
        sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_)) for name, type_ in key.items()
    ]
    types = {**dict.fromkeys(COLUMNS, "text"), "applied": "jsonb"}
    parts += [sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(type_)) for name, type_ in types.items()]
    parts.append(sql.SQL("at timestamp with time zone NOT NULL"))
    parts.append(sql.SQL("PRIMARY KEY ({})").format(sql.SQL(", ").join(map(sql.Identifier, key))))
    if create:
        await _create(connection, schema, beside, parts)
    cursor = await connection.execute(
        """SELECT a.attname FROM pg_attribute a WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0
           AND NOT a.attisdropped""",
        (sql.Identifier(schema, beside).as_string(connection),),
    )
    names = [name for (name,) in await cursor.fetchall()]
    check_columns_beside(label, beside, list(key), names)


def _type_of(column: Column) -> Any:
    if column.kind is Kind.LIST:
        assert column.element is not None
        return _type_of(column.element) + "[]"
    base = _WIDTHS.get(column.type) or _TYPES[column.kind]
    sized = column.kind is Kind.DECIMAL or column.type in ("varchar", "character varying")
    if column.size and sized:
        return ("varchar" if column.kind is Kind.STRING else base) + column.size
    return base
