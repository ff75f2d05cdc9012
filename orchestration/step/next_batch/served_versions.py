"""The dataset versions that are served at one look, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.assets.reading.served_together import current_readers
from dagster_adjunct.assets.unbounded.local_manifest import as_local
from dagster_adjunct.orchestration.step.next_batch.versions_to_wait_for import check_bootstrapped

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep


@dataclass(frozen=True, slots=True)
class ServedVersions:
    """What each stored dataset and each table of state serves, by its id; None: nothing yet.

    `limited` are the manifests of those that may not be stale: version and offsets of one commit, so that what is found
    fresh is what the batch meets.
    """

    ids: Mapping[str, str | None]
    limited: Mapping[str, DatasetManifest | None]


def served_now(step: OpenedStep) -> ServedVersions:
    """Return the versions served now, those of a version set from one snapshot of it.

    Raises NoSealedVersionError for a dataset that holds its application back and has no version, saying what it waits
    for; and what a declaration of the application's own table raises that does not fit what is stored.
    """
    app, stored = step.context.app, step.versions.stored
    own = [dataset for dataset in app.datasets if dataset.is_owned_by(app.name)]
    others = [dataset.name for dataset in app.datasets if dataset.following.persistent and dataset not in own]
    readers = current_readers({name: stored(name) for name in others if name not in app.max_staleness})
    limited = {name: stored(name).manifest() for name in others if name in app.max_staleness}
    readers |= {name: stored(name).reader_of(manifest) for name, manifest in limited.items()}
    for dataset in own:
        manifest = stored(dataset.name).manifest()
        local = None if manifest is None else as_local(manifest, dataset)
        readers[dataset.name] = stored(dataset.name).reader_of(local)
    check_bootstrapped(step, [name for name, reader in readers.items() if reader is None])
    readers |= {name: stored(name).current() for name in step.states}
    step.versions.keep(readers)
    ids = {name: None if reader is None else reader.version for name, reader in readers.items()}
    return ServedVersions(ids, limited)
