"""Opens stream systems by name: the lake's own, and registered ones."""

from __future__ import annotations

from collections.abc import Iterable

from dagster_adjunct.resources.common import split_stream_name
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.objects.lake import Lake
from dagster_adjunct.resources.streams.system import LAKE, StreamSystem, registered_systems
from dagster_adjunct.resources.validation import validated


@validated
def open_system(lake: Lake, name: str) -> StreamSystem:
    """Return the system registered as `name`; `lake` stores what the system itself can't."""
    if name == LAKE:
        from dagster_adjunct.resources.streams.lake.streams import LakeStreams

        return LakeStreams(lake)
    systems = registered_systems()
    if name not in systems:
        problem = f"there is no stream system {name!r}. Systems: {', '.join(sorted({LAKE, *systems}))}."
        raise ConfigurationError(problem, "Check the part before the dot, or call register_system first.", system=name)
    return systems[name](lake)


def open_systems(lake: Lake, streams: Iterable[str]) -> dict[str, StreamSystem]:
    """Return the systems of these streams ("lake.orders") by name."""
    return {name: open_system(lake, name) for name in {split_stream_name(stream)[0] for stream in streams}}
