"""Backends of key-value tables by name, so that what is stored says "sqlite" and never where the code lies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.key_value.table_segment import SegmentBackend
from dagster_adjunct.resources.names import check_name

_BACKENDS: dict[str, Callable[..., SegmentBackend]] = {}


def register_segment_backend(name: str, backend: Callable[..., SegmentBackend]) -> None:
    """Make a class known as `name`. It takes, as keywords, what `to_dict()` of its objects gives."""
    known = _BACKENDS.setdefault(check_name("backend", name), backend)
    if known is not backend:
        raise ConfigurationError(
            f"the backend of key-value tables {name!r} is registered already, as {known!r}.",
            "Register it under another name.",
            backend=name,
        )


def describe_backend(backend: SegmentBackend) -> dict[str, Any]:
    """Return a registered backend as plain values: {"backend": "sqlite", …}."""
    for name, known in _BACKENDS.items():
        if type(backend) is known:
            return {"backend": name, **backend.to_dict()}
    raise ConfigurationError(
        f"{type(backend).__name__} is no registered backend of key-value tables; registered are {_names()}.",
        "Register it with register_segment_backend(name, class).",
        backend=type(backend).__name__,
    )


def backend_from(description: Mapping[str, Any]) -> SegmentBackend:
    """Return the backend that `describe_backend` described."""
    settings = dict(description)
    name = settings.pop("backend", None)
    if name not in _BACKENDS:
        raise ConfigurationError(
            f"a key-value table lies in the backend {name!r}; registered are {_names()}.",
            "Import what registers it, or register it with register_segment_backend(name, class).",
            backend=str(name),
        )
    make = _BACKENDS[name]
    signature = inspect.signature(make)
    try:
        signature.bind(**settings)
    except TypeError as error:
        raise ConfigurationError(
            f"the backend {name!r} of key-value tables can't be made of its settings: {error}.",
            f"It takes {', '.join(signature.parameters)}.",
            argument="backend",
        ) from None
    return make(**settings)


def _names() -> str:
    return ", ".join(sorted(_BACKENDS)) or "none"
