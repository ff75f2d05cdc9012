"""How far an application has come, as a sensor finds it by several looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.batch_log.batch_log import BatchLog
from dagster_adjunct.orchestration.step.progress import (
    describe_unfinished,
    ignore_disabled_startpoints,
    list_dataset_streams,
    measure_stream_progress,
    position_to_json,
    read_stream_ends,
    snapshot_system,
)

if TYPE_CHECKING:
    from dagster_adjunct import Application, Lake
    from dagster_adjunct.resources.streams.system import StreamSystem


@dataclass(frozen=True, slots=True)
class InputProgress:
    """`lag` counts the offsets that are to be read, over all input partitions and replays under
    way.

    `position` is where the application stands, in JSON-able values: it changes when a run gets on,
    or when what feeds its datasets does. `due` says what a run is needed for, however little waits:
    positions to be stored before records come, a batch or a replay to be finished, a stream that is
    not what it was.
    """

    lag: int
    position: Mapping[str, object]
    due: tuple[str, ...] = ()


def input_progress(
    lake: Lake, systems: Mapping[str, StreamSystem], app: Application
) -> InputProgress:
    """Return how far the application has come; a stream that does not exist yet counts for
    nothing.
    """
    state = ignore_disabled_startpoints(app, BatchLog(lake, app.name).read()[1])
    inputs = [
        measure_stream_progress(snapshot_system(systems, name), source, state)
        for name, source in app.inputs.items()
    ]
    ends = {
        name: read_stream_ends(snapshot_system(systems, name), name)
        for name in list_dataset_streams(app)
    }
    due = (*describe_unfinished(state), *(progress.due for progress in inputs if progress.due))
    return InputProgress(
        sum(progress.lag for progress in inputs),
        {**position_to_json(app, state), "ends": ends},
        due,
    )
