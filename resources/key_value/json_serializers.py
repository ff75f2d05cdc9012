"""Keys and values as JSON: `JsonSerializer` for what JSON has, `ModelSerializer` for pydantic models."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.serializers import unreadable
from dagster_adjunct.resources.key_value_errors import SerializationError
from dagster_adjunct.resources.stored_documents import problems

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class JsonSerializer:
    """None, truths, numbers, texts, lists, and dictionaries whose keys are texts, as JSON in UTF-8 without blanks.

    Dictionaries are written by their keys' order, so that equal ones have equal bytes. What JSON would change on its
    way (a tuple, a key that is a number, NaN) is refused: what is read equals what was written.
    """

    def to_bytes(self, value: Any) -> bytes:
        try:
            stored = json.dumps(
                value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":")
            ).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise SerializationError(
                f"{value!r:.80} can't be JSON: {error}.", "Give what JSON has.", serializer=type(self).__name__
            ) from None
        if type(value) is not str and not _is_json(value):
            raise SerializationError(
                f"{value!r:.80} would not be read as it was written: JSON has no tuples, and only texts as keys.",
                "Give lists, and dictionaries whose keys are texts.",
                serializer=type(self).__name__,
            )
        return stored

    def from_bytes(self, stored: bytes) -> Any:
        try:
            return json.loads(stored.decode(), parse_constant=_refused)
        except (ValueError, RecursionError) as error:
            raise unreadable(stored, "JSON", str(error)) from None


@dataclass(frozen=True, slots=True)
class ModelSerializer(Generic[M]):
    """Objects of a pydantic class as JSON, by their fields' aliases; what is read is validated.

    Computed fields and private attributes are left out. What would be read as something else, or could not be read
    (an excluded field, an alias that is only written, an object of a subclass, what a validator refuses), is refused.
    As keys: two objects are one key where their JSON is the same.
    """

    model: type[M]

    def __post_init__(self) -> None:
        if not isinstance(self.model, type) or not issubclass(self.model, BaseModel):
            raise ConfigurationError(
                f"{self.model!r:.80} is no pydantic class.",
                "Give a subclass of pydantic.BaseModel; JsonSerializer() takes what JSON has.",
                argument="model",
            )

    def to_bytes(self, value: M) -> bytes:
        if not isinstance(value, self.model):
            raise SerializationError(
                f"{value!r:.80} is no {self.model.__name__}.",
                f"Give a {self.model.__name__}.",
                serializer=type(self).__name__,
            )
        try:
            stored = value.model_dump_json(by_alias=True, round_trip=True, warnings=False).encode()
        except (PydanticSerializationError, UnicodeEncodeError) as error:
            raise SerializationError(
                f"{value!r:.80} can't be JSON: {error}.", "Give what JSON has.", serializer=type(self).__name__
            ) from None
        try:
            read = self.model.model_validate_json(stored)
        except ValidationError as error:
            self._changed(value, "; ".join(problems(error)))
        if value != read and not _equal(value, read):
            self._changed(value, f"it would be {read!r:.80}")
        return stored

    def from_bytes(self, stored: bytes) -> M:
        try:
            return self.model.model_validate_json(stored)
        except ValidationError as error:
            raise unreadable(stored, f"a {self.model.__name__}", "; ".join(problems(error))) from None

    def _changed(self, value: M, how: str) -> NoReturn:
        raise SerializationError(
            f"{value!r:.80} would not be read as it was written: {how}.",
            f"Give a {self.model.__name__} that its JSON describes: finite numbers (or "
            'ser_json_inf_nan="strings" in its configuration), no excluded field, and aliases that are read, too.',
            serializer=type(self).__name__,
        )


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _equal(value: Any, read: Any) -> bool:
    """Return whether two values are of one class and have equal fields; NaN equals itself."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        return (
            type(value) is type(read)
            and all(_equal(getattr(value, name), getattr(read, name)) for name in fields)
            and _equal(value.model_extra, read.model_extra)
        )
    if isinstance(value, dict) and isinstance(read, dict):
        return value.keys() == read.keys() and all(_equal(item, read[name]) for name, item in value.items())
    if isinstance(value, list | tuple) and type(value) is type(read):
        return len(value) == len(read) and all(map(_equal, value, read))
    return bool(value == read) or (isinstance(value, float) and math.isnan(value) and repr(read) == repr(value))


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(name) is str and _is_json(item) for name, item in value.items())
    if kind is list:
        return all(map(_is_json, value))
    return kind in (str, int, float, bool, type(None))
