"""The interface through which the step has its batches checked and computed, and its Spark implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
from dagster_adjunct.assets.reading.version_reader import VersionReader
from dagster_adjunct.assets.unbounded.transient import TransientVersion
from dagster_adjunct.orchestration.step.compile_batch import BatchMetrics, run_batch
from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
from dagster_adjunct.orchestration.step.verify_plan import PhysicalProof, analyze_batch
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tuning import prewarm_workers
from dagster_adjunct.resources.streams.system import SystemStreamPartition

if TYPE_CHECKING:
    Views = Mapping[str, VersionReader | TransientVersion | None]


class BatchEngine(Protocol):
    """Checks and computes batches; the step decides and commits what they read."""

    def analyze(
        self,
        context: StepContext,
        views: Views,
        starts: Mapping[SystemStreamPartition, str],
        on_state: Callable[[AdjunctDataset], object],
    ) -> PhysicalProof:
        """Return what is proven of a batch over these versions; raise for one that could not finish.

        Nothing is read or written. `on_state` receives each state table that the batch writes.
        """

    def run(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> BatchMetrics:
        """Write every output of a batch and return its counters; streams and local tables ignore a repeated batch.

        `before_output` is called with the output's name before anything is written to it, and raises if the run may not
        continue.
        """


class SparkEngine:
    """Compiles the operators to DataFrames and runs them in the run's Spark session."""

    __slots__ = ()

    def analyze(
        self,
        context: StepContext,
        views: Views,
        starts: Mapping[SystemStreamPartition, str],
        on_state: Callable[[AdjunctDataset], object],
    ) -> PhysicalProof:
        """See `BatchEngine`. Also starts the Python workers that the output tasks will need."""
        prewarm_workers(resolve_session(context.spark))
        return analyze_batch(context, views, starts, on_state)

    def run(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> BatchMetrics:
        """See `BatchEngine`."""
        return run_batch(context, inputs, before_output)


SPARK_ENGINE: Final = SparkEngine()
