"""How keys and values become bytes: text, bytes, integers, JSON, pydantic models, Avro, or two
functions.

Nothing is ever pickled, because whoever may write to a table could then run code in its readers.
"""

from __future__ import annotations

import io
import json
import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType
from typing import Any, Final, Generic, NoReturn, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from dagster_adjunct.resources.documents import validation_problems
from dagster_adjunct.resources.errors import ConfigurationError, SerializationError
from dagster_adjunct.resources.optional_packages import import_package
from dagster_adjunct.resources.validation import validated

T = TypeVar("T")
_SIGN = 2**63


@validated
@runtime_checkable
class Serializer(Protocol[T]):
    """Converts values to bytes and back. Keys are equal and ordered as their bytes are.
    Picklable, like the table.
    """

    def to_bytes(self, value: T) -> bytes: ...

    def from_bytes(self, stored: bytes) -> T: ...


def _rejected_error(serializer: object, problem: str, next_step: str) -> SerializationError:
    """Return the error for a value that the serializer rejects."""
    return SerializationError(problem, next_step, serializer=type(serializer).__name__)


def unreadable_error(stored: bytes, what: str, why: str) -> SerializationError:
    """Return the error for stored bytes that a serializer has not written."""
    problem = f"{len(stored):,} stored bytes ({stored!r:.60}) are not {what}: {why}."
    return SerializationError(
        problem, "Open the table with the serializer that wrote them.", serializer=what
    )


@validated
@dataclass(frozen=True, slots=True)
class TextSerializer:
    """Text as UTF-8, ordered by code points."""

    def to_bytes(self, value: str) -> bytes:
        """Return the text in UTF-8. Raises SerializationError for other values."""
        try:
            return value.encode()
        except AttributeError:
            raise _rejected_error(
                self, f"{value!r:.80} is not a string.", "Pass a string."
            ) from None
        except UnicodeEncodeError as error:
            problem = f"{value!r:.80} is not valid text: lone surrogate at {error.start}."
            raise _rejected_error(self, problem, "Pass text that UTF-8 can encode.") from None

    def from_bytes(self, stored: bytes) -> str:
        try:
            return stored.decode()
        except UnicodeDecodeError as error:
            raise unreadable_error(stored, "UTF-8", str(error)) from None


@validated
@dataclass(frozen=True, slots=True)
class BytesSerializer:
    """Bytes as they are."""

    def to_bytes(self, value: bytes) -> bytes:
        if type(value) is bytes:
            return value
        if not isinstance(value, bytes | bytearray | memoryview):
            raise _rejected_error(self, f"{value!r:.80} is not bytes.", "Pass bytes.")
        return bytes(value)

    def from_bytes(self, stored: bytes) -> bytes:
        return stored


@validated
@dataclass(frozen=True, slots=True)
class IntegerSerializer:
    """Signed 64-bit integers as eight bytes, ordered as the numbers are."""

    def to_bytes(self, value: int) -> bytes:
        """Return the integer in 8 bytes that sort as integers do. Raises SerializationError for
        other values.
        """
        if isinstance(value, bool) or not isinstance(value, int) or not -_SIGN <= value < _SIGN:
            problem = f"{value!r:.80} is not a signed 64-bit integer."
            raise _rejected_error(self, problem, "Pass an integer from -2**63 to 2**63 - 1.")
        return (value + _SIGN).to_bytes(8, "big")

    def from_bytes(self, stored: bytes) -> int:
        if len(stored) != 8:
            raise unreadable_error(
                stored, "a 64-bit integer", f"it has {len(stored)} bytes instead of 8"
            )
        return int.from_bytes(stored, "big") - _SIGN


@validated
@dataclass(frozen=True, slots=True)
class FunctionSerializer(Generic[T]):
    """Two functions of yours: `write` returns bytes, `read` accepts them. Both are picklable."""

    write: Callable[[T], bytes]
    read: Callable[[bytes], T]

    def to_bytes(self, value: T) -> bytes:
        return self.write(value)

    def from_bytes(self, stored: bytes) -> T:
        return self.read(stored)


