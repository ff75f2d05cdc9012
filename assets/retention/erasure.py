"""Erases keys from every retained version of a dataset (data protection requests).

    search    find the retained versions, and unreferenced leftovers, that hold one of the keys
    rewrite   write each such version again in a new folder, with the same number and name and a new id
    switch    one commit replaces the old versions with the new ones, and dooms the old
    delete    delete what is doomed and not held; clear the keys from past commits, verdicts and reasons
    verify    open and search every object of the dataset

Of an unbounded dataset, generations are rewritten, in one new version.

Repeat an erasure until its report is complete: an interrupted run is resumed, and leased versions are deleted later. It
does not reach what is not the dataset's: its input, outputs of applications that joined it, and Dagster's history. A
later delivery with a key brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from dagster_adjunct.assets.retention import key_search
from dagster_adjunct.assets.retention.discard import RetentionDecision, Roots, delete_doomed
from dagster_adjunct.assets.retention.key_search import KeySearch, KeySet
from dagster_adjunct.assets.retention.rewrite import GenerationErasure, RewrittenVersion, VersionErasure
from dagster_adjunct.assets.versions.actions import require_audit_fields
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import read_lake_clock
from dagster_adjunct.assets.versions.manifest import DatasetManifest, UnboundedManifest
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.schemas.schema import Field
from dagster_adjunct.resources.validation import validated


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """What one erasure did. `keys` is the number of requested keys; the report does not contain the keys.

    `redacted` counts documents from which keys were cleared, `deleted` the deleted objects. `pending` are the
    objects with a key that are still in use, and by whom. `not_erased` names the places outside of the dataset. For an
    unbounded dataset, `retained_from` is the number of the first readable version.
    """

    dataset: str
    keys: int
    reason: str
    by: str
    rewritten: tuple[RewrittenVersion, ...]
    redacted: int
    deleted: int
    pending: tuple[RetentionDecision, ...]
    proof: KeySearch
    not_erased: tuple[str, ...]
    retained_from: int | None = None

    @property
    def complete(self) -> bool:
        """Whether the search found none of the keys in any object of the dataset."""
        return self.proof.clean

    def summary(self) -> str:
        """Return the outcome in one line, for logs."""
        rows = sum(version.rows for version in self.rewritten)
        of = "entries of {} versions" if self.retained_from is None else "rows of {} generations"
        parts = [f"dataset {self.dataset}: {self.keys} key(s), {rows} {of.format(len(self.rewritten))} erased"]
        parts += [f"versions from {self.retained_from} on can be read"] if self.retained_from is not None else []
        parts += [f"{self.proof.objects} objects with {self.proof.rows:,} rows searched"]
        if self.complete:
            return "; ".join([*parts, "none of the keys is left"])
        held = [f"{decision.what}: {decision.reason}" for decision in self.pending]
        left = [*held, *map(str, (*self.proof.found, *self.proof.unsearched))]
        return "; ".join([*parts, "NOT complete", *left])

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        pending = [{"what": decision.what, "reason": decision.reason} for decision in self.pending]
        return asdict(self) | {"pending": pending, "proof": self.proof.to_json(), "complete": self.complete}


@validated
def erase_keys(
    lake: Lake, dataset: str, keys: Iterable[object], *, reason: str, by: str, roots: Roots = dict
) -> ErasureReport:
    """Erase these keys, given as for `get`, from all objects of a dataset, and verify it by a search.

    `roots` gives, by version id, why applications still need a version (their open batches), as for `discard`. Readers
    keep old versions until they release them; the report names them, and a later erasure or discard deletes the files.
    Of an unbounded dataset, earlier versions that read a generation with a key are gone; its stream still holds the
    keys. Raises DatasetNotFoundError, SchemaMismatchError (a key of the wrong type), and ManifestMismatchError where a
    damaged file can't be rewritten; then nothing is erased.
    """
    log = DatasetLog(lake, dataset)
    manifest = log.require()[1]
    wanted = _validate_request(manifest, keys, reason, by)
    work = (GenerationErasure if isinstance(manifest, UnboundedManifest) else VersionErasure)(log, wanted, by)
    manifest = work.commit(reason)
    spared, objects = delete_doomed(log, manifest, roots, read_lake_clock(lake, dataset), by=by)
    superseded = key_search.delete_superseded_documents(log)
    past = key_search.redact_past_manifests(log, wanted)
    proof = key_search.search_keys(log, wanted)
    return ErasureReport(
        dataset=dataset,
        keys=len(wanted),
        reason=reason,
        by=by,
        rewritten=work.rewritten(manifest),
        redacted=past + sum(not made.rows for made in work.made.values()),
        deleted=len(objects) + superseded,
        pending=tuple(decision for decision in (*spared, *work.builds) if _has_found_keys(decision, proof)),
        proof=proof,
        not_erased=_list_not_erased(lake, manifest),
        retained_from=manifest.retained_from,
    )


@validated
def find_keys(lake: Lake, dataset: str, keys: Iterable[object]) -> KeySearch:
    """Return where a dataset stores these keys, given as for `get`; changes nothing."""
    log = DatasetLog(lake, dataset)
    return key_search.search_keys(log, KeySet.of(f"dataset {dataset!r}", _key_fields(log.require()[1]), keys))


def _validate_request(manifest: DatasetManifest, keys: Iterable[object], reason: str, by: str) -> KeySet:
    what = f"dataset {manifest.name!r}"
    wanted = KeySet.of(what, _key_fields(manifest), keys)
    if not len(wanted):
        raise ConfigurationError(
            f"{what}: argument 'keys' is empty.", "Give one or more keys.", argument="keys", dataset=manifest.name
        )
    require_audit_fields("erase keys of", manifest.name, reason, by, dataset=manifest.name)
    if wanted.with_text().is_named_in(reason):
        problem = f"{what}: the reason of the erasure contains a key to erase, and would store it."
        step = "Give the number or date of the request instead."
        raise ConfigurationError(problem, step, argument="reason", dataset=manifest.name)
    return wanted


def _key_fields(manifest: DatasetManifest) -> tuple[Field, ...]:
    declared = manifest.declaration
    return tuple(Field(name, kind) for name, kind in zip(declared.key, declared.key_types, strict=True))


def _has_found_keys(held: RetentionDecision, proof: KeySearch) -> bool:
    """Whether the search found keys in a held entry: in its files, or in the record or document of its attempt."""
    attempt = held.what.rsplit("/", 1)[1]
    return any(attempt in sighting.object for sighting in (*proof.found, *proof.unsearched))


def _list_not_erased(lake: Lake, manifest: DatasetManifest) -> tuple[str, ...]:
    left = manifest.kept_elsewhere()
    if lake.url.startswith("s3://"):
        left.append(f"older object versions in {lake.url}, if the bucket keeps them")
    return tuple(left)
