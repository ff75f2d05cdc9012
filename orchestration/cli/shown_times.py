"""How far an application has come in the times of its records, as `adjunct checkpoint show` tells it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dagster_adjunct.orchestration.cli.output import show_line, show_table

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.batchlog.checkpoint_history import Checkpoint
    from dagster_adjunct.resources.objects import Lake


def json_times(lake: Lake, app: Application | None, last: Checkpoint) -> dict[str, Any]:
    """Return watermarks and the size of state as JSON-able values; nothing where no input declares event times."""
    from dagster_adjunct.orchestration.step.progress.time_progress import input_times, state_sizes, waited_for

    if not last.times.partitions:
        return {}
    told: dict[str, Any] = {"state": {name: asdict(size) for name, size in state_sizes(lake, last.versions).items()}}
    if app is None:
        return told
    waited = waited_for(app, last.times, lake.now())
    return {
        **told,
        "watermarks": [of_input.to_json() for of_input in input_times(app, last.times, lake.now())],
        "waiting_for": {name: None if ssp is None else str(ssp) for name, ssp in waited.items()},
    }


def show_times(lake: Lake, app: Application | None, last: Checkpoint) -> None:
    """Show watermarks by source partition and by operator, and the size of state; nothing where there is none."""
    from dagster_adjunct.orchestration.step.progress.time_progress import (
        input_times,
        shown_time,
        state_sizes,
        waited_for,
    )

    times = last.times
    if not times.partitions:
        return
    inputs = () if app is None else input_times(app, times, lake.now())
    idle = {ssp for of_input in inputs for ssp in of_input.idle}
    columns = ["partition", "newest record", "watermark", "last active", *(["idle"] if app else [])]
    rows = [
        [
            str(ssp), shown_time(stood.newest), shown_time(stood.watermark), shown_time(stood.active_at),
            *(["yes" if str(ssp) in idle else "no"] if app else []),
        ]
        for ssp, stood in sorted(times.partitions.items())
    ]  # fmt: skip
    show_table("times of records", columns, rows)
    for of_input in inputs:
        show_line(f"{of_input.words()}.")
    if times.operators:
        waited = {} if app is None else waited_for(app, times, lake.now())
        columns = ["operator", "watermark", *(["waits for"] if app else [])]
        marks = [
            [name, shown_time(mark), *([str(waited.get(name) or "-")] if app else [])]
            for name, mark in sorted(times.operators.items())
        ]
        show_table("watermarks of operators", columns, marks)
    if sizes := state_sizes(lake, last.versions):
        held = [[name, size.rows, size.bytes, size.kept_for] for name, size in sizes.items()]
        show_table("state", ["table", "rows", "bytes", "kept for"], held)
