"""Erase keys from a dataset, except from versions that open batches of applications will read again."""

from __future__ import annotations

from collections.abc import Iterable

from dagster_adjunct.assets.retention import erasure
from dagster_adjunct.assets.retention.erasure import ErasureReport
from dagster_adjunct.orchestration.maintenance.discard import versions_in_open_batches
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.validation import validated


@validated
def erase_keys(lake: Lake, dataset: str, keys: Iterable[object], *, reason: str, by: str) -> ErasureReport:
    """Erase these keys, given as for `get`, from all objects of a dataset, and verify it by a search.

    Old versions are kept while a reader has leased them or an open batch of an application needs them: the report names
    them, and a later erasure or discard deletes their files. Of an unbounded dataset, earlier versions that read a
    generation with a key are gone; its stream still holds the keys. Raises DatasetNotFoundError, SchemaMismatchError (a
    key of the wrong type), and ManifestMismatchError where a damaged file can't be rewritten; then nothing is erased.
    """

    def needed() -> dict[str, str]:
        return versions_in_open_batches(lake).get(dataset, {})

    return erasure.erase_keys(lake, dataset, keys, reason=reason, by=by, roots=needed)
