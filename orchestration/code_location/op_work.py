"""Does the work of an op: in its process, or in a Spark application that it submits."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from dagster_adjunct.assets.generation import Runtime
from dagster_adjunct.orchestration.batch_log.run_lease import this_process
from dagster_adjunct.orchestration.code_location import metadata
from dagster_adjunct.orchestration.code_location.checks import OpRun
from dagster_adjunct.orchestration.code_location.dagster_internals import allow_missing_events
from dagster_adjunct.orchestration.code_location.resources import SparkResource
from dagster_adjunct.orchestration.code_location.submission import (
    SECRET_REFERENCE,
    Exchange,
    Host,
    Inbox,
    Order,
)
from dagster_adjunct.resources.errors import AdjunctError
from dagster_adjunct.resources.objects.lake import describe_store
from dagster_adjunct.resources.spark.in_process import session_factory
from dagster_adjunct.resources.spark.tasks import lost_process_error
from dagster_adjunct.resources.streams.system import StreamSystem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T = TypeVar("T")


def run_work(
    op: OpRun,
    spark: SparkResource,
    work: Callable[[Host], T],
    handlers: Mapping[str, Callable[[Any], object]],
    open_systems: Callable[..., Mapping[str, StreamSystem]],
    *,
    few_in_process: bool,
    submit_at_once: bool = False,
) -> T:
    """Do the work and return its result; `handlers` receive what it tells, by name.

    If the resource `spark` submits applications, the work is done in one: with `submit_at_once`
    from the start, else from when it asks for a session. It then begins again in the application,
    as after a crash. There, `open_systems` opens the stream systems, given `lake`.
    """
    context = op.context

    def tell(name: str, value: object) -> None:
        handlers[name](value)

    local = Host(
        Runtime(
            op.lake, op.systems, session_factory(spark.starter), context.run.run_id, few_in_process
        ),
        tell,
        partial(metadata.has_ended, context.instance),
    )
    if not spark.services:
        return work(local)
    if not submit_at_once:
        with suppress(HandedToSpark):
            return work(replace(local, runtime=replace(local.runtime, spark=_ask_for_application)))
    service, settings = spark.submission(op.lake.url)
    spark.stop()  # its executors may have the cores that the application needs
    with ExitStack() as stack:
        if service.is_remote:
            exchange = Exchange(
                op.lake.store, f"exchanges/{context.run.run_id}-{uuid.uuid4().hex[:8]}/"
            )
        else:
            folder = stack.enter_context(
                TemporaryDirectory(prefix="adjunct-", ignore_cleanup_errors=True)
            )
            exchange = Exchange(describe_store(folder).open(), "")
        inbox = Inbox(exchange, handlers, with_output=service.is_remote)
        order = Order(
            work,
            open_systems,
            op.lake,
            context.run.run_id,
            few_in_process,
            # The driver of spark-submit gets the settings from a file.
            _without_references(settings) if service.is_remote else {},
            this_process(),
        )
        stack.enter_context(exchange.offering(order))
        try:
            service.run(context, inbox, exchange, settings)
        except Exception as error:
            inbox.raise_error(error)
            if inbox.is_open:
                found = error.problem if isinstance(error, AdjunctError) else str(error)
                raise lost_process_error(
                    f"the driver of the Spark application ended early: {found.rstrip('.')}."
                ) from error
            if not inbox.results:
                raise
            context.log.warning(f"The application has ended with a result, but: {error}")
        finally:
            # Pipes requires an event for each output, but the op yields its own, for the outputs
            # that are made.
            allow_missing_events(context)
    inbox.raise_error(None)
    if not inbox.results:
        raise lost_process_error("the driver of the Spark application ended without a result.")
    result: T = inbox.results[0]
    return result


def _without_references(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings without references to secrets: the service has passed the secrets to
    the driver.
    """
    found = {}
    for name, value in settings.items():
        if not value.startswith(SECRET_REFERENCE):
            found[name] = value
    return found


class HandedToSpark(BaseException):
    """Ends work in the op's process that asks for a Spark session. A BaseException, so that no
    `except Exception` takes it for an error."""


def _ask_for_application() -> SparkSession:
    """Stand for the Spark session of work that a submitted application has to do."""
    raise HandedToSpark
