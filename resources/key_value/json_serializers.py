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
            raise SerializationError(f"{value!r:.80} can't be JSON: {error}.", "Give what JSON has.") from None
        if type(value) is not str and not _is_json(value):
            raise SerializationError(
                f"{value!r:.80} would not be read as it was written: JSON has no tuples, and only texts as keys.",
                "Give lists, and dictionaries whose keys are texts.",
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

    Computed fields are left out. As keys: two objects are one key where their JSON is the same.
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
            raise SerializationError(f"{value!r:.80} is no {self.model.__name__}.", f"Give a {self.model.__name__}.")
        try:
            stored = value.model_dump_json(by_alias=True, round_trip=True).encode()
            # pydantic writes these as null, unless the model says otherwise, and would read null.
            lost = b"null" in stored and self.model.model_config.get("ser_json_inf_nan", "null") == "null"
            if lost and _not_finite(value.model_dump(round_trip=True)):
                raise SerializationError(
                    f"{value!r:.80} would not be read as it was written: JSON has no NaN and no infinity.",
                    'Give finite numbers, or None; or set ser_json_inf_nan="strings" in the model\'s configuration.',
                )
        except (PydanticSerializationError, UnicodeEncodeError) as error:
            raise SerializationError(f"{value!r:.80} can't be JSON: {error}.", "Give what JSON has.") from None
        return stored

    def from_bytes(self, stored: bytes) -> M:
        try:
            return self.model.model_validate_json(stored)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise unreadable(stored, f"a {self.model.__name__}", problems) from None


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _not_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_not_finite, value.values()))
    return isinstance(value, list | tuple | set | frozenset) and any(map(_not_finite, value))


def _is_json(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(name) is str and _is_json(each) for name, each in value.items())
    if kind is list:
        return all(map(_is_json, value))
    return kind in (str, int, float, bool, type(None))
