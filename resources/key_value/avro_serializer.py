"""Keys and values as bare Avro of a declared schema."""

from __future__ import annotations

import io
import json
import math
from array import array
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.serializers import unreadable
from dagster_adjunct.resources.key_value_errors import SerializationError

# What fastavro raises for values and bytes that are not of the schema, whichever part of it stumbles over them.
_UNFIT = (
    ValueError, EOFError, LookupError, TypeError, ArithmeticError, MemoryError, AttributeError, OSError, RecursionError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AvroSerializer:
    """What an Avro schema (JSON text) describes, as bare bytes: they carry no schema, so the table has one for good.

    Records are dictionaries; maps are written by their keys' order, so that equal values have equal bytes. What Avro
    would change on its way (microseconds of milliseconds, a time without a zone, a tuple) is refused: what is read
    equals what was written, but that a `float` has 32 bits. Needs fastavro (`pip install "dagster-adjunct[avro]"`).
    """

    schema: str

    def __post_init__(self) -> None:
        _parsed(self.schema)

    def to_bytes(self, value: Any) -> bytes:
        fastavro, schema, written = _fastavro(), _parsed(self.schema), io.BytesIO()
        try:
            fastavro.validation.validate(value, schema, strict=True)  # numbers of 32 bits, and truths, among others
            fastavro.schemaless_writer(written, schema, _by_keys(value), strict=True)
        except (*_UNFIT, fastavro.validation.ValidationError) as error:
            raise SerializationError(
                f"{value!r:.80} does not fit the Avro schema: {error}.",
                "Give what the schema describes.",
                serializer=type(self).__name__,
            ) from None
        stored = written.getvalue()
        read = self.from_bytes(stored)
        if not _equal(value, read):
            raise SerializationError(
                f"{value!r:.80} would not be read as it was written, but as {read!r:.80}.",
                "Give what the schema's types can hold: times with their zone and no finer than theirs, lists.",
                serializer=type(self).__name__,
            )
        return stored

    def from_bytes(self, stored: bytes) -> Any:
        reading = io.BytesIO(stored)
        try:
            value = _fastavro().schemaless_reader(reading, _parsed(self.schema), None)
        except _UNFIT as error:
            raise unreadable(stored, "Avro of the schema", str(error) or type(error).__name__) from None
        if reading.tell() != len(stored):
            raise unreadable(stored, "Avro of the schema", f"it ends after {reading.tell()} bytes")
        return value

    def to_json(self, value: Any) -> str:
        """Return a value as Avro writes it in JSON: the value of a union is `{"type": value}`, bytes are a text."""
        written = io.StringIO()
        try:
            _fastavro().json_writer(written, _parsed(self.schema), [value])
        except _UNFIT as error:
            raise SerializationError(
                f"{value!r:.80} does not fit the Avro schema: {error}.",
                "Give what the schema describes.",
                serializer=type(self).__name__,
            ) from None
        return written.getvalue()

    def from_json(self, text: str) -> Any:
        """Return the value that `to_json` wrote."""
        try:
            (value,) = _fastavro().json_reader(io.StringIO(text), _parsed(self.schema))
        except _UNFIT as error:
            raise unreadable(
                text.encode(errors="replace"), "one value in Avro's JSON of the schema", str(error)
            ) from None
        return value


def _by_keys(value: Any) -> Any:
    """Return a value whose dictionaries are in the order of their keys, as maps are written as they come."""
    if type(value) is dict and all(type(key) is str for key in value):
        return {name: _by_keys(value[name]) for name in sorted(value)}
    return type(value)(map(_by_keys, value)) if type(value) in (list, tuple) else value


def _equal(value: Any, read: Any) -> bool:
    """Return whether what is read is what was written, where a record's name beside it chose one of a union."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return _equal(value[1], read)
    if isinstance(value, dict) and isinstance(read, dict):
        return value.keys() == read.keys() and all(_equal(item, read[name]) for name, item in value.items())
    if isinstance(value, list) and isinstance(read, list):
        return len(value) == len(read) and all(map(_equal, value, read))
    if isinstance(value, float) and isinstance(read, float) and value != read:
        if math.isinf(read):  # what 32 bits can't hold
            return False
        return (math.isnan(value) and math.isnan(read)) or array("f", [value])[0] == read
    return bool(value == read)


@lru_cache(maxsize=256)
def _parsed(schema: str) -> Any:
    fastavro = _fastavro()
    try:
        return fastavro.parse_schema(json.loads(schema))
    except (*_UNFIT, fastavro.schema.SchemaParseException) as error:
        raise ConfigurationError(
            f"{schema!r:.80} is no Avro schema: {error}.", "Give one as JSON text.", argument="schema"
        ) from None


def _fastavro() -> ModuleType:
    try:
        import fastavro
    except ImportError as error:
        raise ConfigurationError(
            f"Avro needs fastavro, which can't be imported: {error}.",
            'Run pip install "dagster-adjunct[avro]".',
            package="fastavro",
        ) from error
    return fastavro
