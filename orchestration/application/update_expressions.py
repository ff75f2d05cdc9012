"""Expressions that give records the form of update messages: a key, an update and a default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagster_adjunct.orchestration.operators.arguments import column_names
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.quoted_columns import quoted
from dagster_adjunct.resources.tables.spark_write import DEFAULT, UPDATE

Columns = Mapping[str, str] | Sequence[str]


def update_message(*, key: str | Sequence[str], update: Columns, default: Columns | None = None) -> tuple[str, ...]:
    """Return what `map` takes to turn records into (key, UpdateMessage(update, default)).

    `key` names the table's key columns, which the records must have. `update` is what each message sets:
    {table column: Spark SQL expression}, or a list of columns that keep their names. `default` is the record
    put where none exists yet, before the update is applied; the key is part of it by itself.

        stream.map(*update_message(key="tailnum", update={"last_dest": "dest"}, default=["model", "seats"]))
             .send_to(aircraft, UpdateContract.UPDATE_WITH_DEFAULTS)
    """
    keys = column_names("update_message: key=", key)
    if not keys:
        raise ConfigurationError(
            "update_message names no key.", "Write key= with the table's key columns.", argument="key"
        )
    expressions = [*(quoted(name) for name in keys), f"{_struct('update', update)} as {UPDATE}"]
    if default is not None:
        expressions.append(f"{_struct('default', default)} as {DEFAULT}")
    return tuple(expressions)


def _struct(what: str, columns: Columns) -> str:
    pairs = columns if isinstance(columns, Mapping) else {name: quoted(name) for name in columns}
    names = column_names(f"update_message: {what}=", list(pairs))
    if not names:
        raise ConfigurationError(f"update_message: {what}= names no column.", "Name at least one.", argument=what)
    arguments = ", ".join(f"'{_escaped(name)}', {pairs[name]}" for name in names)
    return f"named_struct({arguments})"


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace("'", "\\'")
