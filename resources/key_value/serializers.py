"""How keys and values become bytes: `TextSerializer`, `BytesSerializer`, `IntegerSerializer`, or two functions.

JSON, pydantic models and Avro have files of their own. Nothing is ever pickled: whoever may write to a table would
otherwise run code in whoever reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from dagster_adjunct.resources.key_value_errors import SerializationError

T = TypeVar("T")
_SIGN = 2**63


class Serializer(Protocol[T]):
    """Two functions. Keys are equal where their bytes are, and are in the order of these. Picklable, like the table."""

    def to_bytes(self, value: T) -> bytes: ...

    def from_bytes(self, stored: bytes) -> T: ...


@dataclass(frozen=True, slots=True)
class TextSerializer:
    """Text as UTF-8; in the order of its characters' numbers."""

    def to_bytes(self, value: str) -> bytes:
        try:
            return value.encode()
        except AttributeError:
            raise SerializationError(
                f"{value!r:.80} is no text.", "Give a string.", serializer=type(self).__name__
            ) from None
        except UnicodeEncodeError as error:
            raise SerializationError(
                f"{value!r:.80} is no text: it has half of a surrogate pair at {error.start}.",
                "Give what UTF-8 can hold.",
                serializer=type(self).__name__,
            ) from None

    def from_bytes(self, stored: bytes) -> str:
        try:
            return stored.decode()
        except UnicodeDecodeError as error:
            raise unreadable(stored, "UTF-8", str(error)) from None


@dataclass(frozen=True, slots=True)
class BytesSerializer:
    """Bytes as they are."""

    def to_bytes(self, value: bytes) -> bytes:
        if type(value) is bytes:
            return value
        if not isinstance(value, bytes | bytearray | memoryview):
            raise SerializationError(f"{value!r:.80} is no bytes.", "Give bytes.", serializer=type(self).__name__)
        return bytes(value)

    def from_bytes(self, stored: bytes) -> bytes:
        return stored


@dataclass(frozen=True, slots=True)
class IntegerSerializer:
    """Whole numbers of 64 bits with a sign, in eight bytes that are in the order of the numbers."""

    def to_bytes(self, value: int) -> bytes:
        if isinstance(value, bool) or not isinstance(value, int) or not -_SIGN <= value < _SIGN:
            raise SerializationError(
                f"{value!r:.80} is no whole number of 64 bits.",
                "Give an integer from -2**63 to 2**63 - 1.",
                serializer=type(self).__name__,
            )
        return (value + _SIGN).to_bytes(8, "big")

    def from_bytes(self, stored: bytes) -> int:
        if len(stored) != 8:
            raise unreadable(stored, "a whole number", f"it has {len(stored)} bytes instead of 8")
        return int.from_bytes(stored, "big") - _SIGN


@dataclass(frozen=True, slots=True)
class FunctionSerializer(Generic[T]):
    """What two functions of yours make: one gives bytes, the other one takes them. Both are picklable."""

    write: Callable[[T], bytes]
    read: Callable[[bytes], T]

    def to_bytes(self, value: T) -> bytes:
        return self.write(value)

    def from_bytes(self, stored: bytes) -> T:
        return self.read(stored)


def reader_of_many(serializer: Serializer[T]) -> Callable[[Iterable[bytes]], Iterable[T]]:
    """Return what reads many stored values with a serializer: without a call of Python for each, where there is a way.

    It fails in whatever way; `from_bytes` of what is unreadable then says more.
    """
    return _MANY.get(type(serializer)) or partial(map, serializer.from_bytes)


_MANY: dict[type, Callable[[Iterable[bytes]], Iterable[Any]]] = {
    BytesSerializer: iter,
    TextSerializer: partial(map, bytes.decode),
}


def unreadable(stored: bytes, what: str, why: str) -> SerializationError:
    """Return the error for stored bytes that are not what a serializer writes."""
    return SerializationError(
        f"{len(stored):,} stored bytes ({stored!r:.60}) are not {what}: {why}.",
        "Open the table with the serializer that wrote them.",
        serializer=what,
    )
