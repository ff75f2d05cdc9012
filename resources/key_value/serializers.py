"""How keys and values become bytes."""

from __future__ import annotations

from typing import Protocol, TypeVar

T = TypeVar("T")


class Serializer(Protocol[T]):
    """Two functions. Keys are equal where their bytes are, and are in the order of these."""

    def to_bytes(self, value: T) -> bytes: ...

    def from_bytes(self, stored: bytes) -> T: ...
