"""What a step has its batches computed by: it is asked what a batch will do, and runs the batch once it is begun."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from dagster_adjunct.orchestration.step.compile_batch import run_batch
from dagster_adjunct.orchestration.step.verify_plan import analyze_batch
from dagster_adjunct.resources.spark.in_process import resolve_session
from dagster_adjunct.resources.spark.tuning import prewarm_workers

if TYPE_CHECKING:
    from dagster_adjunct.assets.declaration.dataset import AdjunctDataset
    from dagster_adjunct.assets.reading.version_reader import VersionReader
    from dagster_adjunct.assets.unbounded.transient import TransientVersion
    from dagster_adjunct.orchestration.step.compile_batch import BatchMetrics
    from dagster_adjunct.orchestration.step.context import BatchInputs, StepContext
    from dagster_adjunct.orchestration.step.verify_plan import PhysicalProof
    from dagster_adjunct.resources.streams.system import SystemStreamPartition

if TYPE_CHECKING:
    Views = Mapping[str, VersionReader | TransientVersion | None]


class BatchEngine(Protocol):
    """Computes batches. What it is given is decided and committed by the step, which calls it once for each."""

    def analyze(
        self,
        context: StepContext,
        views: Views,
        starts: Mapping[SystemStreamPartition, str],
        on_state: Callable[[AdjunctDataset], object],
    ) -> PhysicalProof:
        """Return what is proven of the batch that comes next, over these versions; refuse what it could not end with.

        Nothing is read or written. `on_state` is told of each table of state that the batch writes.
        """

    def run(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> BatchMetrics:
        """Write every output of a batch, to streams and local tables once if it is repeated; return what was counted.

        `before_output` is called with the output's name before anything is written to it, and raises where the run may
        not go on.
        """


class SparkEngine:
    """Compiles the operators to DataFrames, and has the run's session compute them."""

    __slots__ = ()

    def analyze(
        self,
        context: StepContext,
        views: Views,
        starts: Mapping[SystemStreamPartition, str],
        on_state: Callable[[AdjunctDataset], object],
    ) -> PhysicalProof:
        """See `BatchEngine`. Workers for the tasks that write outputs are started beside it."""
        prewarm_workers(resolve_session(context.spark))
        return analyze_batch(context, views, starts, on_state)

    def run(self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]) -> BatchMetrics:
        """See `BatchEngine`."""
        return run_batch(context, inputs, before_output)


SPARK_ENGINE: Final = SparkEngine()
