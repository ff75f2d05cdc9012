"""Version sets: datasets whose versions are published, pinned and rolled back in one commit.

    version-sets/{set}/CURRENT      the one pointer: the manifests of all members
    datasets/{member}/CURRENT       a redirect to it, and the manifest that the member joined with

Joining fences a member's own pointer first, so that whoever read it before can't commit there any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.dataset_log import DatasetLog, members_of, redirect_of, set_log
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.commit_log import retry_conflicts
from dagster_adjunct.resources.objects.removal import is_deleted

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.commit_log import Commit
    from dagster_adjunct.resources.objects.lake import Lake

_FORMAT = 1
_TRIES = 20


def join_version_set(lake: Lake, name: str, datasets: Sequence[str], *, by: str) -> None:
    """Make these datasets the members of the set; those that are need no request to be written. Safe to repeat.

    Raises DatasetError when a dataset is in another set, or the set has members that are not named.
    """
    current = set_log(lake, name).current()
    known = set(members_of(current)) if current else set()
    missing = sorted(known - set(datasets))
    if missing:
        raise DatasetError(
            f"version set {name!r} has the members {', '.join(sorted(known))}, and {', '.join(missing)} is not "
            "declared in it any more.",
            "Declare it in the set again; to take a dataset out, declare it under a new name.",
            dataset=missing[0],
        )
    joined = {dataset: _fence(lake, name, dataset, by) for dataset in datasets if dataset not in known}
    if not joined:
        return

    def add(commit: Commit | None) -> dict[str, object] | None:
        members = members_of(commit) if commit else {}
        new = {dataset: body for dataset, body in joined.items() if dataset not in members}
        return {"format": _FORMAT, "members": members | new} if new else None

    set_log(lake, name).transact(add, by=by)


def _fence(lake: Lake, name: str, dataset: str, by: str) -> dict[str, object] | None:
    """Turn a dataset's own pointer into a redirect; return the manifest that it had, None if none."""
    log = DatasetLog(lake, dataset)

    def decide() -> Callable[[], dict[str, object] | None]:
        own = log.log.current()
        there = redirect_of(own) if own else None
        if there not in (None, name):
            raise DatasetError(
                f"dataset {dataset!r} is a member of the version set {there!r} and can't join {name!r} as well.",
                "A dataset is in one version set; declare it under a new name for the other.",
                dataset=dataset,
            )
        if own is not None and there == name:
            kept: dict[str, object] | None = own.body["manifest"]
            return lambda: kept
        manifest = own.body if own and not is_deleted(own) else None

        def fence() -> dict[str, object] | None:
            log.redirect(own, name, manifest, by=by)
            return manifest

        return fence

    return retry_conflicts(decide, attempts=_TRIES)
