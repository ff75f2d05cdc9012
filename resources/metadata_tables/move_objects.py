"""Copies a lake's metadata into a key-value table, and back into the object store.

Both ways: first nobody can commit any more where they are, then all is copied, then the lake's document is swapped.
Nothing is written over once the metadata are where they are moved to, so that whoever repeats a move, or makes it a
second time while the first one is still running, undoes nothing of what was done since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import (
    ConfigurationError,
    ObjectExistsError,
    ObjectNotFoundError,
    PreconditionFailedError,
)
from dagster_adjunct.resources.metadata_tables.moved_pointers import (
    fence,
    is_pointer,
    routed_objects,
    standing,
    unfence,
)
from dagster_adjunct.resources.objects.documents import MovedDocument

if TYPE_CHECKING:
    from dagster_adjunct.resources.metadata_tables.key_value_objects import KeyValueObjects
    from dagster_adjunct.resources.metadata_tables.routed_keys import RoutedKeys
    from dagster_adjunct.resources.objects.object_store import ObjectStore

OWNER = "_adjunct/lake"
_THREADS = 8


def claim_table(table: KeyValueObjects, lake_id: str, named: str) -> None:
    """Have the table belong to this lake. Raises ConfigurationError where it holds anything else."""
    with suppress(ObjectExistsError):
        if next(iter(table.list("")), None) is None:
            table.put_if_absent(OWNER, lake_id.encode())
    try:
        owner = table.get(OWNER).data.decode()
    except ObjectNotFoundError:
        owner = ""
    if owner != lake_id:
        raise ConfigurationError(
            f"{named} holds {'the metadata of another lake' if owner else 'something else'}: expected an empty one.",
            "Name a table that does not exist yet.",
            table=named,
        )


def fence_all(store: ObjectStore, routed: RoutedKeys, to: str) -> None:
    """Have no commit be made in the object store any more: after this, all pointers stand still."""
    _in_threads(partial(fence, store, to=to), _pointers(store, routed))


def release_all(store: ObjectStore, routed: RoutedKeys) -> int:
    """Take back what `fence_all` did, where the move was given up; return how many pointers that were."""
    released = 0
    for key in _pointers(store, routed):
        stored = standing(store, key)
        moved = None if stored is None else MovedDocument.parse(stored.data)
        if moved is not None:
            unfence(store, key, moved.was.encode())
            released += 1
    return released


def copy_into(
    table: KeyValueObjects, store: ObjectStore, routed: RoutedKeys, named: str, are_in_table: Callable[[], bool]
) -> int:
    """Copy what the object store has into the table; return how many objects there were.

    What an earlier move left there, which was taken back, is replaced. `are_in_table` looks whether another one has
    moved the metadata meanwhile: then what is there stays. Raises ConfigurationError where the table has more than
    the object store: an earlier move's objects that are deleted by now.
    """

    def copy(key: str) -> None:
        stored = standing(store, key)
        if stored is None:  # deleted meanwhile
            return
        moved = MovedDocument.parse(stored.data) if is_pointer(key) else None
        data = stored.data if moved is None else moved.was.encode()
        try:
            table.put_if_absent(key, data)
        except ObjectExistsError:
            # What has moved since this look has another ETag.
            with suppress(ObjectNotFoundError, PreconditionFailedError):
                there = table.get(key)
                if there.data != data and not are_in_table():
                    table.put_if_match(key, data, there.etag)

    keys = {item.key for item in routed_objects(store, routed)}
    copied = _in_threads(copy, sorted(keys))
    over = [item.key for item in table.list("") if routed.take(item.key) and item.key not in keys]
    if over and not are_in_table():
        raise ConfigurationError(
            f"{named} holds {len(over):,} objects that an earlier move left there and that are deleted by now, such as "
            f"{over[0]!r}.",
            "Name a table that does not exist yet, or go on without: adjunct metadata move --back.",
            table=named,
            key=over[0],
        )
    return copied


def copy_back(store: ObjectStore, table: KeyValueObjects, routed: RoutedKeys, are_in_table: Callable[[], bool]) -> int:
    """Copy what the table has into the object store; return how many objects there were.

    What was deleted in the table since it was moved there is deleted. `are_in_table` looks whether the metadata still
    are in the table: another one may have moved them back meanwhile, and others may have gone on from there, which
    stays.
    Raises ConfigurationError for pointers at which somebody has committed there meanwhile: they are left as they are.
    """
    keys = [item.key for item in table.list("") if routed.take(item.key)]
    known = {*keys}
    deleted = [one.key for one in routed_objects(store, routed) if one.key not in known and not is_pointer(one.key)]
    if are_in_table():
        store.delete_many(deleted)

    def copy(key: str) -> None:
        data = table.get(key).data
        if is_pointer(key):
            return
        stored = standing(store, key)
        with suppress(ObjectExistsError):
            if stored is None:
                store.put_if_absent(key, data)
            elif stored.data != data and are_in_table():  # what has no history: who runs, what is left of a budget
                store.put_if_match(key, data, stored.etag)

    _in_threads(copy, keys)
    pointers = {key for key in known if is_pointer(key)}
    there = {key for key in _pointers(store, routed) if _is_fenced(store, key)}
    refused = [
        key
        for key in sorted(pointers | there)
        if not unfence(store, key, table.get(key).data if key in pointers else None)
    ]
    if refused and are_in_table():
        raise ConfigurationError(
            f"{', '.join(refused)} in {store.url}: somebody who had opened the lake before its metadata were moved has "
            "committed there, and not to the table, which stays where the metadata are.",
            "Move these objects elsewhere by hand, and repeat this.",
            url=store.url,
            key=refused[0],
        )
    return len(keys)


def strays(store: ObjectStore, routed: RoutedKeys) -> list[str]:
    """Return the pointers in the object store at which somebody has committed who takes the metadata to be there."""
    return [key for key in _pointers(store, routed) if not _is_fenced(store, key)]


def left_behind(store: ObjectStore, routed: RoutedKeys) -> list[str]:
    """Return what is of no use any more in the object store: what was moved, but the documents that say so."""
    return [
        item.key for item in routed_objects(store, routed) if not (is_pointer(item.key) and _is_fenced(store, item.key))
    ]


def _pointers(store: ObjectStore, routed: RoutedKeys) -> list[str]:
    return [item.key for item in routed_objects(store, routed) if is_pointer(item.key)]


def _is_fenced(store: ObjectStore, key: str) -> bool:
    stored = standing(store, key)
    return stored is not None and MovedDocument.parse(stored.data) is not None


def _in_threads(act: Callable[[str], object], keys: Iterable[str]) -> int:
    with ThreadPoolExecutor(_THREADS) as pool:
        return sum(1 for _ in pool.map(act, keys))
