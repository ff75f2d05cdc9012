"""The columns of keys: their names, and keys of several brought into the order that a store has them in. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError, SchemaMismatchError


def key_columns(table: str, key: str | Sequence[str]) -> tuple[str, ...]:
    """The names of a table's key columns, in order."""
    names: tuple[Any, ...] = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, list | tuple) else ()
    if not names or not all(isinstance(name, str) and name for name in names) or len(set(names)) < len(names):
        raise ConfigurationError(
            f"table {table}: key={key!r}; expected at least one key column, by name and in order, each once.",
            "Give a name, or a list of names.",
            argument="key",
            table=table,
        )
    return names


def in_own_order(store: str, own: Sequence[str], given: Sequence[str]) -> Callable[[Any], Any] | None:
    """The function that brings a key whose parts are named `given` into the order `own`; None where it is in that.

    No names are the store's own order. ConfigurationError where they are others, SchemaMismatchError for a key that is
    no tuple of so many parts.
    """
    if not given or list(given) == list(own):
        return None
    if sorted(given) != sorted(own):
        raise ConfigurationError(
            f"{store} has the key {', '.join(own)}, and the request's key is {', '.join(given)}.",
            "Declare the same key columns for the table and for its function.",
            argument="key",
        )
    places = [list(given).index(name) for name in own]

    def ordered(key: Any) -> tuple[Any, ...]:
        if not isinstance(key, tuple) or len(key) != len(places):
            raise no_key(store, key, given)
        return tuple([key[place] for place in places])

    return ordered


def no_key(store: str, key: Any, names: Sequence[str]) -> SchemaMismatchError:
    """The error for a key that is not as long as it has columns."""
    return SchemaMismatchError(
        f"{store} got {key!r} as a key; expected a tuple of {', '.join(names)}.",
        "Give the key's values in that order.",
        table=store,
    )
