"""Erasure: keys that must not be stored any more are taken out of every retained version (data protection requests).

    search    which retained versions, and which leftovers that nothing refers to, hold one of the keys
    rewrite   each such version, as one of the same number and name with a new id, in a folder of its own
    switch    one commit puts the new ones in the place of the old, wherever these stood, and dooms the old
    delete    what is doomed and nobody holds; keys in past commits, verdicts and reasons are cleared
    prove     every object of the dataset is opened and searched

Of an unbounded dataset it is generations that are rewritten, in one new version (`erased_generations.py`).

Repeat it until its report is complete: a run that died is taken up, and what was leased goes later. It can't reach
what is not the dataset's: its input, outputs of applications that joined it, Dagster's own history. A later
delivery that holds a key brings it back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.retention.discard import RetentionDecision, Roots, delete_doomed
from dagster_adjunct.assets.retention.key_search import (
    KeySearch,
    KeySet,
    delete_superseded_documents,
    redact_past_manifests,
    search_keys,
)
from dagster_adjunct.assets.retention.rewrite import GenerationErasure, RewrittenVersion, VersionErasure
from dagster_adjunct.assets.versions.dataset_log import DatasetLog
from dagster_adjunct.assets.versions.leases import read_lake_clock
from dagster_adjunct.assets.versions.manifest import UnboundedManifest
from dagster_adjunct.resources.errors import ConfigurationError, DatasetNotFoundError
from dagster_adjunct.resources.schemas.schema import Field

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.manifest import DatasetManifest
    from dagster_adjunct.resources.objects.lake import Lake


@dataclass(frozen=True, slots=True)
class ErasureReport:
    """What one erasure did. `keys` is how many were asked for; they themselves stand nowhere in it.

    `redacted` counts documents from which keys were cleared, `deleted` the objects that were deleted. `pending` is
    what still holds a key because somebody uses it, and who. `not_erased` names what is not the dataset's to erase.
    Of an unbounded dataset `retained_from` is the number of the first version that can be read now.
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
        """Whether the search found none of the keys in anything that the dataset stores."""
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
        held = [f"{judged.what}: {judged.reason}" for judged in self.pending]
        left = [*held, *map(str, (*self.proof.found, *self.proof.unsearched))]
        return "; ".join([*parts, "NOT complete", *left])

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-able values."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return values | {
            "rewritten": [{name: getattr(version, name) for name in version.__slots__} for version in self.rewritten],
            "pending": [{"what": judged.what, "reason": judged.reason} for judged in self.pending],
            "proof": self.proof.to_json(),
            "not_erased": list(self.not_erased),
            "complete": self.complete,
        }


def forget(
    lake: Lake, dataset: str, keys: Iterable[object], *, reason: str, by: str, roots: Roots = dict
) -> ErasureReport:
    """Take these keys, given as for `get`, out of everything that a dataset stores, and prove it by a search.

    `roots` gives, by version id, why applications still need a version (their open batches), as for `discard`.
    Readers of the old versions keep them until they let go; the report names them, and a later erasure or discard
    deletes what they held. Of an unbounded dataset, versions before the erasure that read a generation with a key can't
    be read any more; its stream still holds the keys. Raises DatasetNotFoundError, SchemaMismatchError (a key of
    another type), and ManifestMismatchError where a damaged file can't be rewritten: nothing is erased then.
    """
    log = DatasetLog(lake, dataset)
    manifest = _require_manifest(log)
    wanted = _validate_request(manifest, keys, reason, by)
    work = (
        GenerationErasure(log, wanted, by)
        if isinstance(manifest, UnboundedManifest)
        else VersionErasure(log, wanted, by)
    )
    manifest = work.commit(reason)
    spared, objects = delete_doomed(log, manifest, roots, read_lake_clock(lake, dataset), by=by)
    superseded = delete_superseded_documents(log)
    past = redact_past_manifests(log, wanted)
    proof = search_keys(log, wanted)
    return ErasureReport(
        dataset=dataset,
        keys=len(wanted),
        reason=reason,
        by=by,
        rewritten=work.rewritten(manifest),
        redacted=past + work.count_redacted(manifest),
        deleted=len(objects) + superseded,
        pending=tuple(judged for judged in (*spared, *work.leftovers.builds) if _has_found_keys(judged, proof)),
        proof=proof,
        not_erased=_list_not_erased(lake, manifest),
        retained_from=manifest.retained_from,
    )


def find_keys(lake: Lake, dataset: str, keys: Iterable[object]) -> KeySearch:
    """Say where a dataset stores these keys, given as for `get`, without changing anything."""
    log = DatasetLog(lake, dataset)
    return search_keys(log, KeySet.of(f"dataset {dataset!r}", _key_fields(_require_manifest(log)), keys))


def _require_manifest(log: DatasetLog) -> DatasetManifest:
    manifest = log.read()[1]
    if manifest is None:
        raise DatasetNotFoundError(
            f"dataset {log.name!r} has no commit in {log.lake.url}.", "Check the name and the lake.", dataset=log.name
        )
    return manifest


def _validate_request(manifest: DatasetManifest, keys: Iterable[object], reason: str, by: str) -> KeySet:
    what = f"dataset {manifest.name!r}"
    wanted = KeySet.of(what, _key_fields(manifest), keys)
    if not len(wanted):
        raise ConfigurationError(
            f"{what} is to forget no keys.", "Name one or more.", argument="keys", dataset=manifest.name
        )
    for lacking, given in (("a reason", reason), ("who does it", by)):
        if not given.strip():
            raise ConfigurationError(
                f"an erasure in {what} does not say {lacking}.", "Pass reason=… and by=….", dataset=manifest.name
            )
    if wanted.with_text().is_named_in(reason):
        raise ConfigurationError(
            f"{what}: the reason of an erasure names a key that is to be forgotten, and would keep it.",
            "Name the request instead: its number or date.",
            argument="reason",
            dataset=manifest.name,
        )
    return wanted


def _key_fields(manifest: DatasetManifest) -> tuple[Field, ...]:
    declared = manifest.declaration
    return tuple(Field(name, kind) for name, kind in zip(declared.key, declared.key_types, strict=True))


def _has_found_keys(held: RetentionDecision, proof: KeySearch) -> bool:
    """Whether the search met keys in what is held: in a folder's files, or in the record or document of its attempt."""
    attempt = held.what.rsplit("/", 1)[1]
    return any(attempt in sighting.object for sighting in (*proof.found, *proof.unsearched))


def _list_not_erased(lake: Lake, manifest: DatasetManifest) -> tuple[str, ...]:
    left = manifest.kept_elsewhere()
    if lake.url.startswith("s3://"):
        left.append(f"older object versions in {lake.url}, if the bucket keeps them")
    return tuple(left)
