"""How far an application has come, as a sensor finds it by several looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.step.progress import (
    feeding_streams,
    followed_state,
    looked_at,
    position_of,
    stream_ends,
    stream_progress,
    unfinished,
)

if TYPE_CHECKING:
    from dagster_adjunct import Application, Lake
    from dagster_adjunct.resources.streams.system import StreamSystem


@dataclass(frozen=True, slots=True)
class InputProgress:
    """`lag` counts the offsets that are to be read, over all input partitions and replays under way.

    `position` is where the application stands, in JSON-able values: it changes when a run gets on, or when what feeds
    its datasets does. `due` says what a run is needed for, however little waits: positions to be stored before records
    come, a batch or a replay to be finished, a stream that is not what it was.
    """

    lag: int
    position: Mapping[str, object]
    due: tuple[str, ...] = ()


def input_progress(lake: Lake, systems: Mapping[str, StreamSystem], app: Application) -> InputProgress:
    """Return how far the application has come; a stream that does not exist yet counts for nothing."""
    state = followed_state(app, BatchLog(lake, app.name).read()[1])
    inputs = [stream_progress(looked_at(systems, name), source, state) for name, source in app.inputs.items()]
    ends = {name: stream_ends(looked_at(systems, name), name) for name in feeding_streams(app)}
    due = (*unfinished(state), *(progress.due for progress in inputs if progress.due))
    return InputProgress(sum(progress.lag for progress in inputs), {**position_of(app, state), "ends": ends}, due)
