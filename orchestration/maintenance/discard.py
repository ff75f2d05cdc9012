"""Discards what datasets do not need any more, sparing what open batches of applications will read again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.stored_versions import list_datasets
from dagster_adjunct.assets.retention.discard import DiscardReport
from dagster_adjunct.assets.retention.discard import discard as discard_sparing
from dagster_adjunct.assets.unbounded.transient import is_transient
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog, list_applications
from dagster_adjunct.orchestration.startpoints.recorded_replay import find_held_versions, purge_plans
from dagster_adjunct.resources.errors import AdjunctError, raise_first
from dagster_adjunct.resources.metadata import MetadataStore

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.declaration.policies import DiscardPolicy
    from dagster_adjunct.resources.objects.lake import Lake


def discard(
    lake: Lake, dataset: str, policy: DiscardPolicy | None = None, *, by: str, dry_run: bool = False
) -> DiscardReport:
    """Discard the versions of one dataset that the policy lets go, and what failed attempts left; safe to repeat.

    Without `policy` it goes by the one that was declared at the last advance. What is served, pinned, leased, or
    needed by an open batch of an application stays. With `dry_run` the report says what would go. Raises
    DatasetNotFoundError.
    """
    return discard_sparing(
        lake, dataset, policy, by=by, roots=partial(_needed_versions_of, lake, dataset), dry_run=dry_run
    )


def discard_all(
    lake: Lake,
    specs: Mapping[str, AdjunctDataset] | None = None,
    *,
    by: str,
    datasets: Sequence[str] | None = None,
    dry_run: bool = False,
) -> list[DiscardReport]:
    """Discard in these datasets (None: all of the lake), by the policies of `specs`, else by those declared last.

    An open batch is run again with the versions that it was begun with, so these stay however old they are, as those
    do that a recorded replay is to meet. A dataset that fails keeps no other from being discarded in: the first error
    is raised in the end, and names the rest. What the lake's metadata (requests for startpoints, for
    one) does not reach any more is deleted, too.
    """
    policies = {name: spec.discard for name, spec in (specs or {}).items()}
    reports: list[DiscardReport] = []
    errors: list[AdjunctError] = []
    for name in datasets if datasets is not None else list_datasets(lake):
        try:
            reports.append(discard(lake, name, policies.get(name), by=by, dry_run=dry_run))
        except AdjunctError as error:
            errors.append(error)
    if not dry_run:
        MetadataStore(lake).collect()
        for application in list_applications(lake):
            purge_plans(lake, application)
    raise_first(errors)
    return reports


def versions_in_open_batches(lake: Lake) -> dict[str, dict[str, str]]:
    """Return, by dataset and version id, which batch needs the version: an open one, or one that was given up and that
    the next run takes out of the application's local tables."""
    needed: dict[str, dict[str, str]] = {}
    for application in list_applications(lake):
        state = BatchLog(lake, application).read()[1]
        intent = state.open
        if state.given_up is not None:
            why = f"batch {state.given_up} of application {application}, which was given up; its next run takes it out"
            for dataset, before in _versions_before_batch(lake, application, state.given_up):
                needed.setdefault(dataset, {})[before] = why
        if intent is not None:
            why = f"open batch {intent.batch} of application {application}"
            for dataset, versions in intent.met.items():
                for version in versions:
                    if not is_transient(version):
                        needed.setdefault(dataset, {})[version] = why
    return needed


def needed_versions(lake: Lake) -> dict[str, dict[str, str]]:
    """Return, by dataset and version id, what needs the version: an open batch, or a recorded replay."""
    needed: dict[str, dict[str, str]] = {}
    # Replays first: one whose last batch is opened meanwhile is then in one of both, or in both.
    replays = [find_held_versions(lake, application) for application in list_applications(lake)]
    for versions_of in (*replays, versions_in_open_batches(lake)):
        for dataset, versions in versions_of.items():
            needed.setdefault(dataset, {}).update(versions)
    return needed


def _versions_before_batch(lake: Lake, application: str, batch: int) -> Iterator[tuple[str, str]]:
    """Yield the local tables that a batch has written, each with the version from before it."""
    for dataset in list_datasets(lake):
        manifest = DatasetLog(lake, dataset).read()[1]
        written = manifest.written if manifest is not None else None
        if written is not None and (written.application, written.batch) == (application, batch) and written.before:
            yield dataset, written.before


def _needed_versions_of(lake: Lake, dataset: str) -> dict[str, str]:
    return needed_versions(lake).get(dataset, {})
