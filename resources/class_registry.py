"""Registries of classes whose objects are stored by a name and settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name

T = TypeVar("T")


class ClassRegistry(Generic[T]):
    """Classes of one kind, each registered under a name. Their objects are stored as this name and
    their settings.

    `kind` names the classes in errors ("backend of tables"), `call` is the public function that
    registers one. The settings are what an object's `to_dict()` returns. Adjunct's own classes are
    given as name="module.Class", and imported only when a stored document names them.
    """

    def __init__(self, kind: str, call: str, **ours: str) -> None:
        self._kind = kind
        self._call = call
        self._ours = {name: f"dagster_adjunct.{path}" for name, path in ours.items()}
        self._classes: dict[str, Callable[..., T]] = {}

    def register(self, name: str, factory: Callable[..., T]) -> None:
        """Register a class under `name`. It must accept the items of its `to_dict()` as keyword
        arguments.

        Registering it again does nothing. Raises ConfigurationError if another class has the name.
        """
        known = self._find(check_name("backend", name))
        if known is None:
            known = self._classes.setdefault(name, factory)
        if known is not factory:
            problem = f"the {self._kind} {name!r} is already registered, as {known!r}."
            raise ConfigurationError(problem, "Register it under another name.", backend=name)

    def describe(self, item: Any) -> dict[str, Any]:
        """Return an object of a registered class as plain values: {"backend": "sqlite", …}.

        Raises ConfigurationError for an object of another class.
        """
        # Adjunct's own classes are compared by their paths, without importing them
        path = f"{type(item).__module__}.{type(item).__qualname__}"
        for name, known in [*self._ours.items(), *self._classes.items()]:
            if known in (path, type(item)):
                return {"backend": name, **item.to_dict()}
        problem = (
            f"{type(item).__name__} is not a registered {self._kind}; registered are"
            f" {self._names()}."
        )
        raise ConfigurationError(
            problem, f"Register it with {self._call}(name, class).", backend=type(item).__name__
        )

    def from_description(self, description: Mapping[str, Any]) -> T:
        """Return a new object with the class and settings that `describe` has returned. Raises
        ConfigurationError if no class has the name, or the class rejects the settings.
        """
        settings = dict(description)
        name = settings.pop("backend", None)
        make = self._find(str(name))
        if make is None:
            problem = (
                f"a stored document names the {self._kind} {name!r}, which is not registered;"
                f" registered are {self._names()}."
            )
            step = (
                f"Import the module that registers it, or call {self._call}(name, class) before"
                " reading it."
            )
            raise ConfigurationError(problem, step, backend=str(name))
        signature = inspect.signature(make)
        try:
            signature.bind(**settings)
        except TypeError as error:
            problem = f"the {self._kind} {name!r} rejects its stored settings: {error}."
            step = f"It accepts {', '.join(signature.parameters)}."
            raise ConfigurationError(problem, step, argument="backend", backend=str(name)) from None
        return make(**settings)

    def _find(self, name: str) -> Callable[..., T] | None:
        """Return the class registered under a name, None if there is none."""
        if name not in self._ours:
            return self._classes.get(name)
        module, _, cls = self._ours[name].rpartition(".")
        found: Callable[..., T] = getattr(import_module(module), cls)
        return found

    def _names(self) -> str:
        """Return the registered names, for errors."""
        return ", ".join(sorted({*self._ours, *self._classes}))
