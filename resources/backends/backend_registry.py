"""Backends by name, so that what is stored says "sqlite" and never where the code lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name

_BACKENDS: dict[str, Callable[..., Any]] = {}


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Make `backend` known as `name`. It takes, as keywords, what its `to_dict()` gives."""
    known = _BACKENDS.setdefault(check_name("backend", name), backend)
    if known is not backend:
        raise ConfigurationError(
            f"backend {name!r} is registered already, as {known!r}.", "Register it under another name.", backend=name
        )


def describe(function: Any) -> dict[str, Any]:
    """The declaration of a registered function as plain values: {"backend": "sqlite", …}."""
    for name, backend in _BACKENDS.items():
        if type(function) is backend:
            return {"backend": name, **function.to_dict()}
    raise ConfigurationError(
        f"{type(function).__name__} is no registered backend; registered are {_names()}.",
        "Register it with register_backend(name, class).",
        backend=type(function).__name__,
    )


def function_from(description: Mapping[str, Any]) -> Any:
    """The function that `describe` described, closed."""
    settings = dict(description)
    name = settings.pop("backend", None)
    if name not in _BACKENDS:
        raise ConfigurationError(
            f"a table's description names the backend {name!r}; registered are {_names()}.",
            "Register it with register_backend(name, class) before it is read, or correct the name.",
            backend=str(name),
        )
    return _BACKENDS[name](**settings)


def _names() -> str:
    return ", ".join(sorted(_BACKENDS)) or "none"
