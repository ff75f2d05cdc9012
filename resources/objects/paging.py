"""Pages: parts of long lists, stored once and shared by all manifests that list them.

A manifest that held a whole history would make each commit dearer than the one before. It holds
references to pages instead; the next manifest repeats the references and adds a page.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dagster_adjunct.resources.errors import MalformedDocumentError, ManifestMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dagster_adjunct.resources.objects.object_store import ObjectStore


@dataclass(frozen=True, slots=True)
class PageRef:
    """Where a page is, how many items it has, and the SHA-256 of its bytes."""

    key: str
    count: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> PageRef:
        try:
            return cls(str(value["key"]), int(value["count"]), str(value["sha256"]))
        except (KeyError, TypeError, ValueError) as error:
            raise MalformedDocumentError(
                f"page reference {value!r} is malformed: {error!r}; expected key, count and sha256.",
                "Restore the manifest that holds it from a backup or an older object version.",
                document="a page reference of a manifest",
            ) from None


def write_page(store: ObjectStore, prefix: str, items: Iterable[Any]) -> PageRef:
    """Store JSON-able items as one new page below `{prefix}/pages/` and return its reference."""
    page = list(items)
    data = json.dumps(page, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    # The key is new even for equal contents: an equal page may be about to be collected.
    key = f"{prefix}/pages/{uuid.uuid4().hex}.json"
    store.put_if_absent(key, data)
    return PageRef(key, len(page), hashlib.sha256(data).hexdigest())


def read_page(store: ObjectStore, ref: PageRef) -> list[Any]:
    """Return the page's items. Raises `ObjectNotFoundError`, or `ManifestMismatchError` if it was changed."""
    data = store.get(ref.key).data
    if hashlib.sha256(data).hexdigest() != ref.sha256:
        raise ManifestMismatchError(
            f"page {ref.key!r} in {store.url} is not what its manifest lists: found {len(data)} bytes with SHA-256 "
            f"{hashlib.sha256(data).hexdigest()}, expected {ref.sha256} with {ref.count} items.",
            "Restore the object from a backup or an older object version.",
            key=ref.key,
        )
    items = json.loads(data)
    assert isinstance(items, list)
    return items
