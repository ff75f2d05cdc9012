"""The document of a namespace: pages of entries in the order of their keys, and how changes rewrite them.

A change rewrites the pages that hold its keys and repeats the references to all others, so it costs what it
touches. Pages are sized in bytes; one that gets small takes in its right neighbour.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.documents import FORMAT, decode_body
from dagster_adjunct.resources.stored_documents import StoredDocument

PAGE_BYTES = 256 * 1024

Entries = Mapping[str, Any]


class DocumentPage(StoredDocument):
    """Where one page is, the SHA-256 of its bytes, and its smallest key."""

    first: str
    key: str
    count: int = Field(ge=1)
    sha256: str


class NamespaceDocument(StoredDocument):
    """The pages of a namespace, in the order of their keys."""

    format: Literal[1] = 1
    pages: tuple[DocumentPage, ...] = ()

    @classmethod
    def parse(cls, body: Mapping[str, Any], where: str) -> NamespaceDocument:
        """Return the document that a commit holds. Raises MalformedDocumentError."""
        next_step = "Restore that object from a backup or an older object version."
        return decode_body(cls, body, where, f"is no namespace of format {FORMAT}", next_step)

    def page_of(self, key: str) -> int:
        """Return which page holds this key, or would."""
        return max(0, bisect_right(self.pages, key, key=lambda page: page.first) - 1)


def changed(
    document: NamespaceDocument,
    changes: Mapping[str, Any],
    read: Callable[[DocumentPage], Entries],
    write: Callable[[Sequence[tuple[str, Any]]], DocumentPage],
) -> NamespaceDocument | None:
    """Return the document with these entries set (None: removed), or None if it is so already."""
    by_page: dict[int, dict[str, Any]] = {}
    for key, value in changes.items():
        by_page.setdefault(document.page_of(key), {})[key] = value
    touched: dict[int, Entries] = {}
    for number, wanted in by_page.items():
        before = read(document.pages[number]) if document.pages else {}
        after = {key: value for key, value in {**before, **wanted}.items() if value is not None}
        if after != before:
            touched[number] = after
    if not touched:
        return None
    pages: list[DocumentPage] = []
    for run in _runs(document, touched, read):
        pages += [run] if isinstance(run, DocumentPage) else [write(part) for part in _parts(run)]
    return NamespaceDocument(pages=tuple(pages))


def _runs(
    document: NamespaceDocument, touched: Mapping[int, Entries], read: Callable[[DocumentPage], Entries]
) -> Iterator[DocumentPage | list[tuple[str, Any]]]:
    """Yield pages that stay, and the entries of neighbours that are written anew together."""
    number, count = 0, max(1, len(document.pages))
    while number < count:
        if number not in touched:
            yield document.pages[number]
            number += 1
            continue
        run: list[tuple[str, Any]] = []
        size = 0
        while number < count and (number in touched or size < PAGE_BYTES // 4):
            added = sorted((touched[number] if number in touched else read(document.pages[number])).items())
            run += added
            size += sum(map(_size, added))
            number += 1
        if run:
            yield run


def _parts(run: Sequence[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    """Yield the entries in as few pages of about one size as they need."""
    sizes = [_size(entry) for entry in run]
    total = sum(sizes)
    target = total / math.ceil(total / PAGE_BYTES)
    part: list[tuple[str, Any]] = []
    passed, pages = 0, 1
    for entry, size in zip(run, sizes, strict=True):
        part.append(entry)
        passed += size
        if passed >= target * pages:
            yield part
            part, pages = [], math.floor(passed / target) + 1
    if part:
        yield part


def _size(entry: tuple[str, Any]) -> int:
    try:
        return len(json.dumps(entry, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()) + 1
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"the entry {entry[0]!r} can't be written as JSON: {error}.",
            "Use strings, numbers, booleans, lists and dictionaries only.",
            key=entry[0],
        ) from error
