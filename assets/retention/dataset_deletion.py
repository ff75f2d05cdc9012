"""Deletes a dataset for good: its versions, manifests and leases. What is made anew under its name begins with nothing.

    datasets/{name}/deleting-….json     the objects that were there when it was deleted

They are listed before the pointer says that all is deleted: what is written after it may be of a new one already.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.dataset_log import DatasetLog, redirect_of
from dagster_adjunct.assets.versions.leases import live_leases, store_now
from dagster_adjunct.resources.errors import DatasetError, ObjectNotFoundError
from dagster_adjunct.resources.objects.removal import (
    Swept,
    commit_deletion,
    deletion,
    is_deleted,
    objects_of,
    older_than,
)

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake


def check_deletable(dataset: str, seen: Commit) -> None:
    """Refuse a member of a version set."""
    version_set = redirect_of(seen)
    if version_set is not None:
        raise DatasetError(
            f"dataset {dataset!r} is a member of the version set {version_set!r}, whose versions are one commit.",
            "A member can't be deleted alone: withdraw its versions, and discard them.",
            dataset=dataset,
        )


def delete(lake: Lake, dataset: str, seen: Commit, *, reason: str, by: str) -> Swept:
    """Delete the dataset as it was `seen`, or what an interrupted deletion has left; return what went.

    Raises CommitConflictError where it has changed since, and DatasetError while somebody who began to read before
    still holds a version: nobody new can read it then, and the objects go when this is repeated.
    """
    check_deletable(dataset, seen)
    log = DatasetLog(lake, dataset).log
    last = seen
    if not is_deleted(seen):
        key = f"{log.prefix}/deleting-{uuid.uuid4().hex}.json"
        lake.store.put_if_absent(key, json.dumps(objects_of(log, {f"{log.prefix}/clock"})).encode())
        last = commit_deletion(log, seen, reason=reason, by=by, listed=key)
    held = live_leases(lake, dataset, store_now(lake, dataset))
    if held:
        raise DatasetError(
            f"dataset {dataset!r} is deleted, and {held[0].holder} still reads {', '.join(held[0].versions)}.",
            f"Its objects stay until then: repeat adjunct dataset delete {dataset} after {held[0].expires_at}.",
            dataset=dataset,
        )
    listed = str(deletion(last)["listed"])
    try:
        sizes = dict(json.loads(lake.store.get(listed).data))
    except ObjectNotFoundError:
        return Swept(0, 0)
    keys = older_than(log, last, sizes)
    lake.store.delete_many(keys)
    lake.store.delete(listed)  # the last one: without it there is nothing to repeat
    return Swept(len(keys), sum(sizes[key] for key in keys))
