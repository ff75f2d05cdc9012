"""The names of the datasets that a lake has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.dataset_log import NAMES, DatasetLog, members_of, redirect_of, set_log
from dagster_adjunct.resources.errors import DatasetNotFoundError, MalformedDocumentError
from dagster_adjunct.resources.objects.removal import is_deleted

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake


def list_datasets(lake: Lake) -> list[str]:
    """Return the names of all datasets that have a commit, sorted; not members of a set that never advanced.

    Manifests are not looked into: a dataset whose commit can't be read is listed, and says so when it is opened.
    """
    names = [item.key.rsplit("/", 1)[-1] for item in lake.store.list(f"{NAMES}/")]
    return sorted(name for name in names if _has_commit(lake, name))


def dataset_not_found(lake: Lake, name: str) -> DatasetNotFoundError:
    """Return the error that says which datasets there are instead."""
    known = ", ".join(list_datasets(lake)) or "none"
    return DatasetNotFoundError(
        f"there is no dataset {name!r} in {lake.url}; there are: {known}.",
        "Check the name and the lake, or advance the dataset a first time.",
        dataset=name,
    )


def _has_commit(lake: Lake, name: str) -> bool:
    """Whether a dataset has a manifest, of its own or in its version set, whatever is in it."""
    try:
        own = DatasetLog(lake, name).log.current()
        set_name = redirect_of(own) if own is not None else None
        if own is None or set_name is None:
            return own is not None and not is_deleted(own)
        shared = set_log(lake, set_name).current()
        members = members_of(shared) if shared is not None else {}
        return members.get(name, own.body.get("manifest")) is not None
    except MalformedDocumentError:
        return True
