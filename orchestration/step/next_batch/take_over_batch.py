"""The batch that a crash left open: it is run again as it is written, before anything else is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagster_adjunct.orchestration.step.next_batch.hold_versions import HeldBatch
from dagster_adjunct.resources.errors import OffsetOutOfRangeError
from dagster_adjunct.resources.names import split_stream_name

if TYPE_CHECKING:
    from dagster_adjunct.orchestration.batchlog.batch_log import Intent
    from dagster_adjunct.orchestration.step.context.step_context import StepContext
    from dagster_adjunct.orchestration.step.opened_step.step_run import OpenedStep, StepRun


def take_over(step: OpenedStep, run: StepRun, left_open: Intent) -> HeldBatch:
    """Return somebody's crashed batch, to be run again in the name of this run.

    Raises OffsetOutOfRangeError where one of its streams was made anew meanwhile.
    """
    context = step.context
    _check_same_streams(context, run, left_open)
    step.leases.take(left_open.versions, left_open.over_time, reopened=True)
    records = {
        name: context.systems[split_stream_name(name)[0]].info(split_stream_name(name)[1]).schema
        for name in context.app.inputs
    }
    return HeldBatch(left_open.model_copy(update={"run": context.run}), records)


def _check_same_streams(context: StepContext, run: StepRun, left_open: Intent) -> None:
    before, app = run.logged.state.offsets.streams, context.app.name
    for name, ssp in sorted({ssp.qualified_stream: ssp for ssp in left_open.ranges}.items()):
        identity, info = before.get(name), context.systems[ssp.system].info(ssp.stream)
        if info.is_another(identity):
            raise OffsetOutOfRangeError(
                f"{name} was {info.how_it_came(identity)} (it is {info.identity}, and was {identity}), and batch "
                f"{left_open.batch} of application {app!r} is open over the stream before.",
                f"Give the batch up (adjunct checkpoint abandon {app} --reason …), then say where to "
                f"begin in the new stream: adjunct startpoint set MODULE:APP {name} --oldest --reason ….",
                application=app,
                stream=name,
            )
