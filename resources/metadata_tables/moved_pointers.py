"""Pointers of a lake's metadata in the object store, while these are moved from it, and back.

In the place of each pointer that was moved stands a document that says so. Whoever opened the lake before can neither
commit there any more nor take it for new: the pointer is swapped by compare-and-swap, so that each commit was either
made before, and is moved, or is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ObjectNotFoundError, PreconditionFailedError, TransientError
from dagster_adjunct.resources.objects.documents import MovedDocument

if TYPE_CHECKING:
    from dagster_adjunct.resources.metadata_tables.routed_keys import RoutedKeys
    from dagster_adjunct.resources.objects.object_store import ObjectInfo, ObjectStore, Stored

_POINTER = "/CURRENT"


def is_pointer(key: str) -> bool:
    """Whether a commit log has its pointer there."""
    return key.endswith(_POINTER)


def routed_objects(store: ObjectStore, routed: RoutedKeys) -> Iterator[ObjectInfo]:
    """Yield what is in the object store under keys that belong, or would belong, to the table."""
    for prefix in routed.below:
        yield from (item for item in store.list(prefix) if routed.take(item.key))


def standing(store: ObjectStore, key: str) -> Stored | None:
    """Return what stands there, None where nothing does."""
    try:
        return store.get(key)
    except ObjectNotFoundError:
        return None


def fence(store: ObjectStore, key: str, to: str) -> bytes | None:
    """Put "moved" in the place of a pointer and return what stood there; None where nothing does. Safe to repeat."""
    while (stored := standing(store, key)) is not None:
        moved = MovedDocument.parse(stored.data)
        if moved is not None:
            return moved.was.encode()
        try:
            store.put_if_match(key, MovedDocument(to=to, was=stored.data.decode()).to_bytes(), stored.etag)
        except (PreconditionFailedError, TransientError) as error:
            now = standing(store, key)
            if isinstance(error, TransientError) and now is not None and now.etag == stored.etag:
                raise
            continue
        return stored.data
    return None


def unfence(store: ObjectStore, key: str, pointer: bytes | None) -> bool:
    """Put a pointer, or nothing, back in the place of "moved"; return whether it stands there now. Safe to repeat.

    Where there is neither "moved" nor nothing, somebody has committed, and that stays.
    """
    stored = standing(store, key)
    if stored is None:
        if pointer is not None:
            store.put_if_absent(key, pointer)
        return True
    if MovedDocument.parse(stored.data) is None:
        return stored.data == pointer
    if pointer is None:
        store.delete(key)
    else:
        store.put_if_match(key, pointer, stored.etag)
    return True
