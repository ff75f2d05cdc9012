"""How far an application has come: the lag of its inputs, from the batch log and the streams alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestration.batchlog import BatchLog
from resources.errors import StreamNotFoundError

if TYPE_CHECKING:
    from orchestration.application import Application
    from resources.objects import Lake
    from resources.streams import StreamSystem


@dataclass(frozen=True, slots=True)
class InputProgress:
    """`lag` counts offsets between checkpoint and end, over all input partitions; `ends` are upcoming offsets."""

    lag: int
    ends: dict[str, str]


def input_progress(lake: Lake, systems: Mapping[str, StreamSystem], app: Application) -> InputProgress:
    """Return the lag of the application's inputs; a stream that does not exist yet has none."""
    _, state = BatchLog(lake, app.name).read()
    lag = 0
    ends: dict[str, str] = {}
    for source in app.inputs.values():
        system_name, _, stream = source.stream.partition(".")
        system = systems[system_name]
        try:
            ssps = system.partitions(stream)
        except StreamNotFoundError:
            continue
        upcoming = system.upcoming(ssps)
        fresh = [ssp for ssp in ssps if str(ssp) not in state.checkpoint]
        default = source.default_offset or system.info(stream).default_offset
        starts = system.oldest(fresh) if default == "oldest" else upcoming
        for ssp in ssps:
            start = state.checkpoint.get(str(ssp), starts.get(ssp, upcoming[ssp]))
            lag += system.distance(ssp, start, upcoming[ssp])
            ends[str(ssp)] = upcoming[ssp]
    return InputProgress(lag, ends)
