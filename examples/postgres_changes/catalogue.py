"""What PostgreSQL's catalogue says of the table that is captured, and why its changes would not
come to the table.

    facts of the catalogue  ->  require_capturable (refuses by name)
                            ->  what was attached, detached or truncated since the last look

PostgreSQL publishes less than a table holds: no generated columns, nothing of unlogged and foreign
partitions, and nothing when a partition is attached or detached.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from dagster_adjunct.errors import ConfigurationError

GENERATED_SINCE = 180_000
"""The version of the server that can publish stored generated columns."""
_ROW_FILTERS_SINCE = 150_000  # and lists of columns
_KINDS = {
    "v": "a view",
    "m": "a materialized view",
    "f": "a foreign table",
    "S": "a sequence",
    "i": "an index",
    "I": "an index",
    "c": "a composite type",
    "t": "a TOAST table",
}


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its type's number in pg_type (of a domain, the type that it is made of), that of an
    array's elements (0 for other types), and whether it is generated: "" (no), "s" (stored) or "v"
    (virtual)."""

    name: str
    type: int
    element: int
    generated: str
    not_null: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """An ordinary table or a partition. `identity` are the columns of its replica identity, whose
    old values changes have; `file` changes when the table is truncated or rewritten."""

    oid: int
    name: str
    kind: str
    persistence: str
    identity: frozenset[str]
    file: int


@dataclass(frozen=True, slots=True)
class Facts:
    """The table `relation`, its columns, the sets of columns that are unique, and its partitions
    that hold rows.

    `children` are the names of tables that inherit from it.
    """

    server: int
    relation: Relation
    columns: tuple[Column, ...]
    unique: tuple[frozenset[str], ...]
    leaves: tuple[Relation, ...]
    children: tuple[str, ...]

    @property
    def is_partitioned(self) -> bool:
        return self.relation.kind == "p"

    def column(self, name: str) -> Column:
        return next(column for column in self.columns if column.name == name)

    def generated_in_identity(self, kind: str) -> list[str]:
        """Return the generated columns of a kind in the replica identity of the table or of a
        partition.

        From version 18 on PostgreSQL rejects all updates and deletes of a table some of whose
        publications leave one out.
        """
        if self.server < GENERATED_SINCE:
            return []
        identity = self.relation.identity.union(*(leaf.identity for leaf in self.leaves))
        return [
            column.name
            for column in self.columns
            if column.generated == kind and column.name in identity
        ]


_RELATION = """
    SELECT c.oid::bigint, format('%%s.%%s', n.nspname, c.relname), c.relkind::text,
        c.relpersistence::text,
        ARRAY(
            SELECT a.attname::text FROM pg_attribute a
            LEFT JOIN pg_index i ON i.indrelid = c.oid
                AND CASE c.relreplident
                    WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident ELSE false END
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                AND (c.relreplident = 'f' OR a.attnum = ANY (i.indkey))
        ),
        pg_relation_filenode(c.oid)::bigint
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
"""
_COLUMNS = """
    WITH RECURSIVE base(oid, type) AS (
        SELECT oid, oid FROM pg_type WHERE typtype <> 'd'
        UNION ALL SELECT d.oid, base.type FROM pg_type d JOIN base ON d.typbasetype = base.oid
        WHERE d.typtype = 'd'
    )
    SELECT a.attname::text, base.type::bigint,
        (CASE t.typcategory WHEN 'A' THEN t.typelem ELSE 0 END)::bigint,
        a.attgenerated::text, a.attnotnull
    FROM pg_attribute a JOIN base ON base.oid = a.atttypid JOIN pg_type t ON t.oid = base.type
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_UNIQUE = """
    SELECT ARRAY(SELECT a.attname::text FROM pg_attribute a WHERE a.attrelid = i.indrelid
        AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1]))
    FROM pg_index i WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
        AND i.indexprs IS NULL
