"""What a batch is planned over: the versions served and the inputs, looked at once and handed on as one value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import look_at_streams
from dagster_adjunct.orchestration.step.next_batch.served_versions import served_now

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.startpoints.positions.stream_snapshots import StreamSnapshot
    from dagster_adjunct.orchestration.startpoints.requests.fan_out import FanOut
    from dagster_adjunct.orchestration.step.next_batch.served_versions import ServedVersions
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep, StepRun
    from dagster_adjunct.resources.schemas.schema import Schema


@dataclass(frozen=True, slots=True)
class Seen:
    """The dataset versions that are served, and the input streams as they stand, by name.

    `handed` is what was fanned out for this run and is still there at its start; None once it has started.
    """

    served: ServedVersions
    handed: FanOut | None
    streams: Mapping[str, StreamSnapshot]

    @property
    def schemas(self) -> dict[str, Schema | None]:
        """The columns of the input streams; None where they are not known."""
        return {name: snapshot.info.schema for name, snapshot in self.streams.items()}


def look(step: OpenedStep, run: StepRun) -> Seen:
    """Return what the next batch is planned over.

    Raises NoSealedVersionError for a dataset that holds its application back and has no version.
    """
    context = step.context
    served = served_now(step)  # before anything is stored: without a version, no position is taken either
    handed = context.fan_out.without_taken_back(step.startpoints.get_fan_outs()) if run.held is None else None
    return Seen(served, handed, look_at_streams(context.systems, context.app.inputs))
