"""The stream systems that users register, by name. The lake's own is always there: `streams/registry.py` opens both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake

Factory = Callable[["Lake"], StreamSystem]
LAKE = "lake"
_registered: dict[str, Factory] = {}


def register_system(name: str, factory: Factory) -> None:
    """Make `name` a system: `factory(lake)` gives its StreamSystem. The same factory may register again."""
    check_name("system", name)
    if name == LAKE or _registered.setdefault(name, factory) is not factory:
        raise ConfigurationError(
            f"stream system {name!r} is registered already.", "Register the second one under another name.", system=name
        )


def registered_systems() -> Mapping[str, Factory]:
    """Return what was registered."""
    return _registered
