"""Opens stream systems by name: the lake's own, and those that were registered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.streams.system import LAKE, registered_systems

if TYPE_CHECKING:
    from dagster_adjunct.resources.objects.lake import Lake
    from dagster_adjunct.resources.streams.system import StreamSystem, SystemFactory


def open_system(name: str, lake: Lake) -> StreamSystem:
    """Return the system registered as `name`; `lake` is where Adjunct keeps what the system itself can't."""
    systems = _systems()
    if name not in systems:
        raise ConfigurationError(
            f"there is no stream system {name!r}: there are {', '.join(sorted(systems))}.",
            "Check the name before the dot, or call register_system first.",
            system=name,
        )
    return systems[name](lake)


def _systems() -> dict[str, SystemFactory]:
    return {LAKE: _lake, **registered_systems()}


def _lake(lake: Lake) -> StreamSystem:
    from dagster_adjunct.resources.streams.lake.streams import LakeStreams

    return LakeStreams(lake)
