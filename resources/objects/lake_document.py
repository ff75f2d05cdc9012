"""The document of a lake: a new one, and reading it."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ObjectNotFoundError
from dagster_adjunct.resources.objects.documents import LakeDocument, decode
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
    return decode(
        LakeDocument,
        data,
        f"lake document {LAKE_DOCUMENT!r} in {store.url}",
        "Restore this object from a backup or an older object version; nothing else in the lake is affected.",
    )
