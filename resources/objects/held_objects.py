"""Holds: one small object for each thing that a holder keeps from being deleted, below a prefix of the holder's own.

What a hold says, and who looks for it before deleting, is up to what is held: versions of datasets, files of streams.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore

_SETTLING = timedelta(hours=1)


def holder_prefix(prefix: str, holder: str) -> str:
    """Return what the keys of this holder's holds begin with: any text can name a holder."""
    return f"{prefix}{hashlib.sha256(holder.encode()).hexdigest()[:16]}-"


def delete_holds(store: ObjectStore, prefix: str, *, keep: Collection[str]) -> tuple[str, ...]:
    """Delete the holds below a holder's prefix but those named in `keep`, and return the names of the deleted ones.

    With `keep`, those of the last hour (by the store's clock) stay as well: another process may have written one just
    now, for something that only it knows yet.
    """
    held = {item.key.removeprefix(prefix).removesuffix(".json"): item for item in store.list(prefix)}
    newest = max((item.modified for item in held.values()), default=None)
    let_go = [
        name
        for name, item in held.items()
        if name not in keep and (not keep or newest is None or item.modified < newest - _SETTLING)
    ]
    store.delete_many(held[name].key for name in let_go)
    return tuple(let_go)
