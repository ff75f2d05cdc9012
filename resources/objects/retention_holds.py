"""Retention holds: small objects that keep something (a dataset version, files of a stream) from being deleted.

A hold's content, and who checks for it before deleting, is up to what it keeps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from datetime import timedelta

from dagster_adjunct.resources.objects.store import ObjectStore

_RECENT = timedelta(hours=1)


def holder_prefix(prefix: str, holder: str) -> str:
    """Return the beginning of the keys of a holder's holds. The holder's name may be any text."""
    return f"{prefix}{hashlib.sha256(holder.encode()).hexdigest()[:16]}-"


def delete_holds(store: ObjectStore, prefix: str, *, keep: Collection[str]) -> tuple[str, ...]:
    """Delete a holder's holds, except those named in `keep`, and return the names of the deleted ones.

    With a non-empty `keep`, holds of the last hour (by the store's clock) stay too: another process may just have
    written one that the caller does not know yet.
    """
    holds = {item.key.removeprefix(prefix).removesuffix(".json"): item for item in store.list(prefix)}
    newest = max((item.modified for item in holds.values()), default=None)
    released = [
        name
        for name, item in holds.items()
        if name not in keep and (not keep or newest is None or item.modified < newest - _RECENT)
    ]
    store.delete_many(holds[name].key for name in released)
    return tuple(released)
