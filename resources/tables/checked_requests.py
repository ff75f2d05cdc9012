"""What callers give a table, looked at before anything is sent. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dagster_adjunct.resources.errors import NullKeyError, TableError
from dagster_adjunct.resources.tables.arrow_entries import is_arrow
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, RowEntries
from dagster_adjunct.resources.tables.partial_update import UpdateMessage

_NEED_VALUES = (OperationKind.UPDATE, OperationKind.PUT_IF_ABSENT)


def check_entries(table: str, operation: Operation[Any]) -> None:
    """Raise for an operation whose entries are none, such as an Arrow batch as it is."""
    entries = operation.entries
    if not (hasattr(entries, "null_key") and hasattr(entries, "take")):
        raise TableError(
            f"table {table} got an Operation with a {type(entries).__name__} as its entries; expected RowEntries or "
            "ArrowEntries.",
            "Make them: ArrowEntries.of(batch, key)." if is_arrow(entries) else "Make them: RowEntries(keys, values).",
            table=table,
        )


def check_request(table: str, key: Sequence[str], operation: Operation[Any]) -> None:
    """Raise for keys that are null or can't be keys, and for updates that are None."""
    entries = operation.entries
    place = entries.null_key()
    if place is not None:
        raise NullKeyError(
            f"table {table} got {entries.keys[place]!r} as a key to {operation.kind.value}; "
            f"{' and '.join(key)} must not be null.",
            "Filter such records out before they reach the table.",
            table=table,
        )
    if type(entries) is RowEntries:
        try:
            deque(map(hash, entries.keys), 0)
        except TypeError as error:
            raise _no_key(table, error) from error
    if operation.kind in _NEED_VALUES:
        place = entries.null_value()
        if place is not None:
            raise TableError(
                f"table {table} got None to {operation.kind.value} for key {entries.keys[place]!r}.",
                "Use delete() to remove a record, or leave the entry out.",
                table=table,
            )


def each_once(table: str, keys: Iterable[Any]) -> list[Any]:
    """The keys in their order, without those that came before; TableError where one can't be a key."""
    wanted = list(keys)
    try:
        return list(dict.fromkeys(wanted))
    except TypeError as error:
        raise _no_key(table, error) from error


def _no_key(table: str, error: TypeError) -> TableError:
    return TableError(
        f"table {table} got a key that can't be one: {error}.",
        "Give a plain value, or a tuple of them where the key has several columns.",
        table=table,
    )


def pairs_of(table: str, entries: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """The keys and the values of the entries."""
    try:
        if not isinstance(entries, (Mapping, set, frozenset)):
            pairs = list(entries)
            return [key for key, _ in pairs], [value for _, value in pairs]
    except (TypeError, ValueError) as error:
        raise TableError(
            f"table {table} got entries that aren't pairs: {error}.",
            "Give a list of (key, value).",
            table=table,
        ) from error
    raise TableError(
        f"table {table} got a {type(entries).__name__} as entries; expected pairs in the order in which they apply.",
        "Give a list of (key, value), or the .items() of a dict.",
        table=table,
    )


def messages_of(table: str, entries: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[UpdateMessage[Any, Any]]]:
    """The keys and the messages of the entries."""
    keys, messages = pairs_of(table, entries)
    for key, message in zip(keys, messages, strict=True):
        if not isinstance(message, UpdateMessage):
            raise TableError(
                f"table {table} got {message!r} as the message for key {key!r}; expected an UpdateMessage.",
                "Wrap the update: UpdateMessage(update, default).",
                table=table,
            )
    return keys, messages
