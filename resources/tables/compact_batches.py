"""Compact batches: of puts and deletes of one key only the last is sent; updates and conditions, which need every one,
are refused. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.tables.operation import Operation, OperationKind, same_args

_LAST_COUNTS = (OperationKind.PUT, OperationKind.DELETE)


def check_compactable(table: str, operation: Operation[Any]) -> None:
    """Raise ConfigurationError for an operation that needs every entry of a key."""
    if operation.kind is OperationKind.UPDATE or operation.conditions:
        what = "updates" if operation.kind is OperationKind.UPDATE else "conditions"
        raise ConfigurationError(
            f"table {table}: its batches are compact, which keep the last entry of a key only, and {what} "
            "need every one.",
            "Declare the table with BatchProvider(compact=False), the default.",
            argument="batches",
            table=table,
        )


def compacted(operations: Sequence[Operation[Any]], keys: Sequence[Hashable]) -> tuple[list[int], dict[int, list[int]]]:
    """The entries that are sent, of those with these operations and keys, and of these, which others they stand for."""
    last: dict[Hashable, int] = {}
    followers: dict[int, list[int]] = {}
    dropped: set[int] = set()
    for entry, (operation, key) in enumerate(zip(operations, keys, strict=True)):
        if operation.kind not in _LAST_COUNTS:
            last.pop(key, None)
            continue
        before = last.get(key)
        if before is not None and same_args(operations[before].args, operation.args):
            dropped.add(before)
            followers[entry] = [*followers.pop(before, ()), before]
        last[key] = entry
    return [entry for entry in range(len(keys)) if entry not in dropped], followers
