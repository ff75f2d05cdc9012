"""How a store's function is pickled: closed, as its declaration, and of the class that it has."""

from __future__ import annotations

from typing import Any, TypeVar

F = TypeVar("F")


def as_declared(function: F, base: type[F], settings: dict[str, Any]) -> tuple[Any, ...]:
    """Return what `__reduce__` of `base` returns, so that a subclass stays one and keeps what it has of its own.

    A subclass may be made of other arguments than `base`, so its own `__init__` is not called again.
    """
    known = vars(rebuilt(base, base, settings))
    own = {name: value for name, value in vars(function).items() if name not in known}
    return rebuilt, (type(function), base, settings), own or None


def rebuilt(kind: type[F], base: type[F], settings: dict[str, Any]) -> F:
    function = kind.__new__(kind)
    base.__init__(function, **settings)
    return function