"""
_CHILDREN = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = %s ORDER BY 1"


def read_facts(connection: psycopg.Connection[Any], table: str) -> Facts:
    """Return the facts of the table ("public.accounts"). Raises ConfigurationError if there is
    none.
    """
    schema, _, name = table.rpartition(".")
    found = connection.execute(
        f"{_RELATION} WHERE n.nspname = %s AND c.relname = %s", [schema, name]
    ).fetchone()
    if found is None:
        problem = f"there is no table {table} in the database {connection.info.dbname!r}."
        raise ConfigurationError(
            problem, "Name it SCHEMA.TABLE, as PostgreSQL's catalogue writes it.", table=table
        )
    relation = _relation(found)
    leaves: list[Relation] = []
    children: tuple[str, ...] = ()
    if relation.kind == "p":
        below = (
            "JOIN pg_partition_tree(%s) t ON t.relid = c.oid WHERE t.isleaf AND t.level > 0 ORDER"
            " BY c.oid"
        )
        leaves = list(map(_relation, connection.execute(f"{_RELATION} {below}", [relation.oid])))
    else:
        children = tuple(name for (name,) in connection.execute(_CHILDREN, [relation.oid]))
    return Facts(
        connection.info.server_version,
        relation,
        tuple(Column(*row) for row in connection.execute(_COLUMNS, [relation.oid])),
        tuple(frozenset(names) for (names,) in connection.execute(_UNIQUE, [relation.oid])),
        tuple(leaves),
        children,
    )


def _relation(row: Sequence[Any]) -> Relation:
    oid, name, kind, persistence, identity, file = row
    return Relation(oid, name, kind, persistence, frozenset(identity), file or 0)


def require_capturable(facts: Facts, columns: Iterable[str], key: Iterable[str]) -> None:
    """Raise ConfigurationError if changes would not have these columns, or not for each row of the
    table.

    `key` are the columns that identify a row.
    """
    _check_kind(facts)
    _check_columns(facts, tuple(columns))
    _check_key(facts, tuple(key))
    _check_identity(facts.relation, frozenset(key))
    # each has a replica identity of its own, and is published under that of the table
    for leaf in facts.leaves:
        _check_identity(leaf, facts.relation.identity)
    _check_virtual(facts)


def _check_virtual(facts: Facts) -> None:
    """Raise ConfigurationError if a publication would let the server reject updates and deletes."""
    virtual = facts.generated_in_identity("v")
    if virtual:
        table = facts.relation.name
        raise ConfigurationError(
            f"PostgreSQL would reject all updates and deletes of {table} once it is published: its"
            f" replica identity has the virtual generated column {virtual[0]!r}, which is never"
            " published.",
            f"ALTER TABLE {table} REPLICA IDENTITY DEFAULT, also for its partitions, or generate"
            " the column STORED.",
            table=table,
            column=virtual[0],
        )


def _check_identity(relation: Relation, needed: frozenset[str]) -> None:
    """Raise ConfigurationError if old rows in changes don't have the columns that are needed."""
    lacking = sorted(needed - relation.identity)
    if lacking:
        raise ConfigurationError(
            f"updates and deletes of {relation.name} do not have the old values of"
            f" {', '.join(lacking)}: its replica identity has"
            f" {', '.join(sorted(relation.identity)) or 'no column'}.",
            f"ALTER TABLE {relation.name} REPLICA IDENTITY FULL.",
            table=relation.name,
            column=lacking[0],
        )


def _check_kind(facts: Facts) -> None:
    relation = facts.relation
    if relation.kind not in "rp":
        what = _KINDS.get(relation.kind, f"a relation of kind {relation.kind!r}")
        problem = f"{relation.name} is {what}: its rows have no changes in the log."
        raise ConfigurationError(
            problem, "Capture the tables that it is made of.", table=relation.name
        )
    for part in (relation, *facts.leaves):
        if part.kind == "f":
            problem = (
                f"{part.name}, a partition of {relation.name}, is a foreign table, whose changes"
                " are not logged."
            )
            step = "Detach it, or capture the other partitions one by one."
            raise ConfigurationError(problem, step, table=part.name)
        if part.persistence != "p":
            what = "temporary" if part.persistence == "t" else "unlogged"
            problem = f"{part.name} is {what}: its changes are not logged."
            step = (
                f"ALTER TABLE {part.name} SET LOGGED."
                if what == "unlogged"
                else "Capture a permanent table."
            )
            raise ConfigurationError(problem, step, table=part.name)
    if facts.children:
        raise ConfigurationError(
            f"tables inherit from {relation.name}: {', '.join(facts.children)}. A snapshot of it"
            " has their rows, but PostgreSQL publishes their changes under their own names.",
            "Capture each of them, or make the table a partitioned one.",
            table=relation.name,
        )


