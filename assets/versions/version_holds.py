"""Holds: versions kept for something outside that can't renew a lease, such as a table in another catalogue.

    datasets/{name}/leases/hold-{hash of the holder}-{version}.json

A hold is a lease that does not run out, so whoever discards spares it as any other; it is let go by name.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import TYPE_CHECKING

from dagster_adjunct.assets.versions.leases import check_retained, lease_body, lease_folder
from dagster_adjunct.resources.errors import DatasetError
from dagster_adjunct.resources.objects.held_objects import delete_holds, holder_prefix

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake

_FOR_EVER = timedelta(days=36_500)


def hold(lake: Lake, dataset: str, version: str, *, holder: str) -> None:
    """Keep a version from being discarded until `let_go`; to hold it again changes nothing.

    Raises VersionDiscardedError where it is not retained any more.
    """
    lake.store.put(f"{_prefix(lake, dataset, holder)}{version}.json", lease_body([version], holder, _FOR_EVER))
    try:
        check_retained(lake, dataset, [version])
    except DatasetError:
        lake.store.delete(f"{_prefix(lake, dataset, holder)}{version}.json")
        raise


def let_go(lake: Lake, dataset: str, *, holder: str, keep: Collection[str] = ()) -> tuple[str, ...]:
    """End this holder's holds of all versions but `keep`, and return the versions that it held.

    With `keep`, holds of the last hour stay as well (`delete_holds`).
    """
    return delete_holds(lake.store, _prefix(lake, dataset, holder), keep=keep)


def _prefix(lake: Lake, dataset: str, holder: str) -> str:
    return holder_prefix(f"{lease_folder(lake, dataset)}/hold-", holder)
