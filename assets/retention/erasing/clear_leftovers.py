"""What an erasure clears besides versions: files and documents that nothing refers to, and manifests of the past."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dagster_adjunct.assets.retention.discard_plan import Judged
from dagster_adjunct.assets.retention.erasing.key_search import own_part, search_files, set_manifests
from dagster_adjunct.assets.retention.erasing.redaction import redacted
from dagster_adjunct.assets.versions.build_attempts import attempts
from dagster_adjunct.assets.versions.dataset_log import SETS
from dagster_adjunct.resources.errors import ObjectNotFoundError

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.erasing.key_set import KeySet
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.assets.versions.manifest import DatasetManifest

_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Folders and documents that no version reaches and that hold a key.

    `garbage` is nobody's. `builds` are on record: they may be about to be published, or be taken up by an advance.
    """

    garbage: tuple[str, ...] = ()
    builds: tuple[Judged, ...] = ()


def find_leftovers(log: DatasetLog, manifest: DatasetManifest, keys: KeySet) -> Leftovers:
    """Search what no retained version reaches and what is not doomed already."""
    store = log.lake.store
    known = manifest.reachable() | set(manifest.doomed)
    files = [item for item in store.list(f"{log.prefix}/data/") if _folder(item.key) not in known]
    seen = search_files(store, files, keys)
    # What can't be read can't be proved to be without the keys, so it goes with what holds them.
    holding = {_folder(sighting.object) for sighting in (*seen.found, *seen.unsearched)}
    documents = [item.key for item in store.list(f"{log.prefix}/versions/") if item.key not in known]
    holding |= {key for key in documents if _names_a_key(log, key, keys)}
    on_record = list(attempts(log.lake, log.name))
    garbage, builds = [], []
    for entry in sorted(holding):
        record = next((attempt for attempt in on_record if attempt.id in entry), None)
        if record is None:
            garbage.append(entry)
        else:
            build = f"a build on record, renewed at {record.renewed:%Y-%m-%d %H:%M} UTC"
            builds.append(Judged(entry, None, f"{build}: it is published by an advance, or discarded past its grace"))
    return Leftovers(tuple(garbage), tuple(builds))


def delete_superseded(log: DatasetLog) -> int:
    """Delete documents of retained versions that have another document by now; return how many.

    Readers need a document only while they open its version: one that meets the deletion opens it again.
    """
    manifest = log.read()[1]
    assert manifest is not None
    documents = {ref.document for ref in manifest.listed}
    ids = {ref.id for ref in manifest.listed}
    gone = [
        item.key
        for item in log.lake.store.list(f"{log.prefix}/versions/")
        if item.key not in documents and item.key.rsplit("/", 1)[1].rpartition("-")[0] in ids
    ]
    log.lake.store.delete_many(gone)
    return len(gone)


def clear_past(log: DatasetLog, keys: KeySet) -> int:
    """Clear the keys, and all key ranges, from manifests of the past; return how many were written anew.

    They go on saying who did what, when and why. The current one was made without the keys, and what is committed
    after it is made from it.
    """
    commit, _ = log.read()
    assert commit is not None
    own = [item.key for item in log.lake.store.list(f"{log.prefix}/manifests/")]
    # A member's own log ended when it joined its version set.
    past = own if commit.manifest_key.startswith(f"{SETS}/") else _until(own, commit.manifest_key)
    past += _until(set_manifests(log), commit.manifest_key)
    with ThreadPoolExecutor(_WORKERS) as pool:
        return sum(pool.map(partial(_clear, log, keys), past))


def _until(manifests: Iterable[str], current: str) -> list[str]:
    """Return the manifests up to the current one's number, without it: also those of commits that lost a race."""
    return [key for key in manifests if key != current and _number(key) <= _number(current)]


def _number(manifest_key: str) -> str:
    return manifest_key.rsplit("/", 1)[1].partition("-")[0]


def _clear(log: DatasetLog, keys: KeySet, key: str) -> bool:
    store = log.lake.store
    try:
        document = json.loads(store.get(key).data)
    except ObjectNotFoundError:
        return False  # discarded since it was listed
    part = own_part(log, key, document)
    cleared = redacted(part, keys, all_ranges=True)
    if cleared == part:
        return False
    if key.startswith(f"{SETS}/"):
        document["body"]["members"][log.name] = cleared
    else:
        document = cleared
    store.put(key, json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())
    return True


def _names_a_key(log: DatasetLog, key: str, keys: KeySet) -> bool:
    try:
        document = json.loads(log.lake.store.get(key).data)
    except (ObjectNotFoundError, ValueError):
        return False
    return bool(redacted(document, keys) != document)


def _folder(key: str) -> str:
    return key.rsplit("/", 1)[0]
