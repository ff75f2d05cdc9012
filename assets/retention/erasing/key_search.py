"""Looks for keys in everything that a dataset stores, whether anything refers to it or not: the proof of an erasure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dagster_adjunct.assets.retention.erasing.redaction import redacted
from dagster_adjunct.assets.versions.dataset_log import SETS
from dagster_adjunct.resources.errors import ObjectNotFoundError
from dagster_adjunct.resources.objects.object_file import open_object

if TYPE_CHECKING:
    from dagster_adjunct.assets.retention.erasing.key_set import KeySet
    from dagster_adjunct.assets.versions.dataset_log import DatasetLog
    from dagster_adjunct.resources.objects.object_store import ObjectInfo, ObjectStore

_WORKERS = 8


@dataclass(frozen=True, slots=True)
class Sighting:
    """An object in which keys were found, or which could not be searched, and what was found there."""

    object: str
    finding: str

    def __str__(self) -> str:
        return f"{self.object}: {self.finding}"


@dataclass(frozen=True, slots=True)
class KeySearch:
    """What a search through a dataset's objects has seen: Parquet files, their rows, and JSON documents.

    `found` are the objects that hold one of the keys, `unsearched` those that could not be read.
    """

    objects: int
    rows: int
    documents: int
    found: tuple[Sighting, ...]
    unsearched: tuple[Sighting, ...]

    @property
    def clean(self) -> bool:
        """Whether everything was searched and none of the keys was found."""
        return not self.found and not self.unsearched

    def to_json(self) -> dict[str, Any]:
        """Return the search as JSON-able values."""
        return {
            **{name: getattr(self, name) for name in ("objects", "rows", "documents")},
            "found": [str(sighting) for sighting in self.found],
            "unsearched": [str(sighting) for sighting in self.unsearched],
        }


def search_keys(log: DatasetLog, keys: KeySet) -> KeySearch:
    """Search every object of a dataset: its files, also those that nothing refers to, and all its documents.

    Reads the key columns of each file and every manifest, so it takes as long as reading these.
    """
    listed = list(log.lake.store.list(f"{log.prefix}/"))
    files = [item for item in listed if item.key.startswith(f"{log.prefix}/data/")]
    documents = [item.key for item in listed if item not in files and item.key.endswith(".json")]
    in_files = search_files(log.lake.store, files, keys)
    with ThreadPoolExecutor(_WORKERS) as pool:
        sightings = [sighting for sighting in pool.map(partial(_search_document, log, keys), documents) if sighting]
        shared = set_manifests(log)
        sightings += [sighting for sighting in pool.map(partial(_search_document, log, keys), shared) if sighting]
    lost = _unlisted_files(log, {item.key for item in files})
    return KeySearch(
        objects=in_files.objects,
        rows=in_files.rows,
        documents=len(documents) + len(shared),
        found=(*in_files.found, *(sighting for sighting in sightings if sighting.finding != _UNREADABLE)),
        unsearched=(
            *in_files.unsearched,
            *(sighting for sighting in sightings if sighting.finding == _UNREADABLE),
            *lost,
        ),
    )


def search_files(store: ObjectStore, files: Iterable[ObjectInfo], keys: KeySet) -> KeySearch:
    """Search Parquet objects for rows with one of these keys."""
    with ThreadPoolExecutor(_WORKERS) as pool:
        seen = list(pool.map(partial(_search_file, store, keys), files))
    return KeySearch(
        objects=len(seen),
        rows=sum(rows for rows, _, _ in seen),
        documents=0,
        found=tuple(sighting for _, sighting, _ in seen if sighting),
        unsearched=tuple(lost for _, _, lost in seen if lost),
    )


def set_manifests(log: DatasetLog) -> list[str]:
    """Return the manifests of the version set that a dataset is a member of."""
    name = log.version_set()
    return [] if name is None else [item.key for item in log.lake.store.list(f"{SETS}/{name}/manifests/")]


def own_part(log: DatasetLog, key: str, document: Any) -> Any:
    """Return the part of a document that is about this dataset: of a version set's manifest, its member."""
    if key.startswith(f"{SETS}/"):
        return document["body"]["members"].get(log.name)
    return document


_UNREADABLE = "it can't be read"


def _search_document(log: DatasetLog, keys: KeySet, key: str) -> Sighting | None:
    try:
        part = own_part(log, key, json.loads(log.lake.store.get(key).data))
    except ObjectNotFoundError:
        return None  # deleted since it was listed
    except (ValueError, KeyError, TypeError, AttributeError):
        return Sighting(key, _UNREADABLE)
    return None if redacted(part, keys) == part else Sighting(key, "it names a key")


def _search_file(store: ObjectStore, keys: KeySet, item: ObjectInfo) -> tuple[int, Sighting | None, Sighting | None]:
    """Return the rows searched, what was found, and why it could not be searched."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [field.name for field in keys.fields]
    hits = 0
    try:
        file = pq.ParquetFile(open_object(store, item.key, item.size), pre_buffer=True)
        missing = [name for name in names if name not in file.schema_arrow.names]
        if missing:
            return 0, None, Sighting(item.key, f"it has no column {missing[0]!r}")
        for group in range(file.num_row_groups):
            hits += len(keys.rows_in(file.read_row_group(group, columns=names)))
    except ObjectNotFoundError:
        return 0, None, None  # deleted since it was listed
    except (pa.ArrowException, OSError) as error:
        return 0, None, Sighting(item.key, f"{_UNREADABLE}: {str(error).partition(chr(10))[0]}")
    rows = f"{hits} row has" if hits == 1 else f"{hits} rows have"
    return file.metadata.num_rows, Sighting(item.key, f"{rows} one of the keys") if hits else None, None


def _unlisted_files(log: DatasetLog, there: set[str]) -> list[Sighting]:
    """Find files of retained versions that are not there: nobody can say what they held."""
    manifest = log.read()[1]
    if manifest is None:
        return []
    listed = [
        (f"version {ref.id}", log.read_version(ref).generations) for ref in manifest.listed if ref.document is not None
    ]
    return [
        Sighting(key, f"{what} lists it, and it is missing")
        for what, generations in [*listed, *manifest.generations_without_document()]
        for generation in generations
        for file in generation.files
        if (key := f"{generation.folder}/{file.name}") not in there
    ]
