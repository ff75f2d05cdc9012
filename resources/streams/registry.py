"""The stream systems that are known, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.names import check_name
from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake

Factory = Callable[["Lake"], StreamSystem]


def _lake(lake: Lake) -> StreamSystem:
    from dagster_adjunct.resources.streams.lake.lake_streams import LakeStreams

    return LakeStreams(lake)


_systems: dict[str, Factory] = {"lake": _lake}


def register_system(name: str, factory: Factory) -> None:
    """Make `name` a system: `factory(lake)` gives its StreamSystem. The same factory may register again."""
    check_name("system", name)
    if _systems.setdefault(name, factory) is not factory:
        raise ConfigurationError(
            f"stream system {name!r} is registered already.", "Register the second one under another name.", system=name
        )


def open_system(name: str, lake: Lake) -> StreamSystem:
    """Return the system registered as `name`; `lake` is where Adjunct keeps what the system itself can't."""
    if name not in _systems:
        raise ConfigurationError(
            f"there is no stream system {name!r}: there are {', '.join(sorted(_systems))}.",
            "Check the name before the dot, or call register_system first.",
            system=name,
        )
    return _systems[name](lake)
