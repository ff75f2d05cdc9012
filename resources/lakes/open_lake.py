"""Opens a lake: its objects, with its metadata in a key-value table where the lake's document says so."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import LakeNotFoundError
from dagster_adjunct.resources.metadata_tables.open_routed import MetadataInTable
from dagster_adjunct.resources.objects.lake import Lake, LakeSettings, lake_of_objects
from dagster_adjunct.resources.objects.lake_address import store_at
from dagster_adjunct.resources.objects.lake_document import read_lake_document

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.documents import MetadataPlace
    from dagster_adjunct.resources.objects.object_store import ObjectStore


def open_lake(
    url: str | os.PathLike[str] | None = None, *, settings: LakeSettings | None = None, create: bool = True
) -> Lake:
    """Return the lake at `url`: `s3://BUCKET/PREFIX`, a folder, `file:///…` or `memory://NAME`.

    Without a URL: ADJUNCT_LAKE, else `.adjunct/lake`. One GET, which creates nothing. Where there is no lake yet, the
    first write makes one, and logs so: it probes the store's conditional writes (ConditionalWritesUnsupportedError) and
    writes `_adjunct/lake.json`. With `create=False`, a lake that is not there is a LakeNotFoundError.
    """
    settings = settings or LakeSettings()
    lake = lake_in(store_at(url, settings), shared=settings.shared)
    if not create and not lake.exists():
        raise LakeNotFoundError(
            f"there is no lake at {lake.url}.",
            "Check --lake and ADJUNCT_LAKE; the first command or program that writes to a lake makes it.",
            url=lake.url,
        )
    return lake


def lake_in(store: ObjectStore, *, shared: bool = False) -> Lake:
    """Return the lake at a store's root; where there is none yet, the first write makes it, after a probe."""
    document = read_lake_document(store)
    if document is not None and document.metadata is not None:
        store = _routed(store, document.metadata)
    return lake_of_objects(store, document, shared=shared)


def _routed(store: ObjectStore, place: MetadataPlace) -> ObjectStore:
    """Return the store with a part of its objects in a key-value table; one a process, as stores are."""
    routed = MetadataInTable(place.model_dump_json())
    if store is store.descriptor.open():
        return replace(store.descriptor, routed=routed).open()
    return routed.over(store)