def reader_of_many(serializer: Serializer[T]) -> Callable[[Iterable[bytes]], Iterable[T]]:
    """Return a function that reads many stored values, without a Python call for each if possible.

    It may fail with any error; `from_bytes` of the unreadable value then describes the problem.
    """
    return _MANY.get(type(serializer)) or partial(map, serializer.from_bytes)


_MANY: dict[type, Callable[[Iterable[bytes]], Iterable[Any]]] = {
    BytesSerializer: iter,
    TextSerializer: partial(map, bytes.decode),
}


# What fastavro raises for values and bytes that do not fit the schema.
_UNFIT = (
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    MemoryError,
    AttributeError,
    OSError,
    RecursionError,
)


@validated
@dataclass(frozen=True, slots=True)
class AvroSerializer:
    """Values of an Avro schema (JSON text), as bytes without the schema, so a table has one for
    good.

    Records are dictionaries. Maps are written in key order, so that equal values have equal bytes.
    Values that Avro would change (microseconds of milliseconds, a time without a zone, a tuple) are
    rejected: what is read equals what was written, except that a `float` has 32 bits. Needs
    fastavro (`pip install "dagster-adjunct[avro]"`).
    """

    schema: str

    def __post_init__(self) -> None:
        _parsed(self.schema)

    def to_bytes(self, value: Any) -> bytes:
        """Return the value in Avro, without a schema. Raises an error if it would not be read as it
        was written.
        """
        fastavro = _fastavro()
        schema = _parsed(self.schema)
        written = io.BytesIO()
        try:
            # It rejects, for example, an int beyond 32 bits, and a boolean given for a number.
            fastavro.validation.validate(value, schema, strict=True)
            fastavro.schemaless_writer(written, schema, _in_key_order(value), strict=True)
        except (*_UNFIT, fastavro.validation.ValidationError) as error:
            raise self._unfit_error(value, error) from None
        stored = written.getvalue()
        read = self.from_bytes(stored)
        if not _is_same_avro(value, read):
            problem = f"{value!r:.80} would not be read as it was written, but as {read!r:.80}."
            next_step = (
                "Pass what the schema's types can hold: lists, and times with a zone and their"
                " precision."
            )
            raise _rejected_error(self, problem, next_step)
        return stored

    def from_bytes(self, stored: bytes) -> Any:
        """Return the value of Avro of the schema; all bytes must belong to it."""
        reading = io.BytesIO(stored)
        try:
            value = _fastavro().schemaless_reader(reading, _parsed(self.schema), None)
        except _UNFIT as error:
            raise unreadable_error(
                stored, "Avro of the schema", str(error) or type(error).__name__
            ) from None
        if reading.tell() != len(stored):
            raise unreadable_error(
                stored, "Avro of the schema", f"it ends after {reading.tell()} bytes"
            )
        return value

    def to_json(self, value: Any) -> str:
        """Return a value in Avro's JSON encoding: a value of a union is `{"type": value}`, bytes
        are text.
        """
        written = io.StringIO()
        try:
            _fastavro().json_writer(written, _parsed(self.schema), [value])
        except _UNFIT as error:
            raise self._unfit_error(value, error) from None
        return written.getvalue()

    def _unfit_error(self, value: Any, error: Exception) -> SerializationError:
        """Return the error for a value that does not fit the schema."""
        problem = f"{value!r:.80} does not fit the Avro schema: {error}."
        return _rejected_error(self, problem, "Pass what the schema describes.")

    def from_json(self, text: str) -> Any:
        """Return the value that `to_json` wrote."""
        try:
            (value,) = _fastavro().json_reader(io.StringIO(text), _parsed(self.schema))
        except _UNFIT as error:
            stored = text.encode(errors="replace")
            raise unreadable_error(
                stored, "one value in Avro's JSON of the schema", str(error)
            ) from None
        return value


