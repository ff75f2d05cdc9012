"""`OpRun`: what an asset's op works with."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagster import AssetExecutionContext

if TYPE_CHECKING:
    from dagster_adjunct.assets.versions.advance_report import StageEvent
    from dagster_adjunct.orchestration.step.progress.step_report import StepEvent
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.stream_system import StreamSystem

# For whoever follows a run from outside of Dagster: each record has the event as `adjunct_event`.
_log = logging.getLogger("adjunct.run")


@dataclass(frozen=True, slots=True)
class OpRun:
    """One run of an asset's op, as Dagster has begun it, with the lake and the stream systems that it reads."""

    context: AssetExecutionContext
    lake: "Lake"
    systems: "Mapping[str, StreamSystem]"

    def tell(self, event: "StageEvent | StepEvent") -> None:
        """Log what has just happened: in the run, and in Python's log."""
        self.context.log.info(event.summary())
        _log.info(event.summary(), extra={"adjunct_event": event})