def _check_columns(facts: Facts, columns: Sequence[str]) -> None:
    known = {column.name: column for column in facts.columns}
    for name in columns:
        if name not in known:
            problem = f"{facts.relation.name} has no column {name!r}: it has {', '.join(known)}."
            step = "Correct the declared columns; names are written as the catalogue has them."
            raise ConfigurationError(problem, step, table=facts.relation.name, column=name)
        generated = known[name].generated
        if generated and (facts.server < GENERATED_SINCE or generated == "v"):
            kind = (
                "virtual"
                if generated == "v"
                else f"of a server before version {GENERATED_SINCE // 10_000}"
            )
            raise ConfigurationError(
                f"column {name!r} of {facts.relation.name} is generated, and changes have no"
                f" generated columns that are {kind}.",
                "Leave it out of the declared columns and compute it where the dataset is read; or"
                " make it an ordinary column that a trigger sets.",
                table=facts.relation.name,
                column=name,
            )


def _check_key(facts: Facts, key: Sequence[str]) -> None:
    nullable = [name for name in key if not facts.column(name).not_null]
    if nullable or not any(columns <= set(key) for columns in facts.unique):
        why = f"{nullable[0]!r} may be null" if nullable else "no unique index has these columns"
        raise ConfigurationError(
            f"({', '.join(key)}) does not identify the rows of {facts.relation.name}: {why}. Rows"
            " of one key would replace each other.",
            "Name the columns of the primary key, or of a unique index over columns that are not"
            " null.",
            table=facts.relation.name,
            column=nullable[0] if nullable else key[0],
        )


_PUBLICATION = (
    "SELECT pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot, puballtables FROM"
    " pg_publication WHERE pubname = %s"
)
_PUBLISHED = (
    "SELECT format('%%s.%%s', schemaname, tablename) FROM pg_publication_tables WHERE pubname = %s"
)
_LISTED = (
    "SELECT rowfilter IS NOT NULL, attnames::text[] FROM pg_publication_tables WHERE pubname = %s"
    " AND format('%%s.%%s', schemaname, tablename) = %s"
)


def check_publication(
    connection: psycopg.Connection[Any], name: str, facts: Facts, columns: Iterable[str]
) -> None:
    """Raise ConfigurationError if the publication does not publish all changes of the table, and
    these alone.
    """
    found = connection.execute(_PUBLICATION, [name]).fetchone()
    table = facts.relation.name
    if found is None:
        problem = f"the publication {name!r} of table {table} is gone."
        step = f"CREATE PUBLICATION {name} …, or drop the slot and take a new snapshot."
        raise ConfigurationError(problem, step, table=table)

    def refuse(problem: str, step: str) -> ConfigurationError:
        return ConfigurationError(f"the publication {name!r} {problem}.", step, table=table)

    lacking = [
        op
        for op, there in zip(("insert", "update", "delete", "truncate"), found, strict=False)
        if not there
    ]
    if lacking:
        every = f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')"
        raise refuse(
            f"leaves out changes: {', '.join(lacking)}", f"{every}; then take a new snapshot."
        )
    if facts.is_partitioned and not found[4]:
        step = (
            f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true); then take a new"
            " snapshot."
        )
        raise refuse(f"names partitions in place of the partitioned table {table}", step)
    others = {other for (other,) in connection.execute(_PUBLISHED, [name])} - {table}
    if others or found[5]:
        what = ", ".join(sorted(others)) or "all tables"
        raise refuse(
            f"publishes other tables than {table}, too: {what}", f"Make one of {table} alone."
        )
    if facts.server >= _ROW_FILTERS_SINCE:
        _check_published_columns(connection, name, facts, columns)


