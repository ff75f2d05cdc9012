"""Serializers by name, for where a value can only be written down: options of commands, configuration of resources."""

from __future__ import annotations

from typing import Any, Final

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.json_serializers import JsonSerializer
from dagster_adjunct.resources.key_value.serializers import (
    BytesSerializer,
    IntegerSerializer,
    Serializer,
    TextSerializer,
)

_SERIALIZERS: Final[dict[str, Serializer[Any]]] = {
    "text": TextSerializer(),
    "json": JsonSerializer(),
    "int": IntegerSerializer(),
    "bytes": BytesSerializer(),
}


def serializer_named(name: str) -> Serializer[Any]:
    """Return the serializer of this name. Raises ConfigurationError for one that is not known."""
    if name not in _SERIALIZERS:
        raise ConfigurationError(
            f"no serializer is named {name!r}: expected {', '.join(_SERIALIZERS)}.",
            "Write one of them; others are given as objects, where Python opens the table.",
            argument="name",
        )
    return _SERIALIZERS[name]
