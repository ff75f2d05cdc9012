"""The engines that check and compute batches: Spark, or this process where the results are
certain to be the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.orchestration.application.application import Application
from dagster_adjunct.orchestration.planner.plan import ExecutionPlan
from dagster_adjunct.orchestration.step.batch import read_small_batch, run_batch, run_small_batch
from dagster_adjunct.orchestration.step.context import BatchInputs, BatchMetrics, StepContext
from dagster_adjunct.orchestration.step.dry_run import compare_plans
from dagster_adjunct.orchestration.step.in_process_batch import (
    check_in_process,
    find_spark_need,
    run_in_process,
)
from dagster_adjunct.orchestration.step.kept_entries import EntryCache
from dagster_adjunct.orchestration.step.physical_plan import PhysicalProof
from dagster_adjunct.resources.errors import ConfigurationError
from dagster_adjunct.resources.spark.in_process import IN_PROCESS, is_remote, resolve_session
from dagster_adjunct.resources.spark.tuning import prewarm_workers
from dagster_adjunct.resources.sql.arrow_kernels import NeedsSpark
from dagster_adjunct.resources.tables.shared_rate import list_budgets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class BatchEngine:
    """Checks and computes batches with Spark; the step decides and commits what they read. Tests
    replace it.
    """

    def analyze(self, context: StepContext, inputs: BatchInputs) -> PhysicalProof:
        """Check a batch over these dataset versions in a dry run; return how Spark's plans differ
        from the plan.

        Nothing is read or written. Raises the error of a batch that could not finish. Also starts
        the Python workers that the output tasks will need.
        """
        if context.spark is IN_PROCESS:
            raise _sparks_engine_error(context.plan)
        session = resolve_session(context.spark)
        check_credits(session, context.app)
        prewarm_workers(session)
        return compare_plans(context, inputs)

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        """Write every output of the batch once; return its metrics."""
        if inputs.places:  # this process has read them
            return run_small_batch(context, inputs, before_output)
        small = read_small_batch(context, inputs)
        if small is not None:
            return run_small_batch(context, small, before_output)
        return run_batch(context, inputs, before_output)


class SmallBatchesInProcess(BatchEngine):
    """Computes small batches in this process; other batches with Spark, which is started for the
    first of them.

    For applications whose plan says that none of their operators needs Spark.
    """

    def __init__(self) -> None:
        self._cache = EntryCache()
        # The inputs of the last dry run, until Spark has compiled them, too.
        self._unproven: BatchInputs | None = None

    def analyze(self, context: StepContext, inputs: BatchInputs) -> PhysicalProof:
        """Check a batch in this process; Spark's plans are compared only if Spark computes
        a batch.
        """
        self._unproven = None
        try:
            check_in_process(context, inputs)
        except NeedsSpark:
            # Other columns than planned: in a dataset's version, or since the run began.
            return super().analyze(context, inputs)
        self._unproven = inputs
        return PhysicalProof()

    def run(
        self, context: StepContext, inputs: BatchInputs, before_output: Callable[[str], None]
    ) -> BatchMetrics:
        """Write every output of the batch once, in this process if it can; return its metrics."""
        need = find_spark_need(context, inputs)
        if not need:
            try:
                return run_in_process(context, inputs, before_output, self._cache)
            except NeedsSpark as reason:
                need = str(reason)
                text = f"Spark computes the batch, because of {need}"
                context.report("again", inputs.intent.batch, text=text)
        if context.spark is IN_PROCESS:
            raise no_session_error(context.app.name, [need])
        if self._unproven is not None:
            super().analyze(context, self._unproven).report_differences()
            self._unproven = None
        return super().run(context, inputs, before_output)


def check_credits(session: SparkSession, app: Application) -> None:
    """Raise ConfigurationError if tables have rate limits, and tasks run where they can't ask this
    process for credits.

    That is on the server of a Spark Connect session on another machine.
    """
    limited = list_budgets(app.tables.values())
    if not limited or not is_remote(session):
        return
    if session.conf.get("spark.driver.host") not in ("127.0.0.1", "localhost"):
        raise ConfigurationError(
            f"application {app.name!r} has tables with a rate limit ({limited[0].name}), for which"
            " tasks ask this process. Those of a Spark Connect server on another machine can't"
            " reach it.",
            "Run it with a session of its own (local[*], spark://…), or remove the rate limits.",
            application=app.name,
        )


def no_session_error(application: str, needs: Sequence[str]) -> ConfigurationError:
    """Return the error of an application that needs Spark, and has no session."""
    return ConfigurationError(
        f"application {application!r} needs Spark, and there is no session (the master is none):"
        f" {'; '.join(needs)}.",
        "Run it with another master, such as ADJUNCT_SPARK_MASTER=local[2], which needs Java; or"
        " write it without what needs Spark (adjunct plan MODULE:APP says what does).",
        application=application,
    )


def check_session(runtime: Runtime, plan: ExecutionPlan) -> None:
    """Raise ConfigurationError, before anything is advanced, where an application needs Spark
    and has no session.
    """
    needs = plan.engine.needs_spark
    if runtime.spark is IN_PROCESS and needs:
        raise no_session_error(
            plan.application, [f"{need.operator}: {need.what}" for need in needs]
        )


def _sparks_engine_error(plan: ExecutionPlan) -> ConfigurationError:
    """Return the error of an application whose engine is Spark, and that has no session."""
    operators = [operator.id for operator in plan.operators]
    return ConfigurationError(
        f"application {plan.application!r} needs Spark, and there is no session (the master is"
        f' none): its engine is "spark", which computes {", ".join(operators)} with Spark.',
        'Declare it with engine="auto", or set ADJUNCT_ENGINE=auto, which computes small batches'
        " without Spark; or run it with another master, such as ADJUNCT_SPARK_MASTER=local[2],"
        " which needs Java.",
        application=plan.application,
        operator=operators[0],
        argument="engine",
    )


def choose_engine(context: StepContext) -> BatchEngine:
    """Return the engine of an application's batches."""
    in_process = context.app.engine == "auto" and not context.plan.engine.needs_spark
    return SmallBatchesInProcess() if in_process else BatchEngine()
