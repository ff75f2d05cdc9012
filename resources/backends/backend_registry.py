"""The backends of tables, by the names that are stored of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dagster_adjunct.resources.registered_classes import RegisteredClasses

_BACKENDS: RegisteredClasses[Any] = RegisteredClasses("backend of tables", "register_backend")


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Make `backend` known as `name`. It takes, as keywords, what its `to_dict()` gives."""
    _BACKENDS.register(name, backend)


def describe(function: Any) -> dict[str, Any]:
    """The declaration of a registered function as plain values: {"backend": "sqlite", …}."""
    return _BACKENDS.describe(function)


def function_from(description: Mapping[str, Any]) -> Any:
    """The function that `describe` described, closed."""
    return _BACKENDS.made_from(description)
