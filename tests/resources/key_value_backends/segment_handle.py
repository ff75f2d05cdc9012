"""A segment as a test uses it: blocking, with changes in few words and what is stored as a
dictionary.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

from dagster_adjunct.resources.errors import TableUnavailableError
from dagster_adjunct.resources.key_value.segment import (
    ABSENT,
    ANYTHING,
    ConditionsFailed,
    KeyRange,
    ReplyLostError,
    SegmentChange,
    StoredEntry,
    TableSegment,
    family_prefix,
    family_range,
    make_version,
    new_token,
    table_key,
)

NOWHERE = b"no key's version"  # 16 bytes, as versions have
Run = Callable[[Coroutine[Any, Any, Any]], Any]
Stored = dict[bytes, tuple[bytes, bytes | None]]
"""Versions and values by key."""


def of(key: bytes, family: str | None = "fruit") -> bytes:
    """Return the table key of a key in a family."""
    return table_key(b"" if family is None else family_prefix(family), key)


def put(key: bytes, value: bytes = b"") -> SegmentChange:
    return SegmentChange(key, value, b"", ANYTHING)


def insert(key: bytes, value: bytes = b"") -> SegmentChange:
    return SegmentChange(key, value, b"", ABSENT)


def replace(key: bytes, version: bytes, value: bytes = b"") -> SegmentChange:
    return SegmentChange(key, value, b"", version)


def remove(key: bytes, version: bytes | None = None) -> SegmentChange:
    return SegmentChange(key, None, b"", ANYTHING if version is None else version)


def guard(key: bytes, version: bytes | None = None) -> SegmentChange:
    """Return what lets a request pass only where the key has the version, or is absent."""
    return SegmentChange(key, None, b"", ABSENT if version is None else version, is_guard=True)


@dataclass(frozen=True)
class Request:
    """Changes with their token and versions, which may be sent again."""

    token: bytes
    changes: tuple[SegmentChange, ...]

    @staticmethod
    def of(changes: Iterable[SegmentChange]) -> Request:
        token = new_token()
        versioned = (
            change._replace(version=make_version(token, place))
            for place, change in enumerate(changes)
        )
        return Request(token, tuple(versioned))

    @property
    def versions(self) -> list[bytes]:
        return [change.version for change in self.changes]


@dataclass(frozen=True)
class Handle:
    """One segment, and what runs its coroutines."""

    segment: TableSegment
    run: Run

    def write(self, *changes: SegmentChange) -> list[bytes]:
        """Apply changes and return the new versions."""
        request = Request.of(changes)
        self.send(request)
        return request.versions

    def send(self, request: Request, *, repeated: bool = False) -> None:
        self.run(self.segment.apply(request.changes, request.token, repeated=repeated))

    def refused(self, *changes: SegmentChange) -> dict[int, bytes | None]:
        """Apply changes whose conditions don't hold; return what was found at which place."""
        try:
            self.write(*changes)
        except ConditionsFailed as error:
            return error.found
        raise AssertionError("it was applied")

    def get(self, *keys: bytes, values: bool = True) -> list[StoredEntry | None]:
        entries: list[StoredEntry | None] = self.run(self.segment.get(keys, values=values))
        return entries

    def value(self, key: bytes) -> bytes | None:
        [entry] = self.get(key)
        return None if entry is None else entry.value

    def pages(
        self, within: KeyRange | None = None, limit: int = 7, *, values: bool = True
    ) -> list[list[StoredEntry]]:
        """Return all pages of a range, each begun behind the one before."""
        left = KeyRange() if within is None else within
        pages: list[list[StoredEntry]] = []
        while page := self.run(self.segment.page(left, limit, values=values)).entries():
            pages.append(page)
            left = left.after(page[-1].key)
        return pages

    def entries(
        self, within: KeyRange | None = None, limit: int = 7, *, values: bool = True
    ) -> list[StoredEntry]:
        return [entry for page in self.pages(within, limit, values=values) for entry in page]

    def stored(self, family: str | None = None) -> Stored:
        """Return what a family holds, or the whole segment."""
        within = None if family is None else family_range(family_prefix(family))
        return {entry.key: (entry.version, entry.value) for entry in self.entries(within, 100)}


def surely(handle: Handle, request: Request) -> None:
    """Send a request until its outcome is known, as tables do."""
    lost = False
    while True:
        try:
            return handle.send(request, repeated=lost)
        except ReplyLostError:
            lost = True
        except TableUnavailableError:
            time.sleep(random.uniform(0.001, 0.01))