def _check_published_columns(
    connection: psycopg.Connection[Any], name: str, facts: Facts, columns: Iterable[str]
) -> None:
    """Raise ConfigurationError if the publication leaves out rows, declared columns, or columns
    without which the server rejects updates.
    """
    table = facts.relation.name
    step = f"ALTER PUBLICATION {name} SET TABLE {table}"
    for filtered, listed in connection.execute(_LISTED, [name, table]):
        if filtered:
            raise ConfigurationError(
                f"the publication {name!r} has a filter of rows of {table}: it leaves out others,"
                " which the snapshot has.",
                f"{step}; then take a new snapshot.",
                table=table,
            )
        unlisted = sorted({*columns, *facts.generated_in_identity("s")} - set(listed))
        if any(facts.column(column).generated for column in unlisted):
            step += f"; ALTER PUBLICATION {name} SET (publish_generated_columns = stored)"
        if unlisted:
            raise ConfigurationError(
                f"the publication {name!r} leaves out columns of {table}: {', '.join(unlisted)}.",
                f"{step}; then take a new snapshot.",
                table=table,
                column=unlisted[0],
            )


@dataclass(frozen=True, slots=True)
class Partitions:
    """The partitions of a table that were seen at the last look: the file of each, by its oid."""

    files: Mapping[int, int]

    @classmethod
    def of(cls, facts: Facts) -> Partitions:
        return cls({leaf.oid: leaf.file for leaf in facts.leaves})

    @classmethod
    def from_json(cls, text: str | None) -> Partitions | None:
        """Return what `to_json` has written, None for any other text."""
        try:
            return cls(
                {int(oid): int(file) for oid, file in json.loads(text or "")["partitions"].items()}
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            return None

    def to_json(self) -> str:
        return json.dumps({"partitions": self.files})


def check_partitions(connection: psycopg.Connection[Any], facts: Facts, seen: Partitions) -> None:
    """Raise ConfigurationError if rows came or went with partitions since they were last seen.

    PostgreSQL publishes no change when a partition is attached or detached, or truncated by its own
    name.
    """
    table, leaves = facts.relation.name, {leaf.oid: leaf for leaf in facts.leaves}
    gone = [oid for oid in seen.files if oid not in leaves]
    if gone:
        names = [
            name
            for (name,) in connection.execute(
                "SELECT o::oid::regclass::text FROM unnest(%s) o", [gone]
            )
        ]
        raise _unpublished(table, f"{', '.join(names)} was detached from it or dropped")
    for oid, leaf in leaves.items():
        if oid not in seen.files:
            if _had_rows(connection, leaf, facts):
                raise _unpublished(table, f"{leaf.name} was attached to it with rows")
        elif seen.files[oid] != leaf.file:
            raise _unpublished(table, f"{leaf.name} was truncated or rewritten")


def _unpublished(table: str, what: str) -> ConfigurationError:
    return ConfigurationError(
        f"partitions of {table} have changed, and no change says which rows came or went: {what}.",
        "Take a new snapshot: run with --drop, then again. If no rows came or went (they were"
        " deleted before, or the partition was only rewritten, as by VACUUM FULL), go on with"
        " --accept-partitions.",
        table=table,
    )


_EARLIER = """
    SELECT EXISTS (
        SELECT FROM ONLY {} r, (SELECT xmin, cmin FROM pg_inherits WHERE inhrelid = %s) a
        WHERE age(r.xmin) > age(a.xmin)
            OR (r.xmin = a.xmin AND r.cmin::text::bigint < a.cmin::text::bigint)
    )
"""


def _had_rows(connection: psycopg.Connection[Any], leaf: Relation, facts: Facts) -> bool:
    """Return whether a partition has rows that are older than its being one: a new, empty one is
    as usual.
    """
    from psycopg import sql

    table = sql.Identifier(*leaf.name.split(".", 1))
    found = connection.execute(sql.SQL(_EARLIER).format(table), [leaf.oid]).fetchone()
    return bool(found and found[0])