def _in_key_order(value: Any) -> Any:
    """Return a value with dictionaries in key order, because fastavro writes maps in the order
    of the dictionary.
    """
    if type(value) is dict and all(type(key) is str for key in value):
        return {name: _in_key_order(value[name]) for name in sorted(value)}
    if type(value) in (list, tuple):
        return type(value)(map(_in_key_order, value))
    return value


def _is_same_avro(value: Any, read: Any) -> bool:
    """Whether `read`, read back from the written `value`, equals it.

    A tuple of a record's name and a value selects a branch of a union, and is read as the value. A
    float may have been rounded to 32 bits.
    """
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return _is_same_avro(value[1], read)
    for kind in (dict, list):
        if isinstance(value, kind) and isinstance(read, kind):
            return _has_same_items(value, read, _is_same_avro)
    if isinstance(value, float) and isinstance(read, float):
        return _is_same_float(value, read)
    return bool(value == read)


def _has_same_items(value: Any, read: Any, is_same: Callable[[Any, Any], bool]) -> bool:
    """Whether two dictionaries, or two lists, have the same items."""
    if not isinstance(value, dict):
        return len(value) == len(read) and all(map(is_same, value, read))
    if value.keys() != read.keys():
        return False
    return all(is_same(item, read[name]) for name, item in value.items())


def _is_same_float(value: float, read: float) -> bool:
    """Whether a float was read as it was written, or rounded to 32 bits."""
    if value == read:
        return True
    if math.isnan(value):
        return math.isnan(read)
    if math.isinf(read):  # overflow of 32 bits
        return False
    return array("f", [value])[0] == read


@lru_cache(maxsize=256)
def _parsed(schema: str) -> Any:
    """Return a schema as fastavro uses it; ConfigurationError for an invalid one."""
    fastavro = _fastavro()
    try:
        return fastavro.parse_schema(json.loads(schema))
    except (*_UNFIT, fastavro.schema.SchemaParseException) as error:
        problem = f"{schema!r:.80} is not an Avro schema: {error}."
        raise ConfigurationError(problem, "Pass one as JSON text.", argument="schema") from None


def _fastavro() -> ModuleType:
    """Return the module; ConfigurationError if it is not installed."""
    fastavro: ModuleType = import_package("Avro", "fastavro", "avro")
    return fastavro


M = TypeVar("M", bound=BaseModel)


@validated
@dataclass(frozen=True, slots=True)
class JsonSerializer:
    """None, booleans, numbers, strings, lists, and dictionaries with strings as keys, as JSON in
    UTF-8 without spaces.

    Dictionaries are written in key order, so that equal ones have equal bytes. Values that JSON
    would change (a tuple, a number as key, NaN) are rejected: what is read equals what was written.
    """

    def to_bytes(self, value: Any) -> bytes:
        """Return the value in JSON with sorted keys. Raises an error if it would not be read as it
        was written.
        """
        try:
            stored = json.dumps(
                value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
            ).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise _rejected_error(
                self, f"{value!r:.80} can't be JSON: {error}.", "Pass what JSON can represent."
            ) from None
        if type(value) is not str and not _is_json(value):
            problem = (
                f"{value!r:.80} would not be read as it was written: JSON has no tuples, and only"
                " strings as keys."
            )
            raise _rejected_error(
                self, problem, "Pass lists, and dictionaries with strings as keys."
            )
        return stored

    def from_bytes(self, stored: bytes) -> Any:
        try:
            return json.loads(stored.decode(), parse_constant=_reject_constant)
        except (ValueError, RecursionError) as error:
            raise unreadable_error(stored, "JSON", str(error)) from None


