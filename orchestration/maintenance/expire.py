"""Delete old versions of datasets and erase keys from them, except versions that open batches
will read again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import filterfalse

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.declaration.policies import DiscardPolicy
from dagster_adjunct.assets.reading.stored_versions import list_datasets
from dagster_adjunct.assets.retention import erasure
from dagster_adjunct.assets.retention.discard import DiscardReport
from dagster_adjunct.assets.retention.discard import discard as discard_unneeded
from dagster_adjunct.assets.retention.erasure import ErasureReport
from dagster_adjunct.assets.unbounded.transient_table import is_transient
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.orchestration.batch_log.batch_log import (
    ApplicationState,
    list_application_states,
    list_applications,
)
from dagster_adjunct.orchestration.maintenance.followers import (
    find_manifests_for_followers,
    find_versions_for_followers,
)
from dagster_adjunct.orchestration.startpoints.recorded_replay import (
    find_held_versions,
    purge_plans,
)
from dagster_adjunct.resources.errors import AdjunctError, raise_first
from dagster_adjunct.resources.metadata import MetadataStore
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.validation import validated


@validated
def expire_versions(
    lake: Lake, dataset: str, policy: DiscardPolicy | None = None, *, by: str, dry_run: bool = False
) -> DiscardReport:
    """Delete versions of one dataset that the policy does not keep, and what failed builds left;
    safe to repeat.

    The default policy is the one declared at the last advance. Versions that are served, pinned,
    leased, or needed by an open batch or a reader of the dataset's changes are kept. With
    `dry_run` nothing is deleted. Raises DatasetNotFoundError.
    """
    needed = partial(needed_versions, lake, dataset, policy)
    manifests = partial(find_manifests_for_followers, lake, dataset, policy)
    return discard_unneeded(
        lake, dataset, policy, by=by, roots=needed, manifests=manifests, dry_run=dry_run
    )


@validated
def expire_all_versions(
    lake: Lake,
    specs: Mapping[str, AdjunctDataset] | None = None,
    *,
    by: str,
    datasets: Sequence[str] | None = None,
    dry_run: bool = False,
) -> list[DiscardReport]:
    """Delete old versions of these datasets (default: all), by the policies of `specs` or those
    declared last.

    Versions that an open batch or a recorded replay will read are kept, however old they are. If a
    dataset fails, the others are still processed, and the first error is raised at the end with
    notes about the rest. Unreferenced objects of the lake's metadata, such as startpoints, are
    deleted too.
    """
    if specs is None:
        specs = {}
    if datasets is None:
        datasets = list_datasets(lake)
    reports: list[DiscardReport] = []
    errors: list[AdjunctError] = []
    for name in datasets:
        policy = specs[name].discard if name in specs else None
        try:
            reports.append(expire_versions(lake, name, policy, by=by, dry_run=dry_run))
        except AdjunctError as error:
            errors.append(error)
    if not dry_run:
        collect_metadata(lake)
    raise_first(errors)
    return reports


def collect_metadata(lake: Lake) -> None:
    """Delete unreferenced objects of the lake's metadata, and the plans of recorded replays that
    have ended.
    """
    MetadataStore(lake).collect()
    for application in list_applications(lake):
        purge_plans(lake, application)


@validated
def erase_keys(
    lake: Lake, dataset: str, keys: Iterable[object], *, reason: str, by: str
) -> ErasureReport:
    """Erase these keys, given as for `Dataset.get`, from all objects of a dataset, and verify it by
    a search.

    Old versions are kept while a reader has leased them, or an open batch of an application or a
    reader of the dataset's changes needs them: the report names them, and a later erasure or
    discard deletes their files. Of an unbounded dataset, earlier versions that read a generation
    with a key are gone; its stream still holds the keys. Raises DatasetNotFoundError,
    SchemaMismatchError (a key of the wrong type), and ManifestMismatchError where a damaged file
    can't be rewritten; then nothing is erased.
    """

    def needed() -> dict[str, str]:
        """Return, by version id, what needs it."""
        states = list_application_states(lake)
        followed = find_versions_for_followers(lake, dataset, states)
        return followed | versions_in_open_batches(lake, states).get(dataset, {})

    return erasure.erase_keys(lake, dataset, keys, reason=reason, by=by, roots=needed)


def versions_in_open_batches(
    lake: Lake, states: Mapping[str, ApplicationState] | None = None
) -> dict[str, dict[str, str]]:
    """Return, by dataset and version id, which batch needs the version: an open one, or an
    abandoned one that the next run removes from the application's local tables.

    `states` are the states of all applications; they are read if not given.
    """
    needed: dict[str, dict[str, str]] = defaultdict(dict)
    if states is None:
        states = list_application_states(lake)
    for application, state in states.items():
        if state.given_up is not None:
            why = (
                f"batch {state.given_up} of application {application}, which was abandoned; its"
                " next run removes it"
            )
            # State tables keep the name of an application that was renamed.
            owners = {application, state.names.writes_as or application}
            for dataset, version in _versions_before(lake, owners, state.given_up).items():
                needed[dataset][version] = why
        if state.open is None:
            continue
        why = f"open batch {state.open.batch} of application {application}"
        for dataset, versions in state.open.joined.list_all().items():
            for version in filterfalse(is_transient, versions):
                needed[dataset][version] = why
    return needed


def _versions_before(lake: Lake, owners: Collection[str], batch: int) -> dict[str, str]:
    """Return, by local table of these owners, the version before this batch was written to it."""
    before = {}
    for dataset in list_datasets(lake):
        _, manifest = DatasetLog(lake, dataset).read()
        if manifest is None or manifest.written is None:
            continue
        written = manifest.written
        is_by_batch = manifest.declaration.owner in owners and written.batch == batch
        if is_by_batch and written.before:
            before[dataset] = written.before
    return before


def needed_versions(
    lake: Lake, dataset: str, policy: DiscardPolicy | None = None
) -> dict[str, str]:
    """Return, by version id, what needs the versions of this dataset: an open batch, a recorded
    replay, or a reader of its changes.
    """
    # Replays first: if one ends in between, by opening its last batch, that open batch is found.
    replays = [find_held_versions(lake, application) for application in list_applications(lake)]
    states = list_application_states(lake)
    needed = find_versions_for_followers(lake, dataset, states, policy)
    for versions_of in (*replays, versions_in_open_batches(lake, states)):
        needed |= versions_of.get(dataset, {})
    return needed
