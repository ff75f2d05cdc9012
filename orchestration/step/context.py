"""What a step works with: one planned application, where it runs, and who is to hear of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from dagster_adjunct.orchestration.application.application import Application
    from dagster_adjunct.orchestration.planner import ExecutionPlan
    from dagster_adjunct.orchestration.step.report import StepEvent
    from dagster_adjunct.resources.objects import Lake
    from dagster_adjunct.resources.streams.interface.system import StreamSystem


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a step works with. `run` names who commits; `spark` starts the session when first called.

    `between_batches` is called before each batch is planned but the first of the run: what it brings up to date is met
    by the next batch. `still_ours` raises where the run may not go on: before each batch, each output and each commit.
    It is None for who holds no lease: then another run's commit ends this one, even where it has committed nothing.
    """

    lake: Lake
    systems: Mapping[str, StreamSystem]
    app: Application
    plan: ExecutionPlan
    spark: Callable[[], SparkSession]
    run: str
    on_event: Callable[[StepEvent], None] = lambda event: None
    max_batches: int | None = None
    between_batches: Callable[[], None] = lambda: None
    still_ours: Callable[[], None] | None = None

    def check(self) -> None:
        """Raise where the run may not go on."""
        if self.still_ours is not None:
            self.still_ours()
