"""Classes by name, so that what is stored says "sqlite" and never where the code lies."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name

T = TypeVar("T")


class RegisteredClasses(Generic[T]):
    """Classes of one kind, each under a name; their objects tell their settings by `to_dict()`.

    `kind` names them in errors ("backend of tables"), `call` says how one is registered.
    """

    def __init__(self, kind: str, call: str) -> None:
        self._kind, self._call = kind, call
        self._classes: dict[str, Callable[..., T]] = {}

    def register(self, name: str, made_by: Callable[..., T]) -> None:
        """Make a class known as `name`. It takes, as keywords, what `to_dict()` of its objects gives."""
        known = self._classes.setdefault(check_name("backend", name), made_by)
        if known is not made_by:
            raise ConfigurationError(
                f"the {self._kind} {name!r} is registered already, as {known!r}.",
                "Register it under another name.",
                backend=name,
            )

    def describe(self, made: Any) -> dict[str, Any]:
        """Return an object of a registered class as plain values: {"backend": "sqlite", …}."""
        for name, known in self._classes.items():
            if type(made) is known:
                return {"backend": name, **made.to_dict()}
        raise ConfigurationError(
            f"{type(made).__name__} is no registered {self._kind}; registered are {self._names()}.",
            f"Register it with {self._call}(name, class).",
            backend=type(made).__name__,
        )

    def made_from(self, description: Mapping[str, Any]) -> T:
        """Return the object that `describe` described."""
        settings = dict(description)
        name = settings.pop("backend", None)
        if name not in self._classes:
            raise ConfigurationError(
                f"what is stored names the {self._kind} {name!r}; registered are {self._names()}.",
                f"Import what registers it, or register it with {self._call}(name, class) before it is read.",
                backend=str(name),
            )
        make = self._classes[name]
        signature = inspect.signature(make)
        try:
            signature.bind(**settings)
        except TypeError as error:
            raise ConfigurationError(
                f"the {self._kind} {name!r} can't be made of its settings: {error}.",
                f"It takes {', '.join(signature.parameters)}.",
                argument="backend",
                backend=str(name),
            ) from None
        return make(**settings)

    def _names(self) -> str:
        return ", ".join(sorted(self._classes)) or "none"