@validated
@dataclass(frozen=True, slots=True)
class ModelSerializer(Generic[M]):
    """Objects of a pydantic class as JSON, by their fields' aliases; they are validated when read.

    Computed fields and private attributes are omitted. Objects that would be read as something
    else, or could not be read (an excluded field, an alias that is only written, an object of a
    subclass, what a validator rejects), are rejected. As keys, two objects are equal if their JSON
    is.
    """

    model: type[M]

    def __post_init__(self) -> None:
        if not issubclass(self.model, BaseModel):
            next_step = (
                "Pass a subclass of pydantic.BaseModel, or use JsonSerializer() for plain values."
            )
            raise ConfigurationError(
                f"{self.model!r:.80} is not a pydantic class.", next_step, argument="model"
            )

    def to_bytes(self, value: M) -> bytes:
        """Return the model in JSON. Raises an error if it would not be read as it was written."""
        if not isinstance(value, self.model):
            raise _rejected_error(
                self,
                f"{value!r:.80} is not a {self.model.__name__}.",
                f"Pass a {self.model.__name__}.",
            )
        try:
            stored = value.model_dump_json(by_alias=True, round_trip=True, warnings=False).encode()
        except (PydanticSerializationError, UnicodeEncodeError) as error:
            raise _rejected_error(
                self, f"{value!r:.80} can't be JSON: {error}.", "Pass what JSON can represent."
            ) from None
        try:
            read = self.model.model_validate_json(stored)
        except ValidationError as error:
            raise self._changed_error(value, "; ".join(validation_problems(error))) from None
        if value != read and not _is_same_json(value, read):
            raise self._changed_error(value, f"it would be {read!r:.80}")
        return stored

    def from_bytes(self, stored: bytes) -> M:
        """Return the model of stored JSON."""
        try:
            return self.model.model_validate_json(stored)
        except ValidationError as error:
            raise unreadable_error(
                stored, f"a {self.model.__name__}", "; ".join(validation_problems(error))
            ) from None

    def _changed_error(self, value: M, how: str) -> SerializationError:
        """Return the error for an object that would not be read as it was written."""
        return _rejected_error(
            self,
            f"{value!r:.80} would not be read as it was written: {how}.",
            f"Pass a {self.model.__name__} that its JSON describes: finite numbers (or"
            ' ser_json_inf_nan="strings" in its configuration), no excluded field, and aliases'
            " that are read, too.",
        )


def _reject_constant(constant: str) -> NoReturn:
    """Raise ValueError for NaN or Infinity, which Python would accept in JSON."""
    raise ValueError(f"{constant} is not valid JSON")


def _is_same_json(value: Any, read: Any) -> bool:
    """Whether two values are of one class and have equal fields; NaN equals itself."""
    if isinstance(value, BaseModel):
        if type(value) is not type(read):
            return False
        names = [*type(value).model_fields, "model_extra"]
        return all(_is_same_json(getattr(value, name), getattr(read, name)) for name in names)
    if isinstance(value, dict) and isinstance(read, dict):
        return _has_same_items(value, read, _is_same_json)
    if isinstance(value, list | tuple) and type(value) is type(read):
        return _has_same_items(value, read, _is_same_json)
    if isinstance(value, float) and math.isnan(value):
        return repr(read) == repr(value)
    return bool(value == read)


def _is_json(value: Any) -> bool:
    """Whether a value is read from its JSON as it is: dicts with str keys, lists and plain
    values.
    """
    kind = type(value)
    if kind is dict:
        return set(map(type, value)) <= {str} and all(map(_is_json, value.values()))
    if kind is list:
        return all(map(_is_json, value))
    return kind in (str, int, float, bool, type(None))


_SERIALIZERS: Final[dict[str, Serializer[Any]]] = {
    "text": TextSerializer(),
    "json": JsonSerializer(),
    "int": IntegerSerializer(),
    "bytes": BytesSerializer(),
}


def serializer_named(name: str) -> Serializer[Any]:
    """Return the serializer of this name. Raises ConfigurationError for an unknown one."""
    if name not in _SERIALIZERS:
        problem = f"no serializer is named {name!r}: expected {', '.join(_SERIALIZERS)}."
        raise ConfigurationError(
            problem,
            "Choose one of these; in Python you can also pass a Serializer.",
            argument="name",
        )
    return _SERIALIZERS[name]
