"""Expressions that give records the form of update messages: a key, an update and a default."""

from __future__ import annotations

from collections.abc import Sequence

from dagster_adjunct.orchestration.operators.arguments import column_names
from dagster_adjunct.orchestration.operators.columns.update_columns import (
    Columns,
    check_own_key,
    default_of,
    pairs_of,
    struct_of,
)
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.quoted_columns import quoted
from dagster_adjunct.resources.tables.arrow_operations import UPDATE


def update_message(*, key: str | Sequence[str], update: Columns, default: Columns | None = None) -> tuple[str, ...]:
    """Return what `map` takes to turn records into (key, UpdateMessage(update, default)).

    `key` names the table's key columns, which the records must have. `update` is what each message sets:
    {table column: Spark SQL expression}, or a list of columns that keep their names. `default` is the record
    put where none exists yet, before the update is applied; the key is part of it by itself. `default=[]` is a plain
    upsert: what the update sets is the first record.

        stream.map(*update_message(key="tailnum", update={"last_dest": "dest"}, default=["model", "seats"]))
             .send_to(aircraft, UpdateContract.UPDATE_WITH_DEFAULTS)
    """
    keys = column_names("update_message: key=", key)
    if not keys:
        raise ConfigurationError(
            "update_message names no key.", "Write key= with the table's key columns.", argument="key"
        )
    pairs = pairs_of("update_message: update=", update)
    first = None if default is None else pairs_of("update_message: default=", default, empty=True)
    check_own_key("update_message: update=", keys, pairs)
    check_own_key("update_message: default=", keys, first or ())
    return (*(quoted(name) for name in keys), f"{struct_of(pairs)} as {UPDATE}", *default_of(first))
