"""A batch engine for tests that are about the step itself: what a batch does is theirs, and
nothing is proven.
"""

from __future__ import annotations

from collections.abc import Callable

from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.physical_plan import PhysicalProof
from dagster_adjunct.orchestration.step.step import BatchEngine


class StubEngine(BatchEngine):
    """Computes nothing: `run` is the test's own. `rehearsed` is called before a batch is begun."""

    rehearsed: Callable[[], object] = staticmethod(lambda: None)

    def analyze(self, *given: object) -> PhysicalProof:
        self.rehearsed()
        return PhysicalProof()

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        raise NotImplementedError
