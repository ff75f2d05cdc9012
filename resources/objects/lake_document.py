"""The document of a lake: reading it, and saying where the lake's metadata are."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import (
    CommitConflictError,
    ObjectNotFoundError,
    PreconditionFailedError,
    TransientError,
)
from dagster_adjunct.resources.objects.documents import FORMAT, ROUTED_FORMAT, LakeDocument, MetadataPlace, decode
from dagster_adjunct.resources.objects.object_store import LAKE_DOCUMENT
from dagster_adjunct.resources.times import utc_now

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.object_store import ObjectStore


def new_lake_document() -> LakeDocument:
    """Return the document of a new lake."""
    return LakeDocument(id=uuid.uuid4().hex, probed_at=utc_now())


def read_lake_document(store: ObjectStore) -> LakeDocument | None:
    """Return the document of the lake at a store's root; None where no lake is. Raises MalformedDocumentError."""
    try:
        data = store.get(LAKE_DOCUMENT).data
    except ObjectNotFoundError:
        return None
    return _parsed(store, data)


def store_metadata_place(store: ObjectStore, before: MetadataPlace | None, after: MetadataPlace | None) -> None:
    """Say from now on that the lake's metadata are at `after`, a table, or None: among its objects. One swap.

    Safe to repeat. Raises CommitConflictError where they are neither there nor at `before`, and StoreUnavailableError,
    after which it may have happened.
    """
    stored = store.get(LAKE_DOCUMENT)
    document = _parsed(store, stored.data)
    if document.metadata == after:
        return
    format_ = FORMAT if after is None else ROUTED_FORMAT
    wanted = document.model_copy(update={"metadata": after, "format": format_})
    try:
        if document.metadata == before:
            store.put_if_match(LAKE_DOCUMENT, wanted.to_bytes(), stored.etag)
            return
    except (PreconditionFailedError, TransientError) as error:
        # Also our own success, of which the reply was lost.
        document = _parsed(store, store.get(LAKE_DOCUMENT).data)
        if document.metadata == after:
            return
        if isinstance(error, TransientError):
            raise
    raise CommitConflictError(
        f"where the metadata of {store.url} are was changed by somebody else meanwhile: {_words(document.metadata)}.",
        "Look again: adjunct metadata show.",
        prefix=LAKE_DOCUMENT,
    )


def _words(place: MetadataPlace | None) -> str:
    return "they are among the lake's objects" if place is None else f"they are in {place.words()}"


def _parsed(store: ObjectStore, data: bytes) -> LakeDocument:
    return decode(
        LakeDocument,
        data,
        f"lake document {LAKE_DOCUMENT!r} in {store.url}",
        "Restore this object from a backup or an older object version; nothing else in the lake is affected.",
    )
