"""Reports as JSON values, and sums of their counters."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from typing import Any, TypeVar

from pydantic import BaseModel

N = TypeVar("N", int, float)


class Report:
    """Base of dataclasses that report what was done, found or planned; programs read them as
    JSON.
    """

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return _fields_to_json(self)


def to_json_value(value: Any) -> Any:
    """Return a value in a form that JSON can hold.

    Times become ISO text, durations seconds, binary values base64. Decimals, NaN and infinities
    become text, as do objects whose class defines `__str__`, such as partitions.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):  # float() makes those of NumPy plain
        if math.isfinite(value):
            return float(value)
        return str(float(value))
    for kind, convert in _CONVERSIONS.items():
        if isinstance(value, kind):
            return convert(value)
    if hasattr(value, "to_json"):
        return value.to_json()
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return to_json_value(value.item())
    if is_dataclass(value) and type(value).__str__ is object.__str__:
        return _fields_to_json(value)
    return str(value)


def format_nested(value: Any) -> str:
    """Return a nested value of user data as JSON in one line, with its parts as `to_json_value`
    returns them.
    """
    return json.dumps(to_json_value(value), allow_nan=False, ensure_ascii=False)


def _items_to_json(value: Iterable[Any]) -> list[Any]:
    return [to_json_value(item) for item in value]


def _mapping_to_json(value: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(key): to_json_value(item) for key, item in value.items()}


_CONVERSIONS: Mapping[Any, Callable[[Any], Any]] = {
    (bytes, bytearray): lambda value: base64.b64encode(value).decode(),
    datetime: lambda value: value.isoformat().replace("+00:00", "Z"),
    timedelta: timedelta.total_seconds,
    BaseModel: lambda value: value.model_dump(mode="json"),
    Mapping: _mapping_to_json,
    (list, tuple, set, frozenset): _items_to_json,
}


def _fields_to_json(value: Any) -> dict[str, Any]:
    return {field.name: to_json_value(getattr(value, field.name)) for field in fields(value)}


def sum_counters(before: Mapping[str, N], more: Mapping[str, N]) -> dict[str, N]:
    """Return the sums of two sets of counters, by name; a missing counter is 0."""
    return {name: before.get(name, 0) + more.get(name, 0) for name in {**before, **more}}
