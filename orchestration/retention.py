"""Discards what datasets do not need any more, sparing what open batches of applications will read again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from assets import list_datasets
from assets.discard import DiscardReport, discard
from orchestration.batchlog import BatchLog

if TYPE_CHECKING:
    from assets.dataset import AdjunctDataset
    from resources.objects import Lake


def discard_all(
    lake: Lake,
    specs: Mapping[str, AdjunctDataset] | None = None,
    *,
    by: str,
    datasets: Sequence[str] | None = None,
    dry_run: bool = False,
) -> list[DiscardReport]:
    """Discard in these datasets (None: all of the lake), by the policies of `specs`, else by those declared last.

    An open batch is run again with the versions that it was begun with, so these stay however old they are.
    """
    policies = {name: spec.discard for name, spec in (specs or {}).items()}
    return [
        discard(
            lake,
            name,
            policies.get(name),
            by=by,
            roots=lambda name=name: open_batches(lake).get(name, {}),  # type: ignore[misc]
            dry_run=dry_run,
        )
        for name in (datasets if datasets is not None else list_datasets(lake))
    ]


def open_batches(lake: Lake) -> dict[str, dict[str, str]]:
    """Return, by dataset and version id, which open batch needs the version."""
    needed: dict[str, dict[str, str]] = {}
    for application in list_applications(lake):
        intent = BatchLog(lake, application).read()[1].open
        if intent is not None:
            for dataset, version in intent.versions.items():
                if version is not None:
                    why = f"open batch {intent.batch} of application {application}"
                    needed.setdefault(dataset, {})[version] = why
    return needed


def list_applications(lake: Lake) -> list[str]:
    """Return the applications that have a batch log in the lake, sorted."""
    names = {item.key.split("/")[1] for item in lake.store.list("applications/") if item.key.endswith("/CURRENT")}
    return sorted(names)
