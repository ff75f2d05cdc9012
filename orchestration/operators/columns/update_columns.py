"""What updates do to a table's columns, as Spark SQL: the structs that a write takes as updates and defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from dagster_adjunct.orchestration.operators.arguments import column_names, first_double
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.schemas.quoted_columns import quoted
from dagster_adjunct.resources.sql.parsing import parsed
from dagster_adjunct.resources.tables.arrow_operations import DEFAULT, UPDATE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Columns: TypeAlias = Mapping[str, str] | Sequence[str]
Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Update:
    """The expressions of an update: pairs of a table's column and what it is set to, or what is added or appended.

    `remove` names columns that lose their value. `if_missing` is the record to begin with, None where there is none.
    """

    set: Pairs = ()
    add: Pairs = ()
    append: Pairs = ()
    remove: tuple[str, ...] = ()
    if_missing: Pairs | None = None

    @property
    def parts(self) -> dict[str, Pairs]:
        """What is done to columns, by the names that `Changes` has for it."""
        return {name: pairs for name in ("set", "add", "append") if (pairs := getattr(self, name))}

    @property
    def columns(self) -> tuple[str, ...]:
        """The table's columns that an update changes."""
        return (*(name for pairs in self.parts.values() for name, _ in pairs), *self.remove)

    @property
    def written(self) -> tuple[tuple[str, str, str], ...]:
        """Every expression, as (part, the table's column, expression); the default record's part is "if_missing"."""
        parts = {**self.parts, "if_missing": self.if_missing or ()}
        return tuple((part, name, expression) for part, pairs in parts.items() for name, expression in pairs)

    def expressions(self) -> tuple[str, ...]:
        """Return the structs, as `map` takes them."""
        structs = [f"'{name}', {struct_of(pairs)}" for name, pairs in self.parts.items()]
        # Spark has no struct without fields: a boolean stands for one, where an update only removes columns.
        update = f"named_struct({', '.join(structs)})" if structs else "true"
        return (f"{update} as {UPDATE}", *default_of(self.if_missing))


def with_lists(update: Update, frame: DataFrame) -> Update:
    """Return the update where what is appended are lists: a single value is a list of it, null appends nothing."""
    if not update.append:
        return update
    kinds = frame.selectExpr(*[expression for _, expression in update.append]).schema.fields
    return replace(
        update,
        append=tuple(
            (name, expression if field.dataType.typeName() == "array" else _as_list(expression))
            for (name, expression), field in zip(update.append, kinds, strict=True)
        ),
    )


def _as_list(expression: str) -> str:
    return f"case when ({expression}) is not null then array({expression}) end"


def default_of(pairs: Pairs | None) -> tuple[str, ...]:
    """Return the expression of a default record, for `map`; none where there is no default."""
    if pairs is None:
        return ()
    # Spark has no struct without fields: a boolean says that the default has none.
    return (f"{struct_of(pairs) if pairs else '(true)'} as {DEFAULT}",)


def struct_of(pairs: Pairs) -> str:
    """Return the struct of these columns in Spark SQL."""
    return f"named_struct({', '.join(f'{_text(name)}, {expression}' for name, expression in pairs)})"


def pairs_of(what: str, columns: Columns, *, empty: bool = False) -> Pairs:
    """Return columns and their expressions, given as a mapping or as a list of columns that keep their names."""
    if isinstance(columns, str):
        raise ConfigurationError(
            f"{what} is the one string {columns!r}: expected names, or {{table column: Spark SQL expression}}.",
            f"Write [{columns!r}].",
            argument=what.rpartition(" ")[2].rstrip("="),
        )
    pairs = dict(columns) if isinstance(columns, Mapping) else {name: quoted(name) for name in columns}
    names = column_names(what, list(pairs))
    for name in names:
        if not isinstance(pairs[name], str) or not pairs[name].strip():
            raise ConfigurationError(
                f"{what} gives {name!r} the expression {pairs[name]!r}: expected Spark SQL.",
                "Write it as a string, a text within quotes of its own: \"'north'\".",
                argument=what.rpartition(" ")[2].rstrip("="),
            )
    if not names and not empty:
        raise ConfigurationError(
            f"{what} names no column.", "Name at least one.", argument=what.rpartition(" ")[2].rstrip("=")
        )
    return tuple((name, pairs[name]) for name in names)


def checked_update(
    what: str,
    key: Sequence[str],
    set: Columns | None,
    add: Columns | None,
    append: Columns | None,
    remove: Sequence[str],
    if_missing: Columns | None,
) -> Update:
    """Return the update that a user's arguments ask for; `what` says in errors where."""
    given = {"set": set, "add": add, "append": append}
    parts = {name: pairs_of(f"{what}: {name}=", columns, empty=True) for name, columns in given.items() if columns}
    gone = column_names(f"{what}: remove=", remove)
    default = None if if_missing is None else pairs_of(f"{what}: if_missing=", if_missing, empty=True)
    update = Update(remove=gone, if_missing=default, **parts)
    if not update.columns:
        raise ConfigurationError(f"{what} changes nothing.", "Give set=, add=, append= or remove=.", argument="set")
    double = first_double(update.columns)
    if double is not None:
        raise ConfigurationError(
            f"{what} changes column {double!r} twice.",
            "Name a column in one of set, add, append and remove.",
            column=double,
        )
    keyed = [name for name in update.columns if name in key]
    if keyed:
        raise ConfigurationError(
            f"{what} changes {keyed[0]!r}, which is in the table's key ({', '.join(key)}).",
            "Leave it out: the records of another key are other records.",
            argument="set",
        )
    check_own_key(f"{what}: if_missing=", key, default or ())
    return update


def check_own_key(what: str, key: Sequence[str], pairs: Pairs) -> None:
    """Refuse columns of a record that give it another key than that of the record that they are made of."""
    for name, expression in pairs:
        if name in key and (parsed(expression).column or "").lower() != name.lower():
            raise ConfigurationError(
                f"{what} gives {name!r}, which is in the table's key ({', '.join(key)}), the expression "
                f"{expression!r}: a record has the key by which it is looked up.",
                f"Leave {name!r} out, the key is part of the record by itself; where it belongs to another, compute "
                "that before.",
                argument=what.rpartition(" ")[2].rstrip("="),
                column=name,
            )


def _text(name: str) -> str:
    escaped = name.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
