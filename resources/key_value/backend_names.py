"""The backends of key-value tables, by the names that are stored of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dagster_adjunct.resources.key_value.table_segment import SegmentBackend
from dagster_adjunct.resources.registered_classes import RegisteredClasses

_BACKENDS: RegisteredClasses[SegmentBackend] = RegisteredClasses(
    "backend of key-value tables", "register_segment_backend"
)


def register_segment_backend(name: str, backend: Callable[..., SegmentBackend]) -> None:
    """Make a class known as `name`. It takes, as keywords, what `to_dict()` of its objects gives."""
    _BACKENDS.register(name, backend)


def describe_backend(backend: SegmentBackend) -> dict[str, Any]:
    """Return a registered backend as plain values: {"backend": "sqlite", …}."""
    return _BACKENDS.describe(backend)


def backend_from(description: Mapping[str, Any]) -> SegmentBackend:
    """Return the backend that `describe_backend` described."""
    return _BACKENDS.made_from(description)
